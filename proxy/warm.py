"""The warm request of a session as the store kept it."""

from __future__ import annotations

from proxy.core import turn
from proxy.core.model import Session
from proxy.core.plan import Warm
from proxy.store import Checkpoints


async def stored_warm(store: Checkpoints, session: Session) -> Warm | None:
    """The request header made whole again, byte for byte; None where a part is gone, or the store is out."""
    if session.turn is None:
        return None
    applied = None
    if session.turn.applied is not None:
        applied = await store.checkpoint(session.id, session.turn.applied)
        if applied is None or applied.ref.dead:
            return None
    bodies = await store.bodies(session.id, turn.needed(session, applied))
    return None if bodies is None else turn.warm_from_store(session, applied, bodies)
