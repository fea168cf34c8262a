"""Checkpoints that the store has not: made before a session's first turn was stored, or while the store was away."""

from __future__ import annotations

from collections import OrderedDict

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
        self._kept[root] = (checkpoint, *self._kept.pop(root, ()))[:MAX_PER_ROOT]
        if len(self._kept) > MAX_ROOTS:
            self._kept.popitem(last=False)

    def of(self, tenant: str, root: str) -> tuple[Checkpoint, ...]:
        """Those of a root, newest first."""
        return self._kept.get((tenant, root), ())

    def drop(self, session: SessionId, id_: str) -> None:
        """Forget one: the store has it now."""
        root = (session.tenant, session.root)
        left = tuple(one for one in self._kept.pop(root, ()) if one.id != id_)
        if left:
            self._kept[root] = left
