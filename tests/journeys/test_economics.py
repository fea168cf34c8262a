"""A soft compaction is made where it pays, where quota is left, where the cache is warm and where its instruction breaks no prefix. Else it
waits, says why in the journal, and at the hard watermark waits no longer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.config import load
from proxy.demo.calls import Call, Forced
from proxy.demo.prefix_cache import PrefixCache
from proxy.demo.provider import SimulatedProvider
from proxy.demo.summariser import Says
from proxy.server import start
from tests.journeys.player import Answered, Player
from tests.journeys.talks import assistant, calling, prose, result, user

WINDOW = 8000
SOFT, HARD = 0.5, 0.8
MOST_TURNS = 60
MOMENTS = pytest.mark.parametrize("when", ["after_turn", "next_turn"])
DEAR = "input_usd_per_mtok = 10\ncached_usd_per_mtok = 0.1\noutput_usd_per_mtok = 40\n"
"""A cache so cheap that a compaction saves next to nothing."""

AT_ONCE = 1e-6
"""Seconds: a cache that has forgotten everything by the next request."""

ALWAYS_PRESSED: dict[str, Any] = {
    "max_context_tokens": 64_000,
    "trigger_ratio": 0.08,
    "keep_recent_tokens": 1000,
    "keep_recent_turns": 1,
}
"""Two messages of 4,000 words are above the soft watermark."""

CHEAP = "input_usd_per_mtok = 10\ncached_usd_per_mtok = 10\noutput_usd_per_mtok = 10\n"
"""No cache at all: each turn that is shorter saves much."""


@asynccontextmanager
async def in_front_of(
    provider: SimulatedProvider,
    tmp: Path,
    rule: str = "",
    *,
    when: str = "after_turn",
    others: str = "",
    environ: Mapping[str, str] | None = None,
    **keys: Any,
) -> AsyncIterator[Player]:
    """The proxy before a provider; `rule` is what [[models]] says of every model but for what `others` say, `keys` are those of [compaction]."""
    path = tmp / "c.toml"
    path.write_text(f'{others}[[models]]\nmatch = "*"\n{rule}')
    flags: dict[str, object] = {
        "server.port": 0,
        "admin.port": 0,
        "upstream.base_url": provider.base_url,
        "store.data_dir": str(tmp / "store"),
        "store.timeout_ms": 2000,
        "compaction.max_context_tokens": WINDOW,
        "compaction.trigger_ratio": SOFT,
        "compaction.hard_ratio": HARD,
        "compaction.when": when,
        **{f"compaction.{key}": value for key, value in keys.items()},
    }
    running = await start(load(path, environ or {}, flags))
    try:
        async with aiohttp.ClientSession(auto_decompress=False) as http:
            yield Player(running, provider, http)
    finally:
        await running.stop()


class Client:
    """Sends its whole history, a little more each time."""

    def __init__(self, player: Player, name: str = "one", *, stream: bool = False) -> None:
        self.player = player
        self.name = name
        self.stream = stream
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": "You are careful."}]
        self.got: list[Answered] = []

    async def send(self, *more: dict[str, Any], **headers: str) -> Answered:
        """One turn; the answer is not added. Returns when nothing runs behind it any longer."""
        assert len(self.got) < MOST_TURNS, "what the test waits for never came"
        self.messages += more
        body: dict[str, Any] = {"model": "demo-model", "messages": self.messages}
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        self.got.append(await self.player.post(body, **headers))
        await self.player.settled()
        return self.got[-1]

    async def say(self, words: int = 250, **headers: str) -> Answered:
        """One turn of a chat."""
        at = len(self.messages)
        got = await self.send(user((self.name, at), words), **headers)
        if got.status == 200:
            self.messages.append(assistant((self.name, at), 20))
        else:
            self.messages.pop()
        return got

    async def until(self, tokens: float, words: int = 250) -> None:
        """Turns until the provider has counted so many tokens in one."""
        while not self.provider.turns or self.provider.turns[-1].prompt_tokens < tokens:
            assert (await self.say(words)).status == 200

    @property
    def provider(self) -> SimulatedProvider:
        return self.player.provider

    async def journal(self) -> list[dict[str, Any]]:
        """Its lines, the oldest first."""
        shown = await self.player.admin(f"/sessions/{self.got[-1].headers['x-warmfold-session']}")
        return list(reversed(shown["journal"]))


def reasons(lines: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(line["outcome"], line["because"]) for line in lines]


def largest(provider: SimulatedProvider) -> int:
    return max(call.prompt_tokens for call in provider.turns)


# Does it pay


@MOMENTS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_what_does_not_pay_waits_for_the_hard_watermark(tmp_path: Path, when: str, stream: bool) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider:
        async with in_front_of(provider, tmp_path, DEAR, when=when) as player:
            client = Client(player, stream=stream)
            while not provider.compactions:
                assert (await client.say()).status == 200
            assert largest(provider) > WINDOW * (HARD - 0.1), "long above the soft watermark"
            assert provider.compactions[0].status == 200
            lines = await client.journal()
        assert reasons(lines[:1]) == [("skipped", "payback")], "one line, however many turns it waits"
        assert [line["because"] for line in lines].count("payback") == 1
        figures = lines[0]["figures"]
        assert figures["payback_turns"] > 8
        assert figures["cost_usd"] / figures["saving_usd"] == pytest.approx(figures["payback_turns"], rel=0.05)
        assert lines[0]["pressure"] >= SOFT


async def test_at_its_last_chance_it_is_made_beside_the_conversation_whatever_it_costs(tmp_path: Path) -> None:
    """A long answer has brought the next request to the hard watermark: there its client would wait."""
    async with SimulatedProvider(window_tokens=WINDOW) as provider, in_front_of(provider, tmp_path, DEAR) as player:
        client = Client(player)
        await client.until(WINDOW * (HARD - 0.12), 120)
        assert not provider.compactions
        provider.next_reply = assistant("at length", 1000)
        await client.say(40)
        assert len(provider.compactions) == 1
        got = await client.say(40)
        assert got.headers["x-warmfold-compaction"] == "none"
        assert "x-warmfold-checkpoint" in got.headers
        assert [line["trigger"] for line in await client.journal()] == ["soft", "soft"]


@MOMENTS
@pytest.mark.parametrize(
    ("rule", "keys", "known"),
    [
        pytest.param(CHEAP, {}, True, id="it pays"),
        pytest.param("", {}, False, id="prices are unknown"),
        pytest.param("output_usd_per_mtok = 10\n", {}, False, id="one price is unknown"),
        pytest.param(DEAR, {"max_payback_turns": 0}, True, id="nobody asks"),
        pytest.param(DEAR + "max_payback_turns = 100000\n", {}, True, id="there is time"),
    ],
)
async def test_what_pays_is_made_at_the_soft_watermark(
    tmp_path: Path, when: str, rule: str, keys: dict[str, Any], known: bool
) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider:
        async with in_front_of(provider, tmp_path, rule, when=when, **keys) as player:
            client = Client(player)
            await client.until(WINDOW * SOFT)
            if when == "next_turn":
                await client.say()
            assert len(provider.compactions) == 1
            (line,) = await client.journal()
        assert (line["outcome"], line["trigger"]) == ("committed", "soft")
        assert ("payback_turns" in line["figures"]) is known
        assert ("cost_usd" in line["figures"]) is known


async def test_a_provider_that_finds_nothing_again_is_reckoned_without_a_cache(tmp_path: Path) -> None:
    """By its price list a turn from the cache costs next to nothing; but this one never has anything in its cache."""
    async with (
        SimulatedProvider(window_tokens=WINDOW, cache_blocks=0) as provider,
        in_front_of(provider, tmp_path, DEAR) as player,
    ):
        client = Client(player)
        await client.until(WINDOW * SOFT)
        assert provider.turns[-1].cached == 0
        assert len(provider.compactions) == 1
        assert (await client.journal())[0]["figures"]["payback_turns"] < 8


async def test_nothing_found_where_the_cache_was_cold_says_nothing_of_the_provider(tmp_path: Path) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW, cache_blocks=0) as provider,
        in_front_of(provider, tmp_path, DEAR, cache_ttl_s=AT_ONCE) as player,
    ):
        client = Client(player)
        await client.until(WINDOW * SOFT)
        assert reasons(await client.journal()) == [("skipped", "payback")]


async def test_in_observe_mode_what_does_not_pay_is_noted_as_such_and_not_as_wanted(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider:
        async with in_front_of(provider, tmp_path, DEAR, mode="observe") as player:
            client = Client(player)
            await client.until(WINDOW * (SOFT + 0.1))
            assert reasons(await client.journal()) == [("skipped", "payback")]
        assert not provider.compactions


@pytest.mark.parametrize(
    ("own", "writers", "expected"),
    [
        pytest.param(CHEAP, "input_usd_per_mtok = 9000\noutput_usd_per_mtok = 9000\n", "payback", id="a dear one"),
        pytest.param(DEAR, "debounce_turns = 3\n", "", id="one whose price nobody knows"),
    ],
)
async def test_another_model_that_writes_the_summary_is_reckoned_with_its_own_price(
    tmp_path: Path, own: str, writers: str, expected: str
) -> None:
    others = f'[[models]]\nmatch = "writer"\n{writers}'
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        in_front_of(provider, tmp_path, own, others=others, summary_model="writer") as player,
    ):
        client = Client(player)
        while not client.got or client.got[-1].json["usage"]["prompt_tokens"] < WINDOW * SOFT:
            await client.say()
        (line,) = await client.journal()
        assert reasons([line]) == [("skipped" if expected else "committed", expected)]
        assert line["strategy"] == "transcript"


async def test_a_call_fits_the_window_of_the_model_that_writes(tmp_path: Path) -> None:
    others = '[[models]]\nmatch = "writer"\nmax_context_tokens = 2500\n'
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        in_front_of(provider, tmp_path, others=others, summary_model="writer") as player,
    ):
        client = Client(player)
        await _until_asked(client)
        assert [call.prompt_tokens < 2500 for call in provider.calls if b"<transcript" in call.raw] == [True]
        assert reasons(await client.journal()) == [("committed", "")]


async def _until_asked(client: Client) -> None:
    """Turns until a transcript of the conversation was sent."""
    while not any(b"<transcript" in call.raw for call in client.provider.calls):
        assert (await client.say()).status == 200


async def test_a_request_that_names_no_model_is_summarised_by_the_conversations(tmp_path: Path) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        in_front_of(provider, tmp_path, strategy="transcript", trigger_ratio=0.79) as player,
    ):
        client = Client(player)
        await client.until(WINDOW * 0.6)
        await player.post({"messages": [*client.messages, user("long", 3500)]})
        (call,) = (call for call in provider.calls if b"<transcript" in call.raw)
        assert json.loads(call.raw)["model"] == "demo-model"


async def test_force_asks_for_no_price(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider, in_front_of(provider, tmp_path, DEAR) as player:
        client = Client(player)
        for _ in range(5):
            await client.say()
        got = await client.say(x_warmfold_mode="force")
        (call,) = provider.compactions
        answer = {"role": "assistant", "content": got.json["choices"][0]["message"]["content"]}
        assert json.loads(call.raw)["messages"][-2] == answer, "far below the watermark it is read as well"


@pytest.mark.parametrize("key", ["", "sk-operators"], ids=["the client's key", "the operator's key"])
async def test_nobody_forces_a_summary_that_the_operator_pays_for(tmp_path: Path, key: str) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        SimulatedProvider(window_tokens=WINDOW, require_key=key) as elsewhere,
    ):
        others = (
            f'[[upstreams]]\nname = "elsewhere"\nmatch = "writer"\nbase_url = "{elsewhere.base_url}"\n'
            f'api_key_env = "{"THE_KEY" if key else ""}"\n'
        )
        environ = {"THE_KEY": key} if key else {}
        async with in_front_of(provider, tmp_path, others=others, environ=environ, summary_model="writer") as player:
            client = Client(player)
            for _ in range(6):
                await client.say()
            assert not elsewhere.calls
            got = await client.say(x_warmfold_mode="force")
            assert (got.status, len(elsewhere.calls)) == ((403, 0) if key else (200, 1))
            assert len(provider.turns) == (6 if key else 7)
            if key:  # what the operator has configured is made at its time, and paid for
                await client.until(WINDOW * SOFT)
                assert [call.status for call in elsewhere.calls] == [200]


# Quota

LITTLE = (("x-ratelimit-remaining-tokens", "5000"), ("x-ratelimit-remaining-requests", "900"))
MUCH = (("x-ratelimit-remaining-tokens", "500000"), ("x-ratelimit-remaining-requests", "900"))
FEW = (("x-ratelimit-remaining-tokens", "500000"), ("x-ratelimit-remaining-requests", "1"))
GROQ = (*LITTLE, ("x-groq-region", "fra"))
ANTHROPIC = (("anthropic-ratelimit-tokens-remaining", "5000"),)


@MOMENTS
@pytest.mark.parametrize("poor", [LITTLE, FEW], ids=["tokens", "requests"])
async def test_with_little_quota_left_it_waits_until_there_is_more(
    tmp_path: Path, when: str, poor: tuple[tuple[str, str], ...]
) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW, headers=poor) as provider,
        in_front_of(provider, tmp_path, when=when) as player,
    ):
        client = Client(player)
        await client.until(WINDOW * SOFT)
        for _ in range(3):
            await client.say(40)
        assert not provider.compactions
        lines = await client.journal()
        assert reasons(lines) == [("skipped", "quota")], "one line, however many turns it waits"
        figures = lines[0]["figures"]
        assert figures["remaining_tokens"] == int(poor[0][1])
        assert figures["remaining_requests"] == int(poor[1][1])
        assert figures["needed_tokens"] > WINDOW * SOFT
        provider.change(headers=MUCH)
        await client.say(40)
        assert len(provider.compactions) == 1, "with next_turn, beside the turn that says that there is more"
        assert reasons(await client.journal())[1:] == [("committed", "")]


@pytest.mark.parametrize("headers", [GROQ, ANTHROPIC], ids=["Groq", "Anthropic"])
async def test_where_cached_tokens_are_free_the_new_ones_count(
    tmp_path: Path, headers: tuple[tuple[str, str], ...]
) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW, headers=headers) as provider,
        in_front_of(provider, tmp_path) as player,
    ):
        await Client(player).until(WINDOW * SOFT)
        assert len(provider.compactions) == 1


async def test_of_a_transcript_all_tokens_are_new(tmp_path: Path) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW, headers=GROQ) as provider,
        in_front_of(provider, tmp_path, strategy="transcript") as player,
    ):
        client = Client(player)
        while not client.got or client.got[-1].json["usage"]["prompt_tokens"] < WINDOW * SOFT:
            await client.say()
        assert reasons(await client.journal()) == [("skipped", "quota")]


@pytest.mark.parametrize("says", ["little is left", "too much"])
async def test_what_the_conversations_provider_has_left_is_nothing_to_one_that_writes_summaries_elsewhere(
    tmp_path: Path, says: str
) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW, headers=LITTLE if says == "little is left" else ()) as provider,
        SimulatedProvider(window_tokens=WINDOW) as elsewhere,
    ):
        others = f'[[upstreams]]\nname = "elsewhere"\nmatch = "writer"\nbase_url = "{elsewhere.base_url}"\n'
        async with in_front_of(provider, tmp_path, others=others, summary_model="writer") as player:
            client = Client(player)
            await client.say()
            if says == "too much":
                provider.on_call = refusing_turns(429, {"Retry-After": "600"})
                assert (await client.say()).status == 429
            await client.until(WINDOW * SOFT)
            (call,) = elsewhere.calls
            assert json.loads(call.raw)["model"] == "writer"
            assert "sk-player" not in str(call.headers), "nor are the client's credentials any of its business"
            assert reasons(await client.journal()) == [("committed", "")]


async def test_with_little_quota_left_a_request_that_would_not_fit_is_compacted_all_the_same(tmp_path: Path) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW, headers=LITTLE) as provider,
        in_front_of(provider, tmp_path) as player,
    ):
        client = Client(player)
        while "x-warmfold-checkpoint" not in (got := await client.say()).headers:
            assert got.status == 200
        assert got.headers["x-warmfold-compaction"] == "inline"
        assert [call.status for call in provider.compactions] == [200]


# A provider that has had enough of the client's own requests


def refusing_turns(status: int, headers: dict[str, str], times: int = 1) -> Any:
    """So many of the client's requests are refused."""
    left = [Forced(status, headers, b'{"error":{"message":"Rate limit reached"}}')] * times

    def hook(call: Call) -> Forced | None:
        return left.pop() if left and not call.is_compaction else None

    return hook


