"""Equal meaning, equal digest; any other change, another digest; and no bytes that make it raise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from random import Random
from typing import Any

import pytest
import xxhash
from hypothesis import assume, given
from hypothesis import strategies as st

from proxy.core import fingerprint
from proxy.core.fingerprint import FactsCache, facts
from proxy.core.model import SessionId
from tests.core.build import elements, facts_of
from tests.strategies import DAMAGE, SEEDS, TEXTS, Literal, conversations, damaged, spelled

DIGESTS = st.lists(st.binary(min_size=16, max_size=16), max_size=12)
MARK = {"type": "ephemeral"}


def _digest(text: bytes) -> bytes:
    return facts(text).digest


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(b'{"role":"user","content":"a"}', b'{"content":"a","role":"user"}', id="key order"),
        pytest.param(b'{"role":"user","content":"a"}', b'\n { "role" :\t"user", "content":"a"}\r\n', id="blanks"),
        pytest.param(
            b'{"role":"user","content":"a/\xc3\xa9"}', b'{"role":"us\\u0065r","content":"a\\/\\u00e9"}', id="escapes"
        ),
        pytest.param(b'{"content":"\xf0\x9f\x98\x80"}', b'{"content":"\\ud83d\\uDE00"}', id="surrogate pair"),
        pytest.param(b'{"content":"a"}', b'{"content":[{"type":"text","text":"a"}]}', id="text as one part"),
        pytest.param(b'{"content":""}', b'{"content":[{"text":"","type":"text"}]}', id="empty text as one part"),
        pytest.param(
            b'{"content":"a"}', b'{"content":"a","cache_control":{"type":"ephemeral"}}', id="mark on the message"
        ),
        pytest.param(
            b'{"content":[{"type":"text","text":"a"},{"type":"x"}]}',
            b'{"content":[{"type":"text","text":"a"},{"type":"x","cache_control":{"ttl":"1h"}}]}',
            id="mark on a part",
        ),
        pytest.param(
            b'{"content":"a"}',
            b'{"content":[{"type":"text","text":"a","cache_control":null}]}',
            id="marked part, plain text",
        ),
    ],
)
def test_equal_meaning(one: bytes, other: bytes) -> None:
    assert _digest(one) == _digest(other)
    assert facts(one).byte_hash != facts(other).byte_hash


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(b'{"content":"a"}', b'{"content":"a "}', id="a blank in a text"),
        pytest.param(b'{"content":"a"}', b'{"content":"A"}', id="case"),
        pytest.param(b'{"content":"\xc3\xa9"}', b'{"content":"e\\u0301"}', id="composed and decomposed"),
        pytest.param(b'{"content":null}', b'{"content":""}', id="null and empty"),
        pytest.param(b'{"content":null}', b"{}", id="null and missing"),
        pytest.param(b'{"content":[]}', b'{"content":""}', id="no parts and empty"),
        pytest.param(
            b'{"content":"ab"}', b'{"content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}', id="two parts"
        ),
        pytest.param(
            b'{"content":"a"}', b'{"content":[{"type":"text","text":"a","x":1}]}', id="a part with more in it"
        ),
        pytest.param(b'{"content":"a"}', b'{"content":["a"]}', id="a bare text in a list"),
        pytest.param(b'{"x":1}', b'{"x":1.0}', id="1 and 1.0"),
        pytest.param(b'{"x":1.0}', b'{"x":1e0}', id="1.0 and 1e0"),
        pytest.param(b'{"x":1}', b'{"x":"1"}', id="number and text"),
        pytest.param(b'{"x":1}', b'{"x":true}', id="1 and true"),
        pytest.param(b'{"x":0}', b'{"x":false}', id="0 and false"),
        pytest.param(b'{"x":' + b"7" * 400 + b"}", b'{"x":' + b"7" * 399 + b"8}", id="the last of 400 digits"),
        pytest.param(b'{"x":18446744073709551616}', b'{"x":18446744073709551617}', id="beyond 64 bits"),
        pytest.param(b'{"x":[1,2]}', b'{"x":[2,1]}', id="order of a list"),
        pytest.param(b'{"x":[[1],2]}', b'{"x":[[1,2]]}', id="nesting"),
        pytest.param(b'{"x":{"a":1},"b":2}', b'{"x":{"a":1,"b":2}}', id="a key moved out"),
        pytest.param(b'{"x":["s1:a"]}', b'{"x":["s1","a"]}', id="a text that looks like our own form"),
        pytest.param(b'{"x":{"cache_control":1}}', b'{"x":{}}', id="a mark where none belongs"),
        pytest.param(b'{"tool_calls":[{"id":"a"}]}', b'{"tool_calls":[{"id":"b"}]}', id="call id"),
        pytest.param(b'{"reasoning_content":"a"}', b'{"reasoning_content":"b"}', id="thoughts"),
        *(
            pytest.param(b'{"role":"user","%s":"a"}' % key, other, id=f"{key.decode()} {how}")
            for key in (
                b"name",
                b"refusal",
                b"annotations",
                b"audio",
                b"reasoning",
                b"reasoning_details",
                b"prefix",
                b"extra_content",
            )
            for how, other in (("changed", b'{"role":"user","%s":"b"}' % key), ("gone", b'{"role":"user"}'))
        ),
        pytest.param(b'{"content":"\\ud800"}', b'{"content":"\\ud801"}', id="lone surrogates"),
        pytest.param(b'{"a":1,"a":2}', b'{"a":2}', id="a key twice means its bytes"),
    ],
)
def test_other_meaning(one: bytes, other: bytes) -> None:
    assert _digest(one) != _digest(other)


def test_a_fingerprint_reads_a_message_to_its_end() -> None:
    preamble = "Rules of the house. " * 500
    assert _digest(elements([{"role": "user", "content": preamble + "A"}])[0]) != _digest(
        elements([{"role": "user", "content": preamble + "B"}])[0]
    )


@given(conversations(max_steps=3, surrogates=True), SEEDS, SEEDS)
def test_spelling_is_no_meaning(messages: list[Any], one: int, other: int) -> None:
    for message in messages:
        assert _digest(spelled(message, one)) == _digest(b" " + spelled(message, other) + b"\n")


@given(conversations(max_steps=3), st.integers(0, 2**32 - 1))
def test_cache_marks_and_the_form_of_a_text_are_no_meaning(messages: list[Any], seed: int) -> None:
    random = Random(seed)
    for message in messages:
        other = deepcopy(message)
        other.pop("cache_control", None)
        if random.random() < 0.5:
            other["cache_control"] = MARK
        if isinstance(other.get("content"), str):
            other["content"] = [{"type": "text", "text": other["content"]}]
        for part in other["content"] if isinstance(other.get("content"), list) else ():
            part.pop("cache_control", None)
            if random.random() < 0.5:
                part["cache_control"] = MARK
        assert _digest(spelled(message)) == _digest(spelled(other))


def _places(value: Any, *, marks: bool = True) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a message that means something."""
    items: list[tuple[Any, Any]] = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    for key, inner in items:
        if key == "cache_control" and marks:
            continue
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner, marks=marks and (key == "content" or isinstance(value, list)))


