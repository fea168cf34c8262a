"""What a provider asks of `messages`: each message's shape, and the order in which roles and tool results may come.

Each rule yields the faults it finds, in order; the first one is the answer. A later rule may rely on what an earlier one asked,
because it is not run once a fault was found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from proxy.demo import refusal
from proxy.demo.refusal import Refusal

Message = dict[str, Any]

ROLES = ("system", "assistant", "user", "function", "tool", "developer")
_TEXT_ONLY = ("text",)
PARTS = {
    "system": _TEXT_ONLY,
    "developer": _TEXT_ONLY,
    "tool": _TEXT_ONLY,
    "function": _TEXT_ONLY,
    "assistant": ("text", "refusal"),
    "user": ("text", "image_url", "input_audio", "file"),
}
# The member that carries each kind of part.
_CARRIER = {
    "text": "text",
    "refusal": "refusal",
    "image_url": "image_url",
    "input_audio": "input_audio",
    "file": "file",
}


def shapes(messages: Sequence[object]) -> Iterator[Refusal]:
    """Faults of single messages: roles, content, tool calls."""
    for i, message in enumerate(messages):
        at = f"messages[{i}]"
        if not isinstance(message, dict):
            yield refusal.wrong_type(at, "an object", message)
            return
        if "role" not in message:
            yield refusal.missing(f"{at}.role")
        if message.get("role") not in ROLES:
            yield refusal.unsupported(f"{at}.role", message.get("role"), ROLES)
        yield from _names(message, at)
        yield from _calls(message, at)
        yield from _content(message, at, i)


def openai_order(messages: Sequence[Message]) -> Iterator[Refusal]:
    """Faults in the order: each tool call is answered before anything else is said, and nothing else is answered.

    Ids need to be unique only among the calls that are open at one time: real logs use them again in later turns.
    """
    open_ids: list[str] = []
    answered: list[str] = []
    caller = 0
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            id = message["tool_call_id"]
            if id in open_ids:
                open_ids.remove(id)
                answered.append(id)
            elif id in answered:
                text = f"Invalid parameter: Duplicate value for 'tool_call_id' of '{id}' in message with role 'tool'."
                yield Refusal(text, f"messages.[{i}].tool_call_id")
            elif not open_ids and not answered:
                text = "Invalid parameter: messages with role 'tool' must be a response to a preceeding message with 'tool_calls'."
                yield Refusal(text, f"messages.[{i}].role")
            else:
                text = f"Invalid parameter: 'tool_call_id' of '{id}' not found in 'tool_calls' of previous message."
                yield Refusal(text, f"messages.[{i}].tool_call_id")
            continue
        yield from _unanswered(open_ids, caller)
        open_ids = [call["id"] for call in message.get("tool_calls") or ()] if message["role"] == "assistant" else []
        answered, caller = [], i
    yield from _unanswered(open_ids, caller)


def alternating_order(messages: Sequence[Message]) -> Iterator[Refusal]:
    """The fault of a conversation that is not user, assistant, user, assistant ... after one optional system message."""
    turns = messages[1:] if messages[0]["role"] == "system" else messages
    for i, message in enumerate(turns):
        if message["role"] != ("user", "assistant")[i % 2]:
            text = (
                "After the optional system message, conversation roles must alternate user/assistant/user/assistant/..."
            )
            yield Refusal(text, None, 400, type="BadRequestError")


def mistral_order(messages: Sequence[Message]) -> Iterator[Refusal]:
    """Faults in the order as Mistral's API and its templates see it: a user may not speak right after a tool."""
    kind = "invalid_request_message_order"
    for before, message in pairwise(messages):
        role = message["role"]
        if before["role"] == "tool" and role not in {"tool", "assistant"}:
            yield Refusal(f"Unexpected role '{role}' after role 'tool'", None, "3230", type=kind)
    last = messages[-1]
    if last["role"] not in {"user", "tool"} and not last.get("prefix"):
        text = f"Expected last role User or Tool (or Assistant with prefix True) for serving but got {last['role']}"
        yield Refusal(text, None, "3230", type=kind)


def leftovers(messages: Sequence[Message]) -> Iterator[Refusal]:
    """What clients copy out of a stream into a message, and OpenAI refuses: the `index` of a tool call."""
    for i, message in enumerate(messages):
        for j, call in enumerate(message.get("tool_calls") or ()):
            if "index" in call:
                yield refusal.unknown(f"messages[{i}].tool_calls[{j}].index")