@MOMENTS
@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("headers", [{"Retry-After": "60"}, {}], ids=["for a minute", "it does not say"])
async def test_a_refused_request_of_the_client_lets_all_of_the_tenants_compactions_rest(
    tmp_path: Path, when: str, status: int, headers: dict[str, str]
) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        in_front_of(provider, tmp_path, when=when) as player,
    ):
        first, second = Client(player, "first"), Client(player, "second")
        await first.say()
        for _ in range(6):
            await second.say()
        provider.on_call = refusing_turns(status, headers)
        assert (await first.say()).status == status
        while provider.turns[-1].prompt_tokens < WINDOW * SOFT:
            await second.say()
        for _ in range(5):
            await second.say(40)
        assert not provider.compactions
        assert reasons(await second.journal()) == [("skipped", "rate_limited")]

        player.headers = {"Authorization": "Bearer sk-another"}
        other = Client(player, "other")
        await other.say()
        await other.until(WINDOW * SOFT)
        if when == "next_turn":
            await other.say(40)
        assert len(provider.compactions) == 1, "another tenant has a quota of its own"


@pytest.mark.parametrize("value", ["0", "-1"])
async def test_a_time_that_is_over_at_once_lets_nothing_rest(tmp_path: Path, value: str) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider, in_front_of(provider, tmp_path) as player:
        client = Client(player)
        await client.say()
        provider.on_call = refusing_turns(429, {"Retry-After": value})
        assert (await client.say()).status == 429
        await client.until(WINDOW * SOFT)
        assert len(provider.compactions) == 1


