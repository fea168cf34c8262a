"""WebSockets: what a client and a server agree on they have, frame by frame, and neither outlives the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import WSMsgType, web
from yarl import URL

from tests.e2e.certificates import certified
from tests.e2e.relay_wire import (
    Exchange,
    Proxy,
    ask,
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
    upstream,
)

Talk = Callable[[web.WebSocketResponse], Awaitable[None]]

UPGRADE = (
    b"GET /v1/realtime?model=a%20b HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer k\r\nOpenAI-Beta: realtime=v1\r\n"
    b"Connection: keep-alive, Upgrade, X-Hop\r\nX-Hop: 1\r\nUpgrade: websocket\r\nX-Warmfold-Mode: off\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
SWITCH = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\nX-A: 1\r\nX-A: 2\r\n\r\n"
)
GET = b"GET /v1/x HTTP/1.1\r\nHost: h\r\n\r\n"


@asynccontextmanager
async def realtime(talk: Talk, **options: Any) -> AsyncIterator[tuple[Proxy, list[web.Request]]]:
    """The proxy in front of a WebSocket server, and the requests that this one got."""
    asked: list[web.Request] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append(request)
        socket = web.WebSocketResponse(**options)
        await socket.prepare(request)
        await talk(socket)
        return socket

    app = web.Application()
    app.router.add_get("/v1/realtime", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with proxy(f"http://127.0.0.1:{runner.addresses[0][1]}/v1") as warmfold:
            yield warmfold, asked
    finally:
        await runner.cleanup()


async def echo(socket: web.WebSocketResponse) -> None:
    async for message in socket:
        if message.type is WSMsgType.TEXT:
            await socket.send_str(message.data)
        else:
            await socket.send_bytes(message.data)


@pytest.mark.parametrize("compress", [0, 15], ids=["plain", "deflated"])
@on_uvloop
async def test_texts_bytes_and_large_frames_come_back_as_they_went(compress: int) -> None:
    texts, blob = ["hé", "中😀", ""], bytes(range(256)) * 8192
    async with (
        realtime(echo, protocols=("b", "realtime"), max_msg_size=0) as (warmfold, asked),
        aiohttp.ClientSession() as http,
        http.ws_connect(
            URL(f"http://127.0.0.1:{warmfold.port}/v1/realtime?model=gpt%2Fx&a=1&a=2", encoded=True),
            protocols=("realtime", "openai-beta.realtime-v1"),
            compress=compress,
            max_msg_size=0,
            headers={"Authorization": "Bearer k"},
        ) as socket,
    ):
        assert (socket.protocol, socket.compress) == ("realtime", compress)
        for text in texts:
            await socket.send_str(text)
            assert await soon(socket.receive_str()) == text
        await socket.send_bytes(blob)
        assert await soon(socket.receive_bytes()) == blob
        await socket.close(code=4001, message=b"done")
        await counted(warmfold, "warmfold_requests_in_flight", 0)
    assert asked[0].raw_path == "/v1/realtime?model=gpt%2Fx&a=1&a=2"
    assert asked[0].headers["Authorization"] == "Bearer k"


@on_uvloop
async def test_pings_and_the_close_code_of_each_side_reach_the_other() -> None:
    seen: list[int | None] = []

    async def talk(socket: web.WebSocketResponse) -> None:
        async for message in socket:
            if message.type is WSMsgType.PING:
                await socket.pong(message.data)
            elif message.data == "leave me":
                await socket.close(code=4002, message=b"as you wish")
        seen.append(socket.close_code)

    async with (
        realtime(talk, autoping=False) as (warmfold, _),
        aiohttp.ClientSession() as http,
    ):
        url = f"http://127.0.0.1:{warmfold.port}/v1/realtime"
        async with http.ws_connect(url, autoping=False) as socket:
            await socket.ping(b"are you there")
            pong = await soon(socket.receive())
            assert (pong.type, pong.data) == (WSMsgType.PONG, b"are you there")
            await socket.close(code=4001)
        async with http.ws_connect(url) as socket:
            await socket.send_str("leave me")
            left = await soon(socket.receive())
            assert (left.data, left.extra) == (4002, "as you wish")
        await counted(warmfold, "warmfold_requests_in_flight", 0)
    assert seen[0] == 4001


@on_uvloop
async def test_the_handshake_passes_but_for_what_concerns_one_hop() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(SWITCH + b"early")
        await exchange.watch()

    async with pair(script, heads_only=True) as (up, warmfold), connected(warmfold.port) as (reader, writer):
        writer.write(UPGRADE)
        got = await soon(read_head(reader))
        assert (got.first, got.end_to_end()) == (
            b"HTTP/1.1 101 Switching Protocols",
            sorted(
                [
                    (b"Sec-WebSocket-Accept", b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="),
                    (b"Upgrade", b"websocket"),
                    (b"X-A", b"1"),
                    (b"X-A", b"2"),
                ]
            ),
        )
        assert got.all(b"connection") == [b"Upgrade"]
        assert await soon(reader.readexactly(5)) == b"early", "what comes on the heels of the 101 is not lost"
    (asked,) = up.requests
    assert asked.first == b"GET /v1/realtime?model=a%20b HTTP/1.1"
    assert asked.all(b"connection") == [b"Upgrade"]
    assert asked.end_to_end() == sorted(
        [
            (b"Authorization", b"Bearer k"),
            (b"OpenAI-Beta", b"realtime=v1"),
            (b"Sec-WebSocket-Key", b"dGhlIHNhbXBsZSBub25jZQ=="),
            (b"Sec-WebSocket-Version", b"13"),
            (b"Upgrade", b"websocket"),
        ]
    )


@on_uvloop
async def test_a_refused_handshake_is_an_answer_like_any_other_and_the_connection_stays_usable() -> None:
    refusal = plain(b'{"error":{"message":"no"}}', b"HTTP/1.1 401 Unauthorized\r\nX-A: 1")
    async with pair(fixed(refusal)) as (_, warmfold), connected(warmfold.port) as (reader, writer):
        for request in (UPGRADE, GET):
            writer.write(request)
            got = await soon(read_message(reader))
            assert (got.status, got.body, got.all(b"x-a")) == (401, b'{"error":{"message":"no"}}', [b"1"])


@pytest.mark.parametrize(
    "request_bytes",
    [UPGRADE.replace(b"Upgrade, ", b""), UPGRADE.replace(b"GET", b"POST"), UPGRADE.replace(b"/1.1", b"/1.0")],
    ids=["not named in Connection", "POST", "HTTP/1.0"],
)
@on_uvloop
async def test_an_upgrade_that_is_none_stays_on_its_hop(request_bytes: bytes) -> None:
    request_bytes = request_bytes.replace(b"\r\n\r\n", b"\r\nContent-Length: 0\r\n\r\n")
    async with pair(fixed(plain(b"x"))) as (up, warmfold):
        assert (await ask(warmfold.port, request_bytes)).body == b"x"
    assert (up.requests[0].all(b"upgrade"), up.requests[0].all(b"connection")) == ([], [])


@pytest.mark.parametrize(
    ("asked", "answer"),
    [(GET, SWITCH), (UPGRADE, b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n")],
    ids=["nothing was asked for", "something else was asked for"],
)
@on_uvloop
async def test_a_switch_that_nobody_asked_for_is_no_answer(asked: bytes, answer: bytes) -> None:
    async with pair(fixed(answer), heads_only=True) as (_, warmfold):
        got = await ask(warmfold.port, asked)
    assert (got.status, got.all(b"x-warmfold-error")) == (502, [b"upstream_broken"])


@on_uvloop
async def test_the_last_bytes_of_either_side_arrive_although_it_has_hung_up_behind_them() -> None:
    heard = bytearray()
    over = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.send(SWITCH)
        heard.extend(await exchange.reader.readexactly(1))
        if heard == b"1":
            await exchange.send(b"goodbye")
            exchange.writer.close()
        else:
            heard.extend(await exchange.reader.read())
            over.set()

    async with pair(script, heads_only=True) as (_, warmfold):
        async with connected(warmfold.port) as (reader, writer):
            writer.write(UPGRADE)
            await soon(read_head(reader))
            writer.write(b"1")
            assert await soon(reader.read()) == b"goodbye"
            await counted(warmfold, 'warmfold_relayed_answers_total{ended="complete"}')
        heard.clear()
        async with connected(warmfold.port) as (reader, writer):
            writer.write(UPGRADE)
            await soon(read_head(reader))
            writer.write(b"2" + bytes(100_000))
            writer.close()
            await soon(over.wait())
            await counted(warmfold, 'warmfold_relayed_answers_total{ended="client_gone"}')
        await counted(warmfold, "warmfold_requests_in_flight", 0)
    assert heard == b"2" + bytes(100_000)


@on_uvloop
async def test_a_client_that_leaves_while_the_handshake_is_pending_frees_the_upstream() -> None:
    reached, closed = asyncio.Event(), asyncio.Event()

    async def script(exchange: Exchange) -> None:
        reached.set()
        await exchange.watch()
        closed.set()

    async with pair(script, heads_only=True) as (_, warmfold):
        async with connected(warmfold.port) as (_, writer):
            writer.write(UPGRADE)
            await soon(reached.wait())
        await soon(closed.wait())


def test_a_busy_upstream_behind_tls_learns_that_the_client_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes without reading, so it sees no goodbye: only a connection that is gone stops it."""
    cert, context = certified(tmp_path, "localhost")
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    over = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.send(SWITCH)
        cast(asyncio.Transport, exchange.writer.transport).pause_reading()
        try:
            while not exchange.writer.transport.is_closing():
                await exchange.send(b"event")
                await asyncio.sleep(0.01)
        except ConnectionError:
            pass
        over.set()

    @on_uvloop
    async def run() -> None:
        async with (
            upstream(script, heads_only=True, tls=context) as up,
            proxy(f"https://localhost:{up.port}/v1") as warmfold,
        ):
            async with connected(warmfold.port) as (reader, writer):
                writer.write(UPGRADE)
                await soon(read_head(reader))
                await soon(reader.readexactly(5))
            await soon(over.wait())

    run()


