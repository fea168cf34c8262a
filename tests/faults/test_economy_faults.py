"""Compactions that are asked for once too often, too early or in vain, and lines of the journal that name the wrong cause or none."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from proxy.demo.calls import Call, Forced
from proxy.demo.prefix_cache import Chain, PrefixCache
from proxy.demo.provider import SimulatedProvider, _scope
from proxy.demo.template import render
from proxy.demo.wire import UsageReport
from tests.journeys.player import elements, playing
from tests.journeys.talks import assistant, user
from tests.journeys.test_economics import CHEAP, DEAR, SOFT, WINDOW, Client, in_front_of, reasons

FRAME = b"<checkpoint_summary"


def failing(call: Call) -> Forced | None:
    """No summary is to be had."""
    return Forced(502, {}, b'{"error":{"message":"bad gateway"}}') if call.is_compaction else None


# When


@pytest.mark.parametrize("public", [False, True], ids=["near", "public"])
async def test_by_default_a_near_provider_is_asked_right_after_the_turn_and_a_public_one_beside_the_next(
    tmp_path: Path, public: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider:
        url = provider.base_url
        if public:
            # A name that no network needs to resolve: the HTTP proxy that the environment names leads to the provider.
            url = "http://provider.example/v1"
            monkeypatch.setenv("HTTP_PROXY", provider.base_url.removesuffix("/v1"))
            monkeypatch.delenv("http_proxy", raising=False)
            monkeypatch.delenv("no_proxy", raising=False)
            monkeypatch.delenv("NO_PROXY", raising=False)
        keys: dict[str, Any] = {"upstream__base_url": url, "compaction__max_context_tokens": WINDOW}
        async with playing(tmp_path, provider, **keys, compaction__trigger_ratio=SOFT) as player:
            client = Client(player)
            await client.until(WINDOW * SOFT)
            assert len(provider.compactions) == (0 if public else 1)
            shown = await player.admin(f"/sessions/{client.got[-1].headers['x-warmfold-session']}")
            assert bool(shown["pending"]) is public
            warm = provider.turns[-1].raw
            got = await client.say(40)
            assert got.headers["x-warmfold-compaction"] == ("pending" if public else "none")
            assert ("x-warmfold-checkpoint" in got.headers) is not public
            (call,) = provider.compactions
            before = elements(warm)
            assert elements(call.raw)[: len(before)] == before, "the previous warm request is what is replayed"
            assert "x-warmfold-checkpoint" in (await client.say(40)).headers


# Once


async def test_two_requests_at_once_that_a_compaction_waited_for_ask_once_where_it_fails(tmp_path: Path) -> None:
    """The second one knows the conversation as it was before the failure; the pause holds for it all the same."""
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        in_front_of(provider, tmp_path, when="next_turn") as player,
    ):
        client = Client(player)
        await client.until(WINDOW * SOFT)
        held, release = asyncio.Event(), asyncio.Event()

        async def hook(call: Call) -> Forced | None:
            if not call.is_compaction and not held.is_set():
                held.set()
                await release.wait()
            return failing(call)

        provider.on_call = hook
        body = {"model": "demo-model", "messages": [*client.messages, user("and now", 40)]}
        slow = asyncio.create_task(player.post(body))
        await held.wait()
        assert (await player.post(body)).status == 200
        await provider.until(lambda: any(call.is_compaction and call.finished for call in provider.calls))
        await _until_line(client)
        release.set()
        assert (await slow).status == 200
        await player.settled()
        assert len(provider.compactions) == 1
        assert [line["outcome"] for line in await client.journal()] == ["failed"]


async def _until_line(client: Client) -> None:
    async with asyncio.timeout(30):
        while not await client.journal():
            await asyncio.sleep(0.002)


# Refused rewrites


async def test_what_was_made_to_fit_and_is_refused_for_its_shape_leaves_the_client_the_providers_own_error(
    tmp_path: Path,
) -> None:
    """The refusal of a request that the client never made would tell it nothing; that its own was too long does."""
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        playing(tmp_path, provider, compaction__when="after_turn") as player,
    ):

        def refuse(call: Call) -> Forced | None:
            rewritten = not call.is_compaction and FRAME in call.raw
            return Forced(400, {}, b'{"error":{"message":"roles must alternate"}}') if rewritten else None

        provider.on_call = refuse
        client = Client(player)
        client.messages += [m for at in range(60) for m in (user(at, 120), assistant(at, 60))]
        got = await client.send(user("and now", 20))
        own = [call for call in provider.turns if FRAME not in call.raw]
        assert [call.status for call in own] == [400]
        assert got.status == 400
        assert "maximum context length" in got.json["error"]["message"]
        assert len(provider.turns) <= 4


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_however_many_causes_meet_a_request_makes_four_calls_at_most(tmp_path: Path, stream: bool) -> None:
    """Our question for usage, the rewriting and the length: each is put right once, and the client gets what the provider says in the end."""
    async with (
        SimulatedProvider(window_tokens=WINDOW, stream_options_accepted=False) as provider,
        playing(
            tmp_path,
            provider,
            compaction__when="after_turn",
            compaction__max_context_tokens=WINDOW,
            upstream__stream_usage="always",
        ) as player,
    ):

        def refuse(call: Call) -> Forced | None:
            rewritten = not call.is_compaction and FRAME in call.raw
            shape = Forced(400, {}, b'{"error":{"message":"roles must alternate"}}')
            return shape if rewritten and "stream_options" not in (call.request or {}) else None

        client = Client(player)
        client.messages += [m for at in range(60) for m in (user(at, 120), assistant(at, 60))]
        provider.on_call = refuse
        for turn in range(3):
            before = len(provider.turns)
            body = {"model": "demo-model", "messages": [*client.messages, user(("now", turn), 20)], "stream": stream}
            got = await player.post(body)
            await player.settled()
            assert len(provider.turns) - before <= 4
            assert got.status == 400
            assert "maximum context length" in got.json["error"]["message"]


# The journal's figures and reasons


async def test_a_worker_that_did_not_decide_knows_the_figures_as_well(tmp_path: Path) -> None:
    """With next_turn whoever carries the next request makes the compaction: after a restart, or another worker."""
    async with SimulatedProvider(window_tokens=WINDOW) as provider:
        async with in_front_of(provider, tmp_path, CHEAP, when="next_turn") as player:
            client = Client(player)
            await client.until(WINDOW * SOFT)
            assert not provider.compactions
        async with in_front_of(provider, tmp_path, CHEAP, when="next_turn") as player:
            client.player = player
            await client.say(40)
            assert len(provider.compactions) == 1
            (line,) = await client.journal()
        assert line["outcome"] == "committed"
        assert line["figures"]["payback_turns"] >= 0
        assert line["figures"]["cost_usd"] > 0


async def test_a_turn_of_another_model_says_nothing_of_a_models_cache(tmp_path: Path) -> None:
    """Each finds its own turns again, and nothing of the other's: no reason to take it for a provider without a cache."""
    async with (
        SimulatedProvider(window_tokens=WINDOW, models=("demo-model", "demo-two")) as provider,
        in_front_of(provider, tmp_path, DEAR) as player,
    ):
        client = Client(player)
        while not provider.turns or provider.turns[-1].prompt_tokens < WINDOW * (SOFT - 0.1):
            await client.say()
        client.messages.append(user("now the other one", 1200))
        provider.cache = PrefixCache(provider.settings.cache_blocks)  # its own cache, which is empty
        got = await player.post({"model": "demo-two", "messages": client.messages})
        client.got.append(got)
        await player.settled()
        assert provider.turns[-1].prompt_tokens > WINDOW * SOFT
        assert provider.turns[-1].cached == 0
        assert not provider.compactions
        assert reasons(await client.journal()) == [("skipped", "payback")]


