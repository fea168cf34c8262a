"""Parts we own, for tests that would otherwise need a server. They keep the contracts of the protocols they stand for."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from proxy.core.model import (
    Attempt,
    ByteHash,
    Checkpoint,
    CheckpointRef,
    Commit,
    Counters,
    Digest,
    Listed,
    Query,
    Recalled,
    Saved,
    Session,
    SessionId,
)


class MemoryStore:
    """A store in this process that satisfies `proxy.store.Store`. Nothing ever expires.

    `down = True` makes every call answer as an unreachable store does. `calls` names the calls so far, in order.
    `clock_ms` is what it writes as created and touched; a test that cares sets it.
    """

    def __init__(self, clock_ms: int = 0) -> None:
        self.down = False
        self.clock_ms = clock_ms
        self.calls: list[str] = []
        self._sessions: dict[SessionId, Session] = {}
        self._checkpoints: dict[tuple[SessionId, str], Checkpoint] = {}
        self._journals: dict[SessionId, list[Attempt]] = {}
        self._bodies: dict[tuple[str, str], dict[ByteHash, bytes]] = {}
        self._flights: set[SessionId] = set()
        self._secret: bytes | None = None

    # Sessions

    async def recall(self, query: Query) -> Recalled | None:
        if self._out("recall"):
            return None
        of_root = [one for one in self._sessions.values() if (one.id.tenant, one.id.root) == (query.tenant, query.root)]
        session, matched = _longest([one for one in of_root if one.explicit == query.explicit], query.chain)
        if session is None:
            session, matched = _longest(of_root, query.chain)
        own = next(iter(self._applicable([session] if session else [], query.chain)), None)
        if own is not None and session is not None and session.length == matched:
            return Recalled(session, matched, own)
        others = self._applicable([one for one in of_root if one is not session], query.chain)
        by_preamble: dict[Digest, Checkpoint] = {}
        for other in sorted(others, key=lambda one: one.k, reverse=True):
            by_preamble.setdefault(other.ref.preamble, other)
        return Recalled(session, matched, own, tuple(by_preamble.values())[:4])

    async def save(self, turn: Saved) -> bool:
        if self._out("save"):
            return False
        known = self._sessions.get(turn.session)
        before = known.entries if known else ()
        if turn.entries_from > len(before):
            return False  # the entries it builds on are gone: half a request header is none
        if turn.entries_from and before[turn.entries_from - 1].chain != turn.base:
            return False  # or are others than it thinks
        self._root(turn.session).update(turn.bodies)
        if known is None:
            counters = replace(turn.inherit, turns=turn.inherit.turns + 1)
            known = Session(turn.session, turn.explicit, None, (), 0, counters, 0, 0, (), None, 0, self.clock_ms)
        elif known.turn and (turn.length, turn.turn.started_ms) <= (known.length, known.turn.started_ms):
            return True  # a slower, older save
        else:
            counters = replace(known.counters, turns=known.counters.turns + 1)
        entries = (*before[: turn.entries_from], *turn.entries)
        assert len(entries) == turn.length, "a saved turn has an entry for each of its messages"
        assert not entries or entries[-1].chain == turn.end, "the chain of the last entry is the session's end"
        self._sessions[turn.session] = replace(
            known,
            explicit=turn.explicit,
            turn=turn.turn,
            entries=entries,
            bodies_from=turn.bodies_from,
            counters=replace(counters, unapplied=0) if turn.applied else counters,
            pending=turn.pending,
            touched_ms=self.clock_ms,
        )
        return True

    async def tenant_secret(self) -> bytes | None:
        if self._out("tenant_secret"):
            return None
        self._secret = self._secret or secrets.token_bytes(32)
        return self._secret

    # Checkpoints

    @asynccontextmanager
    async def flight(self, session: SessionId, ttl_s: float) -> AsyncIterator[bool]:
        if self._out("flight") or session in self._flights:
            yield False
            return
        self._flights.add(session)
        try:
            yield True
        finally:
            self._flights.discard(session)

    async def session(self, session: SessionId) -> Session | None:
        return None if self._out("session") else self._sessions.get(session)

    async def bodies(self, session: SessionId, hashes: Sequence[ByteHash]) -> Mapping[ByteHash, bytes] | None:
        if self._out("bodies"):
            return None
        kept = self._root(session)
        return {one: kept[one] for one in hashes} if all(one in kept for one in hashes) else None

    async def commit(self, commit: Commit) -> bool:
        known = None if self._out("commit") else self._sessions.get(commit.session)
        ref = commit.checkpoint.ref
        if known is None or known.version != commit.version or ref.generation <= known.generation:
            return False
        self._checkpoints[commit.session, ref.id] = commit.checkpoint
        self._sessions[commit.session] = replace(
            known, version=known.version + 1, generation=ref.generation, checkpoints=(ref, *known.checkpoints)
        )
        return True

    async def checkpoint(self, session: SessionId, id: str) -> Checkpoint | None:
        return None if self._out("checkpoint") else self._checkpoints.get((session, id))

    async def note(self, session: SessionId, attempt: Attempt, counters: Counters) -> bool:
        known = None if self._out("note") else self._sessions.get(session)
        if known is None:
            return False
        self._journals.setdefault(session, []).insert(0, attempt)
        # `turns` is the turns' own: one may have been saved while the compaction ran.
        self._sessions[session] = replace(known, counters=replace(counters, turns=known.counters.turns), pending=None)
        return True

    # Inspection

    async def ping(self) -> bool:
        return not self._out("ping")

    async def list(self, limit: int, cursor: str) -> Listed | None:
        if self._out("list"):
            return None
        rest = sorted((one for one in self._sessions.values() if str(one.id) > cursor), key=lambda one: str(one.id))
        return Listed(tuple(rest[:limit]), str(rest[limit - 1].id) if len(rest) > limit else "")

    async def journal(self, session: SessionId) -> tuple[Attempt, ...]:
        return () if self._out("journal") else tuple(self._journals.get(session, ()))

    async def undo(self, session: SessionId, not_before_turn: int) -> bool:
        known = None if self._out("undo") else self._sessions.get(session)
        living = [one for one in known.checkpoints if not one.dead] if known else []
        if known is None or not living:
            return False
        newest = max(living, key=lambda one: one.generation)
        buried = replace(newest, dead=True)
        self._sessions[session] = replace(
            known,
            version=known.version + 1,
            checkpoints=tuple(buried if one is newest else one for one in known.checkpoints),
            # The debounce counts from here: `not_before_turn` is that many turns ahead.
            counters=replace(known.counters, last_turn=known.counters.turns),
        )
        self._checkpoints[session, newest.id] = replace(self._checkpoints[session, newest.id], ref=buried)
        return True

    async def delete(self, session: SessionId) -> bool:
        return not self._out("delete") and self._forget(session) > 0

    async def delete_tenant(self, tenant: str) -> int | None:
        if self._out("delete_tenant"):
            return None
        sessions = sum(self._forget(one) for one in [one for one in self._sessions if one.tenant == tenant])
        bodies = sum(len(self._bodies.pop(one)) for one in [one for one in self._bodies if one[0] == tenant])
        return sessions + bodies

    async def close(self) -> None:
        self.calls.append("close")

    # what the calls share

    def _out(self, call: str) -> bool:
        self.calls.append(call)
        return self.down

    def _root(self, session: SessionId) -> dict[ByteHash, bytes]:
        return self._bodies.setdefault((session.tenant, session.root), {})

    def _forget(self, session: SessionId) -> int:
        """How many keys went."""
        if self._sessions.pop(session, None) is None:
            return 0
        gone = [one for one in self._checkpoints if one[0] == session]
        for one in gone:
            del self._checkpoints[one]
        return 1 + len(gone) + (self._journals.pop(session, None) is not None)

    def _applicable(self, sessions: Sequence[Session], chain: Sequence[Digest]) -> Sequence[Checkpoint]:
        """The checkpoints of these sessions whose covered and seen prefixes lie on the chain, newest first."""
        fitting = [
            self._checkpoints[one.id, ref.id]
            for one in sessions
            for ref in one.checkpoints
            if not ref.dead and _lies_on(ref, chain)
        ]
        return sorted(fitting, key=lambda one: (one.made_at_ms, one.ref.generation), reverse=True)


def _lies_on(ref: CheckpointRef, chain: Sequence[Digest]) -> bool:
    return all(
        0 < length <= len(chain) and chain[length - 1] == digest
        for length, digest in ((ref.k, ref.digest_k), (ref.seen_len, ref.seen))
    )


def _longest(sessions: Sequence[Session], chain: Sequence[Digest]) -> tuple[Session | None, int]:
    """The session that knows the longest prefix of the chain, and its length; among equals the one that ends there, then the newest."""
    best: Session | None = None
    best_rank = (0, False, 0)
    for one in sessions:
        matched = _common(one, chain)
        rank = (matched, one.length == matched, one.turn.finished_ms if one.turn else 0)
        if matched and (best is None or rank > best_rank):
            best, best_rank = one, rank
    return best, best_rank[0]


def _common(session: Session, chain: Sequence[Digest]) -> int:
    matched = 0
    for entry, digest in zip(session.entries, chain, strict=False):
        if entry.chain != digest:
            break
        matched += 1
    return matched
