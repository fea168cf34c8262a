"""Which session a request continues, and how much it weighs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import conversation, fingerprint, openai, tokens
from proxy.core.conversation import Conversation
from proxy.core.model import Counters, Entries, Entry, Recalled, Session, SessionId, Turn, Usage, Window
from tests.core.build import body_of, checkpoint, elements, read, talk
from tests.strategies import Chat, chats


def _session(of: Conversation, *, explicit: str = "", turn: Turn | None = None, **keys: Any) -> Session:
    """A session whose last turn was this request."""
    entries = Entries.of(Entry(chain, fact.byte_hash) for chain, fact in zip(of.chain, of.facts, strict=True))
    session = Session(
        id=SessionId(of.query.tenant, of.query.root, "lineage"),
        explicit=explicit,
        turn=turn,
        entries=entries,
        bodies_from=0,
        counters=Counters(turns=7, failures=2),
        version=3,
        generation=1,
        checkpoints=(),
        pending=None,
        touched_ms=0,
        created_ms=0,
    )
    return replace(session, **keys)


@given(chats())
def test_the_preamble_is_the_leading_system_and_developer_messages(chat: Chat) -> None:
    found = read(chat.body)
    assert found.preamble_length == chat.preamble_length
    assert tuple(m.strip() for m in found.messages) == chat.elements[chat.preamble_length :]
    assert len(found.facts) == len(found.chain) == len(found.query.chain) == len(chat.conversation)


@pytest.mark.parametrize(
    ("notation", "preamble", "length"),
    [
        pytest.param("u a", 0, 2, id="none"),
        pytest.param("s u a", 1, 2, id="system"),
        pytest.param("s d s u", 3, 1, id="several"),
        pytest.param("u s a", 0, 3, id="a system message in the middle is none"),
        pytest.param("s u d a", 1, 3, id="nor is a developer message"),
    ],
)
def test_positions_count_from_behind_the_preamble(notation: str, preamble: int, length: int) -> None:
    found = read(body_of(notation))
    assert (found.preamble_length, len(found.facts)) == (preamble, length)


@pytest.mark.parametrize("notation", ["s", "d d s"])
def test_only_a_preamble_is_no_conversation(notation: str) -> None:
    request = openai.read(body_of(notation))
    assert request is not None
    assert conversation.read(request, [fingerprint.facts(m) for m in request.messages], "t", "") is None


@given(chats())
def test_preamble_tools_and_parameters_do_not_name_a_conversation(chat: Chat) -> None:
    salt = json.loads(dict(chat.members).get("cache_salt", b'""'))
    other = read(body_of([{"role": "system", "content": "12:00:02"}, *chat.conversation], cache_salt=salt))
    assert other.chain == read(chat.body).chain
    assert other.query.root == read(chat.body).query.root


@pytest.mark.parametrize(
    ("keys", "same"),
    [
        pytest.param({}, True, id="nothing else"),
        pytest.param({"explicit": "id"}, True, id="an explicit id"),
        pytest.param({"tenant": "other"}, False, id="a tenant"),
    ],
)
def test_what_separates_chains(keys: dict[str, str], same: bool) -> None:
    body = body_of("s u a u")
    assert (read(body).chain == read(body, **keys).chain) is same
    assert (read(body).query.root == read(body, **keys).query.root) is same
    assert read(body, explicit="id").query.explicit == "id"


def test_a_cache_salt_separates_chains() -> None:
    plain, salted, other = (read(body_of("u a", **keys)) for keys in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}))
    assert not set(plain.chain) & set(salted.chain)
    assert not set(salted.chain) & set(other.chain)
    assert len({plain.query.root, salted.query.root, other.query.root}) == 3


FIVE = read(body_of("s u a u a u"))


def _of_length(length: int) -> Conversation:
    return read(body_of(talk("s u a u a u a u")[: length + 1]))


@pytest.mark.parametrize(
    ("session", "matched", "continues"),
    [
        pytest.param(_session(_of_length(3)), 3, True, id="its end is known: the next turn"),
        pytest.param(_session(FIVE), 5, True, id="all of it is known: a retry"),
        pytest.param(_session(_of_length(7)), 5, False, id="ends inside a known one: a rewind"),
        pytest.param(_session(_of_length(3)), 2, False, id="leaves a known one before its end: a fork"),
        pytest.param(_session(_of_length(3), explicit="id"), 3, False, id="an explicit id that is not the request's"),
    ],
)
def test_a_session_is_continued_where_its_end_is_known(session: Session, matched: int, continues: bool) -> None:
    found = conversation.lineage(FIVE, Recalled(session, matched))
    assert (found.known is session) is continues
    assert (found.id == session.id) is continues
    assert found.counters == session.counters  # a fork inherits debounce and back-off
    assert (found.id.tenant, found.id.root) == (FIVE.query.tenant, FIVE.query.root)


@pytest.mark.parametrize("recalled", [None, Recalled(None, 0)])
def test_an_unknown_conversation_is_a_new_session(recalled: Recalled | None) -> None:
    found = conversation.lineage(FIVE, recalled)
    assert (found.known, found.counters) == (None, Counters())
    assert SessionId.parse(str(found.id)) == found.id


def test_the_same_explicit_id_continues() -> None:
    session = _session(_of_length(3), explicit="id")
    assert conversation.lineage(read(FIVE.request.body, explicit="id"), Recalled(session, 3)).known is session


def test_forks_are_named_apart() -> None:
    session = _session(_of_length(5))
    edited = talk("s u a u a u")
    edited[4]["content"] = "another"
    requests: list[tuple[Any, int]] = [
        (edited, 3),
        ([*edited[:4], *talk("u u")], 3),
        (talk("s u a u"), 3),
        (talk("s u a"), 2),
    ]
    names = [
        conversation.lineage(read(body_of(messages)), Recalled(session, matched)).id for messages, matched in requests
    ]
    assert len(set(names)) == len(names)
    assert session.id not in names
    again = conversation.lineage(read(body_of(edited)), Recalled(session, 3))
    assert again.id == names[0]  # two workers that see the same fork name it alike
    assert conversation.lineage(read(body_of(edited), explicit="id"), Recalled(session, 3)).id != names[0]
    parent = replace(session, id=replace(session.id, lineage=names[0].lineage))
    assert (
        conversation.lineage(read(body_of(edited)), Recalled(parent, 3)).id != names[0]
    )  # never its parent's own name


@given(chats(), st.integers(0, 1000), st.integers(0, 1000))
def test_what_a_checkpoint_covers_weighs_what_the_checkpoint_weighs(chat: Chat, one: int, other: int) -> None:
    found = read(chat.body)
    whole = conversation.weight(found, None)
    rendered = sum(len(raw) for key, raw in chat.members if key in ("tools", "functions", "response_format"))
    assert whole == rendered // 4 + sum(f.weight for f in (*found.preamble_facts, *found.facts))
    k = 1 + one % len(found.facts)
    from_ = other % k
    made = checkpoint(found, k, from_=from_)
    covered = sum(f.weight for f in found.facts[from_:k])
    assert conversation.weight(found, made) == whole - covered + conversation.checkpoint_weight(made)


def test_a_checkpoint_weighs_as_the_message_that_it_is() -> None:
    made = checkpoint(FIVE, 2)
    message = {"role": "user", "content": made.frame}
    assert (
        conversation.checkpoint_weight(made)
        == tokens.of_message(message)
        == fingerprint.facts(elements([message])[0]).weight
    )


def _turn(prompt: int | None, weight: int) -> Turn:
    return Turn("m", (), b"h", b"t", None, b"r", None, Usage(prompt), Window(1, "config"), "u", 0, 0, weight)


@pytest.mark.parametrize(
    ("session", "expected"),
    [
        pytest.param(None, 1.0, id="no session"),
        pytest.param(_session(FIVE), 1.0, id="no turn yet"),
        pytest.param(_session(FIVE, turn=_turn(None, 100)), 1.0, id="not counted"),
        pytest.param(_session(FIVE, turn=_turn(124, 100)), 1.24, id="counted"),
        pytest.param(_session(FIVE, turn=_turn(4096, 30_000)), 0.5, id="cut silently"),
    ],
)
def test_the_factor_is_what_the_provider_counted_over_what_we_estimated(
    session: Session | None, expected: float
) -> None:
    assert conversation.factor(session) == expected


def test_thoughts_anywhere_are_noticed() -> None:
    thinking = [*talk("u"), {"role": "assistant", "content": "a", "reasoning_content": "hm"}, *talk("u")]
    assert read(body_of(thinking)).reasons
    assert not FIVE.reasons