def _changed(value: Any) -> Any:
    if isinstance(value, Literal):
        return Literal(value + "0")
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return [*value, None]
    if isinstance(value, dict):
        return {**value, "x_more": None}
    return {None: False, True: False, False: None}.get(value, 0)


@given(
    conversations(min_steps=1, max_steps=3, surrogates=True),
    st.integers(0, 10_000),
    st.sampled_from(("change", "delete", "add")),
)
def test_every_other_change_is_one_of_meaning(messages: list[Any], pick: int, how: str) -> None:
    assume(messages)
    message = messages[pick % len(messages)]
    other = deepcopy(message)
    places = list(_places(other))
    container, key = places[pick % len(places)]
    if how == "change":
        container[key] = _changed(container[key])
    elif how == "delete":
        del container[key]
    elif isinstance(container, list):
        container.insert(key, {"type": "text", "text": ""})
    else:
        container["x_new"] = 1
    assert _digest(spelled(message)) != _digest(spelled(other))


@pytest.mark.parametrize(
    ("element", "role", "calls", "answers", "opening", "reasoning", "spliceable"),
    [
        pytest.param({"role": "user", "content": " Hi\n there "}, "user", (), (), "Hi there", False, True, id="user"),
        pytest.param({"role": "user", "content": "x" * 99}, "user", (), (), "x" * 60, False, True, id="long opening"),
        pytest.param({"role": "user", "content": None}, "user", (), (), "", False, False, id="null content"),
        pytest.param({"role": "user"}, "user", (), (), "", False, False, id="no content"),
        pytest.param({"role": "user", "content": Literal("5")}, "user", (), (), "5", False, False, id="content is a number"),
        pytest.param({"role": "user", "content": []}, "user", (), (), "", False, True, id="no parts"),
        pytest.param(
            {"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "Look"}]},
            *("user", (), (), "Look", False, True),
            id="the text of parts",
        ),
        pytest.param(
            {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]},
            *("assistant", ("a",), (), "f({}", False, False),
            id="a call",
        ),
        pytest.param(
            {"role": "assistant", "content": "Go", "tool_calls": [{"id": "a"}, {"id": "a"}, {"id": None}, {}, 7]},
            *("assistant", ("a", "a", "", ""), (), "Go", False, True),
            id="parallel calls, ids equal or missing",
        ),
        pytest.param(
            {"role": "assistant", "content": None, "function_call": {"name": "f"}},
            *("assistant", ("function:f",), (), "", False, False),
            id="legacy call",
        ),
        pytest.param(
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t"}]},
            *("assistant", ("t",), (), "", False, True),
            id="call as a part",
        ),
        pytest.param({"role": "tool", "tool_call_id": "a", "content": "r"}, "tool", (), ("a",), "r", False, True, id="result"),
        pytest.param({"role": "tool", "content": "r"}, "tool", (), ("",), "r", False, True, id="result without id"),
        pytest.param({"role": "function", "name": "f", "content": "r"}, "function", (), ("function:f",), "r", False, True, id="legacy result"),
        pytest.param(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}, {"type": "tool_result", "tool_use_id": "u"}]},
            *("user", (), ("t", "u"), "", False, True),
            id="results as parts",
        ),
        pytest.param({"role": "assistant", "content": "a", "reasoning_content": "hm"}, "assistant", (), (), "a", True, True, id="thoughts"),
        pytest.param({"role": "assistant", "content": "a", "reasoning": "hm"}, "assistant", (), (), "a", True, True, id="under a shorter name"),
        pytest.param({"role": "assistant", "content": "a", "reasoning_details": [{}]}, "assistant", (), (), "a", True, True, id="in pieces"),
        pytest.param({"role": "assistant", "content": "a", "thinking": "hm"}, "assistant", (), (), "a", True, True, id="as Ollama names them"),
        pytest.param({"role": "assistant", "content": "a", "reasoning_content": ""}, "assistant", (), (), "a", False, True, id="no thoughts"),
        pytest.param({"role": "assistant", "content": [{"type": "thinking"}]}, "assistant", (), (), "", True, True, id="thoughts as a part"),
        pytest.param({"role": None, "content": "a"}, "", (), (), "a", False, True, id="no role"),
        pytest.param({"role": "user", "content": "a", "tool_calls": None, "function_call": None}, "user", (), (), "a", False, True, id="nulls"),
    ],
)  # fmt: skip
def test_what_a_message_says(
    element: dict[str, Any],
    role: str,
    calls: tuple[str, ...],
    answers: tuple[str, ...],
    opening: str,
    reasoning: bool,
    spliceable: bool,
) -> None:
    found = facts(spelled(element))
    assert (found.role, found.calls, found.answers) == (role, calls, answers)
    assert (found.opening, found.reasoning, found.spliceable) == (opening, reasoning, spliceable)


