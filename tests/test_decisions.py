"""The simulation of decisions: what it prints stands in the documentation, and a compaction that was made has paid for itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import decisions
from benchmarks.decisions import PROFILES, Played, play
from proxy.config import Compaction

DOCUMENT = (Path(__file__).parents[1] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
POLICIES = decisions.policies(Compaction().max_payback_turns)


@pytest.mark.parametrize("title", POLICIES)
def test_the_documented_table_is_what_the_simulation_prints(title: str) -> None:
    expected = [f"| {' | '.join(decisions.cells(played))} |" for played in decisions.rows(POLICIES[title])]
    table = DOCUMENT.partition(f"### {title}\n")[2].partition("\n#")[0]
    assert [line for line in table.splitlines() if line.startswith("| ")][2:] == expected


@pytest.fixture(scope="module")
def played() -> list[Played]:
    return [one for policy in POLICIES.values() for one in decisions.rows(policy)]


def test_no_request_exceeds_its_window(played: list[Played]) -> None:
    assert all(one.largest < one.profile.window.tokens for one in played)


def test_what_was_compacted_soft_has_paid_for_itself_in_a_long_conversation(played: list[Played]) -> None:
    asked = [one for one in played if one.profile.prices and one.made and one.turns - one.made[0].turn > 8]
    assert len(asked) > 10
    assert all(one.compacted.usd < one.alone.usd for one in asked)
    for one in asked:
        assert all(made.payback is not None and made.payback.turns <= 8 for made in one.made)


def test_whoever_does_not_ask_compacts_at_the_first_watermark(played: list[Played]) -> None:
    free = POLICIES["With budget_tokens = 32,000"].model_copy(update={"max_payback_turns": 0})
    for profile in PROFILES:
        one = play(profile, 60, free)
        assert one.refused == 0
        assert one.made[0].turn == one.due
    assert any(one.refused for one in played), "and whoever asks waits"
