"""Upstreams are asked how long a model's context is: over real sockets, against answers as their servers give them.

Seen from outside: what the upstream was asked and by whom, and the window that the admin listener shows for the session.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.llama_server import CONTEXT_TOKENS, MODEL, LlamaServer, missing
from proxy.config import load
from proxy.core.model import Window
from proxy.demo.provider import SimulatedProvider
from proxy.discovery import MAX_BODY_BYTES, Discovery, Pace
from proxy.metrics import Metrics
from proxy.outbound import Inbound
from proxy.server import start
from proxy.tasks import Tasks
from proxy.upstream import Upstreams
from proxy.windows import Windows
from tests.journeys.player import Player, config, playing

KEY = "Bearer sk-of-the-client"
OPENAI = [{"id": "m", "object": "model", "created": 0, "owned_by": "somebody"}]
ASSUMED = (32_000, "assumed")

Route = Callable[[web.Request], Awaitable[web.StreamResponse]]


def says(value: object, *, status: int = 200, **headers: str) -> Route:
    """A route that always answers the same."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=status, headers={"Content-Type": "application/json", **headers})

    return answer


def models(*listed: Mapping[str, Any]) -> Route:
    return says({"object": "list", "data": list(listed)})


@dataclass
class Asked:
    """A request that is no chat completion."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Upstream:
    """An upstream that answers chat completions, and the routes it was given; it remembers what else it was asked."""

    routes: dict[str, Route]
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    chats: int = 0
    used: int = 2000
    may_chat: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def targets(self) -> list[str]:
        return [f"{one.method} {one.target}" for one in self.asked]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path == "/v1/chat/completions":
            self.chats += 1
            await self.may_chat.wait()
            told = {
                "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Ok."}}]
            }
            usage = {"prompt_tokens": self.used, "completion_tokens": 2, "total_tokens": self.used + 2}
            return web.json_response({"id": "c", "object": "chat.completion", "model": "m", **told, "usage": usage})
        self.asked.append(Asked(request.method, request.raw_path, request.headers.copy(), body))
        route = self.routes.get(request.path)
        return await route(request) if route is not None else web.Response(status=404)


@asynccontextmanager
async def serving(**routes: Route) -> AsyncIterator[Upstream]:
    """The upstream, with `_` for `/` in the names of its routes."""
    upstream = Upstream({f"/{path.replace('__', '/')}": route for path, route in routes.items()})
    upstream.may_chat.set()
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", upstream.answer)
    async with TestServer(app) as server:
        upstream.url = str(server.make_url("/v1"))
        yield upstream


@asynccontextmanager
async def proxied(tmp: Path, url: str, **flags: object) -> AsyncIterator[Player]:
    running = await start(config(tmp, url, **flags))
    try:
        async with aiohttp.ClientSession(auto_decompress=False) as http:
            yield Player(running, None, http, {"Authorization": KEY})  # type: ignore[arg-type]  # the provider is not asked
    finally:
        await running.stop()


def chat(model: str = "m", name: object = "a", turns: int = 1) -> dict[str, Any]:
    """A request that is worth looking up."""
    messages = [{"role": "user", "content": f"{name} {'word ' * 300}"}]
    for turn in range(turns):
        messages += [{"role": "assistant", "content": "Ok."}, {"role": "user", "content": f"{turn} {'more ' * 200}"}]
    return {"model": model, "messages": messages}


async def window(player: Player, request: Mapping[str, Any] | None = None, **headers: str) -> tuple[int, str]:
    """The window of a session, and where it is from, by the admin listener: of its second turn, since the first may be over before the answer."""
    for _ in range(2):
        got = await player.post(request or chat(), **headers)
        assert got.status == 200, got.body
        await player.settled()
    shown = await player.admin(f"/sessions/{got.headers['x-warmfold-session']}")
    return shown["window"], shown["window_origin"]


async def test_the_window_is_asked_once_with_the_clients_credential_and_shown(tmp_path: Path) -> None:
    async with (
        serving(v1__models=models({"id": "m", "max_model_len": 8192})) as upstream,
        proxied(tmp_path, upstream.url) as player,
    ):
        assert await window(player, openai_organization="org-1", x_stainless_retry_count="0") == (8192, "upstream")
        assert await window(player, chat(turns=2)) == (8192, "upstream")
        assert await window(player, chat(name="another"), authorization="Bearer sk-other") == (8192, "upstream")
        assert await window(player, chat(model="unlisted", name="third")) == ASSUMED
    assert upstream.targets == ["GET /v1/models"], "once, whoever asks and whatever for"
    (asked,) = upstream.asked
    assert asked.headers["Authorization"] == KEY
    assert asked.headers["openai-organization"] == "org-1"
    assert asked.headers["Accept-Encoding"] == "identity"
    assert asked.body == b""
    assert not {"Content-Length", "Content-Type", "x-stainless-retry-count"} & set(asked.headers)
    assert not [name for name in asked.headers if name.lower().startswith("x-warmfold")]


async def test_where_the_proxy_has_the_key_the_question_carries_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(v1__models=models({"id": "m", "max_model_len": 8192})) as upstream:
        flags = {
            "server.port": 0,
            "admin.port": 0,
            "upstream.base_url": upstream.url,
            "store.data_dir": str(tmp_path / "store"),
            "store.timeout_ms": 2000,
            "upstream.api_key_env": "THE_KEY",
        }
        running = await start(load(None, {"THE_KEY": "sk-of-the-operator"}, flags))
        try:
            async with aiohttp.ClientSession() as http:
                player = Player(running, None, http, {"Authorization": KEY})  # type: ignore[arg-type]
                assert await window(player) == (8192, "upstream")
        finally:
            await running.stop()
    assert [one.headers["Authorization"] for one in upstream.asked] == ["Bearer sk-of-the-operator"]


@pytest.mark.parametrize(
    ("flags", "headers"),
    [
        pytest.param({"compaction__max_context_tokens": 9000}, {}, id="configured"),
        pytest.param({"compaction__mode": "off"}, {}, id="off"),
        pytest.param({}, {"x_warmfold_mode": "off"}, id="off for this request"),
    ],
)
async def test_nobody_is_asked_where_it_cannot_matter(
    tmp_path: Path, flags: dict[str, object], headers: dict[str, str]
) -> None:
    async with (
        serving(v1__models=models({"id": "m", "max_model_len": 8192})) as upstream,
        proxied(tmp_path, upstream.url, **flags) as player,
    ):
        got = await player.post(chat(), **headers)
        await player.settled()
        assert got.status == 200
    assert (upstream.chats, upstream.asked) == (1, [])


async def test_a_window_of_the_configuration_is_not_overruled(tmp_path: Path) -> None:
    """One model is configured, so that the upstream is asked for the other's sake: and both are listed."""
    file = tmp_path / "c.toml"
    file.write_text('[[models]]\nmatch = "m"\nmax_context_tokens = 9000\n')
    async with serving(
        v1__models=models({"id": "m", "max_model_len": 8192}, {"id": "n", "max_model_len": 4096})
    ) as upstream:
        flags = {
            "server.port": 0,
            "admin.port": 0,
            "upstream.base_url": upstream.url,
            "store.data_dir": str(tmp_path / "store"),
        }
        running = await start(load(file, {}, {**flags, "store.timeout_ms": 2000}))
        try:
            async with aiohttp.ClientSession() as http:
                player = Player(running, None, http, {"Authorization": KEY})  # type: ignore[arg-type]
                assert await window(player, chat(model="n")) == (4096, "upstream")
                assert await window(player, chat(model="m", name="b")) == (9000, "config")
        finally:
            await running.stop()


