"""I1: what goes through the proxy is what would have gone without it, byte for byte, both ways."""

from __future__ import annotations

import gzip

import pytest

from tests.e2e.relay_wire import Exchange, Message, ask, connected, fixed, on_uvloop, pair, plain, read_message, soon

GZIPPED = gzip.compress(b'{"messages":[]}')

REQUESTS = {
    "odd path and query": b"GET /v1/a%5Fb/%2e%2e?x=%41&x=%41 HTTP/1.1\r\nHost: h\r\n\r\n",
    "bare question mark": b"GET /v1/models? HTTP/1.1\r\nHost: h\r\n\r\n",
    "dots and double slashes": b"GET /v1//x/../y/./ HTTP/1.1\r\nHost: h\r\n\r\n",
    "plus, space and non-ASCII, encoded": b"GET /v1/x?q=a+b%20c%C3%A9%e9 HTTP/1.1\r\nHost: h\r\n\r\n",
    "no headers but Host": b"GET /v1/x HTTP/1.1\r\nHost: h\r\n\r\n",
    "names in odd case": b"GET /v1/x HTTP/1.1\r\nhOsT: h\r\nuSER-aGENT: a\r\naccept: */*\r\nX_under: 1\r\nOpenAI-Beta: x\r\n\r\n",
    "duplicates in order": b"GET /v1/x HTTP/1.1\r\nHost: h\r\nX-A: 1\r\nx-a: 2\r\nX-B: 3\r\nX-A: 1\r\nCookie: a=1\r\nCookie: b=2\r\n\r\n",
    "empty values": b"GET /v1/x HTTP/1.1\r\nHost: h\r\nX-Empty:\r\nX-Blank:   \r\nX-After: 1\r\n\r\n",
    "UTF-8 and Latin-1 values": b"GET /v1/x HTTP/1.1\r\nHost: h\r\nX-U: \xe4\xb8\xad\xf0\x9f\x98\x80\r\nX-L: caf\xe9 \xff\r\n\r\n",
    "Latin-1 value with a body": b"POST /v1/x HTTP/1.1\r\nHost: h\r\nX-L: caf\xe9\r\nContent-Length: 3\r\n\r\nabc",
    "long header": b"GET /v1/x HTTP/1.1\r\nHost: h\r\nX-Long: " + b"a" * 60_000 + b"\r\n\r\n",
    "many headers": b"GET /v1/x HTTP/1.1\r\nHost: h\r\n" + b"".join(b"X-%d: %d\r\n" % (i, i) for i in range(200)) + b"\r\n",
    "HEAD of the root": b"HEAD / HTTP/1.1\r\nHost: h\r\n\r\n",
    "PURGE": b"PURGE /v1/x HTTP/1.1\r\nHost: h\r\n\r\n",
    "PATCH": b"PATCH /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}",
    "DELETE without a body": b"DELETE /v1/chat/completions/abc HTTP/1.1\r\nHost: h\r\n\r\n",
    "DELETE with a body": b"DELETE /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}",
    "GET with a body": b"GET /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}",
    "preflight on the chat path": b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: h\r\nOrigin: http://a\r\nAccess-Control-Request-Method: POST\r\n\r\n",
    "stored completions": b"GET /v1/chat/completions?limit=2 HTTP/1.1\r\nHost: h\r\n\r\n",
    "health and metrics": b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n",
    "POST without body or length": b"POST /v1/x HTTP/1.1\r\nHost: h\r\n\r\n",
    "POST with length 0": b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n",
    "POST with a fixed length": b"POST /v1/x HTTP/1.1\r\nHost: h\r\ncontent-type: application/json\r\ncontent-length: 11\r\n\r\n{ \"a\" : 1 }",
    "chunked POST": b"POST /v1/x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n1;ext=1\r\nd\r\n0\r\n\r\n",
    "gzip body": b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(GZIPPED) + GZIPPED,
    "credentials": b"GET /v1/x HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer k\r\napi-key: l\r\nAuthorization: Basic m\r\n\r\n",
    "chat completion": b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 19\r\n\r\n{\"messages\":[ ],  }",
}  # fmt: skip

ANSWERS = {
    "plain": plain(b'{"a": 1}'),
    "odd status and reason": plain(b"x", b"HTTP/1.1 299 Quite  Fine \xe9"),
    "no reason": plain(b"x", b"HTTP/1.1 200 "),
    "status 599": plain(b"x", b"HTTP/1.1 599 Odd"),
    "no headers": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx",
    "cookies, odd case, empty, non-ASCII": plain(
        b"x", b"HTTP/1.1 200 OK\r\nset-cookie: a=1\r\nX-Empty:\r\nSet-Cookie: b=2\r\nDATE: today\r\nX-L: caf\xe9\r\nX-U: \xe4\xb8\xad\r\nServer: s"
    ),
    "chunked": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nX: 1\r\n\r\n2\r\nab\r\n3;e=1\r\ncde\r\n0\r\n\r\n",
    "empty chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "empty": plain(b""),
    "204": b"HTTP/1.1 204 No Content\r\nX: 1\r\n\r\n",
    "204 with length 0": b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n",
    "304 with a length": b'HTTP/1.1 304 Not Modified\r\nETag: "x"\r\nContent-Length: 100\r\n\r\n',
    "redirect": plain(b"there", b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:9/elsewhere"),
    "gzip": plain(GZIPPED, b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip"),
    "twice gzip, and not even that": plain(b"\x1f\x8bnot", b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip, x-foo"),
    "error": plain(b'{"error":{"message":"no"}}', b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 7\r\nx-ratelimit-remaining-tokens: 0"),
    "large": plain(bytes(range(256)) * 4096),
    "early hints first": b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + plain(b"x"),
}  # fmt: skip


@pytest.mark.parametrize("request_bytes", REQUESTS.values(), ids=REQUESTS.keys())
@on_uvloop
async def test_the_upstream_receives_what_the_client_sent(request_bytes: bytes) -> None:
    async with pair(fixed(plain())) as (up, warmfold):
        bodiless = request_bytes.startswith(b"HEAD")
        await ask(up.port, request_bytes, bodiless=bodiless)
        await ask(warmfold.port, request_bytes, bodiless=bodiless)
    direct, through = up.requests
    assert through.first == direct.first
    assert [pair for pair in through.headers if pair[0].lower() != b"host"] == [
        h for h in direct.headers if h[0].lower() != b"host"
    ]
    assert (through.body, through.all(b"host")) == (direct.body, [b"127.0.0.1:%d" % up.port])


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
@on_uvloop
async def test_the_client_receives_what_the_upstream_sent(answer: bytes) -> None:
    async with pair(fixed(answer)) as (up, warmfold):
        request = b"GET /v1/x HTTP/1.1\r\nHost: h\r\n\r\n"
        bodiless = answer.startswith((b"HTTP/1.1 204", b"HTTP/1.1 304"))
        direct = await _final(up.port, request, bodiless=bodiless)
        through = await _final(warmfold.port, request, bodiless=bodiless)
    assert through.first == direct.first
    assert _without_coding(through) == _without_coding(direct)
    assert (through.body, through.complete) == (direct.body, True)
    assert len(through.all(b"transfer-encoding")) + len(through.all(b"content-length")) <= 1


async def _final(port: int, request: bytes, *, bodiless: bool) -> Message:
    async with connected(port) as (reader, writer):
        writer.write(request)
        message = await soon(read_message(reader, bodiless=bodiless))
        while message.status == 103:
            message = await soon(read_message(reader, bodiless=bodiless))
        return message


def _without_coding(message: Message) -> list[tuple[bytes, bytes]]:
    """In order; the coding's name is compared without its case."""
    return [(k, v) for k, v in message.headers if k.lower() != b"transfer-encoding"]


@on_uvloop
async def test_head_keeps_the_length_and_the_connection_stays_usable() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
            + (b"" if exchange.request.first.startswith(b"HEAD") else b"hello")
        )

    async with pair(script) as (up, warmfold), connected(warmfold.port) as (reader, writer):
        for _ in range(2):
            writer.write(b"HEAD /v1/models HTTP/1.1\r\nHost: h\r\n\r\n")
            head = await soon(read_message(reader, bodiless=True))
            assert head.all(b"content-length") == [b"5"]
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n")
            assert (await soon(read_message(reader))).body == b"hello"
        assert up.connections == 1, "and so does the one to the upstream"


@pytest.mark.parametrize(
    ("answer", "framing"),
    [
        (plain(b"hello"), [(b"Content-Length", b"5")]),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", []),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello", []),
    ],
    ids=["fixed", "chunked", "until close"],
)
@on_uvloop
async def test_http_1_0_clients_get_the_body_without_chunk_marks(
    answer: bytes, framing: list[tuple[bytes, bytes]]
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(answer)
        if b"close" in answer:
            exchange.writer.close()

    async with pair(script) as (_, warmfold):
        got = await ask(warmfold.port, b"GET /v1/x HTTP/1.0\r\n\r\n")
        assert (got.first, got.body) == (b"HTTP/1.0 200 OK", b"hello")
        assert [h for h in got.headers if h[0] != b"Content-Type"] == [*framing, (b"Connection", b"close")]
        kept = await ask(warmfold.port, b"GET /v1/x HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        assert (kept.body, kept.all(b"connection")) == (b"hello", [b"close"])


@on_uvloop
async def test_nothing_is_remembered_from_one_request_to_the_next() -> None:
    answer = plain(b"x", b"HTTP/1.1 200 OK\r\nSet-Cookie: a=1; Path=/")
    async with pair(fixed(answer)) as (up, warmfold):
        for _ in range(2):
            await ask(warmfold.port, b"GET /v1/x HTTP/1.1\r\nHost: h\r\n\r\n")
    assert [request.all(b"cookie") for request in up.requests] == [[], []]


HOPS = (b"Connection: keep-alive, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\nTE: trailers\r\nTrailer: X-T\r\nUpgrade: h2c\r\n"
        b"Proxy-Connection: keep-alive\r\nProxy-Authorization: Basic x\r\nProxy-Authenticate: Basic\r\nX-Stays: 1\r\n")  # fmt: skip


@on_uvloop
async def test_hop_by_hop_headers_stay_on_their_hop() -> None:
    answer = plain(b"x", b"HTTP/1.1 200 OK\r\n" + HOPS.replace(b"X-Hop", b"X-Up").rstrip(b"\r\n"))
    async with pair(fixed(answer)) as (up, warmfold):
        request = (
            b"POST /v1/x HTTP/1.1\r\nHost: h\r\n"
            + HOPS
            + b"X-Warmfold-Mode: off\r\nx-warmfold-session: s\r\nContent-Length: 1\r\n\r\nx"
        )
        got = await ask(warmfold.port, request)
    assert up.requests[0].end_to_end(b"content-length") == [(b"X-Stays", b"1")]
    assert got.end_to_end(b"content-length") == [(b"X-Stays", b"1")]


@on_uvloop
async def test_a_named_length_does_not_unframe_the_body() -> None:
    async with pair(fixed(plain())) as (up, warmfold):
        await ask(
            warmfold.port,
            b"POST /v1/x HTTP/1.1\r\nHost: h\r\nConnection: content-length, host\r\nContent-Length: 3\r\n\r\nabc",
        )
    assert (up.requests[0].body, up.requests[0].all(b"content-length")) == (b"abc", [b"3"])


@on_uvloop
async def test_answers_that_would_smuggle_a_header_are_refused() -> None:
    async with pair(fixed(plain(b"x", b"HTTP/1.1 200 OK\r\nX-A: 1\rSet-Cookie: evil=1"))) as (_, warmfold):
        got = await ask(warmfold.port, b"GET /v1/x HTTP/1.1\r\nHost: h\r\n\r\n")
    assert (got.status, got.all(b"set-cookie")) == (502, [])
