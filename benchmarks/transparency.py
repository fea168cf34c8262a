"""Does anybody notice the proxy? Requests of many kinds, directly and through `warmfold serve`, on raw sockets, compared byte for byte.

`python -m benchmarks.transparency [--all]`

Both ends are looked at: what the provider got and what the client got. Headers are compared in order and letter for letter, but for those of
one hop (Connection, Keep-Alive, Transfer-Encoding), Host, and ours on an answer (x-warmfold-*); bodies without their chunking. Prints the
differences, with `--all` also what is equal, and ends with 1 where there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import uvloop

from benchmarks.child import free_port
from benchmarks.warmfold import Warmfold

PATIENCE_S: Final = 20.0

_HOP: Final = (b"connection", b"keep-alive", b"transfer-encoding", b"host")
_OURS: Final = b"x-warmfold-"
_NOTHING: Final = b"nothing"


@dataclass(frozen=True, slots=True)
class Case:
    """A request and the provider's answer to it, as they go over the wire. `held`: a body that waits for `100 Continue`."""

    name: str
    request: bytes
    answer: bytes
    held: bytes = b""
    closes: bool = False


@dataclass(slots=True)
class Message:
    """A request or an answer. `ended`: how its body ended."""

    first: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    ended: str = "whole"

    def value(self, name: bytes) -> bytes:
        """The first value of a header; b"" where there is none."""
        return next((value for key, value in self.headers if key.lower() == name), b"")

    @property
    def parts(self) -> dict[str, object]:
        """What is compared, by name."""
        kept = [pair for pair in self.headers if pair[0].lower() not in _HOP and not pair[0].lower().startswith(_OURS)]
        return {"first line": self.first, "headers": kept, "body": self.body, "end": self.ended}


class Provider:
    """Answers with what the case at hand says, and keeps what it got."""

    def __init__(self) -> None:
        self.case: Case | None = None
        self.got = Message()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while True:
                request = await _head(reader)
                if request.value(b"expect"):
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                await _body(reader, request, bodiless=False, answers=False)
                if self.case is None:
                    break
                self.got = request
                writer.write(self.case.answer)
                await writer.drain()
                if self.case.closes:
                    break
        except (EOFError, ConnectionError):
            pass
        finally:
            writer.close()


async def _head(reader: asyncio.StreamReader) -> Message:
    first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    return Message(first, [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)])


