"""A request that the provider says is too long is compacted and sent again before the client has seen anything of that."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from proxy.core.replay import OPENING
from proxy.demo.provider import SimulatedProvider
from proxy.server import start
from tests.journeys.player import Answered, Player, config, playing
from tests.journeys.test_main_job import long_text, system

WINDOW = 6000
RULE = "Never touch prod.db, whatever happens."
GOOD = "## Task and intent\nGo on with the work.\n\n## State of the work\nHalf of it is done."


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def history(turns: int, words: int = 170) -> list[dict[str, Any]]:
    """So many finished user turns, and one question behind them."""
    messages = [system("You are careful."), user(f"{RULE} {long_text(0, words)}")]
    for number in range(1, turns):
        messages += [{"role": "assistant", "content": f"Part {number} is done."}, user(long_text(number, words))]
    return messages


def covered(got: Answered) -> int:
    return int(got.headers.get("x-warmfold-covered", 0))


def note(got: Answered) -> str:
    return str(got.headers.get("x-warmfold-compaction"))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_outgrows_a_window_that_nobody_told_us(tmp_path: Path, stream: bool) -> None:
    notes = []
    async with SimulatedProvider(window_tokens=WINDOW) as provider, playing(tmp_path, provider) as player:
        messages = history(1)
        for number in range(40):
            messages.append({"role": "assistant", "content": f"Part {number} is done."})
            messages.append(user(long_text(number + 100, 170)))
            got = await player.post({"model": "demo-model", "stream": stream, "messages": messages})
            await player.settled()
            assert got.status == 200
            notes.append(note(got))
            if covered(got):
                assert RULE.encode() in provider.turns[-1].raw
        assert notes.count("recovered") == 1, "the window was learned"
        assert notes.index("recovered") > 5
        shown = await player.admin(f"/sessions/{got.headers['x-warmfold-session']}")
        assert (shown["window"], shown["window_origin"]) == (WINDOW, "learned")
        refused = [call for call in provider.calls if call.status == 400]
        assert len(refused) == 1
        assert all(call.status == 200 for call in provider.compactions)


Says = Callable[[dict[str, Any]], web.StreamResponse | None]


@dataclass
class Stub:
    """A provider that refuses what `refuses` says. `turns` and `compactions` are the bodies that came."""

    refuses: Says
    summary: str = GOOD
    prompt_tokens: int = 100
    turns: list[dict[str, Any]] = field(default_factory=list)
    compactions: list[dict[str, Any]] = field(default_factory=list)
    everything: bool = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        compacts = str(body["messages"][-1]["content"]).startswith(OPENING)
        (self.compactions if compacts else self.turns).append(body)
        refusal = self.refuses(body) if self.everything or not compacts else None
        if refusal is not None:
            return refusal
        text = self.summary if compacts else "Very well."
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": 2, "total_tokens": self.prompt_tokens + 2}
        if not body.get("stream"):
            return web.json_response({"object": "chat.completion", "choices": [choice], "usage": usage})
        chunk = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}
        data = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        return web.Response(body=data.encode(), headers={"Content-Type": "text/event-stream"})


@asynccontextmanager
async def in_front_of(stub: Stub, tmp: Path, **flags: object) -> AsyncIterator[Player]:
    """The proxy before such a provider."""
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/chat/completions", stub.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        running = await start(config(tmp, url, **flags))
        try:
            async with aiohttp.ClientSession(auto_decompress=False) as http:
                yield Player(running, None, http)  # type: ignore[arg-type]
        finally:
            await running.stop()
    finally:
        await runner.cleanup()


def is_long(body: dict[str, Any], most: int = 30_000) -> bool:
    """Characters of all messages: this provider counts a token for four of them."""
    return sum(len(json.dumps(m["content"])) for m in body["messages"]) > most


TOO_LONG = {
    "error": {
        "message": "This model's maximum context length is 8192 tokens. However, your messages resulted in 11214 tokens.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
}


def refusing(respond: Callable[[], web.StreamResponse], most: int = 30_000) -> Says:
    return lambda body: respond() if is_long(body, most) else None


BODY = {"model": "some-model", "messages": history(45, 200)}


def overflow_answers() -> dict[str, Callable[[], web.StreamResponse]]:
    """Ways to say so that reach the client as a status, as text, compressed, or inside of a 200."""
    raw = json.dumps(TOO_LONG).encode()
    sse = {"Content-Type": "text/event-stream"}
    text = "prompt is too long: 11214 tokens > 8192 maximum"
    return {
        "json": lambda: web.json_response(TOO_LONG, status=400),
        "gzip": lambda: web.Response(
            status=400,
            body=gzip.compress(raw),
            headers={"Content-Encoding": "gzip", "Content-Type": "application/json"},
        ),
        "text": lambda: web.Response(status=400, text=text),
        "500": lambda: web.json_response({"error": {"message": text}}, status=500),
        "llama.cpp": lambda: web.json_response(
            {
                "error": {
                    "code": 400,
                    "type": "exceed_context_size_error",
                    "message": "the request exceeds the available context size, try increasing it",
                    "n_prompt_tokens": 11214,
                    "n_ctx": 8192,
                }
            },
            status=400,
        ),
        "without numbers": lambda: web.json_response(
            {
                "error": {
                    "message": "Your input exceeds the context window of this model.",
                    "code": "context_length_exceeded",
                }
            },
            status=400,
        ),
        "event": lambda: web.Response(body=b"data: " + raw + b"\n\n", headers=sse),
        "event behind comments": lambda: web.Response(
            body=b": PROCESSING\r\n\r\n: PROCESSING\r\n\r\ndata: " + raw + b"\r\n\r\ndata: [DONE]\r\n\r\n", headers=sse
        ),
    }


@pytest.mark.parametrize("how", overflow_answers())
async def test_an_overflow_said_in_any_way_is_recovered(tmp_path: Path, how: str) -> None:
    stub = Stub(refusing(overflow_answers()[how]))
    # Told nothing, the first event of a stream is looked at only where the prompt is near the watermark of what is assumed.
    flags = {"compaction__budget_tokens": 4000} if "event" in how else {}
    async with in_front_of(stub, tmp_path, **flags) as player:
        got = await player.post({**BODY, "stream": "event" in how})
        await player.settled()
    assert got.status == 200
    assert b"Very well." in got.body
    assert note(got) == "recovered"
    assert covered(got)
    assert len(stub.turns) == 2
    assert not is_long(stub.turns[1])
    assert RULE in json.dumps(stub.turns[1])
    assert stub.turns[1]["messages"][-1] == BODY["messages"][-1]


@pytest.mark.parametrize("compactions_too", [False, True])
@pytest.mark.parametrize("how", ["json", "gzip", "text", "event"])
async def test_where_it_stays_too_long_the_client_gets_the_first_error(
    tmp_path: Path, how: str, compactions_too: bool
) -> None:
    stub = Stub(lambda _: overflow_answers()[how](), everything=compactions_too)
    async with in_front_of(stub, tmp_path, compaction__budget_tokens=4000) as player:
        got = await player.post({**BODY, "stream": how == "event"})
        await player.settled()
        expected = overflow_answers()[how]()
    assert isinstance(expected, web.Response)
    assert (got.status, got.body) == (expected.status, expected.body)
    assert got.headers.get("Content-Encoding") == expected.headers.get("Content-Encoding")
    assert note(got) == "failed-overflow"
    assert len(stub.turns) == 2
    assert len(stub.compactions) <= (1 if compactions_too else 8)


async def test_a_rewritten_request_that_is_too_long_is_not_sent_as_it_came(tmp_path: Path) -> None:
    """The client's own is longer still: it could only be refused once more."""
    async with (
        SimulatedProvider(window_tokens=WINDOW) as provider,
        playing(tmp_path, provider, compaction__max_context_tokens=WINDOW, compaction__when="after_turn") as player,
    ):
        messages = history(1)
        got = await player.post({"model": "demo-model", "messages": messages})
        while not covered(got):
            messages += [{"role": "assistant", "content": "Done."}, user(long_text(len(messages), 170))]
            got = await player.post({"model": "demo-model", "messages": messages})
            await player.settled()
        provider.change(window_tokens=provider.turns[-1].prompt_tokens - 100)
        before = len(provider.calls)
        body = json.dumps({"model": "demo-model", "messages": messages}).encode()
        got = await player.post(body)
        await player.settled()
        calls = provider.calls[before:]
        assert (got.status, note(got)) == (200, "recovered")
        assert [call.status for call in calls if not call.is_compaction] == [400, 200]
        assert body not in [call.raw for call in calls]


