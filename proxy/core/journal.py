"""The record of one attempt: what a compaction call cost, against what a replay should cost."""

from __future__ import annotations

from enum import StrEnum

from proxy.core.model import NOT_COUNTED, Attempt, Because, Checkpoint, Trigger, Usage
from proxy.core.plan import Plan


class Miss(StrEnum):
    """The likely reason why a compaction call found less in the provider's cache than it should have."""

    COLD = "cold"
    WRITE_LAG = "write_lag"
    TOOLS_CHANGED = "tools_changed"
    PARAMETER_DROPPED = "parameter_dropped"
    OTHER_REPLICA = "other_replica"
    REASONING_STRIPPED = "reasoning_stripped"
    UNKNOWN = "unknown"


def attempt(
    trigger: Trigger,
    pressure: float | None,
    outcome: str,
    because: Because | str,
    *,
    at_ms: int,
    plan: Plan | None = None,
    usage: Usage = NOT_COUNTED,
    duration_ms: int = 0,
    made: Checkpoint | None = None,
) -> Attempt:
    """The journal's line. `plan`: the call that was made, if one was; `made`: the checkpoint that came of it."""
    new = usage.prompt - usage.cached if usage.prompt is not None and usage.cached is not None else None
    return Attempt(
        at_ms=at_ms,
        trigger=trigger,
        outcome=outcome,
        because=str(because),
        pressure=pressure,
        from_=made.from_ if made else plan.region.from_ if plan else 0,
        k=made.k if made else plan.region.k if plan else 0,
        strategy=made.strategy if made else "replay",
        scope=str(made.scope) if made else str(plan.scope) if plan else "",
        prompt=usage.prompt,
        cached=usage.cached,
        new=new,
        expected_new=plan.expected_new if plan else None,
        completion=usage.completion,
        miss=_miss(plan, new),
        duration_ms=duration_ms,
        generation=made.ref.generation if made else 0,
        saved_tokens=made.region_tokens - made.checkpoint_tokens if made else None,
    )


def _miss(plan: Plan | None, new: int | None) -> str:
    """The likely reason where more was processed than expected; "" where it was not, or nobody counted."""
    if plan is None or new is None or new <= plan.expected_new:
        return ""
    return Miss.PARAMETER_DROPPED if plan.replay.costly else Miss.UNKNOWN
