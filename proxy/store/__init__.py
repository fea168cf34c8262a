"""What the shell asks of a store. One implementation: proxy/store/redis.py, on Redis or Valkey, embedded or not.

Fail open is part of the contract: reads that fail, are slow or find something foreign return None ("no session"), writes return
False; no call takes longer than its deadline and none raises, except asyncio.CancelledError. Failures are counted by kind
(trouble.py). connect.py opens the configured one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from proxy.core.model import (
    Attempt,
    ByteHash,
    Checkpoint,
    Commit,
    Counters,
    Listed,
    Query,
    Recalled,
    Saved,
    Session,
    SessionId,
)


class Sessions(Protocol):
    """The way of a turn: one round trip before it, a batched write behind it."""

    async def recall(self, query: Query) -> Recalled | None:
        """What the store knows of this conversation; None: the store is out. Exactly one round trip.

        The session is looked for under the explicit id first, then under the tenant, at the longest prefix where a turn ended. Its
        own checkpoint comes only with a request that continues it (same id, same end); for a fork it is among the foreign ones.
        """
        ...

    async def save(self, turn: Saved) -> bool:
        """True once the turn's request header is stored, or was older than the stored one. Only new bytes travel.

        A save is newer if it has more messages, or as many and a later start; a slower, older save never overwrites.
        """
        ...

    async def tenant_secret(self) -> bytes | None:
        """32 bytes that key the tenant hash, made once and shared by all replicas; None: the store is out."""
        ...


class Checkpoints(Protocol):
    """The way of a compaction."""

    def flight(self, session: SessionId, ttl_s: float) -> AbstractAsyncContextManager[bool | None]:
        """The session's lock over all workers: True if we hold it, False if somebody else does, None if the store cannot tell.

        Renewed while held, released at the end, gone after ttl_s if we die.
        """
        ...

    async def is_in_flight(self, session: SessionId) -> bool | None:
        """Whether anybody holds that lock now; None: the store cannot tell."""
        ...

    async def offer(self, session: SessionId, checkpoint: Checkpoint) -> bool:
        """Keep a checkpoint for a session whose first turn is not stored yet: other workers that wait for this flight find it.

        It replaces one that was offered before, and is gone after ten minutes, with the session's first commit or its deletion.
        """
        ...

    async def offered(self, session: SessionId) -> Checkpoint | None:
        """The checkpoint that was offered for this session; None: there is none, or the store is out."""
        ...

    async def session(self, session: SessionId) -> Session | None:
        """The session as it is now; None: unknown, or the store is out."""
        ...

    async def bodies(self, session: SessionId, hashes: Sequence[ByteHash]) -> Mapping[ByteHash, bytes] | None:
        """The bytes by their hashes, each verified; None if any is missing or the store is out (a part of a request is no request)."""
        ...

    async def commit(self, commit: Commit) -> bool:
        """True if the checkpoint became the newest; False where the version moved, the session is gone or the store is out."""
        ...

    async def checkpoint(self, session: SessionId, id: str) -> Checkpoint | None:
        """A checkpoint by its id."""
        ...

    async def note(self, session: SessionId, attempt: Attempt, counters: Counters) -> bool:
        """Add a line to the journal; set last_turn, failures, not_before_ms and unapplied; forget a pending compaction."""
        ...

    async def journal(self, session: SessionId) -> tuple[Attempt, ...]:
        """The newest attempts first."""
        ...


class Inspection(Protocol):
    """What the admin listener asks."""

    async def ping(self) -> bool:
        """Whether the store answers now."""
        ...

    async def list(self, limit: int, cursor: str) -> Listed | None:
        """A page of sessions in no particular order; cursor "" is the start and, in the answer, the end. None also for a cursor that is none.

        A page may hold fewer than `limit`, even none, and still have a next one.
        """
        ...

    async def journal(self, session: SessionId) -> tuple[Attempt, ...]:
        """The newest attempts first."""
        ...

    async def undo(self, session: SessionId, not_before_turn: int) -> bool:
        """Tombstone for the newest checkpoint that lives; False: there is none.

        Soft compaction pauses as after one that was made: `last_turn` becomes `turns`, so the debounce holds it off until
        not_before_turn (= turns + debounce_turns).
        """
        ...

    async def delete(self, session: SessionId) -> bool:
        """Forget the session and its checkpoints. Bytes shared with other sessions of the root run out by their time to live."""
        ...

    async def delete_tenant(self, tenant: str) -> int | None:
        """Forget everything of a tenant: how many keys. The one call that may take long: each of its steps has the deadline."""
        ...


class Store(Sessions, Checkpoints, Inspection, Protocol):
    """All of it, and its end."""

    async def close(self) -> None:
        """Drain the writes and let go of the connections."""
        ...
