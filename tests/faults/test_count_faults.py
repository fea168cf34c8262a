"""Token counts that differ from what we would count, and what else than messages fills a window."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.demo.calls import Call, Forced
from proxy.demo.provider import SimulatedProvider
from proxy.demo.template import render
from proxy.demo.wire import UsageReport
from tests.journeys.talks import assistant, prose, user
from tests.journeys.test_economics import HARD, SOFT, WINDOW, Client, in_front_of

RATIO = 1.24
"""So many tokens of the provider's for one of the simulated ones."""


def counting_more(call: Call) -> Forced | None:
    """The provider's own tokenizer cuts finer, and its window is full accordingly earlier."""
    if call.is_compaction:
        return None
    assert call.request is not None
    call.prompt_tokens = round(len(render(call.request)) * RATIO)
    if call.prompt_tokens > WINDOW:
        text = f"This model's maximum context length is {WINDOW} tokens. Your messages resulted in {call.prompt_tokens} tokens."
        return Forced(400, {}, json.dumps({"error": {"message": text, "code": "context_length_exceeded"}}).encode())
    choice = {"index": 0, "message": {"role": "assistant", "content": "Done."}, "finish_reason": "stop"}
    usage = {"prompt_tokens": call.prompt_tokens, "completion_tokens": 2, "total_tokens": call.prompt_tokens + 2}
    return Forced(200, {}, json.dumps({"object": "chat.completion", "choices": [choice], "usage": usage}).encode())


@pytest.mark.parametrize("when", ["after_turn", "next_turn"])
async def test_where_a_provider_counts_a_quarter_more_compaction_comes_by_its_count(tmp_path: Path, when: str) -> None:
    async with SimulatedProvider(window_tokens=4 * WINDOW) as provider:
        provider.on_call = counting_more
        async with in_front_of(provider, tmp_path, when=when, trigger_ratio=0.65) as player:
            client = Client(player)
            for _ in range(45):
                assert (await client.say(200)).status == 200
            assert max(call.prompt_tokens for call in provider.turns) <= WINDOW
            assert all(call.status == 200 for call in provider.turns), "none was too long"
            lines = await client.journal()
        made = [line for line in lines if line["outcome"] == "committed"]
        assert len(made) >= 2
        assert {line["trigger"] for line in made} == {"soft"}
        assert all(0.65 <= line["pressure"] < HARD for line in made)


@pytest.mark.parametrize("report", [UsageReport.FULL, UsageReport.NONE], ids=["counted", "not counted"])
async def test_tools_and_system_prompt_press_like_messages_before_and_behind_a_checkpoint(
    tmp_path: Path, report: UsageReport
) -> None:
    tools = [
        {"type": "function", "function": {"name": f"tool_{at}", "description": prose(("tool", at), 200)}}
        for at in range(10)
    ]
    members: dict[str, Any] = {"model": "demo-model", "tools": tools}
    async with (
        SimulatedProvider(window_tokens=WINDOW, usage=report) as provider,
        in_front_of(provider, tmp_path) as player,
    ):
        client = Client(player)
        client.messages = [{"role": "system", "content": prose("rules", 600)}, user(0, 120), assistant(0, 20)]
        shown: list[dict[str, Any]] = []
        while len(provider.turns) < 25:
            at = len(client.messages)
            client.messages.append(user(at, 120))
            got = await player.post({**members, "messages": client.messages})
            await player.settled()
            assert got.status == 200
            client.messages.append(assistant(at, 20))
            shown.append(await player.admin(f"/sessions/{got.headers['x-warmfold-session']}"))
        assert provider.compactions
        first = provider.compactions[0].request
        assert first is not None
        said = len(render({"messages": [m for m in first["messages"] if m["role"] != "system"]}))
        assert said < WINDOW * SOFT, "the messages alone would not have set it off"
        for session, call in zip(shown, provider.turns, strict=True):
            if report is UsageReport.FULL:
                assert session["pressure"] == pytest.approx(call.prompt_tokens / WINDOW, rel=0.05)
        asked = [line for line in shown[-1]["journal"] if line["expected_new"] is not None]
        pressing = [
            max(c.prompt_tokens for c in provider.turns if c.arrived < call.arrived) for call in provider.compactions
        ]
        assert asked[-1]["pressure"] == pytest.approx(pressing[0] / WINDOW, rel=0.2)
        assert b"<checkpoint_summary" in provider.turns[-1].raw
