"""What the provider answered, read in passing: usage, finish, visible text. One reader for streams and whole answers.

A tap never disturbs the relay: it keeps the bytes as they pass (bounded) and reads them once the answer is over.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import brotli
import orjson
import zstandard

from proxy.core import usage
from proxy.core.model import Usage

MAX_KEPT_BYTES = 32 * 1024 * 1024
"""More of an answer is not read: usage is then unknown. 100k tokens are a chunk of about 300 bytes each."""

_STREAM_START = re.compile(rb"(?:\xef\xbb\xbf)?[\r\n]*(?:data|event|id|retry)?:")
_TELLS = re.compile(
    rb'"(?:(?:usage|x_groq|timings|perf_metrics|finish_reason|error)"\s*+:\s*+[^\sn]|(?:object|type)"\s*+:\s*+"error")'
)
"""What is read of a chunk besides its text. Many servers put all of these keys into every chunk, null until the last."""
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
        # Some label a stream as something else, or not at all.
        streams = self._stream or _STREAM_START.match(data) is not None
        return read_stream(data, want_text=want_text) if streams else read_whole(data, want_text=want_text)


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
        return Answer(usage.of(found), complete=False, finish="", text=None, reasoning=None, failed=True)
    first = choices[0] if isinstance(choices[0], Mapping) else {}
    message = first.get("message")
    message = message if isinstance(message, Mapping) else {}
    text = message.get("content")
    plain = want_text and len(choices) == 1 and isinstance(text, str) and not _speaks_otherwise(message)
    failed = _has_failed(first)
    return Answer(
        usage=usage.of(found),
        complete=not failed,
        finish=_word(first.get("finish_reason")),
        text=text if plain else None,
        reasoning=_thought(message) if plain else None,
        failed=failed,
    )


def events(data: bytes) -> Iterator[bytes]:
    """The data of each server-sent event, by the WHATWG rules: LF, CRLF or CR; comments and other fields passed over."""
    lines: list[bytes] = []
    for line in data.removeprefix(b"\xef\xbb\xbf").splitlines():
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
    counted = Usage()
    finish = ""
    done = failed = False
    said = _Said() if want_text else None
    for event in events(data):
        if event.strip() == b"[DONE]":
            done = True
            continue
        # Most chunks carry a few characters of text: they are parsed only where somebody wants the text.
        tells = _TELLS.search(event) is not None
        chunk = _json(event) if tells or said is not None else None
        if chunk is None:
            continue
        choices = [choice for choice in _list(chunk.get("choices")) if isinstance(choice, dict)]
        if tells:
            failed = failed or _is_error(chunk) or any(_has_failed(choice) for choice in choices)
            for carrier in (chunk, *choices):
                counted = usage.merged(counted, usage.of(carrier))
            finish = next((word for c in reversed(choices) if (word := _word(c.get("finish_reason")))), finish)
        if said is not None:
            said.hear(choices)
    return Answer(
        usage=counted,
        complete=not failed and bool(done or finish),
        finish=finish,
        text=said.text if said is not None else None,
        reasoning=said.reasoning if said is not None else None,
        failed=failed,
    )


class _Said:
    """The words of a stream, put together."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._plain = True

    def hear(self, choices: Iterable[Mapping[str, object]]) -> None:
        """The choices of the next chunk."""
        for choice in choices:
            delta = choice.get("delta")
            if not isinstance(delta, dict):
                continue
            self._plain = self._plain and not choice.get("index") and not _speaks_otherwise(delta)
            content = delta.get("content")
            if isinstance(content, str):
                self._texts.append(content)
            elif content:
                self._plain = False  # parts, as a whole answer would have them: Mistral's thoughts
            if thought := _thought(delta):
                self._thoughts.append(thought)

    @property
    def text(self) -> str | None:
        """All of choice 0's content, None where it is no plain text."""
        return _joined(self._texts) if self._plain and self._texts else None

    @property
    def reasoning(self) -> str | None:
        """All of its thoughts, where there is a text."""
        return "".join(self._thoughts) or None if self._plain and self._texts else None


def _joined(texts: list[str]) -> str:
    """One text, in which the halves of a surrogate pair that came in two chunks have found each other."""
    return "".join(texts).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _json(data: bytes) -> dict[str, object] | None:
    found = parsed(data)
    return found if isinstance(found, dict) else None


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


def _is_error(chunk: Mapping[str, object]) -> bool:
    """Whether it is an error in the place of a chunk. Without an `error` in it: vLLM's and SGLang's own, Anthropic's."""
    return bool(chunk.get("error")) or chunk.get("object") == "error" or chunk.get("type") == "error"


def _has_failed(choice: Mapping[str, object]) -> bool:
    """OpenRouter reports a provider that broke off inside the choice, in a whole answer as in a stream."""
    return bool(choice.get("error")) or choice.get("finish_reason") == "error"


def _thought(message: Mapping[str, object]) -> str | None:
    value = message.get("reasoning_content")
    return value if isinstance(value, str) and value else None


def _word(value: object) -> str:
    return value if isinstance(value, str) else ""


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def with_headers(answer: Answer, headers: Iterable[tuple[str, str]]) -> Answer:
    """The answer, with what its headers count where its body does not."""
    return replace(answer, usage=usage.merged(usage.of_headers(headers), answer.usage))
