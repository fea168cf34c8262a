"""A request -> the prompt a model would read: ChatML, as many open models use it.

The system prompt comes first and the tools behind it, then the messages, then the mark at which the answer starts. Whatever would
change the prompt of a real model changes the tokens here; sampling parameters, token limits and `tool_choice` do not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from proxy.demo.tokenizer import Tokens, tokenize

Message = dict[str, Any]
Request = dict[str, Any]

# Marks are single tokens: the same characters in a message's text are cut into pieces and never equal one.
START, END = "<|im_start|>", "<|im_end|>"
GENERATION: Tokens = (START, "assistant", "\n")
ATTACHMENT_TOKENS = 96
"""What an image, a sound or a file takes; real models take tens to thousands, by size."""

_PREFIX_PARAMETERS = ("reasoning_effort", "verbosity", "chat_template_kwargs", "response_format")
"""Those that providers name as part of the cached prefix. Source: OpenAI's prompt caching guide, miss reasons."""


def render(request: Request, *, strip_reasoning: bool = False) -> Tokens:
    """The prompt of a request, generation mark included.

    `strip_reasoning`: leave out what the assistant thought before the last user message, as several chat templates do.
    """
    messages: Sequence[Message] = request["messages"]
    system = messages[0] if messages and messages[0]["role"] in {"system", "developer"} else None
    tokens = [*_opening(request, system)]
    rest = messages[1:] if system else messages
    last_user = max((i for i, m in enumerate(rest) if m["role"] == "user"), default=-1)
    for i, message in enumerate(rest):
        tokens += message_tokens(message, reasoning=not strip_reasoning or i > last_user)
    tokens += GENERATION
    return tuple(tokens)


def message_tokens(message: Message, *, reasoning: bool = True) -> list[str]:
    """One message between its marks."""
    return [*_head(message), *body_tokens(message, reasoning=reasoning), END, "\n"]


def body_tokens(message: Message, *, reasoning: bool = True) -> list[str]:
    """What a message says. For an assistant message these are the tokens the model generated, so an answer sent back is a cache hit."""
    body: list[str] = []
    thought = message.get("reasoning_content") or message.get("reasoning")
    if reasoning and isinstance(thought, str) and thought:
        body += ["<think>", *tokenize(thought), "</think>"]
    if message.get("tool_call_id"):
        body += ["<|tool_call_id|>", *tokenize(message["tool_call_id"])]
    body += _content(message.get("content"))
    if message.get("refusal"):
        body += ["<|refusal|>", *tokenize(message["refusal"])]
    for call in message.get("tool_calls") or ():
        body += _call(call.get("id") or "", call.get("function") or call.get("custom") or {})
    if message.get("function_call"):
        body += _call("", message["function_call"])
    return body


def message_text(message: Mapping[str, Any]) -> str:
    """The text of a message whose content is a string, null or parts; other parts are left out."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "\n".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))


def compact(value: object) -> str:
    """JSON without spaces, keys in the order they came."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def declared_tokens(request: Request) -> int:
    """How many of a prompt's tokens declare its tools and functions."""
    return sum(len(tokenize(compact(tool))) + 1 for tool in _declared(request))


def _declared(request: Request) -> list[Mapping[str, Any]]:
    return [*(request.get("tools") or ()), *(request.get("functions") or ())]


def _opening(request: Request, system: Message | None) -> Iterator[str]:
    declared = _declared(request)
    parameters = {key: request[key] for key in _PREFIX_PARAMETERS if request.get(key) not in (None, {"type": "text"})}
    if system is None and not declared and not parameters:
        return
    yield from _head(system or {"role": "system"})
    if system:
        yield from body_tokens(system)
    if declared:
        yield "<tools>"
        for tool in declared:
            yield from (*tokenize(compact(tool)), "\n")
        yield "</tools>"
    for key, value in parameters.items():
        yield from (f"<|{key}|>", *tokenize(compact(value)))
    yield from (END, "\n")


def _head(message: Message) -> Tokens:
    name = message.get("name")
    return (START, message["role"], *tokenize(f" name={name}" if name else ""), "\n")


def _call(id: str, function: Mapping[str, Any]) -> list[str]:
    name, arguments = function.get("name", ""), function.get("arguments", function.get("input", ""))
    text = arguments if isinstance(arguments, str) else compact(arguments)
    return ["<tool_call>", *tokenize(id), *tokenize(f" {name} "), *tokenize(text), "</tool_call>"]


def _content(content: object) -> Sequence[str]:
    if isinstance(content, str):
        return tokenize(content)
    if isinstance(content, list):
        return [token for part in content for token in _part(part)]
    return ()


def _part(part: Mapping[str, Any]) -> Sequence[str]:
    if part.get("type") == "refusal":
        return ("<|refusal|>", *tokenize(part.get("refusal") or ""))
    if isinstance(part.get("text"), str):
        return tokenize(part["text"])
    # Placeholder tokens that carry the hash of what they stand for, as vLLM's block hashes do. Never the base64 as text.
    attached = compact({key: value for key, value in part.items() if key != "cache_control"})
    digest = hashlib.blake2b(attached.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return (f"<|{part.get('type')} {digest}|>",) * ATTACHMENT_TOKENS
