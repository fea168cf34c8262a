"""Tenants whose checkpoints nobody uses: a client that writes its history anew each turn, first message included, has a new root each time.

Then no session and no root remembers that the last compactions were for nothing. This worker does, in bounded memory.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

LIMIT = 6
"""So many compactions in a row, of any conversations of a tenant, without one request that carried a checkpoint."""

PAUSE_S = 900.0
_MAX_TENANTS = 10_000


@dataclass(frozen=True, slots=True)
class _Idle:
    made: int
    until: float


class Economy:
    """Counts compactions that were of no use, per tenant."""

    def __init__(self) -> None:
        self._idle: OrderedDict[str, _Idle] = OrderedDict()

    def made(self, tenant: str, now: float) -> None:
        """A soft compaction made a checkpoint. `now` in seconds."""
        before = self._idle.pop(tenant, _Idle(0, 0.0))
        count = before.made + 1
        self._idle[tenant] = _Idle(count, now + PAUSE_S if count >= LIMIT else 0.0)
        if len(self._idle) > _MAX_TENANTS:
            self._idle.popitem(last=False)

    def used(self, tenant: str) -> None:
        """A request carried a checkpoint."""
        self._idle.pop(tenant, None)

    def is_paused(self, tenant: str, now: float) -> bool:
        """Whether soft compactions of this tenant wait."""
        idle = self._idle.get(tenant)
        return idle is not None and now < idle.until
