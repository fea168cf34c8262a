"""Bodies on their way up: streamed as they come, bounded where we have to hold them, and broken where the client breaks them."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.e2e.relay_wire import (
    Exchange,
    ask,
    chunks,
    connected,
    fixed,
    on_uvloop,
    pair,
    plain,
    read_head,
    read_message,
    reads_whole_bodies,
    soon,
)


@pytest.mark.parametrize("framing", [b"Transfer-Encoding: chunked", b"Content-Length: 9"])
@on_uvloop
async def test_each_piece_goes_up_before_the_next_is_there(framing: bytes) -> None:
    """Both ways at once: the upstream answers each piece with one, and only then does the client send the next."""
    chunked = b"chunked" in framing

    async def script(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert bool(exchange.request.all(b"transfer-encoding")) == chunked
        if chunked:
            async for piece in chunks(exchange.reader):
                await exchange.send(b"3\r\n%s\r\n" % piece)
        else:
            for _ in range(3):
                await exchange.send(b"3\r\n%s\r\n" % await exchange.reader.readexactly(3))
        await exchange.send(b"0\r\n\r\n")

    async with pair(script, heads_only=True) as (_, warmfold), connected(warmfold.port) as (reader, writer):
        writer.write(b"POST /v1/files HTTP/1.1\r\nHost: h\r\n" + framing + b"\r\n\r\n")
        assert (await soon(read_head(reader))).status == 200
        answers = chunks(reader)
        for piece in (b"abc", b"def", b"ghi"):
            writer.write(b"3\r\n%s\r\n" % piece if chunked else piece)
            assert await soon(anext(answers)) == piece
        writer.write(b"0\r\n\r\n" if chunked else b"")
        assert [left async for left in answers] == []


@on_uvloop
async def test_a_client_that_waits_for_100_continue_gets_it() -> None:
    async with pair(fixed(plain())) as (up, warmfold), connected(warmfold.port) as (reader, writer):
        for expect in (b"100-continue", b"100-Continue"):
            writer.write(b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nExpect: %s\r\n\r\n" % expect)
            assert (await soon(read_head(reader))).first == b"HTTP/1.1 100 Continue"
            writer.write(b"abc")
            assert (await soon(read_message(reader))).status == 200
    assert [(request.body, request.all(b"expect")) for request in up.requests] == [(b"abc", [])] * 2


@on_uvloop
async def test_an_answer_before_the_upload_is_over_is_passed_on() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(plain(b"no", b"HTTP/1.1 401 Unauthorized"))

    async with pair(script, heads_only=True) as (_, warmfold), connected(warmfold.port) as (reader, writer):
        writer.write(b"POST /v1/files HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\n\r\nabc")
        got = await soon(read_message(reader))
        assert (got.status, got.body) == (401, b"no")


@pytest.mark.parametrize(
    "framing", [b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", b"Content-Length: 9\r\n\r\nabc"]
)
@on_uvloop
async def test_a_client_that_leaves_in_the_middle_leaves_the_upstream_a_broken_request(framing: bytes) -> None:
    received, closed = asyncio.Event(), asyncio.Event()
    rest = b""

    async def script(exchange: Exchange) -> None:
        nonlocal rest
        await exchange.reader.readuntil(b"abc")
        received.set()
        rest = await exchange.reader.read()
        closed.set()

    async with pair(script, heads_only=True) as (_, warmfold):
        async with connected(warmfold.port) as (_, writer):
            writer.write(b"POST /v1/files HTTP/1.1\r\nHost: h\r\n" + framing)
            await soon(received.wait())
        await soon(closed.wait())
    assert rest.strip() == b"", "no end was made up"


@on_uvloop
async def test_a_misframed_body_is_the_clients_fault() -> None:
    async with (
        pair(lambda exchange: exchange.watch(), heads_only=True) as (_, warmfold),
        connected(warmfold.port) as (reader, writer),
    ):
        writer.write(b"POST /v1/x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await asyncio.sleep(0.05)
        writer.write(b"no size\r\n")
        got = await soon(read_message(reader))
        assert (got.status, got.all(b"x-warmfold-error")) == (400, [b"invalid_body"])
        assert await soon(reader.read()) == b""


LIMIT = 1000


def chat(body: bytes, framing: bytes = b"") -> bytes:
    framing = framing or b"Content-Length: %d" % len(body)
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\n" + framing + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    ("request_bytes", "accepted"),
    [
        (chat(b"x" * LIMIT), True),
        (chat(b"3e8\r\n%s\r\n0\r\n\r\n" % (b"x" * LIMIT), b"Transfer-Encoding: chunked"), True),
        (chat(b"x" * (LIMIT + 1)), False),
        (chat(b"", b"Content-Length: 99999999999999999999"[:34]), False),
        (chat(b"1f4\r\n%s\r\n" % (b"x" * 500) * 3 + b"0\r\n\r\n", b"Transfer-Encoding: chunked"), False),
        (chat(b"", b"Content-Length: 5000\r\nExpect: 100-continue"), False),
    ],
    ids=[
        "at the limit",
        "at the limit, chunked",
        "beyond",
        "far beyond, only declared",
        "beyond, chunked",
        "beyond, not even begun",
    ],
)
@on_uvloop
async def test_a_body_that_we_must_hold_is_bounded(request_bytes: bytes, accepted: bool) -> None:
    server = {"max_body_bytes": LIMIT}
    async with pair(fixed(plain()), chat=reads_whole_bodies, server=server) as (up, warmfold):
        got = await ask(warmfold.port, request_bytes)
    if accepted:
        assert (got.status, [request.body for request in up.requests]) == (200, [b"x" * LIMIT])
        return
    assert (got.status, got.all(b"x-warmfold-error"), up.requests) == (413, [b"request_too_large"], [])
    assert "server.max_body_bytes" in json.loads(got.body)["error"]["message"]
    assert str(LIMIT) in json.loads(got.body)["error"]["message"]


@on_uvloop
async def test_bodies_beyond_the_limit_pass_where_we_need_not_hold_them() -> None:
    body = bytes(range(256)) * 8192
    async with pair(fixed(plain()), chat=reads_whole_bodies, server={"max_body_bytes": LIMIT}) as (up, warmfold):
        request = b"POST /v1/files HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body)
        assert (await ask(warmfold.port, request + body)).status == 200
    assert up.requests[0].body == body


@on_uvloop
async def test_a_held_body_of_megabytes_arrives_whole() -> None:
    body = bytes(range(256)) * 8192
    async with pair(fixed(plain()), chat=reads_whole_bodies) as (up, warmfold):
        assert (await ask(warmfold.port, chat(body))).status == 200
    assert up.requests[0].body == body
    assert up.requests[0].all(b"content-length") == [b"%d" % len(body)]


@on_uvloop
async def test_an_upload_that_stalls_is_let_go() -> None:
    closed = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.watch()
        closed.set()

    async with (
        pair(script, heads_only=True, read_idle_timeout_s=0.2) as (_, warmfold),
        connected(warmfold.port) as (reader, writer),
    ):
        writer.write(b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\nabc")
        await soon(closed.wait())
        assert await soon(reader.read()) == b""
