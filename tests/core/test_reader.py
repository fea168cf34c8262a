"""A reader that remembers says the same as one that does not."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import conversation as conversations
from proxy.core import fingerprint, openai
from proxy.core.conversation import Conversation
from proxy.core.reader import Reader
from tests.strategies import Chat, chats

FIELDS = frozenset({"prompt_cache_key"})


def remembered(reader: Reader, body: bytes, tenant: str = "t") -> tuple[Conversation | None, Conversation | None]:
    """What the reader makes of a body, and the earlier conversation that it used."""
    parsed = reader.parse(body, FIELDS)
    if parsed is None:
        return None, None
    request, known = parsed
    found = conversations.read(request, tuple(reader.facts(request, known)), tenant, "", known)
    if found is not None:
        reader.remember(found, known)
    return found, known


def fresh(body: bytes, tenant: str = "t") -> Conversation | None:
    request = openai.read(body, FIELDS)
    return (
        None
        if request is None
        else conversations.read(request, [fingerprint.facts(m) for m in request.messages], tenant, "")
    )


def long_chat(seed: int, messages: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    made: list[dict[str, Any]] = [{"role": "system", "content": "The same opening. " * 80}]
    for at in range(messages):
        made.append(
            {"role": ("user", "assistant")[at % 2], "content": f"{seed} {at} " + "word " * chance.randrange(5, 120)}
        )
    return made


def body(messages: list[dict[str, Any]], *, spaced: bool = False, **extra: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, "tools": [], **extra}, indent=1 if spaced else None).encode()


@pytest.mark.parametrize("spaced", [False, True])
def test_a_growing_conversation_is_read_from_where_it_grew(spaced: bool) -> None:
    reader = Reader()
    history = long_chat(1, 40)
    used = 0
    for length in range(3, 41, 2):
        sent = body(history[:length], spaced=spaced)
        found, known = remembered(reader, sent)
        assert found == fresh(sent)
        used += known is not None
        if known is not None and found is not None:
            assert found.request.messages[length - 4] is known.request.messages[length - 4], (
                "taken over, not cut out again"
            )
    assert used >= 17


def test_interleaved_conversations_with_one_opening_keep_apart() -> None:
    reader = Reader()
    chance = random.Random(5)
    histories = [long_chat(seed, 40) for seed in range(8)]
    lengths = [3] * 8
    used = 0
    for _ in range(120):
        which = chance.randrange(8)
        tenant = f"t{which % 3}"
        sent = body(histories[which][: lengths[which]])
        found, known = remembered(reader, sent, tenant)
        assert found == fresh(sent, tenant)
        used += known is not None
        lengths[which] = min(40, lengths[which] + 2)
    assert used > 80


def test_a_retry_an_edit_a_rewind_and_other_members_are_read_right() -> None:
    reader = Reader()
    history = long_chat(2, 20)
    edited = [*history[:10], {"role": "user", "content": "another way"}, *history[11:]]
    for sent in (
        body(history),
        body(history),
        body(history[:8]),
        body(edited),
        body(history, temperature=1),
        body([*history, {"role": "user", "content": "x"}], stream=True, prompt_cache_key="k"),
        body(history, messages_="x"),
    ):
        found, _ = remembered(reader, sent)
        assert found == fresh(sent)


@pytest.mark.parametrize(
    "tail", [b"", b"]", b"garbage", b'{"role":"user"}],"model":"again"}', b'{"role":"user"}],"messages":[]}']
)
def test_what_follows_a_known_prefix_is_judged_like_any_request(tail: bytes) -> None:
    reader = Reader()
    history = long_chat(3, 20)
    first = body(history)
    remembered(reader, first)
    cut = first[: first.rindex(b'{"role": "')] + tail
    found, _ = remembered(reader, cut)
    assert found == fresh(cut)


def test_memory_is_bounded() -> None:
    reader = Reader(max_bytes=200_000)
    for seed in range(60):
        remembered(reader, body(long_chat(seed, 30)))
        assert reader._bytes <= 200_000
        # The bytes of the messages, and what their objects take: a million empty messages are not for nothing.
        kept = reader._known.values()
        assert reader._bytes == sum(k.length + 600 * len(k.conversation.request.messages) for k in kept)
        assert sum(map(len, reader._buckets.values())) == len(reader._known)


@given(
    st.lists(chats(min_steps=1, max_steps=8), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12),
)
def test_any_order_of_any_requests_is_read_the_same(some: list[Chat], order: list[tuple[int, bool]]) -> None:
    reader = Reader()
    padding = {"role": "system", "content": "p" * 1200}
    for which, padded in order:
        sent = some[which % len(some)].body
        if padded:
            sent = sent.replace(b'"messages":[', b'"messages":[' + json.dumps(padding).encode() + b",", 1)
        found, _ = remembered(reader, sent)
        assert found == fresh(sent)
