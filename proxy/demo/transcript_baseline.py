"""How a conversation is compacted elsewhere: a summariser with a system prompt of its own reads a flattened transcript.

The demo's yardstick. It keeps the turn alive as warmfold does, but its request shares no prefix with the one that the provider has
just computed, so all of it is computed again, and the client waits for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.demo.summariser import TRANSCRIPT_OPENING
from proxy.demo.template import Message, Request, message_text

SYSTEM = (
    f"{TRANSCRIPT_OPENING} between a user and an assistant. Read the transcript and write a summary from which the work can go on: "
    "the task, the user's wishes, decisions, files, exact values, errors, and what comes next."
)
_TRIGGER = 0.75
_KEPT_SHARE = 0.25
_SUMMARY_SHARE = 0.125
_MAX_RESULT_CHARS = 500
_MAX_TRANSCRIPT_CHARS = 30_000
_CHARS_PER_TOKEN = 4

Send = Callable[[Request], Awaitable[Message | None]]
"""Sends a request; the assistant message, or None where it was refused."""


@dataclass(frozen=True, slots=True)
class TranscriptBaseline:
    """Shortens a history before a request, once three quarters of the window are used."""

    send: Send
    model: str
    window_tokens: int

    async def shorten(self, history: Sequence[Message], used_tokens: int) -> list[Message]:
        """The history to go on with: as it was, or preamble, summary and the newest messages. `used_tokens`: what the last turn took."""
        preamble = [message for message in history[:1] if message["role"] == "system"]
        rest = list(history[len(preamble) :])
        end = _cut(rest, round(self.window_tokens * _KEPT_SHARE * _CHARS_PER_TOKEN))
        if used_tokens < self.window_tokens * _TRIGGER or end == 0:
            return list(history)
        asked = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": transcript(rest[:end])}]
        limit = round(self.window_tokens * _SUMMARY_SHARE)
        summary = await self.send({"model": self.model, "messages": asked, "max_tokens": limit})
        if summary is None:
            return list(history)
        note = {"role": "user", "content": f"Summary of the conversation so far:\n\n{summary['content']}"}
        return [*preamble, note, *rest[end:]]


def transcript(messages: Sequence[Message]) -> str:
    """The messages as one text; results of tools are cut, and of a text too long the beginning goes."""
    return "\n\n".join(_entry(message) for message in messages)[-_MAX_TRANSCRIPT_CHARS:]


def _entry(message: Message) -> str:
    text = message_text(message)
    if message["role"] == "tool":
        return f"Tool Result [{message['tool_call_id']}]: {text[:_MAX_RESULT_CHARS]}"
    calls = [f"[Tool: {call['function']['name']}]" for call in message.get("tool_calls") or ()]
    return f"{message['role'].capitalize()}: " + "\n".join([*([text] if text else []), *calls])


def _cut(messages: Sequence[Message], kept_chars: int) -> int:
    """Where the part begins that stays: the newest messages within the limit, and no tool result without its call."""
    chars = 0
    end = len(messages)
    while end > 0 and chars + _size(messages[end - 1]) <= kept_chars:
        end -= 1
        chars += _size(messages[end])
    while end < len(messages) and messages[end]["role"] == "tool":
        end += 1
    return end


def _size(message: Message) -> int:
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    return len(message_text(message)) + sum(len(call["function"]["arguments"]) for call in calls)
