"""Where compaction went wrong in other software, each test a fault that somebody shipped: cuts, sizes, loops, races, templates.

What is asserted is what client, provider and operator see. A docstring names where the fault was described.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from proxy.core import region
from proxy.demo.calls import Forced
from proxy.demo.provider import SimulatedProvider
from proxy.demo.template import render
from tests.core.build import calls_and_results, facts_of, is_whole, talk
from tests.faults.summaries import LOOK, WINDOW, Gate, Summaries, by_hand, flags, work
from tests.journeys.played import FRAME, Lenient, play
from tests.journeys.player import elements, playing
from tests.journeys.talks import SYSTEM, Message, Talk, assistant, calling, prose, result, user
from tests.journeys.test_attacks import _metrics as metrics
from tests.journeys.test_shapes import Client

pytestmark = pytest.mark.filterwarnings("error")


# Calls and their results


def without_ids(messages: list[Message]) -> list[Message]:
    """With null where calls and results have their ids."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            call["id"] = None
        if "tool_call_id" in message:
            message["tool_call_id"] = None
    return messages


INTERLEAVED = [
    pytest.param(talk("a:a1,a2 t:a1 u a:b1 t:a2 t:b1"), id="a late result"),
    pytest.param(talk("a:a1,a2 t:a1 u a:b1 t:b1 t:a2"), id="a later one"),
    pytest.param(talk("a:x,x t:x u a:x t:x t:x"), id="one id for all"),
    pytest.param(without_ids(talk("a:x,x t:x u a:x t:x t:x")), id="no ids"),
    pytest.param(talk("A:a1,a2 U:a1 u A:b1 U:a2 U:b1"), id="calls as parts"),
    pytest.param(talk("l:f u l:g f:f f:g"), id="legacy calls"),
    pytest.param(talk("l:f u a:f f:f t:f"), id="a legacy call and another"),
]


@pytest.mark.parametrize("run", INTERLEAVED)
def test_no_cut_falls_inside_of_calls_whose_results_come_late(run: list[Message]) -> None:
    """langchain-ai/langchain#38352."""
    assert region.legal_cuts(facts_of(run)) == ()
    for before in ([], talk("u a")):
        for behind in ([], talk("u"), talk("a u a")):
            whole = [*before, *run, *behind]
            cuts = region.legal_cuts(facts_of(whole))
            assert not [cut for cut in cuts if len(before) < cut < len(before) + len(run)]
            for cut in range(len(whole) + 1):
                assert cut not in cuts or is_whole(whole, cut)
            if before:
                assert len(before) in cuts
            if behind:
                assert len(before) + len(run) in cuts


def interleaved(words: int) -> list[Message]:
    """Parallel calls, a user who cuts in, and the results behind another call."""
    a, b, c = "call_00000000a", "call_00000000b", "call_00000000c"
    return [calling(a, b), result(a, 1, words), user("hold on"), calling(c), result(b, 2, words), result(c, 3, words)]


@pytest.mark.parametrize("mode", ["on", "force"])
async def test_where_no_cut_is_legal_nothing_is_compacted_and_the_request_goes_out_as_it_came(
    mode: str, tmp_path: Path
) -> None:
    """langchain-ai/langchain#38352."""
    async with Lenient(window_tokens=WINDOW) as provider, playing(tmp_path, provider, **flags()) as player:
        body = json.dumps({"model": "demo-model", "messages": [SYSTEM, *interleaved(2000)]}).encode()
        assert WINDOW * 0.75 < len(render(json.loads(body))) < WINDOW
        got = await player.post(body, x_warmfold_mode=mode)
        await player.settled()
        assert got.status == 200
        for to in range(1, 7):
            done = await by_hand(player, got.headers["x-warmfold-session"], to)
            assert done.get("outcome") != "committed", done
        again = await player.post(body)
        assert "x-warmfold-checkpoint" not in again.headers
        assert [call.raw for call in provider.calls] == [body, body]


