"""What the provider answered, read in passing: usage, finish, visible text. One reader for streams and whole answers.

A tap never disturbs the relay: it keeps the bytes as they pass (bounded) and reads them once the answer is over.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import brotli
import orjson
import zstandard

from proxy.core.model import Usage

MAX_KEPT_BYTES = 32 * 1024 * 1024
"""More of an answer is not read: usage is then unknown. 100k tokens are a chunk of about 300 bytes each."""

_MAX_COUNT = 1_000_000_000
"""More tokens than any window has: a number beyond it counts something else."""

_LINE_END = re.compile(rb"\r\n|\n|\r")
_DATA = re.compile(rb"(?:^|(?<=[\r\n]))data:")
_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")


@dataclass(frozen=True, slots=True)
class Answer:
    """`complete`: the provider said that it had finished, and nothing went wrong on the way.

    `text` is choice 0's content, None where it is no plain text (tool calls, refusal, several choices) or nobody asked for it.
    """

    usage: Usage
    complete: bool
    finish: str
    text: str | None
    reasoning: str | None
    failed: bool


UNREAD = Answer(Usage(), complete=False, finish="", text=None, reasoning=None, failed=False)


class Tap:
    """Keeps a passing answer for `answer()`."""

    def __init__(self, content_type: str, encoding: str) -> None:
        self._stream = "text/event-stream" in content_type.lower()
        self._encoding = encoding.lower().strip()
        self._chunks: list[bytes] = []
        self._size = 0
        self._over = False

    def feed(self, chunk: bytes) -> None:
        """The next bytes, cut anywhere."""
        if self._over:
            return
        self._size += len(chunk)
        if self._size > MAX_KEPT_BYTES:
            self._over = True
            self._chunks.clear()
            return
        self._chunks.append(chunk)

    def answer(self, *, want_text: bool) -> Answer:
        """What passed, read. Never raises: what cannot be read is unknown."""
        if self._over:
            return UNREAD
        data = decoded(b"".join(self._chunks), self._encoding)
        if data is None:
            return UNREAD
        return read_stream(data, want_text=want_text) if self._stream else read_whole(data, want_text=want_text)


def decoded(data: bytes, encoding: str) -> bytes | None:
    """The body without its content coding; None for a coding we do not read, a broken or a bloated one."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return data
    if encoding == "br":
        return _brotli(data)
    if encoding == "zstd":
        return _zstd(data)
    if encoding not in ("gzip", "x-gzip", "deflate"):
        return None
    try:
        inflater = zlib.decompressobj(47)
        plain = inflater.decompress(data, MAX_KEPT_BYTES)
    except zlib.error:
        return None
    return None if inflater.unconsumed_tail else plain


def _brotli(data: bytes) -> bytes | None:
    inflater = brotli.Decompressor()
    try:
        plain: bytes = inflater.process(data, output_buffer_limit=MAX_KEPT_BYTES)
        return plain if inflater.is_finished() else None
    except brotli.error:
        return None


def _zstd(data: bytes) -> bytes | None:
    try:
        with zstandard.ZstdDecompressor(max_window_size=MAX_KEPT_BYTES).stream_reader(data) as reader:
            plain = reader.read(MAX_KEPT_BYTES + 1)
    except zstandard.ZstdError:
        return None
    return None if len(plain) > MAX_KEPT_BYTES else plain


def read_whole(data: bytes, *, want_text: bool) -> Answer:
    """A JSON answer. 200 with something else than a completion is not a complete turn."""
    found = _json(data)
    if found is None:
        return UNREAD
    choices = found.get("choices")
    if found.get("error") or not isinstance(choices, list) or not choices:
        return Answer(_usage(found), complete=False, finish="", text=None, reasoning=None, failed=True)
    first = choices[0] if isinstance(choices[0], Mapping) else {}
    message = first.get("message")
    message = message if isinstance(message, Mapping) else {}
    text = message.get("content")
    plain = want_text and len(choices) == 1 and isinstance(text, str) and not _speaks_otherwise(message)
    failed = _has_failed(first)
    return Answer(
        usage=_usage(found),
        complete=not failed,
        finish=_word(first.get("finish_reason")),
        text=text if plain else None,
        reasoning=_thought(message) if plain else None,
        failed=failed,
    )


def events(data: bytes) -> Iterator[bytes]:
    """The data of each server-sent event, by the WHATWG rules: LF, CRLF or CR; comments and other fields passed over."""
    lines: list[bytes] = []
    for line in _LINE_END.split(data.removeprefix(b"\xef\xbb\xbf")):
        if not line:
            if lines:
                yield b"\n".join(lines)
                lines = []
        elif line.startswith(b"data:"):
            lines.append(line[6:] if line[5:6] == b" " else line[5:])
    if lines:
        yield b"\n".join(lines)


def holds_event(data: bytes) -> bool:
    """Whether an event with data in it is there whole."""
    begin = _DATA.search(data)
    return begin is not None and _EVENT_END.search(data, begin.end()) is not None


