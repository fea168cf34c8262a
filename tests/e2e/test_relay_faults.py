"""What we answer when the upstream does not: one clear line in OpenAI's shape, marked as ours, with the setting to look at and no secret."""

from __future__ import annotations

import asyncio
import json
import logging
import socket

import openai
import pytest

from tests.e2e.relay_wire import (
    Exchange,
    Message,
    ask,
    connected,
    counted,
    on_uvloop,
    pair,
    plain,
    proxy,
    read_head,
    read_message,
    reads_whole_bodies,
    soon,
)

SECRETS = (b"key-canary", b"query-canary", b"cookie-canary", b"body-canary")
POST = (
    b"POST /v1/chat/completions?key=query-canary HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer key-canary\r\nCookie: c=cookie-canary\r\n"
    b"Content-Length: 15\r\n\r\n" + b'{"body-canary"}'
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"


def said(got: Message, status: int, code: str, setting: str) -> None:
    """The answer is an error of ours, and it gives nothing away."""
    assert (got.status, got.all(b"x-warmfold-error")) == (status, [code.encode()])
    error = json.loads(got.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert setting in error["message"]
    assert not any(secret in got.body for secret in SECRETS)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(autouse=True)
def no_secret_is_logged(caplog: pytest.LogCaptureFixture) -> object:
    caplog.set_level(logging.DEBUG)
    yield
    assert not any(secret.decode() in caplog.text for secret in SECRETS)


@on_uvloop
async def test_nobody_listens() -> None:
    port = free_port()
    async with proxy(f"http://127.0.0.1:{port}/v1") as warmfold:
        got = await ask(warmfold.port, POST)
        said(got, 502, "upstream_unreachable", "upstream.base_url")
        assert f"http://127.0.0.1:{port}: connection refused" in json.loads(got.body)["error"]["message"]
        await counted(warmfold, 'warmfold_upstream_errors_total{kind="unreachable"}')
        assert not await warmfold.upstreams.probe()
        with pytest.raises(openai.InternalServerError, match=r"upstream\.base_url"):
            await _complete(warmfold.port)


@on_uvloop
async def test_the_host_name_leads_nowhere() -> None:
    async with proxy("http://nowhere.invalid/v1") as warmfold:
        said(await ask(warmfold.port, POST), 502, "upstream_unreachable", "cannot be resolved")


@on_uvloop
async def test_the_upstream_does_not_speak_tls() -> None:
    async def speak_plainly(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(speak_plainly, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, proxy(f"https://127.0.0.1:{port}/v1") as warmfold:
        said(await ask(warmfold.port, POST), 502, "upstream_unreachable", "TLS")


@on_uvloop
async def test_the_upstream_does_not_accept() -> None:
    """A full backlog: the kernel answers no further SYN."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        port = deaf.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        async with proxy(f"http://127.0.0.1:{port}/v1", connect_timeout_s=0.2) as warmfold:
            said(await ask(warmfold.port, POST), 504, "upstream_connect_timeout", "upstream.connect_timeout_s")
            assert not await warmfold.upstreams.probe()
        for filler in fillers:
            filler.close()


async def silent(exchange: Exchange) -> None:
    await exchange.watch()


@on_uvloop
async def test_the_upstream_accepts_and_says_nothing() -> None:
    async with pair(silent, read_idle_timeout_s=0.2) as (_, warmfold):
        said(await ask(warmfold.port, POST), 504, "upstream_read_timeout", "upstream.read_idle_timeout_s")


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 50000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n2faf080\r\n"]
)
@pytest.mark.parametrize("held", [False, True])
@on_uvloop
async def test_the_upstream_does_not_take_the_request(framing: bytes, held: bool) -> None:
    stays = asyncio.Event()

    async def script(_: Exchange) -> None:
        await stays.wait()

    chat = reads_whole_bodies if held else None
    async with pair(script, heads_only=True, read_idle_timeout_s=0.3, chat=chat) as (_, warmfold):
        request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\n" + framing + bytes(50_000_000) + b"\r\n0\r\n\r\n"
        said(await ask(warmfold.port, request), 504, "upstream_read_timeout", "upstream.read_idle_timeout_s")


@on_uvloop
async def test_the_upstream_falls_silent_in_the_middle() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(HEAD + b"begun")
        await exchange.watch()

    async with pair(script, read_idle_timeout_s=0.2) as (_, warmfold):
        got = await ask(warmfold.port, POST)
        assert (got.status, got.body, got.complete) == (200, b"begun", False)
        await counted(warmfold, 'warmfold_upstream_errors_total{kind="read_timeout"}')


@on_uvloop
async def test_a_slow_stream_is_no_silent_one() -> None:
    """It takes longer as a whole than the upstream may be silent."""

    async def script(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n")
        for _ in range(8):
            await asyncio.sleep(0.15)
            await exchange.send(b".")

    async with pair(script, read_idle_timeout_s=1) as (_, warmfold):
        assert (await ask(warmfold.port, POST)).body == b"........"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"H",
        b"HTTP/1.1 200 OK\r\nContent-Type: text",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 101 S\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000 + b"\r\nContent-Length: 0\r\n\r\n",
    ],
    ids=["silence", "a byte", "half a head", "SSH", "an upgrade unasked", "a header that is too long"],
)
@on_uvloop
async def test_the_upstream_hangs_up_or_answers_nonsense(answer: bytes) -> None:
    """On a new connection: the request may have run and been paid for, so it is not sent again."""

    async def script(exchange: Exchange) -> None:
        await exchange.send(answer)
        exchange.writer.close()

    async with pair(script) as (up, warmfold):
        said(await ask(warmfold.port, POST), 502, "upstream_broken", "upstream.base_url")
        assert len(up.requests) == 1
        got = await ask(warmfold.port, b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (got.status, len(up.requests)) == (502, 2), "nor is a GET"


@on_uvloop
async def test_an_idle_connection_that_was_closed_meanwhile_costs_no_request() -> None:
    """The keep-alive race: the upstream closes just when the next request is on its way, and never reads that."""

    async def script(exchange: Exchange) -> None:
        await exchange.send(plain())
        exchange.writer.close()

    for body in (b"Content-Length: 2\r\n\r\n{}", b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"):
        async with pair(script) as (up, warmfold), connected(warmfold.port) as (reader, writer):
            for sent in range(1, 31):
                writer.write(b"POST /v1/embeddings HTTP/1.1\r\nHost: h\r\n" + body)
                got = await soon(read_message(reader))
                assert (got.status, len(up.requests)) == (200, sent)
                assert up.requests[-1].body == b"{}"


class KeptThenLost:
    """Answers the first request of a connection, then does as told with the second."""

    def __init__(self, then: bytes) -> None:
        self.then = then
        self.answered: set[int] = set()

    async def __call__(self, exchange: Exchange) -> None:
        if id(exchange.writer) not in self.answered:
            self.answered.add(id(exchange.writer))
            await exchange.send(plain())
        else:
            await exchange.send(self.then)
            exchange.writer.close()


@pytest.mark.parametrize(
    ("then", "status", "sent"), [(b"", 200, 3), (b"H", 502, 2), (b"HTTP/1.1 200 OK\r\nContent-", 502, 2)]
)
@on_uvloop
async def test_only_silence_on_a_kept_connection_is_asked_again(then: bytes, status: int, sent: int) -> None:
    async with pair(KeptThenLost(then)) as (up, warmfold), connected(warmfold.port) as (reader, writer):
        for expected in (200, status):
            writer.write(POST)
            assert (await soon(read_message(reader))).status == expected
        assert len(up.requests) == sent
        assert warmfold.count('warmfold_retries_total{cause="stale_connection"}') == (sent == 3)


@on_uvloop
async def test_a_large_upload_that_is_half_used_up_is_not_asked_again() -> None:
    used_up = asyncio.Event()

    class Lost(KeptThenLost):
        async def __call__(self, exchange: Exchange) -> None:
            if id(exchange.writer) in self.answered:
                await soon(exchange.reader.readexactly(100_000))
                used_up.set()
            await super().__call__(exchange)

    async with pair(Lost(b""), heads_only=True) as (up, warmfold), connected(warmfold.port) as (reader, writer):
        writer.write(b"POST /v1/files HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n")
        assert (await soon(read_message(reader))).status == 200
        writer.write(b"POST /v1/files HTTP/1.1\r\nHost: h\r\nContent-Length: 300000\r\n\r\n" + bytes(200_000))
        await soon(used_up.wait())
        assert (await soon(read_head(reader))).status == 502
        assert len(up.requests) == 2


async def _complete(port: int) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="key-canary", max_retries=0
    ) as client:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "body-canary"}])
