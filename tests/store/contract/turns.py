"""The way of a turn: recall and save."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from proxy.core.model import Counters, Entries, Entry, Pending, Query, Recalled, Trigger
from proxy.store import Store
from proxy.store.keys import Keys
from store.builders import (
    HEAD,
    OTHER_TENANT,
    PREAMBLE,
    TAIL,
    TENANT,
    Client,
    Troubles,
    named,
    talk,
)


async def test_a_new_conversation_is_unknown(store: Store) -> None:
    assert await store.recall(Client(talk(3)).query) == Recalled(None, 0)
    assert await store.recall(Query(TENANT, "root", "", ())) == Recalled(None, 0)


async def test_a_turn_comes_back_as_it_was_saved(store: Store, troubles: Troubles) -> None:
    client = Client(talk(5))
    pending = Pending(Trigger.SOFT, 77)
    inherit = Counters(turns=4, last_turn=2, failures=1, not_before_ms=9, unapplied=3)
    assert await store.save(client.saved(inherit=inherit, pending=pending))

    found = await store.recall(client.query)

    assert found is not None
    session = found.session
    assert session is not None
    assert (session.id, session.explicit, session.turn, session.entries) == (
        client.id,
        "",
        client.turn(),
        client.entries,
    )
    assert session.counters == replace(inherit, turns=5)
    assert (session.version, session.generation, session.checkpoints) == (0, 0, ())
    assert session.pending == pending
    assert session.created_ms == session.touched_ms > 0
    assert (found.matched, found.own, found.foreign) == (5, None, ())
    assert await store.session(client.id) == session
    assert not troubles.seen


async def test_the_next_request_finds_the_end_of_the_last_turn(store: Store) -> None:
    client = Client(talk(3))
    await store.save(client.saved())
    longer = client.says(*talk(2, "more"))

    found = await store.recall(longer.query)
    assert found is not None
    assert found.session is not None
    assert (found.matched, found.session.length) == (3, 3)

    assert await store.save(longer.saved(found.session, started_ms=2000))
    found = await store.recall(longer.query)
    assert found is not None
    assert found.session is not None
    assert (found.matched, found.session.entries) == (5, longer.entries)
    assert found.session.counters.turns == 2


async def test_a_turn_writes_only_what_is_new(store: Store, raw: Redis) -> None:
    client = Client(talk(200, "x" * 1000))
    await store.save(client.saved())
    found = await store.session(client.id)
    before = (await raw.info("stats"))["total_net_input_bytes"]

    await store.save(client.says(*talk(2, "y" * 1000)).saved(found, started_ms=2000))

    written = (await raw.info("stats"))["total_net_input_bytes"] - before
    assert 2000 < written < 4000


async def test_a_recall_is_one_command(store: Store, raw: Redis) -> None:
    client = Client(talk(30))
    await store.save(client.saved())
    await store.commit(client.commit(0, client.checkpoint(10)))
    await store.recall(client.query)  # the script is known from here on
    fork = Client((*client.messages[:20], *talk(5, "elsewhere")))
    async with Redis(connection_pool=raw.connection_pool).monitor() as monitor:
        await store.recall(client.query)
        await store.recall(fork.query)
        await raw.echo("over")
        seen = []
        while not (seen and seen[-1]["command"].startswith("ECHO")):
            seen.append(await monitor.next_command())
    sent = [one["command"].split()[0] for one in seen if one["client_type"] != "lua"]
    assert [one for one in sent if one != "CLIENT"] == ["EVALSHA", "EVALSHA", "ECHO"]  # CLIENT: our own client connects


async def test_a_slower_older_turn_never_overwrites_a_newer_one(store: Store, troubles: Troubles) -> None:
    client = Client(talk(5))
    newer, shorter = client.saved(started_ms=2000), Client(talk(3)).saved(started_ms=3000)
    earlier = replace(client.saved(started_ms=1000), turn=replace(client.turn(1000), model="wrong"))
    assert await store.save(newer)
    assert await store.save(shorter)
    assert await store.save(earlier)
    found = await store.session(client.id)
    assert found is not None
    assert (found.turn, found.length, found.counters.turns) == (newer.turn, 5, 1)
    assert troubles.seen == {"stale": 2}

    again = client.saved(found, started_ms=2500)  # the same request once more: a regenerated answer
    assert await store.save(again)
    found = await store.session(client.id)
    assert found is not None
    assert (found.turn, found.entries, found.counters.turns) == (again.turn, client.entries, 2)


async def test_a_fork_is_told_by_where_it_leaves_and_both_go_on(store: Store) -> None:
    start = Client(talk(3))
    await store.save(start.saved())
    known = await store.session(start.id)
    end = start.says(*talk(4, "on"))
    await store.save(end.saved(known, started_ms=2000))

    fork = replace(start.says(*talk(2, "else")), lineage="lineagebbbbbbbbb")
    found = await store.recall(fork.query)
    assert found is not None
    assert found.session is not None
    assert (found.session.id, found.matched, found.session.length) == (end.id, 3, 7)  # not its end: so a fork

    await store.save(fork.saved(started_ms=3000, inherit=found.session.counters))
    for client in (end, fork):
        found = await store.recall(client.says(*talk(1, "next")).query)
        assert found is not None
        assert found.session is not None
        assert (found.session.id, found.matched, found.session.length) == (
            client.id,
            len(client.messages),
            len(client.messages),
        )
        assert found.session.counters.turns == (2 if client is end else 3)


async def test_a_turn_is_not_put_behind_a_prefix_that_went_another_way(store: Store, troubles: Troubles) -> None:
    start = Client(talk(3))
    await store.save(start.saved())
    base = await store.session(start.id)
    one, two = start.says(*talk(2, "one")), start.says(*talk(2, "two"))
    await store.save(one.saved(base, started_ms=2000))
    after_one = await store.session(start.id)
    assert await store.save(two.saved(base, started_ms=3000))  # the other of two turns that went on from the same end
    assert not await store.save(one.says(*talk(2, "on")).saved(after_one, started_ms=4000))
    assert troubles.seen == {"gap": 1}

    found = await store.recall(one.query)
    assert found is not None
    assert found.session is not None
    assert (found.matched, found.session.entries) == (3, two.entries)
    gone = replace(one, lineage="lineagezzzzzzzzz").saved(after_one, started_ms=5000)
    assert not await store.save(gone)  # the session it builds on was never there


async def test_explicit_ids_separate_equal_prefixes_and_fall_back_to_the_tenant(store: Store) -> None:
    prefix = talk(3)
    plain = Client(prefix, lineage="plain")
    ids = [Client(prefix, lineage=f"lineage{i}", explicit=f"id{i}") for i in range(3)]
    await store.save(ids[0].saved(inherit=Counters(failures=1)))

    found = await store.recall(ids[1].query)  # not known under this id: looked for under the tenant
    assert found is not None
    assert found.session is not None
    assert (found.session.id, found.session.explicit) == (ids[0].id, "id0")

    await store.save(ids[1].saved(inherit=Counters(failures=2)))
    await store.save(plain.saved(inherit=Counters(failures=3)))
    for client in ids[:2]:
        found = await store.recall(client.query)
        assert found is not None
        assert found.session is not None
        assert found.session.id == client.id
    for client in (plain, ids[2]):
        found = await store.recall(client.query)
        assert found is not None
        assert found.session is not None
        assert found.session.id == plain.id


@pytest.mark.parametrize("foreign", [False, True])
async def test_the_tenants_entry_stays_with_the_first_id_while_that_lives(
    store: Store, raw: Redis, foreign: bool
) -> None:
    prefix = talk(3)
    first, second = (Client(prefix, lineage=f"lineage{i}", explicit=f"id{i}") for i in range(2))
    asks = Client(prefix).query
    await store.save(first.saved())
    await store.save(second.saved())
    found = await store.recall(asks)
    assert found is not None
    assert found.session is not None
    assert found.session.id == first.id
    record = Keys.around(first.id).base + b"s:lineage0"
    await raw.delete(record)  # as when it ran out: the entry still names it
    if foreign:
        await raw.set(record, "what is this", ex=60)
    assert await store.recall(asks) == Recalled(None, 0)
    await store.save(second.saved(started_ms=2000))
    found = await store.recall(asks)
    assert found is not None
    assert found.session is not None
    assert found.session.id == second.id


async def test_a_tenant_never_finds_what_is_anothers(store: Store) -> None:
    client = Client(talk(4))
    await store.save(client.saved())
    await store.commit(client.commit(0, client.checkpoint(2)))
    theirs = Client(talk(4), tenant=OTHER_TENANT)
    assert await store.recall(theirs.query) == Recalled(None, 0)
    assert await store.recall(replace(client.query, tenant=OTHER_TENANT)) == Recalled(None, 0)
    assert await store.session(theirs.id) is None
    assert await store.bodies(theirs.id, [named(HEAD)]) is None
    assert await store.checkpoint(theirs.id, client.checkpoint(2).id) is None


async def test_bodies_come_whole_or_not_at_all(store: Store, raw: Redis) -> None:
    client = Client(talk(4))
    await store.save(client.saved())
    wanted = [named(HEAD), *(e.byte_hash for e in client.entries), named(HEAD)]
    found = await store.bodies(client.id, wanted)
    assert found is not None
    assert b",".join(found[name] for name in wanted) == b",".join((HEAD, *client.messages, HEAD))
    assert await store.bodies(client.id, []) == {}
    assert await store.bodies(client.id, [*wanted, b"?" * 16]) is None
    await raw.delete(Keys.around(client.id).body(wanted[2]))
    assert await store.bodies(client.id, wanted) is None


async def test_a_pending_compaction_is_replaced_by_each_turn(store: Store) -> None:
    client = Client(talk(2))
    await store.save(client.saved(pending=Pending(Trigger.SOFT, 5)))
    known = await store.session(client.id)
    assert known is not None
    assert known.pending == Pending(Trigger.SOFT, 5)
    await store.save(client.says(*talk(2, "on")).saved(known, started_ms=2000))
    known = await store.session(client.id)
    assert known is not None
    assert known.pending is None


async def test_live_bytes_are_renewed_when_the_caller_asks(store: Store, raw: Redis) -> None:
    client = Client(talk(4))
    of = Keys.around(client.id)
    await store.save(client.saved())
    known = await store.session(client.id)
    assert known is not None
    for entry in client.entries:
        await raw.pexpire(of.body(entry.byte_hash), 1000)
    longer = client.says(*talk(2, "on"))
    await store.save(longer.saved(known, started_ms=2000))
    after = await store.session(client.id)
    assert after is not None
    assert after.touched_ms == known.touched_ms
    assert await raw.pttl(of.body(client.entries[0].byte_hash)) <= 1000

    touch = tuple(e.byte_hash for e in client.entries[1:])
    await store.save(longer.saved(after, started_ms=3000, touch=touch))
    renewed = await store.session(client.id)
    assert renewed is not None
    assert renewed.touched_ms >= known.touched_ms
    assert await raw.pttl(of.body(client.entries[0].byte_hash)) <= 1000
    for name in touch:
        assert 3600_000 < await raw.pttl(of.body(name)) <= 4500_000


async def test_a_fork_that_shares_bytes_does_not_trust_their_age(store: Store) -> None:
    """A session's bytes live as long as they were last renewed for; a fork knows only of those that it brought."""
    client = Client(talk(4))
    await store.save(client.saved())
    fork = Client((*client.messages[:2], *talk(2, "else")), lineage="fork")
    whole = fork.saved()
    shared = {named(m) for m in client.messages}
    await store.save(replace(whole, bodies={n: b for n, b in whole.bodies.items() if n not in shared}))
    found = await store.session(fork.id)
    assert found is not None
    assert found.touched_ms == 0


