"""`warmfold sessions`: what it prints and how it ends. Each function returns the exit status: 0, or 1 with one line on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlencode

from proxy.admin import printed
from proxy.admin.asked import MAX_LIMIT
from proxy.admin.call import Admin, CallFailed

_READ_AHEAD: Final = MAX_LIMIT
"""The listener's pages are in no order, so what is shown is the newest of so many sessions, or of `limit` if that is more."""


def list_sessions(admin_url: str, token: str, limit: int, *, full: bool = False) -> int:
    """Up to `limit` sessions as a table, the one with the newest turn first, read page by page."""

    def listed() -> None:
        admin = Admin(admin_url, token)
        found: list[dict[str, Any]] = []
        cursor, more = "", True
        while more and len(found) < max(limit, _READ_AHEAD):
            page = admin.get("sessions", query=urlencode({"limit": MAX_LIMIT, "cursor": cursor}))
            found += page["sessions"]
            cursor = page["cursor"]
            more = bool(cursor)
        found.sort(key=lambda one: one["last_turn_at"] or "", reverse=True)
        printed.sessions(found[:limit], full=full)
        # On stderr: a pipe gets rows and nothing else.
        if more or len(found) > limit:
            among = f", the newest of {len(found)}" if more else ""
            _say(f"there are more than these {min(limit, len(found))}{among}; --limit shows more of them")

    return _status(listed)


def show(admin_url: str, token: str, id: str, *, full: bool = False) -> int:
    """One session: its facts, its checkpoints, its journal."""
    return _status(lambda: printed.session(Admin(admin_url, token).get("sessions", id), full=full))


def summary(admin_url: str, token: str, id: str) -> int:
    """The text of the checkpoint in force, and nothing else."""
    return _status(lambda: printed.text(Admin(admin_url, token).get("sessions", id, "summary")["text"]))


def compact(
    admin_url: str,
    token: str,
    id: str,
    credential: str,
    *,
    variable: str = "OPENAI_API_KEY",
    from_: int | None = None,
    to: int | None = None,
) -> int:
    """Compacts now and waits for it. `credential`: the provider's key, or a whole Authorization value; "" where the proxy has its own.

    `variable`: where the key was looked for.
    """

    def compacted() -> None:
        given = {"x-upstream-authorization": _authorization(credential)} if credential.strip() else {}
        body = {name: at for name, at in (("from", from_), ("to", to)) if at is not None}
        try:
            told = Admin(admin_url, token).post("sessions", id, "compact", body=body, headers=given)
        except CallFailed as failed:
            if failed.code == "forbidden":
                raise CallFailed(_key_wanted(variable, missing=not given)) from None
            raise
        printed.compaction(told)

    return _status(compacted)


def undo(admin_url: str, token: str, id: str) -> int:
    """Buries the checkpoint in force."""

    def undone() -> None:
        told = Admin(admin_url, token).post("sessions", id, "undo")
        buried = ", ".join(told["undone"])
        printed.line(
            f"undone: checkpoint {buried}; soft compaction rests until turn {told['soft_compaction_resumes_at_turn']}"
        )

    return _status(undone)


def delete(admin_url: str, token: str, id: str) -> int:
    """Forgets the session."""
    return _status(lambda: printed.deletion(Admin(admin_url, token).delete("sessions", id)))


def _key_wanted(variable: str, *, missing: bool) -> str:
    found = f"{variable} is not set" if missing else f"the key in {variable} is not the one"
    wanted = "the call needs the key that the session's client uses"
    return f"{wanted}, and {found}: set {variable}, or name another variable with --credential-env"


def _authorization(credential: str) -> str:
    """A bare key is what the SDKs take, and they send it as a bearer token."""
    given = credential.strip()
    return given if " " in given else f"Bearer {given}"


def _status(act: Callable[[], None]) -> int:
    try:
        act()
    except CallFailed as failed:
        _say(str(failed))
        return 1
    except (KeyError, TypeError, AttributeError):
        _say(
            "the answer lacks what this client expects: are client and proxy of the same version, and is --admin the admin port?"
        )
        return 1
    return 0


def _say(sentence: str) -> None:
    sys.stderr.write(f"warmfold: {sentence}\n")
