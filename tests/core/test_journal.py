"""The journal's line: what a call cost, and the likely reason where less of it was cached than should have been."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from proxy.core import conversation as conversations
from proxy.core import fingerprint, journal, rewrite, turn
from proxy.core.answer import UNREAD
from proxy.core.journal import WRITE_LAG_MS, Before
from proxy.core.model import NOT_COUNTED, Attempt, Figures, Trigger, Turn, Usage, Window
from proxy.core.plan import Plan, Planner, Warm
from tests.core.build import Policy, body_of, checkpoint, limits, read, talk

NOW = 1_000_000_000
TALK = talk("u*200 a*200 u*200 a*200 u*200 a*200 u*200 a*200 u*200")
THINKING = [
    {"role": "user", "content": "word " * 200},
    *(
        {"role": "assistant", "content": "word " * 200, "reasoning_content": "word " * 20}
        if at % 2 == 0
        else {"role": "assistant", "content": "word " * 200}
        for at in range(8)
    ),
]


def _warm(messages: Any = TALK, *, k: int = 0, **members: Any) -> Warm:
    conversation = read(body_of(messages, **members))
    made = checkpoint(conversation, k) if k else None
    routed = rewrite.route(conversation.request, conversation.preamble_length, made)
    done = turn.forwarded(conversation, routed, replace(UNREAD, usage=Usage(None)), 1)
    return turn.warm_after(conversations.lineage(conversation, None).id, conversation, routed, None, done, 1.0)


def _plan(warm: Warm, **settings: Any) -> Plan:
    found = Planner(warm, limits(4096), Policy(**settings)).plan(Trigger.FORCE)
    assert isinstance(found, Plan), found
    return found


def _turn(warm: Warm, *, ago_ms: int = 1000, **changes: Any) -> Turn:
    """The turn that sent this request, and found 1,500 tokens of it in the cache."""
    fields: dict[str, Any] = {
        "model": warm.model,
        "preamble": (),
        "head": fingerprint.byte_hash(warm.head),
        "tail": fingerprint.byte_hash(warm.tail),
        "applied": warm.applied.id if warm.applied else None,
        "routed": b"",
        "answer": None,
        "usage": Usage(prompt=1800, cached=1500),
        "window": Window(4096, "config"),
        "upstream": "default",
        "started_ms": 0,
        "finished_ms": NOW - ago_ms,
        "weight": 0,
    }
    return Turn(**{**fields, **changes})


def _attempt(
    warm: Warm,
    last: Turn | None,
    cached: int | None,
    *,
    prompt: int | None = 2000,
    upstream: str = "default",
    **settings: Any,
) -> Attempt:
    return journal.attempt(
        *(Trigger.MANUAL, 0.5, "committed", ""),
        at_ms=NOW + 700,
        duration_ms=700,
        strategy="replay",
        plan=_plan(warm, **settings),
        usage=Usage(prompt=prompt, cached=cached, completion=9),
        before=Before(warm, last, upstream, 300.0),
    )


PLAIN = _warm()
COSTLY = _warm(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {}}})
THOUGHTS = _warm(THINKING)
APPLIED = _warm(k=2)


@pytest.mark.parametrize(
    ("warm", "last", "cached", "expected"),
    [
        pytest.param(PLAIN, _turn(PLAIN), 1900, "", id="all that was expected"),
        pytest.param(PLAIN, _turn(PLAIN), 1673, "", id="all that the turn left there, but for rounding"),
        pytest.param(PLAIN, _turn(PLAIN), 1671, "write_lag", id="a little less"),
        pytest.param(PLAIN, _turn(PLAIN), None, "", id="nobody counted"),
        pytest.param(PLAIN, None, 0, "cold", id="the first that the provider sees of it"),
        pytest.param(PLAIN, _turn(PLAIN, ago_ms=300_001), 0, "cold", id="forgotten"),
        pytest.param(PLAIN, _turn(PLAIN, ago_ms=300_000), 0, "other_replica", id="not forgotten yet"),
        pytest.param(APPLIED, _turn(PLAIN), 100, "cold", id="with a checkpoint that no turn has carried"),
        pytest.param(APPLIED, _turn(APPLIED), 1600, "write_lag", id="with one that a turn has carried"),
        pytest.param(PLAIN, _turn(PLAIN, model="another"), 0, "other_replica", id="another model"),
        pytest.param(PLAIN, _turn(PLAIN, upstream="another"), 0, "other_replica", id="another upstream"),
        pytest.param(PLAIN, _turn(PLAIN, tail=b"other"), 0, "tools_changed", id="tools behind the messages"),
        pytest.param(PLAIN, _turn(PLAIN, head=b"other"), 0, "tools_changed", id="tools in front of them"),
        pytest.param(PLAIN, _turn(PLAIN, preamble=(b"other",)), 0, "unknown", id="another system prompt"),
        pytest.param(COSTLY, _turn(COSTLY), 0, "parameter_dropped", id="a schema was left out"),
        pytest.param(THOUGHTS, _turn(THOUGHTS), 600, "reasoning_stripped", id="thoughts behind the last user message"),
        pytest.param(COSTLY, _turn(COSTLY, ago_ms=300_001), 0, "cold", id="cold before all else"),
        pytest.param(PLAIN, _turn(PLAIN), 1500, "write_lag", id="what the turn before it had found"),
        pytest.param(PLAIN, _turn(PLAIN), 1468, "write_lag", id="the same, but for a block"),
        pytest.param(PLAIN, _turn(PLAIN, ago_ms=WRITE_LAG_MS + 1), 1500, "unknown", id="the same, but long after"),
        pytest.param(PLAIN, _turn(PLAIN), 700, "other_replica", id="less than the turn before had found"),
        pytest.param(PLAIN, _turn(PLAIN, usage=NOT_COUNTED), 700, "unknown", id="what the turn found is not known"),
        pytest.param(PLAIN, _turn(PLAIN, usage=Usage(1800, cached=0)), 0, "unknown", id="it found nothing either"),
    ],
)
def test_the_likely_reason(warm: Warm, last: Turn | None, cached: int | None, expected: str) -> None:
    assert _attempt(warm, last, cached).miss == expected


def test_another_upstream_than_the_turns_is_another_replica() -> None:
    assert _attempt(PLAIN, _turn(PLAIN), 0, upstream="elsewhere").miss == "other_replica"


def test_thoughts_behind_what_was_replayed_strip_nothing() -> None:
    warm = _warm([*TALK, {"role": "assistant", "content": "So.", "reasoning_content": "hm"}, *talk("a:x t:x")])
    assert _attempt(warm, _turn(warm), 600).miss == "reasoning_stripped"
    assert _attempt(warm, _turn(warm), 600, replay_scope="region").miss == "other_replica"


def test_a_line_tells_how_many_tokens_a_checkpoint_saves() -> None:
    made = checkpoint(read(body_of(TALK)), 4)
    line = journal.attempt(
        *(Trigger.SOFT, 0.8, "committed", ""),
        at_ms=NOW,
        strategy="replay",
        made=replace(made, region_tokens=800, checkpoint_tokens=150),
    )
    assert line.saved_tokens == 650
    assert _attempt(PLAIN, None, 1900).saved_tokens is None


def test_a_line_has_the_time_since_the_warm_request_where_a_call_was_made() -> None:
    assert _attempt(PLAIN, _turn(PLAIN, ago_ms=12_340), 1900).figures == Figures(idle_s=12.3)
    assert _attempt(PLAIN, None, 1900).figures == Figures()
    skipped = journal.attempt(
        *(Trigger.SOFT, 0.8, "skipped", "payback"),
        at_ms=NOW,
        strategy="replay",
        before=Before(PLAIN, _turn(PLAIN), "default", 300.0),
        figures=Figures(payback_turns=12.5),
    )
    assert skipped.figures == Figures(payback_turns=12.5)


def test_a_clock_that_was_set_back_makes_nothing_cold() -> None:
    assert _attempt(PLAIN, _turn(PLAIN, ago_ms=-5000), 1500).miss == "write_lag"
