"""Providers say in many ways that a prompt is too long, and many other things that sound like it."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import brotli
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import overflow
from proxy.core.answer import decoded, events
from proxy.core.overflow import Overflow
from proxy.core.refused import is_overflow, is_shape
from tests import recorded
from tests.core.build import WIRE

JSON = "application/json"
UNNUMBERED = Overflow(None, None, input_only=False)


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _openai(message: str, **fields: object) -> bytes:
    return _json(
        {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None, **fields}}
    )


def _window(limit: int | None, requested: int | None = None) -> Overflow:
    return Overflow(limit, requested, input_only=False)


def _input(limit: int, requested: int | None = None) -> Overflow:
    return Overflow(limit, requested, input_only=True)


OPENAI = "This model's maximum context length is 8192 tokens."

SAID = [
    pytest.param(
        f"{OPENAI} However, your messages resulted in 11214 tokens. Please", _window(8192, 11214), id="openai"
    ),
    pytest.param(
        f"{OPENAI} However, your messages resulted in 9,001 tokens (8,900 in the messages, 101 in the functions).",
        _window(8192, 9001),
        id="openai, with functions",
    ),
    pytest.param(
        f"{OPENAI} However, you requested 9300 tokens (8000 in the messages, 300 in the functions, and 1000 in the completion).",
        _window(8192, 8300),
        id="openai, with the output",
    ),
    pytest.param(
        "This model's maximum context length is 4097 tokens, however you requested 4927 tokens (3927 in your prompt; 1000 for the "
        "completion). Please reduce your prompt; or completion length.",
        _window(4097, 3927),
        id="openai, completions",
    ),
    pytest.param(
        f"{OPENAI} However, you requested 9300 tokens. Please", _window(8192), id="a sum that is not told apart"
    ),
    pytest.param("Your messages resulted in 11,214 tokens, maximum 8,192", _window(8192, 11214), id="the size first"),
    pytest.param(
        "Input tokens exceed the configured limit of 272000 tokens. Your messages resulted in 289650 tokens.",
        _input(272000, 289650),
        id="openai, input",
    ),
    pytest.param("Your input exceeds the context window of this model.", UNNUMBERED, id="openai, no numbers"),
    pytest.param("prompt is too long: 208310 tokens > 200000 maximum", _window(200000, 208310), id="anthropic"),
    pytest.param(
        "input length and `max_tokens` exceed context limit: 178959 + 64000 > 200000, decrease input length",
        _window(200000, 178959),
        id="anthropic, sum",
    ),
    pytest.param(
        "The input token count (1200293) exceeds the maximum number of tokens allowed (1048576).",
        _input(1048576, 1200293),
        id="gemini",
    ),
    pytest.param(
        "The input token count exceeds the maximum number of tokens allowed 1048576",
        _input(1048576),
        id="gemini, short",
    ),
    pytest.param(
        "Prompt contains 160907 tokens and 0 draft tokens, too large for model with 131072 maximum context length",
        _window(131072, 160907),
        id="mistral",
    ),
    pytest.param("Please reduce the length of the messages or completion.", UNNUMBERED, id="groq"),
    pytest.param("Current length is 69553 while limit is 65536", _window(65536, 69553), id="cerebras"),
    pytest.param(
        "This model's maximum prompt length is 131072 but the request contains 136973 tokens.",
        _input(131072, 136973),
        id="xai",
    ),
    pytest.param(
        "[input_too_large] Current message (1149677 tokens) exceeds budget (975424 tokens)",
        _input(975424, 1149677),
        id="xai, budget",
    ),
    pytest.param(
        "This endpoint's maximum context length is 202752 tokens. However, you requested about 203889 tokens (183648 of text "
        "input, 4241 of tool input, 16000 in the output).",
        _window(202752, 187889),
        id="openrouter",
    ),
    pytest.param(
        "Input length 131393 exceeds the maximum allowed input length of 131040 tokens.",
        _input(131040, 131393),
        id="poolside",
    ),
    pytest.param(
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 65537. Given: 79993 `inputs` tokens and 1024 "
        "`max_new_tokens`",
        _window(65537, 79993),
        id="tgi, sum",
    ),
    pytest.param(
        "Input validation error: `inputs` must have less than 2048 tokens. Given: 2222", _input(2048, 2222), id="tgi"
    ),
    pytest.param(
        "The prompt is too long: 40177, model maximum context length: 32767", _window(32767, 40177), id="fireworks"
    ),
    pytest.param(
        "Your request exceeded model token limit: 262144 (requested: 274613)", _window(262144), id="moonshot, a sum"
    ),
    pytest.param("Your request exceeded model token limit: 262144", _window(262144), id="moonshot"),
    pytest.param("invalid params, context window exceeds limit (2013)", UNNUMBERED, id="minimax"),
    pytest.param("<400> InvalidParameter: Range of input length should be [1, 204800]", _input(204800), id="qwen"),
    pytest.param("Input is too long for requested model.", UNNUMBERED, id="bedrock"),
    pytest.param(
        "Too many input tokens. Max input tokens: 4096, request input token count: 7262", _input(4096, 7262), id="titan"
    ),
    pytest.param("prompt token count of 93854 exceeds the limit of 90000", _input(90000, 93854), id="copilot"),
    pytest.param(
        f"{OPENAI} However, your prompt contains at least 8193 input tokens, which exceeds",
        _window(8192),
        id="vllm, a bound",
    ),
    pytest.param(f"{OPENAI} However, your request has 9225 input tokens.", _window(8192, 9225), id="vllm"),
    pytest.param(
        "'max_tokens' or 'max_completion_tokens' is too large: 4096. This model's maximum context length is 8192 tokens and your "
        "request has 5000 input tokens (4096 > 8192 - 5000).",
        _window(8192, 5000),
        id="vllm, sum",
    ),
    pytest.param("max_tokens must be at least 1, got -186.", UNNUMBERED, id="vllm, nothing left of the window"),
    pytest.param(
        "The decoder prompt (length 40000) is longer than the maximum model length of 32768.",
        _window(32768, 40000),
        id="vllm, engine",
    ),
    pytest.param(
        "The engine prompt length 40000 exceeds the max_model_len 32768.", _window(32768, 40000), id="vllm, responses"
    ),
    pytest.param(
        "The input (160062 tokens) is longer than the model's context length (131072 tokens).",
        _window(131072, 160062),
        id="sglang",
    ),
    pytest.param(
        "Requested token count exceeds the model's maximum context length of 131072 tokens. You requested a total of 140000 "
        "tokens: 130000 tokens from the input messages and 10000 tokens for the completion.",
        _window(131072, 130000),
        id="sglang, sum",
    ),
    pytest.param(
        "Input length (160062 tokens) exceeds the maximum allowed length (59862 tokens).",
        _input(59862, 160062),
        id="sglang, its memory",
    ),
    pytest.param(
        "request (50018 tokens) exceeds the available context size (16384 tokens), try increasing it",
        _window(16384, 50018),
        id="llama.cpp",
    ),
    pytest.param(
        "The number of tokens to keep from the initial prompt is greater than the context length (n_keep: 5228>= n_ctx: 4096).",
        _window(4096, 5228),
        id="lm studio",
    ),
    pytest.param("prompt too long; exceeded max context length by 4096 tokens", UNNUMBERED, id="ollama, the excess"),
    pytest.param(
        "too many tokens: size limit exceeded by 25836 tokens. Try using shorter inputs. The limit for this model is 288000 tokens.",
        _window(288000, 313836),
        id="cohere, limit and excess",
    ),
    pytest.param(
        "The maximum context length of DeepSeek-V3 is 32768. However, answering your request will take 39732 tokens.",
        _window(32768),
        id="sambanova",
    ),
    pytest.param("Range of input length should be [1, 99999999999]", UNNUMBERED, id="a limit that no window has"),
    pytest.param(
        "Your prompt plus `max_tokens` exceeds the context length of the model", UNNUMBERED, id="a sum, no numbers"
    ),
    pytest.param("请求超过最大上下文长度", UNNUMBERED, id="chinese"),
    pytest.param(f"{OPENAI} However, your messages\nresulted  in 9000 tokens", _window(8192, 9000), id="line breaks"),
]


@pytest.mark.parametrize(("sentence", "found"), SAID)
def test_a_sentence_says_it_in_whatever_shape_it_comes(sentence: str, found: Overflow) -> None:
    for shape, body in _shapes(sentence):
        assert overflow.of_error(400, JSON, body) == found, shape
        assert overflow.of_error(500, JSON, body) == found, shape
        assert overflow.of_error(429, JSON, body) is None, shape
        assert is_overflow(400, body), shape
        assert not is_shape(400, body), shape
    event = _json({"error": {"message": sentence}})
    assert overflow.of_event(event) == found
    assert overflow.of_error(200, JSON, event) == found


def _shapes(sentence: str) -> Iterator[tuple[str, bytes]]:
    inner = json.dumps({"error": {"message": sentence, "code": 400}})
    yield "an error object", _openai(sentence)
    yield "an error text", _json({"error": sentence})
    yield "no error key", _json({"object": "error", "message": sentence, "type": "BadRequestError", "code": 400})
    yield "a list", _json([{"error": {"code": 400, "message": sentence, "status": "INVALID_ARGUMENT"}}])
    yield "a detail", _json({"detail": sentence})
    yield "a list of details", _json({"detail": [{"loc": ["body"], "msg": sentence, "type": "value_error"}]})
    yield "errors", _json({"success": False, "errors": [{"message": f"AiError: {sentence}", "code": 5006}]})
    yield "another case", _json({"__type": "com.amazon#ValidationException", "Message": sentence})
    yield "metadata", _openai("Provider returned error", code=400, metadata={"raw": inner, "provider_name": "x"})
    yield "JSON in the message", _openai(inner)
    yield "printed", _openai(f"Error code: 400 - {{'error': {{'message': \"{sentence}\"}}}}")
    yield "a text", sentence.encode()
    yield "a JSON text", json.dumps(sentence).encode()
    yield "a byte order mark", b"\xef\xbb\xbf" + _openai(sentence)
    yield "an event", b"event: error\ndata: " + _openai(sentence) + b"\n\n"


CODES = [
    pytest.param(_openai("No.", code="context_length_exceeded"), UNNUMBERED, id="openai"),
    pytest.param(_json({"error": {"code": "1261", "message": "No."}}), UNNUMBERED, id="z.ai"),
    pytest.param(_json({"error_type": "TOO_MANY_TOKENS", "message": "No."}), UNNUMBERED, id="cohere"),
    pytest.param(_openai("No.", type="too_many_prompt_tokens", code=400), UNNUMBERED, id="perplexity"),
    pytest.param(
        _openai("No.", code=400, metadata={"error_type": "context_length_exceeded"}), UNNUMBERED, id="openrouter"
    ),
    pytest.param(_json({"error": {"message": "No.", "type": "ContextWindowExceededError"}}), UNNUMBERED, id="litellm"),
    pytest.param(
        _openai("No.", type="exceed_context_size_error", n_prompt_tokens=14429, n_ctx=8192),
        _window(8192, 14429),
        id="llama.cpp, fields",
    ),
    pytest.param(
        _openai("No.", type="exceed_context_size_error", n_prompt_tokens=14429, n_ctx=True),
        UNNUMBERED,
        id="fields that hold no size",
    ),
    pytest.param(
        _openai(f"{OPENAI} However, your messages resulted in 9000 tokens", code="context_length_exceeded"),
        _window(8192, 9000),
        id="numbers in the message",
    ),
    pytest.param(b"context_length_exceeded", UNNUMBERED, id="the code alone"),
    pytest.param(
        _openai("Error code: 400 - {'error': {'code': 'context_length_exceeded'}}"), UNNUMBERED, id="the code, printed"
    ),
]


@pytest.mark.parametrize(("body", "found"), CODES)
def test_a_code_says_it_without_a_sentence(body: bytes, found: Overflow) -> None:
    assert overflow.of_error(400, JSON, body) == found


QUOTED = f"the log says context_length_exceeded: {OPENAI} However, your messages resulted in 9000 tokens"

NOT = [
    pytest.param(400, b"", id="nothing"),
    pytest.param(400, b"{}", id="an empty object"),
    pytest.param(400, b"[]", id="an empty list"),
    pytest.param(429, _openai(f"{OPENAI} However, your messages resulted in 9000 tokens"), id="429, whatever it says"),
    pytest.param(401, _openai("No.", code="context_length_exceeded"), id="401, whatever it says"),
    pytest.param(503, b"Input is too long for requested model.", id="overloaded"),
    pytest.param(400, _openai("Too many tokens, please wait before trying again."), id="throttled"),
    pytest.param(
        413,
        _openai(
            "Request too large for model `m` on tokens per minute (TPM): Limit 6000, Requested 14810, please reduce your message "
            "size and try again.",
            type="tokens",
            code="rate_limit_exceeded",
        ),
        id="413 of a rate limit",
    ),
    pytest.param(
        413, _json({"type": "error", "error": {"type": "request_too_large", "message": "No."}}), id="413, bytes"
    ),
    pytest.param(413, b"Request too large: limit 4194304 bytes", id="413, bytes in a text"),
    pytest.param(413, _openai("Request Entity Too Large"), id="413, entity"),
    pytest.param(
        413, _openai("Request too large: 6000 tokens per minute, 14810 asked for"), id="413, a rate in a text"
    ),
    pytest.param(400, _openai("total message size 10176584 exceeds limit 2097152"), id="moonshot, bytes"),
    pytest.param(
        400,
        _openai(
            "max_tokens is too large: 100000. This model supports at most 16384 completion tokens, whereas you provided 100000.",
            param="max_tokens",
            code="invalid_value",
        ),
        id="output, openai",
    ),
    pytest.param(
        400, _openai("max_tokens is too large: 9000. This model's maximum context length is 8192"), id="output"
    ),
    pytest.param(
        400, _openai("max_tokens (384000) exceeds model's maximum output tokens (65536)"), id="output, ollama"
    ),
    pytest.param(400, _openai("max_tokens=40000 cannot be greater than max_model_len=32768."), id="output, vllm"),
    pytest.param(400, _openai("`max_tokens` exceeds the context length of the model"), id="output above the window"),
    pytest.param(400, _openai("max_tokens must be at least 1, got -1."), id="output, the client's own -1"),
    pytest.param(
        400,
        _openai(
            f"{OPENAI} However, you requested 8300 tokens (100 in the messages, 8200 in the completion).",
            code="context_length_exceeded",
        ),
        id="output that would not fit without a prompt",
    ),
    pytest.param(
        400,
        _openai(
            "Invalid 'messages[191].content[1].text': string too long. Expected a string with maximum length 10485760, but got a "
            "string with length 12000000 instead.",
            param="messages[191].content[1].text",
            code="string_above_max_length",
        ),
        id="one text too long",
    ),
    pytest.param(
        400,
        _openai(
            "Invalid 'messages': array too long. Expected an array with maximum length 2048.",
            code="array_above_max_length",
        ),
        id="too many messages",
    ),
    pytest.param(400, _openai(QUOTED, code="invalid_value"), id="quoted, a code of its own"),
    pytest.param(400, _openai(QUOTED, param="messages[3].content"), id="quoted, the place in param"),
    pytest.param(
        400, _openai(f"Invalid value for 'messages[3].content': '{QUOTED}'"), id="quoted, the place in the message"
    ),
    pytest.param(400, _openai(f"messages.3.content: {QUOTED}"), id="quoted, anthropic's place"),
    pytest.param(
        400, _openai("Invalid role. Seen: 'my app fails with context_length_exceeded'"), id="the mere word, quoted"
    ),
    pytest.param(
        400,
        _openai("Tool call validation failed", code="tool_use_failed", failed_generation=QUOTED),
        id="quoted, a generation that failed",
    ),
    pytest.param(
        422,
        _json({"detail": [{"type": "missing", "loc": ["body", "model"], "msg": "Field required", "input": QUOTED}]}),
        id="quoted, the input",
    ),
    pytest.param(
        422,
        _json({"detail": [{"type": "string_type", "loc": ["body", "messages", 3, "content"], "msg": QUOTED}]}),
        id="quoted, the place in loc",
    ),
    pytest.param(
        400, f"1 validation error for ChatRequest\nmessages.0.content\n input='{QUOTED}'".encode(), id="pydantic"
    ),
    pytest.param(
        500, _openai("Jinja Exception: Conversation roles must alternate user/assistant"), id="a template that raises"
    ),
    pytest.param(400, _openai("Number of input images exceeds the maximum limit of 5"), id="too many images"),
    pytest.param(
        200,
        _json({"choices": [{"message": {"role": "assistant", "content": QUOTED}, "finish_reason": "stop"}]}),
        id="an answer about it",
    ),
    pytest.param(
        200,
        _json({"choices": [{"message": {"content": "So"}, "finish_reason": "model_context_window_exceeded"}]}),
        id="an answer that the window cut",
    ),
    pytest.param(200, b"maximum context length is 8192 tokens", id="200 and a text"),
    pytest.param(
        200, _json({"message": {"role": "assistant", "content": QUOTED}, "done": True}), id="200, ollama's own"
    ),
]


@pytest.mark.parametrize(("status", "body"), NOT)
def test_another_cause_is_no_overflow(status: int, body: bytes) -> None:
    assert overflow.of_error(status, JSON, body) is None
    assert not is_overflow(status, body)


@pytest.mark.parametrize(
    ("content_type", "body", "found"),
    [
        pytest.param(JSON, b"", UNNUMBERED, id="empty: cerebras, mistral"),
        pytest.param(JSON, _openai("Request too large"), UNNUMBERED, id="too large, of what it does not say"),
        pytest.param(JSON, _openai("prompt is too long: 9 tokens > 8 maximum"), _window(8, 9), id="it says so"),
        pytest.param("text/html", b"<h1>Request too large</h1>", None, id="a gateway's page"),
    ],
)
def test_a_413_is_an_overflow_where_it_speaks_of_no_bytes(
    content_type: str, body: bytes, found: Overflow | None
) -> None:
    assert overflow.of_error(413, content_type, body) == found


@pytest.mark.parametrize(
    ("body", "is_one"),
    [
        pytest.param(_openai("Conversation roles must alternate"), True, id="roles"),
        pytest.param(_openai(f"{OPENAI} However, your messages resulted in 9000 tokens"), False, id="an overflow"),
        pytest.param(
            b"chat_template failed: Input is too long for requested model.", False, id="an overflow, by a template"
        ),
    ],
)
def test_an_overflow_is_no_refused_shape(body: bytes, is_one: bool) -> None:
    assert [is_shape(status, body) for status in (400, 422, 500)] == [is_one] * 3
    assert not is_shape(429, body)
    assert not is_shape(500, b"internal error")


CHUNK: dict[str, Any] = {"id": "x", "object": "chat.completion.chunk", "model": "m"}
TOO_LONG = {"message": f"{OPENAI} However, your messages resulted in 9000 tokens", "code": 400}

EVENTS = [
    pytest.param({"error": TOO_LONG}, _window(8192, 9000), id="an error"),
    pytest.param({"error": TOO_LONG["message"]}, _window(8192, 9000), id="a text"),
    pytest.param([{"error": TOO_LONG}], _window(8192, 9000), id="a list"),
    pytest.param({"object": "error", **TOO_LONG}, _window(8192, 9000), id="no error key"),
    pytest.param({"code": "1261", "message": "No."}, UNNUMBERED, id="a code, no error key"),
    pytest.param({"type": "error", "error": {"code": "context_length_exceeded"}}, UNNUMBERED, id="responses"),
    pytest.param(
        {"type": "response.failed", "response": {"error": {"code": "context_length_exceeded"}}},
        UNNUMBERED,
        id="responses, failed",
    ),
    pytest.param(
        {"choices": None, "base_resp": {"status_code": 2013, "status_msg": "context window exceeds limit"}},
        UNNUMBERED,
        id="minimax",
    ),
    pytest.param(
        {
            **CHUNK,
            "error": TOO_LONG,
            "choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": "error"}],
        },
        _window(8192, 9000),
        id="a chunk with an error",
    ),
    pytest.param(
        {**CHUNK, "choices": [{"delta": {}, "error": TOO_LONG}]}, _window(8192, 9000), id="an error in a choice"
    ),
    pytest.param(
        {"choices": [{"finish_reason": "model_context_window_exceeded", "delta": {"content": ""}}]},
        UNNUMBERED,
        id="the window was full before a word",
    ),
    pytest.param({"stop_reason": "model_context_window_exceeded", "content": []}, UNNUMBERED, id="the same, anthropic"),
    pytest.param(
        {**CHUNK, "choices": [{"delta": {"role": "assistant", "content": ""}}]}, None, id="a stream that begins"
    ),
    pytest.param({**CHUNK, "choices": [{"delta": {"content": QUOTED}}]}, None, id="a word about it"),
    pytest.param({**CHUNK, "choices": [], "usage": {"prompt_tokens": 9000}}, None, id="usage"),
    pytest.param(
        {**CHUNK, "error": TOO_LONG, "choices": [{"delta": {"content": "So"}}]}, None, id="an error after a word"
    ),
    pytest.param({"error": {"message": "Token limit reached", "code": 400}}, None, id="another error"),
    pytest.param({"error": None}, None, id="no error"),
    pytest.param("context_length_exceeded", None, id="a JSON text"),
]


@pytest.mark.parametrize(("event", "found"), EVENTS)
def test_the_first_event_of_a_stream_may_be_the_error(event: object, found: Overflow | None) -> None:
    assert overflow.of_event(_json(event)) == found
    stream = b": PROCESSING\n\ndata: " + _json(event) + b"\n\ndata: [DONE]\n\n"
    assert overflow.of_error(200, "text/event-stream; charset=utf-8", stream) == found


@pytest.mark.parametrize("data", [b"", b"[DONE]", b"{", b"null", b"maximum context length is 8192 tokens", b"\xff\xfe"])
def test_an_event_that_is_no_object_says_nothing(data: bytes) -> None:
    assert overflow.of_event(data) is None


@pytest.mark.parametrize(
    ("reported", "estimate", "is_silent"),
    [
        pytest.param(4096, 30_000, True, id="ollama's default window"),
        pytest.param(4096, 4096, False, id="as estimated"),
        pytest.param(10_000, 12_600, False, id="an estimate that is 1.26 times the count"),
        pytest.param(10_000, 20_000, False, id="twice, as in some scripts"),
        pytest.param(7_999, 20_000, True, id="just under the share"),
        pytest.param(8_000, 20_000, False, id="just at the share"),
        pytest.param(30_000, 10_000, False, id="more than estimated"),
        pytest.param(100, 1_000, False, id="too small to judge"),
        pytest.param(0, 30_000, False, id="not counted"),
        pytest.param(-1, 30_000, False, id="no count"),
    ],
)
def test_a_prompt_cut_in_silence_shows_in_the_count(reported: int, estimate: int, is_silent: bool) -> None:
    assert overflow.silent(reported, estimate) is is_silent


WHOLE = [
    pytest.param(_openai(param.values[0]), param.values[1], id=param.id)  # type: ignore[arg-type]
    for param in SAID
    if isinstance(param.values[1], Overflow)
]


@pytest.mark.parametrize(("body", "found"), WHOLE)
def test_a_body_that_breaks_off_says_no_wrong_limit(body: bytes, found: Overflow) -> None:
    for end in range(len(body)):
        cut = overflow.of_error(400, JSON, body[:end])
        assert cut is None or cut.limit in (None, found.limit)
        assert cut is None or cut.requested is None or cut.requested <= (found.requested or 0)
    for end in range(body.index(b'", "type"') + 1, len(body)):
        assert overflow.of_error(400, JSON, body[:end]) == found


def test_a_long_body_is_read_as_far_as_it_goes() -> None:
    said = f"{OPENAI} However, your messages resulted in 9000 tokens. "
    assert overflow.of_error(400, JSON, _openai(said + "x" * 100_000)) == _window(8192, 9000)
    assert overflow.of_error(400, JSON, _openai(said, request="x" * 100_000)) == _window(8192, 9000)
    request = {"messages": [{"role": "user", "content": f"{QUOTED} {'x' * 100_000}"}]}
    echo = {"detail": [{"type": "missing", "loc": ["body", "model"], "msg": "Field required", "input": request}]}
    assert overflow.of_error(422, JSON, _json(echo)) is None


@pytest.mark.parametrize(
    ("coding", "coded"),
    [
        pytest.param("gzip", gzip.compress, id="gzip"),
        pytest.param("deflate", zlib.compress, id="deflate"),
        pytest.param("br", brotli.compress, id="br"),
        pytest.param("zstd", zstandard.ZstdCompressor().compress, id="zstd"),
    ],
)
def test_a_coded_body_says_it_once_decoded_and_nothing_before(coding: str, coded: Any) -> None:
    body = coded(_openai(f"{OPENAI} However, your messages resulted in 9000 tokens"))
    plain = decoded(body, coding)
    assert plain is not None
    assert overflow.of_error(400, JSON, plain) == _window(8192, 9000)
    assert overflow.of_error(400, JSON, body) is None


WORDS = st.sampled_from(
    [
        *("maximum context length is ", "8192", "1" * 40, "0", "٣", " tokens", " resulted in ", "prompt is too long: ", " > ", "\\u00", "\\"),
        *("max_tokens", " exceeds ", "messages[3]", '"', "'", "{", "[", "}", "]", ",", ":", "\ufeff", "上下文", "超过", "\x00", "data: ", "\n\n"),
    ]
)  # fmt: skip
KEYS = st.sampled_from(
    [
        "error",
        "message",
        "code",
        "type",
        "detail",
        "loc",
        "param",
        "choices",
        "delta",
        "metadata",
        "raw",
        "n_ctx",
        "response",
    ]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.lists(WORDS).map("".join)
    | st.sampled_from(["context_length_exceeded", "exceed_context_size_error", "model_context_window_exceeded"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=5),
    max_leaves=20,
)


@given(
    body=st.binary(max_size=200)
    | st.lists(WORDS).map(lambda words: "".join(words).encode())
    | VALUES.map(_json)
    | VALUES.map(lambda value: _json({"error": {"message": json.dumps(value)}})),
    status=st.sampled_from([200, 400, 401, 413, 422, 429, 500, 503]),
    kind=st.sampled_from(["", JSON, "text/plain", "text/event-stream", "text/html"]),
    end=st.integers(0, 300),
)
def test_no_bytes_make_it_raise_or_state_a_size_of_nothing(body: bytes, status: int, kind: str, end: int) -> None:
    for data in (body, body[:end]):
        for found in (overflow.of_error(status, kind, data), overflow.of_event(data)):
            assert found is None or found.limit is None or found.limit > 0
            assert found is None or found.requested is None or found.requested > 0
            assert found is None or not found.input_only or found.limit is not None


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"[" * 65_536, id="lists"),
        pytest.param(b'{"error":' * 7_000, id="objects"),
        pytest.param(b'{"error":{"message":"' + b"9" * 60_000, id="digits"),
        pytest.param(b"maximum context length is " + b"9" * 60_000, id="a number without end"),
        pytest.param(b'{"error":"' * 6_000, id="texts in texts"),
    ],
)
def test_what_no_provider_sends(body: bytes) -> None:
    found = overflow.of_error(400, JSON, body)
    assert found is None or found == UNNUMBERED


# What is known of real providers, read from beside the checkout.

FACTS = recorded.FOLDER.parent / "providers" / "facts.json"


def _facts(table: str) -> list[Any]:
    if not FACTS.exists():
        return [
            pytest.param({}, marks=pytest.mark.skip(reason=f"no facts of providers in {FACTS.parent}"), id="absent")
        ]
    rows = json.loads(FACTS.read_text(encoding="utf-8"))[table]
    return [pytest.param(row, id=f"{at}-{row.get('provider', '')}") for at, row in enumerate(rows)]


@pytest.mark.parametrize("row", _facts("overflow_patterns"))
def test_overflows_of_known_providers(row: Mapping[str, Any]) -> None:
    """`kind`: of the input, or of its sum with the output; an output or bytes are none. `cut`: the window cut the answer, here an empty one."""
    sample = row["sample"]
    for shape, body in [("itself", sample.encode())] if sample.startswith("{") else _shapes(sample):
        if shape == "printed" and " " not in sample:
            continue  # a mere word in the middle of a text
        found = overflow.of_event(body) if row["where"] == "sse" else overflow.of_error(row["status"], JSON, body)
        assert (found is not None) == (row["kind"] in ("input", "sum", "cut")), shape
        stated = {name: float(value.replace(",", "")) for name, value in (row.get("sample_values") or {}).items()}
        if found is not None and "limit" in stated:
            assert found.limit == stated["limit"], shape
        if found is not None and "used" in stated and row["kind"] == "input" and "at least" not in sample:
            assert found.requested == stated["used"], shape


@pytest.mark.parametrize("row", _facts("not_overflow"))
def test_what_only_sounds_like_an_overflow(row: Mapping[str, Any]) -> None:
    for shape, body in _shapes(row["sample"]):
        assert [overflow.of_error(status, JSON, body) for status in (400, 413, 422, 429, 500)] == [None] * 5, shape
        assert overflow.of_event(body) is None, shape


SAMPLES = [pytest.param(path, id=path.stem) for path in sorted(WIRE.glob("*.json"))]
ABSENT = pytest.param(None, marks=pytest.mark.skip(reason=f"no recorded answers in {WIRE}"), id="absent")


@pytest.mark.parametrize("sample", SAMPLES or [ABSENT])
def test_recorded_answers(sample: Path) -> None:
    """Of the recordings those named after the context are overflows, and the one of vLLM that left less than nothing for the output."""
    about = json.loads(sample.read_bytes())
    data = sample.with_suffix(".body").read_bytes()
    kind = next((value for name, value in about["headers"] if name.lower() == "content-type"), "")
    is_one = "-context" in sample.stem or "neg-maxtokens" in sample.stem
    assert (overflow.of_error(about["status"], kind, data) is not None) == is_one
    if about["kind"] == "sse":
        assert [overflow.of_event(event) for event in events(data)] == [None] * len(list(events(data)))


@pytest.mark.parametrize("stated", ["abc", "", "4,096 tokens", "9" * 5000, "٣٤", "-1", "1e3"])
def test_a_length_that_is_no_number_is_none(stated: str) -> None:
    error = {"code": "context_length_exceeded", "message": "too long", "n_ctx": stated, "n_prompt_tokens": stated}
    found = overflow.of_error(400, "application/json", json.dumps({"error": error}).encode())
    assert found is not None
    assert (found.limit, found.requested) == (None, None)
