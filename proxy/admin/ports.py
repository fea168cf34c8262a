"""What the admin listener asks of the rest of the proxy, the store aside."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from proxy.core.model import Attempt, Checkpoint, SessionId

Outcome = Literal["committed", "skipped", "failed", "forbidden", "unknown"]

ProbeUpstream = Callable[[], Awaitable[bool]]
"""True if the default upstream can be connected to now."""


@dataclass(frozen=True, slots=True)
class CompactAnswer:
    """How a compaction that was asked for by hand ended.

    `because` is a word of `Because`, or "" where nothing needs a reason. `checkpoint` is set on "committed" alone; `attempt` is the
    line that the journal got, None where none was written (forbidden, unknown, another flight).
    """

    outcome: Outcome
    because: str
    checkpoint: Checkpoint | None
    attempt: Attempt | None


class Compactor(Protocol):
    """Compaction by hand."""

    async def compact_now(
        self, session: SessionId, credential: str | None, from_: int | None, to: int | None
    ) -> CompactAnswer:
        """What became of it; returns when the compaction has ended, which takes as long as the model's answer.

        `credential` is the value of an Authorization header as the provider wants it, or None where the operator sent none.
        "forbidden": the credential is missing or of another tenant. `to` None: the compactor chooses the region; `from_` None: from the start.
        """
        ...


class Exposition(Protocol):
    """The counters of this process, or of all workers, as Prometheus reads them."""

    def render(self) -> bytes:
        """The text exposition, format 0.0.4."""
        ...
