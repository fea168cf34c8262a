"""A lock whose holder cannot reach the store at its end: it is let go of later, behind the holder's back, and never somebody else's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis

from proxy.store import Store
from proxy.store.connect import open_store
from proxy.store.keys import Keys
from store.builders import Client, Settings, Troubles, talk, until
from store.gate import Gate, gate_to

TTL_S = 60.0
"""Longer than a test waits: a lock that is gone by its end was let go of."""

CLIENT = Client(talk(1))
KEY = Keys.around(CLIENT.id).base + b"l:" + CLIENT.lineage.encode()


@asynccontextmanager
async def _behind_a_gate(url: str) -> AsyncIterator[tuple[Store, Gate]]:
    async with gate_to(url) as gate:
        store = await open_store(Settings(gate.url, timeout_ms=50), Troubles())
        await until(lambda: _answers(store))
        try:
            yield store, gate
        finally:
            await store.close()


async def _answers(store: Store) -> bool:
    return await store.recall(CLIENT.query) is not None


async def _is_paused(store: Store) -> bool:
    return not await _answers(store)


async def _is_free(raw: Redis) -> bool:
    return not await raw.exists(KEY)


async def _is_set(raw: Redis) -> bool:
    return bool(await raw.exists(KEY))


@pytest.mark.parametrize("how", ["away", "paused"])
async def test_the_lock_is_let_go_of_when_the_store_is_back(url: str, raw: Redis, how: str) -> None:
    async with _behind_a_gate(url) as (store, gate):
        async with store.flight(CLIENT.id, TTL_S) as mine:
            assert mine
            if how == "away":
                await gate.close()
            else:
                gate.stall()
                await until(lambda: _is_paused(store))  # a turn has found out: nobody asks for a while
        assert await _is_set(raw)  # the holder goes on without waiting for it
        if how == "away":
            await gate.open()
        else:
            gate.flow()
        await until(lambda: _is_free(raw))


async def test_a_lock_that_was_set_although_its_taker_gave_up_is_let_go_of_too(url: str, raw: Redis) -> None:
    async with _behind_a_gate(url) as (store, gate):
        gate.stall()

        async def take() -> bool | None:
            async with store.flight(CLIENT.id, TTL_S) as mine:
                return mine

        taking = asyncio.ensure_future(take())
        await until(lambda: _is_set(raw))
        await until(lambda: _is_paused(store))
        taking.cancel()  # as when its time is over
        await asyncio.wait([taking])
        assert await _is_set(raw)
        gate.flow()
        await until(lambda: _is_free(raw))


async def test_a_late_release_takes_no_lock_from_the_next_holder(url: str, raw: Redis, other: Store) -> None:
    async with _behind_a_gate(url) as (store, gate):
        async with store.flight(CLIENT.id, TTL_S) as mine:
            assert mine
            await gate.close()
        await raw.delete(KEY)  # it ran out
        async with other.flight(CLIENT.id, TTL_S) as theirs:
            assert theirs
            before, token = await _scripts_run(raw), await raw.get(KEY)
            await gate.open()
            await until(lambda: _has_run_another(raw, before))
            assert await raw.get(KEY) == token
        assert await _is_free(raw)


async def _scripts_run(raw: Redis) -> int:
    stats = await raw.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha"))


async def _has_run_another(raw: Redis, before: int) -> bool:
    return await _scripts_run(raw) > before
