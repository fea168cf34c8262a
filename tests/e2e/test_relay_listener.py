"""The public listener: what is ours and what is the upstream's, what we refuse ourselves, and how streams end with the process."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import openai
import pytest

from proxy.config import Config
from proxy.downstream import Client
from proxy.listener import CannotListen, Chat
from proxy.upstream import Upstreams
from tests.e2e.relay_wire import (
    Exchange,
    ask,
    chunks,
    connected,
    counted,
    fixed,
    on_uvloop,
    pair,
    plain,
    proxy,
    read_head,
    read_message,
    soon,
)

GET = b"GET /v1/x HTTP/1.1\r\nHost: h\r\n\r\n"
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def answers_itself(upstreams: Upstreams, config: Config) -> Chat:
    async def answer(client: Client) -> None:
        await client.answer(200, "OK", (), b"ours")

    return answer


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        (b"POST /v1/chat/completions", True),
        (b"POST /v1/chat/completions?api-version=1", True),
        (b"POST /chat/completions", True),
        (b"POST http://h/v1/chat/completions", True),
        (b"GET /v1/chat/completions", False),
        (b"OPTIONS /v1/chat/completions", False),
        (b"DELETE /v1/chat/completions", False),
        (b"POST /v1/chat/completions/", False),
        (b"POST /v1/chat/completions/abc", False),
        (b"POST /v1/chat/completions@evil", False),
        (b"POST //v1/chat/completions", False),
        (b"POST /v1/chat%2Fcompletions", False),
        (b"POST /v1/completions", False),
        (b"GET /healthz", False),
        (b"GET /readyz", False),
        (b"GET /metrics", False),
        (b"GET /sessions", False),
    ],
)
@on_uvloop
async def test_only_post_on_the_chat_path_is_ours(line: bytes, ours: bool) -> None:
    async with pair(fixed(plain(b"theirs")), chat=answers_itself) as (_, warmfold):
        got = await ask(warmfold.port, line + b" HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n")
        route = "chat" if ours else "other"
        assert got.body == (b"ours" if ours else b"theirs")
        await counted(warmfold, f'warmfold_requests_total{{route="{route}",status="2xx"}}')


@on_uvloop
async def test_an_offer_of_http2_is_passed_over() -> None:
    async with pair(fixed(plain(b"x"))) as (up, warmfold):
        offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
        assert (await ask(warmfold.port, b"GET /v1/x HTTP/1.1\r\nHost: h\r\n" + offer + b"\r\n")).body == b"x"
    assert up.requests[0].end_to_end() == []


CANARY = b"Authorization: Bearer canary"
INVALID = {
    "control character": b"GET / HTTP/1.1\r\nHost: h\r\n" + CANARY + b"\x00\r\n\r\n",
    "folded header": b"GET / HTTP/1.1\r\nHost: h\r\nX: a\r\n " + CANARY + b"\r\n\r\n",
    "line too long": b"GET / HTTP/1.1\r\nHost: h\r\n" + CANARY + b"x" * 70_000 + b"\r\n\r\n",
    "target too long": b"GET /canary" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: h\r\n\r\n",
    "too many headers": b"GET / HTTP/1.1\r\nHost: h\r\n" + (CANARY + b"\r\n") * 300 + b"\r\n",
    "two framings": b"POST / HTTP/1.1\r\nHost: h\r\n" + CANARY + b"\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: h\r\n" + CANARY + b"\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
    "no host": b"GET / HTTP/1.1\r\n" + CANARY + b"\r\n\r\n",
    "no HTTP": b"canary\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("request_bytes", INVALID.values(), ids=INVALID.keys())
@on_uvloop
async def test_what_is_no_http_is_refused_and_not_quoted(
    request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with pair(fixed(plain())) as (up, warmfold):
        got = await ask(warmfold.port, request_bytes)
        assert (got.status, got.all(b"x-warmfold-error"), up.connections) == (400, [b"invalid_http"], 0)
        assert b"canary" not in got.body
    assert "canary" not in caplog.text


@on_uvloop
async def test_a_fault_of_ours_is_answered_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    def breaks(upstreams: Upstreams, config: Config) -> Chat:
        async def answer(client: Client) -> None:
            raise RuntimeError((await client.read_body()).decode())

        return answer

    async with pair(fixed(plain()), chat=breaks) as (_, warmfold), connected(warmfold.port) as (reader, writer):
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 6\r\n\r\ncanary")
        got = await soon(read_message(reader))
        assert (got.status, got.all(b"x-warmfold-error")) == (500, [b"internal_error"])
        assert b"canary" not in got.body
        writer.write(GET)
        assert (await soon(read_message(reader))).status == 200
    assert "canary" not in caplog.text
    assert "RuntimeError" in caplog.text


@on_uvloop
async def test_pipelined_requests_are_answered_in_order() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(plain(exchange.request.first.split(b" ")[1]))

    async with pair(script) as (_, warmfold), connected(warmfold.port) as (reader, writer):
        writer.write(b"".join(GET.replace(b"/x", b"/%d" % number) for number in range(5)))
        assert [(await soon(read_message(reader))).body for _ in range(5)] == [b"/v1/%d" % n for n in range(5)]


@on_uvloop
async def test_the_sdk_sees_no_difference() -> None:
    whole = {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [],
        "x_unknown": {"kept": True},
    }
    whole["choices"] = [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hé 😀"}}]
    deltas = [
        {**whole, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": word}}]}
        for word in ("h", "é", " 😀")
    ]

    async def script(exchange: Exchange) -> None:
        if not json.loads(exchange.request.body)["stream"]:
            await exchange.send(plain(json.dumps(whole).encode()))
            return
        await exchange.send(SSE)
        for event in (
            b": OPENROUTER PROCESSING\n\n",
            *(b"data: %s\n\n" % json.dumps(d).encode() for d in deltas),
            b"data: [DONE]\n\n",
        ):
            await exchange.send(b"%x\r\n%s\r\n" % (len(event), event))
        await exchange.send(b"0\r\n\r\n")

    async with (
        pair(script) as (_, warmfold),
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{warmfold.port}/v1", api_key="k") as sdk,
    ):
        asked: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        answer = await sdk.chat.completions.create(**asked, stream=False)
        assert answer.choices[0].message.content == "hé 😀"
        assert answer.model_extra == {"x_unknown": {"kept": True}}
        stream = await sdk.chat.completions.create(**asked, stream=True)
        assert [part.choices[0].delta.content async for part in stream] == ["h", "é", " 😀"]
        await counted(warmfold, 'warmfold_relayed_answers_total{ended="complete"}', 2)


@on_uvloop
async def test_a_stream_that_ends_within_the_grace_is_not_cut() -> None:
    go_on = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.send(SSE + b"1\r\na\r\n")
        await soon(go_on.wait())
        await exchange.send(b"1\r\nb\r\n0\r\n\r\n")

    async with pair(script) as (_, warmfold), connected(warmfold.port) as (reader, writer):
        writer.write(GET)
        await soon(read_head(reader))
        async with asyncio.TaskGroup() as group:
            closing = group.create_task(warmfold.listener.close(30))
            await _refused(warmfold.port)
            assert not closing.done()
            go_on.set()
            assert [piece async for piece in chunks(reader)] == [b"a", b"b"]
            await soon(closing)


async def _refused(port: int) -> None:
    """Returns once nobody listens on the port any more."""

    async def until() -> None:
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionError:
                return
            writer.transport.abort()
            await asyncio.sleep(0.005)

    await soon(until())


@on_uvloop
async def test_a_stream_that_outlasts_the_grace_is_cut_and_looks_it() -> None:
    closed = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.send(SSE + b"1\r\na\r\n")
        await exchange.watch()
        closed.set()

    async with pair(script) as (_, warmfold), connected(warmfold.port) as (reader, writer):
        writer.write(GET)
        await soon(read_head(reader))
        await soon(warmfold.listener.close(0.05))
        with pytest.raises(EOFError):
            _ = [piece async for piece in chunks(reader)]
        await soon(closed.wait())


@on_uvloop
async def test_a_port_that_is_taken_and_a_host_that_is_none_are_named() -> None:
    async with pair(fixed(plain())) as (up, warmfold):
        with pytest.raises(
            CannotListen,
            match=rf"^server\.port: cannot listen on 127\.0\.0\.1:{warmfold.port}: address already in use$",
        ):
            async with proxy(up.base_url, server={"port": warmfold.port}):
                pass
        for host in ("nowhere.invalid", "192.0.2.1"):
            with pytest.raises(CannotListen, match=r"^server\.host: [^\n]+$"):
                async with proxy(up.base_url, server={"host": host}):
                    pass


@on_uvloop
async def test_without_the_token_that_it_should_ask_for_it_does_not_open() -> None:
    with pytest.raises(CannotListen, match=r"^server\.client_token_env: "):
        async with proxy("http://127.0.0.1:9/v1", server={"client_token_env": "CLIENT_TOKEN"}):
            pass


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@on_uvloop
async def test_other_apis_pass_as_they_are_and_the_log_says_once_that_nothing_is_done_for_them(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "warmfold")
    body = b'{ "input":"canary" , "messages":[{"role":"user","content":"canary"}] }'
    request = f"POST {path}?beta=true HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    async with pair(fixed(plain(b"theirs")), chat=answers_itself) as (up, warmfold):
        for _ in range(3):
            assert (await ask(warmfold.port, request)).body == b"theirs"
        route = path.removeprefix("/v1/")
        await counted(warmfold, f'warmfold_requests_total{{route="{route}",status="2xx"}}', 3)
        await ask(warmfold.port, request.replace(b"POST", b"GET"))
    assert [(request.first.split()[1], request.body) for request in up.requests] == [
        (f"{path}?beta=true".encode(), body)
    ] * 4
    hints = [line for line in caplog.text.splitlines() if "compacted" in line]
    assert len(hints) == 1
    assert path in hints[0]
    assert "canary" not in caplog.text
