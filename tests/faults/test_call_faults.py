"""Compaction calls and rewritten requests that providers refused, or had not cached, in other software; each test a fault that somebody shipped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from proxy.demo.calls import Call, Forced
from proxy.demo.provider import SimulatedProvider
from tests.faults.summaries import LOOK, WINDOW, by_hand, flags, history, work
from tests.journeys.played import FRAME
from tests.journeys.player import elements, playing
from tests.journeys.talks import SYSTEM, Message, assistant, calling, prose, result, user
from tests.journeys.test_attacks import _metrics as metrics
from tests.journeys.test_shapes import Client

pytestmark = pytest.mark.filterwarnings("error")


# Parameters

MOST = 16_384


def _over_the_limit(call: Call) -> Forced | None:
    """A model that never gives more than so many tokens says so to whoever asks for more."""
    asked = json.loads(call.raw)
    output = asked.get("max_completion_tokens") or asked.get("max_tokens") or 1
    if not call.is_compaction or 1 <= output <= MOST:
        return None
    text = f"max_tokens is too large: {output}. This model supports at most {MOST} completion tokens."
    return Forced(status=400, body=json.dumps({"error": {"message": text, "type": "invalid_request_error"}}).encode())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "members",
    [{"max_completion_tokens": 200_000}, {"max_tokens": 200_000}, {"max_tokens": 5}, {"max_completion_tokens": 5}],
)
@pytest.mark.parametrize("window", [WINDOW, 131_072])
async def test_the_call_has_an_output_limit_of_its_own_under_the_clients_name(
    window: int, members: dict[str, int], stream: bool, tmp_path: Path
) -> None:
    """google-gemini/gemini-cli#8183."""
    async with (
        SimulatedProvider(window_tokens=1_000_000, max_output_tokens=200_000) as provider,
        playing(tmp_path, provider, **flags(window, budget_tokens=5500)) as player,
    ):
        provider.on_call = _over_the_limit
        client = Client(player, stream=stream)
        client.members |= members
        client.messages = history(5400)[:-1]
        await client.say(prose("press", 200))
        (call,) = provider.compactions
        assert call.status == 200
        (key,) = members
        asked = json.loads(call.raw)
        assert {name for name in asked if name.startswith("max_")} == {key}
        assert 500 < asked[key] <= min(MOST, window // 4)
        assert call.answer is not None
        assert call.answer.finish_reason == "stop"
        got = await client.say("go on")
        assert "x-warmfold-checkpoint" in got.headers
        assert json.loads(provider.turns[-1].raw)[key] == members[key]


SHAPING: Mapping[str, Any] = {
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning_effort": "high",
    "reasoning": {"effort": "high", "exclude": False},
    "thinking": {"type": "enabled", "budget_tokens": 2048},
    "enable_thinking": True,
    "chat_template_kwargs": {"enable_thinking": True},
    "verbosity": "low",
    "temperature": 0.2,
    "top_p": 0.9,
    "seed": 7,
    "user": "u-1",
    "prompt_cache_key": "k-1",
    "service_tier": "default",
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "none", {"type": "auto"}, None])
async def test_what_shapes_the_prompt_is_sent_as_the_client_sent_it(choice: Any, stream: bool, tmp_path: Path) -> None:
    """dlants/magenta.nvim#137: the two requests differ in the last messages, and in what a single text needs."""
    async with SimulatedProvider(window_tokens=WINDOW) as provider, playing(tmp_path, provider, **flags()) as player:
        client = Client(player, stream=stream)
        client.members |= {**SHAPING, "tool_choice": choice, "tools": [LOOK]}
        client.messages = history(5900)[:-1]
        await client.say(prose("press", 200))
        (call,) = provider.compactions
        warm, asked = json.loads(provider.turns[-1].raw), json.loads(call.raw)
        assert set(warm) - set(asked) == ({"stream", "stream_options"} if stream else set())
        assert list(asked) == [key for key in warm if key in asked]
        assert {key: asked[key] for key in asked if key != "messages"} == {
            key: warm[key] for key in asked if key != "messages"
        }
        assert call.cached / call.prompt_tokens > 0.9