async def test_a_shorter_pause_does_not_end_a_longer_one(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider, in_front_of(provider, tmp_path) as player:
        client = Client(player)
        await client.say()
        for value in ("600", "0"):
            provider.on_call = refusing_turns(429, {"Retry-After": value})
            assert (await client.say()).status == 429
        await client.until(WINDOW * SOFT)
        assert not provider.compactions
        assert reasons(await client.journal()) == [("skipped", "rate_limited")]


async def test_while_they_rest_a_request_that_would_not_fit_gets_a_checkpoint_that_no_model_wrote(
    tmp_path: Path,
) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider:
        async with in_front_of(provider, tmp_path) as player:
            client = Client(player)
            for _ in range(7):
                await client.say()
            provider.on_call = refusing_turns(429, {"Retry-After": "60"})
            assert (await client.say()).status == 429
            while "x-warmfold-checkpoint" not in (got := await client.say()).headers:
                assert got.status == 200
            assert got.headers["x-warmfold-compaction"] == "inline"
            assert not provider.compactions
            lines = await client.journal()
        made = next(line for line in lines if line["outcome"] == "committed")
        assert (made["strategy"], made["because"]) == ("mechanical", "rate_limited")


async def test_while_they_rest_an_operator_is_told_why_nothing_is_made(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider, in_front_of(provider, tmp_path) as player:
        client = Client(player)
        for _ in range(5):
            await client.say()
        provider.on_call = refusing_turns(429, {"Retry-After": "60"})
        await client.say()
        told = await player.admin(
            f"/sessions/{client.got[-2].headers['x-warmfold-session']}/compact",
            "POST",
            headers={"x-upstream-authorization": player.headers["Authorization"]},
        )
        assert (told["outcome"], told["because"]) == ("skipped", "rate_limited")
        assert not provider.compactions


# A cold cache


async def test_a_compaction_that_has_waited_until_the_cache_is_cold_waits_for_the_turn_that_warms_it(
    tmp_path: Path,
) -> None:
    """And is made right behind that one: in a conversation with such pauses the next turn would find the cache cold as well."""
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        in_front_of(provider, tmp_path, when="next_turn", cache_ttl_s=AT_ONCE) as player,
    ):
        client = Client(player)
        await client.until(WINDOW * SOFT)
        assert not provider.compactions
        got = await client.say(40)
        assert got.headers["x-warmfold-compaction"] == "pending"
        (call,) = provider.compactions
        turn = provider.turns[-1]
        assert turn.finished is not None
        assert call.arrived > turn.finished, "not beside the turn that found it cold"
        assert call.cached >= 0.9 * call.prompt_tokens
        waited, made = await client.journal()
        assert reasons([waited, made]) == [("skipped", "cold"), ("committed", "")]
        assert waited["figures"]["idle_s"] >= 0
        assert "x-warmfold-checkpoint" in (await client.say()).headers


async def test_right_after_a_turn_nothing_is_cold(tmp_path: Path) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        in_front_of(provider, tmp_path, cache_ttl_s=AT_ONCE) as player,
    ):
        await Client(player).until(WINDOW * SOFT)
        assert len(provider.compactions) == 1


