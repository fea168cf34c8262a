"""Does a compaction pay: the figures against a conversation that is gone through turn by turn, with it and without it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from proxy.core import conversation as conversations
from proxy.core import payback, rewrite, turn
from proxy.core.answer import UNREAD
from proxy.core.checkpoint import MAX_SHARE
from proxy.core.model import Trigger, Turn, Usage, Window
from proxy.core.payback import Payback, Prices, Sizes, prices
from proxy.core.plan import Plan, Planner, Warm
from tests.core.build import Policy, body_of, limits, read

SIZES = Sizes(prompt=100_000, new=300, answer=2_000, region=85_000, checkpoint=5_000, tail=10_000)
GPT_4O = Prices(2.5, 1.25, 2.5, 10.0)
GPT_5 = Prices(1.25, 0.125, 1.25, 10.0)
DEEPSEEK = Prices(0.3, 0.006, 0.3, 1.2)
CLAUDE = Prices(3.0, 0.3, 3.75, 15.0)


@pytest.mark.parametrize(
    ("of", "call", "reread", "saving", "turns"),
    [
        # (100,000 - 300) read + 300 written + 2,000 answered; 15,000 written instead of read; 80,000 no longer read
        pytest.param(GPT_4O, 0.145375, 0.01875, 0.1, 1.64, id="half the price from the cache"),
        pytest.param(GPT_5, 0.0328375, 0.016875, 0.01, 4.97, id="a tenth"),
        pytest.param(CLAUDE, 0.061035, 0.05175, 0.024, 4.7, id="a tenth, and writing costs more"),
        pytest.param(DEEPSEEK, 0.0030882, 0.00441, 0.00048, 15.62, id="a fiftieth"),
        pytest.param(Prices(1, 1, 1, 1), 0.102, 0.0, 0.08, 1.28, id="no cache"),
    ],
)
def test_what_it_costs_and_saves(of: Prices, call: float, reread: float, saving: float, turns: float) -> None:
    found = payback.payback(SIZES, of)
    assert found.call_usd == pytest.approx(call)
    assert found.reread_usd == pytest.approx(reread)
    assert found.saving_usd == pytest.approx(saving)
    assert found.turns == pytest.approx(turns, abs=0.01)


def test_a_writer_of_its_own_is_paid_its_own_price_and_reads_all_anew() -> None:
    found = payback.payback(replace(SIZES, prompt=8_000, new=8_000), CLAUDE, Prices(0.1, 0.01, 0.1, 0.4))
    assert found.call_usd == pytest.approx(8_000 * 0.1e-6 + 2_000 * 0.4e-6)
    assert (found.reread_usd, found.saving_usd) == (pytest.approx(0.05175), pytest.approx(0.024))


money = st.floats(0, 100, allow_nan=False)
counts = st.integers(0, 200_000)


@st.composite
def compactions(draw: st.DrawFn) -> tuple[int, Sizes, Prices, float]:
    """What stands in front of the region, the sizes, prices that a cache makes no dearer, and the share that the cache finds."""
    region, tail, front = draw(st.integers(1, 500_000)), draw(counts), draw(counts)
    cached = draw(st.floats(0, 50, allow_nan=False))
    input_usd = cached + draw(money)
    of = Prices(input_usd, cached, input_usd + draw(money), draw(money))
    sizes = Sizes(
        prompt=front + region + tail,
        new=draw(st.integers(0, min(2000, region))),
        answer=draw(st.integers(0, 10_000)),
        region=region,
        checkpoint=draw(st.integers(0, int(region * MAX_SHARE))),
        tail=tail,
    )
    return front, sizes, of, draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))


def _spent(front: int, of: Sizes, paid: Prices, share: float, turns: int) -> tuple[float, float]:
    """Dollars for so many turns as they are, and with a compaction before the first of them. What each turn adds is the same both ways."""
    read = share * paid.cached + (1 - share) * paid.input
    alone = turns * (front + of.region + of.tail) * read
    call = (of.prompt - of.new) * read + of.new * paid.write + of.answer * paid.output
    first = front * read + (of.checkpoint + of.tail) * max(paid.write, read)
    later = (front + of.checkpoint + of.tail) * read
    return alone / 1e6, (call + first + (turns - 1) * later) / 1e6


@given(compactions())
def test_it_has_paid_for_itself_after_just_so_many_turns(case: tuple[int, Sizes, Prices, float]) -> None:
    front, sizes, of, share = case
    found = payback.payback(sizes, of, share=share)
    assume(0 < found.turns < 1e6)
    before, after = max(1, math.floor(found.turns)), max(1, math.ceil(found.turns))
    slack = 1e-9 + found.cost_usd * 1e-6
    alone, compacted = _spent(front, sizes, of, share, after)
    assert compacted <= alone + slack
    if before < found.turns:
        alone, compacted = _spent(front, sizes, of, share, before)
        assert compacted >= alone - slack


@given(compactions(), st.floats(0.001, 1000))
def test_it_does_not_depend_on_the_currency(case: tuple[int, Sizes, Prices, float], rate: float) -> None:
    _, sizes, of, share = case
    dearer = Prices(of.input * rate, of.cached * rate, of.write * rate, of.output * rate)
    turns = payback.payback(sizes, of, share=share).turns
    assume(1e-9 < turns < 1e9)
    assert payback.payback(sizes, dearer, share=share).turns == pytest.approx(turns)


@given(compactions())
def test_figures_are_never_negative(case: tuple[int, Sizes, Prices, float]) -> None:
    _, sizes, of, share = case
    found = payback.payback(sizes, of, share=share)
    assert min(found.call_usd, found.reread_usd, found.saving_usd, found.turns) >= 0


@pytest.mark.parametrize(
    ("found", "max_turns", "expected"),
    [
        pytest.param(Payback(0.03, 0.01, 0.01), 4, True, id="just within"),
        pytest.param(Payback(0.03, 0.02, 0.01), 4, False, id="later"),
        pytest.param(Payback(0.03, 0.02, 0.01), 0, True, id="nobody asks"),
        pytest.param(Payback(0.03, 0.0, 0.0), 10**6, False, id="never"),
        pytest.param(Payback(0.0, 0.0, 0.0), 1, True, id="free of charge"),
        pytest.param(Payback(0.0, 0.0, 1.0), 1, True, id="costs nothing"),
    ],
)
def test_whether_it_pays_in_time(found: Payback, max_turns: int, expected: bool) -> None:
    assert found.pays(max_turns) is expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        pytest.param((2.5, 1.25, 3.0, 10.0), Prices(2.5, 1.25, 3.0, 10.0), id="all"),
        pytest.param((2.5, None, None, 10.0), Prices(2.5, 2.5, 2.5, 10.0), id="no price of a cache"),
        pytest.param((2.5, 0.0, 0.0, 0.0), Prices(2.5, 0.0, 0.0, 0.0), id="nothing is a price"),
        pytest.param((None, 1.25, 3.0, 10.0), None, id="no price of a prompt"),
        pytest.param((2.5, 1.25, 3.0, None), None, id="no price of an answer"),
        pytest.param((None, None, None, None), None, id="none"),
    ],
)
def test_which_prices_are_known(said: tuple[float | None, ...], expected: Prices | None) -> None:
    assert prices(*said) == expected


def _warm(text: str, answer: str | None = None) -> Warm:
    conversation = read(body_of(text))
    routed = rewrite.as_sent(conversation.request)
    done = turn.forwarded(conversation, routed, replace(UNREAD, text=answer, usage=Usage(None)), 1)
    return turn.warm_after(conversations.lineage(conversation, None).id, conversation, routed, None, done, 1.0)


def _plan(warm: Warm, **settings: Any) -> Plan:
    found = Planner(warm, limits(4096), Policy(**settings)).plan(Trigger.FORCE)
    assert isinstance(found, Plan)
    return found


TALK = "u*200 a*200 u*200 a*200 u*200 a*200 u*200 a*200 u*200"


def test_the_sizes_of_a_plan() -> None:
    plan, sizes = _plan(_warm(TALK)), limits(4096)
    found = payback.sizes(plan, sizes)
    assert (found.prompt, found.new) == (plan.prompt, plan.expected_new)
    assert found.new < 300 < found.prompt, "all but the instruction is cached"
    assert (found.region, found.tail) == (plan.region.tokens, plan.region.tail_tokens)
    assert found.answer == sizes.output // 2
    assert found.checkpoint == min(int(found.region * 0.6), sizes.summary // 2 + sizes.ledger + sizes.anchors)


def test_a_checkpoint_of_the_usual_size_has_half_the_summary_it_may_and_all_else() -> None:
    sizes = limits(4096)
    found = payback.sizes(_plan(_warm(f"{TALK} a*200 " + TALK)), sizes)
    assert found.region * MAX_SHARE > sizes.summary
    assert found.checkpoint == sizes.summary // 2 + sizes.ledger + sizes.anchors


def test_no_more_of_a_call_is_new_than_there_is_of_it() -> None:
    plan = _plan(_warm(TALK))
    found = payback.sizes(replace(plan, expected_new=plan.prompt + 1), limits(4096))
    assert found.new == found.prompt == plan.prompt


def test_an_answer_that_was_never_read_is_new_as_well() -> None:
    more = payback.sizes(_plan(_warm(TALK, "word " * 100)), limits(4096)).new
    assert more - payback.sizes(_plan(_warm(TALK)), limits(4096)).new >= 100


def _turn(prompt: int | None, applied: str | None = None) -> Turn:
    return Turn("m", (), b"", b"", applied, b"", None, Usage(prompt=prompt), Window(1, "config"), "u", 0, 0, 0)


@pytest.mark.parametrize(
    ("before", "cached", "applied", "gap_ms", "expected"),
    [
        pytest.param(_turn(1000), 1000, None, 1, 1.0, id="all of it"),
        pytest.param(_turn(1000), 1200, None, 1, 1.0, id="more than that"),
        pytest.param(_turn(1000), 0, None, 1, 0.0, id="no cache"),
        pytest.param(_turn(1000), 500, None, 300_000, 0.5, id="half, just warm"),
        pytest.param(_turn(1000), 500, None, 300_001, 1.0, id="cold"),
        pytest.param(_turn(1000), None, None, 1, 1.0, id="nobody counted"),
        pytest.param(_turn(None), 0, None, 1, 1.0, id="nobody counted the turn before"),
        pytest.param(_turn(0), 0, None, 1, 1.0, id="nothing was in it"),
        pytest.param(None, 0, None, 1, 1.0, id="the first turn"),
        pytest.param(_turn(1000), 0, "c1", 1, 1.0, id="the first with a checkpoint"),
        pytest.param(_turn(1000, "c1"), 250, "c1", 1, 0.25, id="with the same checkpoint"),
    ],
)
def test_what_a_provider_finds_again(
    before: Turn | None, cached: int | None, applied: str | None, gap_ms: int, expected: float
) -> None:
    assert payback.share_found(before, Usage(prompt=2000, cached=cached), applied, gap_ms, 300.0) == expected
