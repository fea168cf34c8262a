"""Sessions, checkpoints and attempts as JSON values. No digest leaves here, and of a conversation's words only what `words` is asked for.

Positions: `from` is the first covered message, `to` (and `covered`, where it stands alone) the first that is not.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

from proxy.core.model import Attempt, Checkpoint, CheckpointRef, Session

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def session(of: Session) -> dict[str, Any]:
    """A session as it stands in a list. What only a turn brings is null where no turn is stored."""
    turn = of.turn
    used = turn.usage.used if turn else None
    window = turn.window if turn else None
    return {
        "id": str(of.id),
        "tenant": of.id.tenant,
        "explicit": of.explicit,
        "model": turn.model if turn else None,
        "upstream": turn.upstream if turn else None,
        "turns": of.counters.turns,
        "messages": of.length,
        "pressure": round(used / window.tokens, 4)
        if used is not None and window is not None and window.tokens
        else None,
        "used": used,
        "window": window.tokens if window else None,
        "window_origin": window.origin if window else None,
        "usage": _usage(of),
        "checkpoints": [reference(one) for one in sorted(of.checkpoints, key=_generation, reverse=True)],
        "generation": of.generation,
        "version": of.version,
        "pending": {"trigger": of.pending.trigger, "since": iso(of.pending.since_ms)} if of.pending else None,
        "counters": {
            "last_turn": of.counters.last_turn,
            "failures": of.counters.failures,
            "not_before": iso(of.counters.not_before_ms) if of.counters.not_before_ms else None,
            "unapplied": of.counters.unapplied,
        },
        "created": iso(of.created_ms),
        "last_turn_at": iso(turn.finished_ms) if turn else None,
    }


def reference(of: CheckpointRef) -> dict[str, Any]:
    """Where a checkpoint stands; `seen` counts the messages that its summariser read, `dead` says that it was undone."""
    return {
        "id": of.id,
        "generation": of.generation,
        "from": of.from_,
        "to": of.k,
        "seen": of.seen_len,
        "dead": of.dead,
    }


def checkpoint(of: Checkpoint) -> dict[str, Any]:
    """A checkpoint without its text: where it stands, what it weighs (tokens) and who made it when."""
    return {
        **reference(of.ref),
        "region_tokens": of.region_tokens,
        "checkpoint_tokens": of.checkpoint_tokens,
        "model": of.model,
        "scope": of.scope,
        "strategy": of.strategy,
        "made_at": iso(of.made_at_ms),
    }


def words(of: Checkpoint) -> dict[str, Any]:
    """What a checkpoint says: the summary, the ledger (the user's and the system's own words, `message` being their position), the anchors."""
    return {
        "text": of.text,
        "ledger": [{"role": said.role, "message": said.position, "text": said.text} for said in of.ledger],
        "anchors": list(of.anchors),
    }


def attempt(of: Attempt) -> dict[str, Any]:
    """A line of the journal. Token counts the provider did not report are null."""
    return {
        "at": iso(of.at_ms),
        "trigger": of.trigger,
        "outcome": of.outcome,
        "because": of.because,
        "pressure": of.pressure,
        "from": of.from_,
        "to": of.k,
        "strategy": of.strategy,
        "scope": of.scope,
        "prompt": of.prompt,
        "cached": of.cached,
        "new": of.new,
        "expected_new": of.expected_new,
        "completion": of.completion,
        "miss": of.miss,
        "duration_ms": of.duration_ms,
        "generation": of.generation,
        "saved_tokens": of.saved_tokens,
        "figures": {name: value for name, value in asdict(of.figures).items() if value is not None},
    }


def last_turn_ms(of: Session) -> int:
    """When the last turn ended, wall clock; 0 where none is stored."""
    return of.turn.finished_ms if of.turn else 0


def newest_alive(of: Session) -> CheckpointRef | None:
    """The checkpoint that an undo would bury and whose text the summary shows; None: none, or all are dead."""
    return max((one for one in of.checkpoints if not one.dead), key=_generation, default=None)


def iso(ms: int) -> str:
    """Wall clock milliseconds as ISO 8601 in UTC, to the millisecond."""
    # Integer arithmetic: fromtimestamp(ms / 1000) can land a microsecond short and be cut to the millisecond before.
    return (_EPOCH + timedelta(milliseconds=ms)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _generation(of: CheckpointRef) -> int:
    return of.generation


def _usage(of: Session) -> dict[str, int | None] | None:
    if of.turn is None:
        return None
    usage = of.turn.usage
    return {
        "prompt": usage.prompt,
        "completion": usage.completion,
        "cached": usage.cached,
        "reasoning": usage.reasoning,
    }