@pytest.mark.parametrize("keep", [False, True])
async def test_what_would_spoil_the_text_is_left_out_and_the_operator_may_keep_the_format(
    keep: bool, tmp_path: Path
) -> None:
    """dlants/magenta.nvim#137: a forced call leaves no way to answer in text; a response format is a key of its own in the configuration."""
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        playing(tmp_path, provider, **flags(keep_response_format=keep)) as player,
    ):
        client = Client(player)
        forced = {"tool_choice": "required", "response_format": {"type": "json_object"}, "tools": [LOOK]}
        client.members |= forced
        client.messages = history(5900)[:-1]
        await client.say(prose("press", 200))
        asked = json.loads(provider.compactions[0].raw)
        assert [key for key in forced if key in asked] == (["response_format"] if keep else []) + ["tools"]


# Templates


def _raises(messages: Sequence[Message]) -> str:
    """What a template says that wants user and assistant in turn, calls and results apart, and a system message in front only."""
    spoken = messages[1:] if messages[0]["role"] == "system" else messages
    turn = 0
    for before, message in zip([None, *spoken], spoken, strict=False):
        role = message["role"]
        if role == "system":
            return "Only one system message, in front, is supported!"
        if role == "user" and before is not None and before["role"] == "tool":
            return "Unexpected role 'user' after role 'tool'"
        if role == "tool" or message.get("tool_calls"):
            continue
        if (role == "user") != (turn % 2 == 0):
            return "Conversation roles must alternate user/assistant/user/assistant/..."
        turn += 1
    return ""


def strict(call: Call) -> Forced | None:
    """Refuses as vLLM does where a template raises."""
    said = _raises(json.loads(call.raw)["messages"])
    error = {"object": "error", "message": said, "type": "BadRequestError", "param": None, "code": 400}
    return Forced(status=400, body=json.dumps(error).encode()) if said else None


def _turn(at: int) -> list[Message]:
    a, b = f"call_a{at:08d}", f"call_b{at:08d}"
    return [
        *(user(at, 200), calling(a), result(a, at, 40), calling(b), result(b, (at, "b"), 40)),
        *(assistant(at, 40), user((at, "then"), 30), assistant((at, "then"), 30)),
    ]


def _as_parts(messages: list[Message]) -> list[Message]:
    """The same with texts as parts."""
    return [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if isinstance(m.get("content"), str) else m
        for m in messages
    ]


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize(
    ("to", "begins"),
    [(8, "user"), (14, "user"), (7, "assistant"), (13, "assistant"), (9, "calls"), (11, "calls"), (3, "calls")],
)
async def test_a_strict_template_takes_a_tail_that_begins_with(
    to: int, begins: str, parts: bool, tmp_path: Path
) -> None:
    """NousResearch/hermes-agent#74087: calls and their results do not count as turns."""
    async with (
        SimulatedProvider(window_tokens=32_000) as provider,
        playing(tmp_path, provider, **flags(32_000)) as player,
    ):
        provider.on_call = strict
        client = Client(player)
        client.members["tools"] = [LOOK]
        history_ = [SYSTEM, *(message for at in range(4) for message in _turn(at)), user("end", 30)]
        client.messages = _as_parts(history_) if parts else history_
        first = client.messages[1 + to]
        assert ("calls" if first.get("tool_calls") else first["role"]) == begins
        await client.send(assistant("end"))
        done = await by_hand(player, client.session, to)
        assert done["outcome"] == "committed", done
        for _ in range(2):
            got = await client.say("go on")
            assert got.headers["x-warmfold-covered"] == str(to)
            assert FRAME in elements(provider.turns[-1].raw)[1]
        assert all(call.status == 200 for call in provider.turns)