@pytest.mark.parametrize(("ttl", "miss"), [(AT_ONCE, "cold"), (3600.0, "other_replica")])
async def test_what_an_operator_has_compacted_in_a_cache_that_is_gone_says_so(
    tmp_path: Path, ttl: float, miss: str
) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        in_front_of(provider, tmp_path, cache_ttl_s=ttl) as player,
    ):
        client = Client(player)
        for _ in range(8):
            await client.say()
        provider.cache = PrefixCache(provider.settings.cache_blocks)
        told = await player.admin(
            f"/sessions/{client.got[-1].headers['x-warmfold-session']}/compact",
            "POST",
            headers={"x-upstream-authorization": player.headers["Authorization"]},
        )
        assert told["outcome"] == "committed"
        assert (told["attempt"]["cached"], told["attempt"]["miss"]) == (0, miss)


async def test_right_after_the_first_turn_of_all_a_cache_that_is_gone_is_no_cold_one(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider, in_front_of(provider, tmp_path) as player:

        def hook(call: Call) -> None:
            if call.is_compaction:
                provider.cache = PrefixCache(provider.settings.cache_blocks)

        provider.on_call = hook
        client = Client(player)
        history = [message for at in range(20) for message in (user(at), assistant(at, 20))]
        await client.send(*history, user("and now", 20), x_warmfold_mode="force")
        (line,) = await client.journal()
        assert (line["outcome"], line["cached"], line["miss"]) == ("committed", 0, "unknown")


# Thoughts behind the last user message


async def work(client: Client, at: int) -> Answered:
    """One step of an agent that thinks before it calls a tool."""
    return await client.send(
        calling(f"call_{at}", reasoning_content=prose(("thought", client.name, at), 60)),
        result(f"call_{at}", (client.name, at), 120),
    )


@MOMENTS
async def test_in_the_middle_of_work_with_thoughts_it_waits_for_a_user_message(tmp_path: Path, when: str) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW, reasoning_stripped=True) as provider,
        in_front_of(provider, tmp_path, when=when) as player,
    ):
        client = Client(player)
        await client.send(user("task"))
        at = 0
        while provider.turns[-1].prompt_tokens < WINDOW * (SOFT + 0.1):
            assert (await work(client, at := at + 1)).status == 200
        assert not provider.compactions
        assert reasons(await client.journal()) == [("skipped", "reasoning")]
        await client.send(assistant("done", 20), user("and now", 20))
        # Without the thoughts, which the template drops, the prompt is below the watermark again.
        while not provider.compactions:
            await client.send(assistant(("done", len(client.messages)), 20), user(len(client.messages), 200))
        line = (await client.journal())[-1]
        assert (line["outcome"], line["miss"]) == ("committed", "")
        assert line["new"] < line["prompt"] / 10


