"""What a request asks for, read once: ids, page sizes, ranges. Each reader raises Problem(400 or 404) and never quotes what it refused."""

from __future__ import annotations

from dataclasses import dataclass

import orjson
from aiohttp import web

from proxy.admin.problem import Problem
from proxy.core.model import SessionId

DEFAULT_LIMIT = 50
MAX_LIMIT = 500
"""Sessions of one page: each is a read of its own in the store."""

_MAX_CURSOR = 256
_MAX_TENANT = 32  # as SessionId.parse allows


@dataclass(frozen=True, slots=True)
class Region:
    """The region that was asked for. `to` None: the compactor chooses all of it; `from_` None: from the start."""

    from_: int | None = None
    to: int | None = None


def session_id(request: web.Request) -> SessionId:
    """The id in the path. A malformed one is 404 like an unknown one: there is no such session either way."""
    id_ = SessionId.parse(request.match_info["id"])
    if id_ is None:
        raise Problem(
            404, "session_not_found", "That is not a session id; one has three parts: tenant-root-lineage.", param="id"
        )
    return id_


def tenant(request: web.Request) -> str:
    """The tenant hash in the path: the first part of its sessions' ids."""
    text = request.match_info["tenant"]
    if not (text.isalnum() and text.isascii() and len(text) <= _MAX_TENANT):
        raise Problem(
            404, "tenant_not_found", "That is not a tenant hash; it is the first part of a session id.", param="tenant"
        )
    return text


def page(request: web.Request) -> tuple[int, str]:
    """limit and cursor of a listing; absent or empty means 50, and the start."""
    limit = request.query.get("limit", "") or str(DEFAULT_LIMIT)
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 4 and 1 <= int(limit) <= MAX_LIMIT):
        raise Problem(400, "invalid_limit", f"limit is a whole number from 1 to {MAX_LIMIT}.", param="limit")
    cursor = request.query.get("cursor", "")
    if len(cursor) > _MAX_CURSOR or not (cursor.isascii() and cursor.isprintable()):
        raise Problem(400, "invalid_cursor", "cursor is the one that the page before this one gave.", param="cursor")
    return int(limit), cursor


async def region(request: web.Request) -> Region:
    """The body of a compaction: none, {"from": i, "to": k}, or {"to": k}. Its Content-Type does not matter."""
    body = await request.read()
    if not body.strip():
        return Region()
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise Problem(400, "invalid_json", "The body is not JSON; send none, or an object with from and to.") from None
    if not isinstance(value, dict) or not value.keys() <= {"from", "to"}:
        raise Problem(400, "invalid_region", "The body is an object with from, to, both or neither, and nothing else.")
    from_, to = _position(value, "from"), _position(value, "to")
    if from_ is not None and to is None:
        raise Problem(400, "invalid_region", "from needs a to; to alone covers from the start.", param="to")
    if to is not None and to <= (from_ or 0):
        raise Problem(
            400, "invalid_region", f"The region [{from_ or 0}, {to}) is empty: to must be larger than from.", param="to"
        )
    return Region(from_, to)


def upstream_credential(request: web.Request) -> str | None:
    """The provider's credential for a compaction, as an Authorization value."""
    return request.headers.get("x-upstream-authorization", "").strip() or None


def _position(value: dict[str, object], name: str) -> int | None:
    found = value.get(name)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise Problem(
            400, "invalid_region", f"{name} counts messages of the conversation: a whole number, 0 or more.", param=name
        )
    return found
