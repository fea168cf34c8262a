"""A request taken apart is the request; what the provider shall judge alone is None."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import openai
from tests.core.build import NO_OBJECTS, body_of
from tests.strategies import DAMAGE, SEEDS, Chat, chat, chats, conversations, damaged

USER = b'{"role":"user","content":"x"}'


@pytest.mark.parametrize(
    "body",
    [
        *NO_OBJECTS,
        pytest.param(b'{"model":"m"}', id="no messages"),
        pytest.param(b'{"messages":[]}', id="no message"),
        pytest.param(b'{"messages":{}}', id="messages are no list"),
        pytest.param(b'{"messages":null}', id="messages are null"),
        pytest.param(b'{"messages":"[]"}', id="messages are a text"),
        pytest.param(b'{"messages":[' + USER + b'],"messages":[' + USER + b"]}", id="messages twice"),
        pytest.param(b'{"model":"a","messages":[' + USER + b'],"model":"b"}', id="model twice"),
        pytest.param(b'{"messages":[' + USER + b'],"stream":true,"str\\u0065am":false}', id="stream twice"),
        pytest.param(b'{"messages":[' + USER + b'],"x":NaN}', id="NaN"),
        pytest.param(b"\xef\xbb\xbf" + b'{"messages":[' + USER + b"]}", id="byte order mark"),
        pytest.param(b'{"messages":[{"role":"user","content":' + b"[" * 3000 + b"]" * 3000 + b"}]}", id="3,000 levels"),
        pytest.param(b'{"n":1e999,"messages":[' + USER + b"]}", id="a count that no number holds"),
    ],
)
def test_not_ours_to_judge(body: bytes) -> None:
    assert openai.read(body) is None


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"messages":[' + USER + b"]}", id="plain"),
        pytest.param(b' {\n "messages" : [\t' + USER + b" , \n" + USER + b"\r\n] }\n", id="odd spacing"),
        pytest.param(b'{"m\\u0065ssages":[' + USER + b'],"a\\/b":"\\u0061"}', id="escapes"),
        pytest.param(b'{"messages":[' + USER + b'],"seed":' + b"7" * 400 + b',"t":1.0,"u":1e0}', id="numbers"),
        pytest.param(b'{"messages":[{"d":' + b"[" * 300 + b"]" * 300 + b"}]}", id="300 levels in a message"),
        pytest.param(
            b'{"tools":' + b"[" * 300 + b"]" * 300 + b',"messages":[' + USER + b"]}", id="300 levels in tools"
        ),
        pytest.param(b'{"messages":[1,"x",null,[]]}', id="messages that are no objects"),
        pytest.param(b'{"messages":[{"role":"user","role":"system"}]}', id="a key twice inside a message"),
    ],
)
def test_head_messages_and_tail_are_the_body(body: bytes) -> None:
    request = openai.read(body)
    assert request is not None
    assert request.head + b",".join(request.messages) + request.tail == body


@given(chats())
def test_head_messages_and_tail_are_any_body(chat: Chat) -> None:
    request = openai.read(chat.body)
    assert request is not None
    assert request.body == chat.body
    assert request.head + b",".join(request.messages) + request.tail == chat.body
    assert tuple(m.strip() for m in request.messages) == chat.elements


@given(st.binary(max_size=80))
def test_no_bytes_make_it_raise(body: bytes) -> None:
    openai.read(body)


@given(chats(), DAMAGE)
def test_a_damaged_body_is_refused_or_whole(chat: Chat, damage: tuple[int, bytes]) -> None:
    body = damaged(chat.body, *damage)
    request = openai.read(body)
    if request is not None:
        assert request.head + b",".join(request.messages) + request.tail == body


@given(conversations(surrogates=True), SEEDS)
def test_a_body_with_half_a_surrogate_pair_is_refused_or_whole(messages: list[object], seed: int) -> None:
    whole = chat(messages or [{"role": "user", "content": ""}], 0, seed)
    request = openai.read(whole.body)
    if request is not None:
        assert request.head + b",".join(request.messages) + request.tail == whole.body


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        pytest.param({}, ("m", False, 1, 0, False), id="nothing said"),
        pytest.param({"model": None}, ("", False, 1, 0, False), id="no model"),
        pytest.param({"model": 7, "stream": "true", "n": "2"}, ("", False, 1, 0, False), id="wrong types"),
        pytest.param({"stream": True, "n": 3}, ("m", True, 3, 0, False), id="a stream of three"),
        pytest.param({"stream": 1, "max_tokens": True}, ("m", False, 1, 0, False), id="numbers and truth apart"),
        pytest.param({"max_tokens": 50}, ("m", False, 1, 50, False), id="max_tokens"),
        pytest.param(
            {"max_tokens": 50, "max_completion_tokens": 60}, ("m", False, 1, 60, False), id="the newer key wins"
        ),
        pytest.param(
            {"max_tokens": 50, "max_completion_tokens": None}, ("m", False, 1, 50, False), id="null says nothing"
        ),
        pytest.param({"max_tokens": -1}, ("m", False, 1, 0, False), id="never negative"),
        pytest.param({"stream_options": {"include_usage": True}}, ("m", False, 1, 0, True), id="asks for usage"),
        pytest.param({"stream_options": {"include_usage": 1}}, ("m", False, 1, 0, False), id="1 is not true"),
        pytest.param({"stream_options": None}, ("m", False, 1, 0, False), id="options null"),
        pytest.param({"stream_options": []}, ("m", False, 1, 0, False), id="options of a wrong type"),
    ],
)
def test_what_is_read_besides_messages(members: dict[str, object], expected: tuple[object, ...]) -> None:
    request = openai.read(body_of("u", **members))
    assert request is not None
    got = (request.model, request.stream, request.choices, request.requested_output, request.asks_for_usage)
    assert got == expected


def test_fields_that_may_hold_a_session_id_are_read_where_asked_for() -> None:
    body = json.dumps({"messages": [{}], "prompt_cache_key": "k", "user": "ann", "thread": 7}).encode()
    request = openai.read(body, frozenset({"prompt_cache_key", "thread"}))
    assert request is not None
    assert (request.text("prompt_cache_key"), request.text("thread"), request.text("user")) == ("k", "", "")


@given(chats())
def test_what_stands_in_the_prompt_beside_the_messages_is_measured(chat: Chat) -> None:
    request = openai.read(chat.body)
    assert request is not None
    expected = sum(len(raw) for key, raw in chat.members if key in ("tools", "functions", "response_format"))
    assert request.schema_bytes == openai.schema_bytes(request.head, request.tail) == expected


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_what_cannot_be_measured_counts_for_nothing(head: bytes, tail: bytes) -> None:
    assert openai.schema_bytes(head, tail) == 0
