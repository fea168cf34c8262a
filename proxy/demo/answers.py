"""What the simulated model says: an answer as a value, and the answerers that make one from a request."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.demo.template import Message, Request, body_tokens, message_text
from proxy.demo.tokenizer import Tokens, tokenize

FACT = re.compile(r"\b([A-Z][A-Z0-9_]{2,}) = [\"'`]?([^\s,;`\"'<]+)")
"""A statement as the demo's conversation plants them: KEY = value, the value without spaces."""
_QUESTION = re.compile(r"What is the value of ([A-Z][A-Z0-9_]{2,})\?")


@dataclass(frozen=True, slots=True)
class Answer:
    """One assistant message. `text` None is JSON null, as with tool calls alone; `reasoning` goes out as `reasoning_content`.

    `recorded`: a reply that a real model gave. It is never cut to a token limit, which was counted by another tokenizer.
    """

    text: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    finish_reason: str = "stop"
    reasoning: str | None = None
    function_call: Mapping[str, Any] | None = None
    refusal: str | None = None
    recorded: bool = False

    @classmethod
    def of(cls, message: Message) -> Answer:
        """The answer that a recorded assistant message was. Content given as parts becomes one string, as providers send it."""
        calls = tuple(message.get("tool_calls") or ())
        legacy = message.get("function_call")
        text = message.get("content")
        return cls(
            text=message_text(message) if isinstance(text, list) else text,
            tool_calls=calls,
            finish_reason="tool_calls" if calls else "function_call" if legacy else "stop",
            reasoning=message.get("reasoning_content") or message.get("reasoning"),
            function_call=legacy,
            refusal=message.get("refusal"),
            recorded=True,
        )

    def within(self, limit: int) -> Answer:
        """The same answer, or its beginning with finish reason `length` where it has more than `limit` tokens."""
        if self.recorded or len(self.tokens()) <= limit:
            return self
        thought = tokenize(self.reasoning or "")[:limit]
        text = tokenize(self.text or "")[: limit - len(thought)]
        return Answer(text="".join(text), finish_reason="length", reasoning="".join(thought) or None)

    def message(self) -> Message:
        """The assistant message as OpenAI sends it: members that say nothing are left out."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [dict(call) for call in self.tool_calls]
        if self.function_call:
            message["function_call"] = dict(self.function_call)
        message["refusal"] = self.refusal
        return message

    def tokens(self) -> list[str]:
        """What the model generated, without its end mark."""
        return body_tokens(self.message())


Answerer = Callable[[Request, Tokens], Answer]
"""From the request and the prompt's tokens to the answer."""


def short_answer(request: Request, tokens: Tokens) -> Answer:
    """A sentence that depends on the whole prompt and on nothing else."""
    digest = hashlib.blake2b("".join(tokens).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return Answer(text=f"That part is done and the tests pass; on to the next one (step {digest}).")


class ScriptedAnswerer:
    """Gives recorded replies one after another, the n-th call the n-th; past the end it falls back to `short_answer`."""

    def __init__(self, replies: Sequence[Message]) -> None:
        self._replies = list(replies)
        self.position = 0

    def __call__(self, request: Request, tokens: Tokens) -> Answer:
        if self.position >= len(self._replies):
            return short_answer(request, tokens)
        self.position += 1
        return Answer.of(self._replies[self.position - 1])


@dataclass(frozen=True, slots=True)
class FactAnswerer:
    """Answers each "What is the value of KEY?" of the last message with what the prompt states last, or says that it does not know.

    It looks at nothing but the prompt, so a fact that a compaction lost cannot be answered. What is no such question `otherwise` answers.
    """

    otherwise: Answerer = short_answer

    def __call__(self, request: Request, tokens: Tokens) -> Answer:
        keys = _QUESTION.findall(message_text(request["messages"][-1]))
        if not keys:
            return self.otherwise(request, tokens)
        stated = dict(FACT.findall("".join(tokens)))
        return Answer(text="\n".join(_said(key, stated.get(key)) for key in keys))


def _said(key: str, value: str | None) -> str:
    return f"Nothing in this conversation states {key}." if value is None else f"{key} = {plain(value)}"


def plain(value: str) -> str:
    """A stated value without the full stop or bracket that its sentence put behind it."""
    return value.rstrip(".:)]}>*|")
