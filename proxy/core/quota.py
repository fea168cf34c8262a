"""How much a provider says is left, and how long it wants to be left alone.

Names differ (seen in answers of OpenAI, Azure, Groq and Mistral, and in what Anthropic, Cerebras, Fireworks and Together document), but all are made of the
same words in some order: `x-ratelimit-remaining-tokens`, `x-ratelimit-remaining-req-minute`, `anthropic-ratelimit-input-tokens-remaining`.
So words are read, and not names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final

Headers = Iterable[tuple[str, str]]

TIMES_NEEDED: Final = 2
"""So many times what a call needs must be left: the client's own next request comes first."""

MAX_PAUSE_S: Final = 3600.0

_COUNT = re.compile(r"\s*(\d{1,15})(?:\.\d*)?\s*")
_SEPARATED = re.compile(r"(rate|token)-limit")
_OTHER: Final = frozenset({"images", "image", "audio", "seconds", "search", "cost"})
_OUTPUT: Final = frozenset({"output", "generated", "completion"})
_CACHED_ARE_FREE: Final = ("anthropic-ratelimit-", "x-groq-")
"""Whose headers begin like this does not count tokens that come from its cache (console.groq.com/docs/prompt-caching; Anthropic's pages on rate limits)."""


@dataclass(frozen=True, slots=True)
class Remaining:
    """What is left, the least of all periods: tokens (of prompts, or of both), tokens of answers, requests. None: not said.

    `counts_cached`: whether tokens from the cache are taken off as well.
    """

    tokens: int | None = None
    output_tokens: int | None = None
    requests: int | None = None
    counts_cached: bool = True


@dataclass(frozen=True, slots=True)
class Need:
    """What a call takes: tokens of its prompt, those of them that are in no cache, tokens of its answer."""

    prompt: int
    new: int
    output: int

    def of(self, remaining: Remaining) -> int:
        """Tokens that come off the provider's count."""
        return (self.prompt if remaining.counts_cached else self.new) + self.output


def has_had_enough(status: int) -> bool:
    """Whether an answer of this status asks to be left alone for a while."""
    return status in (429, 503)


def remaining(headers: Headers) -> Remaining:
    """What an answer's headers say is left. What cannot be read as a count is not said."""
    found: dict[str, int] = {}
    counts_cached = True
    for name, value in headers:
        low = name.lower()
        counts_cached = counts_cached and not low.startswith(_CACHED_ARE_FREE)
        kind = _kind(frozenset(_SEPARATED.sub(r"\1limit", low).split("-")))
        count = _COUNT.fullmatch(value) if kind else None
        if count is not None:
            found[kind] = min(int(count[1]), found.get(kind, int(count[1])))
    return Remaining(found.get("tokens"), found.get("output"), found.get("requests"), counts_cached)


def _kind(words: frozenset[str]) -> str:
    """What a header of these words counts; "" where it is none of ours."""
    if "remaining" not in words or not words & {"ratelimit", "tokenlimit"} or words & _OTHER:
        return ""
    if words & {"tokens", "token", "tokenlimit"}:
        return "output" if words & _OUTPUT else "tokens"
    # One that counts nothing by name counts requests.
    named = words - {"x", "ratelimit", "remaining"}
    return "requests" if not named or words & {"requests", "request", "req"} else ""


def is_enough(left: Remaining, need: Need) -> bool:
    """Whether there is twice what a call needs, as far as the provider says."""
    wanted = ((left.tokens, need.of(left)), (left.output_tokens, need.output), (left.requests, 1))
    return all(have is None or have >= TIMES_NEEDED * needs for have, needs in wanted)


def retry_after_s(headers: Headers, now_ms: int) -> float | None:
    """Seconds of a Retry-After, which may be a date, or of the finer Retry-After-Ms; the longer of both, at most an hour. None: not said.

    `now_ms`: wall clock.
    """
    said = [_seconds(name.lower(), value.strip(), now_ms) for name, value in headers]
    known = [seconds for seconds in said if seconds is not None and not math.isnan(seconds)]
    return min(MAX_PAUSE_S, max(0.0, *known)) if known else None


def _seconds(name: str, value: str, now_ms: int) -> float | None:
    if name not in ("retry-after", "retry-after-ms"):
        return None
    try:
        return float(value) / (1000 if name == "retry-after-ms" else 1)
    except ValueError:
        pass
    try:
        return parsedate_to_datetime(value).timestamp() - now_ms / 1000
    except (ValueError, TypeError, OverflowError):
        return None