@pytest.mark.parametrize("stripped", [True, False], ids=["dropped", "kept"])
async def test_work_that_never_ends_is_compacted_at_the_hard_watermark(tmp_path: Path, stripped: bool) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW, reasoning_stripped=stripped) as provider,
        in_front_of(provider, tmp_path) as player,
    ):
        client = Client(player)
        await client.send(user("task"))
        at = 0
        while not provider.compactions:
            assert (await work(client, at := at + 1)).status == 200
        assert largest(provider) > WINDOW * (HARD - 0.1)
        lines = await client.journal()
        assert reasons(lines) == [("skipped", "reasoning"), ("committed", "")]
        assert lines[-1]["miss"] == ("reasoning_stripped" if stripped else "")
        assert "x-warmfold-checkpoint" in (await work(client, at + 1)).headers


async def test_thoughts_of_earlier_turns_are_nothing_to_wait_for(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider, in_front_of(provider, tmp_path) as player:
        client = Client(player)
        while provider.turns == [] or provider.turns[-1].prompt_tokens < WINDOW * SOFT:
            at = len(client.messages)
            assert (await client.send(user(at, 200))).status == 200
            client.messages.append(assistant(at, 20, reasoning_content=prose(("thought", at), 60)))
        assert len(provider.compactions) == 1


@pytest.mark.parametrize(
    ("scope", "expected"), [("warm", ("skipped", "reasoning")), ("region", ("committed", ""))], ids=["warm", "region"]
)
async def test_thoughts_that_are_not_replayed_are_nothing_to_wait_for(
    tmp_path: Path, scope: str, expected: tuple[str, str]
) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        in_front_of(provider, tmp_path, replay_scope=scope, keep_recent_turns=1) as player,
    ):
        client = Client(player)
        await client.until(WINDOW * (SOFT - 0.06))
        await client.send(user("now work", 20))
        at = 0
        while provider.turns[-1].prompt_tokens < WINDOW * SOFT:
            assert not await client.journal()
            await work(client, at := at + 1)
        assert at > 0
        assert reasons(await client.journal()) == [expected]


