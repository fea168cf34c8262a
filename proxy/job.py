"""What a compaction is asked to do, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.config import Compaction, Upstream
from proxy.core.limits import Limits
from proxy.core.model import NO_FIGURES, Attempt, Because, Checkpoint, Counters, Figures, Trigger, Turn
from proxy.core.plan import Warm
from proxy.core.transcript import Transcription
from proxy.upstream import Inbound


@dataclass(frozen=True, slots=True)
class Job:
    """A compaction that is wanted. `inbound` is the client's request whose route, credential and affinity headers the call takes.

    `used` is what the window held, for the journal. `span`: a region asked for by hand. `transcription`: who reads a transcript; None: the
    conversation's own model reads a replay. It, `upstream` and `inbound` are settled last, by proxy/target.py. `last`: the turn that left `warm` in
    the provider's cache; None: none that we know of. `figures`: what the decision went by.
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
    transcription: Transcription | None = None
    last: Turn | None = None
    figures: Figures = NO_FIGURES

    @property
    def strategy(self) -> str:
        """How the summary is to come about, in the journal's word."""
        return "replay" if self.transcription is None else "transcript"

    @property
    def model(self) -> str:
        """Who writes the summary."""
        return self.warm.model if self.transcription is None else self.transcription.model


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended: a checkpoint, or why there is none. `committed` is False where the store did not take it (it may still serve one request)."""

    checkpoint: Checkpoint | None
    because: Because | None
    committed: bool
    attempt: Attempt | None