async def test_a_result_that_comes_after_the_checkpoint_is_not_sent_without_its_call(tmp_path: Path) -> None:
    """langchain-ai/langchain#38352: at the time of the cut the call looked like one that nobody would answer."""
    async with Lenient(window_tokens=WINDOW) as provider, playing(tmp_path, provider, **flags()) as player:
        client = Client(player)
        await client.say(prose("task", 60))
        client.messages += [user("next"), calling("call_a", "call_b"), result("call_a", 1), user("hold on")]
        await client.send(assistant("held"))
        done = await by_hand(player, client.session, 5)
        assert done["outcome"] == "committed", done
        got = await client.say("what else")
        assert got.headers["x-warmfold-covered"] == "5"

        client.messages += [user("and"), calling("call_c"), result("call_b", 2), result("call_c", 3)]
        await client.send(assistant("late"))
        sent = json.loads(provider.turns[-1].raw)["messages"]
        assert unpaired(sent) == Counter()

        # It is no dead end: a checkpoint that covers the pair whole replaces it.
        while "x-warmfold-checkpoint" not in (await client.say(prose(("more", len(client.messages)), 250))).headers:
            assert len(client.messages) < 80
        assert unpaired(json.loads(provider.turns[-1].raw)["messages"]) == Counter()
        assert all(call.status == 200 for call in provider.calls)


async def test_nor_is_one_whose_call_was_covered_for_another_request_at_the_same_time(tmp_path: Path) -> None:
    """Two ways to go on from one turn wait for the same summary. In one of them the covered call's result is there by now."""
    async with (
        Lenient(window_tokens=WINDOW) as provider,
        playing(tmp_path, provider, **flags(inline_timeout_s=30, trigger_ratio=0.8)) as player,
    ):
        client = Client(player)
        await client.say(prose("task", 60))
        client.messages += [user("next"), calling("call_a", "call_b"), result("call_a", 1), user("hold on")]
        await client.send(assistant("held"))
        while provider.turns[-1].prompt_tokens < 5000:
            await client.say(prose(("more", len(client.messages)), 250))
        assert not provider.compactions
        gate = Gate()
        provider.on_call = gate
        waiting = []
        async with asyncio.timeout(30):
            for late in ([], [result("call_b", 2)]):
                before = (await metrics(player))["warmfold_recalls_total{known}"]
                body = {"model": "demo-model", "messages": [*client.messages, *late, user(len(late), 2000)]}
                waiting.append(asyncio.ensure_future(player.post(body)))
                while (await metrics(player))["warmfold_recalls_total{known}"] == before:
                    await asyncio.sleep(0.01)
            await provider.until(lambda: bool(provider.compactions))
            gate.open()
            first, _ = await asyncio.gather(*waiting)
        assert first.headers["x-warmfold-compaction"] == "inline"
        assert not any(unpaired(json.loads(call.raw)["messages"])["results"] for call in provider.turns)


def unpaired(messages: Sequence[Any]) -> Counter[str]:
    """Results without a call, and calls without a result, counted by kind."""
    found = calls_and_results(messages)
    answered, answering = Counter(call for call, _ in found), Counter(result for _, result in found)
    count: Counter[str] = Counter()
    for at, message in enumerate(messages):
        parts = message["content"] if isinstance(message.get("content"), list) else []
        calls = [*(message.get("tool_calls") or ()), *(p for p in parts if p["type"] == "tool_use")]
        results = [p for p in parts if p["type"] == "tool_result"]
        count["calls"] += len(calls) + bool(message.get("function_call")) - answered[at]
        count["results"] += (message["role"] in ("tool", "function")) + len(results) - answering[at]
    return +count


@pytest.mark.parametrize("stream", [False, True])
async def test_in_the_middle_of_a_turn_every_message_is_covered_or_sent_once(stream: bool, tmp_path: Path) -> None:
    """bastani-inc/atomic#2051: the last message is a result of the very batch at the cut; then the rewritten request is rewritten again."""
    members = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    async with SimulatedProvider(window_tokens=WINDOW) as provider, playing(tmp_path, provider, **flags()) as player:
        messages = [SYSTEM, user("task", 60)]
        tails = set()
        for batch in range(60):
            a, b = f"call_a{batch:09d}", f"call_b{batch:09d}"
            provider.next_reply = calling(a, b)
            got = await player.post({"model": "demo-model", "tools": [LOOK], "messages": messages, **members})
            await player.settled()
            if "x-warmfold-covered" in got.headers:
                covered = int(got.headers["x-warmfold-covered"])
                own = elements(json.dumps({"messages": messages}).encode())
                sent = elements(provider.turns[-1].raw)
                assert [element for element in sent if FRAME not in element] == [own[0], *own[1 + covered :]]
                assert unpaired(json.loads(provider.turns[-1].raw)["messages"]) == Counter()
                tails.add(len(messages) - 1 - covered)
            messages += [calling(a, b), result(b, (batch, "b"), 70), result(a, (batch, "a"), 70)]
        assert len(provider.compactions) >= 3
        assert all(call.status == 200 for call in provider.calls)
        assert min(tails) % 3 == 0, "a batch stays whole"


