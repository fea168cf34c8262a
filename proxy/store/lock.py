"""A session's lock over all workers: redis-py's own, each of its steps within our deadline.

It is a hint that spares double work, not a guarantee: a holder that sleeps for too long loses it. What must not happen twice is
guarded by the commit, which compares versions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from redis.asyncio.lock import Lock
from redis.exceptions import LockError

from proxy import clock
from proxy.store.line import Line
from proxy.store.trouble import StoreUnavailable, Trouble
from proxy.tasks import Tasks

log = logging.getLogger("warmfold.store")


@asynccontextmanager
async def held(line: Line, tasks: Tasks, key: bytes, ttl_s: float) -> AsyncIterator[bool | None]:
    """Whether the lock is ours within the block; None: the store cannot tell. Renewed meanwhile, let go of at the end, gone after `ttl_s` if we die."""
    lock = Lock(line.client, key, timeout=ttl_s, blocking=False, thread_local=False)
    token = clock.token().encode()
    try:
        mine = await line.ask(lambda: lock.acquire(token=token), line.long_s)
    except BaseException as error:
        # The server may have taken it down after all: without this nobody could work on the session until it runs out.
        tasks.spawn(_let_go(line, lock, token), "store-unlock")
        if not isinstance(error, Exception):
            raise
        if not isinstance(error, StoreUnavailable):
            line.count(Trouble.INTERNAL)
            log.error("store call failed call=flight error=%s", type(error).__name__)
        mine = None
    if not mine:
        yield mine
        return
    renewing = tasks.spawn(_renew(line, lock, ttl_s), "store-lock")
    try:
        yield True
    finally:
        renewing.cancel()
        # A task of its own: whoever cancels the holder must not keep the lock from being let go of.
        await asyncio.wait([tasks.spawn(_let_go(line, lock, token), "store-unlock")])


async def _renew(line: Line, lock: Lock, ttl_s: float) -> None:
    lasts_until = clock.monotonic() + ttl_s
    while clock.monotonic() < lasts_until:
        await asyncio.sleep(ttl_s / 3)
        asked_at = clock.monotonic()
        try:
            if not await line.ask(lambda: _is_renewed(lock), line.long_s):
                break
        except StoreUnavailable:
            continue
        lasts_until = asked_at + ttl_s
    line.count(Trouble.LOCK_LOST)
    log.warning("a lock ran out while it was held")


async def _is_renewed(lock: Lock) -> bool:
    try:
        await lock.reacquire()
    except LockError:
        return False
    return True


async def _let_go(line: Line, lock: Lock, token: bytes) -> None:
    async def release() -> None:
        with suppress(LockError):  # it was not ours, or no longer: nothing is left to do
            await lock.do_release(token)

    with suppress(StoreUnavailable):  # counted; it runs out by itself
        await line.ask(release, line.long_s)
