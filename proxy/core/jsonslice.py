"""JSON as the bytes that came: where the members of an object and the elements of a list lie, without a parsed copy.

Rewriting works on these slices, so what is not changed stays as the client wrote it: spacing, key order, escapes, numbers
beyond 64 bits. A slice runs from one structural comma to the next, white space included; joined by "," the slices are the whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

T = TypeVar("T")

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array = msgspec.json.Decoder(list[msgspec.Raw])
_WHITE = b" \t\n\r"
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)

# A high surrogate without a low one behind it, or a low one without a high one in front. What stands behind a backslash is left alone: it may be
# no escape at all, and then the worst is a text that stays unread.
_HALF_PAIR = re.compile(
    rb"\\(?<!\\\\)u(?:[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u)[dD][c-fC-F][0-9a-fA-F]{2})"
)


class NotSliceable(ValueError):
    """Not an object (or list) that we may take apart: malformed, too deep, or a key stands twice."""


@dataclass(frozen=True, slots=True)
class Member:
    """One member of an object: its key, its slice of the text, and where its value lies (offsets into the whole text)."""

    key: str
    raw: bytes
    start: int
    end: int


def _skip(text: bytes, at: int) -> int:
    while text[at] in _WHITE:
        at += 1
    return at


def _size(raw: msgspec.Raw) -> int:
    return memoryview(raw).nbytes


def _taken_apart(decoder: msgspec.json.Decoder[T], text: bytes, start: int, end: int) -> tuple[T, bytes]:
    """What the decoder makes of text[start:end], and the text it read: as long, with other escapes in place of half surrogate pairs.

    JSON may hold them, and clients that count in UTF-16 write them wherever they cut an emoji; the decoder takes none.
    """
    try:
        return decoder.decode(memoryview(text)[start:end]), text
    except msgspec.DecodeError:
        mended = _HALF_PAIR.sub(rb"\\ufffd", text)
        if mended == text:
            raise
        return decoder.decode(memoryview(mended)[start:end]), mended


def members(text: bytes) -> tuple[Member, ...]:
    """The members of a JSON object in the order they stand. Raises NotSliceable, also where a key stands twice.

    Parsers disagree on which of two equal keys counts: we would judge one and the provider obey the other.
    """
    try:
        fields, read = _taken_apart(_object, text, 0, len(text))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise NotSliceable("not a JSON object") from error
    found = []
    at = _skip(text, 0) + 1
    for key, raw in fields.items():
        begin = at
        at = _skip(text, at)
        name = _STRING.match(text, at)
        if name is None:
            raise NotSliceable("a key stands twice")
        colon = _skip(text, name.end())
        start = _skip(text, colon + 1)
        end = start + _size(raw)
        # A dict keeps the first place and the last value of a key that stands twice: then text and value part here.
        if text[colon] != ord(":") or not read.startswith(memoryview(raw), start):
            raise NotSliceable("a key stands twice")
        at = _skip(text, end)
        found.append(Member(key, text[begin:at], start, end))
        if text[at] not in b",}":
            raise NotSliceable("a key stands twice")
        at += 1
    if not found:
        return ()
    if text[at - 1] != ord("}"):
        raise NotSliceable("a key stands twice")
    return tuple(found)


def elements(text: bytes, start: int, end: int) -> tuple[bytes, ...]:
    """The elements of the list at text[start:end], each with the white space around it. Raises NotSliceable."""
    try:
        raws, _ = _taken_apart(_array, text, start, end)
    except (msgspec.DecodeError, RecursionError) as error:
        raise NotSliceable("not a JSON list") from error
    found = []
    at = start + 1
    for raw in raws:
        begin = at
        at = _skip(text, _skip(text, at) + _size(raw))
        found.append(text[begin:at])
        at += 1
    return tuple(found)


def join_members(text: bytes, kept: Sequence[bytes]) -> bytes:
    """The object again with other members: what stands outside its braces stays."""
    opening = text.index(b"{") + 1
    closing = text.rindex(b"}")
    return text[:opening] + b",".join(kept) + text[closing:]
