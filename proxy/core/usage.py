"""What a provider counted, in the shapes in which providers say so. Missing is unknown, never zero."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from proxy.core.model import Usage

_MAX_COUNT = 1_000_000_000
"""More tokens than any window has: a number beyond it counts something else."""

_UNKNOWN = Usage()


def of(carrier: Mapping[str, object]) -> Usage:
    """The counts of a completion, a chunk or a choice (Moonshot), in the shapes known; missing is None.

    A usage object says more than what servers add beside it: Groq's x_groq.usage, llama.cpp's timings, Fireworks' perf_metrics.
    """
    groq = carrier.get("x_groq")
    usage = _measured(carrier.get("perf_metrics"))
    usage = merged(usage, _timings(carrier.get("timings")))
    if isinstance(groq, dict):
        usage = merged(usage, _counted(groq.get("usage")))
    return merged(usage, _counted(carrier.get("usage")))


def of_headers(headers: Iterable[tuple[str, str]]) -> Usage:
    """The counts in an answer's headers. Source: Fireworks, some of whose models count cached tokens there alone."""
    said = {name.lower(): value for name, value in headers}
    prompt, cached = (_number(said.get(f"fireworks-{name}")) for name in _FIREWORKS)
    return Usage(prompt, cached=cached)


def merged(old: Usage, new: Usage) -> Usage:
    """The later number wins where it is known: some servers count on every chunk."""
    if new == _UNKNOWN:
        return old

    def later(a: int | None, b: int | None) -> int | None:
        return a if b is None else b

    prompt, cached = later(old.prompt, new.prompt), later(old.cached, new.cached)
    return Usage(
        prompt,
        later(old.completion, new.completion),
        _within(cached, prompt),
        later(old.reasoning, new.reasoning),
    )


_FIREWORKS = ("prompt-tokens", "cached-prompt-tokens")


def _number(written: object) -> int | None:
    """A count as a header has it."""
    return _plausible(int(written)) if isinstance(written, str) and re.fullmatch("[0-9]{1,12}", written) else None


def _within(cached: int | None, prompt: int | None) -> int | None:
    return cached if cached is None or prompt is None else min(cached, prompt)


# Where the counts stand in a usage object, the likeliest place first. A place is a key, or an object's key and a key in it.
_CACHED = (
    ("prompt_tokens_details", "cached_tokens"),  # OpenAI and most others
    ("input_tokens_details", "cached_tokens"),  # OpenAI's responses, as gateways pass them on
    ("prompt_cache_hit_tokens",),  # DeepSeek
    ("cached_tokens",),  # Moonshot, Together
)
_COMPLETION = (("completion_tokens",), ("output_tokens",), ("outputTokens",))
_REASONING = (("completion_tokens_details", "reasoning_tokens"), ("output_tokens_details", "reasoning_tokens"))

# The three input counts of Anthropic and of Bedrock, which exclude each other.
_FRESH = (("input_tokens",), ("inputTokens",))
_READ = (("cache_read_input_tokens",), ("cacheReadInputTokens",))
_WRITTEN = (("cache_creation_input_tokens",), ("cacheWriteInputTokens",))


def _counted(usage: object) -> Usage:
    """The counts of a usage object. One that counts no prompt at all, not even one token, counts nothing else of it either."""
    if not isinstance(usage, dict):
        return _UNKNOWN
    completion, reasoning = _first(usage, _COMPLETION), _first(usage, _REASONING)
    prompt, cached = _prompt(usage, completion)
    if prompt == 0:
        return Usage(completion=completion or None)
    if reasoning and None not in (prompt, completion):
        total = _count(usage, "total_tokens")
        # xAI counts the thoughts beside the answer, everybody else among it: only the total tells.
        if total == (prompt or 0) + (completion or 0) + reasoning:
            completion = (completion or 0) + reasoning
    return Usage(prompt, completion, _within(cached, prompt), reasoning)


def _prompt(usage: Mapping[str, object], completion: int | None) -> tuple[int | None, int | None]:
    """Tokens of the prompt, cached ones included, and how many those are."""
    prompt, cached = _count(usage, "prompt_tokens"), _first(usage, _CACHED)
    read, written = _first(usage, _READ), _first(usage, _WRITTEN)
    beside = (read or 0) + (written or 0)
    if prompt is not None:
        # Gateways that translate Anthropic's counts leave them in, and disagree on whether the prompt includes them.
        total = _count(usage, "total_tokens")
        apart = beside > prompt or (completion is not None and total == prompt + beside + completion)
    else:
        prompt = _first(usage, _FRESH)
        apart = "input_tokens_details" not in usage
    if prompt is not None and apart:
        prompt += beside
    return prompt, read if cached is None else cached


def _timings(timings: object) -> Usage:
    if not isinstance(timings, dict):
        return _UNKNOWN
    cached, new = _count(timings, "cache_n"), _count(timings, "prompt_n")
    prompt = None if cached is None or new is None else cached + new
    return Usage(prompt=prompt, completion=_count(timings, "predicted_n"), cached=cached)


def _measured(metrics: object) -> Usage:
    if not isinstance(metrics, dict):
        return _UNKNOWN
    prompt, cached = (_count(metrics, name) for name in _FIREWORKS)
    return Usage(prompt, cached=cached)


def _first(usage: Mapping[str, object], places: Iterable[tuple[str, ...]]) -> int | None:
    """The first count that stands in one of these places."""
    for *outer, key in places:
        found = _count(_inner(usage, outer[0]) if outer else usage, key)
        if found is not None:
            return found
    return None


def _inner(usage: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = usage.get(key)
    return value if isinstance(value, dict) else {}


def _count(usage: Mapping[str, object], key: str) -> int | None:
    return _plausible(usage.get(key))


def _plausible(value: object) -> int | None:
    """A number of tokens; None for what cannot be one."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value <= _MAX_COUNT else None
