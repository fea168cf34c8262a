"""Who may ask: the bearer token, and on loopback the defence against a web page in the operator's browser."""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from proxy.admin.problem import Handler, Problem
from proxy.config.kinds import is_loopback

OPEN_PATH = "/healthz"
"""Answers without a token: a process supervisor has none, and the answer says nothing but that we run."""


def guard(host: str, token: str) -> Middleware:
    """Lets a request through, or raises Problem: 403 for a foreign Host or Origin, 401 without the token.

    `token` "" : open to all who reach a loopback address; the configuration refuses that on any other.
    """
    wanted = token.encode()

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if is_loopback(host):
            _refuse_foreign_host(request, host)
        if request.path != OPEN_PATH:
            if wanted:
                _refuse_wrong_token(request, wanted)
            else:
                _refuse_foreign_origin(request)
        return await handler(request)

    return guarded


def _refuse_wrong_token(request: web.Request, wanted: bytes) -> None:
    scheme, _, given = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    # Compared as bytes: compare_digest refuses non-ASCII text, and aiohttp hands undecodable bytes over as surrogates.
    matches = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), wanted)
    if scheme.lower() == "bearer" and matches:
        return
    raise Problem(
        401,
        "invalid_token",
        "Send the admin token as 'Authorization: Bearer ...'; admin.token_env names the variable that holds it.",
        headers={hdrs.WWW_AUTHENTICATE: 'Bearer realm="warmfold admin"'},
    )


def _refuse_foreign_host(request: web.Request, host: str) -> None:
    """DNS rebinding: a page of evil.example points its own name at 127.0.0.1 and is then, to the browser, of our origin.

    The browser still names evil.example in Host. An IP literal cannot be rebound, so those pass: containers and tunnels use them.
    """
    named = request.headers.getall(hdrs.HOST, [])
    if len(named) == 1 and _is_ours(_without_port(named[0]), host):
        return
    raise Problem(
        403,
        "host_not_allowed",
        "On a loopback address this listener answers to localhost, to an IP address and to admin.host; the request's Host is none of them.",
    )


def _refuse_foreign_origin(request: web.Request) -> None:
    """A page of another site cannot read our answers, but without a token it could still send a POST. Browsers name it in Origin."""
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is None or request.method in ("GET", "HEAD"):
        return
    if urlsplit(origin).netloc.lower() != request.headers.get(hdrs.HOST, "").lower():
        raise Problem(403, "origin_not_allowed", "A page of another origin may not change anything here.")


def _is_ours(name: str, host: str) -> bool:
    return _literal(name) is not None or _is_loopback_name(name) or name.lower() == host.lower()


def _is_loopback_name(name: str) -> bool:
    """RFC 6761, 6.3: localhost and all below it."""
    bare = name.lower().removesuffix(".")
    return bare == "localhost" or bare.endswith(".localhost")


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
