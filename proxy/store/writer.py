"""Turns on their way into the store: queued, and written in batches by one task, behind the client's back.

One pipeline carries all that has piled up: per turn its new bytes, the renewals, then the script that writes the header. The script
checks that the bytes are there, so the pipeline need not be a transaction.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from proxy import clock
from proxy.core.model import Saved, SessionId
from proxy.store import values
from proxy.store.keys import Keys, encoded
from proxy.store.line import Line
from proxy.store.scripts import SAVE, Command
from proxy.store.trouble import StoreUnavailable, Trouble
from proxy.tasks import Tasks

MAX_WAITING = 2048
MAX_WAITING_BYTES = 128 * 1024 * 1024
"""Two bodies of the largest size that a request may have by default, or a thousand ordinary ones."""

_BATCH = 64
_BATCH_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """How long values live, in milliseconds."""

    session_ms: int
    checkpoint_ms: int

    @property
    def body_ms(self) -> int:
        """Bytes are renewed only when the last renewal is a quarter of a session's life ago, so they live that much longer."""
        return self.session_ms * 5 // 4


@dataclass(frozen=True, slots=True)
class _Waiting:
    session: SessionId
    bodies: tuple[Command, ...]
    header: Command
    size: int
    done: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Writer:
    """The queue and its task. Bounded: beyond the bounds a turn is dropped and counted, since memory is the client's traffic's."""

    def __init__(self, line: Line, tasks: Tasks, lifetimes: Lifetimes) -> None:
        self._line = line
        self._tasks = tasks
        self._lifetimes = lifetimes
        self._queue: deque[_Waiting] = deque()
        self._bytes = 0
        self._task: asyncio.Task[None] | None = None

    async def save(self, saved: Saved) -> bool:
        """True once the turn is stored or known to be older than what is. A caller that gives up does not stop the writing."""
        if not _is_whole(saved):
            raise ValueError("a turn whose entries do not add up to its length and end")
        size = sum(map(len, saved.bodies.values())) + len(saved.entries.packed)
        if len(self._queue) >= MAX_WAITING or self._bytes + size > MAX_WAITING_BYTES:
            self._line.count(Trouble.DROPPED)
            return False
        waiting = _Waiting(saved.session, self._bodies(saved), self._header(saved), size)
        self._queue.append(waiting)
        self._bytes += size
        if self._task is None or self._task.done():
            self._task = self._tasks.spawn(self._write_all(), "store-writer")
        return await waiting.done

    def forget(self, is_meant: Callable[[SessionId], bool]) -> None:
        """Drop what waits for sessions that are being deleted: written later, it would bring them back."""
        for waiting in [one for one in self._queue if is_meant(one.session)]:
            self._queue.remove(waiting)
            self._bytes -= waiting.size
            _settle(waiting, stored=False)

    async def _write_all(self) -> None:
        try:
            while self._queue:
                batch = self._batch()
                try:
                    await self._write(batch)
                except StoreUnavailable:
                    pass  # counted; the next turn of these sessions brings what is missing
                finally:
                    for waiting in batch:
                        self._bytes -= waiting.size
                        _settle(waiting, stored=False)
        finally:
            # Cancelled at shutdown, or a fault of ours: nobody may wait for ever.
            while self._queue:
                waiting = self._queue.popleft()
                self._bytes -= waiting.size
                _settle(waiting, stored=False)

    def _batch(self) -> list[_Waiting]:
        batch = [self._queue.popleft()]
        size = batch[0].size
        while self._queue and len(batch) < _BATCH and size + self._queue[0].size <= _BATCH_BYTES:
            batch.append(self._queue.popleft())
            size += batch[-1].size
        return batch

    async def _write(self, batch: list[_Waiting]) -> None:
        commands: list[Command] = []
        headers: list[int] = []
        for waiting in batch:
            commands += waiting.bodies
            headers.append(len(commands))
            commands.append(waiting.header)
        replies = await self._line.batch(commands, self._line.long_s)
        for waiting, header in zip(batch, headers, strict=True):
            _settle(waiting, stored=self._is_stored(replies[header]))

    def _is_stored(self, reply: Any) -> bool:
        if reply == b"stored":
            return True
        if isinstance(reply, bytes):
            self._line.count(Trouble(reply.decode()))
            return reply == b"stale"
        self._line.count(Trouble.REFUSED)
        return False

    def _bodies(self, saved: Saved) -> tuple[Command, ...]:
        keys, lives_ms = Keys.around(saved.session), self._lifetimes.body_ms
        return (
            *(("SET", keys.body(name), data, "PX", lives_ms) for name, data in saved.bodies.items()),
            *(("PEXPIRE", keys.body(name), lives_ms) for name in saved.touch if name not in saved.bodies),
        )

    def _header(self, saved: Saved) -> Command:
        """The script's call; the arguments are in the order in which save.lua reads them."""
        keys, inherit, pending = Keys.around(saved.session), saved.inherit, saved.pending
        names = [keys.base, *map(keys.body, saved.bodies)]
        args: Command = (
            saved.session.lineage,
            encoded(saved.explicit),
            saved.length,
            saved.end,
            saved.turn.started_ms,
            saved.entries_from,
            saved.base,
            saved.entries.packed,
            encoded(saved.applied or ""),
            int(_is_renewed(saved)),
            clock.now_ms(),
            self._lifetimes.session_ms,
            self._lifetimes.checkpoint_ms,
            inherit.turns,
            "" if inherit.last_turn is None else inherit.last_turn,
            inherit.failures,
            inherit.not_before_ms,
            inherit.unapplied,
            values.packed_turn(saved.turn),
            saved.bodies_from,
            pending.trigger if pending else "",
            pending.since_ms if pending else "",
        )
        return SAVE.call(names, args)


def _is_whole(saved: Saved) -> bool:
    if saved.length < 1 or saved.entries_from + len(saved.entries) != saved.length:
        return False
    return not saved.entries or saved.entries[-1].chain == saved.end


def _is_renewed(saved: Saved) -> bool:
    """Whether all bytes that the session needs have their full life after this turn: they were renewed, or all came with it.

    Else a fork that shares bytes with its parent would trust bytes that the parent was about to renew.
    """
    if saved.touch:
        return True
    return saved.entries_from == 0 and all(
        name in saved.bodies for name in saved.entries[saved.bodies_from :].byte_hashes()
    )


def _settle(waiting: _Waiting, *, stored: bool) -> None:
    if not waiting.done.done():
        waiting.done.set_result(stored)
