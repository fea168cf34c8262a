"""The provider over real sockets: windows, caches, faults on demand, and the official SDK as its client."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI
from yarl import URL

from proxy.demo.answers import Answer, FactAnswerer, ScriptedAnswerer
from proxy.demo.calls import Call, Forced
from proxy.demo.provider import SimulatedProvider
from proxy.demo.template import GENERATION, message_tokens
from proxy.demo.wire import UsageReport

CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "src/ledger.py"}'}},
    {"id": "call_2", "type": "function", "function": {"name": "run_tests", "arguments": "{}"}},
]
TOOLS = [
    {"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in ("read_file", "run_tests")
]
REPLIES: dict[str, dict[str, Any]] = {
    "text": {"role": "assistant", "content": "It is done: 三个测试通过 🎉, and\nnothing else changed."},
    "one character": {"role": "assistant", "content": "k"},
    "nothing": {"role": "assistant", "content": ""},
    "calls": {"role": "assistant", "content": None, "tool_calls": CALLS},
    "text and calls": {"role": "assistant", "content": "Let me look.", "tool_calls": CALLS[:1]},
    "legacy call": {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
    "thoughts": {"role": "assistant", "content": "42", "reasoning_content": "Six times seven, I think."},
    "refusal": {"role": "assistant", "content": None, "refusal": "I can not help with that."},
    "lone surrogate": {"role": "assistant", "content": "half \ud83c of an emoji"},
}


def chat(*texts: str, **parameters: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"model": "demo-model", "messages": messages, **parameters}


@pytest.fixture
async def provider() -> AsyncIterator[SimulatedProvider]:
    async with SimulatedProvider(window_tokens=4000) as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def post(
    http: aiohttp.ClientSession, provider: SimulatedProvider, body: object, **headers: str
) -> tuple[int, Any]:
    async with http.post(f"{provider.base_url}/chat/completions", json=body, headers=headers) as reply:
        return reply.status, await reply.json()


def sdk(provider: SimulatedProvider, key: str = "any") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=provider.base_url, api_key=key, max_retries=0)


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the deltas of a stream add up to."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    calls: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        delta = dict(choice["delta"])
        for part in delta.pop("tool_calls", ()):
            call = calls.setdefault(part["index"], {"function": {}})
            call |= {key: part[key] for key in ("id", "type") if key in part}
            for key, piece in part["function"].items():
                call["function"][key] = call["function"].get(key, "") + piece
        for key, piece in delta.pop("function_call", {}).items():
            legacy = message.setdefault("function_call", {})
            legacy[key] = legacy.get(key, "") + piece
        for key, piece in delta.items():
            if key != "role" and piece is not None:
                message[key] = (message.get(key) or "") + piece
    return message | ({"tool_calls": [calls[i] for i in sorted(calls)]} if calls else {})


@pytest.mark.parametrize("name", REPLIES)
async def test_a_stream_says_what_the_whole_answer_says(
    provider: SimulatedProvider, http: aiohttp.ClientSession, name: str
) -> None:
    provider.next_reply = REPLIES[name]
    _, whole = await post(http, provider, chat("hello"))
    provider.next_reply = REPLIES[name]
    body = chat("hello", stream=True, stream_options={"include_usage": True})
    async with http.post(f"{provider.base_url}/chat/completions", json=body) as reply:
        assert reply.headers["Content-Type"].startswith("text/event-stream")
        frames = (await reply.read()).split(b"\n\n")
    assert frames[-2:] == [b"data: [DONE]", b""]
    events = [json.loads(frame.removeprefix(b"data: ")) for frame in frames[:-2]]

    assert joined(events) == whole["choices"][0]["message"]
    assert REPLIES[name].items() <= whole["choices"][0]["message"].items()
    finishes = [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert finishes == [whole["choices"][0]["finish_reason"]]
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]


async def test_the_sdk_reads_text_tools_and_usage(provider: SimulatedProvider) -> None:
    async with sdk(provider) as client:
        provider.next_reply = REPLIES["calls"]
        completion = await client.chat.completions.create(**chat("hello", tools=TOOLS))
        message = completion.choices[0].message
        assert [call.function.name for call in message.tool_calls or []] == ["read_file", "run_tests"]  # type: ignore[union-attr]
        assert completion.choices[0].finish_reason == "tool_calls"
        assert completion.usage is not None
        assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens

        text, usage = "", None
        options = {"include_usage": True}
        async for chunk in await client.chat.completions.create(**chat("hello", stream=True, stream_options=options)):
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            usage = chunk.usage or usage
        assert text == provider.calls[-1].answer.text  # type: ignore[union-attr]
        assert usage is not None
        assert usage.prompt_tokens == provider.calls[-1].prompt_tokens


@pytest.mark.parametrize(
    ("body", "error", "code"),
    [
        (chat("word " * 5000), openai.BadRequestError, "context_length_exceeded"),
        (chat("hello", max_tokens=3999), openai.BadRequestError, "context_length_exceeded"),
        ({"model": "m", "messages": []}, openai.BadRequestError, "empty_array"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_sdk_knows_its_errors(
    provider: SimulatedProvider, body: dict[str, Any], error: type[openai.APIStatusError], code: str, stream: bool
) -> None:
    async with sdk(provider) as client:
        with pytest.raises(error) as raised:
            await client.chat.completions.create(**body, stream=stream)
    assert raised.value.code == code


@pytest.mark.parametrize(("key", "code"), [("right", None), ("wrong", "invalid_api_key")])
async def test_a_key_may_be_required(key: str, code: str | None) -> None:
    async with SimulatedProvider(require_key="right") as provider, sdk(provider, key) as client:
        if code is None:
            await client.chat.completions.create(**chat("hello"))
        else:
            with pytest.raises(openai.AuthenticationError) as raised:
                await client.chat.completions.create(**chat("hello"))
            assert raised.value.code == code
            assert key not in str(raised.value.body)


async def test_models_and_unknown_paths(provider: SimulatedProvider) -> None:
    async with sdk(provider) as client:
        models = [model async for model in client.models.list()]
        assert [model.id for model in models] == ["demo-model"]
        assert "max_model_len" not in models[0].to_dict()
        provider.change(window_listed=True)
        assert (await client.models.retrieve("demo-model")).to_dict()["max_model_len"] == 4000
        with pytest.raises(openai.NotFoundError, match="Invalid URL"):
            await client.embeddings.create(model="m", input="x")
    assert provider.calls == []
    assert [call.target for call in provider.others] == ["/v1/models", "/v1/models/demo-model", "/v1/embeddings"]


async def test_the_window_ends_where_the_next_token_would_not_fit(
    provider: SimulatedProvider, http: aiohttp.ClientSession
) -> None:
    _, answer = await post(http, provider, chat("hello"))
    prompt = answer["usage"]["prompt_tokens"]

    provider.change(window_tokens=prompt)
    status, refused = await post(http, provider, chat("hello"))
    assert status == 400
    assert refused["error"] == {
        "message": f"This model's maximum context length is {prompt} tokens. However, your messages resulted in {prompt} tokens. "
        "Please reduce the length of the messages.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }

    provider.change(window_tokens=prompt + 5)
    status, cut = await post(http, provider, chat("hello"))
    assert (status, cut["choices"][0]["finish_reason"], cut["usage"]["completion_tokens"]) == (200, "length", 5)
    status, cut = await post(http, provider, chat("hello", max_completion_tokens=3))
    assert (status, cut["choices"][0]["finish_reason"], cut["usage"]["completion_tokens"]) == (200, "length", 3)
    status, _ = await post(http, provider, chat("hello", max_tokens=5))
    assert status == 200
    status, refused = await post(http, provider, chat("hello", max_tokens=6))
    assert status == 400
    assert (
        f"you requested {prompt + 6} tokens ({prompt} in the messages, 6 in the completion)"
        in refused["error"]["message"]
    )


async def test_tools_are_named_apart_in_an_overflow(provider: SimulatedProvider, http: aiohttp.ClientSession) -> None:
    _, refused = await post(http, provider, chat("word " * 5000, tools=TOOLS))
    assert "in the functions). Please reduce the length of the messages or functions." in refused["error"]["message"]


async def test_more_output_than_the_model_gives_is_no_overflow() -> None:
    async with SimulatedProvider(max_output_tokens=100) as provider, aiohttp.ClientSession() as http:
        status, refused = await post(http, provider, chat("hello", max_tokens=101))
    assert status == 400
    assert (refused["error"]["param"], refused["error"]["code"]) == ("max_tokens", "invalid_value")


async def test_a_conversation_that_grows_computes_only_what_is_new(
    provider: SimulatedProvider, http: aiohttp.ClientSession
) -> None:
    texts = ["We start here. " * 20]
    await post(http, provider, chat(*texts))
    for i in range(5):
        answer = provider.calls[-1].answer
        assert answer is not None
        texts += [answer.text or "", f"And then number {i}. " * (i + 1)]
        _, reply = await post(http, provider, chat(*texts))
        call = provider.calls[-1]
        # Less than a block is left over; the mark and the line break that end the answer were not computed with it.
        assert call.new <= len(message_tokens({"role": "user", "content": texts[-1]})) + 15 + 2 + len(GENERATION)
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == call.cached > 0


async def test_a_change_in_the_first_character_costs_everything(
    provider: SimulatedProvider, http: aiohttp.ClientSession
) -> None:
    text = "We start here. " * 50
    await post(http, provider, chat(text))
    await post(http, provider, chat("V" + text[1:]))
    await post(http, provider, chat(text[:-2] + "!"))
    assert [call.cached for call in provider.calls[:2]] == [0, 0]
    assert provider.calls[2].new <= 32


async def test_an_equal_request_is_cached_but_for_its_last_block(
    provider: SimulatedProvider, http: aiohttp.ClientSession
) -> None:
    for _ in range(2):
        await post(http, provider, chat("We start here. " * 50))
    again = provider.calls[1]
    assert again.cached % 16 == 0
    assert 1 <= again.new <= 16


async def test_credentials_and_salts_share_nothing(provider: SimulatedProvider, http: aiohttp.ClientSession) -> None:
    body = chat("We start here. " * 50)
    await post(http, provider, body, Authorization="Bearer one")
    await post(http, provider, body, Authorization="Bearer two")
    await post(http, provider, body | {"cache_salt": "s"}, Authorization="Bearer one")
    await post(http, provider, body | {"prompt_cache_key": "k"}, Authorization="Bearer one")
    assert [call.cached > 0 for call in provider.calls] == [False, False, False, True]


@pytest.mark.parametrize(
    ("report", "keys"),
    [
        (UsageReport.FULL, {"prompt_tokens_details", "completion_tokens_details"}),
        (UsageReport.COUNTS, set()),
        (UsageReport.NONE, None),
    ],
)
async def test_how_much_usage_is_told(http: aiohttp.ClientSession, report: UsageReport, keys: set[str] | None) -> None:
    counts = {"prompt_tokens", "completion_tokens", "total_tokens"}
    async with SimulatedProvider(usage=report) as provider:
        _, answer = await post(http, provider, chat("hello"))
    assert set(answer.get("usage", ())) == (set() if keys is None else counts | keys)


async def test_a_provider_may_not_know_stream_options(http: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(stream_options_accepted=False) as provider:
        status, refused = await post(http, provider, chat("hello", stream=True, stream_options={"include_usage": True}))
    assert (status, refused["error"]["param"]) == (400, "stream_options")


async def test_several_choices(provider: SimulatedProvider, http: aiohttp.ClientSession) -> None:
    _, one = await post(http, provider, chat("hello"))
    _, three = await post(http, provider, chat("hello", n=3))
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert three["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]


async def test_replies_by_script(http: aiohttp.ClientSession) -> None:
    script = ScriptedAnswerer([REPLIES["text"], REPLIES["calls"]])
    async with SimulatedProvider(answerer=script) as provider:
        said = [(await post(http, provider, chat(text, max_tokens=2)))[1]["choices"][0] for text in ("a", "b", "c")]
    assert said[0]["message"]["content"] == REPLIES["text"]["content"], "a recorded reply is never cut"
    assert said[1]["message"]["tool_calls"] == CALLS
    assert said[2]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("texts", "answer"),
    [
        (["BATCH = 40. Go.", "ok", "What is the value of BATCH?"], "BATCH = 40"),
        (["BATCH = 40", "ok", "Now `BATCH = 50`, please.", "ok", "What is the value of BATCH?"], "BATCH = 50"),
        (["BATCHES = 40", "ok", "What is the value of BATCH?"], "Nothing in this conversation states BATCH."),
        (["PATH_A = var/x.csv\nnext line", "ok", "What is the value of PATH_A?"], "PATH_A = var/x.csv"),
    ],
)
def test_facts_are_answered_from_the_prompt_alone(texts: list[str], answer: str) -> None:
    body = chat(*texts)
    prompt = tuple(token for message in body["messages"] for token in message_tokens(message))
    assert FactAnswerer()(body, prompt).text == answer


async def test_calls_are_recorded_as_they_came(provider: SimulatedProvider, http: aiohttp.ClientSession) -> None:
    raw = b'{ "model":"m",  "messages":[{"role":"user","content":"hi"}] }'
    headers = {"Content-Type": "application/json", "X-Trace": "t-1", "Content-Encoding": "gzip"}
    async with http.post(
        URL(f"{provider.base_url}/chat/completions?a=%41", encoded=True), data=gzip.compress(raw), headers=headers
    ) as reply:
        answer = await reply.json()
    call = provider.calls[0]
    assert gzip.decompress(call.raw) == raw
    assert call.headers["x-trace"] == "t-1"
    assert call.target == "/v1/chat/completions?a=%41"
    assert (call.status, call.prompt_tokens, call.is_compaction, call.streamed) == (200, len(call.tokens), False, False)
    assert call.answer == Answer(text=answer["choices"][0]["message"]["content"])


async def test_an_unreadable_body_is_refused_and_recorded(
    provider: SimulatedProvider, http: aiohttp.ClientSession
) -> None:
    for raw in (b"", b"{", b"[1]", b"NaN", b'{"model": NaN}'):
        async with http.post(f"{provider.base_url}/chat/completions", data=raw) as reply:
            assert reply.status == 400
    assert [call.request for call in provider.calls] == [None] * 5


async def test_a_hook_may_answer_instead(provider: SimulatedProvider, http: aiohttp.ClientSession) -> None:
    def limited(call: Call) -> Forced | None:
        return Forced(429, {"Retry-After": "7"}, b'{"error":{}}') if call.number == 2 else None

    provider.on_call = limited
    assert [(await post(http, provider, chat("hello")))[0] for _ in range(3)] == [200, 429, 200]
    assert [call.status for call in provider.calls] == [200, 429, 200]


async def test_a_hook_may_break_an_answer_off(provider: SimulatedProvider, http: aiohttp.ClientSession) -> None:
    provider.on_call = lambda call: Forced(200, {"Content-Type": "text/event-stream"}, b"data: {}\n\n", break_off=True)
    async with http.post(f"{provider.base_url}/chat/completions", json=chat("hello", stream=True)) as reply:
        assert await reply.content.readexactly(10) == b"data: {}\n\n"
        with pytest.raises(aiohttp.ClientPayloadError):
            await reply.read()
    assert provider.aborted == 0


async def test_a_hook_may_hold_a_call_and_the_gauge_shows_it(
    provider: SimulatedProvider, http: aiohttp.ClientSession
) -> None:
    go = asyncio.Event()

    async def hold(call: Call) -> None:
        await go.wait()

    provider.on_call = hold
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(post(http, provider, chat("hello")))
        await provider.until(lambda: provider.in_flight == 3)
        assert [call.finished for call in provider.calls] == [None] * 3
        go.set()
    await provider.until(lambda: provider.in_flight == 0)
    assert provider.most_in_flight == 3
    assert all(call.finished and call.finished > 3 for call in provider.calls)


async def raw_post(
    provider: SimulatedProvider, body: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request on a socket of its own, to be hung up on."""
    payload = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", int(provider.base_url.rpartition(":")[2].removesuffix("/v1"))
    )
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: demo\r\nContent-Length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_is_counted(provider: SimulatedProvider, stream: bool) -> None:
    async def wait_for_ever(call: Call) -> None:
        if not stream:
            await asyncio.Event().wait()

    provider.on_call = wait_for_ever
    provider.change(chunk_delay_s=0.01, chunk_tokens=1)
    provider.next_reply = {"role": "assistant", "content": "word " * 2000}
    reader, writer = await raw_post(provider, chat("hello", stream=stream))
    await provider.until(lambda: bool(provider.calls) and (not stream or provider.calls[0].status == 200))
    if stream:
        await reader.readuntil(b"\n\n")
    writer.close()
    await provider.until(lambda: provider.in_flight == 0)
    assert provider.aborted == 1
    assert provider.calls[0].aborted
    assert provider.calls[0].finished is not None


async def test_a_stopped_provider_blames_no_client() -> None:
    async with SimulatedProvider() as provider:
        provider.on_call = lambda call: asyncio.sleep(60)
        reader, writer = await raw_post(provider, chat("hello"))
        await provider.until(lambda: bool(provider.calls))
    assert await reader.read() == b""
    writer.close()
    assert provider.aborted == 0


async def test_a_benchmark_keeps_no_record(http: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(record=False) as provider:
        await post(http, provider, chat("hello"))
    assert provider.calls == []
