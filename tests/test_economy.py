"""Tenants that write every history anew: after some checkpoints for nothing their new conversations get no more, until one is of use or the
pause is over."""

from __future__ import annotations

import pytest

from proxy import economy
from proxy.economy import FRESH_TURNS, LIMIT, PAUSE_S, Economy

NOW = 1000.0


def _made(times: int, *, turns: int = 1, sessions: int | None = None) -> Economy:
    """So many checkpoints, each for a session of its own, or for so many in turn."""
    found = Economy()
    for at in range(times):
        found.made("t", f"s{at % (sessions or times)}", turns, NOW)
    return found


@pytest.mark.parametrize(
    ("times", "later_s", "paused"),
    [
        pytest.param(0, 0, False, id="nothing was made"),
        pytest.param(LIMIT - 1, 0, False, id="a few in vain"),
        pytest.param(LIMIT, 0, True, id="too many in vain"),
        pytest.param(LIMIT + 20, 0, True, id="more than too many"),
        pytest.param(LIMIT, PAUSE_S - 0.001, True, id="until the pause is over"),
        pytest.param(LIMIT, PAUSE_S, False, id="and no longer"),
    ],
)
def test_a_tenant_whose_checkpoints_nobody_uses_is_paused(times: int, later_s: float, paused: bool) -> None:
    assert _made(times).is_paused("t", 1, NOW + later_s) is paused


@pytest.mark.parametrize("turns", [1, FRESH_TURNS, FRESH_TURNS + 1, 100])
def test_only_what_is_fresh_counts_and_only_that_waits(turns: int) -> None:
    fresh = turns <= FRESH_TURNS
    assert _made(LIMIT, turns=turns).is_paused("t", 1, NOW) is fresh
    assert _made(LIMIT).is_paused("t", turns, NOW) is fresh


def test_one_conversation_counts_once() -> None:
    assert not _made(5 * LIMIT, sessions=LIMIT - 1).is_paused("t", 1, NOW)
    assert _made(5 * LIMIT, sessions=LIMIT).is_paused("t", 1, NOW)


@pytest.mark.parametrize("of", [0, LIMIT, 2 * LIMIT - 1])
def test_one_use_makes_up_for_all(of: int) -> None:
    """Also of one that was made before the others: conversations run side by side."""
    found = _made(2 * LIMIT)
    found.used("t", f"s{of}")
    assert not found.is_paused("t", 1, NOW)
    for at in range(LIMIT - 1):
        found.made("t", f"more{at}", 1, NOW)
    assert not found.is_paused("t", 1, NOW)
    found.made("t", "another", 1, NOW)
    assert found.is_paused("t", 1, NOW)


def test_the_use_of_an_older_conversations_checkpoint_says_nothing() -> None:
    found = _made(LIMIT, turns=FRESH_TURNS + 1)
    for at in range(LIMIT):
        found.made("t", f"new{at}", 1, NOW)
    found.used("t", "s0")
    assert found.is_paused("t", 1, NOW)


def test_after_the_pause_one_more_in_vain_brings_it_back() -> None:
    found = _made(LIMIT)
    after = NOW + PAUSE_S
    found.made("t", "another", 1, after)
    assert found.is_paused("t", 1, after)
    assert not found.is_paused("t", 1, after + PAUSE_S)


def test_tenants_do_not_pay_for_each_other() -> None:
    found = _made(LIMIT)
    found.used("another", "s0")
    assert not found.is_paused("another", 1, NOW)
    assert found.is_paused("t", 1, NOW)


def test_what_is_remembered_is_bounded_and_the_longest_silent_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(economy, "_MAX_TENANTS", 3)
    found = Economy()
    for tenant in ("a", "b", "c"):
        for at in range(LIMIT):
            found.made(tenant, str(at), 1, 0.0)
    found.made("a", "0", 1, 0.0)  # heard of again
    found.made("d", "0", 1, 0.0)
    assert [found.is_paused(tenant, 1, 0.0) for tenant in "abcd"] == [True, False, True, False]


def test_of_a_tenants_conversations_the_newest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(economy, "_MAX_SESSIONS", LIMIT)
    found = _made(LIMIT + 1)
    found.used("t", "s0")
    assert found.is_paused("t", 1, NOW)
    found.used("t", "s1")
    assert not found.is_paused("t", 1, NOW)
