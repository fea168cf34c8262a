"""Which checkpoint a request finds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from proxy.store import Store
from store.builders import (
    Client,
    committed,
    talk,
)


async def test_a_checkpoint_comes_with_the_next_recall(store: Store) -> None:
    client = Client(talk(6))
    made = client.checkpoint(4)
    await committed(store, client, made)
    found = await store.recall(client.says(*talk(1, "next")).query)
    assert found is not None
    assert (found.own, found.foreign) == (made, ())
    assert found.session is not None
    assert (found.session.version, found.session.generation, found.session.checkpoints) == (1, 1, (made.ref,))
    assert await store.checkpoint(client.id, made.id) == made
    assert await store.checkpoint(client.id, "unknown") is None


async def test_the_newest_that_fits_is_taken(store: Store) -> None:
    client = Client(talk(8))
    first, second = client.checkpoint(2, seen_len=4), client.checkpoint(6, generation=2, seen_len=8)
    await committed(store, client, first)
    await committed(store, client, second, version=1)
    found = await store.recall(client.query)
    assert found is not None
    assert found.own == second
    assert found.session is not None
    assert found.session.checkpoints == (first.ref, second.ref)


@pytest.mark.parametrize(
    ("why", "k", "seen_len", "request_length", "applies"),
    [
        ("a message is left behind it", 4, 4, 5, True),
        ("nothing is left behind it", 4, 4, 4, False),
        ("nothing is left behind it in its own session", 6, 6, 6, False),
        ("it has not seen all that it covers", 4, 3, 6, False),
        ("the request ends before what was seen", 4, 6, 5, False),
        ("the request ends at what was seen", 4, 6, 6, True),
    ],
)
async def test_a_checkpoint_applies_only_where_all_that_was_read_lies_in_front(
    store: Store, why: str, k: int, seen_len: int, request_length: int, applies: bool
) -> None:
    client = Client(talk(6))
    made = client.checkpoint(k, seen_len=seen_len)
    await committed(store, client, made)
    found = await store.recall(Client(client.messages[:request_length]).query)
    assert found is not None
    assert (made in (found.own, *found.foreign)) is applies, why


async def test_a_branch_that_left_before_what_was_seen_does_not_get_it(store: Store) -> None:
    client = Client(talk(6))
    await committed(store, client, client.checkpoint(2, seen_len=6))
    fork = Client((*client.messages[:5], *talk(3, "else")))
    found = await store.recall(fork.query)
    assert found is not None
    assert (found.own, found.foreign) == (None, ())


async def test_a_fork_gets_its_parents_checkpoint_as_a_foreign_one(store: Store) -> None:
    start = Client(talk(4))
    await store.save(start.saved())
    made = start.checkpoint(2)
    await store.commit(start.commit(0, made))
    end = start.says(*talk(3, "on"))
    await store.save(end.saved(await store.session(start.id), started_ms=2000))

    fork = replace(start.says(*talk(2, "else")), lineage="fork")
    found = await store.recall(fork.query)
    assert found is not None
    assert (found.own, found.foreign) == (
        None,
        (made,),
    )  # its preamble is for the caller to judge: another session made it

    await store.save(fork.saved(started_ms=3000))
    found = await store.recall(fork.says(*talk(1, "next")).query)
    assert found is not None
    assert (found.own, found.foreign) == (None, (made,))


async def test_an_equal_prefix_under_another_id_counts_as_foreign(store: Store) -> None:
    one = Client(talk(4), explicit="one")
    made = one.checkpoint(2)
    await committed(store, one, made)
    found = await store.recall(Client(talk(4), explicit="two").query)
    assert found is not None
    assert found.session is not None
    assert (found.session.id, found.own, found.foreign) == (one.id, None, (made,))


async def test_foreign_checkpoints_come_longest_first_one_per_preamble_and_four_at_most(store: Store) -> None:
    trunk = talk(12)
    made = {}
    plan = [
        ("a", 3, b"p1"),
        ("b", 8, b"p2"),
        ("c", 5, b"p1"),
        ("d", 7, b"p3"),
        ("e", 6, b"p4"),
        ("f", 4, b"p5"),
        ("g", 8, b"p6"),
    ]
    for name, k, preamble in plan:
        client = Client((*trunk[:9], *talk(2, name)), lineage=f"lineage{name}")
        made[name] = client.checkpoint(k, seen_len=9, preamble=preamble, text=name, id=f"id{name}")
        await committed(store, client, made[name])
    found = await store.recall(Client(trunk).query)
    assert found is not None
    assert [one.text for one in found.foreign] == ["g", "b", "d", "e"]

    for name in "gbde":
        await store.undo(Client(trunk, lineage=f"lineage{name}").id, 0)
    found = await store.recall(Client(trunk).query)
    assert found is not None
    assert [one.text for one in found.foreign] == ["c", "f"]  # c covers more than a under the same preamble


async def test_what_was_undone_takes_no_place_from_what_stands(store: Store) -> None:
    trunk = talk(6)
    stands = Client((*trunk, *talk(1, "one")), lineage="one")
    made = stands.checkpoint(4, seen_len=6, preamble=b"p1", id="stands")
    await committed(store, stands, made)
    other = Client((*trunk, *talk(1, "other")), lineage="other")
    await store.save(other.saved())
    for generation in range(1, 11):  # more than a prefix keeps
        known = await store.session(other.id)
        assert known is not None
        again = other.checkpoint(4, generation=generation, seen_len=6, preamble=b"p2")
        assert await store.commit(other.commit(known.version, again))
        assert await store.undo(other.id, 0)
    found = await store.recall(Client((*trunk, *talk(1, "new"))).query)
    assert found is not None
    assert found.foreign == (made,)


async def test_a_prefix_keeps_a_bounded_number_of_checkpoints(store: Store, raw: Redis) -> None:
    trunk = talk(6)
    for i in range(12):
        client = Client((*trunk, *talk(1, f"branch {i}")), lineage=f"lineage{i}")
        await committed(store, client, client.checkpoint(4, seen_len=6, preamble=b"p%d" % i, id=f"id{i}"))
    keys = await raw.keys("wf:*:k:*")
    assert len(keys) == 1
    found = await store.recall(Client((*trunk, *talk(1, "new"))).query)
    assert found is not None
    assert [one.id for one in found.foreign] == ["id11", "id10", "id9", "id8"]
    assert (await raw.get(keys[0])).count(b"lineage") == 8


async def test_a_session_keeps_its_eight_newest_references(store: Store) -> None:
    client = Client(talk(24))
    await store.save(client.saved())
    for generation in range(1, 11):
        assert await store.commit(
            client.commit(generation - 1, client.checkpoint(generation * 2, generation=generation))
        )
    found = await store.session(client.id)
    assert found is not None
    assert [ref.generation for ref in found.checkpoints] == list(range(3, 11))
    assert (found.generation, found.version) == (10, 10)