async def test_a_transcript_breaks_no_prefix_and_waits_for_no_user_message(tmp_path: Path) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        in_front_of(provider, tmp_path, strategy="transcript") as player,
    ):
        client = Client(player)
        await client.send(user("task"))
        at = 0
        while provider.turns[-1].prompt_tokens < WINDOW * SOFT:
            await work(client, at := at + 1)
        asked = [call for call in provider.calls if b"<transcript" in call.raw]
        assert len(asked) == 1
        assert reasons(await client.journal()) == [("committed", "")]


# What other things ask for a pause


@pytest.mark.parametrize("debounce", [1, 3])
async def test_so_many_turns_lie_from_one_to_the_next(tmp_path: Path, debounce: int) -> None:
    """Though each turn is above the soft watermark, with enough in it to cover."""
    async with (
        SimulatedProvider(window_tokens=64_000) as provider,
        in_front_of(provider, tmp_path, debounce_turns=debounce, **ALWAYS_PRESSED) as player,
    ):
        client = Client(player)
        await client.until(5120, 4000)
        made = []
        for turn in range(2 * debounce + 2):
            before = len(provider.compactions)
            await client.say(4000)
            assert provider.turns[-1].prompt_tokens > 5120
            if len(provider.compactions) > before:
                made.append(turn)
        assert [later - earlier for earlier, later in pairwise(made)] == [debounce] * (len(made) - 1)
        assert len(made) >= 2


