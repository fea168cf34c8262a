"""What the counts of upstreams tell about their models: how long a window is at least, that a prompt was cut without a word, and how far our
estimates are off.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from proxy.bounded import remember
from proxy.core import conversation as conversations
from proxy.core import tokens
from proxy.core.discovery import MAX_NAME_LENGTH
from proxy.core.model import Session
from proxy.core.truncated import Suspicion, Truncated, suspected
from proxy.core.turn import Forwarded
from proxy.metrics import Metrics
from proxy.talk import Talk
from proxy.windows import Windows

log = logging.getLogger("warmfold.counts")

_MAX_MODELS = 4096
"""Model names come from clients: what we remember of them is bounded, in number and in length."""


_LEARNING_TOKENS = 1024
"""A prompt that is estimated at less teaches nothing: there a template or an image decides how far the estimate is off."""
_NEWEST = 0.25
"""The share of the newest count in what is known of a model: one odd conversation does not speak for all of them."""


class Counts:
    """Remembers of each upstream and model what is suspected, and how far estimates are off, in this process."""

    def __init__(self, windows: Windows, metrics: Metrics) -> None:
        self._windows = windows
        self._metrics = metrics
        self._suspected: OrderedDict[tuple[str, str], Suspicion] = OrderedDict()
        self._factors: OrderedDict[tuple[str, str], float] = OrderedDict()

    def factor(self, upstream: str, model: str, known: Session | None) -> float:
        """How to correct estimates of a session's next prompt: as this model's count of its last one says, else as counts of other
        conversations with the model do; 1.0 where there are none.
        """
        turn = known.turn if known is not None else None
        if turn is not None and turn.usage.prompt is not None and (turn.upstream, turn.model) == (upstream, model):
            return conversations.factor(known)
        return self._factors.get((upstream, model), 1.0)

    def seen(self, talk: Talk, forwarded: Forwarded) -> None:
        """A turn came to its end, and this is what was counted."""
        upstream, model = talk.upstream.name, talk.conversation.request.model
        if forwarded.truncated is None:
            self._windows.proved(upstream, model, talk.window, forwarded.used)
            self._windows.refuted(upstream, model, talk.window, forwarded.usage.prompt, tenant=talk.lineage.id.tenant)
            self._learn((upstream, model), forwarded)
        else:
            self._metrics.truncated()
            self._suspect(talk, (upstream, model), forwarded.truncated)

    def _learn(self, whose: tuple[str, str], forwarded: Forwarded) -> None:
        if forwarded.usage.prompt is None or forwarded.weight < _LEARNING_TOKENS or len(whose[1]) > MAX_NAME_LENGTH:
            return
        new = tokens.calibrate(forwarded.usage.prompt, forwarded.weight)
        old = self._factors.get(whose, new)
        remember(self._factors, whose, old + (new - old) * _NEWEST, _MAX_MODELS)

    def _suspect(self, talk: Talk, whose: tuple[str, str], found: Truncated) -> None:
        if len(whose[1]) > MAX_NAME_LENGTH:
            return
        before = self._suspected.get(whose)
        now = suspected(before, found)
        remember(self._suspected, whose, now, _MAX_MODELS)
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
            self._windows.learned(*whose, now.limit, input_only=False, tenant=talk.lineage.id.tenant)