@pytest.mark.parametrize("to", ["the newest batch", "the one before"])
async def test_so_it_is_where_the_operator_cuts_at_the_batch_that_is_being_answered(to: str, tmp_path: Path) -> None:
    """bastani-inc/atomic#2051."""
    async with (
        SimulatedProvider(window_tokens=32_000) as provider,
        playing(tmp_path, provider, **flags(32_000)) as player,
    ):
        messages = [SYSTEM, user("task", 60)]
        seen = await work(player, messages, 8)
        cut = len(messages) - 3 if to == "the newest batch" else len(messages) - 5
        session = seen[-1]["x-warmfold-session"]
        # What the provider has seen ends two messages before what the client will send.
        done = await by_hand(player, session, cut - 2)
        assert done["outcome"] == "committed", done
        for step in range(3):
            (headers,) = await work(player, messages, 1)
            assert headers["x-warmfold-covered"] == str(cut - 2)
            own = elements(json.dumps({"messages": messages[:-2]}).encode())
            sent = elements(provider.turns[-1].raw)
            assert [FRAME in element for element in sent] == [False, True, *[False] * (len(sent) - 2)], step
            assert sent[2:] == own[1 + cut - 2 :]
        done = await by_hand(player, session, len(messages) - 5)
        assert done["outcome"] == "committed", done
        (headers,) = await work(player, messages, 1)
        own = elements(json.dumps({"messages": messages[:-2]}).encode())
        assert elements(provider.turns[-1].raw)[2:] == own[1 + int(headers["x-warmfold-covered"]) :]


def _dangling(kind: str) -> Message:
    call = calling("call_000000999")
    if kind == "a legacy call":
        return {"role": "assistant", "content": None, "function_call": call["tool_calls"][0]["function"]}
    if kind == "a call as a part":
        return {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "look", "input": {}}]}
    if kind == "one of three":
        return calling("call_000000999", "call_000000998", "call_000000997")
    return without_ids([call])[0] if kind == "without an id" else call


def _later(kind: str, at: int) -> list[Message]:
    """What follows the abandoned call: plain talk, and calls that are answered, some under its own id."""
    name = "call_000000999" if kind == "its id used again" else f"call_{at:09d}"
    pair = [calling(name), result(name, at, 30)]
    if kind == "without an id":
        pair = without_ids(pair)
    return [user(at, 40), *(pair if at % 3 == 0 else []), assistant(at, 40)]


@pytest.mark.parametrize(
    "kind",
    ["a call", "one of three", "a legacy call", "a call as a part", "without an id", "its id used again"],
)
async def test_an_old_call_that_nobody_answered_does_not_stand_in_the_way(kind: str, tmp_path: Path) -> None:
    """k0valik/pi-blackhole#57."""
    messages = [SYSTEM, user("a"), assistant("a"), user("b"), assistant("b"), user("c"), _dangling(kind)]
    if kind == "one of three":
        messages.append(result("call_000000998", "b"))
    for at in range(40):
        messages += _later(kind, at)
    steps = Talk(messages, {"tools": [LOOK]}).steps()
    played = await play(steps, 3000, tmp_path, server=Lenient)
    assert played.faults == []
    assert played.compactions >= 2
    assert len(played.checkpoints) >= 2
    assert played.applied > 10


@pytest.mark.parametrize("to", [5, 7, 20])
async def test_a_rewrite_adds_no_imbalance_to_one_that_was_there(to: int, tmp_path: Path) -> None:
    """k0valik/pi-blackhole#57: the abandoned call stays in front of the cut or behind it, and nothing else changes."""
    async with Lenient(window_tokens=32_000) as provider, playing(tmp_path, provider, **flags(32_000)) as player:
        client = Client(player)
        client.messages += [user("a"), assistant("a"), user("b"), assistant("b"), user("c"), _dangling("a call")]
        for at in range(20):
            await client.say(prose(("user", at), 30))
        assert unpaired(client.messages) == Counter(calls=1)
        done = await by_hand(player, client.session, to)
        assert done["outcome"] == "committed", done
        got = await client.say("go on")
        assert got.headers["x-warmfold-covered"] == str(to)
        sent = json.loads(provider.turns[-1].raw)["messages"]
        assert unpaired(sent) == (Counter(calls=1) if to == 5 else Counter())


