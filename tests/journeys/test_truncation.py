"""A provider that drops the beginning of a long prompt without a word: its counts are not believed, and the operator is told."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.player import Answered, Player
from tests.journeys.test_main_job import long_text
from tests.journeys.test_overflow import RULE, Stub, history, in_front_of, note, user

SERIES = "warmfold_silent_truncations_total"
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBO" * 5000}}


def longer(messages: list[dict[str, Any]], seed: int, words: int = 400) -> list[dict[str, Any]]:
    return [*messages, {"role": "assistant", "content": "Very well."}, user(long_text(seed, words))]


def noticed(player: Player) -> float:
    lines = player.running.metrics.render().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(SERIES + " "))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "counts" in r.getMessage()]


async def said(player: Player, messages: list[dict[str, Any]], model: str = "some-model", **more: Any) -> Answered:
    got = await player.post({"model": model, "messages": messages, **more})
    await player.settled()
    assert got.status == 200
    return got


async def shown(player: Player, got: Answered) -> Any:
    return await player.admin(f"/sessions/{got.headers['x-warmfold-session']}")


@pytest.mark.parametrize("stream", [False, True])
async def test_pressure_is_the_estimates_where_the_count_is_too_small(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    stub = Stub(lambda _: None, prompt_tokens=4096)
    if stream:
        stub.answer = streaming(stub)  # type: ignore[method-assign]
    async with in_front_of(stub, tmp_path, compaction__max_context_tokens=16_000) as player:
        messages = history(26, 400)  # about 11,000 tokens
        turns = 0
        while not stub.compactions:
            messages = longer(messages, turns + 500, 200)
            got = await said(player, messages, stream=stream)
            turns += 1
            assert turns < 20, "the count says 4,096 of 16,000 for ever"
        assert sum(len(json.dumps(m)) for m in stub.turns[-1]["messages"]) > 4 * 10_000
        assert noticed(player) >= turns - 1
        before = noticed(player)
        messages = longer(messages, 900)
        got = await said(player, messages, stream=stream)
        assert int(got.headers["x-warmfold-covered"]) > 0
        assert RULE in json.dumps(stub.turns[-1])
        assert noticed(player) == before, "what is sent now fits into what was counted"
        assert [line.count("upstream=default") for line in warnings(caplog)] == [1]
    for text in (RULE, "some-model", messages[-1]["content"][:30]):
        assert text not in caplog.text


def streaming(stub: Stub) -> Any:
    """The same answers, with usage in the stream."""
    whole = stub.answer

    async def answer(request: Any) -> Any:
        reply = await whole(request)
        body = stub.turns[-1] if stub.turns else {}
        if reply.headers.get("Content-Type") == "text/event-stream" and body.get("stream"):
            usage = {"choices": [], "usage": {"prompt_tokens": stub.prompt_tokens, "completion_tokens": 2}}
            reply.body = reply.body.replace(b"data: [DONE]", f"data: {json.dumps(usage)}\n\ndata: [DONE]".encode())
        return reply

    return answer


async def test_the_session_is_not_measured_by_such_a_count(tmp_path: Path) -> None:
    """Its next request is guarded by what it is likely to need, not by what was counted for the part that was read."""
    stub = Stub(lambda _: None, prompt_tokens=4096)
    async with in_front_of(
        stub, tmp_path, compaction__max_context_tokens=16_000, compaction__debounce_turns=9
    ) as player:
        messages = history(26, 400)
        got = await said(player, messages)
        assert (await shown(player, got))["usage"]["prompt"] is None
        for seed in range(10):
            messages = longer(messages, seed + 700)
        got = await said(player, messages)
        assert note(got) == "inline", "about 17,000 tokens do not fit"


async def test_one_warning_for_each_upstream_and_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stub = Stub(lambda _: None, prompt_tokens=4096)
    async with in_front_of(stub, tmp_path, compaction__max_context_tokens=200_000) as player:
        for model in ("one", "two", "one", "two"):
            await said(player, history(30, 400), model)
        assert noticed(player) == 4
        await said(player, history(30, 400), "m" * 300)
        assert noticed(player) == 5
    assert len(warnings(caplog)) == 2, "what is longer than any name is not remembered"


async def test_a_count_that_stands_still_teaches_the_window_that_nobody_told(tmp_path: Path) -> None:
    stub = Stub(lambda _: None, prompt_tokens=4096)
    async with in_front_of(stub, tmp_path) as player:
        messages = history(26, 400)
        origins = []
        for seed in range(4):
            messages = longer(messages, seed + 300)
            session = await shown(player, await said(player, messages))
            origins.append((session["window"], session["window_origin"]))
        assert origins[:2] == [(32_000, "assumed")] * 2
        assert origins[-1] == (4096, "learned")
        assert note(await said(player, longer(messages, 400))) == "inline"
        assert len(json.dumps(stub.turns[-1]["messages"])) < 4 * 4096


async def test_counts_that_move_teach_nothing_and_prove_nothing(tmp_path: Path) -> None:
    """Not even that the window is longer than assumed: what was answered was not what was sent."""
    stub = Stub(lambda _: None)
    async with in_front_of(stub, tmp_path, compaction__mode="observe") as player:
        messages = history(100, 400)
        for seed, stub.prompt_tokens in enumerate((3900, 4050, 3870, 4011)):
            messages = longer(messages, seed + 300)
            session = await shown(player, await said(player, messages))
            assert (session["window"], session["window_origin"]) == (32_000, "assumed")
        assert noticed(player) == 4


async def test_what_is_configured_stays_though_the_count_stands_still(tmp_path: Path) -> None:
    stub = Stub(lambda _: None, prompt_tokens=4096)
    async with in_front_of(stub, tmp_path, compaction__max_context_tokens=64_000) as player:
        messages = history(26, 400)
        for seed in range(5):
            messages = longer(messages, seed + 300)
            session = await shown(player, await said(player, messages))
        assert (session["window"], session["window_origin"]) == (64_000, "config")
        assert noticed(player) == 5


async def test_pictures_and_thoughts_that_cost_less_than_we_think_are_no_truncation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stub = Stub(lambda _: None, prompt_tokens=3000)
    async with in_front_of(stub, tmp_path, compaction__max_context_tokens=200_000) as player:
        seen = {"role": "user", "content": [{"type": "text", "text": long_text(1, 300)}, *[PICTURE] * 20]}
        thought = {"role": "assistant", "content": "So.", "reasoning_content": long_text(2, 9000)}
        got = await said(player, [seen, thought, user(long_text(3, 900))])
        assert (await shown(player, got))["usage"]["prompt"] == 3000
        assert noticed(player) == 0
    assert warnings(caplog) == []