UNREADABLE = [
    pytest.param(b"", id="nothing"),
    pytest.param(b"{", id="broken off"),
    pytest.param(b"7", id="a number"),
    pytest.param(b'"user"', id="a text"),
    pytest.param(b"null", id="null"),
    pytest.param(b'[{"role":"user"}]', id="a list"),
    pytest.param(b'{"role":"user","role":"user","content":"x"}', id="a key twice"),
    pytest.param(b'{"role":"user","x":{"a":1,"\\u0061":1}}', id="a key twice inside"),
    pytest.param(b'{"role":"user","content":"\xff"}', id="no UTF-8"),
    pytest.param(b"[" * 1_000_000, id="a million brackets"),
    pytest.param(b'{"role":"user","x":' + b"[" * 50_000 + b"]" * 50_000 + b"}", id="50,000 levels"),
]


@pytest.mark.parametrize("element", UNREADABLE)
def test_what_cannot_be_read_means_its_bytes(element: bytes) -> None:
    found = facts(element)
    assert found.digest == found.byte_hash == fingerprint.byte_hash(element)
    assert (found.role, found.calls, found.answers, found.opening, found.spliceable) == ("", (), (), "", False)
    assert found.weight > 0


@pytest.mark.parametrize("depth", [100, 300, 400, 480, 500, 600, 800, 950, 1000, 1100, 5000])
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_no_depth_makes_it_raise(depth: int, opening: bytes, closing: bytes) -> None:
    element = b'{"role":"user","content":"x","deep":%s1%s}' % (opening * depth, closing * depth)
    assert facts(element).byte_hash == fingerprint.byte_hash(element)


