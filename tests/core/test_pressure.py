"""When a compaction is due: never while the last one rests, fails or is of no use."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import pressure
from proxy.core.model import Because, Counters
from proxy.core.payback import Payback
from tests.core.build import facts_of, limits, talk

LIMITS = limits(32_000)
NOW = 1_000_000


@pytest.mark.parametrize(
    ("used", "counters", "applied", "expected"),
    [
        pytest.param(24_000, {}, False, None, id="at the watermark"),
        pytest.param(23_999, {}, False, Because.BELOW_WATERMARK, id="below"),
        pytest.param(None, {}, False, Because.UNKNOWN_USAGE, id="not counted"),
        pytest.param(
            None, {"not_before_ms": NOW + 1, "failures": 1}, False, Because.UNKNOWN_USAGE, id="unknown comes first"
        ),
        pytest.param(
            9, {"not_before_ms": NOW + 1, "failures": 1}, False, Because.BELOW_WATERMARK, id="then the watermark"
        ),
        pytest.param(25_000, {"not_before_ms": NOW + 1, "failures": 1}, False, Because.BACKOFF, id="after a failure"),
        pytest.param(
            25_000, {"not_before_ms": NOW + 1, "failures": 1}, True, Because.BACKOFF, id="after a failure, applied"
        ),
        pytest.param(25_000, {"not_before_ms": NOW, "failures": 1}, False, None, id="the pause is over"),
        pytest.param(
            25_000, {"not_before_ms": NOW + 1, "unapplied": 2}, False, Because.UNAPPLIED, id="nobody used the last two"
        ),
        pytest.param(25_000, {"not_before_ms": NOW + 1, "unapplied": 2}, True, None, id="but this turn does"),
        pytest.param(25_000, {"not_before_ms": NOW + 1, "unapplied": 1}, False, None, id="one unused is no habit"),
        pytest.param(25_000, {"unapplied": 9}, False, None, id="the pause for unused ones is over"),
        pytest.param(25_000, {"turns": 7, "last_turn": 5}, False, Because.DEBOUNCE, id="two turns ago"),
        pytest.param(25_000, {"turns": 8, "last_turn": 5}, False, None, id="three turns ago"),
        pytest.param(25_000, {"turns": 0, "last_turn": 0}, True, Because.DEBOUNCE, id="in the same turn"),
        pytest.param(
            *(25_000, {"turns": 7, "last_turn": 5, "not_before_ms": NOW + 1, "failures": 3}, False),
            Because.BACKOFF,
            id="back-off before debounce",
        ),
    ],
)
def test_due(used: int | None, counters: dict[str, Any], applied: bool, expected: Because | None) -> None:
    assert pressure.due(used, LIMITS, Counters(**counters), NOW, applied=applied) == expected


@pytest.mark.parametrize(
    ("counters", "expected"),
    [
        pytest.param({}, None, id="never made"),
        pytest.param({"not_before_ms": NOW + 1, "failures": 1}, Because.BACKOFF, id="after a failure"),
        pytest.param({"not_before_ms": NOW, "failures": 1}, None, id="the pause is over"),
        pytest.param({"not_before_ms": NOW + 1, "unapplied": 9}, None, id="that one was of use is not for this to ask"),
        pytest.param({"turns": 7, "last_turn": 5}, Because.DEBOUNCE, id="two turns ago"),
        pytest.param({"turns": 8, "last_turn": 5}, None, id="three turns ago"),
    ],
)
def test_what_holds_whatever_the_pressure(counters: dict[str, Any], expected: Because | None) -> None:
    assert pressure.rests(Counters(**counters), LIMITS, NOW) == expected


@pytest.mark.parametrize(
    ("root_unapplied", "counters", "applied", "expected"),
    [
        pytest.param(1, {}, False, None, id="one unused is no habit"),
        pytest.param(2, {}, False, Because.UNAPPLIED, id="two of the root's sessions, none of this one"),
        pytest.param(9, {}, True, None, id="but this turn carries one"),
        pytest.param(2, {"turns": 7, "last_turn": 6}, False, Because.UNAPPLIED, id="before the debounce"),
        pytest.param(2, {"not_before_ms": NOW + 1, "failures": 1}, False, Because.BACKOFF, id="behind the back-off"),
        pytest.param(0, {"not_before_ms": NOW, "unapplied": 9}, False, None, id="the root's count has run out"),
    ],
)
def test_a_root_whose_checkpoints_nobody_uses(
    root_unapplied: int, counters: dict[str, Any], applied: bool, expected: Because | None
) -> None:
    found = pressure.due(25_000, LIMITS, Counters(**counters), NOW, applied=applied, root_unapplied=root_unapplied)
    assert found == expected


@pytest.mark.parametrize(("used", "expected"), [(None, Because.UNKNOWN_USAGE), (23_999, Because.BELOW_WATERMARK)])
def test_an_unused_root_is_named_only_where_a_compaction_would_be_due(used: int | None, expected: Because) -> None:
    assert pressure.due(used, LIMITS, Counters(), NOW, applied=False, root_unapplied=9) == expected


def test_no_debounce_where_none_is_set() -> None:
    counters = Counters(turns=5, last_turn=5)
    assert pressure.due(25_000, limits(32_000, debounce_turns=0), counters, NOW, applied=True) is None


@pytest.mark.parametrize(
    ("estimate", "output", "expected"),
    [
        pytest.param(27_820, 0, True, id="at the hard watermark"),
        pytest.param(27_819, 0, False, id="just below"),
        pytest.param(25_000, 7_000, False, id="answer just fits"),
        pytest.param(25_000, 7_001, True, id="answer does not fit"),
        pytest.param(20_000, 64_000, False, id="a reservation counts for a quarter of the window at most"),
        pytest.param(24_001, 64_000, True, id="and then does not fit"),
    ],
)
def test_must_compact(estimate: int, output: int, expected: bool) -> None:
    assert pressure.must_compact(estimate, output, LIMITS) is expected


@pytest.mark.parametrize(
    ("estimate", "output", "least", "expected"),
    [
        pytest.param(27_820, 0, 20_000, True, id="the hard watermark is in reach"),
        pytest.param(27_820, 0, 25_000, False, id="what stays exceeds it"),
        pytest.param(32_000, 0, 25_000, True, id="but the request does not fit at all"),
        pytest.param(25_000, 8_000, 20_000, True, id="room for the answer can be made"),
        pytest.param(25_000, 8_000, 21_000, False, id="it cannot"),
        pytest.param(27_820, 8_000, 21_000, True, id="it cannot, but the hard watermark is in reach"),
    ],
)
def test_what_is_out_of_reach_is_not_aimed_at(estimate: int, output: int, least: int, expected: bool) -> None:
    assert pressure.must_compact(estimate, output, LIMITS, least) is expected


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(1, 10**7))
def test_an_assumed_window_never_says_that_it_must(estimate: int, output: int, window: int) -> None:
    assert not pressure.must_compact(estimate, output, limits(window, "assumed"))


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(("config", "upstream", "learned", "pricelist")))
def test_what_would_not_fit_must_be_compacted(estimate: int, output: int, origin: str) -> None:
    found = limits(32_000, origin)
    if estimate + min(output, 8_000) > 32_000:
        assert pressure.must_compact(estimate, output, found)


def test_the_pause_after_a_failure_doubles_up_to_an_hour() -> None:
    counters = Counters(turns=4)
    pauses = []
    for _ in range(10):
        counters = pressure.after_failure(counters, NOW)
        pauses.append((counters.not_before_ms - NOW) // 1000)
    assert pauses == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    assert (counters.failures, counters.turns, counters.last_turn) == (10, 4, 4)


@pytest.mark.parametrize(
    ("failures", "retry_after_s", "pause_s"),
    [(0, 10.0, 30), (0, 45.5, 45.5), (3, 45.5, 240), (0, 7200.0, 7200), (5000, 0.0, 3600)],
)
def test_a_providers_retry_after_is_kept(failures: int, retry_after_s: float, pause_s: float) -> None:
    assert pressure.after_failure(Counters(failures=failures), NOW, retry_after_s).not_before_ms == NOW + pause_s * 1000


@pytest.mark.parametrize(
    ("before", "applied", "expected"),
    [
        pytest.param(
            Counters(turns=9, failures=3, not_before_ms=5),
            True,
            Counters(9, 9, 0, 0, 1),
            id="success ends the back-off",
        ),
        pytest.param(Counters(turns=9), False, Counters(9, 9, 0, 0, 1), id="the first is unused so far"),
        pytest.param(
            Counters(turns=9, unapplied=1), False, Counters(9, 9, 0, NOW + 900_000, 2), id="two unused: a pause"
        ),
        pytest.param(
            Counters(turns=9, unapplied=2), False, Counters(9, 9, 0, NOW + 900_000, 3), id="three unused: a pause"
        ),
        pytest.param(Counters(turns=9, unapplied=5), True, Counters(9, 9, 0, 0, 1), id="used again"),
    ],
)
def test_after_success(before: Counters, applied: bool, expected: Counters) -> None:
    assert pressure.after_success(before, NOW, applied=applied) == expected


def test_a_client_that_rewrites_its_history_is_left_alone_for_a_while() -> None:
    counters, now = Counters(), NOW
    made = 0
    for _ in range(40):
        counters = Counters(
            counters.turns + 1, counters.last_turn, counters.failures, counters.not_before_ms, counters.unapplied
        )
        now += 10_000
        if pressure.due(30_000, LIMITS, counters, now, applied=False) is None:
            counters = pressure.after_success(counters, now, applied=False)
            made += 1
    assert made == 2


@pytest.mark.parametrize(
    ("used", "output", "expected"),
    [
        pytest.param(27_820, 0, True, id="at the hard watermark"),
        pytest.param(27_819, 0, False, id="just below"),
        pytest.param(25_000, 7_001, True, id="the next answer would not fit"),
    ],
)
def test_the_last_chance_of_a_soft_compaction(used: int, output: int, expected: bool) -> None:
    assert pressure.is_last_chance(used, output, LIMITS) is expected


def test_an_assumed_window_has_a_last_chance_too_although_nothing_is_compacted_in_front_of_a_request() -> None:
    assumed = limits(32_000, "assumed")
    assert pressure.is_last_chance(assumed.hard, 0, assumed)
    assert not pressure.is_last_chance(assumed.hard - 1, 32_000, assumed)


DEAR, CHEAP = Payback(1.0, 0.0, 0.1), Payback(0.1, 0.0, 0.1)


@pytest.mark.parametrize(
    ("payback", "max_turns", "thinks", "expected"),
    [
        pytest.param(CHEAP, 8, False, None, id="it pays"),
        pytest.param(DEAR, 8, False, Because.PAYBACK, id="it does not"),
        pytest.param(DEAR, 10, False, None, id="it does in time"),
        pytest.param(DEAR, 0, False, None, id="nobody asks"),
        pytest.param(None, 8, False, None, id="nobody knows"),
        pytest.param(CHEAP, 8, True, Because.REASONING, id="in the middle of a thought"),
        pytest.param(DEAR, 8, True, Because.REASONING, id="both"),
        pytest.param(None, 0, True, Because.REASONING, id="in the middle of a thought, whatever it costs"),
    ],
)
def test_what_a_soft_compaction_waits_for(
    payback: Payback | None, max_turns: int, thinks: bool, expected: Because | None
) -> None:
    assert pressure.waits(payback, max_turns, thinks=thinks) == expected


THINKS = {"role": "assistant", "content": "x", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        pytest.param([], False, id="nothing"),
        pytest.param(talk("u a:1 t:1"), False, id="no thoughts"),
        pytest.param([*talk("u"), THINKS, *talk("t:1")], True, id="behind the last user message"),
        pytest.param([*talk("u"), THINKS, *talk("u")], False, id="in front of it"),
        pytest.param([*talk("u"), THINKS, *talk("u a:1 t:1")], False, id="in front of it, and work since"),
        pytest.param([THINKS, *talk("t:1 a")], True, id="no user message at all, so a checkpoint stands in front"),
        pytest.param([*talk("u"), {**THINKS, "reasoning_content": ""}], False, id="empty thoughts"),
    ],
)
def test_thoughts_behind_the_last_user_message(messages: list[Any], expected: bool) -> None:
    assert pressure.thinks_behind_user(facts_of(messages)) is expected
