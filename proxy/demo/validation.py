"""What a provider refuses before it reads a token: OpenAI's rules, and those of two stricter families of chat templates."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from proxy.demo import message_rules, refusal
from proxy.demo.refusal import Refusal

_FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]+")
# Parameters of the chat completions endpoint. Source: OpenAI's openapi.yaml, CreateChatCompletionRequest.
KNOWN_PARAMETERS = frozenset(
    {
        "audio",
        "frequency_penalty",
        "function_call",
        "functions",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "metadata",
        "modalities",
        "model",
        "n",
        "parallel_tool_calls",
        "prediction",
        "presence_penalty",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "response_format",
        "safety_identifier",
        "seed",
        "service_tier",
        "stop",
        "store",
        "stream",
        "stream_options",
        "temperature",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "user",
        "verbosity",
        "web_search_options",
    }
)
_OUTPUT_KEYS = ("max_tokens", "max_completion_tokens")


class Strictness(StrEnum):
    """Whose rules hold for the order of roles."""

    OPENAI = "openai"
    ALTERNATING = "alternating"
    """User and assistant in turn and no tools: templates of Gemma, Llama 2 and older Mistral models."""
    MISTRAL = "mistral"
    """OpenAI's rules, and after a tool result only the assistant may speak."""


def fault(request: object, strictness: Strictness = Strictness.OPENAI, *, known_only: bool = False) -> Refusal | None:
    """The first fault of a request, or None if it is well-formed. `known_only`: refuse what the API reference does not name."""
    return next(_faults(request, strictness, known_only), None)


def requested_output(request: dict[str, Any]) -> tuple[str, int] | None:
    """The request's own limit of output tokens and the key it came under."""
    for key in reversed(_OUTPUT_KEYS):
        if request.get(key) is not None:
            return key, request[key]
    return None


def _faults(request: object, strictness: Strictness, known_only: bool) -> Iterator[Refusal]:
    if not isinstance(request, dict):
        yield Refusal("Invalid body: expected a JSON object.", None, None)
        return
    if known_only:
        yield from (refusal.unknown(key) for key in request if key not in KNOWN_PARAMETERS)
    if not isinstance(request.get("model"), str) or not request["model"]:
        yield Refusal("you must provide a model parameter")
    yield from _parameters(request)
    yield from _tools(request)
    messages = request.get("messages")
    if messages is None:
        yield refusal.missing("messages")
        return
    if not isinstance(messages, list):
        yield refusal.wrong_type("messages", "an array of objects", messages)
        return
    if not messages:
        yield refusal.empty_array("messages")
    yield from message_rules.shapes(messages)
    if strictness is Strictness.ALTERNATING:
        yield from message_rules.alternating_order(messages)
    yield from message_rules.openai_order(messages)
    if strictness is Strictness.MISTRAL:
        yield from message_rules.mistral_order(messages)
    if known_only:
        yield from message_rules.leftovers(messages)


def _parameters(request: dict[str, Any]) -> Iterator[Refusal]:
    for key in _OUTPUT_KEYS:
        yield from _integer(request, key, 1, None)
    if all(request.get(key) is not None for key in _OUTPUT_KEYS):
        text = "Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported."
        yield Refusal(text, "max_completion_tokens", "invalid_parameter_combination")
    yield from _integer(request, "n", 1, 128)
    stream = request.get("stream")
    if stream is not None and not isinstance(stream, bool):
        yield refusal.wrong_type("stream", "a boolean", stream)
    options = request.get("stream_options")
    if options is not None:
        if not stream:
            text = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
            yield Refusal(text, "stream_options")
        if not isinstance(options, dict):
            yield refusal.wrong_type("stream_options", "an object", options)


def _integer(request: dict[str, Any], key: str, low: int, high: int | None) -> Iterator[Refusal]:
    value = request.get(key)
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        yield refusal.wrong_type(key, "an integer", value)
        return
    if value < low:
        yield refusal.below(key, low, value)
    if high is not None and value > high:
        yield refusal.above(key, high, value)


def _tools(request: dict[str, Any]) -> Iterator[Refusal]:
    tools = request.get("tools")
    if tools is None:
        if request.get("tool_choice") is not None:
            text = "Invalid value for 'tool_choice': 'tool_choice' is only allowed when 'tools' are specified."
            yield Refusal(text, "tool_choice")
        return
    if not isinstance(tools, list):
        yield refusal.wrong_type("tools", "an array of objects", tools)
        return
    if not tools:
        yield refusal.empty_array("tools")
    for i, tool in enumerate(tools):
        yield from _tool(tool, f"tools[{i}]")


def _tool(tool: object, at: str) -> Iterator[Refusal]:
    if not isinstance(tool, dict):
        yield refusal.wrong_type(at, "an object", tool)
        return
    kind = tool.get("type")
    if kind not in {"function", "custom"}:
        yield (
            refusal.missing(f"{at}.type")
            if kind is None
            else refusal.unsupported(f"{at}.type", kind, ("function", "custom"))
        )
    if kind not in tool:
        yield refusal.missing(f"{at}.{kind}")
    if not isinstance(tool[kind], dict):
        yield refusal.wrong_type(f"{at}.{kind}", "an object", tool[kind])
    name = tool[kind].get("name")
    if name is None:
        yield refusal.missing(f"{at}.{kind}.name")
    if not isinstance(name, str) or not _FUNCTION_NAME.fullmatch(name):
        text = "string does not match pattern. Expected a string that matches the pattern '^[a-zA-Z0-9_-]+$'."
        yield Refusal(f"Invalid '{at}.{kind}.name': {text}", f"{at}.{kind}.name", "invalid_value")
    parameters = tool[kind].get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        yield refusal.wrong_type(f"{at}.{kind}.parameters", "an object", parameters)
