"""What can end an exchange early, and how we tell the client: OpenAI's error shape, marked as ours by `x-warmfold-error`.

No message holds a query, a header, a credential or a body: only our own words, the configured origin, and the setting to look at.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import orjson

ERROR_HEADER: Final = "x-warmfold-error"


class Ended(StrEnum):
    """How a relayed answer ended. A client that hangs up is no fault of the upstream's, hence counted apart."""

    COMPLETE = "complete"
    CLIENT_GONE = "client_gone"
    UPSTREAM_BROKE = "upstream_broke"


class UpstreamFault(StrEnum):
    """What the upstream did not do: the closed vocabulary of the metric."""

    UNREACHABLE = "unreachable"
    CONNECT_TIMEOUT = "connect_timeout"
    READ_TIMEOUT = "read_timeout"
    BROKEN = "broken"


class Answerable(Exception):
    """Something that we answer ourselves, if nothing has been sent yet. `code` is one of a closed set, `type` is OpenAI's word."""

    def __init__(self, status: int, message: str, *, type: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code

    def body(self) -> bytes:
        """The answer's body."""
        return error_body(self.message, self.type, self.code)


class Refused(Answerable):
    """A request that we do not pass on."""

    def __init__(self, status: int, message: str, *, code: str) -> None:
        super().__init__(status, message, type="invalid_request_error", code=code)


class UpstreamFailed(Answerable):
    """The upstream gave no answer, or not all of it. `fault` says in one word what happened."""

    def __init__(self, status: int, message: str, *, fault: UpstreamFault) -> None:
        super().__init__(status, message, type="server_error", code=f"upstream_{fault}")
        self.fault = fault


class UpstreamUnreachable(UpstreamFailed):
    """No connection came about: the request surely did not run. `why` is ours or the operating system's text for an error number."""

    def __init__(self, origin: str, why: str) -> None:
        message = f"warmfold cannot reach the upstream {origin}: {why}. The setting upstream.base_url says where the upstream is."
        super().__init__(502, message, fault=UpstreamFault.UNREACHABLE)


class UpstreamTimeout(UpstreamFailed):
    """The upstream was silent for too long; `fault` tells connecting from answering."""

    @classmethod
    def connecting(cls, origin: str, limit_s: float) -> UpstreamTimeout:
        """No connection in time: the request surely did not run."""
        message = (
            f"The upstream {origin} did not accept a connection within {limit_s:g} s (upstream.connect_timeout_s)."
        )
        return cls(504, message, fault=UpstreamFault.CONNECT_TIMEOUT)

    @classmethod
    def reading(cls, origin: str, limit_s: float) -> UpstreamTimeout:
        """Connected, then not a byte in time: the request may be running."""
        message = f"The upstream {origin} sent nothing for {limit_s:g} s (upstream.read_idle_timeout_s)."
        return cls(504, message, fault=UpstreamFault.READ_TIMEOUT)


class UpstreamBroken(UpstreamFailed):
    """The upstream hung up, or sent what is no HTTP, before its answer was complete. The request may have run."""

    def __init__(self, origin: str, what: str) -> None:
        message = f"The upstream {origin} {what}. If it always does, see whether upstream.base_url names an HTTP API."
        super().__init__(502, message, fault=UpstreamFault.BROKEN)


class ClientGone(Exception):
    """The client hung up, or took nothing for so long that we let go of it. Nobody is left to tell."""


def body_too_large(found: int | None, limit: int) -> Refused:
    """413 for a chat completion that we would have to hold in memory; `found` None: it was cut off while it was still coming."""
    seen = f"{found} bytes" if found is not None else "more"
    message = f"The request body has {seen}; at most {limit} bytes are accepted (server.max_body_bytes)."
    return Refused(413, message, code="request_too_large")


def error_body(message: str, type: str, code: str) -> bytes:
    """The JSON that an OpenAI SDK turns into its APIError. Source: platform.openai.com/docs/guides/error-codes."""
    return orjson.dumps({"error": {"message": message, "type": type, "param": None, "code": code}})
