"""The demo's conversation: lifelike in size and shape, the same each time, and its facts stand where they are said to."""

from __future__ import annotations

from itertools import pairwise

import aiohttp

from proxy.demo.answers import FACT, FactAnswerer, plain
from proxy.demo.conversation import FACTS, demo_conversation
from proxy.demo.provider import SimulatedProvider
from proxy.demo.summariser import facts
from proxy.demo.template import message_text, render
from proxy.demo.validation import Strictness, fault


def test_it_is_the_same_each_time() -> None:
    assert demo_conversation() == demo_conversation()


def test_every_request_is_well_formed_and_extends_the_one_before() -> None:
    conversation = demo_conversation()
    before: list[object] = []
    for messages, reply in conversation.requests():
        request = {"model": "m", "tools": list(conversation.tools), "messages": messages}
        assert fault(request, Strictness.MISTRAL, known_only=True) is None
        assert messages[: len(before)] == before
        before = [*messages, reply]
    assert before == conversation.history()


def test_its_size_is_that_of_a_long_day() -> None:
    conversation = demo_conversation()
    sizes = [
        len(render({"messages": messages, "tools": conversation.tools})) for messages, _ in conversation.requests()
    ]
    assert 30 <= len(sizes) <= 50
    assert 28_000 <= sizes[-1] <= 42_000
    assert max(b - a for a, b in pairwise(sizes)) < 2000, "no turn is a jump past both watermarks"


def test_calls_are_made_in_parallel_and_their_ids_come_back() -> None:
    calls = [message["tool_calls"] for message in demo_conversation().history() if message.get("tool_calls")]
    ids = [call["id"] for made in calls for call in made]
    assert max(len(made) for made in calls) >= 2
    assert len(set(ids)) < len(ids)


def test_each_fact_is_stated_once_and_early() -> None:
    conversation = demo_conversation()
    stated = [
        (i, key, plain(value))
        for i, message in enumerate(conversation.history())
        for key, value in FACT.findall(message_text(message))
    ]
    assert {key: value for _, key, value in stated} == FACTS
    assert len(stated) == len(FACTS)
    assert max(i for i, _, _ in stated) < len(conversation.history()) / 4
    assert not any(
        value in message_text(m) for m in conversation.history()[30:] for value in FACTS.values() if len(value) > 5
    )


def test_an_ideal_summariser_can_find_them_all() -> None:
    instruction = {"role": "user", "content": "You are now acting as a compaction engine."}
    assert facts({"messages": [*demo_conversation().history(), instruction]}) == FACTS


async def test_played_against_a_window_that_holds_it_every_question_is_answered() -> None:
    conversation = demo_conversation()
    async with (
        SimulatedProvider(window_tokens=64_000, answerer=FactAnswerer()) as provider,
        aiohttp.ClientSession() as http,
    ):

        async def send(messages: list[dict[str, object]]) -> dict[str, object]:
            body = {"model": "m", "tools": list(conversation.tools), "messages": messages}
            async with http.post(f"{provider.base_url}/chat/completions", json=body) as reply:
                assert reply.status == 200
                message: dict[str, object] = (await reply.json())["choices"][0]["message"]
                return message

        for messages, reply in conversation.requests():
            provider.next_reply = reply
            said = await send(messages)
            assert reply.items() <= said.items()
        for question in conversation.questions:
            said = await send([*conversation.history(), {"role": "user", "content": question.text}])
            assert question.answer in str(said["content"])

    cached = sum(call.cached for call in provider.calls) / sum(call.prompt_tokens for call in provider.calls)
    assert cached > 0.9
