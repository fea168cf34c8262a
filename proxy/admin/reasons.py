"""What the words of `Because` mean, one sentence each, for people. docs/reasons.md holds the same sentences; a test compares them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from proxy.core.model import Because

SENTENCES: Final[Mapping[Because, str]] = MappingProxyType(
    {
        Because.OFF: "Compaction is off for this model (compaction.mode).",
        Because.OBSERVE: "The mode is observe: warmfold decides and counts, and neither calls nor rewrites (compaction.mode).",
        Because.BELOW_WATERMARK: "The conversation is still below the soft watermark.",
        Because.DEBOUNCE: "The last compaction was fewer than compaction.debounce_turns turns ago.",
        Because.BACKOFF: "Earlier attempts failed, and the pause after a failure is not over.",
        Because.REGION_TOO_SMALL: "What could be covered is too small to be worth a call (compaction.min_region_tokens).",
        Because.INSUFFICIENT_GAIN: "What has to stay would press against the watermark again at once, however short the summary.",
        Because.NO_BOUNDARY: "There is no place for a cut: all would part a tool call from its result, or a checkpoint could not stand there.",
        Because.NO_ROOM: "Not even a part of the conversation leaves room in the window for a compaction call and its answer.",
        Because.UNSHRINKABLE: "System prompt, tools and the newest messages alone exceed the window, and those are never covered.",
        Because.UNAPPLIED: "The last checkpoints were never used, as with a client that rewrites its history; compaction rests for a while.",
        Because.IN_FLIGHT: "Another compaction of this session is under way.",
        Because.COLD: "The provider's cache had probably forgotten the conversation; the compaction was to wait until the turn had warmed it again.",
        Because.QUOTA: "The provider reports too little quota left for a compaction call.",
        Because.PAYBACK: "The compaction would not pay for itself within compaction.max_payback_turns.",
        Because.REASONING: "Many templates drop the thoughts behind the last user message once another one follows; it waits until the client sent one.",
        Because.UNKNOWN_USAGE: "The tokens in the window are not known.",
        Because.NO_MODEL: "No model is known that could write the summary from a transcript: none is configured, and the conversation names none.",
        Because.WARM_MISSING: "The store no longer has all parts of the session's last request.",
        Because.CONFLICT: "The session changed while the summary was written, so it was not taken.",
        Because.SUPERSEDED: "A newer checkpoint exists already, which the next request will carry.",
        Because.STOPPED: "warmfold was stopped while it waited for the summary; a later turn asks again.",
        Because.STORE: "The store does not answer, or no longer knows the session, so a checkpoint could not be kept.",
        Because.UNREACHABLE: "The provider could not be reached, or broke off its answer.",
        Because.TIMEOUT: "The summary took too long (compaction.timeout_s, or compaction.inline_timeout_s in front of a request).",
        Because.STATUS: "The provider answered the compaction call with an error.",
        Because.RATE_LIMITED: "The provider answered this tenant with 429 or 503, and is left alone for as long as it said.",
        Because.OVERFLOW: "The provider says that the call exceeds its context length; in the header: the request did so once more after it was compacted.",
        Because.MALFORMED: "The provider's answer is no chat completion.",
        Because.EMPTY: "The summary is empty.",
        Because.TRUNCATED: "The summary was cut off at its limit of tokens (compaction.max_summary_tokens).",
        Because.FILTERED: "The provider's content filter withheld the summary.",
        Because.UNFINISHED: "The summary broke off before its end.",
        Because.TOOL_CALL: "The model called a tool instead of writing a summary.",
        Because.OVERSIZED: "The summary has more than 256 KiB.",
        Because.INFLATED: "The checkpoint would be too large for what it replaces.",
        Because.REFUSAL: "The model refused to write a summary.",
        Because.ERROR_TEXT: "The answer is an error message and no summary.",
        Because.ECHO: "The answer repeats the instruction.",
        Because.TOO_SHORT: "The answer is too short to be a summary.",
        Because.INTERNAL: "A fault of warmfold's own; the log names its type.",
    }
)


def sentence(because: str) -> str:
    """The sentence for a word of the vocabulary; "" for any other."""
    return SENTENCES[Because(because)] if because in list(Because) else ""
