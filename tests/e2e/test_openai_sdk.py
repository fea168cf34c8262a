"""The official OpenAI client, unmodified but for its base_url."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from proxy.demo.calls import Call, Forced
from proxy.demo.provider import SimulatedProvider
from tests.journeys.player import Player, is_extension, playing

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]


@asynccontextmanager
async def sdk(player: Player, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=player.running.base_url, api_key="sk-sdk", **options) as client:
        yield client


async def test_a_long_tool_conversation_is_compacted_under_the_client(tmp_path: Path) -> None:
    async with (
        SimulatedProvider(window_tokens=5000) as provider,
        playing(tmp_path, provider, compaction__max_context_tokens=5000, compaction__when="after_turn") as player,
        sdk(player) as client,
    ):
        messages: list[ChatCompletionMessageParam] = [
            {"role": "system", "content": "You are a coding agent."},
            {"role": "user", "content": "Fix the parser. NOTE: TICKET = ABC-4711."},
        ]
        carried = 0
        for turn in range(20):
            call = {
                "id": f"call_{turn % 3}",
                "type": "function",
                "function": {"name": "look", "arguments": json.dumps({"path": f"src/{turn}.py"})},
            }
            provider.next_reply = {"role": "assistant", "content": None, "tool_calls": [call]}
            if turn % 2:
                raw = await client.chat.completions.with_raw_response.create(
                    model="demo-model", messages=messages, tools=TOOLS
                )
                message = raw.parse().choices[0].message
                carried += "x-warmfold-checkpoint" in raw.headers
                calls = [c.model_dump() for c in message.tool_calls or []]
            else:
                calls = await _streamed_calls(client, messages)
            assert [c["id"] for c in calls] == [call["id"]]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})  # type: ignore[typeddict-item,misc]
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": str(call["id"]),
                    "content": f"line {turn}: " + "def parse(text): return text.split() " * 30,
                }
            )
            await player.settled()
        assert carried >= 3
        assert len(provider.compactions) >= 2
        assert all(is_extension(c.raw, [t.raw for t in provider.turns]) for c in provider.compactions)
        messages.append({"role": "user", "content": "What is the value of TICKET?"})
        answer = await client.chat.completions.create(model="demo-model", messages=messages, tools=TOOLS)
        assert answer.choices[0].message.content == "TICKET = ABC-4711"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens < 5000


async def _streamed_calls(
    client: openai.AsyncOpenAI, messages: list[ChatCompletionMessageParam]
) -> list[dict[str, Any]]:
    """The tool calls of a streamed answer. The client did not ask for usage: it must never see a chunk without choices."""
    calls: dict[int, dict[str, Any]] = {}
    stream = await client.chat.completions.create(model="demo-model", messages=messages, tools=TOOLS, stream=True)
    async for chunk in stream:
        assert chunk.choices
        for part in chunk.choices[0].delta.tool_calls or []:
            call = calls.setdefault(
                part.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            )
            call["id"] += part.id or ""
            assert part.function is not None
            call["function"]["name"] += part.function.name or ""
            call["function"]["arguments"] += part.function.arguments or ""
    return [calls[i] for i in sorted(calls)]


@pytest.mark.parametrize(("asked", "chunks_without_choices"), [(None, 0), (False, 0), (True, 1)])
async def test_the_usage_chunk_reaches_only_a_client_that_asked_for_it(
    asked: bool | None, chunks_without_choices: int, tmp_path: Path
) -> None:
    async with (
        SimulatedProvider() as provider,
        playing(tmp_path, provider, upstream__stream_usage="always") as player,
        sdk(player) as client,
    ):
        options: Any = {} if asked is None else {"stream_options": {"include_usage": asked}}
        messages: Any = [
            {"role": "user", "content": "go on " * 900},
            {"role": "assistant", "content": "so"},
            {"role": "user", "content": "on"},
        ]
        stream = await client.chat.completions.create(model="demo-model", messages=messages, stream=True, **options)
        chunks = [chunk async for chunk in stream]
        assert sum(not chunk.choices for chunk in chunks) == chunks_without_choices
        assert provider.calls[-1].request is not None
        assert provider.calls[-1].request["stream_options"] == {"include_usage": True}
        await player.settled()
        session = (await player.admin("/sessions"))["sessions"][0]
        assert session["usage"]["prompt"] == provider.calls[-1].prompt_tokens


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, openai.BadRequestError),
        (401, openai.AuthenticationError),
        (404, openai.NotFoundError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
    ],
)
async def test_the_providers_errors_are_the_clients_errors(
    status: int, kind: type[openai.APIStatusError], tmp_path: Path
) -> None:
    body = b'{"error":{"message":"as the provider says","type":"some_type","param":null,"code":"some_code"}}'

    def refuse(call: Call) -> Forced:
        return Forced(status=status, body=body, headers={"Content-Type": "application/json", "x-request-id": "req-1"})

    async with (
        SimulatedProvider() as provider,
        playing(tmp_path, provider) as player,
        sdk(player, max_retries=0) as client,
    ):
        provider.on_call = refuse
        with pytest.raises(kind) as caught:
            await client.chat.completions.create(model="demo-model", messages=[{"role": "user", "content": "hi"}])
        assert caught.value.response.content == body
        assert caught.value.request_id == "req-1"
        assert len(provider.calls) == 1


async def test_other_endpoints_work_as_before(tmp_path: Path) -> None:
    async with (
        SimulatedProvider() as provider,
        playing(tmp_path, provider) as player,
        sdk(player, max_retries=0) as client,
    ):
        assert [model.id async for model in client.models.list()] == ["demo-model"]
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="demo-model", input="x")


async def test_no_upstream_is_said_in_the_clients_own_terms(tmp_path: Path) -> None:
    async with SimulatedProvider() as provider:
        gone = provider.base_url
    async with (
        SimulatedProvider() as provider,
        playing(tmp_path, provider, upstream__base_url=gone) as player,
        sdk(player, max_retries=0) as client,
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="demo-model", messages=[{"role": "user", "content": "hi"}])
        assert caught.value.status_code == 502
        assert "upstream.base_url" in str(caught.value)
