"""The way of a compaction: commit, undo, note."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from proxy.core.model import Counters, Pending, Trigger
from proxy.store import Store
from proxy.store.keys import Keys
from store.builders import (
    Client,
    Troubles,
    attempt,
    committed,
    talk,
)

ROUNDS_OF_TWO_WRITERS = 200


async def test_undo_leaves_a_tombstone_and_what_was_in_force_before(store: Store, troubles: Troubles) -> None:
    client = Client(talk(8))
    first, second = client.checkpoint(2), client.checkpoint(4, generation=2)
    await committed(store, client, first)
    await committed(store, client, second, version=1)

    assert await store.undo(client.id, 5)
    found = await store.recall(client.query)
    assert found is not None
    assert found.own == first
    assert found.session is not None
    assert found.session.checkpoints == (first.ref, replace(second.ref, dead=True))
    assert (found.session.version, found.session.generation) == (3, 2)
    assert found.session.counters.last_turn == found.session.counters.turns == 1  # the debounce starts again
    buried = await store.checkpoint(client.id, second.id)
    assert buried == replace(second, ref=replace(second.ref, dead=True))  # a turn that carried it can still be rebuilt

    elsewhere = await store.recall(Client((*client.messages, *talk(2, "fork")), explicit="other").query)
    assert elsewhere is not None
    assert elsewhere.foreign == (first,)
    assert not await store.commit(
        client.commit(2, client.checkpoint(6, generation=3))
    )  # based on what was before the undo
    assert not await store.commit(client.commit(3, client.checkpoint(6, generation=2)))  # a generation is used once
    third = client.checkpoint(3, generation=3)
    assert await store.commit(client.commit(3, third))  # shorter than the dead one, longer than the living one
    found = await store.recall(client.query)
    assert found is not None
    assert found.own == third
    assert await store.undo(client.id, 5)
    assert await store.undo(client.id, 5)
    assert not await store.undo(client.id, 5)
    assert troubles.seen == {"version": 1, "generation": 1}


async def test_undo_forgets_what_was_pending(store: Store) -> None:
    client = Client(talk(8))
    await committed(store, client, client.checkpoint(2))
    known = await store.session(client.id)
    on = client.says(*talk(1, "on"))
    await store.save(on.saved(known, started_ms=2000, pending=Pending(Trigger.SOFT, 5)))
    assert await store.undo(client.id, 5)
    found = await store.session(client.id)
    assert found is not None
    assert found.pending is None


async def test_a_checkpoint_of_a_branch_that_is_gone_stands_in_nobodys_way(store: Store, troubles: Troubles) -> None:
    """The client went back and another way: what the old one covered says nothing about the messages that are there now."""
    old = Client(talk(8))
    await committed(store, old, old.checkpoint(6))
    new = Client((*talk(3), *talk(6, "new")), lineage=old.lineage)
    known = await store.session(old.id)
    assert await store.save(new.saved(known, started_ms=2000))
    assert await store.commit(new.commit(1, new.checkpoint(4, generation=2, id="shorter")))
    assert not await store.commit(new.commit(2, new.checkpoint(4, generation=3, id="again")))
    assert troubles.seen == {"order": 1}
    found = await store.recall(new.query)
    assert found is not None
    assert found.own is not None
    assert found.own.id == "shorter"


@pytest.mark.parametrize(
    ("why", "seen_len", "stands_in_the_way"),
    [
        ("covers and has seen what both branches share", 4, True),
        ("covers what both share, and has seen what only the other one says", 5, False),
        ("was made in front of a request that never became a turn", 12, False),
    ],
)
async def test_a_checkpoint_that_has_seen_another_branch_stands_in_nobodys_way(
    store: Store, troubles: Troubles, why: str, seen_len: int, stands_in_the_way: bool
) -> None:
    """No request of this branch may have its text: if it kept others out, none would ever have a checkpoint."""
    old, gone = Client(talk(8)), Client(talk(12))
    await committed(store, old, gone.checkpoint(3, seen_len=seen_len))
    new = Client((*talk(4), *talk(6, "new")), lineage=old.lineage)
    assert await store.save(new.saved(await store.session(old.id), started_ms=2000))
    made = new.checkpoint(2, generation=2)
    assert await store.commit(new.commit(1, made)) is not stands_in_the_way, why
    assert troubles.seen["order"] == stands_in_the_way
    found = await store.recall(new.query)
    assert found is not None
    assert found.own is not None
    assert found.own.k == (3 if stands_in_the_way else 2)


async def test_a_commit_is_refused_unless_it_builds_on_what_is(store: Store, troubles: Troubles) -> None:
    client = Client(talk(8))
    assert not await store.commit(client.commit(0, client.checkpoint(2)))
    await committed(store, client, client.checkpoint(4))
    for version, generation, k in [(0, 2, 6), (2, 2, 6), (1, 1, 6), (1, 3, 6), (1, 2, 4), (1, 2, 3)]:
        refused = client.checkpoint(k, generation=generation, id=f"refused{version}{generation}{k}")
        assert not await store.commit(client.commit(version, refused))
        assert await store.checkpoint(client.id, refused.id) is None
    assert troubles.seen == {"gone": 1, "version": 2, "generation": 2, "order": 2}
    found = await store.session(client.id)
    assert found is not None
    assert (found.version, found.generation, len(found.checkpoints)) == (1, 1, 1)
    await store.save(client.says(*talk(1, "on")).saved(found, started_ms=2000))  # a turn does not move the version
    assert await store.commit(client.commit(1, client.checkpoint(6, generation=2)))


async def test_of_two_commits_in_flight_exactly_one_wins(store: Store, other: Store) -> None:
    client = Client(talk(ROUNDS_OF_TWO_WRITERS + 2))
    await store.save(client.saved())
    generations = set()
    for round_ in range(ROUNDS_OF_TWO_WRITERS):

        async def compact(of: Store, name: str, k: int) -> bool:
            known = await of.session(client.id)
            assert known is not None
            await asyncio.sleep(random.random() / 2000)
            generation = known.generation + 1
            won = await of.commit(
                client.commit(known.version, client.checkpoint(k, generation=generation, id=f"{name}{k}"))
            )
            if won:
                assert generation not in generations
                generations.add(generation)
            return won

        results = await asyncio.gather(compact(store, "a", round_ + 1), compact(other, "b", round_ + 1))
        # Both may read after the other's commit; then the later one covers no more than the earlier and is refused.
        assert sorted(results) == [False, True]
    assert generations == set(range(1, ROUNDS_OF_TWO_WRITERS + 1))


async def test_an_applied_checkpoint_lives_longer_and_counts_as_used(store: Store, raw: Redis) -> None:
    client = Client(talk(6))
    made = client.checkpoint(4)
    await committed(store, client, made)
    await store.note(client.id, attempt(), Counters(unapplied=2))
    kept = [Keys.around(client.id).checkpoint(made.id), *await raw.keys("wf:*:k:*"), *await raw.keys("wf:*:m")]
    assert len(kept) == 3
    for key in kept:
        await raw.pexpire(key, 1000)
    known = await store.session(client.id)
    assert known is not None
    assert known.counters.unapplied == 2
    await store.save(client.says(*talk(1, "on")).saved(known, started_ms=2000, applied=made.id))
    for key in kept:
        assert 7000_000 < await raw.pttl(key) <= 7200_000
    known = await store.session(client.id)
    assert known is not None
    assert known.counters.unapplied == 0


async def _unapplied(store: Store, client: Client) -> int:
    found = await store.recall(client.query)
    assert found is not None
    return found.root_unapplied


async def test_checkpoints_that_no_request_carried_are_counted_over_all_sessions_of_a_root(store: Store) -> None:
    """A client that rewrites its history is a new session each turn: only the root can tell that the last ones were for nothing."""
    one, two = Client(talk(6, "one"), lineage="one"), Client(talk(6, "two"), lineage="two")
    stranger, new = replace(one, root="another"), Client(talk(3, "new"))
    await committed(store, stranger, stranger.checkpoint(4, id="theirs"))
    assert await _unapplied(store, one) == 0
    await committed(store, one, one.checkpoint(2))
    assert [await _unapplied(store, client) for client in (one, two, new, stranger)] == [1, 1, 1, 1]
    assert not await store.commit(one.commit(0, one.checkpoint(4, generation=2)))  # based on what is no more
    assert await _unapplied(store, one) == 1
    await committed(store, two, two.checkpoint(4, id="idtwo"))
    assert [await _unapplied(store, client) for client in (one, two, new)] == [2, 2, 2]

    known = await store.session(one.id)
    assert await store.save(one.says(*talk(1, "on")).saved(known, started_ms=2000))
    assert await _unapplied(store, two) == 2  # a turn without a checkpoint is no use of one
    known = await store.session(one.id)
    assert await store.save(one.says(*talk(2, "on")).saved(known, started_ms=3000, applied=one.checkpoint(2).id))
    assert [await _unapplied(store, client) for client in (one, two, new, stranger)] == [0, 0, 0, 1]
    assert await store.commit(two.commit(1, two.checkpoint(5, generation=2, id="again")))
    assert await _unapplied(store, one) == 1


async def test_what_was_not_applied_is_forgotten_after_the_pause(store: Store, raw: Redis) -> None:
    client = Client(talk(6))
    await committed(store, client, client.checkpoint(2))
    key = Keys.around(client.id).base + b"u"
    await raw.pexpire(key, 5)
    await committed(store, client, client.checkpoint(4, generation=2), version=1)
    assert 890_000 < await raw.pttl(key) <= 900_000  # the newest one counts for the whole pause, and the others with it
    await raw.delete(key)
    assert await _unapplied(store, client) == 0
    for foreign in ("what is this", "inf", "-3", "1.5", "9" * 30):
        await raw.set(key, foreign, ex=60)
        assert await _unapplied(store, client) == 0
    await raw.set(key, "7")  # without an end it would hold compactions up for ever
    assert await _unapplied(store, client) == 0


async def test_an_offer_serves_other_workers_until_the_session_can_have_it(
    store: Store, other: Store, raw: Redis
) -> None:
    """The session's first turn is under way: there is nothing yet that a commit could build on."""
    client = Client(talk(8))
    first, second = client.checkpoint(2), client.checkpoint(4)
    assert await store.offered(client.id) is None
    assert await store.offer(client.id, first)
    assert await other.offered(client.id) == first
    assert await store.offer(client.id, second)  # the next pass
    assert await other.offered(client.id) == second
    assert await other.offered(replace(client.id, lineage="another")) is None
    assert 590_000 < await raw.pttl(Keys.around(client.id).offer(client.lineage)) <= 600_000
    found = await other.recall(client.query)
    assert found is not None
    assert (found.session, found.own, found.foreign) == (None, None, ())  # it is no session's yet

    await committed(store, client, second)
    assert await other.offered(client.id) is None


