"""The store on Redis or Valkey: what each call asks of the server, and what its replies mean. Layout: docs/store.md.

What must happen at one moment happens in a script (proxy/store/lua), inside the slot of one root.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, TypeVar

from proxy.core import pressure
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
from proxy.store import keys, lock, scan, scripts, values
from proxy.store.keys import Keys
from proxy.store.line import Line
from proxy.store.scripts import Script
from proxy.store.trouble import StoreUnavailable, Trouble
from proxy.store.values import Unreadable
from proxy.store.writer import Lifetimes, Writer
from proxy.tasks import Tasks

log = logging.getLogger("warmfold.store")

JOURNAL_LINES = 50
KEPT_REFS = 8
"""References that a session keeps to its own checkpoints, and a prefix to those that end there."""

UNAPPLIED_MS = pressure.UNAPPLIED_PAUSE_S * 1000
"""For how long a checkpoint that no request carried counts against further ones of its root."""

MOST_FOREIGN = 4
MAX_MESSAGES = 32_768
"""Longer conversations have no sessions. A client chooses the length; a request of 64 MiB could hold millions of empty messages."""

MAX_WALK = 4096
"""Prefixes at which a recall looks for a session, and for a checkpoint, from the request's end on: some 2 ms of the server's time each."""

MAX_PAGE = 1000
_SECRET_BYTES = 32
_CHECKED_AT_ONCE = 1024 * 1024
"""Hashing a megabyte takes about a millisecond, in which no other turn moves."""

_DRAIN_S = 5.0

OFFERED_MS = 600_000
"""For how long a checkpoint waits for its session's first turn to be stored: longer than most answers take, and no longer than needed,
since the text cannot be deleted by a session's name before the session is there."""

P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D")
AtEnd = Callable[[], Awaitable[None]]
_Method = Callable[Concatenate["RedisStore", P], Awaitable[R]]


def fails_open(
    otherwise: D,
) -> Callable[[_Method[P, R]], Callable[Concatenate[RedisStore, P], Coroutine[Any, Any, R | D]]]:
    """A method that returns `otherwise` where the store is out, or what it holds cannot be read. Only CancelledError passes."""

    def guarding(method: _Method[P, R]) -> Callable[Concatenate[RedisStore, P], Coroutine[Any, Any, R | D]]:
        async def guarded(store: RedisStore, /, *args: P.args, **kwargs: P.kwargs) -> R | D:
            try:
                return await method(store, *args, **kwargs)
            except StoreUnavailable:
                return otherwise
            except Unreadable as unreadable:
                store.count(unreadable.trouble)
                return otherwise
            except Exception as error:
                # The last line of fail-open: a fault of ours must not cost the client its turn.
                store.count(Trouble.INTERNAL)
                log.error("store call failed call=%s error=%s", guarded.__name__, type(error).__name__)
                return otherwise

        update_wrapper(guarded, method)
        return guarded

    return guarding


async def _nothing() -> None:
    return


