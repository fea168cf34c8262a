"""Asking for usage changes one member and nothing else; of the answer only the event that was asked for is withheld."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import jsonslice, openai, stream_usage
from proxy.core.stream_usage import UsageFilter
from tests.core.build import NO_OBJECTS
from tests.strategies import DAMAGE, Chat, chats, damaged, pieces

ASKED = b'"stream_options":{"include_usage":true}'


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(b'{"messages":[1]}', b'{"messages":[1],%s}' % ASKED, id="added"),
        pytest.param(b' {\n "stream" : true ,\n "messages":[ 1 ]\n} \n', b' {\n "stream" : true ,\n "messages":[ 1 ],%s\n} \n' % ASKED, id="blanks stay"),
        pytest.param(b'{"stream_options":{"include_usage":false},"x":1e0}', b'{"x":1e0,%s}' % ASKED, id="set"),
        pytest.param(b'{"x":1,"stream_options":{"include_usage":true}}', b'{"x":1,%s}' % ASKED, id="set already"),
        pytest.param(
            b'{"x":1,"stream_options":{"a":{"b":[]},"include_usage":null}}',
            b'{"x":1,"stream_options":{"a":{"b":[]},"include_usage":true}}',
            id="other options stay",
        ),
        pytest.param(b'{"a\\u0062":"\\/","n":%s}' % (b"9" * 400), b'{"a\\u0062":"\\/","n":%s,%s}' % (b"9" * 400, ASKED), id="bytes stay"),
        pytest.param(b'{"x":1,"stream_options":null}', b'{"x":1,%s}' % ASKED, id="options null"),
        pytest.param(b'{"x":1,"stream_options":[]}', None, id="options that are no object"),
        pytest.param(b'{"x":1,"stream_options":"x"}', None, id="options that are a text"),
        pytest.param(b'{"x":1,"stream_options":{},"stream_options":{}}', None, id="options twice"),
        pytest.param(b"{}", None, id="nothing"),
        pytest.param(b'{"stream_options":{}}', None, id="nothing else"),
    ],
)  # fmt: skip
def test_asking(body: bytes, expected: bytes | None) -> None:
    assert stream_usage.asking(body) == expected


@pytest.mark.parametrize("body", NO_OBJECTS)
def test_what_cannot_be_taken_apart_is_not_asked(body: bytes) -> None:
    assert stream_usage.asking(body) is None


@given(chats())
def test_asking_keeps_every_other_member_and_its_place(chat: Chat) -> None:
    asked = stream_usage.asking(chat.body)
    assert asked is not None
    before = {m.key: m.raw for m in jsonslice.members(chat.body) if m.key != "stream_options"}
    found = {m.key: m.raw for m in jsonslice.members(asked)}
    assert list(found) == [*before, "stream_options"]
    last = list(before)[-1]
    assert {k: raw for k, raw in found.items() if k not in (last, "stream_options")} == {
        k: raw for k, raw in before.items() if k != last
    }
    assert found[last] == before[last].rstrip()
    request, original = openai.read(asked), openai.read(chat.body)
    assert request is not None
    assert original is not None
    assert request.asks_for_usage
    assert request.messages == original.messages
    if "stream_options" not in dict(chat.members):
        assert asked.replace(b"," + ASKED, b"", 1) == chat.body


@given(chats(), DAMAGE)
def test_no_damage_makes_it_raise(chat: Chat, damage: tuple[int, bytes]) -> None:
    asked = stream_usage.asking(damaged(chat.body, *damage))
    assert (
        asked is None or json.loads(asked.decode("utf-8", "surrogateescape"))["stream_options"]["include_usage"] is True
    )


def _passed(parts: Sequence[bytes]) -> bytes:
    sieve = UsageFilter()
    return b"".join([sieve.feed(part) for part in parts]) + sieve.rest()


USAGE = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":5,"completion_tokens":1,"total_tokens":6}}\n\n'

PASSING = (
    b'data: {"choices":[{"index":0,"delta":{"content":"a"}}],"usage":null}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"\\"choices\\":[],\\"usage\\""}}]}\n\n',
    b'data: {"choices":[],"usage":null,"prompt_filter_results":[{"prompt_index":0}]}\n\n',  # Azure's first chunk
    b'data: {"choices":[],"prompt_filter_results":[{"prompt_index":0,"content_filter_results":{}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":{"prompt_tokens":5,"completion_tokens":1}}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"a"},"x":{"choices":[]}}],"usage":{"prompt_tokens":5}}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":5},"error":{"message":"overloaded"}}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":5}\n\n',
    b'data: {"usage":{"prompt_tokens":5}}\n\n',
    b"data: [DONE]\n\n",
    b": OPENROUTER PROCESSING\n\n",
    b'event: error\ndata: {"error":{"message":"x"}}\n\n',
    b"retry: 3000\n\n",
    b"\n\n",
)
WITHHELD = (
    USAGE,
    b'data:{"choices" : [ ] , "usage":{"prompt_tokens":5}}\n\n',
    b': ping\ndata: {"choices":[],"usage":{}}\n\n',
    b'event: x\nid: 7\ndata: {"usage":{"prompt_tokens":5},\ndata: "choices":[]}\n\n',
)


@pytest.mark.parametrize("event", PASSING)
@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
def test_what_passes(event: bytes, ending: bytes) -> None:
    event = event.replace(b"\n", ending)
    assert _passed([event]) == event


@pytest.mark.parametrize("event", WITHHELD)
@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
def test_what_is_withheld(event: bytes, ending: bytes) -> None:
    event = event.replace(b"\n", ending)
    done = b"data: [DONE]\n\n".replace(b"\n", ending)
    assert _passed([event, done]) == done


EVENTS = st.lists(
    st.tuples(st.sampled_from((*PASSING, *PASSING, *WITHHELD)), st.sampled_from((b"\n", b"\r\n", b"\r"))), max_size=8
)


@given(EVENTS, st.sampled_from((b"", b"data: [DONE]", b'data: {"choices":[],"usage":{}}', b": p", b"\n")), st.data())
def test_any_cut_lets_the_same_pass(found: list[tuple[bytes, bytes]], end: bytes, data: st.DataObject) -> None:
    spelled = [(event in WITHHELD, event.replace(b"\n", ending)) for event, ending in found]
    stream = b"".join(event for _, event in spelled) + end
    expected = b"".join(event for withheld, event in spelled if not withheld) + end
    assert _passed(data.draw(pieces(stream))) == expected


@given(
    st.binary(max_size=60)
    | st.lists(st.sampled_from((b"data:", b"\n", b"\r", b'{"choices":[]', b',"usage":{}', b"}", b" "))).map(b"".join),
    st.data(),
)
def test_any_bytes_pass_or_are_a_usage_event(stream: bytes, data: st.DataObject) -> None:
    passed = _passed(data.draw(pieces(stream)))
    if b'"usage"' not in stream:
        assert passed == stream
    left = iter(stream)
    assert all(byte in left for byte in passed)


@given(EVENTS)
def test_a_whole_event_leaves_at_once(found: list[tuple[bytes, bytes]]) -> None:
    sieve = UsageFilter()
    for event, ending in found:
        whole = event.replace(b"\n", ending)
        assert sieve.feed(whole) == (b"" if event in WITHHELD else whole)
    assert sieve.rest() == b""


def test_what_the_stream_ends_on_is_not_held_back_for_ever() -> None:
    sieve = UsageFilter()
    assert sieve.feed(b'data: {"choices":[],"usa') == b""
    assert sieve.rest() == b'data: {"choices":[],"usa'
    assert sieve.rest() == b""


def test_a_client_that_reads_choices_0_never_sees_the_usage_event() -> None:
    chunk: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": "Hi"}}]}
    stream = b"data: %s\n\n%sdata: [DONE]\n\n" % (json.dumps(chunk).encode(), USAGE)
    seen = [json.loads(line[6:]) for line in _passed([stream]).split(b"\n") if line.startswith(b"data: {")]
    assert seen == [chunk]