async def test_an_estimate_that_is_far_too_low_is_put_right_by_the_error(tmp_path: Path) -> None:
    """What the provider counted says how much smaller the request has to be: one retry is enough."""

    def says(body: dict[str, Any]) -> web.StreamResponse | None:
        size = sum(len(m["content"].split()) for m in body["messages"]) * 3
        message = (
            f"This model's maximum context length is 8192 tokens. However, your messages resulted in {size} tokens."
        )
        return web.json_response({"error": {"message": message}}, status=400) if size > 8192 else None

    stub = Stub(says, everything=True)
    async with in_front_of(stub, tmp_path, compaction__max_context_tokens=8192) as player:
        got = await player.post({"model": "m", "messages": history(30, 100)})
        await player.settled()
    assert got.status == 200
    assert note(got) == "recovered"
    assert len(stub.turns) == 2


@pytest.mark.parametrize("body", [{}, {"max_tokens": 3000}, {"max_completion_tokens": 3000}])
async def test_a_prompt_that_leaves_no_room_for_the_answer_is_made_short_enough_for_it(
    tmp_path: Path, body: dict[str, Any]
) -> None:
    reserved = sum(body.values())

    def says(body: dict[str, Any]) -> web.StreamResponse | None:
        used = sum(len(json.dumps(m["content"])) for m in body["messages"]) // 4 + reserved
        message = f"This model's maximum context length is 8192 tokens. However, you requested {used} tokens."
        return web.json_response({"error": {"message": message}}, status=400) if used > 8192 else None

    stub = Stub(says)
    async with in_front_of(stub, tmp_path) as player:
        got = await player.post({**BODY, **body})
        await player.settled()
    assert (got.status, note(got)) == (200, "recovered")
    assert len(stub.turns) == 2


