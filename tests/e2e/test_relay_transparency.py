"""What `python -m benchmarks.transparency` asks a process, asked of the listener: no answer differs."""

from __future__ import annotations

import asyncio

from benchmarks.transparency import Case, Message, Provider, cases, compare, differences
from tests.e2e.relay_wire import on_uvloop, proxy


@on_uvloop
async def test_no_request_and_no_answer_differs_from_what_they_are_without_the_proxy() -> None:
    provider = Provider()
    server = await asyncio.start_server(provider.serve, "127.0.0.1", 0, limit=1 << 20)
    port = server.sockets[0].getsockname()[1]
    found: dict[str, list[str]] = {}
    compared: list[Case] = list(cases())
    async with server, proxy(f"http://127.0.0.1:{port}/v1") as warmfold:
        for case in compared:
            if differs := await compare(provider, port, warmfold.port, case):
                found[case.name] = differs
    assert len(compared) > 100
    assert found == {}


def test_each_part_that_differs_is_said() -> None:
    direct = Message(b"HTTP/1.1 200 OK", [(b"A", b"1"), (b"a", b"2"), (b"Connection", b"close")], b"x")
    same = Message(b"HTTP/1.1 200 OK", [(b"X-Warmfold-Session", b"s"), (b"A", b"1"), (b"a", b"2")], b"x")
    assert list(differences("client got", direct, same)) == []
    other = Message(b"HTTP/1.1 200", [(b"a", b"2"), (b"A", b"1")], b"", "broken off")
    said = list(differences("client got", direct, other))
    assert [line.partition(":")[0].removeprefix("client got, ") for line in said] == [
        "first line",
        "headers",
        "body",
        "end",
    ]
