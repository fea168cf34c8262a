"""Checkpoints that the store has not: made before a session's first turn was stored, or while the store was away."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from proxy.core.fingerprint import checkpoint_id
from proxy.core.model import Checkpoint, SessionId

MAX_ROOTS = 256
MAX_PER_ROOT = 4


class Spare:
    """Keeps the newest of each root in this worker, in bounded memory. Whether one applies is judged by its digests, as for any other."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], tuple[Checkpoint, ...]] = OrderedDict()

    def keep(self, session: SessionId, checkpoint: Checkpoint) -> None:
        """Remember a checkpoint."""
        root = (session.tenant, session.root)
        others = (one for one in self._kept.pop(root, ()) if one.id != checkpoint.id)
        self._kept[root] = (checkpoint, *others)[:MAX_PER_ROOT]
        if len(self._kept) > MAX_ROOTS:
            self._kept.popitem(last=False)

    def of(self, session: SessionId, *, stored: bool) -> tuple[Checkpoint, ...]:
        """Those of the session's root, newest first. `stored`: the store answers, so what a request carries will be committed to the session.

        There a checkpoint belongs to one session, which shows, undoes and deletes it: one that was made for another session of the root gets
        a name of its own now, before a request carries it. While the store is away each turn is a session of its own, and names stay.
        """
        kept = self._kept.get((session.tenant, session.root), ())
        return tuple(_owned(one, str(session)) for one in kept) if stored else kept

    def own(self, session: SessionId) -> Checkpoint | None:
        """The newest that was made for this very session: it applies though the preamble has changed since, as a clock's does."""
        kept = self._kept.get((session.tenant, session.root), ())
        return next((one for one in kept if one.session == str(session)), None)

    def drop(self, session: SessionId, checkpoint: Checkpoint) -> None:
        """Forget it, whosever it was, and what the session had before it: the store has it now, and an undo must find nothing left here."""
        root = (session.tenant, session.root)
        left = tuple(one for one in self._kept.pop(root, ()) if not _is_replaced(one, checkpoint))
        if left:
            self._kept[root] = left


def _owned(checkpoint: Checkpoint, session: str) -> Checkpoint:
    if checkpoint.session == session:
        return checkpoint
    name = checkpoint_id(session, checkpoint.ref.generation, checkpoint.text)
    return replace(checkpoint, session=session, ref=replace(checkpoint.ref, id=name))


def _is_replaced(kept: Checkpoint, by: Checkpoint) -> bool:
    if kept.ref.digest_k == by.ref.digest_k and kept.frame == by.frame:
        return True
    return kept.session == by.session and kept.made_at_ms <= by.made_at_ms
