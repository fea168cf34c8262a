"""Recorded answers and known usage objects of real providers, read right however they are cut and wherever they break off."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from proxy.core.answer import UNREAD, Answer, Tap, events, holds_event, with_headers
from proxy.core.model import Usage
from proxy.core.stream_usage import UsageFilter
from tests.samples import Sample, each, facts

SSE = "text/event-stream"


def _tapped(content_type: str, *parts: bytes, text: bool = True) -> Answer:
    tap = Tap(content_type, "")
    for part in parts:
        tap.feed(part)
    return tap.answer(want_text=text)


def _passed(*parts: bytes) -> bytes:
    sieve = UsageFilter()
    return b"".join(sieve.feed(part) for part in parts) + sieve.rest()


def _bytes(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


@pytest.mark.parametrize("sample", each())
def test_a_recorded_answer(sample: Sample) -> None:
    found = _tapped(sample.content_type, sample.body)
    assert found.usage == (sample.usage if sample.status == 200 else Usage())
    assert (found.complete, found.finish) == (sample.is_complete, sample.finish)
    assert _tapped(sample.content_type, sample.body, text=False) == replace(found, text=None, reasoning=None)
    assert _tapped(sample.content_type, *_bytes(sample.body)) == found


@pytest.mark.parametrize("sample", each("sse"))
def test_the_words_of_a_recorded_stream(sample: Sample) -> None:
    found = _tapped(sample.content_type, sample.body)
    deltas = [c["delta"] for c in sample.carriers if c.get("delta")]
    contents = [delta["content"] for delta in deltas if delta.get("content") is not None]
    if any(d.get("tool_calls") for d in deltas) or not all(isinstance(c, str) for c in contents) or not contents:
        assert found.text is None
    else:
        assert found.text == "".join(contents)
    assert found.failed is sample.has_failed


@pytest.mark.parametrize("sample", each("sse"))
def test_a_stream_cut_anywhere_is_the_same_stream(sample: Sample) -> None:
    data = sample.short
    whole, passed = _tapped(SSE, data, text=False), _passed(data)
    for at in _cuts(data):
        assert _passed(data[:at], data[at:]) == passed, at
        assert _tapped(SSE, data[:at], data[at:], text=False) == whole, at
    assert _passed(*_bytes(data)) == passed


@pytest.mark.parametrize("sample", each("sse"))
def test_each_event_of_a_stream_cut_anywhere_leaves_as_it_came(sample: Sample) -> None:
    """Every byte of every event, whole long streams too: in front of it and behind it stand its neighbours."""
    for at, event in enumerate(sample.events):
        before, after = b"".join(sample.events[max(0, at - 1) : at]), b"".join(sample.events[at + 1 : at + 2])
        data = before + event + after
        passed = _passed(data)
        for cut in range(len(before), len(before) + len(event)):
            assert _passed(data[:cut], data[cut:]) == passed, (at, cut)


@pytest.mark.parametrize("sample", each("sse"))
def test_a_stream_broken_off_anywhere_is_complete_only_behind_its_end(sample: Sample) -> None:
    """Where it breaks off behind that, a finish reason or [DONE], an answer has been given, and only its counts may be missing."""
    data = sample.short
    whole = _tapped(SSE, data)
    end = _end_of_answer(data)
    for at in _cuts(data):
        found = _tapped(SSE, data[:at], text=False)
        assert not found.complete or at >= end, at
        assert not found.failed or whole.failed, at
    said = [_tapped(SSE, data[: match.end()]).text or "" for match in re.finditer(rb"\n\n|\r\n\r\n", data)]
    if whole.text is not None:
        assert all(whole.text.startswith(text) for text in said)


def _cuts(data: bytes) -> range:
    """Every byte; in a long stream every third or so, for the time it takes."""
    return range(0, len(data), 1 + len(data) // 5000)


def _end_of_answer(data: bytes) -> int:
    """Where the first event is whole that says that the answer is over; beyond the stream if none does."""
    over = re.search(rb'"finish_reason": ?"[^"\r\n]+"[^\r\n]*|data: ?\[DONE\]', data)
    return over.end() if over else len(data) + 1


@pytest.mark.parametrize("sample", each("json"))
def test_an_answer_broken_off_anywhere_is_not_read(sample: Sample) -> None:
    for at in range(len(sample.body.rstrip())):
        assert _tapped(sample.content_type, sample.body[:at], text=False) == UNREAD, at


@pytest.mark.parametrize("sample", each("sse"))
def test_the_first_event_is_there_once_it_is_whole(sample: Sample) -> None:
    first = next(at for at, event in enumerate(sample.events) if b"data:" in event)
    begun = b"".join(sample.events[: first + 1])
    assert [at for at in range(len(begun) + 1) if holds_event(begun[:at])] == [len(begun)]
    assert holds_event(sample.body)
    assert next(events(begun)) == next(events(sample.body))


@pytest.mark.parametrize("sample", each("sse"))
def test_only_the_chunk_with_empty_choices_is_withheld(sample: Sample) -> None:
    """And that is never one which says something besides: Azure's verdict on the prompt has empty choices as well, and no usage."""

    def is_withheld(event: bytes) -> bool:
        said = [json.loads(line[5:]) for line in event.splitlines() if line.startswith(b"data: {")]
        return any(chunk.get("choices") == [] and chunk.get("usage") for chunk in said)

    withheld = [event for event in sample.events if is_withheld(event)]
    assert _passed(sample.body) == b"".join(event for event in sample.events if event not in withheld)
    assert len(withheld) <= 1
    if withheld:
        assert _tapped(SSE, *withheld, text=False).usage == sample.usage


