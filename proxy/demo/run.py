"""`warmfold demo`: one conversation, three ways to deal with a window that is too small for it, side by side."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import suppress

import aiohttp

from proxy import clock
from proxy.config import Config, ConfigError, load
from proxy.demo.answers import FactAnswerer
from proxy.demo.conversation import Conversation, demo_conversation
from proxy.demo.play import MODEL, Client, Score, Turn, play
from proxy.demo.provider import SimulatedProvider
from proxy.demo.screen import Screen
from proxy.demo.transcript_baseline import TranscriptBaseline
from proxy.listener import CannotListen
from proxy.server import Running, start

WINDOW_TOKENS = 12_000
_SOFT_SHARE = 0.75
_DECIDES_WITHIN_S = 0.5
_SETTLES_WITHIN_S = 5.0
_POLL_S = 0.005


def demo() -> int:
    """Exit status: 0 once the table is printed, 1 where the proxy could not start, 130 where the user broke it off."""
    screen = Screen(WINDOW_TOKENS)
    try:
        asyncio.run(_demo(screen))
    except KeyboardInterrupt:
        return 130
    except (CannotListen, ConfigError) as error:
        screen.failed(str(error))
        return 1
    return 0


async def _demo(screen: Screen) -> None:
    started = clock.monotonic()
    conversation = demo_conversation()
    screen.opening(len(conversation.steps))
    scores: list[Score] = []
    async with aiohttp.ClientSession() as http:
        screen.part("a", "straight to the provider, the whole history every time")
        scores.append(await _direct(conversation, http))
        screen.done(scores[-1])
        screen.part("b", "with a summariser that reads a transcript of the history")
        scores.append(await _transcript(conversation, http))
        screen.done(scores[-1])
        screen.part("c", "through warmfold, the client unchanged")
        scores.append(await _warmfold(conversation, http, screen))
        screen.done(scores[-1])
    screen.table(scores, clock.monotonic() - started)


def _provider() -> SimulatedProvider:
    return SimulatedProvider(window_tokens=WINDOW_TOKENS, max_output_tokens=4096, answerer=FactAnswerer())


async def _direct(conversation: Conversation, http: aiohttp.ClientSession) -> Score:
    async with _provider() as provider:
        return await play("direct", conversation, provider, Client(http, provider.base_url))


async def _transcript(conversation: Conversation, http: aiohttp.ClientSession) -> Score:
    async with _provider() as provider:
        client = Client(http, provider.base_url)
        baseline = TranscriptBaseline(client.say, MODEL, WINDOW_TOKENS)
        return await play("transcript summary", conversation, provider, client, shorten=baseline.shorten)


async def _warmfold(conversation: Conversation, http: aiohttp.ClientSession, screen: Screen) -> Score:
    with tempfile.TemporaryDirectory(prefix="warmfold-demo-") as data_dir:
        async with _provider() as provider:
            proxy = await start(_config(provider.base_url, data_dir))
            try:
                screen.columns()
                watch = _Watch(provider, proxy, screen)
                return await play("warmfold", conversation, provider, Client(http, proxy.base_url), on_turn=watch.turn)
            finally:
                await proxy.stop()


def _config(upstream: str, data_dir: str) -> Config:
    flags = {
        "server.port": 0,
        "admin.port": 0,
        "upstream.base_url": upstream,
        "store.url": "embedded:",
        "store.data_dir": data_dir,
        "store.timeout_ms": 2000,  # a laptop may be busy, and a turn without its store would look like a fault
        "compaction.when": "after_turn",
        "compaction.max_context_tokens": WINDOW_TOKENS,
    }
    return load(None, {}, flags)


class _Watch:
    """Prints each turn, and waits for the compaction that may follow it: the client of the demo never pauses to think."""

    def __init__(self, provider: SimulatedProvider, proxy: Running, screen: Screen) -> None:
        self._provider = provider
        self._proxy = proxy
        self._screen = screen
        self._printed = 0

    async def turn(self, turn: Turn) -> None:
        arrived = self._provider.turns[-1].arrived
        self._print(before=arrived)  # made inline, while the client waited for this turn
        self._screen.turn(turn)
        if turn.used_tokens >= WINDOW_TOKENS * _SOFT_SHARE:
            # Not in time: not wanted now, or a slow machine. The demo goes on, and prints it when it is there.
            with suppress(TimeoutError):
                await self._compaction(arrived)
        self._print()

    async def _compaction(self, after: int) -> None:
        async with asyncio.timeout(_DECIDES_WITHIN_S):
            # It may have arrived already: the proxy does not wait until the client has read its answer.
            await self._provider.until(lambda: any(call.arrived > after for call in self._provider.compactions))
        async with asyncio.timeout(_SETTLES_WITHIN_S):
            while self._proxy.busy:  # noqa: ASYNC110 - the proxy has no reason to tell anybody when it is idle
                await asyncio.sleep(_POLL_S)

    def _print(self, before: int | None = None) -> None:
        made = [call for call in self._provider.compactions if call.status == 200 and call.finished is not None]
        for number, call in enumerate(made[self._printed :], self._printed + 1):
            if before is None or call.arrived < before:
                self._screen.compaction(number, call)
                self._printed = number
