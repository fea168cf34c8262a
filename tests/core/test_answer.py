"""The same answer however it was cut, framed and coded; and nothing that passes makes the tap raise."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import brotli
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.answer import MAX_KEPT_BYTES, UNREAD, Answer, Tap, events, read_stream, read_whole, with_headers
from proxy.core.model import Usage
from tests.strategies import DAMAGE, TEXTS, damaged, pieces

SSE = "text/event-stream; charset=utf-8"


def _tapped(
    data: bytes, parts: Sequence[bytes] | None = None, *, kind: str = SSE, encoding: str = "", text: bool = True
) -> Answer:
    tap = Tap(kind, encoding)
    for part in [data] if parts is None else parts:
        tap.feed(part)
    return tap.answer(want_text=text)


def _sse(*chunks: dict[str, Any], done: bool = True) -> bytes:
    lines = [json.dumps(c).encode() for c in chunks] + ([b"[DONE]"] if done else [])
    return b"".join(b"data: %s\n\n" % line for line in lines)


def _delta(content: str | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    delta = {} if content is None else {"content": content}
    return {"choices": [{"index": 0, "delta": {**delta, **more.pop("delta", {})}, "finish_reason": finish}], **more}


OPENAI = {
    "prompt_tokens": 100,
    "completion_tokens": 20,
    "total_tokens": 120,
    "prompt_tokens_details": {"cached_tokens": 64},
}

USAGES = [
    pytest.param({}, Usage(), id="none"),
    pytest.param({"usage": None}, Usage(), id="null"),
    pytest.param({"usage": []}, Usage(), id="no object"),
    pytest.param({"usage": {}}, Usage(), id="empty"),
    pytest.param({"usage": OPENAI}, Usage(100, 20, 64), id="openai"),
    pytest.param({"usage": {**OPENAI, "prompt_tokens_details": None}}, Usage(100, 20), id="details null"),
    pytest.param({"usage": {**OPENAI, "prompt_tokens_details": {}}}, Usage(100, 20), id="no cached count is unknown, not zero"),
    pytest.param({"usage": {**OPENAI, "prompt_tokens_details": {"cached_tokens": 0}}}, Usage(100, 20, 0), id="zero is known"),
    pytest.param({"usage": {**OPENAI, "completion_tokens_details": {"reasoning_tokens": 15}}}, Usage(100, 20, 64, 15), id="reasoning"),
    pytest.param({"usage": {**OPENAI, "prompt_tokens_details": {"cached_tokens": 200}}}, Usage(100, 20, 100), id="cached above prompt"),
    pytest.param(
        {"usage": {"prompt_tokens": 100, "completion_tokens": 20, "prompt_cache_hit_tokens": 64, "prompt_cache_miss_tokens": 36}},
        Usage(100, 20, 64),
        id="deepseek",
    ),
    pytest.param({"usage": {"prompt_tokens": 100, "completion_tokens": 20, "cached_tokens": 64}}, Usage(100, 20, 64), id="moonshot"),
    pytest.param(
        {"usage": {"input_tokens": 10, "output_tokens": 20, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 26}},
        Usage(100, 20, 64),
        id="anthropic: three counts that exclude each other",
    ),
    pytest.param({"usage": {"input_tokens": 10, "output_tokens": 20}}, Usage(10, 20), id="anthropic without a cache"),
    pytest.param({"usage": {"input_tokens": 10, "cache_read_input_tokens": 0}}, Usage(10, None, 0), id="anthropic, nothing read"),
    pytest.param({"x_groq": {"id": "r", "usage": {"prompt_tokens": 100, "completion_tokens": 20}}}, Usage(100, 20), id="groq"),
    pytest.param({"x_groq": {"id": "r"}}, Usage(), id="groq without"),
    pytest.param({"x_groq": "r"}, Usage(), id="groq, no object"),
    pytest.param({"timings": {"cache_n": 64, "prompt_n": 36, "predicted_n": 20}}, Usage(100, 20, 64), id="llama.cpp"),
    pytest.param({"timings": {"prompt_n": 36, "predicted_n": 20}}, Usage(None, 20), id="llama.cpp without the cached count"),
    pytest.param({"usage": OPENAI, "timings": {"cache_n": 1, "prompt_n": 1, "predicted_n": 1}}, Usage(100, 20, 64), id="usage before timings"),
    pytest.param({"usage": {"prompt_tokens": "100", "completion_tokens": 20.5}}, Usage(), id="wrong types"),
    pytest.param({"usage": {"prompt_tokens": True, "completion_tokens": -1}}, Usage(), id="truth and negatives are no counts"),
    pytest.param({"usage": {"prompt_tokens": 0, "completion_tokens": 0}}, Usage(), id="no prompt has no tokens: nobody counted"),
    pytest.param({"usage": {**OPENAI, "prompt_tokens": 0}}, Usage(None, 20), id="a prompt of zero tokens says nothing of its cache"),
    pytest.param(
        {"usage": {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 303, "completion_tokens_details": {"reasoning_tokens": 290}}},
        Usage(12, 291, None, 290),
        id="xai: thoughts beside the answer",
    ),
    pytest.param(
        {"usage": {"completion_tokens": 1, "total_tokens": 291, "completion_tokens_details": {"reasoning_tokens": 290}}},
        Usage(None, 1, None, 290),
        id="a total of nothing but the answer tells nothing",
    ),
    pytest.param(
        {"usage": {"prompt_tokens": 43, "completion_tokens": 10, "total_tokens": 53, "completion_tokens_details": {"reasoning_tokens": 11}}},
        Usage(43, 10, None, 11),
        id="more thoughts than answer, among it all the same",
    ),
    pytest.param({"usage": {"prompt_tokens": 41, "completion_tokens": 15, "total_tokens": 56, "cached_tokens": 0}}, Usage(41, 15, 0), id="together"),
    pytest.param(
        {"usage": {"input_tokens": 100, "output_tokens": 20, "input_tokens_details": {"cached_tokens": 64}, "output_tokens_details": {"reasoning_tokens": 5}}},
        Usage(100, 20, 64, 5),
        id="responses",
    ),
    pytest.param({"usage": {"input_tokens": 100, "input_tokens_details": None}}, Usage(100), id="responses, no details"),
    pytest.param(
        {"usage": {"input_tokens": 100, "input_tokens_details": {}, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 26}},
        Usage(100, None, 64),
        id="responses: anthropic's counts in a prompt that includes them",
    ),
    pytest.param(
        {"usage": {"inputTokens": 10, "outputTokens": 20, "cacheReadInputTokens": 64, "cacheWriteInputTokens": 26}},
        Usage(100, 20, 64),
        id="bedrock",
    ),
    pytest.param(
        {"usage": {"prompt_tokens": 100, "completion_tokens": 20, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 26}},
        Usage(100, 20, 64),
        id="minimax: anthropic's counts in a prompt that includes them",
    ),
    pytest.param(
        {"usage": {"prompt_tokens": 10, "completion_tokens": 20, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 26}},
        Usage(100, 20, 64),
        id="a gateway whose prompt does not include them",
    ),
    pytest.param(
        {"usage": {"prompt_tokens": 90, "completion_tokens": 20, "total_tokens": 200, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 26}},
        Usage(180, 20, 64),
        id="the total tells that it does not",
    ),
    pytest.param(
        {"usage": {"prompt_tokens": 90, "completion_tokens": 20, "total_tokens": 110, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 26}},
        Usage(90, 20, 64),
        id="the total tells that it does",
    ),
    pytest.param(
        {"usage": {"prompt_tokens": 100, "completion_tokens": 20}, "timings": {"cache_n": 64, "prompt_n": 36, "predicted_n": 20}},
        Usage(100, 20, 64),
        id="llama.cpp before it had details",
    ),
    pytest.param({"usage": None, "x_groq": {"usage": OPENAI}}, Usage(100, 20, 64), id="groq, usage null"),
    pytest.param({"perf_metrics": {"prompt-tokens": 100, "cached-prompt-tokens": 64}}, Usage(100, None, 64), id="fireworks, metrics"),
    pytest.param(
        {"usage": {"prompt_tokens": 100, "completion_tokens": 20}, "perf_metrics": {"prompt-tokens": 100, "cached-prompt-tokens": 64}},
        Usage(100, 20, 64),
        id="fireworks, usage and metrics",
    ),
    pytest.param({"perf_metrics": "100"}, Usage(), id="metrics of another kind"),
    pytest.param({"usage": {"prompt_tokens": 10**9, "completion_tokens": 20}}, Usage(10**9, 20), id="a window that nobody has"),
    pytest.param({"usage": {"prompt_tokens": 10**9 + 1, "completion_tokens": 20}}, Usage(None, 20), id="an absurd count is unknown"),
    pytest.param({"usage": {**OPENAI, "completion_tokens": 2**63}}, Usage(100, None, 64), id="an absurd answer"),
    pytest.param({"usage": {**OPENAI, "prompt_tokens": 2**64 - 1}}, Usage(None, 20, 64), id="the largest of 64 bits"),
    pytest.param({"usage": {**OPENAI, "prompt_tokens": 10**30}}, Usage(None, 20, 64), id="more than 64 bits"),
    pytest.param({"usage": {**OPENAI, "prompt_tokens_details": {"cached_tokens": 10**12}}}, Usage(100, 20), id="an absurd cached count"),
    pytest.param({"timings": {"cache_n": 10**12, "prompt_n": 36, "predicted_n": 20}}, Usage(None, 20), id="llama.cpp, absurd"),
]  # fmt: skip


@pytest.mark.parametrize(("members", "usage"), USAGES)
def test_usage_of_a_whole_answer(members: dict[str, Any], usage: Usage) -> None:
    body = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], **members}
    assert read_whole(json.dumps(body).encode(), want_text=False).usage == usage


@pytest.mark.parametrize(("members", "usage"), USAGES)
@pytest.mark.parametrize("text", [True, False])
def test_usage_of_a_stream(members: dict[str, Any], usage: Usage, text: bool) -> None:
    last = {"choices": [], **members}
    assert read_stream(_sse(_delta("x"), _delta(finish="stop"), last), want_text=text).usage == usage
    assert read_stream(_sse(_delta("x"), _delta(finish="stop", **members)), want_text=text).usage == usage


def test_usage_inside_a_choice() -> None:
    chunk = {
        "choices": [
            {"index": 0, "delta": {}, "finish_reason": "stop", "usage": {"prompt_tokens": 9, "completion_tokens": 12}}
        ]
    }
    assert read_stream(_sse(_delta("x"), chunk), want_text=False).usage == Usage(9, 12)


def test_the_last_count_wins_where_each_chunk_has_one() -> None:
    counts = [{"prompt_tokens": 9, "completion_tokens": n} for n in (1, 2, 3)]
    chunks = [_delta("x", usage=usage) for usage in counts] + [_delta(finish="stop", usage=None)]
    assert read_stream(_sse(*chunks), want_text=False).usage == Usage(9, 3)


def test_counts_of_several_chunks_add_to_one_usage() -> None:
    start = {"choices": [], "usage": {"input_tokens": 10, "cache_read_input_tokens": 90}}
    assert read_stream(_sse(start, {"choices": [], "usage": {"output_tokens": 5}}), want_text=False).usage == Usage(
        100, 5, 90
    )


def test_cached_is_never_above_the_prompt_whatever_chunk_it_came_with() -> None:
    chunks = [{"usage": {"prompt_tokens": 10}}, {"usage": {"cached_tokens": 50}}]
    assert read_stream(_sse(*chunks), want_text=False).usage == Usage(10, None, 10)
    assert read_stream(_sse(*chunks[::-1]), want_text=False).usage == Usage(10, None, 10)


SECOND = {"choices": [{"index": 1, "delta": {"content": "b"}}]}
TOOL = [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("chunks", "done", "complete", "finish", "text", "failed"),
    [
        pytest.param([_delta("He"), _delta("llo"), _delta(finish="stop")], True, True, "stop", "Hello", False, id="plain"),
        pytest.param([_delta("He"), _delta("llo"), _delta(finish="stop")], False, True, "stop", "Hello", False, id="no [DONE]"),
        pytest.param([_delta("Hello")], True, True, "", "Hello", False, id="no finish reason"),
        pytest.param([_delta("He"), _delta("llo")], False, False, "", "Hello", False, id="broken off"),
        pytest.param([], True, True, "", None, False, id="only [DONE]"),
        pytest.param([], False, False, "", None, False, id="nothing"),
        pytest.param([_delta("a"), {"error": {"message": "x"}}], False, False, "", "a", True, id="an error on the way"),
        pytest.param([_delta("a"), {"error": {"message": "x"}}], True, False, "", "a", True, id="an error, then [DONE]"),
        pytest.param([_delta("a", finish="stop"), {"error": {"code": 1}}], True, False, "stop", "a", True, id="an error behind the finish"),
        pytest.param([{**_delta("a", finish="error"), "error": {"code": 502}}], True, False, "error", "a", True, id="error in both places"),
        pytest.param([_delta("a", finish="error")], True, False, "error", "a", True, id="error as a finish reason"),
        pytest.param([_delta("a", finish="stop", error=None)], True, True, "stop", "a", False, id="no error said aloud"),
        pytest.param([_delta("a"), _delta("b", finish="length")], True, True, "length", "ab", False, id="cut by length"),
        pytest.param([_delta(delta={"tool_calls": TOOL}), _delta(finish="tool_calls")], True, True, "tool_calls", None, False, id="a tool call"),
        pytest.param([_delta("a"), _delta(delta={"tool_calls": TOOL}, finish="tool_calls")], True, True, "tool_calls", None, False, id="text and a call"),
        pytest.param([_delta("a", delta={"tool_calls": []}, finish="stop")], True, True, "stop", "a", False, id="no calls said aloud"),
        pytest.param([_delta(delta={"function_call": {"name": "f"}}, finish="function_call")], True, True, "function_call", None, False, id="a legacy call"),
        pytest.param([_delta("a", delta={"refusal": "No"}, finish="stop")], True, True, "stop", None, False, id="a refusal"),
        pytest.param([_delta("a"), SECOND, _delta(finish="stop")], True, True, "stop", None, False, id="two choices"),
        pytest.param([_delta(delta={"content": [{"type": "thinking"}]}), _delta("a", finish="stop")], True, True, "stop", None, False, id="content in parts"),
        pytest.param([_delta(""), _delta(finish="stop")], True, True, "stop", "", False, id="an empty answer"),
        pytest.param([_delta(delta={"content": None}), _delta(finish="stop")], True, True, "stop", None, False, id="content null"),
        pytest.param([{"choices": None}, {"choices": ["x", None]}, {}, _delta("a", finish="stop")], True, True, "stop", "a", False, id="odd chunks"),
        pytest.param([{"choices": [{"delta": None, "finish_reason": 7}]}], False, False, "", None, False, id="wrong types"),
        pytest.param([_delta("a", finish="stop"), {"choices": [], "prompt_filter_results": []}], True, True, "stop", "a", False, id="empty choices"),
    ],
)  # fmt: skip
def test_a_stream(
    chunks: list[dict[str, Any]], done: bool, complete: bool, finish: str, text: str | None, failed: bool
) -> None:
    found = read_stream(_sse(*chunks, done=done), want_text=True)
    assert (found.complete, found.finish, found.text, found.failed) == (complete, finish, text, failed)
    without = read_stream(_sse(*chunks, done=done), want_text=False)
    assert without == replace(found, text=None, reasoning=None)


FAILED = Answer(Usage(), complete=False, finish="", text="x", reasoning=None, failed=True)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(b"", UNREAD, id="nothing"),
        pytest.param(b"method=POST", UNREAD, id="no JSON"),
        pytest.param(b"[]", UNREAD, id="a list"),
        pytest.param(b'{"choices":[{"message":{"content":"x"}}]', UNREAD, id="broken off"),
        pytest.param(b"\xff\xfe", UNREAD, id="no UTF-8"),
        pytest.param(b'{"error":{"message":"x"}}', replace(UNREAD, failed=True), id="an error"),
        pytest.param(b'{"choices":[]}', replace(UNREAD, failed=True), id="no choice"),
        pytest.param(b'{"choices":{}}', replace(UNREAD, failed=True), id="choices are no list"),
        pytest.param(b'{"choices":[7]}', replace(UNREAD, complete=True), id="a choice that is no object"),
        pytest.param(b'{"choices":[{"message":null,"finish_reason":null}]}', replace(UNREAD, complete=True), id="nulls"),
        pytest.param(b'{"choices":[{"message":{"content":""},"finish_reason":""}]}', Answer(Usage(), True, "", "", None, False), id="an empty answer"),
        pytest.param(b'{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}]}', Answer(Usage(), True, "stop", "x", None, False), id="plain"),
        pytest.param(b'{"choices":[{"message":{"content":"x","reasoning_content":"y"}}]}', Answer(Usage(), True, "", "x", "y", False), id="thoughts"),
        pytest.param(b'{"choices":[{"message":{"content":"x","reasoning_content":""}}]}', Answer(Usage(), True, "", "x", None, False), id="no thoughts"),
        pytest.param(b'{"choices":[{"message":{"content":"x","tool_calls":[{}]}}]}', replace(UNREAD, complete=True), id="a tool call"),
        pytest.param(b'{"choices":[{"message":{"content":"x","refusal":"no"}}]}', replace(UNREAD, complete=True), id="a refusal"),
        pytest.param(b'{"choices":[{"message":{"content":[]}}]}', replace(UNREAD, complete=True), id="parts"),
        pytest.param(b'{"choices":[{"message":{"content":"x"}},{"message":{"content":"y"}}]}', replace(UNREAD, complete=True), id="two choices"),
        pytest.param(b'{"choices":[{"message":{"content":"x"},"finish_reason":"error"}]}', replace(FAILED, finish="error"), id="finish says error"),
        pytest.param(b'{"choices":[{"message":{"content":"x"},"error":{"code":502}}]}', FAILED, id="an error in the choice"),
    ],
)  # fmt: skip
def test_a_whole_answer(body: bytes, expected: Answer) -> None:
    assert read_whole(body, want_text=True) == expected
    assert read_whole(body, want_text=False) == replace(expected, text=None, reasoning=None)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(b"", [], id="nothing"),
        pytest.param(b"data: a\n\ndata: b\n\n", [b"a", b"b"], id="LF"),
        pytest.param(b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"], id="CRLF"),
        pytest.param(b"data: a\r\rdata: b\r\r", [b"a", b"b"], id="CR"),
        pytest.param(b"data: a\n\r\ndata: b\r\n\n", [b"a", b"b"], id="mixed"),
        pytest.param(b"data:a\n\ndata:  b\n\n", [b"a", b" b"], id="at most one blank goes"),
        pytest.param(b"data: a\ndata: b\n\n", [b"a\nb"], id="two lines of data"),
        pytest.param(b": ping\n\n: ping\ndata: a\n\n", [b"a"], id="comments"),
        pytest.param(b"event: x\nid: 7\nretry: 3000\ndata: a\n\n", [b"a"], id="other fields"),
        pytest.param(b"event: ping\n\ndata: a\n\n", [b"a"], id="an event without data"),
        pytest.param(b"data: a\n\ndata: b", [b"a", b"b"], id="not closed at the end"),
        pytest.param(b"\n\n\ndata: a\n\n\n\n", [b"a"], id="blank lines"),
        pytest.param(b"\xef\xbb\xbfdata: a\n\n", [b"a"], id="byte order mark"),
        pytest.param(b"database: a\n\nxdata: b\n\n", [], id="fields that only look like data"),
    ],
)
def test_events(data: bytes, expected: list[bytes]) -> None:
    assert list(events(data)) == expected


ANSWERS = st.fixed_dictionaries(
    {
        "words": st.lists(st.sampled_from(TEXTS), max_size=4),
        "thoughts": st.lists(st.sampled_from(("hm ", "so ", "")), max_size=2),
        "finish": st.sampled_from(("stop", "length", "tool_calls", "error")),
        "calls": st.booleans(),
        "usage": st.sampled_from([p.values[0] for p in USAGES]),
    }
)


def _as_stream(answer: dict[str, Any]) -> list[dict[str, Any]]:
    chunks = [_delta(delta={"reasoning_content": t}) for t in answer["thoughts"]]
    chunks += [_delta(word) for word in answer["words"]]
    if answer["calls"]:
        chunks.append(_delta(delta={"tool_calls": TOOL}))
    return [*chunks, _delta(finish=answer["finish"]), {"choices": [], **answer["usage"]}]


def _as_whole(answer: dict[str, Any]) -> bytes:
    message = {
        "content": "".join(answer["words"]) if answer["words"] else None,
        "reasoning_content": "".join(answer["thoughts"]),
        "tool_calls": TOOL if answer["calls"] else None,
    }
    return json.dumps(
        {"choices": [{"message": message, "finish_reason": answer["finish"]}], **answer["usage"]}
    ).encode()


def _framed(chunks: Sequence[dict[str, Any]], ending: bytes, seed: int, *, done: bool = True) -> bytes:
    """The chunks as a stream with everything in between that servers put there."""
    random = Random(seed)
    lines = [json.dumps(c, indent=random.choice((None, None, 1))).encode() for c in chunks] + (
        [b"[DONE]"] if done else []
    )
    out = []
    for line in lines:
        noise = random.choice(
            (
                b"",
                b"",
                b": OPENROUTER PROCESSING\n\n",
                b": keepalive\n",
                b"event: ping\n\n",
                b"retry: 3000\n",
                b"id: 1\n",
            )
        )
        field = b"data:" if seed % 2 else b"data: "
        out.append(noise + b"\n".join(field + part for part in line.split(b"\n")) + b"\n\n")
    return b"".join(out).replace(b"\n", ending)


@given(ANSWERS)
def test_a_stream_and_a_whole_answer_read_the_same(answer: dict[str, Any]) -> None:
    assert _tapped(_sse(*_as_stream(answer))) == _tapped(_as_whole(answer), kind="application/json")


@given(ANSWERS, st.integers(0, 2**32 - 1), st.sampled_from((b"\n", b"\r\n", b"\r")), st.booleans(), st.data())
def test_no_cut_and_no_frame_changes_what_is_read(
    answer: dict[str, Any], seed: int, ending: bytes, done: bool, data: st.DataObject
) -> None:
    chunks = _as_stream(answer)
    plain = _tapped(_sse(*chunks, done=done))
    framed = _framed(chunks, ending, seed, done=done)
    assert _tapped(framed, data.draw(pieces(framed))) == plain
    assert _tapped(framed, data.draw(pieces(framed)), text=False) == replace(plain, text=None, reasoning=None)
    assert (plain.complete, plain.failed) == (answer["finish"] != "error", answer["finish"] == "error")


@given(ANSWERS, st.integers(0, 4000))
def test_a_stream_that_breaks_off_is_complete_only_behind_its_finish(answer: dict[str, Any], at: int) -> None:
    whole = _sse(*_as_stream(answer))
    cut = whole[: at % (len(whole) + 1)]
    if _tapped(cut).complete:
        assert b'"finish_reason": "' in cut
        assert _tapped(cut).finish == answer["finish"]


def _packed(plain: bytes, encoding: str) -> bytes:
    packers = {"deflate": zlib.compress, "br": brotli.compress, "zstd": zstandard.ZstdCompressor().compress}
    packed: bytes = packers.get(encoding.strip().lower(), gzip.compress)(plain)
    return packed


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "GZIP", " gzip ", "deflate", "br", "zstd"])
@given(answer=ANSWERS, data=st.data())
def test_a_compressed_answer(encoding: str, answer: dict[str, Any], data: st.DataObject) -> None:
    plain = _sse(*_as_stream(answer))
    packed = _packed(plain, encoding)
    assert _tapped(packed, data.draw(pieces(packed)), encoding=encoding) == _tapped(plain)


def _bombs() -> Iterator[Any]:
    plain = _sse(_delta("x", finish="stop"))
    packed = gzip.compress(plain)
    yield pytest.param(packed, "gzip, gzip", id="two codings")
    yield pytest.param(packed, "br", id="says brotli and is not")
    yield pytest.param(packed, "zstd", id="says zstd and is not")
    yield pytest.param(_packed(plain, "br")[:-3], "br", id="broken brotli")
    yield pytest.param(_packed(plain, "zstd")[:9], "zstd", id="broken zstd")
    yield pytest.param(_packed(b" " * (MAX_KEPT_BYTES + 1), "br"), "br", id="a bomb of brotli")
    yield pytest.param(_packed(b" " * (MAX_KEPT_BYTES + 1), "zstd"), "zstd", id="a bomb of zstd")
    yield pytest.param(plain, "x-foo", id="an unknown coding")
    yield pytest.param(plain, "gzip", id="says gzip and is not")
    yield pytest.param(packed[:5] + b"\xff" * 9, "gzip", id="broken gzip")
    yield pytest.param(gzip.compress(b" " * (MAX_KEPT_BYTES + 1)), "gzip", id="a bomb")
    yield pytest.param(gzip.compress(plain + b"\n" * 2 * MAX_KEPT_BYTES), "gzip", id="an answer with a bomb behind it")
    yield pytest.param(plain + b"\n" * MAX_KEPT_BYTES, "", id="more than is kept")


@pytest.mark.parametrize(("data", "encoding"), list(_bombs()))
@pytest.mark.parametrize("kind", [SSE, "application/json"])
def test_what_is_not_read_is_unknown(data: bytes, encoding: str, kind: str) -> None:
    assert _tapped(data, kind=kind, encoding=encoding) == UNREAD


def test_an_answer_as_large_as_is_kept_is_read() -> None:
    plain = _sse(_delta("x", finish="stop"))
    assert _tapped(plain + b"\n" * (MAX_KEPT_BYTES - len(plain))).complete


def test_a_gzip_that_breaks_off_is_read_as_far_as_it_came() -> None:
    plain = _sse(*[_delta(str(n)) for n in range(2000)], done=False)
    packed = gzip.compress(plain)
    assert not _tapped(packed[: len(packed) // 2], encoding="gzip").complete


FRAGMENTS = (b"data:", b"\n", b"\r", b'{"choices":[', b"{}", b"]}", b'"usage":', b"1", b"[DONE]", b" ")


@given(
    st.binary(max_size=200) | st.lists(st.sampled_from(FRAGMENTS)).map(b"".join),
    st.sampled_from((SSE, "application/json", "", "text/plain")),
    st.sampled_from(("", "identity", "gzip", "deflate", "br", "zstd", "gzip,gzip")),
    st.booleans(),
)  # fmt: skip
def test_no_bytes_make_it_raise(data: bytes, kind: str, encoding: str, text: bool) -> None:
    found = _tapped(data, kind=kind, encoding=encoding, text=text)
    assert text or found.text is None


@given(ANSWERS, DAMAGE, st.sampled_from((SSE, "application/json")), st.booleans())
def test_no_damage_makes_it_raise(answer: dict[str, Any], damage: tuple[int, bytes], kind: str, zipped: bool) -> None:
    data = _sse(*_as_stream(answer)) if kind == SSE else _as_whole(answer)
    data = damaged(gzip.compress(data) if zipped else data, *damage)
    assert isinstance(_tapped(data, kind=kind, encoding="gzip" if zipped else ""), Answer)


KEYS = (
    *("choices", "usage", "delta", "content", "index", "error", "finish_reason", "x_groq", "timings"),
    *("prompt_tokens", "cached_tokens", "input_tokens", "prompt_tokens_details"),
)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 200) | st.sampled_from(("stop", "error", "x", "")),
    lambda v: st.lists(v, max_size=2) | st.dictionaries(st.sampled_from(KEYS), v, max_size=4),
    max_leaves=12,
)


@given(st.lists(JSON, max_size=3))
def test_counts_are_never_negative_and_cached_never_above_the_prompt(chunks: list[Any]) -> None:
    for found in (
        read_stream(_sse(*chunks), want_text=True),
        *(read_whole(json.dumps(c).encode(), want_text=True) for c in chunks),
    ):
        counts = (found.usage.prompt, found.usage.completion, found.usage.cached, found.usage.reasoning)
        assert all(count is None or count >= 0 for count in counts)
        assert found.usage.cached is None or found.usage.prompt is None or found.usage.cached <= found.usage.prompt
        assert not (found.complete and found.failed)


def test_a_stream_that_is_labelled_as_something_else_or_not_at_all() -> None:
    stream = _sse(_delta("x"), _delta(finish="stop"), {"choices": [], "usage": OPENAI})
    for start in (b"", b"\xef\xbb\xbf", b"\r\n", b": ping\n\n", b"event: message\n", b"retry: 1\n", b"id: 1\n"):
        for kind in ("", "application/json", "text/plain"):
            assert _tapped(start + stream, kind=kind) == _tapped(stream), (start, kind)
    whole = b'{"choices":[{"message":{"content":"data: x"},"finish_reason":"stop"}]}'
    assert _tapped(b"\n\n" + whole, kind="").text == "data: x"


@pytest.mark.parametrize(
    "event",
    [
        {"object": "error", "message": "x", "code": 400},
        {"type": "error", "message": "x"},
        {"error": "x"},
        {"choices": [{"index": 0, "delta": {}, "error": {"code": 502}}]},
    ],
)
def test_an_error_in_the_place_of_a_chunk_is_no_answer(event: dict[str, Any]) -> None:
    found = _tapped(_sse(_delta("a"), event), text=False)
    assert (found.complete, found.failed) == (False, True)


def test_headers_count_where_the_body_does_not() -> None:
    headers = [("Fireworks-Prompt-Tokens", "100"), ("fireworks-cached-prompt-tokens", "64")]
    body = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}
    counted = {"usage": {"prompt_tokens": 90, "completion_tokens": 20}}
    for members, usage in (
        ({}, Usage(100, None, 64)),
        (counted, Usage(90, 20, 64)),
        ({"usage": {**OPENAI, "prompt_tokens_details": {"cached_tokens": 0}}}, Usage(100, 20, 0)),
    ):
        answer = read_whole(json.dumps({**body, **members}).encode(), want_text=False)
        assert with_headers(answer, headers) == replace(answer, usage=usage)
        for odd in (
            [],
            [("fireworks-prompt-tokens", "many")],
            [("fireworks-prompt-tokens", "-1")],
            [("fireworks-prompt-tokens", "9" * 5000)],
            [("x", "7")],
        ):
            assert with_headers(answer, odd) == answer


def test_halves_of_an_emoji_and_numbers_that_are_none_are_read() -> None:
    whole = (
        rb'{"choices":[{"message":{"content":"a \ud83d"},"finish_reason":"stop"}],"usage":{"prompt_tokens":5},"x":NaN}'
    )
    answer = read_whole(whole, want_text=True)
    assert (answer.complete, answer.usage.prompt) == (True, 5)

    def event(text: bytes) -> bytes:
        return b'data: {"choices":[{"index":0,"delta":{"content":"' + text + b'"}}]}\n\n'

    end = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    assert (
        read_stream(event(b"a ") + event(rb"\ud83d") + event(rb"\ude00 b") + end, want_text=True).text
        == "a \U0001f600 b"
    )
