"""The record of one attempt: what a compaction call cost, against what a replay should cost, and the likely reason where it cost more."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from proxy.core import fingerprint, pressure
from proxy.core.model import (
    NO_FIGURES,
    NOT_COUNTED,
    Attempt,
    Because,
    Checkpoint,
    Figures,
    Scope,
    Trigger,
    Turn,
    Usage,
)
from proxy.core.plan import BLOCK_TOKENS, Plan, Warm

WRITE_LAG_MS = 60_000
"""Providers make a prefix readable within seconds of the turn that wrote it; later than this it was not for want of time."""

ROUNDED_TOKENS = 128
"""OpenAI reports what it found in multiples of this, rounded down."""


class Miss(StrEnum):
    """The likely reason why a compaction call found less in the provider's cache than it should have.

    cold: the provider had not this prefix, or not any more. write_lag: it found what the turn before had found, but not yet what that turn
    wrote. tools_changed: the request in front of which it was made has other tools or parameters than the turn before. parameter_dropped: it left
    out one that shapes the prompt. other_replica: it went to another model or upstream, or found less than the turn before had found.
    reasoning_stripped: thoughts stood behind the last user message.
    """

    COLD = "cold"
    WRITE_LAG = "write_lag"
    TOOLS_CHANGED = "tools_changed"
    PARAMETER_DROPPED = "parameter_dropped"
    OTHER_REPLICA = "other_replica"
    REASONING_STRIPPED = "reasoning_stripped"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Before:
    """What the provider had in its cache in front of a call: the request it shall replay, and the turn that sent it, None where none is known.

    `upstream`: where the call goes; `ttl_s`: for how long a prefix is kept there.
    """

    warm: Warm
    turn: Turn | None
    upstream: str
    ttl_s: float

    def idle_ms(self, at_ms: int) -> int | None:
        """Time since the turn; None where there was none that left this prefix."""
        applied = self.warm.applied.id if self.warm.applied else None
        if self.turn is None or self.turn.applied != applied:
            return None
        return max(0, at_ms - self.turn.finished_ms)

    def is_cold(self, at_ms: int) -> bool:
        """Whether the provider has not got the prefix, or has probably forgotten it."""
        idle_ms = self.idle_ms(at_ms)
        return idle_ms is None or idle_ms > self.ttl_s * 1000


def attempt(
    trigger: Trigger,
    pressure: float | None,
    outcome: str,
    because: Because | str,
    *,
    at_ms: int,
    strategy: str,
    plan: Plan | None = None,
    usage: Usage = NOT_COUNTED,
    duration_ms: int = 0,
    made: Checkpoint | None = None,
    before: Before | None = None,
    figures: Figures = NO_FIGURES,
) -> Attempt:
    """The journal's line. `strategy`: of the call. `plan`: the call that was made, if one was; `made`: the checkpoint that came of it.

    `before`: what the provider had of it, to tell why it had less. `figures`: what the decision went by.
    """
    new = usage.prompt - usage.cached if usage.prompt is not None and usage.cached is not None else None
    expected = _expected_new(plan, strategy, usage)
    return Attempt(
        at_ms=at_ms,
        trigger=trigger,
        outcome=outcome,
        because=str(because),
        pressure=pressure,
        from_=made.from_ if made else plan.region.from_ if plan else 0,
        k=made.k if made else plan.region.k if plan else 0,
        strategy=made.strategy if made else strategy,
        scope=str(made.scope) if made else str(plan.scope) if plan else "",
        prompt=usage.prompt,
        cached=usage.cached,
        new=new,
        expected_new=expected,
        completion=usage.completion,
        miss=_miss(plan, usage, expected, before, at_ms - duration_ms),
        duration_ms=duration_ms,
        generation=made.ref.generation if made else 0,
        saved_tokens=made.region_tokens - made.checkpoint_tokens if made else None,
        figures=_with_idle(figures, before if plan else None, at_ms - duration_ms),
    )


def _with_idle(figures: Figures, before: Before | None, began_ms: int) -> Figures:
    idle_ms = before.idle_ms(began_ms) if before is not None else None
    return figures if idle_ms is None else replace(figures, idle_s=round(idle_ms / 1000, 1))


def _expected_new(plan: Plan | None, strategy: str, usage: Usage) -> int | None:
    """What the call should have added to the provider's cache: nothing of a transcript is in it, so that is all new."""
    if plan is None:
        return None
    return plan.expected_new if strategy == "replay" or usage.prompt is None else usage.prompt


def _miss(plan: Plan | None, usage: Usage, expected: int | None, before: Before | None, began_ms: int) -> str:
    """The likely reason where more was processed than expected; "" where it was not, or nobody counted."""
    if plan is None or usage.prompt is None or usage.cached is None or expected is None:
        return ""
    if usage.prompt - usage.cached <= expected or _found_all(plan, usage.cached, before):
        return ""
    if before is None:
        return Miss.PARAMETER_DROPPED if plan.replay.costly else Miss.UNKNOWN
    return _known_beforehand(plan, before, began_ms) or _by_the_count(usage.cached, before, began_ms)


def _found_all(plan: Plan, cached: int, before: Before | None) -> bool:
    """Whether all was found that the turn left there: then it is our estimate of the rest that falls short, and not the cache."""
    left = before.turn.usage.prompt if before is not None and before.turn is not None else None
    return left is not None and plan.scope is Scope.WARM and cached >= left - ROUNDED_TOKENS


def _known_beforehand(plan: Plan, before: Before, began_ms: int) -> Miss | None:
    """The reason that the call itself tells, whatever the provider counted; the one that loses most comes first."""
    warm, turn = before.warm, before.turn
    if turn is None or before.is_cold(began_ms):
        return Miss.COLD
    if (turn.model, turn.upstream) != (warm.model, before.upstream):
        return Miss.OTHER_REPLICA
    if (turn.head, turn.tail) != (fingerprint.byte_hash(warm.head), fingerprint.byte_hash(warm.tail)):
        return Miss.TOOLS_CHANGED
    if turn.preamble != tuple(map(fingerprint.byte_hash, warm.preamble)):
        return (
            Miss.UNKNOWN
        )  # another system prompt: there is no word for it, and what was found is no sign of another replica
    if plan.replay.costly:
        return Miss.PARAMETER_DROPPED
    thinks = pressure.thinks_behind_user(warm.facts[: plan.read_to - warm.offset])
    return Miss.REASONING_STRIPPED if thinks else None


def _by_the_count(cached: int, before: Before, began_ms: int) -> Miss:
    """The reason that the count suggests: against what the turn before had found."""
    found, idle_ms = before.turn.usage.cached if before.turn else None, before.idle_ms(began_ms)
    if found is None or found <= BLOCK_TOKENS or idle_ms is None:
        return Miss.UNKNOWN
    if cached < found - BLOCK_TOKENS:
        return Miss.OTHER_REPLICA
    return Miss.WRITE_LAG if idle_ms <= WRITE_LAG_MS else Miss.UNKNOWN
