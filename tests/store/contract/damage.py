"""Values that are lost, swapped, cut or old: never a wrong request, never an exception."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from proxy.core.model import Checkpoint, Counters, Recalled, Session
from proxy.store import Store
from proxy.store.keys import Keys
from proxy.store.scripts import FIELDS
from store.builders import (
    OTHER_TENANT,
    Client,
    Troubles,
    attempt,
    committed,
    named,
    talk,
)

ROUNDS_OF_LOSS = 300


def _rebuilt(session: Session, bodies: dict[bytes, bytes] | None) -> bytes | None:
    if bodies is None or session.turn is None:
        return None
    parts = [bodies[name] for name in (*session.turn.preamble, *(e.byte_hash for e in session.entries))]
    return bodies[session.turn.head] + b",".join(parts) + bodies[session.turn.tail]


async def _is_right(store: Store, client: Client, made: dict[str, Checkpoint]) -> bool:
    """Whether the warm request was rebuilt; whatever else was lost, nothing wrong came back."""
    found = await store.recall(client.query)
    assert found is not None
    for one in (found.own, *found.foreign):
        if one is not None:
            assert one == made[one.id]
            assert client.chain[one.k - 1] == one.ref.digest_k
    session = found.session
    if session is None:
        assert (found.matched, found.own) == (0, None)
        return False
    assert session.id.tenant == client.tenant
    assert tuple(e.chain for e in session.entries[: found.matched]) == client.chain[: found.matched]
    assert session.turn is not None
    names = [session.turn.head, session.turn.tail, *session.turn.preamble, *(e.byte_hash for e in session.entries)]
    bodies = await store.bodies(session.id, names)
    rebuilt = _rebuilt(session, dict(bodies) if bodies is not None else None)
    assert rebuilt is None or named(rebuilt) == session.turn.routed
    return rebuilt is not None


async def test_whatever_is_lost_nothing_wrong_comes_back(store: Store, raw: Redis) -> None:
    chance = random.Random(7)
    trunk = talk(4)
    clients = {name: Client((*trunk, *talk(2, name)), lineage=f"lineage{name}") for name in "abc"}
    made: dict[str, Checkpoint] = {}
    rebuilt, kinds = 0, set()
    for round_ in range(ROUNDS_OF_LOSS):
        name = chance.choice("abc")
        client = clients[name]
        found = await store.recall(client.query)
        assert found is not None
        known = (
            found.session
            if found.session and found.matched == found.session.length and found.session.id == client.id
            else None
        )
        if len(client.messages) > 30:
            client = clients[name] = Client((*trunk, *talk(2, name)), lineage=f"lineage{name}{round_}")
            known = None
        else:
            client = clients[name] = client.says(*talk(1, f"{name}{round_}"))
        await store.save(client.saved(known, started_ms=1000 + round_))
        session = await store.session(client.id)
        if session is not None and chance.random() < 0.5:
            k = chance.randrange(1, len(client.messages))
            one = client.checkpoint(k, generation=session.generation + 1, id=f"id{round_}", text=f"text {round_}")
            made[one.id] = one
            await store.commit(client.commit(session.version, one))
        keys = await raw.keys("wf:{*")
        kind = chance.choice(sorted({key.split(b"}:")[1][:1] for key in keys}))
        kinds.add(kind)
        of_kind = [key for key in keys if key.split(b"}:")[1].startswith(kind)]
        await raw.delete(*chance.sample(of_kind, chance.randint(1, min(3, len(of_kind)))))
        rebuilt += await _is_right(store, chance.choice(list(clients.values())), made)
    assert kinds == {b"b", b"c", b"d", b"k", b"m", b"s", b"u", b"x"}
    assert rebuilt > ROUNDS_OF_LOSS / 10


async def test_values_of_another_session_read_as_none(store: Store, raw: Redis, troubles: Troubles) -> None:
    one, two = Client(talk(4, "one"), lineage="one"), Client(talk(4, "two"), lineage="two")
    checkpoints = {}
    for client in (one, two):
        checkpoints[client.lineage] = client.checkpoint(2, id=f"id{client.lineage}")
        await committed(store, client, checkpoints[client.lineage])
        await store.note(client.id, attempt(), Counters())
    of = Keys.around(one.id)

    async def swapped(first: bytes, second: bytes) -> None:
        for before, after in ((first, b"between"), (second, first), (b"between", second)):
            await raw.rename(before, after)

    pairs = {
        "identity": (of.base + b"s:one", of.base + b"s:two"),
        "entries": (of.base + b"d:one", of.base + b"d:two"),
        "hash": (of.body(one.entries[1].byte_hash), of.body(two.entries[1].byte_hash)),
    }
    for kind, pair in pairs.items():
        await swapped(*pair)
        troubles.seen.clear()
        for client in (one, two):
            if kind == "hash":
                assert await store.bodies(client.id, [e.byte_hash for e in client.entries]) is None
            else:
                assert await store.session(client.id) is None
                found = await store.recall(client.query)
                assert found is not None
                assert found.session is None
        assert set(troubles.seen) == {kind}
        await swapped(*pair)

    await swapped(of.checkpoint("idone"), of.checkpoint("idtwo"))
    await swapped(of.journal("one"), of.journal("two"))
    troubles.seen.clear()
    for client in (one, two):
        found = await store.recall(client.query)
        assert found is not None
        assert (found.own, found.foreign) == (None, ())
        assert await store.checkpoint(client.id, f"id{client.lineage}") is None
        assert await store.journal(client.id) == ()
    assert set(troubles.seen) == {"identity"}
    await swapped(of.checkpoint("idone"), of.checkpoint("idtwo"))
    for client in (one, two):
        found = await store.recall(client.query)
        assert found is not None
        assert found.own == checkpoints[client.lineage]


async def test_the_ends_of_two_sessions_swapped_lead_nowhere(store: Store, raw: Redis) -> None:
    one, two = Client(talk(4, "one"), lineage="one"), Client(talk(4, "two"), lineage="two")
    for client in (one, two):
        await store.save(client.saved())
    base = Keys.around(one.id).base
    await raw.set(base + b"x::" + one.chain[-1], "two", ex=60)
    await raw.set(base + b"x::" + two.chain[-1], "one", ex=60)
    for client in (one, two):
        assert await store.recall(client.query) == Recalled(None, 0)


async def test_values_of_another_tenant_read_as_none(store: Store, raw: Redis) -> None:
    """Someone restores a dump under the wrong name: same root, same lineage, another tenant."""
    client, theirs = Client(talk(4)), Client(talk(4), tenant=OTHER_TENANT)
    await committed(store, client, client.checkpoint(2))
    await store.note(client.id, attempt(), Counters())
    mine, base = Keys.around(client.id).base, Keys.around(theirs.id).base
    for key in await raw.keys(mine.replace(b"{", b"\\{") + b"*"):
        await raw.copy(key, base + key[len(mine) :])
    assert await store.session(theirs.id) is None
    # A bare number names nobody, so it has no seal: it may hold soft compactions up for a while, and tells nothing.
    assert await store.recall(replace(client.query, tenant=OTHER_TENANT)) == Recalled(None, 0, root_unapplied=1)
    assert await store.checkpoint(theirs.id, client.checkpoint(2).id) is None
    assert await store.journal(theirs.id) == ()


@pytest.mark.parametrize("kind", ["b", "x", "s", "d", "c", "k", "m", "u", "j"])
async def test_a_value_of_another_type_reads_as_none(store: Store, raw: Redis, kind: str) -> None:
    client = Client(talk(4))
    made = client.checkpoint(2)
    await committed(store, client, made)
    await store.note(client.id, attempt(), Counters())
    keys = [key for key in await raw.keys("wf:{*") if key.split(b"}:")[1].startswith(kind.encode())]
    assert keys
    for key in keys:
        await raw.delete(key)
        await raw.sadd(key, "what is this")
        await raw.expire(key, 60)
    assert await _is_right(store, client, {made.id: made}) is (kind in "ckmuj")
    recalled = await store.recall(client.query)
    assert recalled is not None
    assert recalled.root_unapplied == (kind != "u")
    await store.session(client.id)
    await store.journal(client.id)
    await store.undo(client.id, 1)
    assert await store.note(client.id, attempt(), Counters()) is (kind != "s")
    assert len(await store.journal(client.id)) == (1 if kind in "sj" else 2)
    # The next turn mends what it writes; nothing is stuck for ever.
    found = await store.recall(client.query)
    assert found is not None
    again = client.saved(found.session, started_ms=2000)
    if found.session is None or kind == "b":
        again = client.saved(started_ms=2000)
    assert await store.save(again)
    assert await _is_right(store, client, {made.id: made})


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
async def test_a_value_that_was_cut_reads_as_none(store: Store, raw: Redis, share: float) -> None:
    client = Client(talk(4))
    made = client.checkpoint(2)
    await committed(store, client, made)
    await store.note(client.id, attempt(), Counters())
    for key in await raw.keys("wf:{*"):
        kind = key.split(b"}:")[1][:1]
        if kind in b"bxdck":
            value = await raw.get(key)
            await raw.set(key, value[: int(len(value) * share)], ex=60)
            await _is_right(store, client, {made.id: made})
            assert kind != b"c" or await store.checkpoint(client.id, made.id) is None
            await raw.set(key, value, ex=60)
    record = Keys.around(client.id).base + b"s:" + client.lineage.encode()
    for name, value in (await raw.hgetall(record)).items():
        cut = value[: int(len(value) * share)]
        await raw.hset(record, name, cut)
        if name in (b"id", b"n", b"finish") and cut != value:
            assert await store.session(client.id) is None
        await _is_right(store, client, {made.id: made})
        await raw.hset(record, name, value)
    lines = Keys.around(client.id).journal(client.lineage)
    await raw.lset(lines, 0, (await raw.lindex(lines, 0))[: int(100 * share)])
    assert await store.journal(client.id) == ()
    assert await _is_right(store, client, {made.id: made})


async def test_values_of_another_version_read_as_none(store: Store, raw: Redis, troubles: Troubles) -> None:
    client = Client(talk(4))
    made = client.checkpoint(2)
    await committed(store, client, made)
    await store.note(client.id, attempt(), Counters())
    of = Keys.around(client.id)
    value = await raw.get(of.checkpoint(made.id))
    await raw.set(of.checkpoint(made.id), b"0" + value[1:], ex=60)
    assert await store.checkpoint(client.id, made.id) is None
    found = await store.recall(client.query)
    assert found is not None
    assert (found.own, found.foreign) == (None, ())
    record = of.base + b"s:" + client.lineage.encode()
    await raw.hset(record, "id", b"0" + (await raw.hget(record, "id"))[1:])
    assert await store.session(client.id) is None
    assert not await store.commit(client.commit(1, client.checkpoint(3, generation=2)))
    await raw.lset(of.journal(client.lineage), 0, b"0|old")
    assert await store.journal(client.id) == ()
    assert set(troubles.seen) == {"schema", "gone"}
    assert await store.save(client.saved(started_ms=2000))
    assert await store.session(client.id) is not None


FOREIGN = {
    "a set": None,
    "nothing": b"",
    "text": b"what is this",
    "bytes": b"\xff\x00" * 40,
    "a number": b"7",
    "no whole number": b"1.5",
    "no number": b"nan",
    "a huge number": b"9" * 40,
}
"""Values that somebody else may have put under one of our keys, by kind; without a time to live."""


async def _put(raw: Redis, key: bytes, foreign: bytes | None) -> None:
    await raw.delete(key)
    await (raw.sadd(key, "what is this") if foreign is None else raw.set(key, foreign))


async def _goes_on(store: Store, client: Client, generation: int) -> None:
    """The next turn is stored whatever lies there, and a compaction behind it finds its way into the request after that."""
    found = await store.recall(client.query)
    assert found is not None
    session = found.session if found.session and found.matched == found.session.length else None
    assert await store.save(client.saved(session, started_ms=9000))
    known = await store.session(client.id)
    assert known is not None
    async with store.flight(client.id, 10) as mine:
        assert mine is True
        made = client.checkpoint(3, generation=known.generation + 1, id=f"behind{generation}")
        assert await store.commit(client.commit(known.version, made))
        assert await store.note(client.id, attempt(), Counters(last_turn=1))
    found = await store.recall(client.query)
    assert found is not None
    assert found.own == made
    assert found.root_unapplied >= 1
    assert len(await store.journal(client.id)) >= 1
    assert await store.checkpoint(client.id, made.id) == made


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("kind", [b"x", b"s", b"d", b"c", b"k", b"m", b"u", b"j", b"l", b"o"])
async def test_a_foreign_value_holds_nothing_up(store: Store, raw: Redis, kind: bytes, foreign: str) -> None:
    """No script stops half-way at it: what was not done was not begun, and the next turn and the next compaction work."""
    client = Client(talk(6), explicit="id")
    made = client.checkpoint(2)
    await committed(store, client, made)
    await store.note(client.id, attempt(), Counters())
    assert await store.offer(client.id, made)
    if kind == b"l":
        await raw.set(Keys.around(client.id).base + b"l:" + client.lineage.encode(), "token")
    keys = [key for key in await raw.keys("wf:{*") if key.split(b"}:")[1].startswith(kind)]
    assert keys
    for key in keys:
        await _put(raw, key, FOREIGN[foreign])

    refused = client.checkpoint(4, generation=2, id="refused")
    known = await store.session(client.id)
    if not await store.commit(client.commit(1, refused)):
        assert known is None
        assert await store.checkpoint(client.id, refused.id) is None
        assert not [key for key in await raw.keys("wf:{*") if b"refused" in key]
    else:
        assert await store.undo(client.id, 0)
    await _goes_on(store, client, 1)

    for key in keys:
        await _put(raw, key, FOREIGN[foreign])
    await store.undo(client.id, 0)
    await store.delete(client.id)
    assert await store.session(client.id) is None
    assert await store.offered(client.id) is None
    assert await store.journal(client.id) == ()
    await _goes_on(store, client, 2)


@pytest.mark.parametrize("foreign", [kind for kind in FOREIGN if kind != "a set"])
@pytest.mark.parametrize("name", FIELDS)
async def test_a_foreign_field_of_a_record_holds_nothing_up(store: Store, raw: Redis, name: str, foreign: str) -> None:
    client = Client(talk(6))
    await committed(store, client, client.checkpoint(2))
    await raw.hset(Keys.around(client.id).base + b"s:" + client.lineage.encode(), name, FOREIGN[foreign])
    await _goes_on(store, client, 1)
    assert await store.undo(client.id, 0)
    assert await store.delete(client.id)


@pytest.mark.parametrize("foreign", FOREIGN)
async def test_a_foreign_offer_is_none(store: Store, raw: Redis, foreign: str) -> None:
    client = Client(talk(6))
    key = Keys.around(client.id).offer(client.lineage)
    await _put(raw, key, FOREIGN[foreign])
    assert await store.offered(client.id) is None
    made = client.checkpoint(2)
    assert await store.offer(client.id, made)
    assert await store.offered(client.id) == made
    value = await raw.get(key)
    await raw.set(key, value[: len(value) // 2], ex=60)
    assert await store.offered(client.id) is None
    other = replace(client, lineage="another")
    await raw.set(Keys.around(other.id).offer(other.lineage), value, ex=60)
    assert await store.offered(other.id) is None  # somebody else's


async def test_a_turn_is_not_put_into_entries_that_are_damaged(store: Store, raw: Redis, troubles: Troubles) -> None:
    """What they hold behind it would stay there, and the session could never be read again: the next turn brings all of it."""
    client = Client(talk(3))
    assert await store.save(client.saved())
    known = await store.session(client.id)
    await raw.append(Keys.around(client.id).base + b"d:" + client.lineage.encode(), b"?" * 32 * 4)
    longer = client.says(*talk(2, "on"))
    assert not await store.save(longer.saved(known, started_ms=2000))
    assert troubles.seen["gap"] == 1
    assert await store.save(longer.saved(started_ms=3000))
    found = await store.session(longer.id)
    assert found is not None
    assert found.entries == longer.entries


async def test_what_is_of_another_type_is_counted_so(store: Store, raw: Redis, troubles: Troubles) -> None:
    client = Client(talk(2))
    of = Keys.around(client.id)
    for key in (of.checkpoint("id"), of.journal(client.lineage), of.offer(client.lineage)):
        await raw.hset(key, "what", "is this")
    assert await store.checkpoint(client.id, "id") is None
    assert await store.journal(client.id) == ()
    assert await store.offered(client.id) is None
    assert troubles.seen == {"type": 3}