async def test_no_request_waits_for_the_answer(tmp_path: Path) -> None:
    answering = asyncio.Event()

    async def late(_: web.Request) -> web.StreamResponse:
        await answering.wait()
        return web.json_response({"data": [{"id": "m", "max_model_len": 8192}]})

    async with serving(v1__models=late) as upstream, proxied(tmp_path, upstream.url) as player:
        for turns in (1, 2, 3):
            assert (await player.post(chat(turns=turns))).status == 200
        assert upstream.targets == ["GET /v1/models"]
        answering.set()
        assert await window(player, chat(turns=4)) == (8192, "upstream")


@pytest.mark.parametrize(
    "route",
    [
        pytest.param(says({"data": [{"id": "m", "max_model_len": 8192}]}, status=401), id="refused"),
        pytest.param(says(b"<html>", status=200), id="no JSON"),
        pytest.param(says({"data": [{"id": "m", "max_model_len": -1}]}), id="absurd"),
        pytest.param(says({}, status=307, Location="/elsewhere"), id="redirected"),
        pytest.param(models(*OPENAI), id="silent"),
    ],
)
async def test_an_upstream_that_does_not_say_it_leaves_it_assumed_and_is_left_in_peace(
    tmp_path: Path, route: Route, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(v1__models=route) as upstream, proxied(tmp_path, upstream.url) as player:
        for turns in (1, 2, 3):
            assert await window(player, chat(turns=turns)) == ASSUMED
    assert upstream.targets == ["GET /v1/models"]
    warned = [record.getMessage() for record in caplog.records if record.name == "warmfold.discovery"]
    assert len(warned) == 1
    assert "32000 tokens assumed upstream=default" in warned[0]
    assert KEY not in caplog.text


async def test_of_an_answer_without_end_no_more_is_read_than_a_listing_may_have(tmp_path: Path) -> None:
    sent = [0]

    async def endless(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        try:
            while True:
                await answer.write(b" " * 65_536)
                sent[0] += 65_536
        except ConnectionError:
            return answer

    async with serving(v1__models=endless) as upstream, proxied(tmp_path, upstream.url) as player:
        assert await window(player) == ASSUMED
        assert MAX_BODY_BYTES <= sent[0] < 4 * MAX_BODY_BYTES  # a socket holds some megabytes that nobody has read


async def test_an_upstream_that_hangs_up_on_the_question_still_answers_chats(tmp_path: Path) -> None:
    async def hang_up(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with serving(v1__models=hang_up) as upstream, proxied(tmp_path, upstream.url) as player:
        assert await window(player) == ASSUMED


async def test_the_turn_that_made_the_question_necessary_is_judged_by_the_answer(tmp_path: Path) -> None:
    """27,000 tokens are much of the 32,000 that are assumed until the upstream has spoken, and little of its 200,000."""
    async with (
        serving(v1__models=models({"id": "m", "context_length": 200_000})) as upstream,
        proxied(tmp_path, upstream.url, compaction__when="after_turn") as player,
    ):
        upstream.used = 27_000
        upstream.may_chat.clear()
        turn = asyncio.gather(player.post(chat()))
        async with asyncio.timeout(30):
            while not upstream.asked:
                await asyncio.sleep(0.002)
        await player.settled()  # while the turn is in flight nothing but the question keeps the proxy busy
        upstream.may_chat.set()
        (got,) = await turn
        await player.settled()
        shown = await player.admin(f"/sessions/{got.headers['x-warmfold-session']}")
        assert (shown["window"], shown["window_origin"]) == (200_000, "upstream")
        assert shown["journal"] == []
    assert upstream.chats == 1, "no compaction"


LLAMA = {"id": "local", "owned_by": "llamacpp"}
OLLAMA = {"id": "llama3.2:latest", "object": "model", "created": 0, "owned_by": "library"}
SHOWN = {"parameters": "num_ctx    4096", "model_info": {"llama.context_length": 131_072}}


@pytest.mark.parametrize(
    ("routes", "model", "shown", "targets"),
    [
        pytest.param(
            {
                "v1__models": models({**LLAMA, "meta": None}),
                "props": says({"default_generation_settings": {"n_ctx": 2048}}),
            },
            "gpt-4o",
            (2048, "upstream"),
            ["GET /v1/models", "GET /props"],
            id="llama.cpp, which takes any name",
        ),
        pytest.param(
            {
                "v1__models": models(LLAMA, {**LLAMA, "id": "other"}),
                "props": says({"default_generation_settings": {"n_ctx": 2048}}),
            },
            "local",
            ASSUMED,
            ["GET /v1/models"],
            id="llama.cpp with several models",
        ),
        pytest.param(
            {
                "v1__models": models(OLLAMA),
                "api__ps": says({"models": [{"name": "llama3.2:latest", "context_length": 16_384}]}),
            },
            "llama3.2",
            (16_384, "upstream"),
            ["GET /v1/models", "GET /api/ps"],
            id="Ollama, loaded",
        ),
        pytest.param(
            {"v1__models": models(OLLAMA), "api__ps": says({"models": []}), "api__show": says(SHOWN)},
            "llama3.2",
            (4096, "upstream"),
            ["GET /v1/models", "GET /api/ps", "POST /api/show"],
            id="Ollama, not loaded, set by the model file",
        ),
        pytest.param(
            {
                "v1__models": models(OLLAMA),
                "api__ps": says({"models": []}),
                "api__show": says({"model_info": {"llama.context_length": 131_072}}),
            },
            "llama3.2",
            ASSUMED,
            ["GET /v1/models", "GET /api/ps", "POST /api/show"],
            id="Ollama: what it was trained on is not what it gets",
        ),
        pytest.param(
            {
                "v1__models": models({"id": "m", "owned_by": "organization_owner"}),
                "api__v0__models": says(
                    {"data": [{"id": "m", "max_context_length": 131_072, "loaded_context_length": 4096}]}
                ),
            },
            "m",
            (4096, "upstream"),
            ["GET /v1/models", "GET /api/v0/models"],
            id="LM Studio",
        ),
        pytest.param(
            {
                "v1__models": models({"id": "koboldcpp/x", "owned_by": "koboldcpp"}),
                "api__extra__true_max_context_length": says({"value": 12_288}),
            },
            "anything",
            (12_288, "upstream"),
            ["GET /v1/models", "GET /api/extra/true_max_context_length"],
            id="KoboldCpp",
        ),
        pytest.param(
            {
                "v1__models": models({"id": "org/model", "object": "model", "created": 0, "owned_by": "org/model"}),
                "info": says({"model_id": "org/model", "max_input_tokens": 8191, "max_total_tokens": 8192}),
            },
            "tgi",
            (8192, "upstream"),
            ["GET /v1/models", "GET /info"],
            id="TGI, which takes any name",
        ),
    ],
)
async def test_a_servers_own_api_is_asked_where_the_list_looks_like_it(
    tmp_path: Path, routes: dict[str, Route], model: str, shown: tuple[int, str], targets: list[str]
) -> None:
    async with serving(**routes) as upstream, proxied(tmp_path, upstream.url) as player:
        assert await window(player, chat(model=model)) == shown
    assert upstream.targets == targets
    posted = [json.loads(one.body) for one in upstream.asked if one.method == "POST"]
    assert posted == [{"model": model}] * len(posted)
    assert {one.headers["Authorization"] for one in upstream.asked} == {KEY}


@dataclass
class Asking:
    """Discovery alone in front of an upstream: its pace can be set."""

    discovery: Discovery
    windows: Windows
    tasks: Tasks
    settings: Any

    async def ask(self, model: str = "m") -> Window:
        """The window once the question, if there was one, is answered."""
        inbound = Inbound("POST", "/v1/chat/completions?api-version=1", (("Authorization", KEY),))
        self.discovery.ask(inbound, self.settings.upstream, model, self.now(model))
        await self.tasks.drain(600)
        return self.now(model)

    def now(self, model: str) -> Window:
        return self.windows.of("default", model, self.settings.compaction, tenant="t")


@asynccontextmanager
async def asking(tmp: Path, url: str, pace: Pace) -> AsyncIterator[Asking]:
    settings = config(tmp, url)
    upstreams, windows, tasks = Upstreams(settings, Metrics()), Windows(), Tasks()
    try:
        yield Asking(Discovery(upstreams, windows, tasks, pace), windows, tasks, settings)
    finally:
        await upstreams.close()


ALWAYS = Pace(refresh_s=0.0, retry_s=0.0)
HOUR = 3600.0


async def test_a_later_answer_replaces_the_earlier_and_a_model_gone_from_it_keeps_its_window(tmp_path: Path) -> None:
    async with (
        serving(v1__models=models({"id": "m", "max_model_len": 8192}, {"id": "n", "max_model_len": 1000})) as upstream,
        asking(tmp_path, upstream.url, ALWAYS) as one,
    ):
        assert await one.ask() == Window(8192, "upstream")
        upstream.routes["/v1/models"] = models({"id": "m", "max_model_len": 4096})
        assert await one.ask() == Window(4096, "upstream")
        upstream.routes["/v1/models"] = says({"data": [{"id": "m", "max_model_len": 1}]}, status=500)
        assert await one.ask() == Window(4096, "upstream")
        assert one.now("n") == Window(1000, "upstream")
    assert upstream.targets == ["GET /v1/models?api-version=1"] * 3


async def test_a_failed_question_is_asked_again_sooner_than_an_answered_one(tmp_path: Path) -> None:
    async with (
        serving(v1__models=says({}, status=503)) as upstream,
        asking(tmp_path, upstream.url, Pace(refresh_s=HOUR, retry_s=0.0)) as one,
    ):
        await one.ask()
        upstream.routes["/v1/models"] = models(*OPENAI)
        assert (await one.ask()).origin == "assumed"
        upstream.routes["/v1/models"] = models({"id": "m", "max_model_len": 8192})
        assert (await one.ask()).origin == "assumed", "that was an answer: the next one is an hour away"
    assert len(upstream.asked) == 2


async def test_a_question_without_an_answer_ends(tmp_path: Path) -> None:
    async def never(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        return web.Response()

    async with (
        serving(v1__models=never) as upstream,
        asking(tmp_path, upstream.url, Pace(refresh_s=0.0, retry_s=0.0, timeout_s=0.05)) as one,
        asyncio.timeout(60),
    ):
        assert (await one.ask()).origin == "assumed"


async def test_that_nobody_says_it_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(v1__models=models(*OPENAI)) as upstream, asking(tmp_path, upstream.url, ALWAYS) as one:
        for _ in range(3):
            await one.ask()
    assert len(upstream.asked) == 3
    assert [record.levelname for record in caplog.records if record.name == "warmfold.discovery"] == ["WARNING"]


async def test_the_distance_between_questions_in_vain_grows(tmp_path: Path) -> None:
    """Nobody waits: with a first distance of nothing there is no second, with one of an hour nothing is asked at once."""
    async with (
        serving() as upstream,
        asking(tmp_path, upstream.url, Pace(refresh_s=2 * HOUR, retry_s=HOUR)) as one,
    ):
        await one.ask()
        await one.ask()
    assert len(upstream.asked) == 1


async def test_a_model_that_ollama_loads_later_is_asked_for_again_soon(tmp_path: Path) -> None:
    async with (
        serving(v1__models=models(OLLAMA, {**OLLAMA, "id": "b:1b"}), api__ps=says({"models": []})) as upstream,
        asking(tmp_path, upstream.url, Pace(refresh_s=HOUR, retry_s=0.0)) as one,
    ):
        assert (await one.ask("llama3.2")).origin == "assumed"
        upstream.routes["/api/ps"] = says({"models": [{"name": "llama3.2:latest", "context_length": 8192}]})
        assert await one.ask("llama3.2") == Window(8192, "upstream")
        upstream.asked.clear()
        await one.ask("llama3.2")
        assert upstream.asked == [], "known: refreshed after an hour"
        await one.ask("b:1b")
        assert upstream.targets == ["GET /v1/models?api-version=1", "GET /api/ps", "POST /api/show"]


async def test_one_question_at_a_time(tmp_path: Path) -> None:
    answering = asyncio.Event()

    async def late(_: web.Request) -> web.StreamResponse:
        await answering.wait()
        return web.json_response({"data": []})

    async with serving(v1__models=late) as upstream, asking(tmp_path, upstream.url, ALWAYS) as one:
        inbound = Inbound("POST", "/v1/chat/completions", ())
        for _ in range(3):
            one.discovery.ask(inbound, one.settings.upstream, "m", one.now("m"))
        assert len(one.tasks) == 1
        answering.set()
        await one.tasks.drain(30)
    assert len(upstream.asked) == 1


@pytest.mark.real_model
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("model", [MODEL, "gpt-4o"])
async def test_a_real_llama_cpp_server_tells_its_window(tmp_path: Path, model: str) -> None:
    """By its name, and by any other: the server answers to all."""
    with LlamaServer() as server:
        async with proxied(tmp_path, f"{server.url}/v1") as player:
            assert await window(player, {**chat(model), "max_tokens": 4}) == (CONTEXT_TOKENS, "upstream")


async def test_a_window_that_shrinks_or_grows_between_turns_disturbs_no_turn(tmp_path: Path) -> None:
    """The server behind the proxy is started anew with another length; so is the proxy, for the upstream is not asked again so soon."""
    history = chat(turns=40)["messages"]
    async with SimulatedProvider(window_tokens=64_000, window_listed=True) as provider:
        shown: list[tuple[int, str]] = []
        for tokens in (64_000, 6000, 64_000):
            provider.settings = replace(provider.settings, window_tokens=tokens)
            async with playing(tmp_path, provider) as player:
                await window(player, {"model": "demo-model", "messages": chat(name="small")["messages"]})
                history.append({"role": "user", "content": f"next {'step ' * 50}"})
                shown.append(await window(player, {"model": "demo-model", "messages": history}))
                history.append({"role": "assistant", "content": "Ok."})
    assert shown == [(64_000, "upstream"), (6000, "upstream"), (64_000, "upstream")]
    assert [call.status for call in provider.calls if call.request is not None and not call.is_compaction] == [200] * 12
    assert any(call.is_compaction for call in provider.calls)
