"""A count that is far too small gives a provider away that dropped a part of the prompt; what only looks dear to us does not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import conversation as conversations
from proxy.core import rewrite, tokens, turn
from proxy.core.answer import Answer
from proxy.core.model import Recalled, Usage
from proxy.core.truncated import LESSON_FLOOR_TOKENS, LESSON_TIMES, Suspicion, Truncated, suspected, truncated
from tests.core.build import body_of, checkpoint, message, read, talk

COUNTED = 1000
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBO" * 10_000}}
LITTLE = "u*200 a*200"
THOUGHT = {"role": "assistant", "content": "So.", "reasoning_content": "word " * 9000}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "word " * 9000}}]


def _seen(body: bytes, counted: int | None = COUNTED) -> Truncated | None:
    conversation = read(body)
    return truncated(conversation, None, counted, conversations.weight(conversation, None))


def _called(arguments: str) -> dict[str, Any]:
    call = {"id": "x", "type": "function", "function": {"name": "write", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(body_of("u*4000"), id="one message"),
        pytest.param(body_of("s*4000 u"), id="the system prompt"),
        pytest.param(body_of("u a:x t:x*4000 a"), id="a tool's result"),
        pytest.param(body_of([message("u"), _called(json.dumps({"text": "word " * 4000})), message("t:x")]), id="a call"),
        pytest.param(
            body_of([{"role": "user", "content": [{"type": "text", "text": "word " * 4000}, PICTURE]}]), id="a text beside a picture"
        ),
    ],
)  # fmt: skip
def test_a_count_far_below_the_text_gives_it_away(body: bytes) -> None:
    found = _seen(body)
    assert found is not None
    assert found.counted == COUNTED
    assert 4000 <= found.text < 4200


def test_a_long_text_is_looked_at_as_well() -> None:
    body = body_of("u*16000")
    assert len(body) > 65_536
    found = _seen(body)
    assert found is not None
    assert found.text >= 16_000


@pytest.mark.parametrize(
    ("body", "counted"),
    [
        pytest.param(body_of("u*4000"), None, id="nobody counted"),
        pytest.param(body_of("u*4000"), 0, id="a count of nothing"),
        pytest.param(body_of("u*4000"), 4000, id="as estimated"),
        pytest.param(body_of("u*4000"), 2000, id="half, as some vocabularies have it"),
        pytest.param(body_of("u*900"), 10, id="too little text to judge"),
        pytest.param(body_of([*talk(LITTLE), {"role": "user", "content": [PICTURE] * 12}]), COUNTED, id="pictures that are cheaper than we think"),
        pytest.param(body_of([*talk(LITTLE), {"role": "user", "content": "look", "images": ["iVBO" * 30_000] * 12}]), COUNTED, id="pictures beside it"),
        pytest.param(body_of([message("u"), THOUGHT, message("u*300")]), COUNTED, id="thoughts that a template drops"),
        pytest.param(body_of(LITTLE, tools=TOOLS), COUNTED, id="tools that a server does not know"),
    ],
)  # fmt: skip
def test_what_may_be_an_honest_count(body: bytes, counted: int | None) -> None:
    assert _seen(body, counted) is None


def test_of_a_rewritten_request_only_what_was_sent_counts() -> None:
    conversation = read(body_of("u*4000 a*4000 u*200 a u"))
    made = checkpoint(conversation, 2, text="word " * 300)
    routed = rewrite.route(conversation.request, 0, rewrite.applicable(Recalled(None, 0, own=made), conversation))
    assert routed.applied is made
    assert truncated(conversation, made, 700, conversations.weight(conversation, made)) is None
    long = replace(made, frame="word " * 4000)
    assert truncated(conversation, long, 700, conversations.weight(conversation, long)) is not None
    behind_the_first = checkpoint(conversation, 2, from_=1)
    found = truncated(conversation, behind_the_first, 700, conversations.weight(conversation, behind_the_first))
    assert found is not None, "a message that is kept in front of it was sent"
    assert found.text >= 4000


def test_a_message_that_cannot_be_read_counts_for_nothing() -> None:
    twice = b'{"role":"user","content":"' + b"word " * 4000 + b'","content":"x"}'
    assert _seen(b'{"model":"m","messages":[' + twice + b"]}") is None


ANSWER = Answer(Usage(COUNTED, 30, 900, 10), complete=True, finish="stop", text=None, reasoning=None, failed=False)


@pytest.mark.parametrize("estimate", [900, 9000])
def test_a_turn_that_was_cut_is_judged_by_the_estimate_and_calibrates_nothing(estimate: int) -> None:
    """`estimate` below the weight: it went on from an earlier count that was too small as well."""
    conversation = read(body_of("u*4000 a u"))
    done = turn.forwarded(conversation, rewrite.as_sent(conversation.request), ANSWER, estimate)
    assert done.truncated is not None
    assert done.usage == Usage(None, 30, None, 10)
    assert done.used == max(estimate, done.weight) + 20
    assert tokens.calibrate(done.usage.prompt, done.weight) == 1.0


def test_a_turn_that_was_not_cut_is_judged_by_its_count() -> None:
    conversation = read(body_of("u*1000 a u"))
    done = turn.forwarded(conversation, rewrite.as_sent(conversation.request), ANSWER, 4000)
    assert (done.truncated, done.usage, done.used) == (None, ANSWER.usage, COUNTED + 20)


def test_what_nobody_counted_is_estimated() -> None:
    conversation = read(body_of("u*1000 a u"))

    def used(usage: Usage, text: str | None = None) -> int:
        answer = replace(ANSWER, usage=usage, text=text)
        return turn.forwarded(conversation, rewrite.as_sent(conversation.request), answer, 4000).used

    assert used(Usage()) == 4000
    assert used(Usage(), "word " * 50) == 4050
    assert used(Usage(None, 30, None, 10)) == 4020
    assert used(Usage(COUNTED), "word " * 50) == COUNTED + 50


def _after(*found: tuple[int, int]) -> Suspicion:
    now = None
    for counted, text in found:
        now = suspected(now, Truncated(counted, text))
    assert now is not None
    return now


@pytest.mark.parametrize(
    ("found", "limit"),
    [
        pytest.param([(4096, 11_000), (4096, 12_000), (4096, 13_000)], 4096, id="it stands still while the text grows"),
        pytest.param([(4096, 11_000), (4096, 12_000)], None, id="twice may be chance"),
        pytest.param([(4096, 11_000)] * 9, None, id="the same request again and again"),
        pytest.param([(4096, 13_000), (4096, 12_000), (4096, 11_000)], None, id="less text each time"),
        pytest.param([(4096, 11_000), (4096, 11_000), (4096, 12_000), (4096, 9000), (4096, 13_000)], 4096, id="others in between"),
        pytest.param([(3800, 11_000), (4050, 12_000), (3900, 13_000), (3990, 14_000)], None, id="whole messages are dropped"),
        pytest.param([(4096, 11_000), (4096, 12_000), (500, 13_000), (4096, 14_000)], None, id="another count in between"),
        pytest.param([(100, 11_000), (100, 12_000), (100, 13_000)], None, id="a stub's constant"),
        pytest.param([(4096, n * 1000) for n in range(11, 30)], 4096, id="for long"),
    ],
)  # fmt: skip
def test_what_counts_in_a_row_teach(found: list[tuple[int, int]], limit: int | None) -> None:
    assert _after(*found).limit == limit


@given(st.lists(st.tuples(st.sampled_from((1000, 4096, 8192)), st.integers(10_000, 10_100)), min_size=1, max_size=12))
def test_a_lesson_is_a_count_that_came_so_often(found: list[tuple[int, int]]) -> None:
    learned = _after(*found).limit
    if learned is not None:
        assert learned >= LESSON_FLOOR_TOKENS
        assert [counted for counted, _ in found[-LESSON_TIMES:]] == [learned] * LESSON_TIMES