@pytest.mark.parametrize("summary", ["", "I'm sorry, I can't help with that."])
async def test_without_a_summary_it_is_recovered_mechanically(tmp_path: Path, summary: str) -> None:
    stub = Stub(refusing(lambda: web.json_response(TOO_LONG, status=400)), summary=summary)
    async with in_front_of(stub, tmp_path) as player:
        got = await player.post(BODY)
        await player.settled()
    assert (got.status, note(got)) == (200, "recovered")
    assert RULE in json.dumps(stub.turns[-1])
    assert len(stub.turns) == 2


async def test_a_dead_store_does_not_stand_in_the_way(tmp_path: Path) -> None:
    stub = Stub(refusing(lambda: web.json_response(TOO_LONG, status=400)))
    async with in_front_of(stub, tmp_path, store__url="redis://127.0.0.1:1", store__timeout_ms=20) as player:
        await player.post({"model": "m", "messages": history(3)})
        got = await player.post(BODY)
        again = await player.post(
            {**BODY, "messages": [*BODY["messages"], {"role": "assistant", "content": "Very well."}, user("And?")]}
        )
    assert (got.status, again.status) == (200, 200)
    assert len(stub.compactions) <= 2


NOT_TOO_LONG: dict[str, tuple[int, dict[str, Any]]] = {
    "rate limit": (
        429,
        {
            "error": {
                "message": "Limit 8192, Requested 11214 tokens per min. Too many tokens.",
                "code": "rate_limit_exceeded",
            }
        },
    ),
    "tokens per minute with 413": (
        413,
        {
            "error": {
                "message": "Request too large on tokens per minute (TPM): Limit 6000, Requested 14810",
                "code": "rate_limit_exceeded",
            }
        },
    ),
    "output limit": (
        400,
        {
            "error": {
                "message": "max_tokens is too large: 200000. This model supports at most 16384 completion tokens.",
                "code": "invalid_value",
            }
        },
    ),
    "a part that is too long": (
        400,
        {
            "error": {
                "message": "Invalid 'messages[191].content[1].text': string too long. Expected at most 10485760, but got 12000000.",
                "code": "string_above_max_length",
            }
        },
    ),
    "overloaded": (503, {"error": {"message": "The server is overloaded"}}),
}


