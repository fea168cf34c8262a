"""The texts of messages: who said what, and where. What is no text is named, so that nothing vanishes without a trace."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import cast

Message = Mapping[str, object]


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
    return found if isinstance(found, str) else ""


def text(message: Message) -> str:
    """Its content as text; images, sounds and files are named in brackets."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "\n".join(_part(part) for part in content if isinstance(part, Mapping))


def _part(part: Mapping[str, object]) -> str:
    said = part.get("text")
    if isinstance(said, str):
        return said
    kind = str(part.get("type") or "part").removeprefix("input_").removesuffix("_url")
    held = part.get(str(part.get("type")))
    name = held.get("filename") or held.get("name") if isinstance(held, Mapping) else None
    return f"[{kind}: {name}]" if isinstance(name, str) else f"[{kind}]"


def calls(message: Message) -> Iterator[tuple[str, str]]:
    """Name and arguments of each tool call, legacy function calls included."""
    found = message.get("tool_calls")
    for call in found if isinstance(found, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            yield str(function.get("name")), str(function.get("arguments"))
    legacy = message.get("function_call")
    if isinstance(legacy, Mapping):
        yield str(legacy.get("name")), str(legacy.get("arguments"))
