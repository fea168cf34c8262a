"""A stream is asked for its usage; where the provider does not take the question, the client never learns that there was one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.journeys.player import Answered, Player
from tests.journeys.test_overflow import TOO_LONG, Stub, history, in_front_of

RETRIES = 'warmfold_retries_total{cause="stream_options"}'
NAMED = {"loc": ["body", "stream_options"], "msg": "Extra inputs are not permitted", "type": "extra_forbidden"}

REFUSALS: dict[str, tuple[int, Any]] = {
    "mistral": (422, {"object": "error", "message": {"detail": [NAMED]}, "type": "invalid_request_error"}),
    "fastapi": (422, {"detail": [NAMED]}),
    "fireworks": (400, {"error": {"message": "Extra inputs are not permitted, field: 'stream_options'"}}),
    "azure": (400, {"error": {"message": "Unknown parameter: 'stream_options'.", "code": "unknown_parameter"}}),
    "a gateway that does not say why": (400, {"error": {"message": "Bad request"}}),
    "a gateway that chokes on it": (500, {"error": "unexpected keyword argument 'stream_options'"}),
    "another name": (501, "includeUsage is not implemented"),
}


def asks(body: dict[str, Any]) -> bool:
    return "stream_options" in body


def refused(status: int, said: Any) -> Callable[[], web.Response]:
    return lambda: (
        web.Response(status=status, text=said) if isinstance(said, str) else web.json_response(said, status=status)
    )


def retries(player: Player) -> float:
    lines = player.running.metrics.render().decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(RETRIES))


async def streamed(player: Player, turns: int, model: str = "some-model", **more: Any) -> Answered:
    got = await player.post({"model": model, "stream": True, "messages": history(turns), **more})
    await player.settled()
    return got


@pytest.mark.parametrize("how", REFUSALS)
async def test_a_refusal_is_noticed_and_remembered_for_the_model(tmp_path: Path, how: str) -> None:
    answer = refused(*REFUSALS[how])
    stub = Stub(lambda body: answer() if asks(body) else None)
    async with in_front_of(stub, tmp_path, upstream__stream_usage="always") as player:
        for turns in (3, 4, 5):
            got = await streamed(player, turns)
            assert got.status == 200
            assert b"Very well." in got.body
        assert [asks(body) for body in stub.turns] == [True, False, False, False]
        assert retries(player) == 1
        await streamed(player, 3, "another-model")
        assert [asks(body) for body in stub.turns[4:]] == [True, False], "what one model does not take another may"


NO_REFUSALS: dict[str, tuple[int, Any]] = {
    "rate limit": (429, {"error": {"message": "Too many requests. stream_options"}}),
    "no credit": (402, {"error": {"message": "stream_options"}}),
    "no right": (401, {"error": {"message": "stream_options"}}),
    "overloaded": (503, {"error": {"message": "stream_options"}}),
    "broken": (500, {"error": {"message": "Internal error"}}),
}


@pytest.mark.parametrize("how", NO_REFUSALS)
async def test_another_error_is_the_clients_and_costs_one_call(tmp_path: Path, how: str) -> None:
    status, said = NO_REFUSALS[how]
    answer = refused(status, said)
    stub = Stub(lambda _: answer())
    async with in_front_of(stub, tmp_path, upstream__stream_usage="always") as player:
        got = await streamed(player, 3)
        assert (got.status, got.json, len(stub.turns)) == (status, said, 1)


async def test_a_request_that_is_too_long_is_not_sent_again_for_its_question(tmp_path: Path) -> None:
    stub = Stub(lambda _: web.json_response(TOO_LONG, status=400))
    async with in_front_of(stub, tmp_path, upstream__stream_usage="always") as player:
        got = await streamed(player, 3, x="y")
        assert (got.status, got.json) == (400, TOO_LONG)
        assert retries(player) == 0
        assert all(asks(body) for body in stub.turns)


@pytest.mark.parametrize("status", [400, 422, 500])
async def test_a_request_that_deserves_its_refusal_teaches_nothing(tmp_path: Path, status: int) -> None:
    said = {"error": {"message": "temperature and stream_options: out of range"}}
    stub = Stub(lambda body: web.json_response(said, status=status) if body.get("temperature") == 9 else None)
    async with in_front_of(stub, tmp_path, upstream__stream_usage="always") as player:
        got = await streamed(player, 3, temperature=9)
        assert (got.status, got.json) == (status, said)
        await streamed(player, 3)
        assert [asks(body) for body in stub.turns] == [True, False, True]


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        pytest.param({"include_usage": True}, "always", id="the client asks itself"),
        pytest.param(None, "never", id="never"),
        pytest.param(None, "auto", id="a short conversation"),
    ],
)
async def test_what_the_client_sent_is_sent(tmp_path: Path, options: Any, setting: str) -> None:
    stub = Stub(lambda _: None)
    members = {"stream_options": options} if options else {}
    async with in_front_of(stub, tmp_path, upstream__stream_usage=setting) as player:
        await streamed(player, 3, **members)
        assert json.dumps(stub.turns) == json.dumps(
            [{"model": "some-model", "stream": True, "messages": history(3), **members}]
        )
