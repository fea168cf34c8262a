"""aiohttp's request and response classes, less what they add and plus what they hide: which requests surely went unheard.

All that we know of aiohttp's client beyond its documentation stands here; tests/e2e/test_relay.py notices when it changes.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from aiohttp import ClientRequest, ClientResponse, StreamReader, hdrs
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawResponseMessage, StreamWriter
from aiohttp.payload import Payload
from multidict import CIMultiDict

from proxy import clock
from proxy.outbound import Body, Headers, encoded

if TYPE_CHECKING:
    from aiohttp.connector import Connection

_SLICE: Final = 256 * 1024

_used: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
"""Connections that have carried a request before."""


class Unanswered(aiohttp.ClientError):
    """The connection ended without one complete answer.

    `may_be_stale`: it had been kept from an earlier request and not a byte came back, so the upstream may have closed it before it
    saw this one. `after_s`: seconds since the request was sent.
    """

    def __init__(self, *, may_be_stale: bool, after_s: float) -> None:
        super().__init__("no answer")
        self.may_be_stale = may_be_stale
        self.after_s = after_s


class WatchedResponse(ClientResponse):
    """A response that reports a connection lost before its first byte as Unanswered, and breaks off at once when it is given up."""

    reused = False
    sent_at = 0.0

    async def start(self, connection: Connection) -> ClientResponse:
        """The response with its headers. Not ClientOSError and the like: aiohttp would send a GET again, even on a new connection."""
        try:
            response = await super().start(connection)
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
            began = isinstance(error, aiohttp.ServerDisconnectedError) and isinstance(error.message, RawResponseMessage)
            unanswered = Unanswered(may_be_stale=self.reused and not began, after_s=clock.monotonic() - self.sent_at)
            raise unanswered from error.__cause__
        except BaseException:
            # Cancelled, or timed out: close() alone would wait for a TLS goodbye.
            if connection.transport is not None:
                connection.transport.abort()
            raise
        _tell_of_loss(connection, self.content)
        return response


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What a VerbatimRequest takes as its `data`. Not as aiohttp's `headers`: those lose `x-a: 1` beside `X-A: 2`."""

    headers: Headers
    body: Body
    stall_s: float


class _Paced(Payload):
    """A body in pieces, each of which the upstream must take in time: aiohttp watches the clock only once all has been sent.

    In slices also where it is there as a whole: writing many megabytes in one go would hold up all other requests.
    """

    def __init__(self, body: bytes | AsyncIterable[bytes], stall_s: float) -> None:
        super().__init__(body)
        self._body = body
        self._stall_s = stall_s

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Never asked for."""
        raise TypeError

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write all of it. Raises TimeoutError where the upstream takes nothing for `stall_s`."""
        if isinstance(self._body, bytes):
            for start in range(0, len(self._body) or 1, _SLICE):
                await self._write(writer, self._body[start : start + _SLICE])
        else:
            writer.send_headers()  # now: the first piece may be long in coming
            async for piece in self._body:
                await self._write(writer, piece)

    async def _write(self, writer: AbstractStreamWriter, piece: bytes) -> None:
        async with asyncio.timeout(self._stall_s):
            await writer.write(piece)
            await writer.drain()


class VerbatimRequest(ClientRequest):
    """A request that carries the headers it is given and nothing else but Host and the framing of its body."""

    # Names what aiohttp may not add to a body. The others it may not add are left out by update_auto_headers.
    _skip_auto_headers = CIMultiDict[None]({hdrs.CONTENT_TYPE: None})
    _has_odd_head = False

    def update_auto_headers(self, skip_auto_headers: Iterable[str] | None) -> None:
        """Nothing: no Accept, Accept-Encoding or User-Agent of its own."""

    def update_body_from_data(self, body: Outgoing, _stacklevel: int = 3) -> None:
        """Take headers and body. Framed by Content-Length where the headers have one, else chunked; never by an added Content-Length: 0."""
        self.headers.extend(body.headers)
        if body.body is not None and hdrs.CONTENT_LENGTH not in self.headers:
            self.chunked = True
            self.headers[hdrs.TRANSFER_ENCODING] = "chunked"
        content = body.body
        if any(_has_surrogate(text) for text in (self.url.raw_path_qs, *(value for _, value in body.headers))):
            # Bytes that are no UTF-8. aiohttp leaves them out of the head, so it is replaced in write_bytes, which runs only for a body.
            self._has_odd_head = True
            content = b"" if content is None else content
        if content is not None:
            self._body = _Paced(content, body.stall_s)

    def update_transfer_encoding(self) -> None:
        """Nothing: it is said with the body."""

    async def send(self, conn: Connection) -> ClientResponse:
        """The response, not yet started. Raises Unanswered where the connection was closed already."""
        protocol = conn.protocol
        reused = protocol in _used
        _used.add(protocol)
        try:
            response = await super().send(conn)
        except (aiohttp.ClientOSError, aiohttp.ClientConnectionResetError):
            raise Unanswered(may_be_stale=reused, after_s=0.0) from None
        if isinstance(response, WatchedResponse):
            response.reused = reused
            response.sent_at = clock.monotonic()
        return response

    async def write_bytes(
        self, writer: AbstractStreamWriter, conn: Connection, content_length: int | None = None
    ) -> None:
        """Write the body behind the head, which is still unsent here."""
        if self._has_odd_head and isinstance(writer, StreamWriter):
            proxied = self.proxy is not None and not self.is_ssl()
            target = str(self.url) if proxied else self.url.raw_path_qs
            lines = [f"{self.method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in self.headers.items())]
            writer._headers_buf = encoded("\r\n".join(lines) + "\r\n\r\n")
        await super().write_bytes(writer, conn, content_length)


def _tell_of_loss(connection: Connection, content: StreamReader) -> None:
    """See to it that a reader learns of a connection that is lost. aiohttp closes one that breaks the chunked framing and tells nobody."""
    closed = connection.protocol.closed if connection.protocol is not None else None
    if closed is None or content.is_eof():
        return

    def lost(future: asyncio.Future[None]) -> None:
        if not future.cancelled():
            future.exception()  # seen, or asyncio reports it as forgotten
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError("connection lost"))

    def forget() -> None:
        closed.remove_done_callback(lost)

    closed.add_done_callback(lost)
    content.on_eof(forget)


def _has_surrogate(text: str) -> bool:
    return not text.isascii() and any("\udc80" <= character <= "\udcff" for character in text)
