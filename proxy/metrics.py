"""All counters of a worker. Callers say what happened; the label words stand here and nowhere else, and each label is a closed set.

No label names a model, a tenant or a session: their number has no bound, and some of them are secrets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from itertools import product
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from proxy.core.journal import Miss
from proxy.core.model import Because, Trigger, Usage
from proxy.errors import Ended, UpstreamFault
from proxy.store.trouble import Trouble

disable_created_metrics()  # type: ignore[no-untyped-call]  # `_created` doubles the number of series, and no query uses it

_Metric = TypeVar("_Metric", Counter, Histogram)

_OTHER: Final = "other"
_STATUSES: Final = ("1xx", "2xx", "3xx", "4xx", "5xx", "none")
_OUTCOMES: Final = ("committed", "made", "skipped", "failed", _OTHER)
_NO_REASON: Final = "none"
_YES_NO: Final = ("yes", "no")
_STEPS: Final = ("identify", "rewrite", "guard", "recover", "beside", "observe", "compact", _OTHER)

# A cached replay of a small model answers in under a second; timeout_s ends a call after 120 s by default.
_CALL_SECONDS: Final = (0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 240)


class Route(StrEnum):
    """Which way a request went."""

    CHAT = "chat"
    RESPONSES = "responses"
    """OpenAI's Responses API: relayed, not compacted yet."""
    MESSAGES = "messages"
    """Anthropic's Messages API: the same."""
    OTHER = "other"


class Recall(StrEnum):
    """What the store knew of a conversation."""

    HIT = "hit"
    """A checkpoint applies."""
    KNOWN = "known"
    """The session is known; no checkpoint applies."""
    UNKNOWN = "unknown"
    OUT = "out"
    """The store did not answer in time."""


class Unread(StrEnum):
    """Why a chat completion was relayed without being looked at."""

    CODED = "coded"
    """Its body is compressed."""
    UNPARSABLE = "unparsable"
    """No JSON object with a list of messages, a key twice, or too deep: the provider judges it."""


class Retry(StrEnum):
    """Why one client request made a further call to the upstream."""

    STALE_CONNECTION = "stale_connection"
    OVERFLOW = "overflow"
    SHAPE = "shape"
    STREAM_OPTIONS = "stream_options"


