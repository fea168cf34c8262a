"""The lock of a session."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from proxy.store import Store
from proxy.store.keys import Keys
from store.builders import (
    Client,
    Troubles,
    talk,
    until,
)


def _key(client: Client) -> bytes:
    return Keys.around(client.id).base + b"l:" + client.lineage.encode()


async def test_only_one_holds_the_lock_and_it_is_let_go_of(store: Store, other: Store, raw: Redis) -> None:
    client = Client(talk(1))
    async with store.flight(client.id, 10) as mine:
        assert mine is True
        async with other.flight(client.id, 10) as theirs:
            assert theirs is False  # None would say that the store cannot tell
        async with other.flight(replace(client.id, lineage="another"), 10) as theirs:
            assert theirs
        assert await raw.exists(_key(client))
    async with other.flight(client.id, 10) as theirs:
        assert theirs
    with pytest.raises(RuntimeError, match="broke"):
        async with store.flight(client.id, 10):
            raise RuntimeError("broke")
    assert not await raw.exists(_key(client))


async def test_of_many_who_want_the_lock_one_gets_it(store: Store, other: Store) -> None:
    over = asyncio.Event()

    async def take(of: Store) -> bool | None:
        async with of.flight(Client(talk(1)).id, 10) as mine:
            if mine:
                await over.wait()
            return mine

    takers = [asyncio.ensure_future(take(of)) for of in (store, other) for _ in range(10)]
    losers = asyncio.as_completed(takers)
    for _ in range(len(takers) - 1):
        assert await next(losers) is False
    over.set()
    assert await next(losers)


async def _is_above(raw: Redis, key: bytes, ms: int) -> bool:
    return await raw.pttl(key) > ms


async def _is_lost(troubles: Troubles) -> bool:
    return troubles.seen["lock_lost"] > 0


async def _is_free(raw: Redis, client: Client) -> bool:
    return not await raw.exists(_key(client))


async def test_the_lock_is_renewed_while_it_is_held(store: Store, raw: Redis) -> None:
    client = Client(talk(1))
    key = _key(client)
    async with store.flight(client.id, 0.3) as mine:
        assert mine
        for _ in range(4):
            await raw.pexpire(key, 250)  # as if time had passed
            await until(lambda: _is_above(raw, key, 250))


async def test_the_lock_is_gone_when_its_holder_dies(store: Store, raw: Redis) -> None:
    client = Client(talk(1))
    async with store.flight(client.id, 10):
        ttl_ms = await raw.pttl(_key(client))
    assert 0 < ttl_ms <= 10_000


async def test_a_lock_that_ran_out_is_noticed_and_not_taken_from_the_next_holder(
    store: Store, other: Store, raw: Redis, troubles: Troubles
) -> None:
    client = Client(talk(1))
    key = _key(client)
    async with store.flight(client.id, 0.3):
        await raw.delete(key)
        async with other.flight(client.id, 10) as theirs:
            assert theirs
            await until(lambda: _is_lost(troubles))
            assert await raw.pttl(key) > 1000
    async with other.flight(client.id, 10) as theirs:
        assert theirs


async def test_a_holder_that_is_cancelled_lets_go(store: Store, raw: Redis) -> None:
    client = Client(talk(1))
    held = asyncio.Event()

    async def hold() -> None:
        async with store.flight(client.id, 10):
            held.set()
            await asyncio.sleep(60)

    holder = asyncio.ensure_future(hold())
    await held.wait()
    holder.cancel()
    await asyncio.wait([holder])
    assert holder.cancelled()
    await until(lambda: _is_free(raw, client))


async def test_whether_a_flight_is_under_way_is_told_without_taking_part_in_it(store: Store, other: Store) -> None:
    client = Client(talk(1))
    assert await other.is_in_flight(client.id) is False
    async with store.flight(client.id, 10):
        assert await other.is_in_flight(client.id) is True
        assert await other.is_in_flight(replace(client.id, lineage="another")) is False
    assert await other.is_in_flight(client.id) is False


@pytest.mark.parametrize("foreign", ["of another type", "without an end"])
async def test_what_no_worker_put_there_is_no_lock(store: Store, other: Store, raw: Redis, foreign: str) -> None:
    """A dump that was restored without its times to live: nobody would ever let go of such a lock, and the session never be compacted."""
    client = Client(talk(1))
    if foreign == "of another type":
        await raw.sadd(_key(client), "what is this")
        await raw.expire(_key(client), 60)
    else:
        await raw.set(_key(client), "atokenofsomebody")
    assert await store.is_in_flight(client.id) is False
    async with store.flight(client.id, 10) as mine:
        assert mine is True
        async with other.flight(client.id, 10) as theirs:
            assert theirs is False
        assert 0 < await raw.pttl(_key(client)) <= 10_000
    assert await _is_free(raw, client)


async def test_a_lock_whose_value_became_another_type_is_lost_and_nothing_else(
    store: Store, raw: Redis, troubles: Troubles
) -> None:
    client = Client(talk(1))
    async with store.flight(client.id, 0.3) as mine:
        assert mine
        await raw.delete(_key(client))
        await raw.sadd(_key(client), "what is this")
        await until(lambda: _is_lost(troubles))
    assert troubles.seen == {"lock_lost": 1}
    assert await raw.smembers(_key(client)) == {b"what is this"}
