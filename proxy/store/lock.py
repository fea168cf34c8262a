"""A session's lock over all workers: a name that nobody can guess, set where none stands and taken away by its owner alone (lua/lock.lua).

It is a hint that spares double work, not a guarantee: a holder that sleeps for too long loses it. What must not happen twice is
guarded by the commit, which compares versions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from proxy import clock
from proxy.core.model import SessionId
from proxy.store.keys import Keys
from proxy.store.line import Line
from proxy.store.scripts import LOCK
from proxy.store.trouble import StoreUnavailable, Trouble
from proxy.tasks import Tasks

log = logging.getLogger("warmfold.store")

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 2.0
"""Between two attempts to let go of a lock while the store does not answer: short at first, since another worker may be waiting for it."""


@dataclass(frozen=True, slots=True)
class Lock:
    """The lock of one session, as one owner asks for it. Raises StoreUnavailable."""

    line: Line
    session: SessionId
    token: str
    ttl_s: float

    async def take(self) -> bool:
        """Whether it is ours now: nobody had it."""
        return await self._said("take")

    async def renew(self) -> bool:
        """Whether it is still ours, for another `ttl_s` from now."""
        return await self._said("renew")

    async def release(self) -> bool:
        """Whether it was ours until now. One that somebody else took meanwhile stays."""
        return await self._said("release")

    async def _said(self, verb: Literal["take", "renew", "release"]) -> bool:
        args = (verb, self.session.lineage, self.token, max(1, round(self.ttl_s * 1000)))
        return bool(await self.line.run(LOCK, (Keys.around(self.session).base,), args, self.line.long_s))


async def is_taken(line: Line, session: SessionId) -> bool:
    """Whether anybody holds it. Raises StoreUnavailable."""
    args = ("look", session.lineage, "", 0)
    return bool(await line.run(LOCK, (Keys.around(session).base,), args, line.long_s))


@asynccontextmanager
async def held(line: Line, tasks: Tasks, session: SessionId, ttl_s: float) -> AsyncIterator[bool | None]:
    """Whether the lock is ours within the block; None: the store cannot tell. Renewed meanwhile, let go of at the end, gone after `ttl_s` if we die.

    `tasks` are cancelled at shutdown before the line is closed: nothing in them is worth waiting for.
    """
    lock = Lock(line, session, clock.token(), ttl_s)
    try:
        mine = await lock.take()
    except BaseException as error:
        if not (isinstance(error, StoreUnavailable) and error.trouble is Trouble.PAUSED):
            # The server may have set it after all: without this nobody could work on the session until it runs out.
            tasks.spawn(_let_go(lock), "store-unlock")
        if not isinstance(error, Exception):
            raise
        if not isinstance(error, StoreUnavailable):
            line.count(Trouble.INTERNAL)
            log.error("store call failed call=flight error=%s", type(error).__name__)
        yield None
        return
    if not mine:
        yield False
        return
    renewing = tasks.spawn(_renew(lock), "store-lock")
    try:
        yield True
    finally:
        renewing.cancel()
        # A task of its own: whoever cancels the holder must not keep the lock from being let go of. And a store that does not answer must not
        # keep the holder for longer than a turn waits for it: there may be a client behind it.
        await asyncio.wait([tasks.spawn(_let_go(lock), "store-unlock")], timeout=line.short_s)


async def _renew(lock: Lock) -> None:
    lasts_until = clock.monotonic() + lock.ttl_s
    while clock.monotonic() < lasts_until:
        await asyncio.sleep(lock.ttl_s / 3)
        asked_at = clock.monotonic()
        try:
            if not await lock.renew():
                break
        except StoreUnavailable:
            continue
        lasts_until = asked_at + lock.ttl_s
    lock.line.count(Trouble.LOCK_LOST)
    log.warning("a lock ran out while it was held")


async def _let_go(lock: Lock) -> None:
    """Release the lock, again and again while the store does not answer, until it has run out by itself: others wait for it meanwhile."""
    lasts_until = clock.monotonic() + lock.ttl_s
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            await lock.release()
        except StoreUnavailable:  # counted
            if clock.monotonic() + pause_s >= lasts_until:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)
        else:
            return