class Metrics:
    """The counters, and their text for Prometheus.

    Series exist from the start, at zero, because a rate over a missing one is a lie; but not the thousand that compactions may have.
    """

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, **labels: Iterable[str]) -> Counter:
            return _zeroed(Counter(f"warmfold_{name}", text, tuple(labels), registry=registry), *labels.values())

        def histogram(name: str, text: str, buckets: tuple[float, ...], **labels: Iterable[str]) -> Histogram:
            return _zeroed(
                Histogram(f"warmfold_{name}", text, tuple(labels), buckets=buckets, registry=registry), *labels.values()
            )

        self._requests = counter(
            "requests", "Requests answered, by route and status class.", route=Route, status=_STATUSES
        )
        self._in_flight = Gauge("warmfold_requests_in_flight", "Requests being served now.", registry=registry)
        self._relayed = counter("relayed_answers", "How relayed answers ended.", ended=Ended)
        self._upstream_errors = counter("upstream_errors", "Upstream failures, by kind.", kind=UpstreamFault)
        self._store_failures = counter(
            "store_failures", "Calls to the store that brought nothing, by kind.", kind=Trouble
        )
        self._retries = counter(
            "retries", "Further calls to the upstream for one client request, by cause.", cause=Retry
        )
        self._unread = counter(
            "unread_requests",
            "Chat completions that were relayed untouched because they could not be read.",
            because=Unread,
        )
        self._recalls = counter("recalls", "Lookups of a conversation, by what the store knew.", outcome=Recall)
        self._applied = counter(
            "checkpoints_applied", "Requests that went out with a checkpoint in place of covered messages."
        )
        self._unshrinkable = counter(
            "unshrinkable_requests", "Requests sent unchanged because no compaction can make them fit."
        )
        self._compactions = _zeroed(
            Counter(
                "warmfold_compactions",
                "Compactions by trigger, outcome and reason.",
                ("trigger", "outcome", "because"),
                registry=registry,
            ),
            Trigger,
            ("committed",),
            (_NO_REASON,),
        )
        self._call_retries = counter(
            "compaction_retries",
            "Second tries of a compaction call, by what was wrong with the first.",
            because=(*Because, _OTHER),
        )
        self._aux_tokens = counter(
            "compaction_tokens",
            "Tokens of compaction calls as the provider counted them. cached and new are parts of prompt.",
            kind=("prompt", "cached", "new", "completion"),
        )
        self._misses = counter(
            "compaction_cache_misses",
            "Compaction calls that found less cached than expected, by likely reason.",
            reason=Miss,
        )
        self._saved = counter(
            "saved_tokens", "Tokens that checkpoints took out of the conversation when they were made."
        )
        self._truncated = counter(
            "silent_truncations",
            "Turns whose provider counted far fewer prompt tokens than were sent, and said nothing of it.",
        )
        self._turns = counter(
            "turns",
            "Chat completions answered completely with 200, by whether a checkpoint stood in them; without those too small to be looked up.",
            applied=_YES_NO,
        )
        self._turn_tokens = counter(
            "turn_tokens",
            "Tokens of turns as the provider counted them. cached is part of prompt.",
            kind=("prompt", "cached", "completion"),
        )
        self._decisions = counter(
            "decisions",
            "After each turn: due, or why no soft compaction was wanted.",
            because=("due", *Because, _OTHER),
        )
        self._steps_failed = counter(
            "steps_failed", "Steps of a request that failed: the client's request went out as it came.", step=_STEPS
        )
        self._seconds = histogram(
            "compaction_seconds",
            "Seconds from the start of a compaction to its end, calls included.",
            _CALL_SECONDS,
            outcome=_OUTCOMES,
        )

    def answered(self, route: Route, status: int | None) -> None:
        """A request is over; `status` None: the client was gone before it got one."""
        self._requests.labels(route, f"{status // 100}xx" if status and 100 <= status < 600 else "none").inc()

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Counts a request as being served while the block runs."""
        self._in_flight.inc()
        try:
            yield
        finally:
            self._in_flight.dec()

    def relayed(self, ended: Ended) -> None:
        """An answer of the upstream's has been handed on, as far as it went."""
        self._relayed.labels(ended).inc()

    def upstream_failed(self, fault: UpstreamFault) -> None:
        """The upstream gave no answer, or not all of it."""
        self._upstream_errors.labels(fault).inc()

    def store_failed(self, kind: Trouble) -> None:
        """A call to the store brought nothing."""
        self._store_failures.labels(kind).inc()

    def retried(self, cause: Retry) -> None:
        """One more call to the upstream for the same client request."""
        self._retries.labels(cause).inc()

    def unread(self, because: Unread) -> None:
        """A chat completion goes out as it came, and nothing is done for it."""
        self._unread.labels(because).inc()

    def recalled(self, outcome: Recall) -> None:
        """A conversation was looked up."""
        self._recalls.labels(outcome).inc()

    def checkpoint_applied(self) -> None:
        """A request went out rewritten."""
        self._applied.inc()

    def unshrinkable(self) -> None:
        """A request exceeds the window by what no compaction can cover."""
        self._unshrinkable.inc()

    def truncated(self) -> None:
        """A provider counted far fewer prompt tokens than were sent."""
        self._truncated.inc()

    def turn(self, usage: Usage, *, applied: bool) -> None:
        """The provider answered a chat completion completely."""
        self._turns.labels("yes" if applied else "no").inc()
        for kind, tokens in (("prompt", usage.prompt), ("cached", usage.cached), ("completion", usage.completion)):
            if tokens:
                self._turn_tokens.labels(kind).inc(max(0, tokens))

    def decision(self, because: Because | None) -> None:
        """Whether a soft compaction is wanted; None: it is."""
        self._decisions.labels(because or "due").inc()

    def step_failed(self, step: str) -> None:
        """A step raised what it should not have."""
        self._steps_failed.labels(_known(step, _STEPS)).inc()

    def compaction(
        self, trigger: Trigger, outcome: str, because: str, usage: Usage, new: int | None, seconds: float, saved: int
    ) -> None:
        """A compaction ended: a word of the journal's outcomes, a word of Because or "", and what it cost. Unknown token counts count nothing."""
        word = _known(outcome, _OUTCOMES)
        self._compactions.labels(trigger, word, _known(because, Because) if because else _NO_REASON).inc()
        for kind, tokens in (
            ("prompt", usage.prompt),
            ("cached", usage.cached),
            ("new", new),
            ("completion", usage.completion),
        ):
            if tokens:
                self._aux_tokens.labels(kind).inc(max(0, tokens))
        if seconds > 0:  # it made a call
            self._seconds.labels(word).observe(seconds)
        self._saved.inc(max(0, saved))

    def compaction_retried(self, because: str) -> None:
        """The first answer of a compaction call was not taken, and it is asked once more."""
        self._call_retries.labels(_known(because, Because)).inc()

    def cache_missed(self, reason: Miss) -> None:
        """A compaction call found less in the provider's cache than its warm request had left there."""
        self._misses.labels(reason).inc()

    def render(self) -> bytes:
        """The text exposition, format 0.0.4."""
        return generate_latest(self._registry)


def _known(word: str, words: Iterable[str]) -> str:
    return str(word) if word in tuple(words) else _OTHER


def _zeroed(metric: _Metric, *labels: Iterable[str]) -> _Metric:
    if labels:
        for words in product(*labels):
            metric.labels(*words)
    return metric