def read_stream(data: bytes, *, want_text: bool) -> Answer:
    """A stream of chunks. It is complete once a finish reason or [DONE] came and no error did."""
    usage = Usage()
    finish = ""
    done = failed = False
    texts: list[str] = []
    thoughts: list[str] = []
    plain = want_text
    for event in events(data):
        if event.strip() == b"[DONE]":
            done = True
            continue
        # Most chunks carry a few characters of text: they are parsed only where somebody wants the text.
        if (
            not want_text
            and b'"usage"' not in event
            and b"finish_reason" not in event
            and b'"error"' not in event
            and b'"timings"' not in event
        ):
            continue
        chunk = _json(event)
        if chunk is None:
            continue
        if chunk.get("error"):
            failed = True
        usage = _merge(usage, _usage(chunk))
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, Mapping):
                continue
            failed = failed or _has_failed(choice)
            usage = _merge(usage, _usage(choice))
            finish = _word(choice.get("finish_reason")) or finish
            delta = choice.get("delta")
            if not want_text or not isinstance(delta, Mapping):
                continue
            plain = plain and not choice.get("index") and not _speaks_otherwise(delta)
            content = delta.get("content")
            if isinstance(content, str):
                texts.append(content)
            elif content:
                plain = False  # parts, as a whole answer would have them: Mistral's thoughts
            thought = _thought(delta)
            if thought:
                thoughts.append(thought)
    plain = plain and bool(texts)
    return Answer(
        usage=usage,
        complete=not failed and bool(done or finish),
        finish=finish,
        text=_joined(texts) if plain else None,
        reasoning="".join(thoughts) or None if plain else None,
        failed=failed,
    )


def _joined(texts: list[str]) -> str:
    """One text, in which the halves of a surrogate pair that came in two chunks have found each other."""
    return "".join(texts).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _json(data: bytes) -> Mapping[str, object] | None:
    found = parsed(data)
    return found if isinstance(found, Mapping) else None


def parsed(data: bytes) -> object:
    """A JSON text; None where it is none. Half surrogate pairs, which a stream may hold where it cuts an emoji, and NaN are taken as well."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            return None


def _speaks_otherwise(message: Mapping[str, object]) -> bool:
    return bool(
        message.get("tool_calls") or message.get("function_call") or message.get("refusal") or message.get("audio")
    )


def _has_failed(choice: Mapping[str, object]) -> bool:
    """OpenRouter reports a provider that broke off inside the choice, in a whole answer as in a stream."""
    return bool(choice.get("error")) or choice.get("finish_reason") == "error"


def _thought(message: Mapping[str, object]) -> str | None:
    value = message.get("reasoning_content")
    return value if isinstance(value, str) and value else None


def _word(value: object) -> str:
    return value if isinstance(value, str) else ""


def _merge(old: Usage, new: Usage) -> Usage:
    """The later number wins where it is known: some servers count on every chunk."""

    def later(a: int | None, b: int | None) -> int | None:
        return a if b is None else b

    prompt, cached = later(old.prompt, new.prompt), later(old.cached, new.cached)
    return Usage(
        prompt,
        later(old.completion, new.completion),
        _within(cached, prompt),
        later(old.reasoning, new.reasoning),
    )


def _within(cached: int | None, prompt: int | None) -> int | None:
    return cached if cached is None or prompt is None else min(cached, prompt)


def _usage(carrier: Mapping[str, object]) -> Usage:
    """The counts of a completion, a chunk or a choice (Moonshot), in the shapes known; missing is None.

    Sources: OpenAI's usage object; DeepSeek prompt_cache_hit_tokens; Anthropic's three input counts, which exclude each other;
    Moonshot usage.cached_tokens; Groq x_groq.usage; llama.cpp timings.
    """
    usage = carrier.get("usage")
    if not isinstance(usage, Mapping):
        groq = carrier.get("x_groq")
        usage = groq.get("usage") if isinstance(groq, Mapping) else None
    if not isinstance(usage, Mapping):
        return _timings(carrier.get("timings"))
    prompt = _count(usage, "prompt_tokens")
    cached = _count(_inner(usage, "prompt_tokens_details"), "cached_tokens")
    if cached is None:
        cached = _count(usage, "prompt_cache_hit_tokens")
    if cached is None:
        cached = _count(usage, "cached_tokens")
    if prompt is None and (fresh := _count(usage, "input_tokens")) is not None:
        read = _count(usage, "cache_read_input_tokens")
        prompt = fresh + (read or 0) + (_count(usage, "cache_creation_input_tokens") or 0)
        cached = read if cached is None else cached
    completion = _count(usage, "completion_tokens")
    return Usage(
        prompt=prompt,
        completion=_count(usage, "output_tokens") if completion is None else completion,
        cached=_within(cached, prompt),
        reasoning=_count(_inner(usage, "completion_tokens_details"), "reasoning_tokens"),
    )


def _timings(timings: object) -> Usage:
    if not isinstance(timings, Mapping):
        return Usage()
    cached, new = _count(timings, "cache_n"), _count(timings, "prompt_n")
    prompt = None if cached is None or new is None else cached + new
    return Usage(prompt=prompt, completion=_count(timings, "predicted_n"), cached=cached)


def _inner(usage: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = usage.get(key)
    return value if isinstance(value, Mapping) else {}


def _count(usage: Mapping[str, object], key: str) -> int | None:
    value = usage.get(key)
    plausible = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_COUNT
    return value if plausible and isinstance(value, int) else None
