"""Is a compaction due? Tokens used against the window; debounce, back-off, checkpoints that nobody used."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.core.limits import Limits
from proxy.core.model import Because, Counters, Facts
from proxy.core.payback import Payback

BACKOFF_FIRST_S = 30
BACKOFF_MAX_S = 3600
UNAPPLIED_LIMIT = 2
"""So many checkpoints in a row that no request used: the client rewrites its history, compaction only burns money."""

UNAPPLIED_PAUSE_S = 900


def due(
    used: int | None, limits: Limits, counters: Counters, now_ms: int, *, applied: bool, root_unapplied: int = 0
) -> Because | None:
    """None: a soft compaction is due. Else why not. `applied`: the turn carried a checkpoint, so the last one was of use.

    `root_unapplied`: what all sessions of the root made lately without use; a client that rewrites its history has a new one each turn.
    """
    if used is None:
        return Because.UNKNOWN_USAGE
    if used < limits.soft:
        return Because.BELOW_WATERMARK
    rest = rests(counters, limits, now_ms)
    if rest is Because.BACKOFF or applied:
        return rest
    paused = now_ms < counters.not_before_ms and counters.unapplied >= UNAPPLIED_LIMIT
    return Because.UNAPPLIED if paused or root_unapplied >= UNAPPLIED_LIMIT else rest


def rests(counters: Counters, limits: Limits, now_ms: int) -> Because | None:
    """Why no soft compaction may be made, whatever the pressure: a pause after failures, or the distance to the last one; None: it may."""
    if counters.failures and now_ms < counters.not_before_ms:
        return Because.BACKOFF
    if counters.last_turn is not None and counters.turns - counters.last_turn < limits.debounce_turns:
        return Because.DEBOUNCE
    return None


def must_compact(estimate: int, requested_output: int, limits: Limits, least: int = 0) -> bool:
    """Whether the routed request would not fit. A window that is only assumed never says so.

    `least`: what stays of it however much is covered (tools, preamble, newest messages). A mark that this and a checkpoint of the usual size
    exceed is out of reach: minding it would cost a call in front of every request, and change nothing. Then the window alone counts.
    """
    if limits.window.assumed:
        return False
    total = limits.window.tokens
    reserved = 0 if limits.window.input_only else min(requested_output, total // 4)
    reached = least + limits.summary // 2 + limits.ledger if least else 0
    hard = limits.hard if reached < limits.hard else total
    return estimate >= hard or estimate + (reserved if reached + reserved <= total else 0) > total


def is_last_chance(used: int, requested_output: int, limits: Limits) -> bool:
    """Whether the next request would have to be compacted while its client waits: then a soft compaction waits for nothing that is only dear."""
    return used >= limits.hard or must_compact(used, requested_output, limits)


def waits(payback: Payback | None, max_turns: int, *, thinks: bool) -> Because | None:
    """Why a soft compaction that is due had better wait, for the hard watermark at most; None: it need not.

    `payback` None: prices are not known, so it pays. `thinks`: thoughts stand behind the last user message of what would be replayed.
    """
    if thinks:
        return Because.REASONING
    return Because.PAYBACK if payback is not None and not payback.pays(max_turns) else None


def thinks_behind_user(facts: Sequence[Facts]) -> bool:
    """Whether thoughts stand behind the last user message. Several templates drop them once another user message follows, as a replay's
    instruction does: then the prompt is another one from the first of them on. Without any user message it is the checkpoint in front.
    """
    for message in reversed(facts):
        if message.role == "user":
            return False
        if message.reasoning:
            return True
    return False


def after_success(counters: Counters, now_ms: int, *, applied: bool) -> Counters:
    """Counters once a checkpoint was committed. `applied`: the compacted request itself carried the previous one."""
    unapplied = 1 if applied else counters.unapplied + 1
    pause = UNAPPLIED_PAUSE_S * 1000 if unapplied >= UNAPPLIED_LIMIT else 0
    return Counters(counters.turns, counters.turns, 0, now_ms + pause if pause else 0, unapplied)


def after_failure(counters: Counters, now_ms: int, retry_after_s: float = 0.0) -> Counters:
    """Counters after a failed attempt: the pause doubles from 30 s to an hour; a provider's Retry-After is kept."""
    pause_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2**counters.failures)
    not_before = now_ms + int(max(pause_s, retry_after_s) * 1000)
    return Counters(counters.turns, counters.turns, counters.failures + 1, not_before, counters.unapplied)
