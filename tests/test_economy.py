"""Tenants that write every history anew: after some compactions for nothing no more are made, until one is of use or the pause is over."""

from __future__ import annotations

import pytest

from proxy import economy
from proxy.economy import LIMIT, PAUSE_S, Economy


def _made(times: int, *, now: float = 1000.0, tenant: str = "t") -> Economy:
    found = Economy()
    for _ in range(times):
        found.made(tenant, now)
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
    assert _made(times).is_paused("t", 1000.0 + later_s) is paused


def test_one_use_makes_up_for_all() -> None:
    found = _made(LIMIT)
    found.used("t")
    assert not found.is_paused("t", 1000.0)
    for _ in range(LIMIT - 1):
        found.made("t", 1000.0)
    assert not found.is_paused("t", 1000.0)
    found.made("t", 1000.0)
    assert found.is_paused("t", 1000.0)


def test_after_the_pause_one_more_in_vain_brings_it_back() -> None:
    found = _made(LIMIT)
    after = 1000.0 + PAUSE_S
    found.made("t", after)
    assert found.is_paused("t", after)
    assert not found.is_paused("t", after + PAUSE_S)


def test_tenants_do_not_pay_for_each_other() -> None:
    found = _made(LIMIT)
    found.used("another")
    assert not found.is_paused("another", 1000.0)
    assert found.is_paused("t", 1000.0)


def test_what_is_remembered_is_bounded_and_the_longest_silent_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(economy, "_MAX_TENANTS", 3)
    found = Economy()
    for tenant in ("a", "b", "c"):
        for _ in range(LIMIT):
            found.made(tenant, 0.0)
    found.made("a", 0.0)  # heard of again
    found.made("d", 0.0)
    assert [found.is_paused(tenant, 0.0) for tenant in "abcd"] == [True, False, True, False]
