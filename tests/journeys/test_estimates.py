"""Where a provider counts nothing, prompts are estimated; what it counted for other conversations with the model says how far that is off."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.journeys.player import Answered, Player
from tests.journeys.test_overflow import Stub, history, in_front_of, user

WINDOW = 16_000
OURS = 8000
"""About what we estimate for LONG: half of the window, and far below the soft watermark."""


class Counting(Stub):
    """Counts `tokens` for each word, and in streams nothing at all."""

    def __init__(self, tokens: float) -> None:
        super().__init__(self._says)
        self.tokens = tokens

    def _says(self, body: Mapping[str, Any]) -> web.StreamResponse | None:
        self.prompt_tokens = round(sum(len(m["content"].split()) for m in body["messages"]) * self.tokens)
        return None


def long(name: str, turns: int = 38) -> list[dict[str, Any]]:
    """A conversation of its own of about OURS tokens by our estimate."""
    preamble, first, *rest = history(turns, 190)
    return [preamble, user(f"{name}: {first['content']}"), *rest]


async def said(player: Player, messages: list[dict[str, Any]], model: str = "some-model", **more: Any) -> Any:
    """What the session shows after a turn."""
    got: Answered = await player.post({"model": model, "messages": messages, **more})
    await player.settled()
    assert got.status == 200
    return await player.admin(f"/sessions/{got.headers['x-warmfold-session']}")


async def pressure(player: Player, messages: list[dict[str, Any]], model: str = "some-model", **more: Any) -> float:
    """What share of the window the turn was taken for: the newest line of its journal."""
    shown = await said(player, messages, model, **more)
    return float(shown["journal"][0]["pressure"])


FLAGS = {
    "compaction__max_context_tokens": WINDOW,
    "compaction__mode": "observe",
    "compaction__trigger_ratio": 0.2,
    "upstream__stream_usage": "never",
}


@pytest.mark.parametrize("tokens", [0.7, 1.6])
async def test_estimates_are_corrected_by_what_the_model_counted_elsewhere(tmp_path: Path, tokens: float) -> None:
    async with in_front_of(Counting(tokens), tmp_path, **FLAGS) as player:
        bare = await pressure(player, long("one"), stream=True)
        counted = await pressure(player, long("two"))
        corrected = await pressure(player, long("three"), stream=True)
        assert bare == pytest.approx(OURS / WINDOW, rel=0.2)
        assert counted == pytest.approx(bare * tokens, rel=0.2)
        assert corrected == pytest.approx(counted, rel=0.05)
        assert await pressure(player, long("four"), "another-model", stream=True) == bare, "it may count otherwise"


async def test_the_watermark_is_reached_by_the_corrected_estimate(tmp_path: Path) -> None:
    stub = Counting(1.8)
    flags = {"compaction__max_context_tokens": WINDOW, "compaction__when": "after_turn"}
    async with in_front_of(stub, tmp_path, upstream__stream_usage="never", **flags) as player:
        await said(player, long("one"), stream=True)
        assert not stub.compactions
        await said(player, long("two", turns=20))
        assert not stub.compactions
        await said(player, long("three"), stream=True)
        assert len(stub.compactions) == 1


async def test_one_odd_conversation_does_not_speak_for_all_of_a_model(tmp_path: Path) -> None:
    stub = Counting(1.0)
    async with in_front_of(stub, tmp_path, **FLAGS) as player:
        for name in ("one", "two", "three"):
            usual = await pressure(player, long(name))
        stub.tokens = 1.9
        odd = await pressure(player, long("odd"))
        assert odd == pytest.approx(1.9 * usual, rel=0.05)
        assert await pressure(player, long("four"), stream=True) < 1.4 * usual


async def test_a_count_of_its_own_comes_first(tmp_path: Path) -> None:
    stub = Counting(1.0)
    async with in_front_of(stub, tmp_path, **{**FLAGS, "compaction__debounce_turns": 1}) as player:
        odd = await pressure(player, long("odd"))
        stub.tokens = 1.9
        for name in ("one", "two", "three"):
            await pressure(player, long(name))
        messages = [*long("odd"), {"role": "assistant", "content": "Very well."}, user("And?")]
        assert await pressure(player, messages, stream=True) == pytest.approx(odd, rel=0.05)


async def test_a_short_prompt_and_a_count_that_is_not_believed_teach_nothing(tmp_path: Path) -> None:
    stub = Counting(3.0)
    async with in_front_of(stub, tmp_path, **FLAGS) as player:
        bare = await pressure(player, long("one"), stream=True)
        await said(player, long("two", turns=3))
        stub.tokens = 0.1
        assert (await said(player, long("three")))["usage"]["prompt"] is None
        assert await pressure(player, long("four"), stream=True) == bare
