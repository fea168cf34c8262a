"""Where may a cut fall, and which messages shall a checkpoint stand for?

A cut before position c is legal where no tool call is parted from any of its results, and where the checkpoint (a user message)
may stand in front of message c: a user message that can take it in, or an assistant message. By position and id: real logs
reuse ids, so a result belongs to the nearest earlier call of its id that has no result yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proxy.core.limits import Limits
from proxy.core.model import Because, Facts


@dataclass(frozen=True, slots=True)
class Region:
    """Messages [from_, k) to be covered. `tokens` counts what it replaces: an earlier checkpoint and the newly covered messages."""

    from_: int
    k: int
    tokens: int
    tail_tokens: int


UNSHRINKABLE = 1.5
"""So many windows of what cannot be covered are certainly too much: a count of ours may be wrong by a third before the first usage."""


def legal_cuts(facts: Sequence[Facts], offset: int = 0) -> tuple[int, ...]:
    """All positions in (offset, offset + len) before which a cut is legal, ascending. `offset` is the position of facts[0]."""
    parted = _parted(facts)
    return tuple(
        offset + at
        for at in range(1, len(facts))
        if not parted[at]
        and (
            facts[at].role == "assistant"
            or (facts[at].role == "user" and facts[at].spliceable and not facts[at].answers)
        )
    )


def parts(facts: Sequence[Facts], cuts: Iterable[int]) -> bool:
    """Whether one of the cuts parts a call from its result. One that did not may do so later: a result may come long after its call was given up."""
    parted = _parted(facts)
    return any(parted[cut] for cut in cuts)


def _parted(facts: Sequence[Facts]) -> list[bool]:
    """parted[c]: a cut before c would part a call from a result."""
    open_calls: dict[str, list[int]] = {}
    depth = [0] * (len(facts) + 1)
    last_of: dict[str, int] = {}
    for at, message in enumerate(facts):
        for answer in message.answers:
            waiting = open_calls.get(answer)
            # A second result of one call (some clients resend it) belongs to that call as well.
            call = waiting.pop() if waiting else last_of.get(answer)
            if call is not None:
                depth[call + 1] += 1
                depth[at + 1] -= 1
        for call_id in message.calls:
            # An older call of this id that never got its result will not get one now: the nearest call wins.
            open_calls.setdefault(call_id, []).append(at)
            last_of[call_id] = at
    for first, last in _ambiguous(facts):
        depth[first + 1] += 1
        depth[last + 1] -= 1
    parted = []
    level = 0
    for at in range(len(facts)):
        level += depth[at]
        parted.append(level > 0)
    return parted


def _ambiguous(facts: Sequence[Facts]) -> Iterable[tuple[int, int]]:
    """First and last message of each id that a message without a readable role calls or answers: whose result is whose is anybody's guess."""
    ids = {name for message in facts if not message.role for name in (*message.calls, *message.answers)}
    spans: dict[str, tuple[int, int]] = {}
    for at, message in enumerate(facts if ids else ()):
        for name in (*message.calls, *message.answers):
            if name in ids:
                spans[name] = (spans.get(name, (at, at))[0], at)
    return spans.values()