@pytest.mark.parametrize("what", NOT_TOO_LONG)
async def test_what_is_no_overflow_reaches_the_client_as_it_came(tmp_path: Path, what: str) -> None:
    status, error = NOT_TOO_LONG[what]
    stub = Stub(lambda _: web.json_response(error, status=status))
    async with in_front_of(stub, tmp_path) as player:
        got = await player.post(BODY)
        await player.settled()
    assert (got.status, got.json) == (status, error)
    assert len(stub.turns) == 1
    assert not stub.compactions


async def test_an_answer_that_talks_of_context_lengths_is_an_answer(tmp_path: Path) -> None:
    text = "This model's maximum context length is 8192 tokens: context_length_exceeded."

    def says(body: dict[str, Any]) -> web.StreamResponse:
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        chunk = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}
        if body.get("stream"):
            data = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()
            return web.Response(body=data, headers={"Content-Type": "text/event-stream"})
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 2}})

    stub = Stub(says)
    async with in_front_of(stub, tmp_path, compaction__budget_tokens=4000, compaction__mode="on") as player:
        for stream in (False, True):
            got = await player.post({**BODY, "stream": stream, "n": 1 + stream})
            assert text in got.body.decode()
            assert note(got) != "recovered"


@pytest.mark.parametrize("mode", ["observe", "off"])
async def test_nothing_is_sent_twice_where_nothing_may_be_compacted(tmp_path: Path, mode: str) -> None:
    stub = Stub(refusing(lambda: web.json_response(TOO_LONG, status=400)))
    async with in_front_of(stub, tmp_path) as player:
        got = await player.post(BODY, x_warmfold_mode=mode)
        await player.settled()
    assert (got.status, got.json) == (400, TOO_LONG)
    assert (len(stub.turns), len(stub.compactions)) == (1, 0)


async def test_a_slow_first_event_is_let_go_of(tmp_path: Path) -> None:
    """The client gets the beginning of a slow stream while it is still going on."""
    go_on = asyncio.Event()

    async def slowly(request: web.Request) -> web.StreamResponse:
        await request.read()
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        await reply.write(b": thinking\n\n")
        await go_on.wait()
        await reply.write(
            b'data: {"choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
        )
        return reply

    stub = Stub(lambda _: None)
    stub.answer = slowly  # type: ignore[method-assign]
    async with in_front_of(stub, tmp_path, compaction__budget_tokens=4000) as player:
        data = json.dumps({**BODY, "stream": True}).encode()
        url = f"{player.running.base_url}/chat/completions"
        async with asyncio.timeout(30), player.http.post(url, data=data, headers=player.headers) as reply:
            assert await reply.content.readany() == b": thinking\n\n"
            go_on.set()
            assert (await reply.read()).endswith(b"[DONE]\n\n")
