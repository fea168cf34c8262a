"""Does a provider's answer say that the prompt exceeded the context window, and which numbers does it state?

It may be a code, a field or a sentence, in an error object, a plain text, JSON inside a string, or the first event of a stream with status
200. Read is only where the provider itself speaks: not what repeats the request (`input`, `failed_generation`), and not an error about one
field of the request, which quotes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import orjson

from proxy.core import overflow_text
from proxy.core.answer import events
from proxy.core.overflow_text import UNNUMBERED, Overflow

__all__ = ["Overflow", "of_error", "of_event", "silent"]

_MAX_BYTES = 65_536
_MAX_DEPTH = 8
"""Objects, lists and JSON in strings inside each other: a provider's error in a gateway's error in another one's takes six."""

_STATUSES = frozenset({400, 413, 422, 424, 500, 501, 502})
"""Refused, or failed. A limit of rate or credit (429, 402), a missing right and an overloaded server say nothing about the window."""

_SILENT_FLOOR_TOKENS = 1024
_SILENT_SHARE = 0.4

# Where an error speaks, or holds another one. What repeats the request has other names.
_SPEAKING = ("error", "errors", "message", "msg", "detail", "details")
"""How such keys end: also error_message, status_msg (MiniMax), innererror (Azure), previous_errors (OpenRouter), external_model_error."""

_HOLDING = frozenset({"raw", "metadata", "reason", "title", "response", "base_resp"})
_CODES = ("code", "type", "error_type", "error_code", "status")

# 1261 is Z.AI's. Its other codes, like Mistral's 3051 and MiniMax's 2013, have several meanings: there the sentence decides.
_OVERFLOW_CODE = re.compile(rf"(?:{overflow_text.CODE}|1261)\Z")
_OTHER_CODE = re.compile(
    r"rate_?limit|insufficient_quota|throttl|(?:string|array|object|integer|decimal)_(?:above|below)_|string_too_long"
    r"|invalid_(?:value|type|image|json|function|tool|api_key)|unsupported_|unknown_parameter|missing_|empty_|content_(?:filter|policy)"
    r"|tool_use_failed|json_validate|request_too_large|token_limit_exceeded|model_not_found|overloaded"
)
_INSIDE_MESSAGE = re.compile(r"messages?[\[.]\d")


def of_error(status: int, content_type: str, body: bytes) -> Overflow | None:
    """What an answer says of an overflow; None where it has another cause, or is no error.

    `body`: without content coding, or its first 64 KiB. `content_type` only tells streams and pages from the rest: errors are often
    labelled wrongly (DeepSeek: application/octet-stream). With 200, only an error before any content counts. Never raises.
    """
    body = body[:_MAX_BYTES]
    if "event-stream" in content_type.lower() or body.startswith((b"data:", b"event:")):
        body = next(events(body), b"")
    text = body.decode("utf-8", "replace").removeprefix("\ufeff")
    if status == 200:
        return _of_answer(_json(text))
    if status not in _STATUSES:
        return None
    found = _of_value(text, _MAX_DEPTH)
    if found is None and status == 413 and "html" not in content_type.lower() and overflow_text.is_too_large(text):
        return UNNUMBERED
    return found


def of_event(data: bytes) -> Overflow | None:
    """What the data of a stream's first event says of an overflow; None where it says anything else. Never raises.

    Sources: LM Studio and SGLang send `{"error": ...}` with status 200, OpenRouter a chunk with an error in it.
    """
    return _of_answer(_json(data[:_MAX_BYTES].decode("utf-8", "replace")))


def silent(reported_prompt: int, estimate: int) -> bool:
    """Whether the provider dropped a part of the prompt without a word: it counted less than 40 % of the tokens estimated.

    Estimates are 0.8 to 1.26 times the count, in some scripts twice: half an estimate may be an honest count, and a fifth of that is left
    for what was not measured. Below 1,024 tokens a template or an image decides the ratio. A count of 0 or less is none. Source: Ollama
    drops the oldest messages and counts the rest (ollama/ollama#4967).
    """
    return estimate >= _SILENT_FLOOR_TOKENS and 0 < reported_prompt < estimate * _SILENT_SHARE


