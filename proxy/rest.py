"""Upstreams that said that they have had enough: a 429 or 503 to one compaction is an answer to all of that tenant's.

Each conversation backs off on its own as well, but the next one would ask at once, and take from the client's own quota. This worker remembers, in
bounded memory.
"""

from __future__ import annotations

from collections import OrderedDict

_MAX_REMEMBERED = 10_000


class Rest:
    """Until when nobody is asked for a summary, per upstream and tenant."""

    def __init__(self) -> None:
        self._until: OrderedDict[tuple[str, str], float] = OrderedDict()

    def begin(self, upstream: str, tenant: str, until: float) -> None:
        """The upstream refused a compaction of this tenant. `until` in seconds of the same clock as `now` below."""
        self._until[upstream, tenant] = max(until, self._until.pop((upstream, tenant), 0.0))
        if len(self._until) > _MAX_REMEMBERED:
            self._until.popitem(last=False)

    def is_on(self, upstream: str, tenant: str, now: float) -> bool:
        """Whether its compactions wait."""
        return now < self._until.get((upstream, tenant), 0.0)