# Sizes


def grown(tokens: int, *, agent: bool = False) -> list[Message]:
    """A conversation of about so many tokens that ends on the user or on a tool."""
    messages = [SYSTEM, user("task", 40)]
    while len(render({"messages": messages})) < tokens:
        at = len(messages)
        more = (
            [calling(f"call_{at:09d}"), result(f"call_{at:09d}", at, 50)]
            if agent
            else [assistant(at, 40), user(at, 50)]
        )
        messages += more
    return messages


NARROW: dict[str, Any] = {"trigger_ratio": 0.95, "hard_ratio": 0.97}


@pytest.mark.parametrize("agent", [False, True])
@pytest.mark.parametrize("scope", ["warm", "region"])
@pytest.mark.parametrize("members", [{}, {"max_tokens": 64}, {"max_completion_tokens": 64, "stream": True}])
async def test_a_call_leaves_room_for_its_own_answer(
    members: dict[str, Any], scope: str, agent: bool, tmp_path: Path
) -> None:
    """openai/codex#13271: the window is nearly full, and the provider refuses whatever exceeds it with its output."""
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        playing(tmp_path, provider, **flags(**NARROW, replay_scope=scope)) as player,
    ):
        request = {"model": "demo-model", "messages": grown(7850, agent=agent), **members}
        assert 7850 <= len(render(request)) < 7936
        got = await player.post(request)
        await player.settled()
        assert got.status == 200
        assert got.headers["x-warmfold-compaction"] == "inline"
        assert [call.status for call in provider.calls] == [200] * len(provider.calls)
        assert 1 <= len(provider.compactions) <= 2
        for call in provider.compactions:
            asked = json.loads(call.raw)
            output = asked.get("max_tokens") or asked.get("max_completion_tokens") or 0
            assert call.prompt_tokens + max(1000, output) <= WINDOW


@pytest.mark.parametrize("turns", [1, 4])
async def test_what_leaves_no_room_at_all_is_given_up_and_the_request_goes_out(turns: int, tmp_path: Path) -> None:
    """openai/codex#13271: the large part of the window is one message; no prefix that could be covered is worth a call."""
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        playing(tmp_path, provider, **flags(**NARROW)) as player,
    ):
        messages = [SYSTEM, user("a", 5), assistant("a", 5), user("b", 7000)]
        body = json.dumps({"model": "demo-model", "messages": messages}).encode()
        assert 7500 < len(render(json.loads(body))) < WINDOW
        for _ in range(turns):
            got = await player.post(body)
            await player.settled()
            assert got.status == 200
            # Once our estimate has been corrected by the provider's count, it is known to fit: then there is nothing to give up.
            note = got.headers["x-warmfold-compaction"]
            assert note == "none" or note.startswith("failed-")
        assert [call.raw for call in provider.turns] == [body] * turns
        assert len(provider.compactions) <= 2


TOO_LONG = {"message": "This model's maximum context length is 8000 tokens.", "code": "context_length_exceeded"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_refused_as_too_long_is_not_tried_again_and_again(stream: bool, tmp_path: Path) -> None:
    """openai/codex#13271: where our count is wrong the provider says so once."""
    async with SimulatedProvider(window_tokens=WINDOW) as provider, playing(tmp_path, provider, **flags()) as player:
        provider.on_call = Summaries(Forced(status=400, body=json.dumps({"error": TOO_LONG}).encode()))
        client = Client(player, stream=stream)
        client.messages = grown(5900)[:-1]
        for turn in range(6):
            await client.say(prose(("more", turn), 60))
        assert len(provider.compactions) == 1
        assert all(call.status == 200 for call in provider.turns)
        shown = await client.shown()
        assert [line["because"] for line in shown["journal"]] == ["overflow"]
        # At the hard watermark the request is served all the same, without a model.
        got = await client.say(prose("much", 900))
        assert got.headers["x-warmfold-compaction"] == "inline"
        assert len(provider.compactions) == 1
