"""Tenants whose checkpoints nobody uses: a client that writes its history anew each turn, first message included, has a new root each time.

Then no session and no root remembers that the last compactions were for nothing. This worker does, in bounded memory.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

FRESH_TURNS = 3
"""A conversation of so few turns has not shown yet that its history stays as it is."""

LIMIT = 6
"""So many fresh conversations in a row with a checkpoint, and none of them with a later request that carried it."""

PAUSE_S = 900.0
_MAX_TENANTS = 10_000
_MAX_SESSIONS = 4 * LIMIT
"""Per tenant: conversations that run side by side may all be compacted before the first of them goes on."""


@dataclass(frozen=True, slots=True)
class _Idle:
    sessions: tuple[str, ...]
    until: float


class Economy:
    """Counts, per tenant, the fresh conversations whose checkpoint was of no use.

    Only those: conversations that go on and use theirs say nothing about a client that writes every history anew, nor the other way round.
    """

    def __init__(self) -> None:
        self._idle: OrderedDict[str, _Idle] = OrderedDict()

    def made(self, tenant: str, session: str, turns: int, now: float) -> None:
        """A call made a checkpoint for a session of so many turns. `now` in seconds."""
        if turns > FRESH_TURNS:
            return
        before = self._idle.pop(tenant, _Idle((), 0.0))
        sessions = (*(one for one in before.sessions if one != session), session)[-_MAX_SESSIONS:]
        self._idle[tenant] = _Idle(sessions, now + PAUSE_S if len(sessions) >= LIMIT else 0.0)
        if len(self._idle) > _MAX_TENANTS:
            self._idle.popitem(last=False)

    def used(self, tenant: str, session: str) -> None:
        """A later request carried a checkpoint of this session."""
        idle = self._idle.get(tenant)
        if idle is not None and session in idle.sessions:
            del self._idle[tenant]

    def is_paused(self, tenant: str, turns: int, now: float) -> bool:
        """Whether a conversation of this tenant with so many turns is not compacted, unless it must be."""
        idle = self._idle.get(tenant)
        return turns <= FRESH_TURNS and idle is not None and now < idle.until