@pytest.mark.parametrize("slow", ["client", "upstream"])
@on_uvloop
async def test_who_does_not_read_stops_the_other_side_and_gets_everything_in_the_end(slow: str) -> None:
    """The sender is stuck with most of it unsent, and goes on once the other side reads."""
    size = 48 * 1024 * 1024
    stuck, read_on = asyncio.Event(), asyncio.Event()
    got = 0

    async def send(writer: asyncio.StreamWriter) -> None:
        sent = 0
        while sent < size:
            writer.write(bytes(65536))
            sent += 65536
            drained = asyncio.ensure_future(writer.drain())
            if not (await asyncio.wait({drained}, timeout=0.5))[0]:
                stuck.set()
            await drained
        assert stuck.is_set(), "all of it went into buffers"

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal got
        cast(asyncio.Transport, writer.transport).pause_reading()
        await soon(stuck.wait())
        cast(asyncio.Transport, writer.transport).resume_reading()
        while got < size:
            got += len(await reader.read(1 << 20))

    async def script(exchange: Exchange) -> None:
        await exchange.send(SWITCH)
        if slow == "client":
            await send(exchange.writer)
        else:
            await receive(exchange.reader, exchange.writer)
        await read_on.wait()

    async with pair(script, heads_only=True) as (_, warmfold), connected(warmfold.port) as (reader, writer):
        writer.write(UPGRADE)
        await soon(read_head(reader))
        async with asyncio.timeout(60):
            await (receive(reader, writer) if slow == "client" else send(writer))
            while got < size:
                await asyncio.sleep(0.01)
        read_on.set()
    assert got == size


