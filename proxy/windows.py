"""How long a model's context is, and who says so.

In this order: set in a rule or in [compaction]; said by the upstream; taught by an overflow error; from a price list; else assumed.
This version knows the first and the last. An assumed window rises when a request larger than it succeeds.
"""

from __future__ import annotations

from proxy.config import ASSUMED_WINDOW_TOKENS, Compaction
from proxy.core.model import Window

_MAX_MODELS = 4096
"""Model names come from clients: what we remember of them is bounded."""


class Windows:
    """The windows of all models seen, per upstream."""

    def __init__(self) -> None:
        self._proven: dict[tuple[str, str], int] = {}

    def of(self, upstream: str, model: str, policy: Compaction) -> Window:
        """The window of a model on an upstream."""
        if policy.max_context_tokens is not None:
            return Window(policy.max_context_tokens, "config")
        return Window(max(ASSUMED_WINDOW_TOKENS, self._proven.get((upstream, model), 0)), "assumed")

    def proved(self, upstream: str, model: str, window: Window, used: int | None) -> None:
        """A request of `used` tokens succeeded: an assumed window is at least that long."""
        if used is None or not window.assumed or used <= window.tokens:
            return
        if len(self._proven) < _MAX_MODELS or (upstream, model) in self._proven:
            self._proven[upstream, model] = used * 2
