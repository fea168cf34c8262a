"""One call to an admin listener, from a command line: the JSON it answers, or a sentence for the person who asked."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib import error, request
from urllib.parse import quote, urlsplit

READ_TIMEOUT_S = 15.0
COMPACT_TIMEOUT_S = 900.0
"""A compaction is answered when it has ended: up to two calls of compaction.timeout_s (120) each, or of what was set instead."""


class CallFailed(Exception):
    """No useful answer; the message is one line that says what to do. `code`: the listener's word for it, "" where none came."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Admin:
    """Where the listener is and what it wants to see. `token` "": none is sent."""

    url: str
    token: str

    def get(self, *path: str, query: str = "") -> dict[str, Any]:
        """The answer to a GET. Raises CallFailed."""
        return self._call("GET", path, READ_TIMEOUT_S, query=query)

    def post(
        self, *path: str, body: dict[str, int] | None = None, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """The answer to a POST, which may take as long as a compaction. Raises CallFailed."""
        return self._call(
            "POST", path, COMPACT_TIMEOUT_S, body=json.dumps(body).encode() if body else b"", headers=headers
        )

    def delete(self, *path: str) -> dict[str, Any]:
        """The answer to a DELETE. Raises CallFailed."""
        return self._call("DELETE", path, READ_TIMEOUT_S)

    def _call(
        self,
        method: str,
        path: tuple[str, ...],
        timeout_s: float,
        *,
        query: str = "",
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        base = _base(self.url)
        target = base + "/" + "/".join(quote(part, safe="") for part in path) + (f"?{query}" if query else "")
        sent = {"Accept": "application/json", **(headers or {})}
        if body:
            sent["Content-Type"] = "application/json"
        if self.token:
            sent["Authorization"] = f"Bearer {self.token}"
        try:
            with _OPENER.open(request.Request(target, body, sent, method=method), timeout=timeout_s) as reply:
                return _read(reply.read(), base)
        except error.HTTPError as refused:
            with refused:
                raise _refusal(refused.code, refused.read(), base) from None
        except (OSError, http.client.HTTPException) as failed:
            # URLError wraps the cause and says nothing of its own.
            cause = failed.reason if isinstance(failed, error.URLError) else failed
            raise CallFailed(
                f"no admin listener at {base} ({_one_line(str(cause))}); is warmfold serving? --admin names another"
            ) from None
        except ValueError:
            raise CallFailed("the token or the credential holds a character that no header can carry") from None


class _NoRedirect(request.HTTPRedirectHandler):
    """The listener never redirects, and urllib would take the token along to wherever it is sent."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _opener() -> request.OpenerDirector:
    # Not build_opener: no file:// or ftp://, and no proxy from the environment, which could not reach our loopback.
    opener = request.OpenerDirector()
    for handler in (
        request.HTTPHandler(),
        request.HTTPSHandler(),
        request.HTTPDefaultErrorHandler(),
        request.HTTPErrorProcessor(),
        _NoRedirect(),
    ):
        opener.add_handler(handler)
    return opener


_OPENER = _opener()


def _base(url: str) -> str:
    """The URL that paths are put behind."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        raise CallFailed("that is no URL; set another with --admin") from None
    if "@" in parts.netloc:
        raise CallFailed("a URL for --admin holds no user name or password; the token goes into WARMFOLD_ADMIN_TOKEN")
    if not usable or parts.query or parts.fragment:
        raise CallFailed(f"{_one_line(url) or 'an empty text'} is no http:// or https:// URL; set another with --admin")
    return url.rstrip("/")


def _read(body: bytes, base: str) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise CallFailed(
            f"{base} does not answer as an admin listener does; --admin names another (the proxy's own port is not it)"
        )
    return value


def _refusal(status: int, body: bytes, base: str) -> CallFailed:
    if status == 401:
        return CallFailed(f"{base} wants the admin token: set WARMFOLD_ADMIN_TOKEN to the one it was started with")
    value = _read(body, base)
    error_ = value.get("error")
    told = error_ if isinstance(error_, dict) else {}
    message, code = told.get("message"), told.get("code")
    return CallFailed(
        _one_line(message) if isinstance(message, str) else f"{base} answered {status}",
        code if isinstance(code, str) else "",
    )


def _one_line(text: str) -> str:
    """Without line breaks and control characters: what came over the wire must not move the cursor."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
