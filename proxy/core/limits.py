"""Every size of a compaction, from the configuration's caps and the model's window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from proxy.core.model import Window

INSTRUCTION_TOKENS = 180
"""The instruction is at most this long; a test measures it."""

_MIN_WINDOW = 256


class Policy(Protocol):
    """The keys of [compaction] that this needs: token keys are caps."""

    @property
    def trigger_ratio(self) -> float: ...
    @property
    def hard_ratio(self) -> float: ...
    @property
    def budget_tokens(self) -> int: ...
    @property
    def debounce_turns(self) -> int: ...
    @property
    def keep_head_messages(self) -> int: ...
    @property
    def keep_recent_turns(self) -> int: ...
    @property
    def keep_recent_tokens(self) -> int: ...
    @property
    def min_region_tokens(self) -> int: ...
    @property
    def max_summary_tokens(self) -> int: ...
    @property
    def ledger_tokens(self) -> int: ...
    @property
    def anchor_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """All in tokens but `keep_recent_turns`, `keep_head_messages` and `debounce_turns`.

    `soft` and `hard` are the watermarks, `tail_cap` bounds the tail, `output` is what the compaction call may answer at most.
    """

    window: Window
    soft: int
    hard: int
    summary: int
    reasoning_room: int
    ledger: int
    anchors: int
    min_region: int
    keep_recent: int
    tail_cap: int
    keep_recent_turns: int
    keep_head_messages: int
    debounce_turns: int

    @property
    def output(self) -> int:
        """Room for the summary and for thinking about it."""
        return self.summary + self.reasoning_room

    def fits(self, prompt: int) -> bool:
        """Whether a compaction call with this prompt (without its instruction) leaves room for its answer."""
        return prompt + INSTRUCTION_TOKENS + self.output <= self.window.tokens


def limits(policy: Policy, window: Window, *, reasons: bool) -> Limits:
    """The sizes for one model. `reasons`: the conversation's answers hold hidden thoughts, which spend output tokens first."""
    total = max(_MIN_WINDOW, window.tokens)
    summary = max(1, min(policy.max_summary_tokens, total // 8))
    room = min(total // 8, 2 * summary) if reasons else 0
    hard = max(1, min(int(policy.hard_ratio * total), total - summary - room - INSTRUCTION_TOKENS))
    soft = int(policy.trigger_ratio * total)
    if policy.budget_tokens:
        soft = min(soft, policy.budget_tokens)
    return Limits(
        window=window,
        soft=max(1, min(soft, hard)),
        hard=hard,
        summary=summary,
        reasoning_room=room,
        ledger=min(policy.ledger_tokens, total // 16),
        anchors=min(policy.anchor_tokens, total // 64),
        min_region=min(policy.min_region_tokens, total // 32),
        keep_recent=min(policy.keep_recent_tokens, total // 4),
        tail_cap=total // 4,
        keep_recent_turns=policy.keep_recent_turns,
        keep_head_messages=policy.keep_head_messages,
        debounce_turns=policy.debounce_turns,
    )
