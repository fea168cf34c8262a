"""Every summariser, asked by replay and by transcript."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from proxy.demo import summariser
from proxy.demo.provider import SimulatedProvider
from proxy.demo.summariser import HEADINGS, REPLAY_OPENING, TRANSCRIPT_OPENING, Summariser, facts, is_compaction

INSTRUCTION = {"role": "user", "content": f"{REPLAY_OPENING}. Never mention INSTRUCTION_KEY = secret."}
CALL = {"id": "c", "type": "function", "function": {"name": "edit_file", "arguments": '{"text": "RETRIES = 4"}'}}
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "You write code. SYSTEM_KEY = 1"},
    {"role": "user", "content": "Migrate the ledger. You must never touch prod.db. BATCH_SIZE = 250"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {
        "role": "tool",
        "tool_call_id": "c",
        "content": "# src/ledger/settings.py\nEPOCH = 2019-04-01\nValueError: bad row",
    },
    {"role": "assistant", "content": "Done."},
    {"role": "user", "content": "Thanks. BATCH_SIZE = 300 from now on."},
]
TOOLS = [{"type": "function", "function": {"name": "edit_file", "parameters": {"type": "object"}}}]
KNOWN = {"BATCH_SIZE": "300", "RETRIES": "4", "EPOCH": "2019-04-01"}


def replayed(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"model": "demo-model", "tools": TOOLS, "messages": [*(messages or HISTORY), INSTRUCTION]}


def transcribed() -> dict[str, Any]:
    text = "\n\n".join(
        [
            "System: You write code.",
            "User: Migrate the ledger. You must never touch prod.db. BATCH_SIZE = 250",
            "Assistant: [Tool: edit_file]",
            "Tool Result [c]: EPOCH = 2019-04-01",
        ]
    )
    return {
        "model": "demo-model",
        "messages": [{"role": "system", "content": f"{TRANSCRIPT_OPENING}."}, {"role": "user", "content": text}],
    }


async def outcome(summarise: Summariser, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with SimulatedProvider(summariser=summarise) as provider, aiohttp.ClientSession() as http:
        async with http.post(f"{provider.base_url}/chat/completions", json=request) as reply:
            answer = await reply.json()
        assert [call.is_compaction for call in provider.calls] == [True]
        assert provider.compactions == provider.calls
        return reply.status, answer


@pytest.mark.parametrize(
    ("request_", "asked"),
    [
        (replayed(), True),
        (transcribed(), True),
        ({"messages": [{"role": "user", "content": 'Data: <entry sequence="1">User: hi</entry>'}]}, True),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": f"{REPLAY_OPENING}. Go."}]}]}, True),
        ({"messages": HISTORY}, False),
        ({"messages": [*HISTORY, INSTRUCTION, {"role": "assistant", "content": "ok"}]}, False),
        ({"messages": [{"role": "user", "content": f"They said: {REPLAY_OPENING}"}]}, False),
        ({"messages": []}, False),
        ({"messages": ["x"]}, False),
        ({"messages": [{"role": "user", "content": 5}]}, False),
        ({}, False),
    ],
)
def test_a_compaction_is_recognised(request_: dict[str, Any], asked: bool) -> None:
    assert is_compaction(request_) is asked


def test_facts_are_those_of_the_conversation_and_the_later_one_counts() -> None:
    assert facts(replayed()) == KNOWN


async def test_ideal_keeps_everything_under_the_fixed_headings() -> None:
    status, answer = await outcome(summariser.IdealSummariser(), replayed())
    text = answer["choices"][0]["message"]["content"]
    assert status == 200
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == list(HEADINGS)
    for kept in (
        "never touch prod.db",
        "src/ledger/settings.py",
        "ValueError: bad row",
        *(f"{k} = {v}" for k, v in KNOWN.items()),
    ):
        assert kept in text
    for left_out in ("INSTRUCTION_KEY", "SYSTEM_KEY"):
        assert left_out not in text


async def test_ideal_carries_an_earlier_checkpoint_forward() -> None:
    _, first = await outcome(summariser.IdealSummariser(), replayed())
    checkpoint = {
        "role": "user",
        "content": "Background:\n" + first["choices"][0]["message"]["content"] + "\n\nEnd of background.",
    }
    later = {"role": "user", "content": "BATCH_SIZE = 900 now, and always use tabs."}
    _, second = await outcome(summariser.IdealSummariser(), replayed(checkpoint, later))
    text = second["choices"][0]["message"]["content"]
    assert text.startswith(f"## {HEADINGS[0]}\nMigrate the ledger.")
    for kept in ("never touch prod.db", "always use tabs", "BATCH_SIZE = 900", "RETRIES = 4", "EPOCH = 2019-04-01"):
        assert kept in text
    assert "BATCH_SIZE = 300" not in text


async def test_ideal_reads_a_transcript() -> None:
    _, answer = await outcome(summariser.IdealSummariser(), transcribed())
    text = answer["choices"][0]["message"]["content"]
    for kept in ("never touch prod.db", "BATCH_SIZE = 250", "EPOCH = 2019-04-01"):
        assert kept in text


async def test_a_random_third_is_the_same_third_each_time() -> None:
    texts = [
        (await outcome(summariser.RandomThird(seed), replayed()))[1]["choices"][0]["message"]["content"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1]
    assert all(sum(f"{key} = {value}" in text for key, value in KNOWN.items()) == 1 for text in texts)


@pytest.mark.parametrize(
    ("summarise", "finish", "says"),
    [
        (summariser.GenericProse(), "stop", "Good progress"),
        (summariser.Says("I am sorry, I can not do that."), "stop", "I am sorry"),
        (summariser.Echo(), "stop", REPLAY_OPENING),
        (summariser.Truncated(), "length", "## Task and intent"),
        (summariser.Empty(), "stop", ""),
    ],
)
async def test_poor_summaries(summarise: Summariser, finish: str, says: str) -> None:
    status, answer = await outcome(summarise, replayed())
    choice = answer["choices"][0]
    assert (status, choice["finish_reason"]) == (200, finish)
    assert says in choice["message"]["content"]
    assert "RETRIES = 4" not in choice["message"]["content"]
    if not says:
        assert choice["message"]["content"] == ""


async def test_a_tool_call_instead_of_a_summary() -> None:
    _, answer = await outcome(summariser.CallsTool(), replayed())
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "edit_file"


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_dead_summariser(status: int) -> None:
    found, answer = await outcome(summariser.Dead(status), replayed())
    assert found == status
    assert answer["error"]["type"] == "server_error"


async def test_a_slow_summariser_comes_in_the_end() -> None:
    assert summariser.Slow(30)(replayed()).delay_s == 30
    _, answer = await outcome(summariser.Slow(0.01), replayed())
    assert "RETRIES = 4" in answer["choices"][0]["message"]["content"]


async def test_a_summary_is_cut_at_the_limit_that_was_asked_for() -> None:
    _, answer = await outcome(summariser.IdealSummariser(), replayed() | {"max_tokens": 20})
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 20


async def test_a_summary_by_replay_is_computed_from_its_instruction_on() -> None:
    async with SimulatedProvider() as provider, aiohttp.ClientSession() as http:
        for body in ({"model": "demo-model", "tools": TOOLS, "messages": HISTORY}, replayed()):
            async with http.post(f"{provider.base_url}/chat/completions", json=body) as reply:
                assert reply.status == 200
    warm, compaction = provider.calls
    assert compaction.new <= compaction.prompt_tokens - warm.prompt_tokens + 16 + 3
