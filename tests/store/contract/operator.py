"""What the admin listener asks."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis

from proxy.core.model import Counters, SessionId
from proxy.store import Store
from proxy.store.keys import Keys
from store.builders import (
    OTHER_TENANT,
    TENANT,
    Client,
    attempt,
    committed,
    talk,
)


async def test_pages_bring_each_session_once(store: Store, raw: Redis) -> None:
    await raw.mset({f"stranger:{i}": "x" for i in range(500)})
    wanted = set()
    for i in range(23):
        client = Client(
            talk(3, f"talk {i}"), root=f"root{i}", lineage=f"lineage{i}", tenant=TENANT if i % 2 else OTHER_TENANT
        )
        await store.save(client.saved())
        wanted.add(client.id)
    for limit in (1, 5, 23, 100):
        seen: list[SessionId] = []
        cursor, pages = "", 0
        while True:
            page = await store.list(limit, cursor)
            assert page is not None
            assert len(page.sessions) <= limit
            seen += [one.id for one in page.sessions]
            cursor, pages = page.cursor, pages + 1
            if not cursor:
                break
        assert len(seen) == len(wanted)
        assert set(seen) == wanted
        assert pages >= 23 / limit
    for nonsense in ("x", "1.2.3", "-1.0", "1", "99999999999999999999.0"):
        assert await store.list(10, nonsense) is None


async def test_a_deleted_session_is_forgotten_with_its_checkpoints(store: Store, raw: Redis) -> None:
    client = Client(talk(6), explicit="id")
    twin = Client(talk(6), explicit="id2", lineage="twin")
    await committed(store, client, client.checkpoint(4))
    await committed(store, twin, twin.checkpoint(4))
    await store.note(client.id, attempt(), Counters())
    assert await store.delete(client.id)
    assert not await store.delete(client.id)
    assert await store.session(client.id) is None
    assert await store.journal(client.id) == ()
    assert await store.checkpoint(client.id, client.checkpoint(4).id) is None
    found = await store.recall(client.query)
    assert found is not None
    assert (found.session, found.foreign) == (None, (twin.checkpoint(4),))  # the twin's text is the twin's
    assert not [key for key in await raw.keys("*") if client.lineage.encode() in key]
    assert {await raw.get(key) for key in await raw.keys("wf:*:x:*")} == {b"twin"}


async def test_a_deleted_session_takes_all_checkpoints_it_ever_made(store: Store, raw: Redis) -> None:
    client = Client(talk(24))
    await store.save(client.saved())
    for generation in range(1, 12):  # more than it keeps references to
        await store.commit(client.commit(generation - 1, client.checkpoint(generation * 2, generation=generation)))
    assert len(await raw.keys("wf:*:c:*")) == 11
    assert await store.delete(client.id)
    assert not await raw.keys("wf:*:[cksdjx]:*")


async def test_a_deleted_session_takes_what_was_undone_with_it(store: Store, raw: Redis) -> None:
    client = Client(talk(24))
    await store.save(client.saved())
    for generation in range(1, 12):
        known = await store.session(client.id)
        assert known is not None
        assert await store.commit(client.commit(known.version, client.checkpoint(12, generation=generation)))
        assert await store.undo(client.id, 0)
    assert await store.delete(client.id)
    assert not await raw.keys("wf:*:[cksdjx]:*")


async def test_a_long_session_is_deleted_whole_and_what_is_anothers_stays(store: Store, raw: Redis) -> None:
    """Longer than what is read at once."""
    whole = talk(700)
    known = None
    for length in (1, 255, 256, 257, 512, 700):
        client = Client(whole[:length], explicit="id")
        assert await store.save(client.saved(known, started_ms=length))
        known = await store.session(client.id)
    for generation, k in enumerate((1, 256, 257, 699), 1):
        assert await store.commit(client.commit(generation - 1, client.checkpoint(k, generation=generation)))
    twin = Client(whole[:257], explicit="other", lineage="twin")
    await committed(store, twin, twin.checkpoint(256, id="twins"))
    assert await store.delete(client.id)
    assert await raw.keys("wf:*:c:*") == [Keys.around(twin.id).checkpoint("twins")]
    assert {await raw.get(key) for key in await raw.keys("wf:*:x:*")} == {b"twin"}
    found = await store.recall(twin.query)
    assert found is not None
    assert found.own == twin.checkpoint(256, id="twins")


async def test_a_deleted_tenant_leaves_nothing(store: Store, raw: Redis) -> None:
    for tenant in (TENANT, OTHER_TENANT):
        for i in range(5):
            client = Client(talk(4), tenant=tenant, root=f"root{i}")
            await committed(store, client, client.checkpoint(2))
    before = len(await raw.keys("*"))
    for pattern in ("*", "tenant*", "t?nantaaaaaaaaaa", "[a-z]*", "", "tenant"):
        assert await store.delete_tenant(pattern) == 0
    assert len(await raw.keys("*")) == before
    assert await store.delete_tenant(TENANT) == before // 2
    left = await raw.keys("*")
    assert len(left) == before // 2
    assert not any(TENANT.encode() in key for key in left)


async def test_what_waits_to_be_written_does_not_outlive_its_tenant(store: Store, raw: Redis) -> None:
    saving = [
        asyncio.ensure_future(store.save(Client(talk(3), tenant=tenant, root=f"root{i}").saved()))
        for i in range(100)
        for tenant in (TENANT, OTHER_TENANT)
    ]
    await asyncio.sleep(0)  # all of them stand in the queue
    await store.delete_tenant(TENANT)
    stored = await asyncio.gather(*saving)
    assert stored[1::2] == [True] * 100
    # What was being written at that moment may have come first or last; it is at most one batch.
    assert sum(stored[::2]) <= 64
    await store.delete_tenant(TENANT)
    assert not await raw.keys(f"wf:{{{TENANT}*")


async def test_ping(store: Store) -> None:
    assert await store.ping()
