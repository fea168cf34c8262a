"""Two providers behind one proxy, told apart by the model's name: each with its own address, key, window and switches.

A conversation may move from one to the other and back. What the one is warm for, and what may be said to it, is never sent to the other.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.config import load
from proxy.demo.calls import Call
from proxy.demo.provider import SimulatedProvider
from proxy.server import start
from tests.journeys.player import Answered, Player, is_extension
from tests.journeys.test_main_job import long_text, system

NEAR, FAR = "near-model", "far-model"
CLIENTS, OURS = "Bearer sk-of-the-client", "Bearer sk-of-the-operator"


@dataclass
class Two:
    """A client of the proxy, and the providers: `near` gets the client's own credential, `far` the operator's."""

    player: Player
    near: SimulatedProvider
    far: SimulatedProvider
    messages: list[dict[str, Any]] = field(default_factory=lambda: [system()])
    sent: list[bytes] = field(default_factory=list)

    async def say(self, model: str, words: int = 150, *, settle: bool = True, **members: Any) -> Answered:
        """One turn; the answer is added to the history."""
        self.messages.append({"role": "user", "content": long_text(len(self.messages), words)})
        self.sent.append(json.dumps({"model": model, "messages": self.messages, **members}).encode())
        got = await self.player.post(self.sent[-1])
        assert got.status == 200, got.body
        text = "Very well." if members.get("stream") else got.json["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": text})
        if settle:
            await self.player.settled()
        return got

    async def session(self, got: Answered) -> Any:
        return await self.player.admin(f"/sessions/{got.headers['x-warmfold-session']}")

    def check(self) -> None:
        """Each provider got its own models under its own key, in requests that fit, and every compaction extends one that this very provider was sent."""
        for provider, model, key in ((self.near, NEAR, CLIENTS), (self.far, FAR, OURS)):
            chats = [call for call in provider.calls if call.method == "POST"]
            assert {call.headers["Authorization"] for call in provider.calls} <= {key}
            assert {json.loads(call.raw)["model"] for call in chats} <= {model}
            assert [call.status for call in chats] == [200] * len(chats)
            turns = [call.raw for call in provider.turns]
            own = [body for body in self.sent if json.loads(body)["model"] == model]
            for call in provider.compactions:
                assert is_extension(call.raw, turns, own), call.number


@asynccontextmanager
async def two(tmp: Path, *, near: int, far: int, **flags: object) -> AsyncIterator[Two]:
    """Providers with windows of so many tokens, which they list."""
    environ = {"OPERATORS_KEY": OURS.removeprefix("Bearer ")}
    async with (
        SimulatedProvider(models=(NEAR,), window_tokens=near, window_listed=True, known_only=True) as one,
        SimulatedProvider(
            models=(FAR,), window_tokens=far, window_listed=True, known_only=True, require_key=OURS.split()[1]
        ) as other,
    ):
        file = tmp / "two.toml"
        file.write_text(
            f'[upstream]\nbase_url = "{one.base_url}"\nstream_usage = "never"\n'
            f'[[upstreams]]\nname = "far"\nmatch = "far-*"\nbase_url = "{other.base_url}"\napi_key_env = "OPERATORS_KEY"\n'
            'stream_usage = "always"\n'
            f'[server]\nport = 0\n[admin]\nport = 0\n[store]\ndata_dir = "{tmp / "store"}"\ntimeout_ms = 2000\n'
        )
        running = await start(load(file, environ, {key.replace("__", "."): value for key, value in flags.items()}))
        try:
            async with aiohttp.ClientSession() as http:
                played = Two(Player(running, one, http, {"Authorization": CLIENTS}), one, other)
                yield played
                await played.player.settled()
                played.check()
        finally:
            await running.stop()


async def test_each_model_goes_to_its_upstream_with_its_key_window_and_switches(tmp_path: Path) -> None:
    async with two(tmp_path, near=16_000, far=64_000) as at:
        for model, tokens in ((NEAR, 16_000), (FAR, 64_000)):
            await at.say(model, 900)
            shown = await at.session(await at.say(model, 900))
            assert (shown["model"], shown["window"], shown["window_origin"]) == (model, tokens, "upstream")
            await at.say(model, stream=True)
        assert ["stream_options" in json.loads(call.raw) for call in (at.near.turns[-1], at.far.turns[-1])] == [
            False,
            True,
        ]
        assert at.near.turns[-1].raw == at.sent[2], "nothing is changed where the switch is off"


@pytest.mark.parametrize("when", ["after_turn", "next_turn"])
async def test_a_conversation_that_changes_its_model_is_replayed_where_it_is_warm(tmp_path: Path, when: str) -> None:
    """It moves on right after the turn that made a compaction due, in mid-compaction, and after some quiet turns."""
    async with two(tmp_path, near=6000, far=7000, compaction__when=when) as at:
        covered, names = set(), set()
        model, since, waiting = NEAR, 0, 0
        for _ in range(100):
            got = await at.say(model, settle=since % 12 != 11)
            since += 1
            if int(got.headers.get("x-warmfold-covered", 0)):
                covered.add(model)
            if "x-warmfold-session" not in got.headers:
                continue
            names.add(got.headers["x-warmfold-session"])
            is_pending = bool((await at.session(got)).get("pending"))
            waiting += is_pending
            if (is_pending and waiting % 3 == 1) or since >= 12:
                model, since = FAR if model == NEAR else NEAR, 0
        assert len(names) == 1, "the same conversation all along"
        assert covered == {NEAR, FAR}
        assert when == "after_turn" or waiting > 2
        assert at.near.compactions
        assert at.far.compactions
        for provider in (at.near, at.far):
            assert all(_is_warm(call, provider) for call in provider.compactions)


def _is_warm(compaction: Call, provider: SimulatedProvider) -> bool:
    """Whether what it replays was sent to this provider before: all but our instruction and the answer is in its cache, but for a last block.

    Not so where a conversation comes back too long: then the live request is compacted in front of the turn.
    """
    before = [call for call in provider.turns if call.arrived < compaction.arrived]
    newest = max((call.prompt_tokens for call in before), default=0)
    return compaction.cached >= newest - 32 or compaction.number in _inline(provider)


def _inline(provider: SimulatedProvider) -> set[int]:
    """Compactions that a turn of the same provider waited for: no other call came in between."""
    calls = [call for call in provider.calls if call.method == "POST"]
    return {call.number for call, then in pairwise(calls) if call.is_compaction and not then.is_compaction}


async def test_an_operator_compacts_a_session_where_its_last_turn_was(tmp_path: Path) -> None:
    async with two(tmp_path, near=12_000, far=12_000) as at:
        for _ in range(30):
            got = await at.say(NEAR)
        for model, provider in ((FAR, at.far), (NEAR, at.near)):
            got = await at.say(model)
            path = f"/sessions/{got.headers['x-warmfold-session']}/compact"
            asked = await at.player.admin(path, "POST", headers={"x-upstream-authorization": CLIENTS}, json={})
            assert asked["outcome"] == "committed", asked
            assert len(provider.compactions) == 1
            for _ in range(12):
                await at.say(model)