async def test_an_offer_goes_with_its_session_and_with_its_tenant(store: Store, raw: Redis) -> None:
    client = Client(talk(8))
    await store.offer(client.id, client.checkpoint(2))
    await store.delete(client.id)
    assert await store.offered(client.id) is None
    await store.offer(client.id, client.checkpoint(2))
    assert await store.delete_tenant(client.tenant) == 1
    assert not await raw.keys("wf:*")


async def test_a_note_sets_what_limits_the_next_and_forgets_what_was_pending(store: Store) -> None:
    client = Client(talk(2))
    assert not await store.note(client.id, attempt(), Counters())
    await store.save(client.saved(pending=Pending(Trigger.SOFT, 5)))
    limits = Counters(turns=99, last_turn=1, failures=2, not_before_ms=123, unapplied=1)
    assert await store.note(client.id, attempt(), limits)
    found = await store.session(client.id)
    assert found is not None
    assert (found.counters, found.pending, found.version) == (replace(limits, turns=1), None, 0)
    assert await store.note(client.id, attempt(2), Counters())
    found = await store.session(client.id)
    assert found is not None
    assert found.counters == Counters(turns=1)


async def test_the_journal_keeps_the_fifty_newest(store: Store) -> None:
    client = Client(talk(2))
    await store.save(client.saved())
    assert await store.journal(client.id) == ()
    for at in range(55):
        await store.note(client.id, attempt(at), Counters())
    assert await store.journal(client.id) == tuple(attempt(at) for at in range(54, 4, -1))


async def test_scripts_may_be_forgotten_by_the_server_at_any_time(store: Store, raw: Redis, troubles: Troubles) -> None:
    client = Client(talk(20))
    for generation in range(1, 6):
        await raw.script_flush()
        known = await store.session(client.id)
        await raw.script_flush()
        assert await asyncio.gather(
            store.save(client.saved(known, started_ms=generation)), store.save(Client(talk(3), lineage="b").saved())
        )
        await raw.script_flush()
        assert await store.commit(client.commit(generation - 1, client.checkpoint(generation, generation=generation)))
        await raw.script_flush()
        found = await store.recall(client.query)
        assert found is not None
        assert found.own is not None
        assert found.own.k == generation
        await raw.script_flush()
        page = await store.list(10, "")
        assert page is not None
        assert len(page.sessions) == 2
    assert set(troubles.seen) <= {"stale"}
