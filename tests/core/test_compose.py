"""A checkpoint in less room, for one request: what was asked for comes first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import checkpoint, compose, conversation
from proxy.core.ledger import Kind
from proxy.core.model import Checkpoint, Said
from tests.core import build

TASK = "Port the importer of project Zebra-77 to Rust, and keep its tests green all the while."
RULE = "Never touch prod.db."
SUMMARY = f"## Task and intent\nPort it.\n{'It went on as before. ' * 60}\n## Next steps\nRun the tests."


def _whole(task: str = TASK) -> Checkpoint:
    ledger = (
        Said("user", 0, Kind.TASK, task),
        Said("user", 4, Kind.CONSTRAINT, RULE),
        *(Said("user", 6 + at, Kind.PLAIN, f"And then file number {at}, please.") for at in range(5)),
    )
    made = build.checkpoint(build.read(build.body_of("u a u a u")), 4)
    return replace(made, text=SUMMARY, ledger=ledger, frame=checkpoint.frame(SUMMARY, ledger))


@given(st.integers(-500, 1000), st.floats(0.5, 3.0), st.sampled_from([TASK, TASK * 9, "Go."]))
def test_it_never_takes_more_than_the_room(room: int, factor: float, task: str) -> None:
    cut = compose.cut(_whole(task), room, factor)
    if cut is not None:
        assert conversation.checkpoint_weight(cut) * factor <= room
        assert cut.frame.startswith("<checkpoint_summary")
        assert cut.frame.endswith("do not acknowledge this note.")
        assert replace(cut, frame="", checkpoint_tokens=0) == replace(_whole(task), frame="", checkpoint_tokens=0)
    else:
        assert room / max(1.0, factor) < 80


@pytest.mark.parametrize(
    ("room", "holds"),
    [
        pytest.param(
            400, [TASK, RULE, "## Task and intent", "Run the tests."], id="task, rule, both ends of the summary"
        ),
        pytest.param(190, [TASK, RULE], id="task and rule"),
        pytest.param(142, [TASK], id="the task, more than half of the room"),
        pytest.param(100, [TASK], id="the task, where a ledger has no room"),
        pytest.param(80, ["Port the importer"], id="some of the task"),
    ],
)
def test_the_users_words_come_first_and_of_those_the_task(room: int, holds: list[str]) -> None:
    cut = compose.cut(_whole(), room, 1.0)
    assert cut is not None
    assert [text for text in holds if text not in cut.frame] == []


def test_next_to_no_room_is_none() -> None:
    assert compose.cut(_whole(), 60, 1.0) is None