def _of_answer(found: object) -> Overflow | None:
    """What an answer or an event with status 200 says: an error in it, where nothing has been answered."""
    if isinstance(found, list):
        found = found[0] if found else None
    if not isinstance(found, Mapping):
        return None
    choices = [choice for choice in _list(found.get("choices")) if isinstance(choice, Mapping)]
    if found.get("content") or any(_has_spoken(choice) for choice in choices):
        return None
    # Z.AI and Anthropic: the window was full before the first word.
    if "model_context_window_exceeded" in (
        found.get("stop_reason"),
        *(choice.get("finish_reason") for choice in choices),
    ):
        return UNNUMBERED
    if not choices and isinstance(found.get("message"), str):
        return _of_object(found, _MAX_DEPTH)
    response = found.get("response")
    holders = [found, *choices, response if isinstance(response, Mapping) else {}]
    return _best(_of_value(said, _MAX_DEPTH) for said in (found.get("base_resp"), *(h.get("error") for h in holders)))


def _has_spoken(choice: Mapping[str, object]) -> bool:
    for key in ("message", "delta"):
        said = choice.get(key)
        if isinstance(said, Mapping) and any(value for name, value in said.items() if name != "role"):
            return True
    return bool(choice.get("text"))


def _of_value(value: object, depth: int) -> Overflow | None:
    """What an error says: an object, a list of them (Gemini), a text, JSON as a text (OpenRouter's `raw`)."""
    if depth == 0:
        return None
    if isinstance(value, str):
        inner = _json(value)
        return overflow_text.of_text(value) if inner is None else _of_value(inner, depth - 1)
    if isinstance(value, list):
        return _best(_of_value(item, depth - 1) for item in value[:_MAX_DEPTH])
    return _of_object(value, depth) if isinstance(value, Mapping) else None


def _of_object(error: Mapping[str, object], depth: int) -> Overflow | None:
    error = {key.lower(): value for key, value in error.items()}  # AWS writes Message
    codes = [str(error[key]).lower() for key in _CODES if isinstance(error.get(key), str | int)]
    if any(_OTHER_CODE.match(code) for code in codes) or _is_about_a_field(error):
        return None
    speaking = (value for key, value in error.items() if key.endswith(_SPEAKING) or key in _HOLDING)
    said = _best(_of_value(value, depth - 1) for value in speaking)
    if not any(_OVERFLOW_CODE.match(code) for code in codes):
        return said
    limit, prompt = overflow_text.tokens(error.get("n_ctx")), overflow_text.tokens(error.get("n_prompt_tokens"))
    if limit and prompt:  # llama.cpp
        return Overflow(limit, prompt, input_only=False)
    message = error.get("message")
    if said is None and isinstance(message, str) and overflow_text.is_output_alone(message):
        return None
    return said or UNNUMBERED


def _is_about_a_field(error: Mapping[str, object]) -> bool:
    """Whether it is about something inside a message: OpenAI says so in `param`, FastAPI in `loc`."""
    param = error.get("param")
    if isinstance(param, str) and _INSIDE_MESSAGE.match(param):
        return True
    return any(isinstance(place, int) for place in _list(error.get("loc")))


def _best(found: Iterable[Overflow | None]) -> Overflow | None:
    """The one that states most; of equals the first."""
    known = [overflow for overflow in found if overflow is not None]
    return max(known, key=lambda o: (o.limit is not None, o.requested is not None), default=None)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*("?)|[\[\]{},]', re.DOTALL)
_HALF = re.compile(r"(?:\\u[0-9a-fA-F]{0,3}|[\d,.]+)\Z")
"""An escape or a number that may go on: half a limit would be a wrong one."""

_CLOSER = {"{": "}", "[": "]"}
_MAX_OPEN = 64


def _json(text: str) -> object:
    """The object, list or string that a text is, or begins where it was cut off; None where it is none."""
    text = text.strip()
    if not text.startswith(("{", "[", '"')):
        return None
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    for mended in _mended(text):
        try:
            return orjson.loads(mended)
        except orjson.JSONDecodeError:
            continue
    return None


def _mended(text: str) -> Iterator[str]:
    """A JSON text that was cut off, closed at its end, then behind its last whole value; nothing where it is closed or nested too deeply."""
    open_ = ""
    whole: tuple[int, str] | None = None
    end = len(text)
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if mark in _CLOSER:
            open_ = _CLOSER[mark] + open_
        elif mark in ("}", "]"):
            open_ = open_[1:]
        elif mark == ",":
            whole = token.start(), open_
        elif not token[1]:
            end, open_ = token.end(), '"' + open_
        if len(open_) > _MAX_OPEN:
            return
    if open_:
        yield _HALF.sub("", text[:end]) + open_
        if whole is not None:
            yield text[: whole[0]] + whole[1]
