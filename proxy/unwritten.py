"""Turns on their way into the store: under load a conversation's next request may come before its last turn is written."""

from __future__ import annotations

from dataclasses import replace

from proxy.core import turn
from proxy.core.conversation import Conversation
from proxy.core.model import Digest, Recalled, Saved, Session
from proxy.store import Sessions


class Unwritten:
    """Saves turns, and knows the sessions as the store will have them meanwhile."""

    def __init__(self, store: Sessions) -> None:
        self._store = store
        self._saving: dict[Digest, Session] = {}

    async def save(self, saved: Saved, conversation: Conversation, known: Session | None) -> bool:
        """True once the turn is stored. `known`: the session before it."""
        session = turn.as_stored(saved, conversation, known)
        self._saving[saved.end] = session
        try:
            return await self._store.save(saved)
        finally:
            if self._saving.get(saved.end) is session:
                del self._saving[saved.end]

    def found(self, recalled: Recalled | None, found: Conversation, known: Conversation | None) -> Recalled | None:
        """What the store knows, or will know once it has written this conversation's last turn: under load the next one may be faster."""
        if recalled is None or recalled.session is not None or known is None:
            return recalled
        session = self._saving.get(known.chain[-1])
        if session is None or session.length >= len(found.chain):
            return recalled
        if found.chain[session.length - 1] != known.chain[-1]:
            return recalled  # its last message was edited
        return replace(recalled, session=session, matched=session.length)
