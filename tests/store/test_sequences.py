"""Any sequence of turns, commits, undos and deletions by two workers leaves what a few lines of Python say that it leaves.

A generation is never used twice, what a session's checkpoints cover grows but for undo, a commit that is based on something older is
refused, and a request finds just the checkpoints whose covered and seen prefix is its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from proxy.core.model import Checkpoint, CheckpointRef, Counters, Digest, Pending, Trigger
from proxy.store import Store
from proxy.store.connect import open_store

from .builders import Client, Settings, Troubles, attempt

T = TypeVar("T")

EXPLICIT = {"one": "", "two": "", "three": "x", "four": "y"}
"""Lineages, and the id that their client gives."""

LINEAGES = st.sampled_from(tuple(EXPLICIT))
WORKERS = st.integers(0, 1)
PREAMBLES = (b"p1", b"p2")
KEPT, MOST_FOREIGN = 8, 4
ROOTS = count()


def _message(at: int, variant: int) -> bytes:
    return f'{{"role":"{("user", "assistant")[at % 2]}","content":"{at} {variant}"}}'.encode()


PATHS = st.lists(st.sampled_from((0, 0, 0, 1)), min_size=1, max_size=14)
"""A conversation by its turnings: equal beginnings are equal prefixes."""


@dataclass
class Kept:
    """What a store keeps of a session."""

    chain: tuple[Digest, ...]
    started_ms: int
    turns: int
    last_turn: int | None
    pending: Pending | None
    version: int = 0
    generation: int = 0
    refs: list[CheckpointRef] = field(default_factory=list)


class Sequences(RuleBasedStateMachine):
    """Two workers at one server, and beside it the same in Python."""

    def __init__(self, runner: asyncio.Runner, stores: tuple[Store, Store]) -> None:
        super().__init__()
        self._runner = runner
        self._stores = stores
        self.root = f"root{next(ROOTS)}"
        self.sessions: dict[str, Kept] = {}
        self.ends: dict[tuple[str, Digest], str] = {}
        self.covering: dict[Digest, list[tuple[CheckpointRef, str]]] = {}
        self.texts: dict[str, Checkpoint] = {}
        self.unapplied = 0
        self.now_ms = 1000
        self.used: dict[str, set[int]] = {}

    def _run(self, call: Awaitable[T]) -> T:
        async def waited() -> T:
            return await call

        return self._runner.run(waited())

    def _client(self, lineage: str, path: list[int]) -> Client:
        messages = tuple(_message(at, variant) for at, variant in enumerate(path))
        return Client(messages, lineage=lineage, explicit=EXPLICIT[lineage], root=self.root)

    # What workers do

    @rule(
        lineage=LINEAGES,
        path=PATHS,
        worker=WORKERS,
        late=st.sampled_from((0, 0, 0, 1500)),
        pending=st.booleans(),
        carried=st.integers(0, 3),
    )
    def saves_a_turn(self, lineage: str, path: list[int], worker: int, late: int, pending: bool, carried: int) -> None:
        self._saves(lineage, path, worker, late=late, pending=pending, carried=carried)

    @rule(lineage=LINEAGES, worker=WORKERS, more=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def goes_on(self, lineage: str, worker: int, more: list[int]) -> None:
        path = self._path(lineage) if lineage in self.sessions else []
        self._saves(lineage, [*path, *more], worker, late=0, pending=False, carried=0)

    @rule(lineage=LINEAGES, worker=WORKERS, times=st.integers(1, 5), seen=st.integers(0, 2))
    def goes_on_and_is_compacted(self, lineage: str, worker: int, times: int, seen: int) -> None:
        """Turn by turn, each as it should be."""
        for _ in range(times):
            self.goes_on(lineage, worker, [0, 0])
            self._commits(lineage, worker, 0, 1, len(self.sessions[lineage].chain) - 2, seen, PREAMBLES[0])

    def _saves(self, lineage: str, path: list[int], worker: int, *, late: int, pending: bool, carried: int) -> None:
        client, store, kept = self._client(lineage, path), self._stores[worker], self.sessions.get(lineage)
        self.now_ms += 1000
        started = self.now_ms - late
        waits = Pending(Trigger.SOFT, started) if pending else None
        refs = [ref for ref in kept.refs if not ref.dead] if kept else []
        applied = refs[carried % len(refs)].id if refs and carried < 2 else None
        known = self._run(store.session(client.id))
        saved = client.saved(
            known, started_ms=started, pending=waits, applied=applied, inherit=Counters(turns=5, last_turn=3)
        )
        assert self._run(store.save(saved))
        length = len(client.chain)
        if kept and (length < len(kept.chain) or (length == len(kept.chain) and started < kept.started_ms)):
            return  # slower than a newer one: it changes nothing
        if kept is None:
            kept = self.sessions[lineage] = Kept((), 0, 5, 3, None)
        kept.chain, kept.started_ms, kept.pending = client.chain, started, waits
        kept.turns += 1
        self.ends[client.explicit, client.chain[-1]] = lineage
        if client.explicit:
            holder = self.ends.get(("", client.chain[-1]))
            if holder not in self.sessions:
                self.ends["", client.chain[-1]] = lineage
        if applied:
            self.unapplied = 0

    @precondition(lambda self: self.sessions)
    @rule(
        lineage=LINEAGES,
        worker=WORKERS,
        based_on=st.sampled_from((0, 0, 0, 0, -1, 1)),
        generation=st.sampled_from((1, 1, 1, 1, 0, 2)),
        behind=st.integers(0, 8),
        seen=st.integers(0, 4),
        preamble=st.sampled_from(PREAMBLES),
    )
    def commits(
        self, lineage: str, worker: int, based_on: int, generation: int, behind: int, seen: int, preamble: bytes
    ) -> None:
        if lineage in self.sessions:
            k = len(self.sessions[lineage].chain) - behind
            self._commits(lineage, worker, based_on, generation, k, seen, preamble)

    def _commits(
        self, lineage: str, worker: int, based_on: int, generation: int, k: int, seen: int, preamble: bytes
    ) -> None:
        kept = self.sessions[lineage]
        k = max(1, min(k, len(kept.chain)))
        seen = min(len(kept.chain), k + seen)
        path = self._path(lineage)
        client = self._client(lineage, path)
        made = client.checkpoint(
            k,
            generation=kept.generation + generation,
            id=f"c{len(self.texts)}{lineage}",
            seen_len=seen,
            preamble=preamble,
        )
        newest = next((ref for ref in reversed(kept.refs) if self._is_on(ref, kept.chain)), None)
        refused = based_on != 0 or generation != 1 or (newest is not None and k <= newest.k)
        store = self._stores[worker]
        assert self._run(store.commit(client.commit(kept.version + based_on, made))) is not refused
        if refused:
            assert self._run(store.checkpoint(client.id, made.id)) is None
            return
        assert made.ref.generation not in self.used.setdefault(lineage, set())
        self.used[lineage].add(made.ref.generation)
        kept.version += 1
        kept.generation += 1
        kept.refs.append(made.ref)
        kept.refs = kept.refs[-KEPT:]
        self.texts[made.id] = made
        ending = self.covering.setdefault(made.ref.digest_k, [])
        ending.insert(0, (made.ref, lineage))
        del ending[KEPT:]
        self.unapplied += 1

    @precondition(lambda self: self.sessions)
    @rule(lineage=LINEAGES, worker=WORKERS)
    def is_undone(self, lineage: str, worker: int) -> None:
        if lineage not in self.sessions:
            return
        kept = self.sessions[lineage]
        living = [at for at, ref in enumerate(kept.refs) if not ref.dead]
        client = self._client(lineage, self._path(lineage))
        assert self._run(self._stores[worker].undo(client.id, 0)) is bool(living)
        if not living:
            return
        buried = kept.refs[living[-1]]
        kept.refs[living[-1]] = replace(buried, dead=True)
        kept.version += 1
        kept.last_turn, kept.pending = kept.turns, None
        self.covering[buried.digest_k] = [one for one in self.covering[buried.digest_k] if one[0].id != buried.id]

    @precondition(lambda self: self.sessions)
    @rule(lineage=LINEAGES, worker=WORKERS, last=st.none() | st.integers(0, 20))
    def is_noted(self, lineage: str, worker: int, last: int | None) -> None:
        if lineage not in self.sessions:
            return
        kept = self.sessions[lineage]
        client = self._client(lineage, self._path(lineage))
        counters = Counters(turns=99, last_turn=last)
        assert self._run(self._stores[worker].note(client.id, attempt(), counters))
        kept.pending = None
        if last is None or kept.last_turn is None:
            kept.last_turn = last
        else:
            kept.last_turn = max(kept.last_turn, last)  # one that ends late brings the next no nearer

    @precondition(lambda self: self.sessions)
    @rule(lineage=LINEAGES, worker=WORKERS, seldom=st.integers(0, 3))
    def is_deleted(self, lineage: str, worker: int, seldom: int) -> None:
        if lineage not in self.sessions or seldom < 3:
            return
        kept = self.sessions[lineage]
        client = self._client(lineage, self._path(lineage))
        assert self._run(self._stores[worker].delete(client.id))
        for digest in kept.chain:
            for explicit in {"", EXPLICIT[lineage]}:
                if self.ends.get((explicit, digest)) == lineage:
                    del self.ends[explicit, digest]
        for digest in (*kept.chain, *(ref.digest_k for ref in kept.refs)):
            self.covering[digest] = [one for one in self.covering.get(digest, []) if one[1] != lineage]
        del self.sessions[lineage]
        self.used.pop(lineage, None)

    @precondition(lambda self: self.sessions)
    @rule(lineage=LINEAGES, other=LINEAGES, back=st.integers(0, 3), more=st.lists(st.integers(0, 1), max_size=3))
    def is_gone_on_with(self, lineage: str, other: str, back: int, more: list[int]) -> None:
        """By its own client or by another, from its end or from before that."""
        if lineage in self.sessions:
            path = self._path(lineage)
            self.asks(other, [*path[: max(1, len(path) - back)], *more], 0)

    @rule(lineage=LINEAGES, path=PATHS, worker=WORKERS)
    def asks(self, lineage: str, path: list[int], worker: int) -> None:
        """What a request brings: the session at the longest known prefix, and the checkpoints that are for it."""
        client = self._client(lineage, path)
        found = self._run(self._stores[worker].recall(client.query))
        assert found is not None
        assert found.root_unapplied == self.unapplied
        at = self._found(client)
        assert (found.session.id.lineage if found.session else None, found.matched) == (at or (None, 0))
        own = None
        if at is not None:
            kept = self.sessions[at[0]]
            if at[1] == len(kept.chain) and EXPLICIT[at[0]] == client.explicit:
                own = next((r.id for r in reversed(kept.refs) if self._is_for(r, client.chain)), None)
        assert (found.own.id if found.own else None) == own
        expected = [] if own else list(self._foreign(client.chain))
        assert [one.id for one in found.foreign] == expected
        stranger = replace(client, tenant="tenantbbbbbbbbbb")
        nothing = self._run(self._stores[worker].recall(stranger.query))
        assert nothing is not None
        assert (nothing.session, nothing.own, nothing.foreign) == (None, None, ())

    @invariant()
    def each_session_is_as_it_should_be(self) -> None:
        for lineage, kept in self.sessions.items():
            found = self._run(self._stores[0].session(self._client(lineage, [0]).id))
            assert found is not None
            assert found.entries.chains() == kept.chain
            assert (found.version, found.generation) == (kept.version, kept.generation)
            assert found.checkpoints == tuple(kept.refs)
            assert (found.counters.turns, found.counters.last_turn) == (kept.turns, kept.last_turn)
            assert found.pending == kept.pending
            alive = [ref for ref in kept.refs if self._is_on(ref, kept.chain)]
            assert [ref.k for ref in alive] == sorted({ref.k for ref in alive}), "covered k grows"

    # The same in Python

    def _path(self, lineage: str) -> list[int]:
        """The turnings of the conversation that a session holds."""
        wanted = self.sessions[lineage].chain
        path: list[int] = []
        for digest in wanted:
            path.append(next(v for v in (0, 1) if self._client(lineage, [*path, v]).chain[-1] == digest))
        return path

    def _is_on(self, ref: CheckpointRef, chain: tuple[Digest, ...]) -> bool:
        held = ref.seen_len <= len(chain) and chain[ref.k - 1] == ref.digest_k and chain[ref.seen_len - 1] == ref.seen
        return held and not ref.dead

    def _is_for(self, ref: CheckpointRef, chain: tuple[Digest, ...]) -> bool:
        return ref.k < len(chain) and self._is_on(ref, chain)

    def _found(self, client: Client) -> tuple[str, int] | None:
        for explicit in dict.fromkeys((client.explicit, "")):
            for length in range(len(client.chain), 0, -1):
                holder = self.ends.get((explicit, client.chain[length - 1]))
                kept = self.sessions.get(holder) if holder else None
                if holder and kept and kept.chain[length - 1 : length] == client.chain[length - 1 : length]:
                    return holder, length
        return None

    def _foreign(self, chain: tuple[Digest, ...]) -> Iterator[str]:
        preambles: set[Digest] = set()
        for length in range(len(chain) - 1, 0, -1):
            for ref, _ in self.covering.get(chain[length - 1], ()):
                if len(preambles) < MOST_FOREIGN and ref.preamble not in preambles and self._is_for(ref, chain):
                    preambles.add(ref.preamble)
                    yield ref.id


def test_any_sequence_of_calls(url: str) -> None:
    with asyncio.Runner() as runner:

        async def opened() -> tuple[Store, Store]:
            return await open_store(Settings(url), Troubles()), await open_store(Settings(url), Troubles())

        stores = runner.run(opened())
        try:
            run_state_machine_as_test(
                lambda: Sequences(runner, stores),
                settings=settings(stateful_step_count=30, max_examples=max(12, settings().max_examples // 3)),
            )
        finally:
            for store in stores:
                runner.run(store.close())
