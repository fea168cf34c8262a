"""The provider: one pool of connections for all upstreams, their replies, and aiohttp's exceptions made ours.

Past this file nobody knows that aiohttp is the client: docs/decisions/0005-aiohttp-both-sides.md.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import aiohttp
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from proxy.config import Config, Upstream
from proxy.egress import VARIABLES, proxy_for
from proxy.errors import ClientGone, Refused, UpstreamBroken, UpstreamFailed, UpstreamTimeout, UpstreamUnreachable
from proxy.metrics import Metrics, Retry
from proxy.outbound import Body, Headers, Inbound, Place, decoded, end_to_end, to_send
from proxy.verbatim import Outgoing, Unanswered, VerbatimRequest, WatchedResponse

__all__ = ["Body", "Headers", "Inbound", "Reply", "Sender", "Upstreams"]

MAX_HEADER_BYTES: Final = 64 * 1024
"""One header line, either way. aiohttp's 8190 is less than some gateways' cookies and tracing baggage."""
MAX_HEADERS: Final = 256

_KEEPALIVE_S: Final = 60.0
"""Idle connections are kept for as long as chat turns are commonly apart; an upstream that closes earlier is noticed, or retried."""
_DNS_TTL_S: Final = 30
_RACE_S: Final = 2.0
"""An idle close that crossed our request on its way shows within a round trip. Later than this, the upstream had begun to work."""
_GOODBYE_S: Final = 0.5
_REST: Final = 64 * 1024

# A line break would end the header early on the client's side; aiohttp reads answers leniently.
_BREAKS_HEADERS: Final = re.compile(rb"[\r\n\0]")


@runtime_checkable
class Replayable(Protocol):
    """A body on its way in that can be asked for once more, from its first byte, while little of it has been used up."""

    def may_replay(self) -> bool:
        """Whether iterating again yields the whole body again."""
        ...


@dataclass(frozen=True, slots=True)
class _Route:
    place: Place
    limits: Upstream
    timeout: aiohttp.ClientTimeout
    authorization: str | None
    proxy: URL | None

    @property
    def origin(self) -> str:
        return str(self.place.origin)


class Reply:
    """An upstream's answer: status, reason and end-to-end headers are there, the body comes as it arrives.

    Whoever holds one closes it. `chunks` and `read` raise UpstreamTimeout or UpstreamBroken where the body ends too early.
    """

    def __init__(self, response: aiohttp.ClientResponse, route: _Route, metrics: Metrics) -> None:
        self._response = response
        self._route = route
        self._metrics = metrics
        self._held: list[bytes] = []
        self.status = response.status
        self.reason = response.reason or ""
        self.headers = end_to_end(decoded(response.raw_headers))

    def header(self, name: str) -> str | None:
        """The first value of a header (name in lower case); None where there is none."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    def chunks(self) -> AsyncIterator[bytes]:
        """The body in the pieces it comes in, beginning with what `read` has taken already."""
        return _Chunks(self)

    async def read(self, limit: int) -> bytes:
        """The body, or its first `limit` bytes where it is longer. `chunks` yields them again, so a reply that was looked into can still be relayed."""
        size = sum(map(len, self._held))
        while size < limit and (chunk := await self._next()):
            self._held.append(chunk)
            size += len(chunk)
        return b"".join(self._held)[:limit]

    async def until(self, enough: Callable[[bytes], object], within_s: float, limit: int) -> bytes:
        """What has come of the body once `enough` says so of it, `within_s` is over, or it ended or is `limit` bytes long. As `read`: it comes again."""
        begun = b"".join(self._held)
        try:
            async with asyncio.timeout(within_s):
                while len(begun) < limit and not enough(begun) and (chunk := await self._next()):
                    self._held.append(chunk)
                    begun += chunk
        except TimeoutError:
            pass
        return begun

    async def close(self) -> None:
        """Let go. A body that has not ended is broken off at once: the upstream shall not go on writing for nobody."""
        connection = self._response.connection
        if connection is not None and connection.transport is not None:
            # close() would wait for a TLS goodbye that a busy upstream sends late (30 s under uvloop)
            connection.transport.abort()
        self._response.close()

    def switched(self) -> ResponseHandler:
        """The connection of a 101 that was asked for: what comes on it is the caller's to read. End it with `part`."""
        connection = self._response.connection
        protocol = connection.protocol if connection is not None else None
        assert protocol is not None, "aiohttp keeps a connection that it has seen upgraded"
        protocol.read_timeout = None
        return protocol

    def part(self) -> None:
        """Let go of a switched connection: what has been written still goes out if the upstream takes it soon, such as a WebSocket's goodbye."""
        connection = self._response.connection
        transport = connection.transport if connection is not None else None
        self._response.close()
        if transport is not None:
            asyncio.get_running_loop().call_later(_GOODBYE_S, transport.abort)

    async def release(self) -> None:
        """Let go of a body nobody wants: a short rest is read, so that the connection can be used again; a longer one is broken off."""
        try:
            async with asyncio.timeout(1):
                left = _REST
                while left > 0 and (chunk := await self._next()):
                    left -= len(chunk)
        except (TimeoutError, UpstreamFailed):
            pass
        await self.close()

    async def _next(self) -> bytes:
        """The next piece; b"" at the end."""
        try:
            return await self._response.content.readany()
        except aiohttp.SocketTimeoutError:
            failed: UpstreamFailed = UpstreamTimeout.reading(self._route.origin, self._route.limits.read_idle_timeout_s)
        except (aiohttp.ClientError, aiohttp.http_exceptions.HttpProcessingError, OSError):
            failed = UpstreamBroken(self._route.origin, "broke off in the middle of its answer")
        self._metrics.upstream_failed(failed.fault)
        raise failed


