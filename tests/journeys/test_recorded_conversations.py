"""Recorded conversations of real clients, turn by turn through the proxy to a strict provider with a window far too small for them.

The window is a third of the conversation, but never less than 1.5 times what cannot be shrunk + 1024.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from proxy.core import region
from proxy.core.fingerprint import facts
from proxy.demo.provider import SimulatedProvider
from tests import recorded
from tests.journeys.player import Player, elements, is_extension, playing, sizes

# One of each kind: tool calls with reused ids, an agent on one user message, chat in English, Chinese, Japanese prose with tools,
# commands as user messages, thoughts, legacy functions, long single answers, parts and images.
SPREAD = (
    "tau-airline-33",
    "oh-ponylang-ponyc-4593",
    "aider-08-13_134245",
    "zh-dialogue-f16-c1",
    "swe-marsh-fc",
    "reason-tool-0",
    "webdancer-178",
    "pi-webui-long",
    "inspect-browser",
)

# Too short to be compacted with a turn to spare, but of a shape of their own: they must come through all the same.
SHORT = (
    "toolbench-g3-13",
    "cas-crewai-4cache-26",
    "cas-ruby-openrouter-reasoningdetails",
    "cas-pyd-parallel-missingcontent",
    "cas-ruby-audio",
)

if not recorded.names():
    pytest.skip(f"no recorded conversations in {recorded.FOLDER} (WARMFOLD_CONVERSATIONS)", allow_module_level=True)


def _window(recording: Mapping[str, Any], steps: list[recorded.Step]) -> int:
    measured = [sizes(step.request) for step in steps]
    return max(max(whole for whole, _ in measured) // 3, int(max(fixed for _, fixed in measured) * 1.5) + 1024)


async def _play(name: str, tmp_path: Path, *, stream: bool, when: str, scope: str = "warm") -> dict[str, int]:
    recording = recorded.load(name)
    steps = list(recorded.steps(recording, stream=stream))
    window = _window(recording, steps)
    async with SimulatedProvider(window_tokens=window) as small, SimulatedProvider(window_tokens=10**9) as unlimited:
        flags = {"compaction__max_context_tokens": window, "compaction__when": when, "compaction__replay_scope": scope}
        async with playing(tmp_path, small, **flags) as player:
            applied = 0
            failing_anyway = []
            for step in steps:
                small.next_reply = step.reply
                body = step.body()
                before = len(small.calls)
                got = await player.post(body)
                await player.settled()
                if got.status != 200:
                    direct = await _direct(player, unlimited, step, body)
                    assert got.status == direct, (
                        f"{name}: turn {len(step.request['messages'])} failed with us only: {got.body[:300]!r}"
                    )
                    failing_anyway.append(body)
                    continue
                sent = next(call for call in small.calls[before:] if not call.is_compaction and call.status == 200)
                if "x-warmfold-checkpoint" in got.headers:
                    applied += 1
                    _check_rewrite(body, sent.raw, int(got.headers["x-warmfold-covered"]))
                else:
                    assert _same_but_usage(sent.raw, body), "a request without a checkpoint goes out as it came"
            _check_compactions(small, [step.body() for step in steps])
            refused = [c.raw for c in small.turns if c.status != 200]
            assert all(raw in failing_anyway for raw in refused), "the strict provider refuses nothing that we made"
            return {"turns": len(steps), "applied": applied, "compactions": len(small.compactions), "window": window}


async def _direct(player: Player, unlimited: SimulatedProvider, step: recorded.Step, body: bytes) -> int:
    unlimited.next_reply = step.reply
    headers = {"Content-Type": "application/json", **player.headers}
    async with player.http.post(
        f"{unlimited.base_url}/chat/completions", data=io.BytesIO(body), headers=headers
    ) as reply:
        return reply.status


def _same_but_usage(sent: bytes, body: bytes) -> bool:
    return sent == body


def _check_rewrite(body: bytes, sent: bytes, covered: int) -> None:
    """Preamble verbatim, one checkpoint, the rest of the tail verbatim, and no call parted from its result."""
    client, provider = elements(body), elements(sent)
    roles = [json.loads(element)["role"] for element in client]
    preamble = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
    assert provider[:preamble] == client[:preamble]
    tail = client[preamble + covered :]
    rest = provider[preamble:]
    spliced = json.loads(tail[0])["role"] == "user"
    assert rest[1:] == (tail[1:] if spliced else tail)
    first = json.loads(rest[0])
    assert first["role"] == "user"
    text = first["content"] if isinstance(first["content"], str) else first["content"][0]["text"]
    assert text.startswith("<checkpoint_summary")
    assert sum(b"<checkpoint_summary" in element for element in rest) == 1
    if spliced:
        original = json.loads(tail[0])
        if isinstance(original["content"], str):
            assert first["content"].endswith(original["content"])
        else:
            assert first["content"][1:] == original["content"]
        assert {k: v for k, v in first.items() if k != "content"} == {
            k: v for k, v in original.items() if k != "content"
        }
    cuts = region.legal_cuts([facts(element) for element in client[preamble:]])
    assert covered in cuts


def _check_compactions(provider: SimulatedProvider, live: list[bytes]) -> None:
    turns = [call.raw for call in provider.turns]
    for call in provider.compactions:
        assert call.status == 200, "the provider takes every compaction request"
        assert is_extension(call.raw, turns, live), "every compaction request is a routed request and one more message"


@pytest.mark.parametrize("name", [name for name in SPREAD if name in recorded.names()])
async def test_a_recorded_conversation_outlives_its_window(name: str, tmp_path: Path) -> None:
    figures = await _play(name, tmp_path, stream=False, when="after_turn")
    assert figures["compactions"] > 0
    assert figures["applied"] > 0


@pytest.mark.parametrize("name", [name for name in SHORT if name in recorded.names()])
async def test_a_short_conversation_of_an_odd_shape_comes_through(name: str, tmp_path: Path) -> None:
    figures = await _play(name, tmp_path, stream=False, when="after_turn")
    assert figures["turns"] > 0


@pytest.mark.parametrize(
    ("name", "when", "scope"),
    [
        ("tau-airline-09", "next_turn", "warm"),
        ("swe-ctf-katy", "next_turn", "region"),
        ("zh-dialogue-f16-c2", "after_turn", "region"),
    ],
)
async def test_streaming_in_both_moments_and_scopes(name: str, when: str, scope: str, tmp_path: Path) -> None:
    figures = await _play(name, tmp_path, stream=True, when=when, scope=scope)
    assert figures["applied"] > 0


@pytest.mark.all_conversations
@pytest.mark.parametrize("when", ["after_turn", "next_turn"])
@pytest.mark.parametrize("name", recorded.names())
async def test_every_recorded_conversation(name: str, when: str, tmp_path: Path) -> None:
    figures = await _play(name, tmp_path, stream=when == "next_turn", when=when)
    print(f"{name} {when}: {figures}")  # noqa: T201  # the figures are what this command is run for