@on_uvloop
async def test_a_client_that_takes_nothing_is_let_go_and_one_that_says_nothing_is_not() -> None:
    closed = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.send(SWITCH)
        await exchange.reader.readexactly(1)
        exchange.writer.write(bytes(50_000_000))
        await exchange.watch()
        closed.set()

    async with (
        pair(script, heads_only=True, read_idle_timeout_s=0.2) as (_, warmfold),
        connected(warmfold.port) as (reader, writer),
    ):
        writer.write(UPGRADE)
        await soon(read_head(reader))
        await asyncio.sleep(0.5)  # more than the limit that holds for an answer
        assert not closed.is_set()
        cast(asyncio.Transport, writer.transport).pause_reading()
        writer.write(b"1")
        await soon(closed.wait())


@on_uvloop
async def test_at_shutdown_both_sides_are_let_go() -> None:
    closed = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.send(SWITCH)
        await exchange.watch()
        closed.set()

    async with pair(script, heads_only=True) as (_, warmfold), connected(warmfold.port) as (reader, writer):
        writer.write(UPGRADE)
        await soon(read_head(reader))
        await soon(warmfold.listener.close(0))
        assert await soon(reader.read()) == b""
        await soon(closed.wait())


@on_uvloop
async def test_a_token_of_ours_is_asked_for_and_the_operators_key_goes_up() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(SWITCH)

    keys = {"environ": {"CLIENT_TOKEN": "k", "KEY": "operators"}, "server": {"client_token_env": "CLIENT_TOKEN"}}
    async with pair(script, heads_only=True, api_key_env="KEY", **keys) as (up, warmfold):
        refused = await ask(warmfold.port, UPGRADE.replace(b"Bearer k", b"Bearer x"))
        assert (refused.status, up.connections) == (401, 0)
        async with connected(warmfold.port) as (reader, writer):
            writer.write(UPGRADE)
            assert (await soon(read_head(reader))).status == 101
    assert up.requests[0].all(b"authorization") == [b"Bearer operators"]