class _Chunks:
    """A class and not a generator: one that is dropped half way needs no closing."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._held = iter(tuple(reply._held))

    def __aiter__(self) -> _Chunks:
        return self

    async def __anext__(self) -> bytes:
        for held in self._held:
            return held
        if chunk := await self._reply._next():
            return chunk
        raise StopAsyncIteration


class Sender(Protocol):
    """The provider, as those see it who only send."""

    async def send(self, inbound: Inbound, upstream: Upstream, body: bytes | None = None) -> Reply:
        """The reply, as soon as its headers are there. Raises as Upstreams.send does."""
        ...


class Upstreams:
    """Sends requests to the configured upstreams, and nowhere else. Made and closed inside the running loop."""

    def __init__(self, config: Config, metrics: Metrics) -> None:
        self._metrics = metrics
        self._default = config.upstream
        # Where our clients show a token of ours, their Authorization is meant for us alone.
        self._keeps_credential = not config.server.client_token_env
        self._routes = {one.name: _route(config, one) for one in (config.upstream, *config.upstreams)}
        secure = any(route.place.origin.scheme == "https" for route in self._routes.values())
        self._tls = ssl.create_default_context() if secure else None  # 25 ms: it reads the system's certificates
        self._pooled = self._session(force_close=False)
        self._fresh = self._session(force_close=True)

    async def send(self, inbound: Inbound, upstream: Upstream, body: bytes | None = None) -> Reply:
        """The reply, as soon as its headers are there. `body` stands in for the inbound one.

        Raises UpstreamUnreachable, UpstreamTimeout, UpstreamBroken; Refused where the target names nothing or the body on its way turns out
        misframed, ClientGone where the client hung up meanwhile. Tried again once, on a new connection, if a kept one turns out to be closed.
        """
        route = self._routes[upstream.name]
        sent = inbound.body if body is None else body
        try:
            try:
                return await self._attempt(self._pooled, route, inbound, sent)
            except Unanswered as unanswered:
                if not (unanswered.may_be_stale and unanswered.after_s < _RACE_S and _may_replay(sent)):
                    raise
                self._metrics.retried(Retry.STALE_CONNECTION)
                return await self._attempt(self._fresh, route, inbound, sent)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if isinstance(error.__cause__, ClientGone | Refused):
                raise error.__cause__ from None  # the client's side broke while its body was on the way
            failed = _ours(error, route)
            self._metrics.upstream_failed(failed.fault)
            raise failed from None

    async def probe(self) -> bool:
        """True if a connection to the default upstream, or to the proxy before it, can be opened now. No request is sent: some providers bill or count each."""
        route = self._routes[self._default.name]
        first = route.proxy or route.place.origin
        tls = self._tls if first.scheme == "https" else None
        try:
            async with asyncio.timeout(route.limits.connect_timeout_s):
                _, writer = await asyncio.open_connection(first.raw_host, first.port, ssl=tls)
        except (OSError, TimeoutError):
            return False
        writer.transport.abort()
        return True

    async def close(self) -> None:
        """Let go of all connections."""
        await self._pooled.close()
        await self._fresh.close()

    async def _attempt(self, session: aiohttp.ClientSession, route: _Route, inbound: Inbound, body: Body) -> Reply:
        headers = to_send(inbound, body, route.authorization, keeps_credential=self._keeps_credential)
        response = await session.request(
            inbound.method,
            route.place.url(inbound.target),
            data=Outgoing(headers, body, route.limits.read_idle_timeout_s),
            timeout=route.timeout,
            allow_redirects=False,
            proxy=route.proxy,
        )
        smuggles = any(_BREAKS_HEADERS.search(value) for _, value in response.raw_headers)
        if smuggles or (response.status == 101 and not _switches(response, inbound)):
            response.close()
            raise aiohttp.ClientPayloadError
        return Reply(response, route, self._metrics)

    def _session(self, *, force_close: bool) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            ssl=self._tls or True,
            limit=0,
            ttl_dns_cache=_DNS_TTL_S,
            force_close=force_close,
            socket_factory=_socket,
            keepalive_timeout=None if force_close else _KEEPALIVE_S,
        )
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            request_class=VerbatimRequest,
            response_class=WatchedResponse,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
        )


def _route(config: Config, upstream: Upstream) -> _Route:
    key = config.secret(upstream.api_key_env) if upstream.api_key_env else None
    timeout = aiohttp.ClientTimeout(
        total=None,  # aiohttp's default cuts every stream after five minutes
        connect=upstream.connect_timeout_s,  # the name lookup, which sock_connect leaves out
        sock_connect=upstream.connect_timeout_s,
        sock_read=upstream.read_idle_timeout_s,
    )
    place = Place.of(upstream.base_url)
    return _Route(place, upstream, timeout, f"Bearer {key}" if key else None, proxy_for(place.origin))


def _switches(response: aiohttp.ClientResponse, inbound: Inbound) -> bool:
    """Whether a 101 is an answer to this request, and its connection is still there to go on with."""
    offered = response.headers.get("Upgrade", "").lower() == "websocket"
    return inbound.upgrades and offered and response.connection is not None


def _may_replay(body: Body) -> bool:
    return body is None or isinstance(body, bytes) or (isinstance(body, Replayable) and body.may_replay())


def _ours(error: BaseException, route: _Route) -> UpstreamFailed:
    """What happened, in our words. The text of a foreign exception may hold the URL with its query, and is dropped."""
    limits = route.limits
    match error:
        case aiohttp.ConnectionTimeoutError():
            return UpstreamTimeout.connecting(route.origin, limits.connect_timeout_s)
        case aiohttp.SocketTimeoutError() | TimeoutError():
            return UpstreamTimeout.reading(route.origin, limits.read_idle_timeout_s)
        case aiohttp.ClientHttpProxyError():
            return UpstreamUnreachable(route.origin, f"the HTTP proxy before it ({VARIABLES}) answered {error.status}")
        case aiohttp.ClientProxyConnectionError():
            return UpstreamUnreachable(route.origin, f"the HTTP proxy before it ({VARIABLES}) cannot be reached")
        case aiohttp.ClientConnectorDNSError():
            return UpstreamUnreachable(route.origin, "its host name cannot be resolved")
        case aiohttp.ClientConnectorCertificateError():
            return UpstreamUnreachable(route.origin, "its TLS certificate is not trusted")
        case aiohttp.ClientSSLError():
            return UpstreamUnreachable(route.origin, "the TLS handshake failed")
        case aiohttp.ClientConnectorError():
            return UpstreamUnreachable(route.origin, _os_text(error.os_error.errno))
        case Unanswered():
            return UpstreamBroken(route.origin, "closed the connection without an answer")
        case _:
            return UpstreamBroken(route.origin, "sent an answer that is not valid HTTP, or broke it off")


def _os_text(number: int | None) -> str:
    return os.strerror(number).lower() if number else "the connection failed"


def _socket(address: tuple[int, int, int, str, tuple[object, ...]]) -> socket.socket:
    """A socket with keep-alive probes: a model may think for minutes, and address translators forget silent connections."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):  # not everywhere
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), 60)
    return made
