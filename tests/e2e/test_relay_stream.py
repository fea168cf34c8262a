"""Streams: each piece leaves when it comes, a broken one looks broken, and nobody works for a client that has gone."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
import uvloop

from proxy.config import Config
from proxy.downstream import Client
from proxy.listener import Chat
from proxy.relay import Ended, relay
from proxy.upstream import Upstreams
from tests.e2e.certificates import certified
from tests.e2e.relay_wire import (
    Exchange,
    Proxy,
    ask,
    chunks,
    connected,
    counted,
    on_uvloop,
    pair,
    plain,
    proxy,
    read_head,
    run_on,
    soon,
    upstream,
)

GET = b"GET /v1/x HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}"
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@on_uvloop
async def test_each_event_arrives_before_the_next_is_sent() -> None:
    seen = asyncio.Semaphore(0)
    events = [b"data: %d\n\n" % number for number in range(20)]

    async def script(exchange: Exchange) -> None:
        await exchange.send(SSE)
        for event in events:
            await soon(seen.acquire())
            await exchange.send(chunk(event))
        await soon(seen.acquire())
        await exchange.send(b"0\r\n\r\n")

    async with pair(script) as (_, warmfold), connected(warmfold.port) as (reader, writer):
        writer.write(POST)
        head = await soon(read_head(reader))
        assert head.status == 200, "the head is there although no event has been sent"
        seen.release()
        got = []
        async for event in chunks(reader):
            got.append(event)
            seen.release()
        assert got == events
        await counted(warmfold, 'warmfold_relayed_answers_total{ended="complete"}')


@on_uvloop
async def test_an_event_cut_anywhere_is_the_same_event() -> None:
    event = 'data: {"a":"中😀"}\r\n\r\n: ping\n\nevent: x\rdata:y\r\r'.encode()

    async def script(exchange: Exchange) -> None:
        await exchange.send(SSE)
        for byte in event:
            await exchange.send(chunk(bytes([byte])))
            await asyncio.sleep(0)
        await exchange.send(b"0\r\n\r\n")

    async with pair(script) as (_, warmfold):
        assert (await ask(warmfold.port, POST)).body == event


EVENT = b"data: 1\n\n"

BREAKS = {
    "chunked, closed": (SSE + chunk(EVENT), b"", False),
    "chunked, reset": (SSE + chunk(EVENT), b"", True),
    "in the middle of a chunk": (SSE + b"ff\r\n" + EVENT, b"", False),
    "misframed": (SSE + chunk(EVENT), b"no size\r\n", False),
    "fixed length": (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + EVENT, b"", False),
}


@pytest.mark.parametrize(("first", "then", "reset"), BREAKS.values(), ids=BREAKS.keys())
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@on_uvloop
async def test_a_stream_that_breaks_looks_broken_to_the_client(
    first: bytes, then: bytes, reset: bool, version: bytes
) -> None:
    arrived, over = asyncio.Event(), asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.send(first)
        await soon(arrived.wait())
        await exchange.send(then)
        if then:
            await soon(over.wait())
        if reset:
            exchange.writer.transport.abort()
        exchange.writer.close()

    async with pair(script) as (_, warmfold), connected(warmfold.port) as (reader, writer):
        writer.write(GET.replace(b"HTTP/1.1", b"HTTP/" + version))
        head = await soon(read_head(reader))
        assert head.status == 200
        framed = head.all(b"transfer-encoding") or head.all(b"content-length")
        got = await soon(reader.readuntil(EVENT))
        arrived.set()
        assert got.endswith(EVENT)
        if framed:
            assert await soon(reader.read()) in (b"", b"\r\n"), "the answer stops short of its end"
        else:
            # Until-close framing ends with the connection, so only a reset can say that this is not the end.
            with pytest.raises(ConnectionError):
                await soon(reader.read())
        await counted(warmfold, 'warmfold_relayed_answers_total{ended="upstream_broke"}')
        assert warmfold.count('warmfold_upstream_errors_total{kind="broken"}') == 1
        over.set()


@asynccontextmanager
async def watched(
    *, answer: bytes, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[Proxy, asyncio.Event, asyncio.Event]]:
    """A proxy whose upstream sends `answer` and then waits for us to hang up; events for both."""
    reached, closed = asyncio.Event(), asyncio.Event()

    async def script(exchange: Exchange) -> None:
        if answer:
            await exchange.send(answer)
        reached.set()
        await exchange.watch()
        closed.set()

    scheme = "https" if tls else "http"
    async with upstream(script, tls=tls) as up, proxy(f"{scheme}://localhost:{up.port}/v1") as warmfold:
        yield warmfold, reached, closed


LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
POINTS = {"before the first byte": b"", "after the head": SSE, "mid-stream": SSE + chunk(b"data: 1\n\n")}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS.keys())
@pytest.mark.parametrize("answer", POINTS.values(), ids=POINTS.keys())
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
def test_a_client_that_leaves_frees_the_upstream(
    loop: Callable[[], asyncio.AbstractEventLoop], answer: bytes, secure: bool, certificate: ssl.SSLContext
) -> None:
    async def leave() -> None:
        async with watched(answer=answer, tls=certificate if secure else None) as (warmfold, reached, closed):
            async with connected(warmfold.port) as (reader, writer):
                writer.write(POST)
                await soon(reached.wait())
                if answer:
                    await soon(read_head(reader))
            await soon(closed.wait())
            await counted(warmfold, 'warmfold_relayed_answers_total{ended="client_gone"}')
            assert warmfold.count("warmfold_requests_in_flight") == 0
            assert all(
                warmfold.count(f'warmfold_upstream_errors_total{{kind="{kind}"}}') == 0
                for kind in ("broken", "read_timeout")
            )

    run_on(loop, leave())


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """A certificate for localhost that the proxy trusts, because SSL_CERT_FILE names it."""
    cert, context = certified(tmp_path, "localhost")
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    return context


def test_an_unknown_certificate_is_refused(certificate: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")

    async def connect() -> None:
        async with watched(answer=plain(), tls=certificate) as (warmfold, reached, _):
            got = await ask(warmfold.port, GET)
            assert (got.status, got.all(b"x-warmfold-error")) == (502, [b"upstream_unreachable"])
            assert b"certificate" in got.body
            assert not reached.is_set()
            assert not await warmfold.upstreams.probe()

    run_on(uvloop.new_event_loop, connect())


@on_uvloop
async def test_a_client_that_does_not_read_stops_the_upstream() -> None:
    """The upstream would send for ever; what it gets rid of is what the sockets and our two buffers hold."""
    written = 0
    piece = bytes(64 * 1024)
    stuck = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        nonlocal written
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n")
        while True:
            exchange.writer.write(piece)
            drained = asyncio.ensure_future(exchange.writer.drain())
            done, _ = await asyncio.wait({drained}, timeout=0.5)
            if not done:
                stuck.set()
                drained.cancel()
                return
            written += len(piece)

    async with pair(script) as (_, warmfold), connected(warmfold.port) as (reader, writer):
        writer.write(GET)
        await soon(reader.read(1))
        cast(asyncio.Transport, writer.transport).pause_reading()
        await soon(stuck.wait())
    assert written < 64 * 1024 * 1024


@on_uvloop
async def test_a_client_that_takes_nothing_is_let_go() -> None:
    closed = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        exchange.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n" + bytes(50_000_000))
        await exchange.watch()
        closed.set()

    async with pair(script, read_idle_timeout_s=0.2) as (_, warmfold), connected(warmfold.port) as (reader, writer):
        writer.write(GET)
        await soon(reader.read(1))
        cast(asyncio.Transport, writer.transport).pause_reading()
        await soon(closed.wait())
        await counted(warmfold, 'warmfold_relayed_answers_total{ended="client_gone"}')


class Recorder:
    """A tap that keeps what passes, and fails at the second piece if told to."""

    def __init__(self, *, fails: bool = False) -> None:
        self.seen = b""
        self.fed = 0
        self._fails = fails

    def feed(self, data: bytes) -> None:
        self.fed += 1
        if self._fails and self.fed == 2:
            raise RuntimeError("secret words of the answer")
        self.seen += data


class WithoutB:
    """A filter that withholds every b, and the last piece until the end."""

    def feed(self, data: bytes) -> bytes:
        return data.replace(b"b", b"")

    def rest(self) -> bytes:
        return b"!"


@pytest.mark.parametrize("fails", [False, True])
@on_uvloop
async def test_a_tap_sees_everything_and_disturbs_nobody(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    tap = Recorder(fails=fails)
    endings = []

    def chat(upstreams: Upstreams, config: Config) -> Chat:
        async def answer(client: Client) -> None:
            reply = await upstreams.send(await client.read(), config.upstream)
            assert await reply.read(3) == b"abb", "looking into an answer takes nothing from it"
            endings.append(
                await relay(reply, client, tap, headers=(("x-warmfold-compaction", "none"),), keep=WithoutB())
            )

        return answer

    async def script(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\nX: 1\r\n\r\nabb")
        await asyncio.sleep(0.01)
        await exchange.send(b"abbc")

    async with pair(script, chat=chat) as (_, warmfold):
        got = await ask(warmfold.port, POST)
    assert got.headers == [(b"X", b"1"), (b"x-warmfold-compaction", b"none"), (b"Transfer-Encoding", b"chunked")]
    assert (got.body, got.complete, endings) == (b"aac!", True, [Ended.COMPLETE])
    assert tap.seen == (b"abb" if fails else b"abbabbc")
    assert "secret" not in caplog.text


@on_uvloop
async def test_the_ending_reaches_the_caller_as_a_value() -> None:
    endings: asyncio.Queue[Ended] = asyncio.Queue()

    def chat(upstreams: Upstreams, config: Config) -> Chat:
        async def answer(client: Client) -> None:
            ended = await relay(await upstreams.send(await client.read(), config.upstream), client)
            await asyncio.sleep(0)  # what follows a stream may await: the cancellation has been used up
            endings.put_nowait(ended)

        return answer

    async def script(exchange: Exchange) -> None:
        await exchange.send(SSE + chunk(b"data: 1\n\n"))
        await exchange.watch()

    async with pair(script, chat=chat) as (_, warmfold):
        async with connected(warmfold.port) as (reader, writer):
            writer.write(POST)
            await soon(read_head(reader))
        assert await soon(endings.get()) is Ended.CLIENT_GONE
        async with connected(warmfold.port) as (reader, writer):
            writer.write(POST)
            await soon(read_head(reader))
            await warmfold.listener.close(0)
            await soon(reader.read())
    assert endings.empty(), "a stream that we cut at shutdown has no ending: the cancellation goes on"
