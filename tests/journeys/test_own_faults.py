"""A fault of warmfold's own, in any step, costs the client nothing; it is counted, and its log line quotes nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy import compactor, recovery
from proxy.core import rewrite
from proxy.demo.provider import SimulatedProvider
from proxy.guard import Guard
from proxy.identify import Identifier
from proxy.observe import Observer
from proxy.summariser import Summariser
from tests.journeys.player import Player, playing
from tests.journeys.test_main_job import SMALL, Chat, long_text

SECRET = "the-prompt-itself"
WINDOW = 6000


def _fails(*_: object, **__: object) -> Any:
    raise LookupError(SECRET)


async def _failed(player: Player) -> dict[str, float]:
    """Steps that failed, by name."""
    async with player.http.get(f"{player.running.admin_url}/metrics") as answer:
        text = await answer.text()
    lines = [line for line in text.splitlines() if line.startswith("warmfold_steps_failed_total{")]
    counts = {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in lines}
    return {step: count for step, count in counts.items() if count}


@pytest.mark.parametrize(
    ("step", "broken"),
    [
        ("identify", lambda patch: patch.setattr(Identifier, "talk", _fails_later)),
        ("rewrite", lambda patch: patch.setattr(rewrite, "applicable", _fails)),
        ("guard", lambda patch: patch.setattr(Guard, "before", _fails_later)),
        ("beside", lambda patch: patch.setattr(Observer, "replied", _fails_later)),
        ("observe", lambda patch: patch.setattr(Observer, "_decided", _fails)),
    ],
)
async def test_a_step_that_fails_leaves_the_request_as_it_came(
    step: str,
    broken: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider, playing(tmp_path, provider, **SMALL) as player:
        broken(monkeypatch)
        body = json.dumps({"model": "demo-model", "messages": Chat(player).messages + _said(4)}).encode()
        got = await player.post(body)
        await player.settled()
        assert got.status == 200
        assert [call.raw for call in provider.turns] == [body]
        assert await _failed(player) == {step: 1}
        told = [one for one in caplog.records if one.levelno >= logging.ERROR]
        assert ["LookupError" in one.getMessage() for one in told] == [True]
        assert SECRET not in caplog.text


async def _fails_later(*_: object, **__: object) -> Any:
    raise LookupError(SECRET)


def _said(turns: int) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": long_text(at, 60)} for at in range(2 * turns + 1)]


async def test_a_compaction_that_fails_backs_off_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider, playing(tmp_path, provider, **SMALL) as player:
        monkeypatch.setattr(compactor, "compose", _fails)
        chat = Chat(player)
        turn = 0
        while not provider.compactions:
            turn += 1
            assert turn < 60
            await chat.say(long_text(turn, 150))
        for more in range(3):
            _, headers = await chat.say(f"and {more}?")
        assert len(provider.compactions) == 1
        journal = (await player.admin(f"/sessions/{headers['x-warmfold-session']}"))["journal"]
        assert [(line["outcome"], line["because"]) for line in journal] == [("failed", "internal")]
        assert await _failed(player) == {"compact": 1}
        assert SECRET not in caplog.text


async def test_in_front_of_a_request_that_would_not_fit_there_is_the_last_resort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider, playing(tmp_path, provider, **SMALL) as player:
        monkeypatch.setattr(Summariser, "summary", _fails_later)
        chat = Chat(player)
        chat.messages += _said(60)[:-1]
        _, headers = await chat.say("And now?")
        assert headers["x-warmfold-compaction"] == "inline"
        assert b"shortened mechanically" in provider.turns[-1].raw
        assert await _failed(player) == {"compact": 1}


async def test_a_recovery_that_fails_hands_the_providers_error_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        playing(tmp_path, provider, **{**SMALL, "compaction__max_context_tokens": 10 * WINDOW}) as player,
    ):
        monkeypatch.setattr(recovery, "_informed", _fails)
        got = await player.post({"model": "demo-model", "messages": _said(60)})
        assert got.status == 400
        assert got.json["error"]["code"] == "context_length_exceeded"
        assert len(provider.turns) == 1
        assert await _failed(player) == {"recover": 1}