async def test_from_one_in_front_of_the_very_first_request_as_well(tmp_path: Path) -> None:
    keys = {"max_context_tokens": 16_000, "trigger_ratio": 0.25, "hard_ratio": 0.9}
    async with (
        SimulatedProvider(window_tokens=16_000) as provider,
        in_front_of(provider, tmp_path, keep_recent_tokens=1000, keep_recent_turns=1, **keys) as player,
    ):
        client = Client(player)
        history = [message for at in range(18) for message in (user(at, 800), assistant(at, 20))]
        got = await client.send(*history, user("and now", 20))
        assert got.headers["x-warmfold-compaction"] == "inline"
        client.messages.append(assistant("very well", 20))
        calls = len(provider.compactions)
        for later in (1, 2, 3):
            await client.say(3000)
            assert 4000 < provider.turns[-1].prompt_tokens < 14_000
            assert len(provider.compactions) == calls + (later == 3)


async def test_what_is_not_worth_it_is_said_once_in_so_many_turns(tmp_path: Path) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        in_front_of(provider, tmp_path, debounce_turns=3) as player,
    ):
        client = Client(player)
        client.messages[0]["content"] = prose("rules", 3900)
        for _ in range(9):
            await client.say(20)
            assert WINDOW * SOFT < provider.turns[-1].prompt_tokens < WINDOW * HARD
        assert not provider.compactions
        assert [outcome for outcome, _ in reasons(await client.journal())] == ["skipped"] * 3


async def test_beside_a_request_that_fails_nothing_is_made(tmp_path: Path) -> None:
    """Whether the conversation goes on is not known then."""
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        in_front_of(provider, tmp_path, when="next_turn") as player,
    ):
        client = Client(player)
        await client.until(WINDOW * SOFT)
        for status in (400, 500):
            provider.on_call = refusing_turns(status, {})
            assert (await client.say(40)).status == status
            assert not provider.compactions
        await client.say(40)
        assert len(provider.compactions) == 1


