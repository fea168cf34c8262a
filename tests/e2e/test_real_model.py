"""The main promise against a real KV cache: a compaction by replay processes its instruction and little else.

llama.cpp's server with a 135M model, warmfold as a process of its own, real sockets. Token counts are exact and depend on no machine; times and the
model's words are not looked at. Run with `pytest -m real_model`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from benchmarks.llama_server import LlamaServer, missing
from benchmarks.local_model import COMPACTION, SIZES, Bench, Measured
from benchmarks.recorder import Recorder
from benchmarks.warmfold import Warmfold
from proxy.core.replay import OPENING

pytestmark = [pytest.mark.real_model, pytest.mark.skipif(bool(missing()), reason=missing())]


@pytest.fixture
async def measured() -> AsyncIterator[Measured]:
    with LlamaServer() as server:
        async with Recorder(server.url) as recorder, aiohttp.ClientSession() as session:
            with Warmfold(f"{recorder.url}/v1", COMPACTION) as proxy:
                yield await Bench(server, recorder, proxy, session).measure(1, SIZES[0])


async def test_a_replay_finds_the_conversation_in_the_cache_and_the_next_turn_carries_the_checkpoint(
    measured: Measured,
) -> None:
    turn, replay, later = measured.turn, measured.replay, measured.later

    # The same request, and one message of ours behind it (the answer before it, since it was plain text).
    assert replay.request["messages"][: len(turn["messages"])] == turn["messages"]
    assert replay.request["tools"] == turn["tools"]
    assert replay.request["messages"][-1]["role"] == "user"
    assert replay.request["messages"][-1]["content"].startswith(OPENING)

    # What the server's cache made of it.
    assert replay.cached + replay.new == replay.prompt
    assert replay.new <= measured.may_process
    assert replay.cached > 0.9 * replay.prompt
    assert measured.transcript.cached < 0.1 * measured.transcript.prompt

    # The journal says the same as the server.
    attempt = measured.attempt
    assert (attempt["trigger"], attempt["outcome"], attempt["strategy"]) == ("force", "committed", "replay")
    assert (attempt["prompt"], attempt["cached"], attempt["new"]) == (replay.prompt, replay.cached, replay.new)
    assert attempt["new"] <= attempt["expected_new"]

    # The next turn: preamble, checkpoint in front of the first visible user message, tail.
    assert measured.covered == attempt["to"] > 0
    sent, told = later.request["messages"], measured.following["messages"]
    visible = told[1 + measured.covered :]
    assert sent[0] == told[0]
    assert sent[1]["role"] == "user"
    assert replay.text.strip() in sent[1]["content"]
    assert sent[1]["content"].endswith(visible[0]["content"])
    assert sent[2:] == visible[1:]
    assert later.prompt < replay.prompt
