"""Asking for a summary: what goes along with the call, and when it is made a second time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from proxy.demo.provider import SimulatedProvider
from proxy.demo.summariser import CallsTool, Dead, Echo, Empty, IdealSummariser, Says, Summariser, Summary, Truncated
from proxy.demo.template import Request
from tests.journeys.player import playing
from tests.journeys.talks import prose
from tests.journeys.test_shapes import Client

WINDOW = 6000
SMALL: dict[str, Any] = {"compaction__max_context_tokens": WINDOW, "compaction__when": "after_turn"}


@dataclass
class First:
    """Does what `first` does when it is asked for the first time, and then what `then` does."""

    first: Summariser
    then: Summariser
    asked: int = 0

    def __call__(self, request: Request) -> Summary:
        self.asked += 1
        return (self.first if self.asked == 1 else self.then)(request)


async def _until_asked(client: Client, provider: SimulatedProvider) -> None:
    for turn in range(60):
        if provider.compactions:
            return
        await client.say(prose(("talk", turn), 150))
    raise AssertionError("never asked")


@pytest.mark.parametrize("strategy", ["replay", "transcript"])
async def test_headers_that_are_about_the_clients_own_request_do_not_go_along(tmp_path: Path, strategy: str) -> None:
    """A provider that takes an idempotency key for the same request sends back the turn's answer: no summary at all."""
    about_the_turn = {
        "Idempotency-Key": "turn-1",
        "If-None-Match": '"turn"',
        "Accept": "text/event-stream",
        "Accept-Encoding": "br, gzip",
    }
    route = {"OpenAI-Organization": "org", "X-Session-Affinity": "replica-7", "X-Api-Version": "3"}
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        playing(tmp_path, provider, **SMALL, compaction__strategy=strategy) as player,
    ):
        player.headers |= {**about_the_turn, **route}
        await _until_asked(Client(player), provider)
        turn, call = provider.turns[-1], provider.compactions[0]
        assert {name: turn.headers[name] for name in about_the_turn} == about_the_turn
        assert {name: call.headers[name] for name in route} == route
        assert call.headers["Authorization"] == player.headers["Authorization"]
        assert "Idempotency-Key" not in call.headers
        assert "If-None-Match" not in call.headers
        assert call.headers.getall("Accept") == ["application/json"]
        assert call.headers.getall("Accept-Encoding") == ["identity"]


INVALID: dict[str, Summariser] = {
    "empty": Empty(),
    "tool_call": CallsTool(),
    "echo": Echo(),
    "refusal": Says("I'm sorry, but I can't help with that."),
    "error_text": Says("Error: upstream timeout while generating"),
    "truncated": Truncated(),
}


@pytest.mark.parametrize("strategy", ["replay", "transcript"])
@pytest.mark.parametrize("because", INVALID)
async def test_an_answer_that_is_no_summary_is_asked_for_once_more(tmp_path: Path, because: str, strategy: str) -> None:
    """The second one counts, and a second call is the first one again, but for the room of an answer that was cut off."""
    async with (
        SimulatedProvider(window_tokens=WINDOW, summariser=First(INVALID[because], IdealSummariser())) as provider,
        playing(tmp_path, provider, **SMALL, compaction__strategy=strategy) as player,
    ):
        client = Client(player)
        client.members["max_tokens"] = 400
        await _until_asked(client, provider)
        first, second = (json.loads(call.raw) for call in provider.compactions)
        room, more = first.pop("max_tokens"), second.pop("max_tokens")
        answer = provider.compactions[0].answer
        assert answer is not None
        assert (room < more) if answer.finish_reason == "length" else (room == more)
        assert first == second
        (line,) = (await client.shown())["journal"]
        assert (line["outcome"], line["because"]) == ("committed", "")


@pytest.mark.parametrize("because", INVALID)
async def test_and_not_a_third_time(tmp_path: Path, because: str) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW, summariser=INVALID[because]) as provider,
        playing(tmp_path, provider, **SMALL) as player,
    ):
        client = Client(player)
        await _until_asked(client, provider)
        assert len(provider.compactions) == 2
        (line,) = (await client.shown())["journal"]
        assert (line["outcome"], line["because"]) == ("failed", because)


@pytest.mark.parametrize(("status", "because"), [(500, "status"), (429, "rate_limited"), (503, "rate_limited")])
async def test_a_provider_that_fails_is_not_asked_again_at_once(tmp_path: Path, status: int, because: str) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW, summariser=First(Dead(status), IdealSummariser())) as provider,
        playing(tmp_path, provider, **SMALL) as player,
    ):
        client = Client(player)
        await _until_asked(client, provider)
        assert [call.status for call in provider.compactions] == [status]
        (line,) = (await client.shown())["journal"]
        assert (line["outcome"], line["because"]) == ("failed", because)