REFUSALS = [
    pytest.param(400, {"message": "roles must alternate user/assistant", "type": "BadRequestError"}, id="400"),
    pytest.param(422, {"message": "invalid message order"}, id="422"),
    pytest.param(
        500, {"message": "Jinja Exception: roles must alternate", "type": "server_error"}, id="500 of a template"
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("status", "error"), REFUSALS)
async def test_a_template_that_takes_no_rewritten_request_gets_the_clients_own_from_then_on(
    status: int, error: dict[str, str], stream: bool, tmp_path: Path
) -> None:
    """NousResearch/hermes-agent#74087."""
    async with SimulatedProvider(window_tokens=32_000) as provider, playing(tmp_path, provider, **flags()) as player:
        client = Client(player, stream=stream)
        client.messages = history(5900)[:-1]
        await client.say(prose("press", 200))
        assert len(provider.compactions) == 1

        def refuse(call: Call) -> Forced | None:
            rewritten = not call.is_compaction and FRAME in call.raw
            return Forced(status=status, body=json.dumps({"error": error}).encode()) if rewritten else None

        provider.on_call = refuse
        before = len(provider.turns)
        for turn in range(4):
            got = await client.say(f"go on {turn}")
            assert "x-warmfold-checkpoint" not in got.headers
            assert json.loads(provider.turns[-1].raw)["messages"] == client.messages[:-1]
        assert [call.status for call in provider.turns[before:]] == [status, 200, 200, 200, 200]
        assert (await metrics(player))["warmfold_retries_total{shape}"] == 1


# What ends the replay: a question or a result, and what came of it.
ENDS = [
    pytest.param("user", True, [200], id="a question and its answer"),
    pytest.param("tool", True, [200], id="a result and the answer to it"),
    pytest.param("user", False, [400, 200], id="a question that led to a call"),
    pytest.param("tool", False, [400, 200], id="a result that led to a call"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("role", "text", "statuses"), ENDS)
async def test_a_strict_template_takes_the_call_whatever_the_request_ended_on(
    role: str, text: bool, statuses: list[int], stream: bool, tmp_path: Path
) -> None:
    """vllm-project/vllm#6862."""
    async with SimulatedProvider(window_tokens=WINDOW) as provider, playing(tmp_path, provider, **flags()) as player:
        provider.on_call = strict
        client = Client(player, stream=stream)
        client.members["tools"] = [LOOK]
        client.messages = history(6100)
        if role == "tool":
            client.messages += [calling("call_000000001"), result("call_000000001", 1, 40)]
        await client.send(assistant("said") if text else calling("call_000000002"))
        assert [call.status for call in provider.compactions] == statuses
        if not text:
            client.messages.append(result("call_000000002", 2, 40))
        got = await client.send(assistant("on"))
        assert "x-warmfold-checkpoint" in got.headers
        assert all(call.status == 200 for call in provider.turns)


@pytest.mark.parametrize("text", ["roles must alternate", "messages: unexpected role", "unsupported parameter"])
async def test_a_provider_that_takes_no_shape_of_the_call_is_left_alone(text: str, tmp_path: Path) -> None:
    """vllm-project/vllm#6862: the client never sees it."""
    async with SimulatedProvider(window_tokens=WINDOW) as provider, playing(tmp_path, provider, **flags()) as player:

        def refuse(call: Call) -> Forced | None:
            body = json.dumps({"error": {"message": text}}).encode()
            return Forced(status=400, body=body) if call.is_compaction else None

        provider.on_call = refuse
        client = Client(player)
        client.messages = history(5900)[:-1]
        await client.say(prose("press", 200))
        assert 1 <= len(provider.compactions) <= 3
        assert len({call.raw for call in provider.compactions}) == len(provider.compactions)
        asked = len(provider.compactions)
        for turn in range(8):
            got = await client.say(f"go on {turn}")
            assert "x-warmfold-checkpoint" not in got.headers
        assert len(provider.compactions) == asked
        shown = await client.shown()
        assert (shown["counters"]["failures"], len(shown["journal"])) == (1, 1)
        assert all(call.status == 200 for call in provider.turns)


async def test_an_agent_on_a_strict_template_goes_on_over_many_checkpoints(tmp_path: Path) -> None:
    """vllm-project/vllm#6862: what was refused once is not tried again."""
    async with SimulatedProvider(window_tokens=WINDOW) as provider, playing(tmp_path, provider, **flags()) as player:
        provider.on_call = strict
        messages = [SYSTEM, user("task", 60)]
        seen = await work(player, messages, 150)
        assert len({headers.get("x-warmfold-checkpoint") for headers in seen} - {None}) >= 2
        assert [call.status for call in provider.compactions] == [400, *[200] * (len(provider.compactions) - 1)]
        assert all(call.status == 200 for call in provider.turns)
