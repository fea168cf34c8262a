"""What lies in the server, and a server that is full."""

from __future__ import annotations

from dataclasses import replace

from redis.asyncio import Redis
from redis.crc import key_slot

from proxy.core.model import Counters
from proxy.store import Store
from proxy.store.keys import Keys
from store.builders import (
    HEAD,
    Client,
    Troubles,
    attempt,
    committed,
    named,
    talk,
)


async def test_every_key_has_an_end_and_a_root_lies_in_one_slot(store: Store, raw: Redis) -> None:
    client = Client(talk(6), explicit="id")
    await store.tenant_secret()
    await committed(store, client, client.checkpoint(4))
    await store.note(client.id, attempt(), Counters())
    known = await store.session(client.id)
    await store.save(client.says(*talk(2, "on")).saved(known, started_ms=2000, applied=client.checkpoint(4).id))
    await committed(store, replace(client, lineage="twin"), replace(client, lineage="twin").checkpoint(4, id="twins"))
    await store.undo(client.id, 0)
    await store.offer(client.id, client.checkpoint(4))
    async with store.flight(client.id, 10):
        keys = await raw.keys("*")
        ttl_ms = {key: await raw.pttl(key) for key in keys}
    kinds = {key.split(b"}:")[1].split(b":")[0] for key in keys if b"}:" in key}
    assert kinds == set(b"b x s d c k m u l j o".split())
    assert [key for key, left in ttl_ms.items() if left < 0] == [b"wf:secret"]
    assert max(ttl_ms.values()) <= 7200_000
    assert len({key_slot(key) for key in keys if key != b"wf:secret"}) == 1


async def test_a_full_server_refuses_turns_and_still_answers(store: Store, raw: Redis, troubles: Troubles) -> None:
    client = Client(talk(4))
    await store.save(client.saved())
    await raw.config_set("maxmemory", "1mb")
    try:
        assert not await store.save(Client(talk(3, "new"), lineage="new").saved())
        assert not await store.commit(client.commit(0, client.checkpoint(2)))
        found = await store.recall(client.query)
        assert found is not None
        assert found.session is not None
        assert await store.ping()
    finally:
        await raw.config_set("maxmemory", "0")
    assert set(troubles.seen) <= {"refused", "missing"}
    assert await store.save(Client(talk(3, "new"), lineage="new").saved())


async def test_a_header_is_not_written_without_its_bytes(store: Store, raw: Redis) -> None:
    """Bytes and header travel in one pipeline, which is no transaction: what if only the bytes were refused?"""
    client = Client(talk(4))
    assert await store.save(client.saved())
    of = Keys.around(client.id)
    await raw.delete(of.body(named(HEAD)), of.base + b"s:" + client.lineage.encode())
    header = store._writer._header(client.saved())  # type: ignore[attr-defined]  # there is no way to lose them on purpose
    assert await raw.execute_command(*header) == b"missing"
    assert await store.session(client.id) is None