async def _body(reader: asyncio.StreamReader, message: Message, *, bodiless: bool, answers: bool) -> None:
    """Read the body into the message. `answers`: one without framing goes on to the end of the connection."""
    if bodiless:
        return
    try:
        if message.value(b"transfer-encoding").lower() == b"chunked":
            while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
                message.body += (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        elif length := message.value(b"content-length"):
            message.body = await reader.readexactly(int(length))
        elif answers:
            message.body = await reader.read()
    except asyncio.IncompleteReadError as error:
        message.body += error.partial
        message.ended = "broken off"


async def ask(port: int, case: Case) -> Message:
    """The answer to a case's request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        async with asyncio.timeout(PATIENCE_S):
            writer.write(case.request)
            got = await _head(reader)
            while got.first.startswith(b"HTTP/1.1 1"):
                writer.write(case.held)
                got = await _head(reader)
            bodiless = case.request.startswith(b"HEAD ") or got.first.split(b" ")[1] in (b"204", b"304")
            await _body(reader, got, bodiless=bodiless, answers=True)
            return got
    finally:
        writer.transport.abort()


def differences(what: str, direct: Message, through: Message) -> Iterator[str]:
    """One line for each part that is not the same."""
    for part, plain in direct.parts.items():
        relayed = through.parts[part]
        if plain != relayed:
            yield f"{what}, {part}: {_short(plain)} directly, {_short(relayed)} through warmfold"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}... ({len(text)} characters)"


def _request(line: str, headers: bytes = b"", body: bytes | None = None) -> bytes:
    framing = b"" if body is None else b"Content-Length: %d\r\n" % len(body)
    return line.encode() + b" HTTP/1.1\r\nHost: h\r\n" + headers + framing + b"\r\n" + (body or b"")


def _answer(
    body: bytes = b'{"object":"list"}', head: bytes = b"HTTP/1.1 200 OK\r\nContent-Type: application/json"
) -> bytes:
    return head + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def _chunked(*pieces: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + end


_KEY: Final = b"Authorization: Bearer sk-x\r\n"
_JSON: Final = _KEY + b"Content-Type: application/json\r\n"
_SSE: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_EVENTS: Final = (
    b": ping\n\n",
    'data: {"choices":[{"delta":{"content":"中'.encode(),
    b'"}}]}\r\n\r\n',
    b"data: [DONE]\n\n",
)


def _long(**members: object) -> bytes:
    """A chat completion that is long enough to have a session."""
    said = [{"role": "user", "content": "All work and no play. " * 2000}, {"role": "assistant", "content": "So."}]
    return json.dumps({"model": "stub", "messages": [*said, {"role": "user", "content": "And?"}], **members}).encode()


def cases() -> Iterator[Case]:
    """All that is asked."""
    yield from _targets()
    yield from _requests()
    yield from _chats()
    yield from _answers()


def _targets() -> Iterator[Case]:
    for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PURGE", "PROPFIND"):
        answer = _answer() if method != "HEAD" else _answer(b"").replace(b": 0", b": 17")
        for path in ("/v1/models", "/v1/chat/completions/abc", "/", "/healthz", "/metrics"):
            yield Case(f"{method} {path}", _request(f"{method} {path}", _KEY), answer)
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        yield Case(f"GET {path}", _request(f"GET {path}?limit=2", _KEY), _answer())
        yield Case(f"OPTIONS {path}", _request(f"OPTIONS {path}", b"Origin: http://a\r\n"), _answer(b""))
    for target in (
        "/v1/a%2Fb/%2e%2e?x=%41&x=a+b",
        "/v1//x/../y/./",
        "/v1/models?",
        "/v1/x?q=%e9%C3%A9",
        "/v1/x?a=1?b=/c",
    ):
        yield Case(f"GET {target}", _request(f"GET {target}"), _answer())


def _requests() -> Iterator[Case]:
    body = b'{ "input" : 1.0 }\n'
    odd = b"uSER-aGENT: a\r\nX_u: 1\r\nX-A: 1\r\nx-a: 2\r\nX-A: 1\r\nX-Empty:\r\nX-L: caf\xe9\r\nCookie: a=1\r\nCookie: b=2\r\n"
    chunked = b"Transfer-Encoding: chunked\r\n\r\n" + _chunked(b"ab", b"c")
    yield Case("no headers but Host", _request("GET /v1/x"), _answer())
    yield Case("odd headers", _request("GET /v1/x", odd), _answer())
    yield Case("odd headers and a body", _request("POST /v1/x", odd, body), _answer())
    yield Case("a header of 60 KB", _request("GET /v1/x", b"X: " + b"a" * 60_000 + b"\r\n"), _answer())
    yield Case("200 headers", _request("GET /v1/x", b"".join(b"X-%d: 1\r\n" % at for at in range(200))), _answer())
    for path in ("/v1/responses", "/v1/messages", "/v1/embeddings"):
        yield Case(f"POST {path}", _request(f"POST {path}", _JSON, body), _answer())
    yield Case("an empty body", _request("POST /v1/x", b"", b""), _answer())
    yield Case("a body of 4 MB", _request("POST /v1/files", b"", bytes(range(256)) * 16384), _answer())
    yield Case("a chunked body", b"POST /v1/x HTTP/1.1\r\nHost: h\r\n" + chunked, _answer())
    yield Case(
        "a coded body", _request("POST /v1/x", b"Content-Encoding: gzip\r\n", gzip.compress(body, mtime=0)), _answer()
    )
    yield Case(
        "a body that is held back",
        _request("PUT /v1/x", b"Content-Length: 3\r\nExpect: 100-continue\r\n"),
        _answer(),
        b"abc",
    )


def _chats() -> Iterator[Case]:
    for path in ("/v1/chat/completions", "/chat/completions?api-version=1"):
        for name, body in {
            "short": b'{"messages":[ {"role":"user","content":"hi"}], "model":"stub"}',
            "long": _long(),
            "no JSON": b"{",
            "empty": b"",
            "coded": gzip.compress(_long(), mtime=0),
        }.items():
            headers = _JSON + (b"Content-Encoding: gzip\r\n" if name == "coded" else b"")
            yield Case(f"POST {path}, {name}", _request(f"POST {path}", headers, body), _answer(b'{"choices":[]}'))
    for name, body in {"short": b'{"stream":true,"messages":[{"role":"user"}]}', "long": _long(stream=True)}.items():
        request = _request("POST /v1/chat/completions", _JSON, body)
        yield Case(f"a stream, {name}", request, _SSE + _chunked(*_EVENTS))
        yield Case(f"a stream without [DONE], {name}", request, _SSE + _chunked(*_EVENTS[:2]))
        yield Case(f"a stream that breaks, {name}", request, _SSE + _chunked(*_EVENTS[:2], end=b""), closes=True)
        yield Case(
            f"an error, {name}", request, _answer(b'{"error":{}}', b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 7")
        )


def _answers() -> Iterator[Case]:
    ask_x = _request("GET /v1/x", _KEY)
    cookies = b"200 OK\r\nset-cookie: a=1\r\nX-Empty:\r\nSet-Cookie: b=2\r\nDATE: today\r\nX-L: caf\xe9\r\nServer: s"
    yield Case("an odd status", ask_x, _status(b"299 Quite  Fine \xe9"))
    yield Case("no reason", ask_x, _status(b"200 "))
    yield Case("cookies, dates, odd case", ask_x, _status(cookies))
    yield Case("no headers", ask_x, b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
    yield Case("a redirect", ask_x, _status(b"307 Temporary Redirect\r\nLocation: http://127.0.0.1:9/elsewhere"))
    yield Case("204", ask_x, b"HTTP/1.1 204 No Content\r\nX: 1\r\n\r\n")
    yield Case("304", ask_x, b'HTTP/1.1 304 Not Modified\r\nETag: "x"\r\nContent-Length: 100\r\n\r\n')
    yield Case("gzip", ask_x, _answer(gzip.compress(b"x" * 999, mtime=0), b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip"))
    yield Case("gzip twice, and not even that", ask_x, _status(b"200 OK\r\nContent-Encoding: gzip, gzip"))
    yield Case("chunks", ask_x, b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + _chunked(b"ab", b"c"))
    yield Case("to the end of the connection", ask_x, b"HTTP/1.1 200 OK\r\n\r\nhello", closes=True)
    yield Case("too short", ask_x, b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello", closes=True)
    yield Case("4 MB", ask_x, _answer(bytes(range(256)) * 16384))
    yield Case("early hints", ask_x, b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + _answer())


def _status(line: bytes) -> bytes:
    return _answer(b"x", b"HTTP/1.1 " + line)


async def compare(provider: Provider, port: int, proxy_port: int, case: Case) -> list[str]:
    """What differs for a case, in words."""
    provider.case = case
    ends = []
    for asked in (port, proxy_port):
        provider.got = answer = Message(_NOTHING)
        with suppress(EOFError, ConnectionError, TimeoutError):
            answer = await ask(asked, case)
        ends.append((provider.got, answer))
    (sent, direct), (relayed, through) = ends
    if _NOTHING in (sent.first, direct.first):
        return ["no answer directly either: the case proves nothing"]
    if case.held:  # a hop of its own, which each server answers by itself
        sent.headers = [pair for pair in sent.headers if pair[0].lower() != b"expect"]
    return [*differences("provider got", sent, relayed), *differences("client got", direct, through)]


async def _run(everything: bool) -> int:
    provider = Provider()
    port = free_port()
    server = await asyncio.start_server(provider.serve, "127.0.0.1", port, limit=1 << 20)
    compared = unequal = 0
    async with server:
        warmfold = Warmfold(f"http://127.0.0.1:{port}/v1", {"max_context_tokens": 100_000})
        await asyncio.to_thread(warmfold.__enter__)
        try:
            for case in cases():
                found = await compare(provider, port, warmfold.port, case)
                compared += 1
                unequal += bool(found)
                if found or everything:
                    print(f"{case.name}: {'; '.join(found) or 'equal'}")
        finally:
            await asyncio.to_thread(warmfold.__exit__, None, None, None)
    print(f"{compared} compared, {unequal} different")
    return 1 if unequal else 0


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transparency", description="Does anybody notice the proxy?"
    )
    parser.add_argument("--all", action="store_true", help="also print what is equal")
    sys.exit(uvloop.run(_run(parser.parse_args().all)))


if __name__ == "__main__":
    main()
