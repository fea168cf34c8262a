"""How long a model's context is, and who says so.

In this order: set in a rule or in [compaction]; said by the upstream; taught by an overflow error; from a price list; else assumed.
An assumed window rises when a request larger than it succeeds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from proxy import clock
from proxy.bounded import remember
from proxy.config import ASSUMED_WINDOW_TOKENS, Compaction
from proxy.core.discovery import MAX_NAME_LENGTH, MAX_TOKENS, Said
from proxy.core.model import Window

MIN_TOKENS = 256
"""No model has a shorter window: what an error states below that is something else."""

Listed = Callable[[str, str], Window | None]
"""The window of a model on an upstream (both by name) by a price list; None: not listed, or not certain."""

LESSON_S = 86_400.0
"""What an error taught holds for a day: the next one teaches it again, and a model that has grown meanwhile is noticed."""

_MAX_MODELS = 4096
"""Model names come from clients: what we remember of them is bounded, in number and in length."""


def not_listed(upstream: str, model: str) -> None:
    """The price list of nobody."""


class Windows:
    """The windows of all models seen, per upstream (by name). All of it is this worker's own, and asked or learned anew by the next."""

    def __init__(self, listed: Listed = not_listed, lesson_s: float = LESSON_S) -> None:
        self._listed = listed
        self._lesson_s = lesson_s
        self._said: dict[str, Said] = {}
        self._lessons: OrderedDict[tuple[str, str, str], tuple[Window, float]] = OrderedDict()
        self._proven: OrderedDict[tuple[str, str], int] = OrderedDict()

    def of(self, upstream: str, model: str, policy: Compaction, *, tenant: str) -> Window:
        """The window of a model on an upstream, for a tenant's request, now: it may be another one at the next request."""
        if policy.max_context_tokens is not None:
            return Window(policy.max_context_tokens, "config")
        said, lesson = self._said.get(upstream, Said()).of(model), self._lesson(upstream, model, tenant)
        if said is not None and lesson is not None and lesson.input_only and not said.input_only:
            # No contradiction: one limits prompt and answer together, the other the prompt alone.
            return lesson if lesson.tokens < said.tokens else said
        assumed = Window(max(ASSUMED_WINDOW_TOKENS, self._proven.get((upstream, model), 0)), "assumed")
        return said or lesson or self._listed(upstream, model) or assumed

    def said(self, upstream: str, said: Said) -> None:
        """What the upstream says of its models."""
        self._said[upstream] = self._said.get(upstream, Said()).then(said)

    def learned(self, upstream: str, model: str, limit: int, input_only: bool, *, tenant: str) -> None:
        """An overflow error stated the limit: of the prompt alone (`input_only`), or of prompt and answer together.

        It counts for the tenant that got it: errors quote what a client wrote, and nobody's words may shorten the window of others.
        """
        if MIN_TOKENS <= limit <= MAX_TOKENS and len(model) <= MAX_NAME_LENGTH:
            lesson = Window(limit, "learned", input_only), clock.monotonic()
            remember(self._lessons, (upstream, model, tenant), lesson, _MAX_MODELS)

    def proved(self, upstream: str, model: str, window: Window, used: int | None) -> None:
        """A request of `used` tokens succeeded: an assumed window is at least that long."""
        if used is not None and window.assumed and used > window.tokens and len(model) <= MAX_NAME_LENGTH:
            remember(self._proven, (upstream, model), used * 2, _MAX_MODELS)

    def refuted(self, upstream: str, model: str, window: Window, prompt: int | None, *, tenant: str) -> None:
        """The provider has taken a prompt of so many tokens: an error that taught a shorter window was wrong."""
        if prompt is not None and window.origin == "learned" and prompt > window.tokens:
            self._lessons.pop((upstream, model, tenant), None)

    def _lesson(self, upstream: str, model: str, tenant: str) -> Window | None:
        window, since = self._lessons.get((upstream, model, tenant), (None, 0.0))
        return window if clock.monotonic() - since < self._lesson_s else None
