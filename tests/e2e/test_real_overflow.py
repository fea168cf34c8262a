"""A history that a real server's context does not hold, from a client that nobody warned: the server refuses it, and the client never learns of it.

llama.cpp's server with a 135M model; its window is asked for while the first request is on its way, so that one goes out as it came. Run with
`pytest -m real_model`.
"""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from benchmarks.conversation import Conversation
from benchmarks.llama_server import CONTEXT_TOKENS, MODEL, LlamaServer, missing
from proxy.server import start
from tests.journeys.player import Player, config

pytestmark = [pytest.mark.real_model, pytest.mark.skipif(bool(missing()), reason=missing())]

SMALL = {"trigger_ratio": 0.15, "hard_ratio": 0.2, "keep_recent_turns": 1, "keep_recent_tokens": 256}
"""What is sent again shall be a prompt that this model reads in seconds."""


async def test_an_overflow_is_recovered_and_the_window_known_afterwards(tmp_path: Path) -> None:
    flags = {f"compaction__{key}": value for key, value in SMALL.items()}
    with LlamaServer() as server:
        script = Conversation(1)
        messages = [script.system(), script.user()]
        while server.count({"messages": messages}) <= CONTEXT_TOKENS:
            messages += [script.reply(), script.user()]
        # The summary would take this model minutes: what is made without one after a second is as good for what is shown here.
        running = await start(config(tmp_path, f"{server.url}/v1", compaction__inline_timeout_s=1, **flags))
        try:
            async with aiohttp.ClientSession() as http:
                player = Player(running, None, http)  # type: ignore[arg-type]  # no provider of ours
                got = await player.post({"model": MODEL, "messages": messages, "max_tokens": 8})
                await player.settled()
                shown = await player.admin(f"/sessions/{got.headers['x-warmfold-session']}")
        finally:
            await running.stop()
    assert (got.status, got.headers["x-warmfold-compaction"]) == (200, "recovered")
    assert int(got.headers["x-warmfold-covered"]) > 0
    assert shown["window"] == CONTEXT_TOKENS
    assert 'warmfold_retries_total{cause="overflow"} 1.0' in running.metrics.render().decode()
    counted = got.json["usage"]
    assert 0 < counted["prompt_tokens"] < CONTEXT_TOKENS * SMALL["hard_ratio"] * 1.5
    assert shown["usage"]["prompt"] == counted["prompt_tokens"]
    assert shown["usage"]["cached"] == got.json["timings"]["cache_n"]
