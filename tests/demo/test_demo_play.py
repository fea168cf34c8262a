"""The three players of the demo, and what is printed about them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from io import StringIO

import aiohttp
import pytest
from rich.console import Console

from proxy.demo.conversation import demo_conversation
from proxy.demo.play import MODEL, Client, Score, Turn, play
from proxy.demo.provider import SimulatedProvider
from proxy.demo.screen import Screen
from proxy.demo.summariser import Dead
from proxy.demo.transcript_baseline import SYSTEM, TranscriptBaseline, transcript

WINDOW = 12_000


@pytest.fixture
async def provider() -> AsyncIterator[SimulatedProvider]:
    async with SimulatedProvider(window_tokens=WINDOW) as running:
        yield running


@pytest.fixture
async def client(provider: SimulatedProvider) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as http:
        yield Client(http, provider.base_url)


async def test_straight_to_the_provider_the_window_ends_it(provider: SimulatedProvider, client: Client) -> None:
    score = await play("direct", demo_conversation(), provider, client)
    assert 10 < score.served < score.turns
    assert (score.compactions, score.compaction_cached, score.answered) == ((), None, 0)
    assert provider.calls[score.served].status == 400
    assert score.computed == sum(call.new for call in provider.calls[: score.served])


async def test_with_a_transcript_summary_every_turn_is_served_and_each_summary_is_computed_from_nothing(
    provider: SimulatedProvider, client: Client
) -> None:
    baseline = TranscriptBaseline(client.say, MODEL, WINDOW)
    score = await play("transcript", demo_conversation(), provider, client, shorten=baseline.shorten)
    assert score.served == score.turns
    assert {call.status for call in provider.calls} == {200}, "no result was parted from its call"
    assert len(score.compactions) >= 3
    for call in score.compactions:
        assert call.request is not None
        assert "tools" not in call.request
        assert call.request["messages"][0] == {"role": "system", "content": SYSTEM}
    assert score.compaction_cached is not None
    assert score.compaction_cached < 0.2
    assert 0 < score.answered < score.questions


async def test_where_no_summary_comes_the_history_stays(provider: SimulatedProvider, client: Client) -> None:
    provider.change(summariser=Dead(503))
    baseline = TranscriptBaseline(client.say, MODEL, WINDOW)
    history = demo_conversation().history()
    assert await baseline.shorten(history, WINDOW) == history
    assert len(provider.compactions) == 1
    assert await baseline.shorten(history, WINDOW // 2) == history
    assert len(provider.compactions) == 1


def test_a_transcript_is_flat_and_its_results_are_cut() -> None:
    text = transcript(
        [
            {"role": "user", "content": "Read it."},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "function": {"name": "read_file", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "x" * 900},
        ]
    )
    assert text == f"User: Read it.\n\nAssistant: [Tool: read_file]\n\nTool Result [c]: {'x' * 500}"


def printed(console: Console) -> str:
    screen = Screen(WINDOW, console)
    screen.opening(44)
    screen.part("c", "through warmfold")
    screen.columns()
    screen.turn(Turn(11, 9241, 9241, 7792, 9243, "", "", "none"))
    screen.turn(Turn(12, 20_463, 3463, 512, 3500, "ck", "17", "inline"))
    score = Score("warmfold", 44, 44, 31_000, (), 12, 12)
    screen.done(score)
    screen.table([score, Score("direct", 15, 44, 10_970, (), 0, 12)], 4.2)
    screen.failed("no store")
    file = console.file
    assert isinstance(file, StringIO)
    return file.getvalue()


def test_piped_output_is_plain() -> None:
    text = printed(Console(file=StringIO(), width=80, highlight=False))
    assert "\x1b" not in text
    assert "11    9,241    9,241    7,792    77% " in text
    assert "covers 17 messages (inline)" in text
    assert "44 of 44" in text
    assert "15 of 44" in text
    assert "12 of 12" in text
    assert "refused" in text
    assert "0 of 12" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_terminal_gets_colours_and_the_same_words() -> None:
    text = printed(Console(file=StringIO(), width=80, highlight=False, force_terminal=True, color_system="standard"))
    assert "\x1b[" in text
    assert "covers 17 messages (inline)" in text
