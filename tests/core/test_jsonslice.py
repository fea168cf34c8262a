"""Slices of JSON: joined again they are the text, whatever its spelling; what cannot be taken apart is refused, never half read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import jsonslice
from proxy.core.jsonslice import NotSliceable
from tests.core.build import NO_OBJECTS
from tests.strategies import DAMAGE, MEMBERS, NUMBERS, SEEDS, Chat, Literal, Spelling, chats, damaged, spelled

HUGE = b"9" * 400


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(b"{}", [], id="empty"),
        pytest.param(b" {\n} \n", [], id="empty but for blanks"),
        pytest.param(b'{"a":1}', [("a", b'"a":1', b"1")], id="one"),
        pytest.param(
            b'\t{ "a" : [1, 2] ,\r\n"b":{"c":"}"}\n}\n',
            [("a", b' "a" : [1, 2] ', b"[1, 2]"), ("b", b'\r\n"b":{"c":"}"}\n', b'{"c":"}"}')],
            id="blanks belong to the members",
        ),
        pytest.param(b'{"\\u0061\\"":"\\u0061"}', [('a"', b'"\\u0061\\"":"\\u0061"', b'"\\u0061"')], id="escapes stay"),
        pytest.param(b'{"\\ud83d\\ude00":0}', [("😀", b'"\\ud83d\\ude00":0', b"0")], id="a key of two surrogates"),
        pytest.param(b'{"n":' + HUGE + b"}", [("n", b'"n":' + HUGE, HUGE)], id="400 digits"),
        pytest.param(b'{"n":1.0e00}', [("n", b'"n":1.0e00', b"1.0e00")], id="a number in its own form"),
        pytest.param(b'{"s":"{,\\\\"}', [("s", b'"s":"{,\\\\"', b'"{,\\\\"')], id="structure inside a text"),
        pytest.param(
            b'{"d":' + b"[" * 300 + b"]" * 300 + b"}",
            [("d", b'"d":' + b"[" * 300 + b"]" * 300, b"[" * 300 + b"]" * 300)],
            id="300 levels",
        ),
    ],
)
def test_members(text: bytes, expected: list[tuple[str, bytes, bytes]]) -> None:
    assert [(m.key, m.raw, text[m.start : m.end]) for m in jsonslice.members(text)] == expected


@pytest.mark.parametrize("text", NO_OBJECTS)
def test_refused(text: bytes) -> None:
    with pytest.raises(NotSliceable):
        jsonslice.members(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(b"[]", (), id="empty"),
        pytest.param(b"[ \n]", (), id="only blanks"),
        pytest.param(b"[1]", (b"1",), id="one"),
        pytest.param(b'[ 1 ,\n"]",[[]]\t]', (b" 1 ", b'\n"]"', b"[[]]\t"), id="blanks belong to the elements"),
        pytest.param(b"[" + HUGE + b",1e0]", (HUGE, b"1e0"), id="numbers as written"),
        pytest.param(b"[1,1,1]", (b"1", b"1", b"1"), id="equal ones"),
    ],
)
def test_elements(text: bytes, expected: tuple[bytes, ...]) -> None:
    assert jsonslice.elements(b'{"m":' + text + b"}", 5, 5 + len(text)) == expected


@pytest.mark.parametrize("text", [b"{}", b'"x"', b"1", b"null", b"[1,]", b"[", b"[NaN]"])
def test_what_is_no_list_has_no_elements(text: bytes) -> None:
    with pytest.raises(NotSliceable):
        jsonslice.elements(text, 0, len(text))


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.text(max_size=5), st.sampled_from(NUMBERS), st.integers(-(10**30), 10**30)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=6)


def _parsed(text: bytes) -> object:
    return json.loads(text, parse_int=Literal, parse_float=Literal)


@given(OBJECTS, SEEDS)
def test_the_members_of_any_object_joined_are_the_object(value: dict[str, Any], seed: int) -> None:
    text = b" \n" + spelled(value, seed) + b"\t"
    found = jsonslice.members(text)
    if found:
        assert jsonslice.join_members(text, [m.raw for m in found]) == text
    assert [m.key for m in found] == list(json.loads(text))
    assert {m.key: _parsed(text[m.start : m.end]) for m in found} == _parsed(text)


@given(st.lists(VALUES, max_size=6), SEEDS)
def test_the_elements_of_any_list_joined_are_the_list(value: list[Any], seed: int) -> None:
    text = spelled(value, seed)
    found = jsonslice.elements(text, 0, len(text))
    assert len(found) == len(value)
    assert b",".join(found) == text[1:-1] if found else not text[1:-1].strip()
    assert [_parsed(one) for one in found] == _parsed(text)


@given(OBJECTS, SEEDS, st.data())
def test_an_object_with_a_key_twice_is_refused(value: dict[str, Any], seed: int, data: st.DataObject) -> None:
    spelling = Spelling(seed)
    members = [(key, spelling.value(inner)) for key, inner in {**value, "last": 1}.items()]
    key, raw = data.draw(st.sampled_from(members))
    again = (key, data.draw(st.sampled_from((raw, "1", "null", '"x"'))))
    at = data.draw(st.integers(0, len(members)))
    with pytest.raises(NotSliceable):
        jsonslice.members(spelling.members([*members[:at], again, *members[at:]]).encode())


@given(st.binary(max_size=60) | st.text('{}[]",:\\ 0truefalsn1e.-', max_size=40).map(str.encode))
def test_any_bytes_are_refused_or_joined_again(text: bytes) -> None:
    try:
        found = jsonslice.members(text)
    except NotSliceable:
        return
    if found:
        assert jsonslice.join_members(text, [m.raw for m in found]) == text


@given(chats(), DAMAGE)
def test_a_damaged_request_is_refused_or_joined_again(chat: Chat, damage: tuple[int, bytes]) -> None:
    text = damaged(chat.body, *damage)
    try:
        found = jsonslice.members(text)
    except NotSliceable:
        return
    assert jsonslice.join_members(text, [m.raw for m in found]) == text


@given(st.sets(st.sampled_from(sorted(MEMBERS)), min_size=1), st.data(), SEEDS)
def test_an_object_keeps_the_members_it_is_joined_from(keys: set[str], data: st.DataObject, seed: int) -> None:
    value = {key: MEMBERS[key][0] for key in sorted(keys)}
    text = spelled(value, seed)
    kept = data.draw(st.sets(st.sampled_from(sorted(keys))))
    joined = jsonslice.join_members(text, [m.raw for m in jsonslice.members(text) if m.key in kept])
    assert _parsed(joined) == {key: inner for key, inner in _parsed(text).items() if key in kept}  # type: ignore[attr-defined]