class RedisStore:
    """`proxy.store.Store` on one server. `tasks` owns what runs behind the calls and is ours alone; `at_end` comes after the last command."""

    def __init__(self, line: Line, tasks: Tasks, lifetimes: Lifetimes, at_end: AtEnd = _nothing) -> None:
        self.count = line.count
        self._at_end = at_end
        self._line = line
        self._tasks = tasks
        self._locks = Tasks()
        self._lifetimes = lifetimes
        self._writer = Writer(line, tasks, lifetimes)

    # the way of a turn

    @fails_open(None)
    async def recall(self, query: Query) -> Recalled | None:
        """What is known of a conversation, in one round trip: see lua/recall.lua."""
        if len(query.chain) > MAX_MESSAGES:
            self.count(Trouble.TOO_LONG)
            return Recalled(None, 0)
        of = Keys.of(query.tenant, query.root)
        args = (keys.encoded(query.explicit), b"".join(query.chain), MOST_FOREIGN, MAX_WALK)
        found, own, foreign, faults, unapplied = await self._run(scripts.RECALL, of, args, self._line.short_s)
        self._count_all(faults)
        readable = (self._checkpoint(of, value) for value in foreign)
        others = tuple(one for one in readable if one is not None)
        if found is None:
            return Recalled(None, 0, None, others, unapplied)
        lineage, matched, record, entries = found
        session = self._session(SessionId(query.tenant, query.root, lineage.decode()), record, entries)
        if session is None:
            return Recalled(None, 0, None, others, unapplied)
        mine = self._checkpoint(of, own) if own is not None else None
        return Recalled(session, matched, mine, others, unapplied)

    @fails_open(False)
    async def save(self, turn: Saved) -> bool:
        """See writer.py."""
        if turn.length > MAX_MESSAGES:
            self.count(Trouble.TOO_LONG)
            return False
        return await self._writer.save(turn)

    @fails_open(None)
    async def tenant_secret(self) -> bytes | None:
        """The secret: whoever comes first makes it, all read it."""
        made = secrets.token_bytes(_SECRET_BYTES)
        _, secret = await self._line.batch([("SET", keys.SECRET, made, "NX"), ("GET", keys.SECRET)], self._line.short_s)
        if not isinstance(secret, bytes) or len(secret) != _SECRET_BYTES:
            raise Unreadable(Trouble.TYPE)
        return secret

    # the way of a compaction

    def flight(self, session: SessionId, ttl_s: float) -> AbstractAsyncContextManager[bool | None]:
        """The session's lock: see lock.py."""
        return lock.held(self._line, self._locks, session, ttl_s)

    @fails_open(None)
    async def is_in_flight(self, session: SessionId) -> bool | None:
        """Whether anybody holds the session's lock."""
        return await lock.is_taken(self._line, session)

    @fails_open(False)
    async def offer(self, session: SessionId, checkpoint: Checkpoint) -> bool:
        """One value beside the session, which may not be there yet; the newest replaces one before it."""
        of = Keys.around(session)
        value = values.checkpoint_value(of.owner, checkpoint)
        await self._line.command(("SET", of.offer(session.lineage), value, "PX", OFFERED_MS), self._line.long_s)
        return True

    @fails_open(None)
    async def offered(self, session: SessionId) -> Checkpoint | None:
        """What was offered; a checkpoint of another session is none."""
        of = Keys.around(session)
        value = await self._line.command(("GET", of.offer(session.lineage)), self._line.long_s)
        if value is None:
            return None
        found = values.checkpoint(of.owner, value)
        if found.session != str(session):
            raise Unreadable(Trouble.IDENTITY)
        return found

    @fails_open(None)
    async def session(self, session: SessionId) -> Session | None:
        """Record and entries of one moment."""
        reply = await self._run(scripts.SESSION, Keys.around(session), (session.lineage,), self._line.long_s)
        return self._read_session(session, reply)

    @fails_open(None)
    async def bodies(self, session: SessionId, hashes: Sequence[ByteHash]) -> Mapping[ByteHash, bytes] | None:
        """All of them or none, each checked against its hash."""
        if not hashes:
            return {}
        of = Keys.around(session)
        names = tuple(dict.fromkeys(hashes))
        found = await self._line.command(("MGET", *map(of.body, names)), self._line.long_s)
        if any(data is None for data in found):
            return None
        verified, unchecked = {}, 0
        for name, data in zip(names, found, strict=True):
            verified[name] = values.verified(name, data)
            unchecked += len(data)
            if unchecked > _CHECKED_AT_ONCE:
                unchecked = 0
                await asyncio.sleep(0)  # other turns go first
        return verified

    @fails_open(False)
    async def commit(self, commit: Commit) -> bool:
        """Compare and set, in one script; why it lost is counted."""
        of, lineage, checkpoint = Keys.around(commit.session), commit.session.lineage, commit.checkpoint
        reference = values.packed_ref(checkpoint.ref, lineage)
        value = values.checkpoint_value(of.owner, checkpoint)
        args = (lineage, commit.version, reference, value, self._lifetimes.checkpoint_ms, KEPT_REFS, UNAPPLIED_MS)
        verdict = await self._run(scripts.COMMIT, of, args, self._line.long_s)
        if verdict != b"committed":
            self.count(Trouble(verdict.decode()))
        return bool(verdict == b"committed")

    @fails_open(None)
    async def checkpoint(self, session: SessionId, id: str) -> Checkpoint | None:
        """A checkpoint of the session's root by its id, whoever made it; a buried one says so in its reference."""
        of = Keys.around(session)
        value = await self._line.command(("GET", of.checkpoint(id)), self._line.long_s)
        return None if value is None else values.checkpoint(of.owner, value, id)

    @fails_open(False)
    async def note(self, session: SessionId, attempt: Attempt, counters: Counters) -> bool:
        """A line of the journal, and what limits the next compaction."""
        of = Keys.around(session)
        line = values.attempt_value(of.owner, session.lineage, attempt)
        last = "" if counters.last_turn is None else counters.last_turn
        limits = (last, counters.failures, counters.not_before_ms, counters.unapplied)
        args = (session.lineage, line, JOURNAL_LINES, self._lifetimes.session_ms, *limits)
        return bool(await self._run(scripts.NOTE, of, args, self._line.long_s))

    # what an operator asks

    @fails_open(False)
    async def ping(self) -> bool:
        """Whether the server answers; False at once while the line is paused after a failure."""
        return bool(await self._line.command(("PING",), self._line.long_s))

    @fails_open(None)
    async def list(self, limit: int, cursor: str) -> Listed | None:
        """A page; shorter than `limit` where the walk takes long, so only an empty cursor means the end."""
        start = scan.Cursor.parse(cursor)
        if start is None:
            return None
        limit = max(1, min(limit, MAX_PAGE))
        names, after = await scan.page(self._line, keys.SESSIONS, limit, start, self._line.long_s)
        ids = [id_ for id_ in map(keys.session_of, names) if id_ is not None]
        calls = [scripts.SESSION.call((Keys.around(id_).base,), (id_.lineage,)) for id_ in ids]
        replies = await self._line.batch(calls, self._line.long_s)
        found = [self._read_session(id_, reply) for id_, reply in zip(ids, replies, strict=True)]
        return Listed(tuple(one for one in found if one is not None), after)

    @fails_open(())
    async def journal(self, session: SessionId) -> tuple[Attempt, ...]:
        """The newest first; a line that cannot be read is left out."""
        of = Keys.around(session)
        lines = await self._line.command(("LRANGE", of.journal(session.lineage), 0, -1), self._line.long_s)
        found = (self._readable(values.attempt, of.owner, session.lineage, line) for line in lines)
        return tuple(one for one in found if one is not None)

    @fails_open(False)
    async def undo(self, session: SessionId, not_before_turn: int) -> bool:
        """Buries the newest living checkpoint. The pause is the debounce, which starts again at `turns`: that is when
        `not_before_turn` comes to be reached.
        """
        return bool(await self._run(scripts.UNDO, Keys.around(session), (session.lineage,), self._line.long_s))

    @fails_open(False)
    async def delete(self, session: SessionId) -> bool:
        """The session, its checkpoints, and what of it waits to be written."""
        self._writer.forget(lambda waiting: waiting == session)
        return bool(await self._run(scripts.DELETE, Keys.around(session), (session.lineage,), self._line.long_s))

    @fails_open(None)
    async def delete_tenant(self, tenant: str) -> int | None:
        """All keys of a tenant. Each step has the deadline, not the whole: what is to be forgotten must not be forgotten by half."""
        if not keys.is_name(tenant):
            return 0
        self._writer.forget(lambda waiting: waiting.tenant == tenant)
        gone = 0
        async for names in scan.every(self._line, keys.of_tenant(tenant)):
            gone += await self._line.command(("UNLINK", *names), self._line.long_s)
        return gone

    async def close(self) -> None:
        """Write what waits, at most 5 s long, then let go of the locks, the connections, and of the server if it is ours."""
        await self._tasks.drain(_DRAIN_S)
        await self._locks.drain(self._line.short_s)
        await self._line.close()
        await self._at_end()

    # replies to values

    async def _run(self, script: Script, of: Keys, args: Sequence[bytes | str | int], deadline_s: float) -> Any:
        return await self._line.run(script, (of.base,), args, deadline_s)

    def _read_session(self, id: SessionId, reply: Any) -> Session | None:
        if isinstance(reply, Exception):
            self.count(Trouble.REFUSED)
            return None
        record, entries, faults = reply
        self._count_all(faults)
        return None if record is None else self._session(id, record, entries)

    def _session(self, id: SessionId, record: Sequence[bytes | None], entries: bytes) -> Session | None:
        return self._readable(values.session, id, record, entries)

    def _checkpoint(self, of: Keys, value: bytes) -> Checkpoint | None:
        return self._readable(values.checkpoint, of.owner, value)

    def _readable(self, read: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """A value, or None, counted, where it cannot be read."""
        try:
            return read(*args, **kwargs)
        except Unreadable as unreadable:
            self.count(unreadable.trouble)
            return None

    def _count_all(self, faults: Iterable[bytes]) -> None:
        for fault in faults:
            self.count(Trouble(fault.decode()))