def test_the_digest_does_not_hang_on_how_deep_the_stack_is() -> None:
    element = b'{"role":"user","content":"x","deep":%s1%s}' % (b"[" * 340, b"]" * 340)

    def below(frames: int) -> bytes:
        return below(frames - 1) if frames else _digest(element)

    assert below(400) == below(0) != fingerprint.byte_hash(element)


@given(st.binary(max_size=40) | st.text('{}[]",:\\ 0rolecntuser', max_size=40).map(str.encode))
def test_no_bytes_make_it_raise(element: bytes) -> None:
    assert facts(element).byte_hash == fingerprint.byte_hash(element)


@given(conversations(max_steps=2, surrogates=True), SEEDS, DAMAGE)
def test_no_damage_makes_it_raise(messages: list[Any], seed: int, damage: tuple[int, bytes]) -> None:
    for message in messages:
        element = damaged(spelled(message, seed), *damage)
        assert facts(element).byte_hash == fingerprint.byte_hash(element)


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(TEXTS), lambda v: st.lists(v, max_size=3), max_leaves=4
)


KEYS = ("role", "content", "tool_calls", "function_call", "tool_call_id", "name", "reasoning")
PARTS = st.lists(
    st.dictionaries(st.sampled_from(("type", "text", "id", "function", "tool_use_id")), JSON, max_size=3), max_size=3
)


@given(st.dictionaries(st.sampled_from(KEYS), JSON | PARTS))
def test_no_type_where_another_belongs_makes_it_raise(message: dict[str, Any]) -> None:
    found = facts(json.dumps(message).encode())
    assert len(found.opening) <= 60
    assert found.weight >= 0


@given(DIGESTS, DIGESTS, st.binary(min_size=16, max_size=16))
def test_a_chain_names_prefixes(one: list[bytes], other: list[bytes], start: bytes) -> None:
    first, second = fingerprint.chain(start, one), fingerprint.chain(start, other)
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert first[:common] == second[:common] == fingerprint.chain(start, one[:common])
    assert not set(first[common:]) & set(second[common:])
    assert len(set(first)) == len(one)


NAMES = st.text("abcdefghijklmnopqrstuvwxyz234567", max_size=4)


@given(NAMES, NAMES, st.text(max_size=4), st.text(max_size=4), DIGESTS)
def test_tenants_and_cache_salts_share_no_digest(
    tenant: str, other: str, salt: str, other_salt: str, digests: list[bytes]
) -> None:
    one = fingerprint.chain(fingerprint.start(tenant, salt), digests)
    two = fingerprint.chain(fingerprint.start(other, other_salt), digests)
    if (tenant, salt) == (other, other_salt):
        assert one == two
    else:
        assert not set(one) & set(two)


def test_the_preamble_is_named_by_all_its_messages_in_order() -> None:
    one = facts_of([{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}])
    assert len({fingerprint.preamble(p) for p in ((), one[:1], one[1:], one, one[::-1])}) == 5


