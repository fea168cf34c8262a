"""What the counts of upstreams tell about the windows of their models: how long one is at least, and that a prompt was cut without a word."""

from __future__ import annotations

import logging
from collections import OrderedDict

from proxy.core.discovery import MAX_NAME_LENGTH
from proxy.core.truncated import Suspicion, Truncated, suspected
from proxy.core.turn import Forwarded
from proxy.metrics import Metrics
from proxy.talk import Talk
from proxy.windows import Windows

log = logging.getLogger("warmfold.counts")

_MAX_MODELS = 4096
"""Model names come from clients: what we remember of them is bounded, in number and in length."""


class Counts:
    """Remembers of each upstream and model what is suspected, in this process."""

    def __init__(self, windows: Windows, metrics: Metrics) -> None:
        self._windows = windows
        self._metrics = metrics
        self._suspected: OrderedDict[tuple[str, str], Suspicion] = OrderedDict()

    def seen(self, talk: Talk, forwarded: Forwarded) -> None:
        """A turn came to its end, and this is what was counted."""
        upstream, model = talk.upstream.name, talk.conversation.request.model
        if forwarded.truncated is None:
            self._windows.proved(upstream, model, talk.window, forwarded.used)
        else:
            self._metrics.truncated()
            self._suspect(talk, (upstream, model), forwarded.truncated)

    def _suspect(self, talk: Talk, whose: tuple[str, str], found: Truncated) -> None:
        if len(whose[1]) > MAX_NAME_LENGTH:
            return
        before = self._suspected.get(whose)
        now = self._suspected[whose] = suspected(before, found)
        self._suspected.move_to_end(whose)
        if len(self._suspected) > _MAX_MODELS:
            self._suspected.popitem(last=False)
        if before is None:
            # No model is named: names come from clients, and may be anything.
            log.warning(
                "the upstream counts %d tokens of a prompt whose text alone is about %d: it drops the beginning of long prompts, or counts"
                " only a part of them; the estimate is used instead upstream=%s session=%s",
                found.counted,
                found.text,
                whose[0],
                talk.name,
            )
        if now.limit is not None:
            self._windows.learned(*whose, now.limit, input_only=False)
