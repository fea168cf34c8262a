"""What is left of a provider's quota by its headers, and how long it wants to be left alone."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import quota
from proxy.core.quota import Need, Remaining
from tests.core.build import WIRE

NEED = Need(prompt=1000, new=100, output=50)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        pytest.param({}, Remaining(), id="nothing said"),
        pytest.param(
            {"x-ratelimit-remaining-requests": "59", "X-RateLimit-Remaining-Tokens": "149984"},
            Remaining(149_984, None, 59),
            id="OpenAI, Azure",
        ),
        pytest.param(
            {
                "x-groq-region": "fra",
                "x-ratelimit-remaining-requests": "14399",
                "x-ratelimit-remaining-tokens": "6818",
                "x-ratelimit-reset-tokens": "1.559999999s",
                "x-ratelimit-limit-tokens": "7000",
            },
            Remaining(6818, None, 14_399, counts_cached=False),
            id="Groq",
        ),
        pytest.param(
            {
                "X-Ratelimit-Remaining-Tokens-Minute": "98863",
                "X-Ratelimit-Tokens-Query-Cost": "60",
                "X-Ratelimit-Remaining-Req-Minute": "94",
            },
            Remaining(98_863, None, 94),
            id="Mistral",
        ),
        pytest.param(
            {"x-ratelimit-remaining-requests-day": "997", "x-ratelimit-remaining-tokens-minute": "998"},
            Remaining(998, None, 997),
            id="Cerebras",
        ),
        pytest.param(
            {
                "anthropic-ratelimit-requests-remaining": "999",
                "anthropic-ratelimit-tokens-remaining": "96000",
                "anthropic-ratelimit-input-tokens-remaining": "80000",
                "anthropic-ratelimit-output-tokens-remaining": "16000",
                "anthropic-ratelimit-tokens-reset": "2026-08-21T12:40:59Z",
            },
            Remaining(80_000, 16_000, 999, counts_cached=False),
            id="Anthropic, the least of two",
        ),
        pytest.param(
            {"anthropic-ratelimit-input-tokens-remaining": "80000", "anthropic-ratelimit-tokens-remaining": "96000"},
            Remaining(80_000, counts_cached=False),
            id="the least of two, named first",
        ),
        pytest.param(
            {"x-ratelimit-remaining-tokens-prompt": "50000", "x-ratelimit-remaining-tokens-generated": "900"},
            Remaining(50_000, 900),
            id="Fireworks",
        ),
        pytest.param(
            {"x-ratelimit-remaining": "3", "x-tokenlimit-remaining": "70"}, Remaining(70, None, 3), id="Together"
        ),
        pytest.param({"x-rate-limit-remaining-tokens": "7"}, Remaining(7), id="with one dash more"),
        pytest.param({"x-ratelimit-remaining-input-images": "0"}, Remaining(), id="images"),
        pytest.param({"x-ratelimit-remaining-audio-tokens": "0"}, Remaining(), id="tokens of something else"),
        pytest.param({"x-ratelimit-remaining-search-requests": "0"}, Remaining(), id="requests for something else"),
        pytest.param({"x-ratelimit-limit-tokens": "5", "remaining-tokens": "1"}, Remaining(), id="other headers"),
        pytest.param({"x-ratelimit-remaining-tokens": "unlimited"}, Remaining(), id="a word"),
        pytest.param({"x-ratelimit-remaining-tokens": "-1"}, Remaining(), id="less than nothing means something else"),
        pytest.param({"x-ratelimit-remaining-tokens": " 12.75 "}, Remaining(12), id="a fraction"),
        pytest.param({"x-ratelimit-remaining-tokens": "9" * 40}, Remaining(), id="no count"),
    ],
)
def test_what_is_left(headers: dict[str, str], expected: Remaining) -> None:
    assert quota.remaining(headers.items()) == expected


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        pytest.param(Remaining(), True, id="nothing said"),
        pytest.param(Remaining(tokens=2100), True, id="twice the tokens"),
        pytest.param(Remaining(tokens=2099), False, id="not quite"),
        pytest.param(Remaining(tokens=300, counts_cached=False), True, id="what is cached is free"),
        pytest.param(Remaining(tokens=299, counts_cached=False), False, id="but the rest is not"),
        pytest.param(Remaining(output_tokens=100), True, id="twice the answer"),
        pytest.param(Remaining(tokens=10**9, output_tokens=99), False, id="no room for the answer"),
        pytest.param(Remaining(requests=2), True, id="the call's and the client's"),
        pytest.param(Remaining(tokens=10**9, requests=1), False, id="the client's alone"),
    ],
)
def test_whether_that_is_enough(left: Remaining, expected: bool) -> None:
    assert quota.is_enough(left, NEED) is expected


@given(st.lists(st.tuples(st.text(), st.text())))
def test_no_header_raises(headers: list[tuple[str, str]]) -> None:
    quota.remaining(headers)
    quota.retry_after_s([*headers, *(("retry-after", value) for _, value in headers)], 0)


words = st.sampled_from(["x", "ratelimit", "remaining", "tokens", "requests", "limit", "reset", "minute", "output"])


@given(st.lists(words, max_size=6), st.integers(0, 10**9))
def test_only_what_is_said_to_remain_counts(name: list[str], count: int) -> None:
    found = quota.remaining([("-".join(name), str(count))])
    counted = [found.tokens, found.output_tokens, found.requests]
    assert counted.count(count) + counted.count(None) == 3
    if "remaining" not in name or "ratelimit" not in name:
        assert counted == [None, None, None]


NOW_MS = 1_800_000_000_000
LATER = format_datetime(datetime.fromtimestamp(NOW_MS / 1000 + 42, UTC), usegmt=True)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        pytest.param([], None, id="none"),
        pytest.param([("Retry-After", "7")], 7.0, id="seconds"),
        pytest.param([("retry-after", " 0.5 ")], 0.5, id="half a second"),
        pytest.param([("Retry-After", LATER)], 42.0, id="a date"),
        pytest.param([("Retry-After", "Fri, 15 Jan 2027 07:59:00 GMT")], 0.0, id="a date that is over"),
        pytest.param([("Retry-After", "0")], 0.0, id="at once"),
        pytest.param([("Retry-After", "-5")], 0.0, id="less than at once"),
        pytest.param([("Retry-After", "86400")], 3600.0, id="a day"),
        pytest.param([("Retry-After", "inf")], 3600.0, id="for ever"),
        pytest.param([("Retry-After", "nan")], None, id="no number"),
        pytest.param([("Retry-After", "soon")], None, id="a word"),
        pytest.param([("Retry-After", "")], None, id="empty"),
        pytest.param([("Retry-After", "Thu, 99 Foo 2027 25:00:00 GMT")], None, id="no date"),
        pytest.param([("retry-after-ms", "1500")], 1.5, id="milliseconds"),
        pytest.param([("Retry-After", "1"), ("Retry-After-Ms", "0")], 1.0, id="the longer of both"),
    ],
)
def test_how_long_it_wants_to_be_left_alone(headers: list[tuple[str, str]], expected: float | None) -> None:
    assert quota.retry_after_s(headers, NOW_MS) == (expected if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(("status", "expected"), [(429, True), (503, True), (200, False), (500, False), (413, False)])
def test_which_answers_say_that_it_was_too_much(status: int, expected: bool) -> None:
    assert quota.has_had_enough(status) is expected


RECORDED = {
    "openai-sse-usage": Remaining(149_999_987, None, 29_999),
    "mistral-json-tool-cached": Remaining(98_863, None, 94),
    "azure-sse-tools": Remaining(),  # the figures were blacked out
}


@pytest.mark.parametrize("name", RECORDED)
def test_what_real_providers_have_sent(name: str) -> None:
    path: Path = WIRE / f"{name}.json"
    if not path.exists():
        pytest.skip(f"no recorded answers in {WIRE} (WARMFOLD_WIRE)")
    headers = [(key, value) for key, value in json.loads(path.read_bytes())["headers"]]
    assert quota.remaining(headers) == RECORDED[name]
