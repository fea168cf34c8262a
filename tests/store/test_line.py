"""A server that stalls, breaks off or is not there costs a turn its deadline at most, and is found again without anyone's help."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest

from proxy.core.model import Recalled
from proxy.store import Store
from proxy.store.connect import open_store
from proxy.store.line import deadline
from store.builders import Client, Settings, Troubles, attempt, talk, until
from store.gate import gate_to

SHORT_MS = 50
"""The default of store.timeout_ms. Nothing is asserted on how long a call takes, only that it does not wait for the server."""


async def _everything(store: Store, client: Client) -> list[object]:
    """One call of each kind, at once."""
    async with asyncio.timeout(20):

        async def flight() -> bool | None:
            async with store.flight(client.id, 10) as mine:
                return mine

        return await asyncio.gather(
            store.recall(client.query),
            store.session(client.id),
            store.bodies(client.id, [b"?" * 16]),
            store.checkpoint(client.id, "id"),
            store.list(10, ""),
            store.delete_tenant(client.tenant),
            store.tenant_secret(),
            flight(),
            store.is_in_flight(client.id),
            store.offered(client.id),
            store.offer(client.id, client.checkpoint(2)),
            store.save(client.saved()),
            store.commit(client.commit(0, client.checkpoint(2))),
            store.note(client.id, attempt(), client.saved().inherit),
            store.undo(client.id, 0),
            store.delete(client.id),
            store.ping(),
            store.journal(client.id),
        )


ALL_OUT = [None] * 10 + [False] * 7 + [()]


async def test_without_a_server_all_calls_fail_open_and_it_is_found_when_it_comes(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "warmfold")
    client, troubles = Client(talk(4)), Troubles()
    async with gate_to(url) as gate:
        await gate.close()
        store = await open_store(
            Settings(gate.url.replace("redis://", "redis://user:secret@"), timeout_ms=SHORT_MS), troubles
        )
        assert [one.getMessage() for one in caplog.records] == [
            f"store does not answer, turns go on without it store=redis://***@127.0.0.1:{gate.port} trouble=unreachable"
        ]
        assert await _everything(store, client) == ALL_OUT
        assert set(troubles.seen) == {"unreachable", "paused"}
        await store.close()

        store = await open_store(Settings(gate.url, timeout_ms=SHORT_MS), troubles)
        await gate.open()
        await until(lambda: _knows(store, client))
        assert await store.ping()
        await store.close()
    assert [one.getMessage() for one in caplog.records[2:]] == [f"store answers again store={gate.url}"]


async def _knows(store: Store, client: Client) -> bool:
    return await store.recall(client.query) is not None


async def test_a_stalled_server_is_asked_once_in_a_while_and_not_by_every_turn(url: str) -> None:
    client, troubles = Client(talk(4)), Troubles()
    async with gate_to(url) as gate:
        store = await open_store(Settings(gate.url, timeout_ms=SHORT_MS), troubles)
        await until(lambda: _knows(store, client))
        troubles.seen.clear()
        gate.stall()
        assert await _everything(store, client) == ALL_OUT
        asked = gate.asked
        for _ in range(300):
            assert await store.recall(client.query) is None
        assert gate.asked - asked <= 3  # 300 turns went on at once; at most a probe or two among them
        assert set(troubles.seen) == {"timeout", "paused"}
        gate.flow()
        await until(lambda: _knows(store, client))
        assert await store.save(client.saved())
        await store.close()


async def test_a_server_that_breaks_off_is_found_again(url: str) -> None:
    client, troubles = Client(talk(4)), Troubles()
    async with gate_to(url) as gate:
        store = await open_store(Settings(gate.url, timeout_ms=1000), troubles)
        for _ in range(3):
            await until(lambda: _knows(store, client))
            await gate.close()
            assert await store.recall(client.query) is None
            await gate.open()
        await until(lambda: _knows(store, client))
        await store.close()


async def test_an_idle_connection_that_the_server_closed_costs_no_turn(url: str) -> None:
    client, troubles = Client(talk(4)), Troubles()
    async with gate_to(url) as gate:
        store = await open_store(Settings(gate.url), troubles)
        await gate.close()
        await gate.open()
        await asyncio.sleep(0)
        assert isinstance(await store.recall(client.query), Recalled)
        assert not troubles.seen
        await store.close()


async def test_an_answer_that_waits_in_the_socket_is_read_although_the_loop_was_held_up(url: str) -> None:
    """A long history read for the first time, a collection of garbage: the timer is seen before the answer that came long ago."""
    client, troubles = Client(talk(4)), Troubles()
    store = await open_store(Settings(url, timeout_ms=SHORT_MS), troubles)
    await until(lambda: _knows(store, client))
    for _ in range(5):
        asking = asyncio.ensure_future(store.recall(client.query))
        for _ in range(10):
            await asyncio.sleep(0)  # until the command is on its way
        time.sleep(3 * SHORT_MS / 1000)  # noqa: ASYNC251  # what holds the loop up
        assert await asking is not None
    assert not troubles.seen
    await store.close()


async def test_a_deadline_leaves_the_loop_a_few_rounds_and_no_more() -> None:
    async with deadline(0):
        for _ in range(4):
            await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with deadline(0):
            await asyncio.Event().wait()
    with pytest.raises(TimeoutError):
        await _busy_within(deadline(0))


async def _busy_within(limit: AbstractAsyncContextManager[None]) -> None:
    """A loop that is never idle is no way past it."""
    async with limit:
        while True:
            await asyncio.sleep(0)


async def test_a_deadline_that_was_kept_is_over() -> None:
    async with deadline(0.001):
        pass
    async with asyncio.timeout(20):
        await asyncio.sleep(0.01)  # what was left of it would cancel us here
    with pytest.raises(ValueError, match="ours"):
        async with deadline(20):
            raise ValueError("ours")


async def test_a_save_that_is_late_is_written_or_not_but_never_twice(url: str, store: Store) -> None:
    """A batch that ran into its deadline may have been written after all: the same turn again is stale or equal, not another turn."""
    client = Client(talk(4))
    async with gate_to(url) as gate:
        slow = await open_store(Settings(gate.url, timeout_ms=SHORT_MS), Troubles())
        await until(lambda: _knows(slow, client))
        gate.stall()
        assert not await slow.save(client.saved())
        gate.flow()
        await slow.close()
    found = await store.recall(client.query)
    assert found is not None
    assert found.session is not None
    assert found.session.entries == client.entries


async def test_more_turns_than_may_wait_are_dropped_and_counted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.store.writer.MAX_WAITING", 20)
    troubles = Troubles()
    client = Client(talk(2))
    async with gate_to(url) as gate:
        store = await open_store(Settings(gate.url, timeout_ms=1000), troubles)
        gate.stall()
        turns = [replace(client, lineage=f"lineage{i}").saved() for i in range(200)]
        saving = [asyncio.ensure_future(store.save(turn)) for turn in turns]
        await asyncio.sleep(0)
        gate.flow()
        stored = await asyncio.gather(*saving)
        assert stored.count(True) == 20
        assert troubles.seen == {"dropped": 180}
        assert await store.save(turns[-1])
        huge = Client((b"x" * 1000,), lineage="huge")
        monkeypatch.setattr("proxy.store.writer.MAX_WAITING_BYTES", 1000)
        assert not await store.save(huge.saved())
        await store.close()


async def test_close_writes_what_waits(url: str, store: Store) -> None:
    client = Client(talk(3))
    leaving = await open_store(Settings(url), Troubles())
    turns = [replace(client, lineage=f"lineage{i}") for i in range(50)]
    saving = [asyncio.ensure_future(leaving.save(turn.saved())) for turn in turns]
    await asyncio.sleep(0)
    await leaving.close()
    assert await asyncio.gather(*saving) == [True] * 50
    for turn in turns:
        assert await store.session(turn.id) is not None


async def test_a_caller_that_gives_up_does_not_stop_the_writing(store: Store) -> None:
    client = Client(talk(3))
    saving = asyncio.ensure_future(store.save(client.saved()))
    await asyncio.sleep(0)
    saving.cancel()
    await asyncio.wait([saving])
    assert saving.cancelled()
    await until(lambda: _is_stored(store, client))


async def _is_stored(store: Store, client: Client) -> bool:
    return await store.session(client.id) is not None