@given(st.binary(min_size=1, max_size=64), st.text(), st.text())
def test_a_tenants_name_tells_credentials_apart_and_needs_the_secret(
    secret: bytes, credential: str, other: str
) -> None:
    name = fingerprint.tenant(secret, credential)
    assert SessionId.parse(f"{name}-{name}-{name}") == SessionId(name, name, name)
    assert (name == fingerprint.tenant(secret, other)) is (credential == other)
    assert name != fingerprint.tenant(secret + b"x" if len(secret) < 64 else secret[:-1], credential)
    assert credential not in name or len(credential) < 8


def test_names_depend_on_all_that_they_name() -> None:
    prefix = b"p" * 16
    seeds = [
        ("r", "e", "p", prefix),
        ("s", "e", "p", prefix),
        ("r", "", "p", prefix),
        ("r", "e", "", prefix),
        ("r", "e", "p", b"x" * 16),
    ]
    assert len({fingerprint.lineage(*seed) for seed in seeds}) == len(seeds)
    assert fingerprint.lineage(*seeds[0]) == fingerprint.lineage(*seeds[0])
    assert (
        len({fingerprint.checkpoint_id(*seed) for seed in (("s", 1, "t"), ("s", 2, "t"), ("s", 1, "u"), ("r", 1, "t"))})
        == 4
    )
    assert fingerprint.explicit("") == ""
    assert "ann@example.org" not in fingerprint.explicit("ann@example.org")
    assert {
        len(fingerprint.explicit("x")),
        len(fingerprint.root(prefix)),
        len(fingerprint.lineage("r", "", "", b"")),
    } == {16}


@pytest.mark.parametrize(
    "name",
    [
        fingerprint.explicit,
        lambda v: fingerprint.start("t", v),
        lambda v: fingerprint.tenant(b"s", v),
        lambda v: fingerprint.checkpoint_id("s", 1, v),
    ],
)
def test_half_a_surrogate_pair_in_a_name_does_not_raise(name: Any) -> None:
    assert name("\ud800")


@given(conversations(max_steps=4), st.integers(0, 60_000), st.lists(st.integers(0, 1000), max_size=60))
def test_remembered_facts_are_the_facts(messages: list[Any], max_bytes: int, visits: list[int]) -> None:
    cache = FactsCache(max_bytes)
    pool = [*elements(messages), b"broken", b'{"role":"user","content":"%s"}' % (b"x" * 5000)]
    for visit in visits:
        element = pool[visit % len(pool)]
        assert cache.of(element) == facts(element)


def test_two_messages_of_one_hash_are_not_mistaken_for_each_other() -> None:
    # The fast hash multiplies the first eight bytes, xored with a public constant, by the next eight: zero times anything is zero.
    zero = bytes.fromhex("b8fe6c3923a44bbe")
    one, other = (zero + middle + b"the same sixteen" for middle in (b"message1", b"message2"))
    assert xxhash.xxh3_64_intdigest(one) == xxhash.xxh3_64_intdigest(other)
    cache = FactsCache()
    assert [cache.of(e) for e in (one, other, one, other)] == [facts(e) for e in (one, other, one, other)]


def test_what_is_used_stays_remembered() -> None:
    cache = FactsCache(20_000)
    often, *others = elements([{"role": "user", "content": f"message {i} " * 20} for i in range(200)])
    known = cache.of(often)
    for other in others:
        cache.of(other)
        assert cache.of(often) is known


def test_a_message_that_would_fill_the_memory_is_not_remembered() -> None:
    cache = FactsCache(20_000)
    (huge,) = elements([{"role": "user", "content": "x" * 5000}])
    assert cache.of(huge) == cache.of(huge)
    assert cache.of(huge) is not cache.of(huge)


def test_remembered_facts_survive_eviction() -> None:
    cache = FactsCache(20_000)
    pool = elements([{"role": "user", "content": f"message {i} " * 20} for i in range(200)])
    for _ in range(2):
        assert [cache.of(e) for e in pool] == [facts(e) for e in pool]
