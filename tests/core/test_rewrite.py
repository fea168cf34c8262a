"""A rewritten request is the client's with a checkpoint in place of what it covers: each other message once, its bytes as they came."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import openai, region, rewrite
from proxy.core.model import Checkpoint, Recalled
from proxy.core.rewrite import Routed
from tests.core.build import body_of, calls_and_results, checkpoint, read, talk
from tests.strategies import Chat, chats

FRAME = 'Before: "x"\\ 再 😀'
TEXT = rb'"Before: \"x\"\\ ' + "再 😀".encode() + b'"'


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        pytest.param(
            b'{"role":"user","content":"Go on"}', b'{"role":"user","content":"' + TEXT[1:-1] + rb'\n\nGo on"}', id="a text"
        ),
        pytest.param(b'{"role":"user","content":""}', b'{"role":"user","content":"' + TEXT[1:-1] + rb'\n\n"}', id="an empty text"),
        pytest.param(
            b' {\t"content" : "\\u0047o \\"on\\"\\/" , "n":1.0,\n"role":"us\\u0065r" } ',
            b' {\t"content" : "' + TEXT[1:-1] + rb'\n\n\u0047o \"on\"\/" , "n":1.0,' + b'\n"role":"us\\u0065r" } ',
            id="a text in an odd spelling",
        ),
        pytest.param(
            b'{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}} , {"type":"text","text":"a"}]}',
            b'{"role":"user","content":[{"type":"text","text":' + TEXT + b'},{"type":"image_url","image_url":{"url":"u"}} , {"type":"text","text":"a"}]}',
            id="parts",
        ),
        pytest.param(
            b'{"role":"user","content":[\n {"type":"text","text":"]"}\n]}',
            b'{"role":"user","content":[{"type":"text","text":' + TEXT + b'},\n {"type":"text","text":"]"}\n]}',
            id="parts in an odd spelling",
        ),
        pytest.param(
            b'{"role":"user","content":[]}', b'{"role":"user","content":[{"type":"text","text":' + TEXT + b"}]}", id="no parts"
        ),
        pytest.param(
            b'{"role":"user","content":[ \n]}', b'{"role":"user","content":[{"type":"text","text":' + TEXT + b"} \n]}", id="no parts but blanks"
        ),
        pytest.param(b'{"role":"user","content":null}', None, id="null content"),
        pytest.param(b'{"role":"user","content":5}', None, id="a number"),
        pytest.param(b'{"role":"user","content":{}}', None, id="an object"),
        pytest.param(b'{"role":"user"}', None, id="no content"),
        pytest.param(b'{"content":"x"}', None, id="no role"),
        pytest.param(b'{"role":"user","content":"x","content":"y"}', None, id="a key twice"),
        pytest.param(b'"user"', None, id="no object"),
        pytest.param(b'{"role":"user","content":"x"', None, id="broken"),
    ],
)  # fmt: skip
def test_the_checkpoint_goes_into_a_user_message_in_front(first: bytes, expected: bytes | None) -> None:
    last = b' {"role": "assistant"} '
    assert rewrite.with_checkpoint([first, last], FRAME) == (None if expected is None else (expected, last))


@pytest.mark.parametrize(
    "first", [b'{"role":"assistant","content":null}', b' {"role": "\\u0061ssistant" } ', b'{"role":"tool"}']
)
def test_elsewhere_it_is_a_message_of_its_own(first: bytes) -> None:
    assert rewrite.with_checkpoint([first, b"2"], FRAME) == (b'{"role":"user","content":' + TEXT + b"}", first, b"2")


def test_there_is_no_place_in_an_empty_tail() -> None:
    assert rewrite.with_checkpoint([], FRAME) is None


@given(st.text() | st.just("\ud800"))
def test_a_text_is_always_the_same_json(text: str) -> None:
    encoded = rewrite.encode(text)
    assert encoded == rewrite.encode(text)
    assert json.loads(encoded) == text.encode("utf-8", "replace").decode()


def _route(chat: Chat, pick: int, head: int = 0) -> tuple[Checkpoint, int, int, Routed] | None:
    """A request routed with a checkpoint at one of its legal cuts."""
    conversation = read(chat.body)
    from_ = region.keep_head(conversation.facts, head)
    cuts = [c for c in region.legal_cuts(conversation.facts) if c > from_]
    if not cuts:
        return None
    k = cuts[pick % len(cuts)]
    made = checkpoint(conversation, k, from_=from_, text=FRAME)
    return made, from_, k, rewrite.route(conversation.request, conversation.preamble_length, made)


PICK = st.integers(0, 1000)
LONG_CHATS = chats(min_steps=3, max_steps=9)


@given(LONG_CHATS, PICK, st.integers(0, 4))
def test_every_message_is_covered_or_sent_once_with_its_own_bytes(chat: Chat, pick: int, head: int) -> None:
    routed = _route(chat, pick, head)
    if routed is None:
        return
    made, from_, k, sent = routed
    assert sent.applied is made
    request = openai.read(chat.body)
    assert request is not None
    assert sent.body == request.head + b",".join(sent.messages) + request.tail
    before, behind = request.messages[: chat.preamble_length + from_], request.messages[chat.preamble_length + k :]
    assert sent.messages[: len(before)] == before
    rest = sent.messages[len(before) :]
    text = rewrite.encode(made.frame)
    if chat.conversation[k]["role"] == "assistant":
        assert rest == (b'{"role":"user","content":' + text + b"}", *behind)
        return
    assert rest[1:] == behind[1:]
    put_in = (text[1:-1] + rb"\n\n", b'{"type":"text","text":' + text + b"},", b'{"type":"text","text":' + text + b"}")
    assert behind[0] in {rest[0].replace(piece, b"", 1) for piece in put_in}


@given(LONG_CHATS, PICK, st.integers(0, 4))
def test_the_rewritten_request_means_what_it_should(chat: Chat, pick: int, head: int) -> None:
    routed = _route(chat, pick, head)
    if routed is None:
        return
    made, from_, k, sent = routed
    rewritten, original = json.loads(sent.body), json.loads(chat.body)
    messages, tail = rewritten.pop("messages"), original.pop("messages")[chat.preamble_length + k :]
    assert (rewritten, list(rewritten)) == (original, list(original))
    assert messages[-1] == tail[-1] or len(tail) == 1
    here = messages[chat.preamble_length + from_ :]
    if tail[0]["role"] == "assistant":
        assert here == [{"role": "user", "content": made.frame}, *tail]
    elif isinstance(tail[0]["content"], str):
        assert here == [{**tail[0], "content": made.frame + "\n\n" + tail[0]["content"]}, *tail[1:]]
    else:
        assert here == [{**tail[0], "content": [{"type": "text", "text": made.frame}, *tail[0]["content"]]}, *tail[1:]]


@given(LONG_CHATS, PICK, st.integers(0, 4))
def test_no_two_roles_meet_that_did_not_meet_before(chat: Chat, pick: int, head: int) -> None:
    routed = _route(chat, pick, head)
    if routed is None:
        return
    roles = ["", *(m["role"] for m in chat.messages)]
    met = set(pairwise(roles))
    now = ["", *(json.loads(m)["role"] for m in routed[3].messages)]
    new = set(pairwise(now)) - met
    # What a template takes in any place: a user message first or behind the preamble, and questions and answers in turn.
    assert new <= {
        ("", "user"),
        ("system", "user"),
        ("developer", "user"),
        ("user", "assistant"),
        ("assistant", "user"),
    }
    assert ("user", "user") in met or ("user", "user") not in set(pairwise(now))


@given(LONG_CHATS, PICK)
def test_calls_and_results_stay_together(chat: Chat, pick: int) -> None:
    routed = _route(chat, pick)
    if routed is None:
        return
    _, _, k, sent = routed
    own = 1 if chat.conversation[k]["role"] == "assistant" else 0
    tail = [json.loads(m) for m in sent.messages[chat.preamble_length :]]
    expected = [
        (call - k + own, result - k + own) for call, result in calls_and_results(chat.conversation) if call >= k
    ]
    assert calls_and_results(tail) == expected


@given(LONG_CHATS, PICK)
def test_the_same_input_gives_the_same_bytes(chat: Chat, pick: int) -> None:
    one, other = _route(chat, pick), _route(chat, pick)
    assert one is None or (other is not None and one[3].body == other[3].body)


def test_a_checkpoint_without_a_place_leaves_the_request_as_it_came() -> None:
    conversation = read(body_of("u a 0 a u"))
    sent = rewrite.route(conversation.request, 0, checkpoint(conversation, 2))
    assert sent == rewrite.as_sent(conversation.request)
    assert (sent.body, sent.applied) == (conversation.request.body, None)


def test_without_a_checkpoint_the_request_leaves_as_it_came() -> None:
    body = b' {"messages" : [ {"role":"user"} ] }\n'
    request = openai.read(body)
    assert request is not None
    assert rewrite.route(request, 0, None).body is request.body


CONVERSATION = read(body_of("s u a u a u a"))
OTHER_PREAMBLE = read(body_of("d u a u a u a"))
CHANGED = talk("s u a u a u a")
CHANGED[2]["content"] = "[cleared]"


def _applies(made: Any, conversation: Any = CONVERSATION, *, foreign: bool = False) -> bool:
    recalled = Recalled(None, 0, foreign=(made,)) if foreign else Recalled(None, 0, own=made)
    found = rewrite.applicable(recalled, conversation)
    assert found is None or found is made
    return found is not None


@pytest.mark.parametrize(
    ("k", "ref", "expected"),
    [
        pytest.param(4, {}, True, id="covers a prefix"),
        pytest.param(5, {}, True, id="one message is left"),
        pytest.param(6, {}, False, id="nothing would be left"),
        pytest.param(
            4, {"seen_len": 6, "seen": CONVERSATION.chain[5]}, True, id="its summariser saw all of this request"
        ),
        pytest.param(4, {"seen_len": 6, "seen": b"x" * 16}, False, id="its summariser saw another end"),
        pytest.param(
            4, {"seen_len": 7, "seen": CONVERSATION.chain[5]}, False, id="its summariser saw more than this request"
        ),
        pytest.param(
            4, {"seen_len": 3, "seen": CONVERSATION.chain[2]}, False, id="its summariser saw less than it covers"
        ),
        pytest.param(4, {"digest_k": b"x" * 16}, False, id="another prefix"),
        pytest.param(4, {"digest_k": CONVERSATION.chain[2]}, False, id="a prefix of another length"),
        pytest.param(4, {"k": 40}, False, id="longer than the request"),
        pytest.param(4, {"from_": 4}, False, id="covers nothing"),
        pytest.param(4, {"from_": 5}, False, id="starts behind its end"),
        pytest.param(4, {"from_": -1}, False, id="starts before the conversation"),
        pytest.param(4, {"from_": 2}, True, id="a middle region"),
        pytest.param(4, {"dead": True}, False, id="undone"),
        pytest.param(4, {"k": 0}, False, id="ends before the conversation"),
    ],
)
@pytest.mark.parametrize("foreign", [False, True])
def test_applicable(k: int, ref: dict[str, Any], expected: bool, foreign: bool) -> None:
    made = checkpoint(CONVERSATION, k)
    assert _applies(replace(made, ref=replace(made.ref, **ref)), foreign=foreign) is expected


def test_only_its_own_session_may_change_the_preamble() -> None:
    made = checkpoint(CONVERSATION, 4)
    assert _applies(made, OTHER_PREAMBLE)
    assert not _applies(made, OTHER_PREAMBLE, foreign=True)


@pytest.mark.parametrize("foreign", [False, True])
def test_a_covered_message_that_changed_ends_it(foreign: bool) -> None:
    assert not _applies(checkpoint(CONVERSATION, 4), read(body_of(CHANGED)), foreign=foreign)


@pytest.mark.parametrize("foreign", [False, True])
def test_a_seen_message_that_changed_ends_it(foreign: bool) -> None:
    branch = talk("s u a u a u a")
    branch[5]["content"] = "another question"
    made = checkpoint(CONVERSATION, 2, seen_len=6)
    assert _applies(made, CONVERSATION, foreign=foreign)
    assert not _applies(made, read(body_of(branch)), foreign=foreign)
    assert _applies(checkpoint(CONVERSATION, 2), read(body_of(branch)), foreign=foreign)


def test_no_other_tenant_and_no_other_salt() -> None:
    made = checkpoint(CONVERSATION, 4)
    assert not _applies(made, read(CONVERSATION.request.body, tenant="stranger"), foreign=True)
    assert not _applies(made, read(body_of("s u a u a u a", cache_salt="x")), foreign=True)


def test_the_store_brought_nothing() -> None:
    assert rewrite.applicable(None, CONVERSATION) is None
    assert rewrite.applicable(Recalled(None, 0), CONVERSATION) is None


def test_its_own_comes_first_then_the_foreign_ones_in_order() -> None:
    own, first, second = (checkpoint(CONVERSATION, k, id=str(k)) for k in (2, 4, 3))
    wrong = checkpoint(OTHER_PREAMBLE, 5)
    dead = replace(own, ref=replace(own.ref, dead=True))

    def found(**brought: Any) -> Any:
        return rewrite.applicable(Recalled(None, 0, **brought), CONVERSATION)

    assert found(own=own, foreign=(first, second)) is own
    assert found(own=dead, foreign=(wrong, first, second)) is first
    assert found(foreign=(second, first)) is second
    assert found(own=dead, foreign=(wrong,)) is None


READ = "Found it.\n\n  It was  the parser."


@given(LONG_CHATS, PICK)
def test_a_checkpoint_never_reaches_a_request_that_differs_in_what_was_seen(chat: Chat, pick: int) -> None:
    conversation = read(chat.body)
    length = len(conversation.chain)
    whole = [cut for cut in range(1, length - 1) if not region.parts(conversation.facts, (cut,))]
    if not whole:
        return
    k = whole[pick % len(whole)]
    seen = k + pick % (length - k)
    made = checkpoint(conversation, k, seen_len=seen)
    assert _applies(made, conversation)
    at = pick % seen
    other = [*chat.messages]
    other[chat.preamble_length + at] = {**other[chat.preamble_length + at], "x_changed": True}
    assert not _applies(made, read(body_of(other)))
