"""Conversations, turns and checkpoints with real bytes and real hashes, as the proxy would hand them to a store."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from proxy.core.model import (
    Attempt,
    Checkpoint,
    CheckpointRef,
    Commit,
    Counters,
    Digest,
    Entries,
    Entry,
    Pending,
    Query,
    Saved,
    Scope,
    Session,
    SessionId,
    Trigger,
    Turn,
    Usage,
    Window,
)
from proxy.store import Store
from proxy.store.trouble import Trouble

TENANT = "tenantaaaaaaaaaa"
OTHER_TENANT = "tenantbbbbbbbbbb"
HEAD, TAIL = b'{"model":"m","messages":[', b"]}"
PREAMBLE = b'{"role":"system","content":"be brief"}'


@dataclass(frozen=True, slots=True)
class Settings:
    """The keys of [store]; the deadline is generous, since time is no property of ours."""

    url: str
    data_dir: str = ""
    session_ttl_s: int = 3600
    checkpoint_ttl_s: int = 7200
    timeout_ms: int = 2000


@dataclass
class Troubles:
    """What a store counted."""

    seen: Counter[str] = field(default_factory=Counter)

    def __call__(self, trouble: Trouble) -> None:
        self.seen[trouble] += 1


def named(data: bytes) -> bytes:
    """The byte hash."""
    return hashlib.blake2b(data, digest_size=16).digest()


def chain_of(messages: tuple[bytes, ...], tenant: str = TENANT) -> tuple[Digest, ...]:
    """The chain digests of a conversation of this tenant."""
    found, last = [], named(tenant.encode())
    for message in messages:
        last = named(last + named(message))
        found.append(last)
    return tuple(found)


def talk(length: int, say: str = "hello", start: int = 0) -> tuple[bytes, ...]:
    """Messages that say something different each."""
    roles = ("user", "assistant")
    return tuple(f'{{"role":"{roles[i % 2]}","content":"{say} {i}"}}'.encode() for i in range(start, start + length))


@dataclass(frozen=True, slots=True)
class Client:
    """One conversation as a client sends it, and the session that stands for it in the store."""

    messages: tuple[bytes, ...]
    lineage: str = "lineageaaaaaaaaa"
    explicit: str = ""
    tenant: str = TENANT
    root: str = "rootaaaaaaaaaaaa"

    @property
    def id(self) -> SessionId:
        return SessionId(self.tenant, self.root, self.lineage)

    @property
    def chain(self) -> tuple[Digest, ...]:
        return chain_of(self.messages, self.tenant)

    @property
    def query(self) -> Query:
        return Query(self.tenant, self.root, self.explicit, self.chain)

    @property
    def entries(self) -> Entries:
        return Entries.of(Entry(c, named(m)) for c, m in zip(self.chain, self.messages, strict=True))

    @property
    def body(self) -> bytes:
        return HEAD + b",".join((PREAMBLE, *self.messages)) + TAIL

    def says(self, *messages: bytes) -> Client:
        """The same conversation, longer."""
        return replace(self, messages=self.messages + messages)

    def turn(self, started_ms: int = 1000) -> Turn:
        return Turn(
            model="m",
            preamble=(named(PREAMBLE),),
            head=named(HEAD),
            tail=named(TAIL),
            applied=None,
            routed=named(self.body),
            answer=b'{"role":"assistant","content":"yes"}',
            usage=Usage(prompt=100, completion=7, cached=90, reasoning=None),
            window=Window(8192, "config"),
            upstream="default",
            started_ms=started_ms,
            finished_ms=started_ms + 500,
            weight=120,
        )

    def saved(
        self,
        known: Session | None = None,
        *,
        started_ms: int = 1000,
        touch: tuple[bytes, ...] = (),
        inherit: Counters | None = None,
        pending: Pending | None = None,
        applied: str | None = None,
    ) -> Saved:
        """This request as a turn; `known`: the session that it continues."""
        entries = self.entries
        before = known.entries if known else Entries()
        same = next(
            (i for i, (a, b) in enumerate(zip(before, entries, strict=False)) if a != b), min(len(before), len(entries))
        )
        stored = {e.byte_hash for e in before} | ({named(HEAD), named(TAIL), named(PREAMBLE)} if known else set())
        everything = (HEAD, TAIL, PREAMBLE, *self.messages)
        return Saved(
            session=self.id,
            explicit=self.explicit,
            turn=replace(self.turn(started_ms), applied=applied),
            length=len(entries),
            end=self.chain[-1],
            entries_from=same,
            entries=entries[same:],
            bodies={named(data): data for data in everything if named(data) not in stored},
            touch=touch,
            bodies_from=0,
            inherit=inherit or Counters(),
            pending=pending,
            applied=applied,
            base=self.chain[same - 1] if same else b"",
        )

    def checkpoint(
        self,
        k: int,
        *,
        generation: int = 1,
        id: str = "",
        seen_len: int | None = None,
        preamble: bytes = PREAMBLE,
        text: str = "what was said",
    ) -> Checkpoint:
        """A checkpoint of this conversation that covers [0, k)."""
        seen_len = len(self.messages) if seen_len is None else seen_len
        ref = CheckpointRef(
            id=id or f"checkpoint{generation}{self.lineage[-1]}",
            generation=generation,
            from_=0,
            k=k,
            digest_k=self.chain[k - 1],
            seen_len=seen_len,
            seen=self.chain[seen_len - 1],
            preamble=named(preamble),
        )
        return Checkpoint(
            ref=ref,
            session=str(self.id),
            text=text,
            ledger=(),
            anchors=(),
            frame=f"[{text}]",
            region_tokens=900,
            checkpoint_tokens=90,
            model="m",
            scope=Scope.WARM,
            strategy="replay",
            made_at_ms=5,
        )

    def commit(self, version: int, checkpoint: Checkpoint) -> Commit:
        return Commit(self.id, version, checkpoint)


def attempt(at_ms: int = 1, outcome: str = "committed") -> Attempt:
    """A line of a journal."""
    return Attempt(at_ms, Trigger.SOFT, outcome, "", 0.8, 0, 4, "replay", "warm", prompt=10, cached=9, new=1)


async def committed(store: Store, client: Client, checkpoint: Checkpoint, version: int = 0) -> Client:
    """The client, its first turn stored (for version 0) and this checkpoint committed."""
    if version == 0:
        assert await store.save(client.saved())
    assert await store.commit(client.commit(version, checkpoint))
    return client


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Returns once it holds; a test that waits in vain fails."""
    async with asyncio.timeout(20):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.01)
