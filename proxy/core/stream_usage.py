"""Asking a stream for its usage, and keeping the answer to that from a client that did not ask.

The only place where a request changes although no checkpoint applies; `[upstream] stream_usage = "never"` switches it off.
"""

from __future__ import annotations

import json
import re

import orjson

from proxy.core import jsonslice
from proxy.core.jsonslice import NotSliceable

_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')


def asking(body: bytes) -> bytes | None:
    """The request with stream_options.include_usage set; None where it cannot be taken apart. All else stays as it came."""
    try:
        found = jsonslice.members(body)
        kept = [m.raw for m in found if m.key != "stream_options"]
        options: object = {}
        for member in found:
            if member.key == "stream_options":
                value = json.loads(body[member.start : member.end])
                options = {} if value is None else value
        if not kept or not isinstance(options, dict):
            return None
    except (NotSliceable, ValueError, RecursionError):
        return None
    asked = json.dumps({**options, "include_usage": True}, separators=(",", ":")).encode()
    # Behind the last member, so that the bytes in front of it stay where they are.
    last = kept[-1]
    space = last[len(last.rstrip(b" \t\r\n")) :]
    kept[-1] = last[: len(last) - len(space)]
    return jsonslice.join_members(body, [*kept, b'"stream_options":' + asked + space])


MAX_EVENT_BYTES = 256 * 1024


class UsageFilter:
    """Withholds the one event that only carries usage (its `choices` are empty). Every other byte passes as it came.

    An event is passed on once it is whole; what is no event at the end of the stream is passed on by `rest()`.
    """

    def __init__(self) -> None:
        self._open = b""
        self._searched = 0

    def feed(self, chunk: bytes) -> bytes:
        """What of the stream may leave now."""
        data = self._open + chunk
        out: list[bytes] = []
        at = 0
        # Not again where it was searched before; an end may lie across the joint.
        while end := _EVENT_END.search(data, max(at, self._searched - 3)):
            event = data[at : end.end()]
            if not _is_usage_only(event):
                out.append(event)
            at = end.end()
        self._open = data[at:]
        self._searched = len(self._open)
        if len(self._open) > MAX_EVENT_BYTES:
            # No usage chunk is that long: let it go as it comes.
            out.append(self.rest())
        return b"".join(out)

    def rest(self) -> bytes:
        """What is left when the stream is over."""
        left, self._open, self._searched = self._open, b"", 0
        return left


def _is_usage_only(event: bytes) -> bool:
    if b'"usage"' not in event or not _NO_CHOICES.search(event):
        return False
    data = b"\n".join(line[5:] for line in re.split(rb"\r\n|\n|\r", event) if line.startswith(b"data:"))
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError:
        return False
    return (
        isinstance(chunk, dict)
        and chunk.get("choices") == []
        and isinstance(chunk.get("usage"), dict)
        and "error" not in chunk
    )