async def test_the_tenant_secret_is_made_once(store: Store, other: Store, raw: Redis) -> None:
    secrets = await asyncio.gather(*(one.tenant_secret() for one in (store, other) for _ in range(10)))
    assert len(set(secrets)) == 1
    assert secrets[0] is not None
    assert len(secrets[0]) == 32
    await raw.set("wf:secret", "short")
    assert await store.tenant_secret() is None


async def test_a_turn_that_does_not_add_up_is_not_stored(store: Store, troubles: Troubles) -> None:
    client = Client(talk(4))
    for wrong in (
        replace(client.saved(), length=5),
        replace(client.saved(), end=b"?" * 16),
        replace(client.saved(), entries=Entries.of((*client.entries[:3], Entry(b"?" * 16, b"?" * 16)))),
        replace(client.saved(), entries=Entries(), length=0),
    ):
        assert not await store.save(wrong)
    assert troubles.seen == {"internal": 4}
    assert await store.session(client.id) is None


async def test_the_preamble_and_envelope_are_bytes_like_any_other(store: Store) -> None:
    client = Client(talk(2))
    await store.save(client.saved())
    session = await store.session(client.id)
    assert session is not None
    assert session.turn is not None
    found = await store.bodies(client.id, [session.turn.head, session.turn.tail, *session.turn.preamble])
    assert found is not None
    assert set(found.values()) == {HEAD, TAIL, PREAMBLE}


async def test_a_conversation_without_end_has_no_session(store: Store, troubles: Troubles) -> None:
    """A request may hold millions of empty messages: nobody else must wait while the server looks for each of them."""
    endless = Client((b"{}",) * 32_769)
    assert await store.recall(endless.query) == Recalled(None, 0)
    assert not await store.save(endless.saved())
    assert troubles.seen == {"too_long": 2}
    longest = Client(talk(8000))
    await store.save(Client(longest.messages[:3000]).saved())
    found = await store.recall(longest.query)  # its end lies more than 4096 messages back
    assert found == Recalled(None, 0)
    found = await store.recall(Client(longest.messages[:7000]).query)
    assert found is not None
    assert found.matched == 3000
