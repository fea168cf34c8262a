"""How a request is spelled towards the upstream: where it goes, and which of its headers go along. No I/O.

A target can only ever change the path and the query: the connection is opened to the configured authority, whatever the client wrote.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from yarl import URL

from proxy.errors import Refused

Headers = tuple[tuple[str, str], ...]
"""Names and values in order, duplicates kept. Bytes beyond ASCII are decoded as UTF-8 with surrogateescape, so they come back as they were."""

Body = bytes | AsyncIterable[bytes] | None

SWITCH: Final = (("Upgrade", "websocket"), ("Connection", "Upgrade"))
"""What a hop says to the next one of a connection that shall go on, or goes on, as a WebSocket."""

_OURS: Final = "x-warmfold-"

# RFC 9110, section 7.6.1, and those that RFC 2616 named. Trailer: neither side of ours passes trailers on.
_HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authentication-info",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


@dataclass(frozen=True, slots=True)
class Inbound:
    """A request as the client sent it: `target` is path and query, letter for letter. `body` None: it has none.

    A body that is an iterable has not been read yet, and yields its bytes as they arrive. The text form shows nothing but the method.
    """

    method: str
    target: str = field(repr=False)
    headers: Headers = field(repr=False)
    body: Body = field(default=None, repr=False)

    @property
    def upgrades(self) -> bool:
        """Whether the client asks to go on as a WebSocket (RFC 6455, section 4.1)."""
        return (
            self.method == "GET"
            and (self.header("upgrade") or "").strip().lower() == "websocket"
            and any("upgrade" in _options(value) for name, value in self.headers if name.lower() == "connection")
        )

    def with_body(self, body: bytes) -> Inbound:
        """The same request with these bytes as its body; the framing headers follow when it is sent."""
        return replace(self, body=body)

    def without(self, *names: str) -> Inbound:
        """The same request without the headers of these names (lower case)."""
        return replace(self, headers=tuple(pair for pair in self.headers if pair[0].lower() not in names))

    def header(self, name: str) -> str | None:
        """The first value of a header (name in lower case); None where there is none."""
        return next((value for key, value in self.headers if key.lower() == name), None)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an upstream lives. A client's `/v1/x` is `under` + /x; any other `/x` is `beside` + /x."""

    origin: URL
    under: str
    beside: str

    @classmethod
    def of(cls, base_url: str) -> Place:
        """The place that base_url names. Ours ends in /v1 too, so `/v1` of the client is the whole path of base_url, whatever that is."""
        base = URL(base_url, encoded=True)
        under = base.raw_path.rstrip("/")
        return cls(base.origin(), under, under.removesuffix("/v1") if under.endswith("/v1") else "")

    def url(self, target: str) -> URL:
        """The URL for a client's target, letter for letter. Raises Refused (400) where the target has no path.

        Path and query together are yarl's path: it takes an encoded path as it is, so that `?`, `%41` and `//` survive, and no part
        of it is ever parsed for an authority.
        """
        path = origin_form(target)
        ours = path == "/v1" or path.startswith(("/v1/", "/v1?"))
        path = self.under + path[3:] if ours else self.beside + path
        return self.origin.with_path(path if path.startswith("/") else "/" + path, encoded=True)


def origin_form(target: str) -> str:
    """Path and query of a request target. An absolute one (`GET http://host/x`) loses its authority: we are the server it means.

    Raises Refused (400) for `*` and for the authority form, which name nothing an upstream has. Source: RFC 9112, section 3.2.
    """
    if target.startswith("/"):
        return target
    scheme, separator, rest = target.partition("://")
    if not separator or not scheme.isalpha():
        raise Refused(400, "The request target must be a path, as in /v1/models.", code="invalid_target")
    authority_ends = min((at for at in map(rest.find, "/?") if at >= 0), default=len(rest))
    path = rest[authority_ends:]
    return path if path.startswith("/") else "/" + path


def to_send(inbound: Inbound, body: Body, authorization: str | None, *, keeps_credential: bool) -> Headers:
    """The headers that go to the upstream: end to end, in order, Host left out, lengths true to `body`; the wish for a WebSocket last.

    `authorization` replaces the client's; where it is None, the client's goes along only if `keeps_credential`.
    """
    hop_by_hop = _hop_by_hop(inbound.headers)
    length = len(body) if isinstance(body, bytes) else 0 if body is None else None
    sent: list[tuple[str, str]] = []
    has_length = has_authorization = False
    for name, value in inbound.headers:
        low = name.lower()
        if low == "content-length":
            if not has_length:
                sent.append((name, value if length is None else str(length)))
            has_length = True
        elif low == "authorization" and (authorization is not None or not keeps_credential):
            if authorization is not None and not has_authorization:
                sent.append((name, authorization))
            has_authorization = True
        elif low == "expect" and value.lower() == "100-continue":
            continue  # we answer it ourselves: aiohttp would hold the body back for as long as an upstream ignores it
        elif low != "host" and low not in hop_by_hop and not low.startswith(_OURS):
            sent.append((name, value))
    if authorization is not None and not has_authorization:
        sent.append(("Authorization", authorization))
    if length and not has_length:
        sent.append(("Content-Length", str(length)))
    if inbound.upgrades:
        sent += SWITCH
    return tuple(sent)


def end_to_end(headers: Headers) -> Headers:
    """The headers of an answer that are meant for the client. A length beside a transfer coding says nothing (RFC 9112, 6.3)."""
    hop_by_hop = _hop_by_hop(headers)
    if any(name.lower() == "transfer-encoding" for name, _ in headers):
        hop_by_hop |= {"content-length"}
    return tuple(pair for pair in headers if pair[0].lower() not in hop_by_hop)


def decoded(raw: tuple[tuple[bytes, bytes], ...]) -> Headers:
    """Headers as text, without loss."""
    return tuple(
        (name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape")) for name, value in raw
    )


def encoded(text: str) -> bytes:
    """The bytes that a header, a target or a reason phrase came as."""
    return text.encode("utf-8", "surrogateescape")


def _hop_by_hop(headers: Headers) -> frozenset[str]:
    named = [value for name, value in headers if name.lower() == "connection"]
    if not named:
        return _HOP_BY_HOP
    return _HOP_BY_HOP.union(option for value in named for option in _options(value))


def _options(value: str) -> Iterable[str]:
    return (option.strip().lower() for option in value.split(","))
