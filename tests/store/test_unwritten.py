"""A conversation's next request may come before its last turn is written: it goes on with that session all the same, and no other one does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from proxy.core import conversation as conversations
from proxy.core import rewrite, turn
from proxy.core.answer import UNREAD
from proxy.core.conversation import Conversation
from proxy.core.model import Counters, Recalled, Session, Usage, Window
from proxy.store import Store
from proxy.unwritten import Unwritten
from tests.core.build import body_of, read, talk

SPOKEN = talk("s u*20 a*20 u*20")
NOT_FOUND = Recalled(None, 0)


@asynccontextmanager
async def _on_its_way(store: Store, conversation: Conversation) -> AsyncIterator[Unwritten]:
    """A turn of this conversation, the first of its session, that is being written until the block ends."""
    routed = rewrite.as_sent(conversation.request)
    lineage = replace(conversations.lineage(conversation, None), counters=Counters(turns=4, failures=1))
    done = turn.forwarded(conversation, routed, replace(UNREAD, usage=Usage(100)), 90)
    saved = turn.saved(
        lineage,
        conversation,
        routed,
        done,
        upstream="default",
        window=Window(32_000, "config"),
        started_ms=1,
        now_ms=2,
        renew_after_ms=1000,
        pending=None,
    )
    unwritten = Unwritten(store)
    saving = asyncio.ensure_future(unwritten.save(saved, conversation, None))
    await asyncio.sleep(0)  # it has begun, and waits for the server
    assert not saving.done()
    yield unwritten
    assert await saving
    found = unwritten.found(NOT_FOUND, read(body_of([*SPOKEN, *talk("a u")])), conversation)
    assert found == NOT_FOUND, "what is written is the store's"


def _session(recalled: Recalled | None) -> Session | None:
    return recalled.session if recalled else None


async def test_the_next_request_goes_on_with_the_session(store: Store) -> None:
    last = read(body_of(SPOKEN))
    async with _on_its_way(store, last) as unwritten:
        later = read(body_of([*SPOKEN, *talk("a u")]))
        found = unwritten.found(NOT_FOUND, later, last)
        assert found is not None
        assert found.matched == 3
        assert found.session is not None
        assert found.session.counters == Counters(turns=5, failures=1)
        assert conversations.lineage(later, found).known == found.session
    stored = await store.session(found.session.id)
    assert stored is not None
    assert (stored.entries, stored.turn, stored.counters) == (
        found.session.entries,
        found.session.turn,
        found.session.counters,
    )


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([*SPOKEN[:-1], *talk("u*21 a u")], id="the last message was edited"),
        pytest.param(SPOKEN, id="it is the same request again"),
        pytest.param(SPOKEN[:-2], id="it ends before"),
    ],
)
async def test_what_does_not_go_on_from_the_turn_has_nothing_of_it(store: Store, messages: list[object]) -> None:
    last = read(body_of(SPOKEN))
    async with _on_its_way(store, last) as unwritten:
        assert unwritten.found(NOT_FOUND, read(body_of(messages)), last) == NOT_FOUND


async def test_under_another_id_it_is_a_branch_as_it_would_be_of_a_stored_session(store: Store) -> None:
    last = read(body_of(SPOKEN))
    later = read(body_of([*SPOKEN, *talk("a u")]))
    branch = replace(later, query=replace(later.query, explicit="another"))
    async with _on_its_way(store, last) as unwritten:
        early = unwritten.found(NOT_FOUND, branch, last)
    stored = await store.recall(branch.query)
    lineages = [conversations.lineage(branch, recalled) for recalled in (early, stored)]
    assert lineages[0] == lineages[1]
    assert lineages[0].known is None
    assert lineages[0].counters == Counters(turns=5, failures=1)


async def test_what_the_store_knows_counts_and_where_it_is_away_nothing_does(store: Store) -> None:
    last = read(body_of(SPOKEN))
    later = read(body_of([*SPOKEN, *talk("a u")]))
    async with _on_its_way(store, last) as unwritten:
        assert unwritten.found(None, later, last) is None
        assert unwritten.found(NOT_FOUND, later, None) == NOT_FOUND
        session = _session(unwritten.found(NOT_FOUND, later, last))
        known = Recalled(session, 2)
        assert unwritten.found(known, later, last) is known
