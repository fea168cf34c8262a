"""The texts of messages: who said what, and where. What is no text is named, so that nothing vanishes without a trace."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import cast

from proxy.core import tokens

Message = Mapping[str, object]

_WORTH_TOKENS = 12
"""Less than that of a message is no use to anybody."""

# Words of scripts that put blanks between them; others may be cut anywhere. What is longer than this is no word.
_IN_WORD = re.compile(r"[!-~]{2}")
_WORD_AT_END = re.compile(r"(?<![!-~])[!-~]{1,200}\Z")
_WORD_AT_START = re.compile(r"\A[!-~]{1,200}(?![!-~])")

_MARK = 4
"""Tokens of the mark that a caller puts where something is left out."""


def parsed(element: bytes) -> Message | None:
    """The message of a slice, or None where it cannot be read."""
    try:
        found = json.loads(element)
    except (ValueError, RecursionError):
        return None
    return cast("Message", found) if isinstance(found, dict) else None


def role(message: Message) -> str:
    """The message's role; "" if it has none."""
    found = message.get("role")
    return _sound(found) if isinstance(found, str) else ""


def text(message: Message) -> str:
    """Its content as text; images, sounds and files are named in brackets."""
    content = message.get("content")
    if isinstance(content, str):
        return _sound(content)
    if not isinstance(content, list):
        return ""
    return _sound("\n".join(_part(part) for part in content if isinstance(part, Mapping)))


def _sound(text: str) -> str:
    """The text with a mark in place of half surrogate pairs, which JSON may hold and no store takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def _part(part: Mapping[str, object]) -> str:
    said = part.get("text")
    if isinstance(said, str):
        return said
    kind = str(part.get("type") or "part").removeprefix("input_").removesuffix("_url")
    held = part.get(str(part.get("type")))
    name = held.get("filename") or held.get("name") if isinstance(held, Mapping) else None
    return f"[{kind}: {name}]" if isinstance(name, str) else f"[{kind}]"


def calls(message: Message) -> Iterator[tuple[str, str]]:
    """Name and arguments of each tool call, custom ones and legacy function calls included."""
    found = message.get("tool_calls")
    for call in found if isinstance(found, list) else ():
        if isinstance(call, Mapping):
            yield from _call(call.get("function"), "arguments")
            yield from _call(call.get("custom"), "input")
    yield from _call(message.get("function_call"), "arguments")


def _call(called: object, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(called, Mapping):
        name, arguments = called.get("name"), called.get(key)
        yield _sound(str(name or "")), _sound(str(arguments or ""))


def start(text: str, chars: int) -> str:
    """Its first characters, at most so many, without half a word at their end, unless that is all there is."""
    found = text[:chars]
    return (_WORD_AT_END.sub("", found) if _is_in_word(text, chars) else found).rstrip() or found


def ends(text: str, room: int) -> tuple[str, str]:
    """Start and end of a text that is larger than `room` tokens, together at most that many; both empty where that is next to nothing.

    Neither ends inside a word: half a path or half a number would be a wrong one.
    """
    if room < _WORTH_TOKENS:
        return "", ""
    keep = len(text)
    while (size := sum(tokens.of_text(part) for part in _thirds(text, keep)) + _MARK) > room:
        keep = min(keep * room // size, keep - 1 - keep // 16)
    _, end = _thirds(text, keep)
    if _is_in_word(text, len(text) - len(end)):
        end = _WORD_AT_START.sub("", end)
    return start(text, keep * 2 // 3), end.lstrip()


def _thirds(text: str, chars: int) -> tuple[str, str]:
    """So many of its characters: two thirds at the start, one at the end."""
    return text[: chars * 2 // 3], text[len(text) - chars // 3 :]


def _is_in_word(text: str, at: int) -> bool:
    return 0 < at < len(text) and bool(_IN_WORD.fullmatch(text[at - 1 : at + 1]))
