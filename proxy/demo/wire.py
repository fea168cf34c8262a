"""An answer -> the bytes of a chat completion, whole or as server-sent events, in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from proxy.demo.answers import Answer
from proxy.demo.tokenizer import tokenize

DONE = b"data: [DONE]\n\n"
_EPOCH_S = 1_767_225_600
"""`created` counts from here, a second per call: no clock, so that two runs give the same bytes."""
_ARGUMENT_PIECES = 3


class UsageReport(StrEnum):
    """How much a provider tells about the tokens it counted."""

    FULL = "full"
    """With cached and reasoning tokens."""
    COUNTS = "counts"
    """Prompt, completion and total alone, as many local servers do."""
    NONE = "none"
    """No usage at all."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer and what it cost. `choices` is the request's `n`; they are all alike."""

    number: int
    model: str
    answer: Answer
    prompt_tokens: int
    cached_tokens: int
    choices: int = 1
    report: UsageReport = UsageReport.FULL

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices; a model that says nothing still generates its end mark."""
        return max(1, len(self.answer.tokens())) * self.choices

    def usage(self) -> dict[str, Any] | None:
        """OpenAI's usage object as far as it is reported."""
        if self.report is UsageReport.NONE:
            return None
        completion = self.completion_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
        }
        if self.report is UsageReport.FULL:
            reasoning = len(tokenize(self.answer.reasoning or "")) * self.choices
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens, "audio_tokens": 0}
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning, "audio_tokens": 0}
        return usage

    def body(self) -> bytes:
        """The JSON answer to a request that does not stream."""
        choices = [
            {"index": i, "message": self.answer.message(), "logprobs": None, "finish_reason": self.answer.finish_reason}
            for i in range(self.choices)
        ]
        payload = {**self._envelope("chat.completion"), "choices": choices}
        usage = self.usage()
        return dump(payload | {"usage": usage} if usage else payload)

    def events(self, *, include_usage: bool, chunk_tokens: int) -> Iterator[bytes]:
        """The events of a stream, `[DONE]` last.

        With `include_usage` every chunk says `"usage": null` and one more, without choices, says what was used.
        """
        envelope = self._envelope("chat.completion.chunk")
        empty = {"usage": None} if include_usage else {}
        for i in range(self.choices):
            for delta in self._deltas(chunk_tokens):
                choice = {"index": i, "delta": delta, "logprobs": None, "finish_reason": None}
                yield _event({**envelope, "choices": [choice], **empty})
            last = {"index": i, "delta": {}, "logprobs": None, "finish_reason": self.answer.finish_reason}
            yield _event({**envelope, "choices": [last], **empty})
        usage = self.usage()
        if include_usage and usage:
            yield _event({**envelope, "choices": [], "usage": usage})
        yield DONE

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.number:08d}",
            "object": kind,
            "created": _EPOCH_S + self.number,
            "model": self.model,
            "service_tier": "default",
            "system_fingerprint": None,
        }

    def _deltas(self, chunk_tokens: int) -> Iterator[dict[str, Any]]:
        answer = self.answer
        yield {"role": "assistant", "content": None if answer.text is None else "", "refusal": None}
        for piece in _pieces(answer.reasoning, chunk_tokens):
            yield {"reasoning_content": piece}
        for piece in _pieces(answer.text, chunk_tokens):
            yield {"content": piece}
        for piece in _pieces(answer.refusal, chunk_tokens):
            yield {"refusal": piece}
        for i, call in enumerate(answer.tool_calls):
            kind = "custom" if "custom" in call else "function"
            payload = "input" if kind == "custom" else "arguments"
            for part in _call_parts(call[kind], payload):
                first = {"id": call.get("id"), "type": kind} if "name" in part else {}
                yield {"tool_calls": [{"index": i, **first, kind: part}]}
        if answer.function_call:
            for part in _call_parts(answer.function_call, "arguments"):
                yield {"function_call": part}


def dump(value: object) -> bytes:
    """JSON bytes. A lone surrogate, which orjson refuses, goes out as the escape that it came in as."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value).encode()


def _event(payload: Mapping[str, Any]) -> bytes:
    return b"data: " + dump(payload) + b"\n\n"


def _pieces(text: str | None, chunk_tokens: int) -> Iterator[str]:
    tokens = tokenize(text or "")
    for start in range(0, len(tokens), chunk_tokens):
        yield "".join(tokens[start : start + chunk_tokens])


def _call_parts(function: Mapping[str, Any], payload: str) -> Iterator[dict[str, str]]:
    """The name with empty arguments first, then the arguments in a few pieces."""
    arguments = function[payload]
    yield {"name": function["name"], payload: ""}
    size = max(1, -(-len(arguments) // _ARGUMENT_PIECES))
    for start in range(0, len(arguments), size):
        yield {payload: arguments[start : start + size]}