def _unanswered(open_ids: Sequence[str], caller: int) -> Iterator[Refusal]:
    if open_ids:
        text = (
            "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. "
            f"The following tool_call_ids did not have response messages: {', '.join(open_ids)}"
        )
        yield Refusal(text, f"messages.[{caller}].role")


def _names(message: Message, at: str) -> Iterator[Refusal]:
    role, name = message["role"], message.get("name")
    if name is not None and not isinstance(name, str):
        yield refusal.wrong_type(f"{at}.name", "a string", name)
    if role == "function" and not name:
        yield refusal.missing(f"{at}.name")
    if role == "tool":
        if "tool_call_id" not in message:
            yield refusal.missing(f"{at}.tool_call_id")
        if not isinstance(message["tool_call_id"], str):
            yield refusal.wrong_type(f"{at}.tool_call_id", "a string", message["tool_call_id"])


def _calls(message: Message, at: str) -> Iterator[Refusal]:
    if message["role"] != "assistant":
        return
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            yield refusal.wrong_type(f"{at}.tool_calls", "an array of objects", calls)
        if not calls:
            yield refusal.empty_array(f"{at}.tool_calls")
        for j, call in enumerate(calls):
            yield from _call(call, f"{at}.tool_calls[{j}]")
    legacy = message.get("function_call")
    if legacy is not None:
        yield from _function(legacy, f"{at}.function_call", "arguments")


def _call(call: object, at: str) -> Iterator[Refusal]:
    if not isinstance(call, dict):
        yield refusal.wrong_type(at, "an object", call)
        return
    if "id" not in call:
        yield refusal.missing(f"{at}.id")
    if not isinstance(call["id"], str):
        yield refusal.wrong_type(f"{at}.id", "a string", call["id"])
    kind = call.get("type", "function")
    if kind not in {"function", "custom"}:
        yield refusal.unsupported(f"{at}.type", kind, ("function", "custom"))
    if kind not in call:
        yield refusal.missing(f"{at}.{kind}")
    yield from _function(call[kind], f"{at}.{kind}", "arguments" if kind == "function" else "input")


def _function(function: object, at: str, payload: str) -> Iterator[Refusal]:
    if not isinstance(function, dict):
        yield refusal.wrong_type(at, "an object", function)
        return
    for key in ("name", payload):
        if key not in function:
            yield refusal.missing(f"{at}.{key}")
        if not isinstance(function[key], str):
            yield refusal.wrong_type(f"{at}.{key}", "a string", function[key])


def _content(message: Message, at: str, i: int) -> Iterator[Refusal]:
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        return
    if content is None:
        speaks = (
            message.get("tool_calls") or message.get("function_call") or message.get("refusal") or message.get("audio")
        )
        if not (role == "assistant" and speaks) and role != "function":
            text = "Invalid value for 'content': expected a string, got null."
            yield Refusal(text, f"messages.[{i}].content")
        return
    if not isinstance(content, list):
        yield refusal.wrong_type(f"{at}.content", "one of a string or array of objects", content)
        return
    if not content:
        yield refusal.empty_array(f"{at}.content")
    for j, part in enumerate(content):
        yield from _part(part, role, i, f"{at}.content[{j}]")


def _part(part: object, role: str, i: int, at: str) -> Iterator[Refusal]:
    if not isinstance(part, dict):
        yield refusal.wrong_type(at, "an object", part)
        return
    kind = part.get("type")
    if kind is None:
        yield refusal.missing(f"{at}.type")
    if kind == "image_url" and role != "user":
        text = (
            f"Invalid 'messages[{i}]'. Image URLs are only allowed for messages with role 'user', "
            f"but this message with role '{role}' contains an image URL."
        )
        yield Refusal(text, f"messages[{i}]", "invalid_value")
    if kind not in PARTS[role]:
        yield refusal.unsupported(f"{at}.type", kind, PARTS[role])
    carrier = _CARRIER[str(kind)]
    if carrier not in part:
        yield refusal.missing(f"{at}.{carrier}")
    expected = (str, "a string") if kind in {"text", "refusal"} else (dict, "an object")
    if not isinstance(part[carrier], expected[0]):
        yield refusal.wrong_type(f"{at}.{carrier}", expected[1], part[carrier])
    if kind == "image_url" and not isinstance(part["image_url"].get("url"), str):
        yield refusal.missing(f"{at}.image_url.url")
