"""Does a compaction pay? What it costs, what each later turn saves by it, and after how many turns the one has made up for the other.

With prices per token (read: from the cache, write: into it), of a call that reads P tokens, N of them new to the cache, and answers with A:

    call   = (P - N) * read + N * write + A * output
    reread = (checkpoint + tail) * (write - read)
    saving = (region - checkpoint) * read
    turns  = (call + reread) / saving

The first rewritten request reads checkpoint and tail anew; system prompt and tools in front of them stay cached. From then on each turn reads a
checkpoint from the cache where it read the region before. Nothing else differs between the two ways of going on, so nothing else is in it.

Assumed: the conversation goes on while its cache is warm; each request finds in the cache what the one before it sent, or the share of it
that the last turn found; summary and thoughts take half of what they may.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from proxy.core.checkpoint import MAX_SHARE
from proxy.core.limits import Limits
from proxy.core.model import Turn, Usage
from proxy.core.plan import Plan

_MTOK = 1_000_000


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars per million tokens: of a prompt that came from no cache, that was read from one, that was written to it; of an answer."""

    input: float
    cached: float
    write: float
    output: float


def prices(
    input_usd: float | None, cached_usd: float | None, write_usd: float | None, output_usd: float | None
) -> Prices | None:
    """The prices of a model; None where the two that everybody has are not known. A cache that has no price of its own costs like the rest."""
    if input_usd is None or output_usd is None:
        return None
    return Prices(
        input_usd,
        input_usd if cached_usd is None else cached_usd,
        input_usd if write_usd is None else write_usd,
        output_usd,
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """In tokens: the call's prompt, what of it is in no cache, its answer; the region, the checkpoint in its place, and the tail behind it."""

    prompt: int
    new: int
    answer: int
    region: int
    checkpoint: int
    tail: int


def sizes(plan: Plan, limits: Limits) -> Sizes:
    """The sizes of a planned compaction, with a checkpoint of the usual size."""
    checkpoint = limits.summary // 2 + limits.ledger + limits.anchors
    return Sizes(
        prompt=plan.prompt,
        new=min(plan.expected_new, plan.prompt),
        answer=limits.output // 2,
        region=plan.region.tokens,
        checkpoint=min(checkpoint, int(plan.region.tokens * MAX_SHARE)),
        tail=plan.region.tail_tokens,
    )


@dataclass(frozen=True, slots=True)
class Payback:
    """US dollars: of the call, of reading the rewritten prompt for the first time, and saved by each turn from then on."""

    call_usd: float
    reread_usd: float
    saving_usd: float

    @property
    def cost_usd(self) -> float:
        """All that it costs."""
        return self.call_usd + self.reread_usd

    @property
    def turns(self) -> float:
        """Turns after which it has paid for itself; infinite where it never does."""
        if self.cost_usd <= 0:
            return 0.0
        return self.cost_usd / self.saving_usd if self.saving_usd > 0 else math.inf

    def pays(self, max_turns: int) -> bool:
        """Whether that is within `max_turns`; 0 asks for nothing."""
        return max_turns == 0 or self.turns <= max_turns


def payback(of: Sizes, own: Prices, writer: Prices | None = None, *, share: float = 1.0) -> Payback:
    """The figures of a compaction. `own`: prices of the conversation's model; `writer`: of the one that writes the summary, where it is another.

    `share` (0..1): of a prompt that should be cached, what this provider finds: a provider without a cache has 0 and everything is read anew.
    """
    read, wrote = _read(own, share), own.write
    asked = own if writer is None else writer
    call = (of.prompt - of.new) * _read(asked, share) + of.new * asked.write + of.answer * asked.output
    reread = (of.checkpoint + of.tail) * max(0.0, wrote - read)
    saving = (of.region - of.checkpoint) * read
    return Payback(call / _MTOK, reread / _MTOK, saving / _MTOK)


def _read(of: Prices, share: float) -> float:
    return share * of.cached + (1 - share) * of.input


def share_found(before: Turn | None, usage: Usage, applied: str | None, gap_ms: int, ttl_s: float) -> float:
    """Of the turn before, the share that this turn found in the cache; 1 where nobody counted, or nothing was to be found.

    `applied`: id of the checkpoint that this turn carried; `gap_ms`: time from the end of the turn before to its start. A turn that carries
    another checkpoint than the one before, or comes later than `ttl_s`, says nothing about the next one.
    """
    if before is None or not before.usage.prompt or usage.cached is None:
        return 1.0
    if before.applied != applied or gap_ms > ttl_s * 1000:
        return 1.0
    return min(1.0, usage.cached / before.usage.prompt)