async def test_a_client_that_uses_no_checkpoint_is_told_in_the_journal_that_compaction_rests(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider, in_front_of(provider, tmp_path) as player:
        client = Client(player)
        await client.until(WINDOW * SOFT)
        for turn in range(12):
            # The newest answer is told in other words each time the history is sent.
            client.messages = [
                {**m, "content": f"{turn} {m['content']}"} if m["role"] == "assistant" else m for m in client.messages
            ]
            await client.say(40)
        lines = await client.journal()
        assert ("skipped", "unapplied") in reasons(lines)
        assert reasons(lines).count(("skipped", "unapplied")) == 1


async def compacted_in_front(client: Client, members: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """A conversation below the soft watermark; its next request would not fit, and comes with other members. The journal's line of it."""
    player, provider = client.player, client.provider
    while not provider.turns or provider.turns[-1].prompt_tokens < WINDOW * (SOFT - 0.1):
        at = len(client.messages)
        client.messages.append(user(at, 250))
        client.got.append(await player.post({"model": "demo-model", "messages": client.messages, **members}))
        await player.settled()
        client.messages.append(assistant(at, 20))
    assert not provider.compactions
    client.messages.append(user("long", 3300))
    got = await player.post({"model": "demo-model", "messages": client.messages, **members, **changed})
    await player.settled()
    client.got.append(got)
    assert got.headers["x-warmfold-compaction"] == "inline", got.headers
    lines: list[dict[str, Any]] = await client.journal()
    return next(line for line in lines if line["strategy"] == "replay")


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": f"Calls {name}.", "parameters": {}}}


async def test_other_tools_in_front_of_a_long_request_are_named_as_what_cost_the_cache(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider, in_front_of(provider, tmp_path) as player:
        line = await compacted_in_front(Client(player), {"tools": [tool("look")]}, {"tools": [tool("find")]})
        assert line["miss"] == "tools_changed"
        assert line["new"] > line["expected_new"]


async def test_another_system_prompt_is_no_other_replica(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider, in_front_of(provider, tmp_path) as player:
        client = Client(player)
        while not provider.turns or provider.turns[-1].prompt_tokens < WINDOW * (SOFT - 0.1):
            await client.say()
        client.messages[0] = {"role": "system", "content": "It is five o'clock."}
        got = await client.send(user("long", 3300))
        assert got.headers["x-warmfold-compaction"] == "inline"
        line = next(line for line in await client.journal() if line["strategy"] == "replay")
        assert line["new"] > line["expected_new"]
        assert line["miss"] == "unknown"


async def test_a_parameter_that_had_to_go_is_named_where_the_provider_renders_it(tmp_path: Path) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    async with SimulatedProvider(window_tokens=WINDOW) as provider, in_front_of(provider, tmp_path) as player:

        def hook(call: Call) -> None:
            if call.is_compaction:  # a provider that renders the schema in front of all: without it nothing is found
                provider.cache = PrefixCache(provider.settings.cache_blocks)

        provider.on_call = hook
        client = Client(player)
        while not provider.compactions:
            at = len(client.messages)
            client.messages.append(user(at, 250))
            body = {"model": "demo-model", "messages": client.messages, "response_format": schema}
            client.got.append(await player.post(body))
            await player.settled()
            client.messages.append(assistant(at, 20))
        assert "response_format" not in json.loads(provider.compactions[0].raw)
        (line,) = await client.journal()
        assert (line["outcome"], line["miss"]) == ("committed", "parameter_dropped")


async def test_what_the_turn_wrote_and_the_call_did_not_find_yet_is_a_lag(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider, in_front_of(provider, tmp_path) as player:
        client = Client(player)
        earlier: list[Chain] = []

        def hook(call: Call) -> None:
            if call.is_compaction:  # what the last turn wrote can not be read yet
                cache = PrefixCache(provider.settings.cache_blocks)
                for chain in earlier[:-1]:
                    cache.store(chain)
                provider.cache = cache
            else:
                earlier.append(_chain(provider, call))

        provider.on_call = hook
        await client.until(WINDOW * SOFT)
        assert len(provider.compactions) == 1
        (line,) = await client.journal()
        assert 0 < line["cached"] < line["prompt"] - line["expected_new"]
        assert line["miss"] == "write_lag"


def _chain(provider: SimulatedProvider, call: Call) -> Chain:
    assert call.request is not None
    return Chain(_scope(call), render(call.request), provider.settings.block_tokens)


async def test_tokens_that_nobody_counted_are_unknown_and_not_zero(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider, in_front_of(provider, tmp_path) as player:
        provider.change(usage=UsageReport.NONE)
        client = Client(player)
        while not provider.compactions:
            await client.say()
        (line,) = await client.journal()
        assert line["outcome"] == "committed"
        assert [line[name] for name in ("prompt", "cached", "new", "completion")] == [None] * 4
        assert line["miss"] == ""
        assert line["expected_new"] > 0
