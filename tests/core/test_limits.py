"""Sizes: caps from the configuration, shares of the window, and room for the compaction call itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.limits import INSTRUCTION_TOKENS, Limits
from tests.core.build import limits


@pytest.mark.parametrize(
    ("window", "soft", "hard", "summary", "ledger", "anchors", "min_region", "keep_recent", "tail_cap"),
    [
        (256, 44, 44, 32, 16, 4, 8, 64, 64),
        (1_000, 695, 695, 125, 62, 15, 31, 250, 250),
        (4_096, 3_072, 3_404, 512, 256, 64, 128, 1_024, 1_024),
        (8_192, 6_144, 6_988, 1_024, 500 + 12, 128, 256, 2_048, 2_048),
        (32_000, 24_000, 27_820, 4_000, 2_000, 500, 1_000, 8_000, 8_000),
        (128_000, 96_000, 117_760, 4_096, 2_000, 500, 1_024, 8_000, 32_000),
        (200_000, 150_000, 184_000, 4_096, 2_000, 500, 1_024, 8_000, 50_000),
        (1_000_000, 750_000, 920_000, 4_096, 2_000, 500, 1_024, 8_000, 250_000),
    ],
)
def test_the_documented_defaults(
    window: int,
    soft: int,
    hard: int,
    summary: int,
    ledger: int,
    anchors: int,
    min_region: int,
    keep_recent: int,
    tail_cap: int,
) -> None:
    found = limits(window)
    assert (found.soft, found.hard, found.summary) == (soft, hard, summary)
    assert (found.ledger, found.anchors, found.min_region) == (ledger, anchors, min_region)
    assert (found.keep_recent, found.tail_cap) == (keep_recent, tail_cap)
    assert (found.keep_recent_turns, found.keep_head_messages, found.debounce_turns) == (2, 0, 3)


@pytest.mark.parametrize(
    ("keys", "soft", "hard", "output"),
    [
        pytest.param({}, 24_000, 27_820, 4_000, id="defaults"),
        pytest.param({"budget_tokens": 10_000}, 10_000, 27_820, 4_000, id="a budget caps the soft watermark"),
        pytest.param({"budget_tokens": 30_000}, 24_000, 27_820, 4_000, id="a budget above it does not"),
        pytest.param({"trigger_ratio": 0.9}, 27_820, 27_820, 4_000, id="soft is never above hard"),
        pytest.param({"hard_ratio": 0.8}, 24_000, 25_600, 4_000, id="the hard ratio"),
        pytest.param({"max_summary_tokens": 1000}, 24_000, 29_440, 1_000, id="a short summary"),
        pytest.param({"reasons": True}, 23_820, 23_820, 8_000, id="room for thoughts"),
        pytest.param(
            {"reasons": True, "max_summary_tokens": 1000}, 24_000, 28_820, 3_000, id="thoughts: twice the summary"
        ),
    ],
)
def test_watermarks_and_output(keys: dict[str, int], soft: int, hard: int, output: int) -> None:
    found = limits(32_000, **keys)  # type: ignore[arg-type]
    assert (found.soft, found.hard, found.output) == (soft, hard, output)


SIZES = st.builds(
    limits,
    st.integers(1, 2_000_000),
    reasons=st.booleans(),
    trigger_ratio=st.floats(0.05, 0.99),
    hard_ratio=st.floats(0.05, 0.99),
    budget_tokens=st.integers(0, 100_000),
    max_summary_tokens=st.integers(1, 100_000),
    keep_recent_tokens=st.integers(0, 1_000_000),
    min_region_tokens=st.integers(0, 100_000),
)


@given(SIZES)
def test_every_size_is_a_share_of_the_window(found: Limits) -> None:
    window = max(256, found.window.tokens)
    assert 1 <= found.soft <= found.hard
    assert 1 <= found.summary <= window // 8
    assert 0 <= found.reasoning_room <= window // 8
    assert found.keep_recent <= found.tail_cap == window // 4
    assert found.min_region <= window // 32
    assert found.ledger <= window // 16
    assert found.anchors <= window // 64


@given(SIZES)
def test_at_the_hard_watermark_the_call_still_fits(found: Limits) -> None:
    if found.window.tokens >= 256:
        assert found.hard + found.output + INSTRUCTION_TOKENS <= found.window.tokens
        assert found.fits(found.hard)


@given(SIZES, st.integers(0, 3_000_000))
def test_a_prompt_fits_with_its_instruction_and_answer(found: Limits, prompt: int) -> None:
    assert found.fits(prompt) is (
        prompt + INSTRUCTION_TOKENS + found.summary + found.reasoning_room <= found.window.tokens
    )