# Usage objects in every shape that is known.

TOTAL, CACHED, WRITTEN, ANSWER = 1000, 640, 260, 20
Counts = dict[str, int]


def _alternatives(written: str | None) -> list[list[str]]:
    """The places that a row names: alternatives, each a sum of paths. What stands in brackets explains."""
    plain = re.sub(r"\s*\([^()]*\)", "", written or "")
    return [
        [term if term.startswith(("usage.", "timings.", "header ")) else f"usage.{term}" for term in way.split(" + ")]
        for way in re.split(r" \| | and/or ", plain)
        if way
    ]


def _shapes(row: Mapping[str, Any]) -> Iterator[tuple[Counts, bool]]:
    """Counts by path, for each way in which a provider reports them, and whether what is cached is among them."""
    totals, cached = _alternatives(row["total"]), _alternatives(row["cached"])
    for at in range(max(len(totals), len(cached))):
        total, found = totals[min(at, len(totals) - 1)], cached[min(at, len(cached) - 1)] if cached else []
        counts = dict.fromkeys(found, CACHED)
        left = TOTAL
        for place in (place for place in total if place in found):
            left -= counts[place]
        rest = [place for place in total if place not in found]
        for place in rest[1:]:
            counts[place] = WRITTEN
            left -= WRITTEN
        counts[rest[0]] = left
        yield counts, bool(found)


def _placed(counts: Counts) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The members of an answer and its headers, with the counts where they belong."""
    members: dict[str, Any] = {}
    headers = []
    for path, count in counts.items():
        kind, _, name = path.partition(" ")
        if name:
            assert kind == "header"
            headers.append((name, str(count)))
            continue
        *outer, key = path.split(".")
        place = members
        for part in outer:
            place = place.setdefault(part, {})
        place[key] = count
    return members, headers


def _streams(members: dict[str, Any]) -> Iterator[bytes]:
    """The members in each place where a stream has them: in a chunk of its own, in the last one, in its choice (Moonshot), beside it (Groq)."""
    begin: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}], "usage": None}
    choice: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": "stop"}
    yield _sse(begin, {"choices": [choice], "usage": None}, {"choices": [], **members})
    yield _sse(begin, {"choices": [choice], **members})
    if "usage" in members:
        yield _sse(begin, {"choices": [{**choice, **members}]})
        yield _sse(begin, {"choices": [choice], "x_groq": {"id": "r", **members}})


def _sse(*chunks: Mapping[str, Any]) -> bytes:
    return b"".join(b"data: %s\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("row", facts("usage_fields"))
def test_every_known_shape_of_usage(row: Mapping[str, Any]) -> None:
    for counts, is_cached in _shapes(row):
        members, headers = _placed(counts)
        whole = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], **members}
        expected = Usage(TOTAL, None, CACHED if is_cached else None)
        assert _read("application/json", json.dumps(whole).encode(), headers) == expected, counts
        for stream in _streams(members):
            assert _read(SSE, stream, headers) == expected, counts


@pytest.mark.parametrize("row", facts("usage_fields"))
def test_what_is_missing_of_a_known_shape_is_unknown(row: Mapping[str, Any]) -> None:
    for counts, is_cached in _shapes(row):
        if not is_cached:
            continue
        hidden = {path: count for path, count in counts.items() if count != CACHED}
        members, headers = _placed(hidden)
        whole = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], **members}
        for usage in (_read("application/json", json.dumps(whole).encode(), headers), _read(SSE, _sse(whole), headers)):
            assert usage.cached is None, counts
            assert usage.prompt in (None, sum(hidden.values())), counts


def _read(content_type: str, body: bytes, headers: Sequence[tuple[str, str]]) -> Usage:
    return with_headers(_tapped(content_type, body, text=False), headers).usage
