"""A summary and what the proxy itself keeps of a region (ledger, anchors) become one checkpoint."""

from __future__ import annotations

from dataclasses import replace

from proxy.core import anchors, checkpoint, echo, last_resort, ledger, tokens
from proxy.core.checkpoint import Rejected, Summary
from proxy.core.fingerprint import checkpoint_id
from proxy.core.limits import Limits
from proxy.core.model import Checkpoint, Scope
from proxy.core.plan import Warm, ref
from proxy.core.region import Region

LEDGER_SHARE = 0.3
ANCHOR_SHARE = 0.1
"""Of the region, at most: a small one must leave room to shrink."""

_LEDGER_TOKENS = 36
"""The tags around a ledger."""


def compose(
    summary: Summary,
    region: Region,
    read_to: int,
    warm: Warm,
    limits: Limits,
    *,
    generation: int,
    scope: Scope,
    strategy: str,
    model: str,
    made_at_ms: int,
    anyway: bool,
    answer: bytes | None = None,
) -> Checkpoint | Rejected:
    """The checkpoint, or why it is none. `read_to`: end of what the summariser read of the request, `answer`: what it read behind that.

    `model`: who wrote the summary. `anyway`: it need not be much smaller than its region.
    """
    in_front, behind = warm.covered(region)
    before = warm.applied
    share = 1 / max(
        1.0, warm.factor
    )  # the budgets are the provider's tokens, what is measured against them our estimates
    most = region.tokens * share
    room = int(min(limits.ledger * share, most * LEDGER_SHARE))
    earlier = (*ledger.ledger(in_front, region.from_, (), room), *(before.ledger if before else ()))
    words = ledger.ledger(behind, max(region.from_, warm.offset), earlier, room)
    exact = anchors.anchors(
        (*in_front, *behind),
        f"{summary.text}\n{ledger.rendered(words)}",
        before.anchors if before else (),
        int(min(limits.anchors * share, most * ANCHOR_SHARE)),
    )
    name = checkpoint_id(str(warm.session), generation, summary.text)
    return checkpoint.make(
        summary,
        ref(region, read_to, warm, name, generation),
        session=str(warm.session),
        ledger=words,
        anchors=exact,
        region_tokens=region.tokens,
        factor=warm.factor,
        model=model,
        scope=scope,
        strategy=strategy,
        made_at_ms=made_at_ms,
        anyway=anyway,
        answer=(echo.answered(answer) if answer else None) or b"",
    )


def cut(whole: Checkpoint, room: int, factor: float) -> Checkpoint | None:
    """The checkpoint in at most `room` tokens (the provider's; `factor` is what it counts for one of ours), for a request whose newest messages
    leave no more; None where that is next to nothing.

    The user's own words come first, then start and end of the summary; where a ledger has no room, the task takes the summary's place. Never to be
    stored, nor to be read by a summariser: what it leaves out would be lost to all later ones.
    """
    left = int(room / max(1.0, factor)) - tokens.MESSAGE_OVERHEAD
    words = ledger.within(whole.ledger, left - tokens.of_text(checkpoint.frame("")) - _LEDGER_TOKENS)
    task = None if words else ledger.task(whole.ledger)
    text = last_resort.shortened(task.text if task else whole.text, left - tokens.of_text(checkpoint.frame("", words)))
    if not (text or words):
        return None
    frame = checkpoint.frame(text, words)
    return replace(
        whole, frame=frame, checkpoint_tokens=round((tokens.of_text(frame) + tokens.MESSAGE_OVERHEAD) * factor)
    )