def choose(
    facts: Sequence[Facts],
    sizes: Sequence[int],
    limits: Limits,
    *,
    offset: int,
    from_: int,
    replaced_tokens: int,
    latest: int,
    anyway: bool,
    fixed: int = 0,
) -> Region | Because:
    """The region that the next checkpoint shall cover, or why there is none.

    `facts` and `sizes` (tokens) describe messages [offset, offset + len): those after an earlier checkpoint, which weighs
    `replaced_tokens`. A cut after `latest` is taken only where those before it cover too little: what lies behind it was never sent, so it is in
    no cache. `anyway`: at the hard watermark, after an overflow or on request the minimum does not count. `fixed`: tokens of all that
    no compaction shrinks: tools, preamble, a kept head.
    """
    cuts = [c for c in legal_cuts(facts, offset) if c > from_]
    if not cuts:
        return Because.NO_BOUNDARY
    after = _suffix_sums(sizes)
    if anyway and fixed + after[cuts[-1] - offset] > limits.window.tokens * UNSHRINKABLE:
        # Preamble, tools and the newest messages alone do not fit: a compaction would be paid for and change nothing.
        return Because.UNSHRINKABLE
    early = [c for c in cuts if c <= latest]
    if early and after[max(0, from_ - offset)] - after[early[-1] - offset] >= limits.min_region:
        cuts = early
    k = _cut(facts, cuts, after, limits, offset, fixed)
    new = after[max(0, from_ - offset)] - after[k - offset]
    region = Region(from_, k, replaced_tokens + new, after[k - offset])
    if not anyway:
        if new < limits.min_region:
            return Because.REGION_TOO_SMALL
        if fixed + sum(sizes) + replaced_tokens - region.tokens > limits.soft:
            # Even an empty checkpoint would leave the rest above the watermark: it would press again at once.
            return Because.INSUFFICIENT_GAIN
    return region


def _suffix_sums(sizes: Sequence[int]) -> list[int]:
    sums = [0] * (len(sizes) + 1)
    for at in range(len(sizes) - 1, -1, -1):
        sums[at] = sums[at + 1] + sizes[at]
    return sums


def _cut(
    facts: Sequence[Facts], cuts: Sequence[int], after: Sequence[int], limits: Limits, offset: int, fixed: int
) -> int:
    """The cut whose tail is large enough but not larger than a quarter of the window; of several the best place, then the smallest tail.

    Nor is it so large that with what is fixed and a checkpoint of the usual size it would press against the soft watermark again.
    """
    cap = min(limits.tail_cap, max(0, limits.soft - fixed - limits.summary // 2 - limits.ledger))
    want = min(cap, max(limits.keep_recent, after[_recent_turns(facts, limits.keep_recent_turns)]))
    fitting = [c for c in cuts if want <= after[c - offset] <= cap]
    if fitting:
        return max(fitting, key=lambda c: (_place(facts, c - offset), c))
    # No boundary in that range: the next smaller tail. But rather a larger one, up to a quarter of the window, than a question parted from
    # its answer; and where the newest balanced group alone is larger than all that, that group.
    smaller = [c for c in cuts if after[c - offset] < want]
    whole = [c for c in smaller if _place(facts, c - offset) > 0]
    larger = [c for c in cuts if cap < after[c - offset] <= limits.tail_cap and _place(facts, c - offset) > 0]
    if whole or (smaller and not larger):
        return min(whole or smaller)
    return max(larger) if larger else max(cuts, key=lambda c: (_place(facts, c - offset) > 0, c))


def _recent_turns(facts: Sequence[Facts], turns: int) -> int:
    """Where the newest `turns` user turns start (a user turn: a user message and what follows up to the next one)."""
    if turns <= 0:
        return len(facts)
    starts = [at for at, message in enumerate(facts) if message.role == "user"]
    return starts[-turns] if len(starts) >= turns else 0


def _place(facts: Sequence[Facts], at: int) -> int:
    """How good a place is for a cut: best just before a user message, worst where the region would end on one."""
    if facts[at].role == "user":
        return 2 if facts[at - 1].role != "user" else 0
    return 1 if facts[at - 1].role != "user" else 0


def keep_head(facts: Sequence[Facts], wanted: int) -> int:
    """How many of the first messages stay in front of the checkpoint: at most `wanted`, ending on an answer without open calls."""
    legal = set(legal_cuts(facts))
    for at in range(min(wanted, len(facts) - 1), 0, -1):
        if at in legal and facts[at - 1].role == "assistant":
            return at
    return 0


def largest_fitting(cuts: Sequence[int], prefix_tokens: Sequence[int], room: int, offset: int) -> int | None:
    """The last cut whose prefix is at most `room` tokens; prefix_tokens[i] counts messages [offset, offset + i)."""
    fitting = [c for c in cuts if prefix_tokens[c - offset] <= room]
    return max(fitting) if fitting else None