@pytest.mark.parametrize("goes_on", [True, False], ids=["it goes on from it", "the client reworded it"])
async def test_beside_the_next_request_the_answer_is_read_as_well(tmp_path: Path, goes_on: bool) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        in_front_of(provider, tmp_path, when="next_turn") as player,
    ):
        client = Client(player)
        await client.until(WINDOW * SOFT)
        answered = client.got[-1].json["choices"][0]["message"]["content"]
        if goes_on:
            client.messages[-1] = {"role": "assistant", "content": answered}
        await client.say(40)
        (call,) = provider.compactions
        *_, last, _ = json.loads(call.raw)["messages"]
        assert last == ({"role": "assistant", "content": answered} if goes_on else client.messages[-4])


async def test_the_reason_is_told_again_once_it_is_another_one(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider, in_front_of(provider, tmp_path, DEAR) as player:
        client = Client(player)
        await client.send(user("task"))
        at = 0
        while provider.turns[-1].prompt_tokens < WINDOW * (SOFT + 0.1):
            await work(client, at := at + 1)
        await client.send(assistant("done", 20), user("and now", 20))
        await client.send(assistant("done again", 20), user("and then", 20))
        assert reasons(await client.journal()) == [("skipped", "reasoning"), ("skipped", "payback")]
        await work(client, at + 1)
        assert reasons(await client.journal())[2:] == [("skipped", "reasoning")]
        assert not provider.compactions


async def test_so_it_is_once_the_pressure_was_gone(tmp_path: Path) -> None:
    async with (
        SimulatedProvider(window_tokens=WINDOW, headers=LITTLE) as provider,
        in_front_of(provider, tmp_path) as player,
    ):
        client = Client(player)
        while "x-warmfold-checkpoint" not in (await client.say()).headers:
            assert client.got[-1].status == 200
        assert provider.turns[-1].prompt_tokens < WINDOW * SOFT
        await client.until(WINDOW * SOFT)
        assert reasons(await client.journal()) == [("skipped", "quota"), ("committed", ""), ("skipped", "quota")]


async def test_and_once_one_was_made_though_the_pressure_stays(tmp_path: Path) -> None:
    async with (
        SimulatedProvider(window_tokens=64_000, headers=LITTLE) as provider,
        in_front_of(provider, tmp_path, debounce_turns=1, **ALWAYS_PRESSED) as player,
    ):
        client = Client(player)
        await client.until(5120, 4000)
        provider.change(headers=MUCH)
        await client.say(4000)
        provider.change(headers=LITTLE)
        await client.say(4000)
        assert reasons(await client.journal()) == [("skipped", "quota"), ("committed", ""), ("skipped", "quota")]


async def test_no_figure_says_what_was_said(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=WINDOW) as provider, in_front_of(provider, tmp_path, DEAR) as player:
        client = Client(player)
        await client.until(WINDOW * SOFT)
        for line in await client.journal():
            assert all(isinstance(value, (int, float)) for value in line["figures"].values())
            assert "user" not in json.dumps(line["figures"])


async def test_a_root_whose_checkpoints_nobody_uses_is_soon_left_alone(tmp_path: Path) -> None:
    """A client that keeps a to-do list in an early message, and writes it anew each turn."""
    async with SimulatedProvider(window_tokens=WINDOW) as provider, in_front_of(provider, tmp_path) as player:
        client = Client(player)
        client.messages += [message for at in range(30) for message in (user(at), assistant(at, 20))]
        for turn in range(12):
            client.messages[3] = user(("to do", turn), 20)
            await client.say(60)
            assert WINDOW * SOFT < provider.turns[-1].prompt_tokens < WINDOW * HARD
        assert len(provider.compactions) == 2


async def test_a_summary_that_shrinks_too_little_is_taken_where_somebody_asks_for_it(tmp_path: Path) -> None:
    text = f"Task and intent: {prose('all of it', 2000)}"
    async with (
        SimulatedProvider(window_tokens=WINDOW, summariser=Says(text)) as provider,
        in_front_of(provider, tmp_path, keep_recent_tokens=500, keep_recent_turns=1) as player,
    ):
        client = Client(player)
        await client.until(WINDOW * SOFT)
        assert reasons(await client.journal()) == [("failed", "inflated")]
        told = await player.admin(
            f"/sessions/{client.got[-1].headers['x-warmfold-session']}/compact",
            "POST",
            headers={"x-upstream-authorization": player.headers["Authorization"]},
        )
        assert told["outcome"] == "committed"
