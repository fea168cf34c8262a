"""The client's side of one exchange: its request as it came, and an answer that is sent as it stands.

aiohttp's own response classes add Date, Server and Content-Type, and drop header bytes that are no UTF-8; so answers are
written here, onto the transport.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Final

import aiohttp
from aiohttp import web
from aiohttp.http import HttpVersion10
from aiohttp.http_exceptions import HttpProcessingError

from proxy.errors import ERROR_HEADER, Answerable, ClientGone, Ended, Refused, body_too_large
from proxy.outbound import SWITCH, Body, Headers, Inbound, decoded, encoded

_NO_BODY: Final = frozenset({204, 304})
_REPLAYABLE: Final = 64 * 1024
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
_DIGITS: Final = re.compile(r"[0-9]+")


class Client:
    """One request of a client, and the way back to it.

    `started`: the head of an answer has left, so nothing but its body may follow; `ended`: all of it has. `outcome`: how a relayed answer
    ended. All that reads or writes raises ClientGone where the client hung up, or sent or took nothing for `stall_s` seconds.
    """

    def __init__(self, request: web.BaseRequest, *, max_body_bytes: int, stall_s: float) -> None:
        self._request = request
        self._max_body_bytes = max_body_bytes
        self.stall_s = stall_s
        self._upload = _Upload(self)
        self._head = b""
        self._chunked = self._until_close = self._bodiless = False
        self._may_keep_alive = request.keep_alive
        self.status: int | None = None
        self.started = False
        self.ended = False
        self.outcome: Ended | None = None
        inbound = Inbound(request.method, request.raw_path, decoded(request.raw_headers), self._arriving())
        # RFC 9110, section 7.8: HTTP/1.0 knows no upgrade.
        self.inbound = inbound if request.version > HttpVersion10 else inbound.without("upgrade")

    @property
    def gone(self) -> bool:
        """Whether the connection is down, by the client's doing or by ours."""
        transport = self._request.transport
        return transport is None or transport.is_closing()

    async def read(self) -> Inbound:
        """The request with its whole body. Raises as `read_body` does."""
        return self.inbound.with_body(await self.read_body())

    async def read_body(self) -> bytes:
        """The whole body, as it came over the wire. Raises Refused (413) beyond server.max_body_bytes, ClientGone."""
        declared = self.inbound.header("content-length") or ""
        if _DIGITS.fullmatch(declared) and int(declared) > self._max_body_bytes:
            raise body_too_large(int(declared), self._max_body_bytes)
        if isinstance(self.inbound.body, bytes):
            return self.inbound.body
        chunks: list[bytes] = []
        size = 0
        while chunk := await self._receive():
            size += len(chunk)
            if size > self._max_body_bytes:
                raise body_too_large(None, self._max_body_bytes)
            chunks.append(chunk)
        return b"".join(chunks)

    async def start(self, status: int, reason: str, headers: Headers) -> None:
        """Send the head of an answer: these headers, in this order, and the framing that they leave open."""
        head = [f"HTTP/{self._request.version[0]}.{self._request.version[1]} {status} {reason}"]
        head += [f"{name}: {value}" for name, value in headers]
        self._bodiless = self._request.method == "HEAD" or status in _NO_BODY
        if not self._bodiless and not any(name.lower() == "content-length" for name, _ in headers):
            self._until_close = self._request.version <= HttpVersion10
            self._chunked = not self._until_close
        if self._chunked:
            head.append("Transfer-Encoding: chunked")
        if self._until_close:
            self._may_keep_alive = False
        if not self._may_keep_alive:
            head.append("Connection: close")
        elif self._request.version <= HttpVersion10:
            head.append("Connection: keep-alive")
        self.status = status
        self.started = True
        # With the first piece of the body if that is there already, else at the next turn of the loop: one packet less for short answers.
        self._head = encoded("\r\n".join(head) + "\r\n\r\n")
        asyncio.get_running_loop().call_soon(self._flush)

    async def write(self, chunk: bytes) -> None:
        """Send a piece of the body; returns when the client has taken enough for more to be worth sending."""
        if chunk and not self._bodiless:
            await self._send(b"%x\r\n%b\r\n" % (len(chunk), chunk) if self._chunked else chunk)

    async def end(self) -> None:
        """Send the end of the body."""
        await self._send(b"0\r\n\r\n" if self._chunked else b"")
        self.ended = True

    def abort(self) -> None:
        """Break off, so that the client sees an incomplete answer: what has been written still goes out, but no end is made up."""
        transport = self._request.transport
        self._may_keep_alive = False
        if transport is None or transport.is_closing():
            return
        self._flush()
        if self._until_close and self.started and not self.ended:
            # Here closing is what marks the end, so only a reset can tell that this is none.
            sock: socket.socket | None = transport.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            transport.abort()
        else:
            transport.close()

    async def answer(self, status: int, reason: str, headers: Headers, body: bytes) -> None:
        """Send a whole answer of our own."""
        await self.start(status, reason, (*headers, ("Content-Length", str(len(body)))))
        await self.write(body)
        await self.end()

    async def tell(self, error: Answerable) -> None:
        """Answer with an error of ours; where an answer has begun already, break it off instead."""
        if self.started:
            self.abort()
            return
        if not self._request.content.is_eof():
            self.close_after()  # what is still to come of the body would be taken for the next request
        headers = (("Content-Type", "application/json"), (ERROR_HEADER, error.code))
        await self.answer(error.status, HTTPStatus(error.status).phrase, headers, error.body())

    def switch(self, reason: str, headers: Headers) -> web.RequestHandler:
        """The client's connection, on which HTTP has ended with a 101: what comes on it is the caller's to read."""
        self.status, self.started, self._may_keep_alive = 101, True, False
        lines = [f"HTTP/1.1 101 {reason}", *(f"{name}: {value}" for name, value in (*headers, *SWITCH))]
        self._head = encoded("\r\n".join(lines) + "\r\n\r\n")
        self._flush()
        return self._request.protocol

    def close_after(self) -> None:
        """Let the connection end with this answer, which says so if it has not begun."""
        self._may_keep_alive = False

    def response(self) -> web.StreamResponse:
        """What aiohttp wants back from a handler. Everything has been sent by then."""
        if not self.ended:
            self.abort()
        return _Sent(keep_alive=self._may_keep_alive)

    async def _receive(self) -> bytes:
        """The next piece of the body; b"" at its end."""
        try:
            if self._upload.awaits_continue():
                await self._send(_CONTINUE)
            async with asyncio.timeout(self.stall_s):
                return await self._request.content.readany()
        except (web.RequestPayloadError, HttpProcessingError):
            raise Refused(400, "The request body is not framed as its headers say.", code="invalid_body") from None
        except (aiohttp.ClientError, ConnectionError):
            raise ClientGone from None
        except TimeoutError:
            self.abort()
            raise ClientGone from None

    async def _send(self, piece: bytes) -> None:
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ClientGone
        if self._head:
            piece, self._head = self._head + piece, b""
        transport.write(piece)
        if self._request.protocol.writing_paused:
            try:
                async with asyncio.timeout(self.stall_s):
                    await self._request.writer.drain()
            except ConnectionError:
                raise ClientGone from None
            except TimeoutError:
                self.abort()
                raise ClientGone from None

    def _flush(self) -> None:
        transport = self._request.transport
        if self._head and transport is not None and not transport.is_closing():
            transport.write(self._head)
            self._head = b""

    def _arriving(self) -> Body:
        """The body: its bytes where all of it came along with the head, as short ones do; else the upload that goes on."""
        content = self._request.content
        if not self._request.body_exists:
            return None
        if content.is_eof() and content.total_bytes <= _REPLAYABLE and "Transfer-Encoding" not in self._request.headers:
            return content.read_nowait(-1)
        return self._upload


class _Upload:
    """The body as it arrives. While no more than 64 KiB of it have been used up, it can be iterated again from the start."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._asked = False

    def may_replay(self) -> bool:
        """Whether iterating again yields the whole body again."""
        return self._kept_bytes <= _REPLAYABLE

    def awaits_continue(self) -> bool:
        """True once, where the client holds its body back until it is told to go on."""
        request = self._client._request
        first, self._asked = not self._asked, True
        expected = request.headers.get("Expect", "").lower() == "100-continue" and request.version > HttpVersion10
        return first and expected and not self._client.started and not request.content.total_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in tuple(self._kept):
            yield chunk
        while chunk := await self._client._receive():
            self._kept_bytes += len(chunk)
            if self.may_replay():
                self._kept.append(chunk)
            else:
                self._kept.clear()
            yield chunk


class _Sent(web.StreamResponse):
    """An answer that has been sent: there is nothing left for aiohttp to do but to keep the connection or close it."""

    def __init__(self, *, keep_alive: bool) -> None:
        super().__init__()
        self._keeps = keep_alive

    @property
    def keep_alive(self) -> bool:
        """Whether the connection may carry another request."""
        return self._keeps

    async def prepare(self, request: web.BaseRequest) -> None:
        """Nothing."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing."""
