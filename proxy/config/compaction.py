"""[compaction] and the [[models]] rules over it: when and how a conversation is compacted."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from proxy.config.kinds import Filled, Prompt
from proxy.config.sections import Section

ASSUMED_WINDOW_TOKENS: Final = 32_000
"""A model's context length in tokens where nobody told us: it never triggers the guard or the last resort."""


class Compaction(Section):
    """[compaction]: when and how a conversation is compacted. Token keys are caps, each further limited to a share of the window."""

    mode: Literal["on", "observe", "off"] = Field(
        default="on", description="on; observe decides and counts, but never calls or rewrites; off stores nothing."
    )
    strategy: Literal["replay", "transcript"] = Field(
        default="replay",
        description="replay sends the warm request and one more message, which keeps the cache; transcript sends a rendered transcript.",
    )
    replay_scope: Literal["warm", "region"] = Field(
        default="warm",
        description="warm replays the whole warm request, because several caches only match where an earlier request ended; region cuts it.",
    )
    when: Literal["auto", "after_turn", "next_turn"] = Field(
        default="auto",
        description="after_turn: at once, while all is warm. next_turn: beside the next request, when it is certain there is one. "
        "auto: after_turn for an upstream on a loopback or private address, else next_turn.",
    )
    settle_s: float = Field(
        default=0.0,
        ge=0,
        le=3600,
        description="Seconds to wait after a turn (after_turn), for caches that are written late.",
    )
    trigger_ratio: float = Field(
        default=0.75,
        gt=0,
        le=1,
        description="Soft watermark as a share of the window: compact in the background from here on.",
    )
    hard_ratio: float = Field(
        default=0.92,
        gt=0,
        le=1,
        description="Hard watermark as a share of the window: compact before forwarding. Above trigger_ratio.",
    )
    budget_tokens: int = Field(
        default=0,
        ge=0,
        description="Soft watermark in tokens whatever the window, to cap what a turn costs; 0: none. The lower of the two counts.",
    )
    max_context_tokens: int | None = Field(
        default=None,
        ge=256,
        description="The window in tokens. Not set, neither here nor in a rule: found out, else 32000, assumed, which never triggers the hard watermark.",
    )
    debounce_turns: int = Field(
        default=3,
        ge=0,
        description="Turns between two soft compactions of a session, so that none follows on the heels of another.",
    )
    keep_head_messages: int = Field(
        default=0, ge=0, description="Messages at the start that are never covered, such as few-shot examples."
    )
    keep_recent_turns: int = Field(
        default=2,
        ge=0,
        description="User turns at the end that stay verbatim; the larger of this and keep_recent_tokens counts.",
    )
    keep_recent_tokens: int = Field(
        default=8000, ge=0, description="Tokens at the end that stay verbatim; at most a quarter of the window."
    )
    min_region_tokens: int = Field(
        default=1024, ge=0, description="Tokens below which a region is not worth a call; at most 1/32 of the window."
    )
    max_summary_tokens: int = Field(
        default=4096, ge=64, description="Tokens that a summary may have; at most 1/8 of the window."
    )
    ledger_tokens: int = Field(
        default=2000,
        ge=0,
        description="Tokens of the user's own words kept verbatim in a checkpoint; 0: none. At most 1/16 of the window.",
    )
    anchor_tokens: int = Field(
        default=500,
        ge=0,
        description="Tokens of exact identifiers that the summary lacks, added to a checkpoint; 0: none. At most 1/64 of the window.",
    )
    max_passes: int = Field(
        default=8,
        ge=1,
        le=256,
        description="Compaction calls that one request may cause when its history does not fit one call.",
    )
    timeout_s: float = Field(default=120.0, gt=0, le=86400, description="Seconds for one compaction call.")
    inline_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=86400,
        description="Seconds that a client may wait for compaction in all, passes and a call in flight included.",
    )
    max_payback_turns: int = Field(
        default=8, ge=0, description="Turns within which a soft compaction must have paid for itself; 0: do not ask."
    )
    cache_ttl_s: float = Field(
        default=300.0,
        gt=0,
        description="Seconds that the provider keeps a prefix. Later than that a soft compaction waits until a turn has warmed it again.",
    )
    summary_model: str = Field(
        default="", description="Model that writes summaries; empty: the conversation's own, which alone has the cache."
    )
    summary_prompt: Prompt = Field(
        default="",
        description="Instruction instead of the built-in one; empty: built in. {messages} marks the transcript's place and is refused under replay.",
    )
    keep_response_format: bool = Field(
        default=False, description="Whether the replay keeps response_format, for providers whose cache depends on it."
    )
    max_tool_result_chars: int = Field(default=500, ge=0, description="Characters of each tool result in a transcript.")
    max_transcript_chars: int = Field(
        default=30000, ge=1, description="Characters of a whole transcript, cut from the front."
    )


class ModelRule(Compaction):
    """[[models]]: what differs for the models that match. Only the keys in `model_fields_set` count; ask Config.compaction_for for the sum."""

    match: Filled = Field(
        description="Pattern of model names (*, ?, [abc]; case matters). The first rule that matches wins."
    )
    input_usd_per_mtok: float | None = Field(
        default=None, ge=0, description="US dollars per million prompt tokens that came from no cache."
    )
    cached_usd_per_mtok: float | None = Field(
        default=None, ge=0, description="US dollars per million prompt tokens read from the cache."
    )
    cache_write_usd_per_mtok: float | None = Field(
        default=None, ge=0, description="US dollars per million prompt tokens written to the cache."
    )
    output_usd_per_mtok: float | None = Field(
        default=None, ge=0, description="US dollars per million tokens of the answer."
    )

    def over(self, base: Compaction) -> Compaction:
        """`base` with the keys that this rule sets."""
        keys = self.model_fields_set & Compaction.model_fields.keys()
        return base.model_copy(update={key: getattr(self, key) for key in keys})
