"""A chat completion request as the client wrote it, taken apart into slices and put together again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from proxy.core import jsonslice
from proxy.core.jsonslice import Member, NotSliceable

PREAMBLE_ROLES = ("system", "developer")

# What we read of a request besides its messages. Anything else only travels.
_READ = frozenset({"model", "stream", "n", "max_tokens", "max_completion_tokens", "cache_salt", "stream_options"})
_RENDERED = frozenset({"tools", "functions", "response_format"})
"""Members besides the messages whose text stands in the prompt."""

_any = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """`head` + messages joined by "," + `tail` is the body, byte for byte.

    `messages` holds all of them, preamble included, as slices with the white space around them. `scalars` are the parsed values
    of the few members that we read. `schema_bytes`: the length of those besides the messages whose text stands in the prompt (tools).
    """

    body: bytes
    head: bytes
    messages: tuple[bytes, ...]
    tail: bytes
    scalars: Mapping[str, object] = field(repr=False)
    schema_bytes: int = 0

    @property
    def model(self) -> str:
        """The model the client asked for; empty if it named none."""
        value = self.scalars.get("model")
        return value if isinstance(value, str) else ""

    @property
    def stream(self) -> bool:
        """Whether the answer comes as server-sent events."""
        return self.scalars.get("stream") is True

    @property
    def choices(self) -> int:
        """How many answers were asked for (`n`)."""
        value = self.scalars.get("n")
        return value if isinstance(value, int) else 1

    @property
    def requested_output(self) -> int:
        """Tokens the client reserves for the answer; 0 if it does not say."""
        for key in ("max_completion_tokens", "max_tokens"):
            value = self.scalars.get(key)
            if isinstance(value, int) and not isinstance(value, bool):
                return max(0, value)
        return 0

    @property
    def asks_for_usage(self) -> bool:
        """Whether the client itself wants the usage chunk of a stream."""
        options = self.scalars.get("stream_options")
        return isinstance(options, dict) and options.get("include_usage") is True

    def text(self, key: str) -> str:
        """A member that is a text, or "" where it is absent or something else."""
        value = self.scalars.get(key)
        return value if isinstance(value, str) else ""


def read(body: bytes, fields: frozenset[str] = frozenset()) -> ChatRequest | None:
    """The request, or None where the provider shall judge it alone: no JSON object, no list of messages, a key twice, no UTF-8, too deep.

    `fields` are further members to read into `scalars`: those that may hold a session id.
    """
    try:
        body.decode()  # JSON is UTF-8; what is only cut into slices is not looked at that closely
        found = jsonslice.members(body)
        scalars: dict[str, object] = {}
        where = None
        for member in found:
            if member.key == "messages":
                where = (member.start, member.end)
            elif member.key in _READ or member.key in fields:
                scalars[member.key] = _any.decode(memoryview(body)[member.start : member.end])
                if member.key == "cache_salt":
                    scalars[member.key] = _as_text(scalars[member.key])
        if where is None:
            return None
        start, end = where
        messages = jsonslice.elements(body, start, end)
    except (NotSliceable, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    if not messages:
        return None
    return ChatRequest(body, body[: start + 1], messages, body[end - 1 :], scalars, _schema_bytes(found))


def _as_text(salt: object) -> object:
    """A salt that is no text as JSON: SGLang takes a list of several, and what has another salt shares no cache."""
    return salt if salt is None or isinstance(salt, str) else msgspec.json.encode(salt).decode()


def schema_bytes(head: bytes, tail: bytes) -> int:
    """The same figure from what stands around the messages; 0 where that cannot be read."""
    try:
        return _schema_bytes(jsonslice.members(head + tail))
    except NotSliceable:
        return 0


def _schema_bytes(members: Iterable[Member]) -> int:
    return sum(member.end - member.start for member in members if member.key in _RENDERED)
