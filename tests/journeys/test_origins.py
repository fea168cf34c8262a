"""What the first implementations of this idea tested, each under its name: a short index of behaviour that is tested in depth elsewhere."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from proxy.core.replay import OPENING
from proxy.demo.provider import SimulatedProvider
from proxy.demo.summariser import Dead
from tests.journeys.player import elements, is_extension, playing
from tests.journeys.talks import TOOLS, assistant, calling, prose, result, user
from tests.journeys.test_shapes import Client

WINDOW = 6000
SMALL: dict[str, Any] = {"compaction__max_context_tokens": WINDOW, "compaction__when": "after_turn"}
SOFT = 0.75 * WINDOW


async def _until(client: Client, provider: SimulatedProvider, tokens: float) -> None:
    """Talk until a turn has used so many tokens."""
    turn = 0
    while not provider.turns or provider.turns[-1].prompt_tokens < tokens:
        turn += 1
        assert turn < 90
        await client.say(prose(("talk", turn), 120))


async def test_below_the_threshold_nothing_is_compacted(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider, playing(tmp_path, provider, **SMALL) as player:
        await _until(Client(player), provider, SOFT - 800)
        assert provider.turns[-1].prompt_tokens < SOFT
        assert not provider.compactions


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream path"])
async def test_above_the_threshold_it_is(stream: bool, tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider, playing(tmp_path, provider, **SMALL) as player:
        client = Client(player, stream=stream)
        await _until(client, provider, SOFT)
        assert len(provider.compactions) == 1
        assert "x-warmfold-checkpoint" in (await client.say("and now?")).headers


async def test_debounce(tmp_path: Path) -> None:
    """Always pressed, it still waits for some turns between two compactions."""
    pressed = {"compaction__trigger_ratio": 0.3, "compaction__debounce_turns": 5, "compaction__min_region_tokens": 1}
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        playing(tmp_path, provider, **SMALL, **pressed) as player,
    ):
        client = Client(player)
        for turn in range(40):
            await client.say(prose(("talk", turn), 200))
        order = [call.is_compaction for call in provider.calls]
        made = [at for at, is_compaction in enumerate(order) if is_compaction]
        assert len(made) >= 2
        assert all(after - before > 5 for before, after in itertools.pairwise(made))


async def test_unreachable_window(tmp_path: Path) -> None:
    """A window that the newest messages alone exceed cannot be reached: the request goes out as it came, and nobody loops."""
    async with SimulatedProvider(window_tokens=50_000) as provider, playing(tmp_path, provider, **SMALL) as player:
        messages = [user("a", 20), assistant("b", 20), user("c", 9000)]
        body = json.dumps({"model": "demo-model", "messages": messages}).encode()
        for _ in range(3):
            got = await player.post(body)
            await player.settled()
            assert got.status == 200
            assert got.headers["x-warmfold-compaction"].startswith("failed-")
        assert [call.raw for call in provider.calls] == [body] * 3


async def test_a_failure_does_not_block(tmp_path: Path) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW, summariser=Dead()) as provider,
        playing(tmp_path, provider, **SMALL) as player,
    ):
        client = Client(player)
        for turn in range(60):
            await client.say(prose(("talk", turn), 120))  # asserts that it was answered
        assert provider.compactions
        assert all(call.status == 200 for call in provider.turns)


async def test_empty_history_makes_no_call(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider, playing(tmp_path, provider, **SMALL) as player:
        for messages in ([], [{"role": "system", "content": "Be brief."}], [user("only", 4)]):
            body = {"model": "demo-model", "messages": messages}
            await player.post(body, **{"x-warmfold-mode": "force"})
            await player.settled()
        assert not provider.compactions


async def test_rendering_of_a_transcript_with_untrusted_and_sequence_marks(tmp_path: Path) -> None:
    keys = {**SMALL, "compaction__strategy": "transcript"}
    async with SimulatedProvider(window_tokens=WINDOW) as provider, playing(tmp_path, provider, **keys) as player:
        client = Client(player)
        client.members["tools"] = TOOLS
        client.messages += [user("task", 20), calling("call_1"), result("call_1", 1, 20), assistant("done", 20)]
        await _until(client, provider, SOFT)
        (message,) = json.loads(provider.compactions[0].raw)["messages"]
        text = message["content"]
        assert '<transcript trust="untrusted">' in text
        numbers = [int(number) for number in re.findall(r'<entry sequence="(\d+)">', text)]
        assert numbers == list(range(len(numbers)))
        first = text[text.index("<entry") : text.index('<entry sequence="4">')]
        said = [
            re.sub(r"\d+", "N", line.split(": ")[0])
            for line in first.splitlines()
            if re.match(r"[A-Z][\w \[\]]+: ", line)
        ]
        assert said == ["User", "Assistant", "Tool Result [call_N]", "Assistant"]
        assert "[Tool: " in first


async def test_prefix_replay_with_tools_and_system_and_the_instruction_last(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider, playing(tmp_path, provider, **SMALL) as player:
        client = Client(player)
        client.members |= {"tools": TOOLS, "temperature": 0.2}
        await _until(client, provider, SOFT)
        (call,) = provider.compactions
        warm = next(turn for turn in reversed(provider.turns) if turn.arrived < call.arrived)
        sent, replayed = json.loads(warm.raw), json.loads(call.raw)
        assert replayed["tools"] == sent["tools"]
        assert replayed["temperature"] == sent["temperature"]
        assert replayed["messages"][0] == sent["messages"][0]
        assert elements(call.raw)[: len(sent["messages"])] == elements(warm.raw)
        assert replayed["messages"][-1]["role"] == "user"
        assert replayed["messages"][-1]["content"].startswith(OPENING)
        assert is_extension(call.raw, [turn.raw for turn in provider.turns])
        assert call.cached >= 0.9 * call.prompt_tokens


async def test_overflow_recovery(tmp_path: Path) -> None:
    """The configured window is wrong: the provider's error is not the client's concern."""
    keys = {**SMALL, "compaction__max_context_tokens": 10 * WINDOW}
    async with SimulatedProvider(window_tokens=WINDOW) as provider, playing(tmp_path, provider, **keys) as player:
        client = Client(player)
        client.messages += [m for at in range(40) for m in (user(("l", at), 100), assistant(("l", at), 100))]
        got = await client.say("and now?")
        assert (got.status, got.headers["x-warmfold-compaction"]) == (200, "recovered")
        assert [call.status for call in provider.turns] == [400, 200]
