"""What a compaction is asked to do, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.config import Compaction, Upstream
from proxy.core.limits import Limits
from proxy.core.model import Attempt, Because, Checkpoint, Counters, Trigger
from proxy.core.plan import Warm
from proxy.upstream import Inbound


@dataclass(frozen=True, slots=True)
class Job:
    """A compaction that is wanted. `inbound` is the client's request whose route, credential and affinity headers the call takes.

    `used` is what the window held, for the journal. `span`: a region asked for by hand.
    """

    warm: Warm
    trigger: Trigger
    limits: Limits
    policy: Compaction
    upstream: Upstream
    inbound: Inbound
    counters: Counters
    used: int | None
    span: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended: a checkpoint, or why there is none. `committed` is False where the store did not take it (it may still serve one request)."""

    checkpoint: Checkpoint | None
    because: Because | None
    committed: bool
    attempt: Attempt | None
