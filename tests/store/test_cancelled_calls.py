"""Calls that are cancelled at any moment, under load: no call ever gets the answer of another one, and no connection is lost to the pool."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from redis.asyncio import Redis

from proxy.store.connect import open_store
from store.builders import HEAD, Client, Settings, Troubles, named, talk
from store.gate import gate_to

CALLERS = 60
CALLS = 70
"""Each caller's calls: 4,200 in all."""

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


@pytest.mark.parametrize("loop", LOOPS)
def test_no_answer_reaches_another_call(url: str, loop: str) -> None:
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(_storm(url))


async def _storm(url: str) -> None:
    async with Redis.from_url(url, protocol=2) as raw:
        await raw.flushall()
    chance = random.Random(3)
    clients = [Client(talk(3, f"canary {i}"), root=f"root{i}", lineage=f"lineage{i}") for i in range(CALLERS)]
    async with gate_to(url) as gate:
        store = await open_store(Settings(gate.url, timeout_ms=60_000), Troubles())
        pool = store._line.client.connection_pool  # type: ignore[attr-defined]  # to see that nothing is lost in it
        for client in clients:
            assert await store.save(client.saved())
            assert await store.commit(client.commit(0, client.checkpoint(2, text=client.root)))
        gate.most_delay_s = 0.002
        answered = 0

        async def check(client: Client, kind: int) -> None:
            nonlocal answered
            names = [named(HEAD), *(e.byte_hash for e in client.entries)]
            if kind == 0:
                found = await store.recall(client.query)
                assert found is not None
                assert found.session is not None
                assert found.own is not None
                assert (found.session.id, found.session.entries, found.own.text) == (
                    client.id,
                    client.entries,
                    client.root,
                )
            elif kind == 1:
                bodies = await store.bodies(client.id, names)
                assert bodies == dict(zip(names, (HEAD, *client.messages), strict=True))
            elif kind == 2:
                assert await store.save(client.saved())
            elif kind == 3:
                one = await store.checkpoint(client.id, client.checkpoint(2).id)
                assert one is not None
                assert one.text == client.root
            else:
                session = await store.session(client.id)
                assert session is not None
                assert (session.id, session.entries) == (client.id, client.entries)
            answered += 1

        async def caller(client: Client) -> None:
            for _ in range(CALLS):
                await _cut_short(check(client, chance.randrange(5)), chance)

        await asyncio.gather(*map(caller, clients))
        assert answered > CALLERS * CALLS / 10
        gate.most_delay_s = 0
        for client in clients:
            for kind in range(5):
                await check(client, kind)
        assert not pool._in_use_connections
        assert len(pool._available_connections) <= pool.max_connections
        await store.close()


async def _cut_short(call: Coroutine[Any, Any, None], chance: random.Random) -> None:
    """Run a call; two times in three cancel it after a while, and at times again at once, as a deadline and a client's leaving may."""
    task = asyncio.ensure_future(call)
    if chance.random() < 2 / 3:
        await asyncio.wait([task], timeout=chance.random() * 0.004)
        for _ in range(chance.randint(1, 3)):
            task.cancel()
            await asyncio.sleep(0)
    await asyncio.wait([task])
    if not task.cancelled():
        await task
