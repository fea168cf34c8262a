"""What other relays did to bytes on their way, and to those at both ends of it: the whole of warmfold between raw sockets, its store on."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import zstandard

from proxy.config import load
from proxy.server import Running, start
from tests.e2e.relay_wire import (
    Exchange,
    Message,
    RawUpstream,
    Script,
    ask,
    chunks,
    connected,
    fixed,
    plain,
    read_head,
    read_message,
    soon,
    upstream,
)
from tests.journeys.talks import prose

SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = {
    "prompt_tokens": 1234,
    "completion_tokens": 7,
    "total_tokens": 1241,
    "prompt_tokens_details": {"cached_tokens": 1000},
}
DONE = b"data: [DONE]\n\n"


@dataclass
class Whole:
    """A running warmfold and the upstream behind it."""

    running: Running
    up: RawUpstream

    @property
    def port(self) -> int:
        return int(self.running.base_url.rsplit(":", 1)[1].split("/")[0])

    def count(self, series: str) -> float:
        """The value of one series; 0 where there is none yet."""
        for line in self.running.metrics.render().decode().splitlines():
            if line.startswith(series + " "):
                return float(line.rpartition(" ")[2])
        return 0.0

    async def settled(self) -> None:
        """Until no request is served and nothing runs behind one."""
        async with asyncio.timeout(30):
            while self.count("warmfold_requests_in_flight") or self.running.busy:
                await asyncio.sleep(0.001)


@asynccontextmanager
async def whole(
    tmp: Path, script: Script, environ: Mapping[str, str] | None = None, *, heads_only: bool = False, **flags: object
) -> AsyncIterator[Whole]:
    async with upstream(script, heads_only=heads_only) as up:
        chosen: dict[str, object] = {
            "server.port": 0,
            "admin.port": 0,
            "upstream.base_url": up.base_url,
            "store.data_dir": str(tmp / "store"),
            "store.timeout_ms": 2000,
            "compaction.max_context_tokens": 100_000,  # else it would ask, and the upstream has no answer to that
            **{key.replace("__", "."): value for key, value in flags.items()},
        }
        running = await start(load(None, environ or {}, chosen))
        try:
            yield Whole(running, up)
        finally:
            await running.stop()


def conversation(number: int = 0, **members: Any) -> bytes:
    """A chat completion that is long enough to be looked up, and has a session of its own for each number."""
    said = [{"role": "user", "content": f"{number}. {prose(number, 3000)}"}]
    said += [{"role": "assistant", "content": "So."}, {"role": "user", "content": "And?"}]
    return json.dumps({"model": "m", "messages": said, **members}).encode()


def post(body: bytes, headers: bytes = b"") -> bytes:
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer k\r\n%sContent-Length: %d\r\n\r\n%s"
        % (
            headers,
            len(body),
            body,
        )
    )


def event(value: object) -> bytes:
    return b"data: %s\n\n" % json.dumps(value, ensure_ascii=False).encode()


def delta(finish: str | None = None, **said: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": said, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def usage_event() -> bytes:
    return event({**delta(), "choices": [], "usage": USAGE})


STREAM = event(delta(content="h中😀")) + event(delta("stop")) + usage_event() + DONE
WHOLE = {
    "id": "c",
    "object": "chat.completion",
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hé"}}],
    "usage": USAGE,
}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_clients_that_give_up_before_the_first_byte_leave_no_generation_behind(
    stream: bool, tmp_path: Path
) -> None:
    """Time and again, as a client with a short patience does: at most one request is ever alive at the provider."""
    alive = most = 0
    reached, closed = asyncio.Event(), asyncio.Event()

    async def script(exchange: Exchange) -> None:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        reached.set()
        await exchange.watch()
        alive -= 1
        closed.set()

    async with whole(tmp_path, script) as warmfold:
        for _ in range(5):
            reached.clear()
            closed.clear()
            async with connected(warmfold.port) as (_, writer):
                writer.write(post(conversation(stream=stream)))
                await soon(reached.wait())
            await soon(closed.wait())
        await warmfold.settled()
        assert (len(warmfold.up.requests), most) == (5, 1)
        assert warmfold.count('warmfold_turns_total{applied="no"}') == 0


async def test_a_client_that_leaves_in_the_middle_stops_the_stream_and_is_no_turn(tmp_path: Path) -> None:
    closed = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.send(SSE + chunk(event(delta(content="a"))))
        await exchange.watch()
        closed.set()

    async with whole(tmp_path, script) as warmfold:
        async with connected(warmfold.port) as (reader, writer):
            writer.write(post(conversation(stream=True)))
            await soon(read_head(reader))
            await soon(anext(chunks(reader)))
        await soon(closed.wait())
        await warmfold.settled()
        assert warmfold.count('warmfold_turns_total{applied="no"}') == 0
        assert warmfold.count('warmfold_relayed_answers_total{ended="client_gone"}') == 1
        assert warmfold.count('warmfold_upstream_errors_total{kind="broken"}') == 0


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
async def test_a_stream_in_any_line_ends_cut_at_every_byte_arrives_as_it_is_and_is_counted(
    end: bytes, tmp_path: Path
) -> None:
    body = STREAM.replace(b"\n", end)

    async def script(exchange: Exchange) -> None:
        await exchange.send(SSE)
        for byte in body:
            await exchange.send(chunk(bytes([byte])))
            await asyncio.sleep(0)
        await exchange.send(b"0\r\n\r\n")

    async with whole(tmp_path, script) as warmfold:
        got = await ask(warmfold.port, post(conversation(stream=True)))
        await warmfold.settled()
        assert (got.status, got.body, got.complete) == (200, body, True)
        counted = {
            kind: warmfold.count(f'warmfold_turn_tokens_total{{kind="{kind}"}}')
            for kind in ("prompt", "cached", "completion")
        }
        assert counted == {"prompt": 1234, "cached": 1000, "completion": 7}


async def test_comments_pings_and_fields_between_the_events_are_no_news_to_the_sdk(tmp_path: Path) -> None:
    body = (
        b": OPENROUTER PROCESSING\n\n: ping\n\nretry: 3000\n"
        + event(delta(content="a")).replace(b"data: ", b"data:")
        + b": keepalive\n\nid: 7\n"
        + event(delta(content="b"))
        + event(delta("stop"))
        + DONE
    )

    async def script(exchange: Exchange) -> None:
        await exchange.send(SSE + chunk(body) + b"0\r\n\r\n")

    async with whole(tmp_path, script, upstream__stream_usage="always") as warmfold:
        assert (await ask(warmfold.port, post(conversation(stream=True)))).body == body
        async with openai.AsyncOpenAI(base_url=warmfold.running.base_url, api_key="k", max_retries=0) as sdk:
            stream = await sdk.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            assert [part.choices[0].delta.content async for part in stream] == ["a", "b", None]


UNENDED = {
    "no finish, no [DONE]": event(delta(content="a")) + event(delta(content="b")),
    "no [DONE]": event(delta(content="a")) + event(delta("stop")),
    "in the middle of an event": event(delta(content="a")) + b'data: {"choi',
    "an error in an event": event(delta(content="a"))
    + event({"error": {"message": "maximum context length is 8192 tokens", "code": "context_length_exceeded"}}),
    "nothing": b"",
}


@pytest.mark.parametrize("body", UNENDED.values(), ids=UNENDED.keys())
@pytest.mark.parametrize("usage", ["never", "always"])
async def test_a_stream_that_ends_too_early_is_handed_on_as_it_ends_and_not_asked_for_again(
    body: bytes, usage: str, tmp_path: Path
) -> None:
    """Nothing is made up behind it, and an error in it starts no second call: bytes have been sent."""

    async def script(exchange: Exchange) -> None:
        await exchange.send(SSE + (chunk(body) if body else b"") + b"0\r\n\r\n")

    async with whole(tmp_path, script, upstream__stream_usage=usage) as warmfold:
        got = await ask(warmfold.port, post(conversation(stream=True)))
        await warmfold.settled()
        assert (got.status, got.body, got.complete) == (200, body, True)
        assert len(warmfold.up.requests) == 1
        if "error" in body.decode() or not body:
            assert warmfold.count('warmfold_turns_total{applied="no"}') == 0


async def test_each_piece_of_a_tool_call_leaves_before_the_next_one_comes(tmp_path: Path) -> None:
    """Also where a chunk is looked for that shall not pass: the next piece is sent once the client has the last one."""
    pieces = [event(delta(tool_calls=[{"index": 0, "function": {"arguments": f"{number} "}}])) for number in range(40)]
    seen = asyncio.Semaphore(0)

    async def script(exchange: Exchange) -> None:
        await exchange.send(SSE)
        for piece in pieces:
            await exchange.send(chunk(piece))
            await soon(seen.acquire())
        await exchange.send(chunk(event(delta("tool_calls")) + usage_event() + DONE) + b"0\r\n\r\n")

    async with (
        whole(tmp_path, script, upstream__stream_usage="always") as warmfold,
        connected(warmfold.port) as (reader, writer),
    ):
        writer.write(post(conversation(stream=True)))
        await soon(read_head(reader))
        got = []
        async for piece in chunks(reader):
            got.append(piece)
            seen.release()
        assert got[:40] == pieces
        assert b"".join(got[40:]) == event(delta("tool_calls")) + DONE


def _gzipped_twice() -> bytes:
    return gzip.compress(gzip.compress(json.dumps(WHOLE).encode()))


CODED = {
    "twice gzip": (b"gzip, gzip", _gzipped_twice()),
    "unknown": (b"x-foo", b"\x00\xff" * 100),
    "not what it says": (b"gzip", b"no gzip"),
    "a bomb": (b"gzip", gzip.compress(bytes(64 * 1024 * 1024))),
}


@pytest.mark.parametrize(("coding", "body"), CODED.values(), ids=CODED.keys())
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_an_answer_in_whatever_coding_arrives_as_it_is(
    coding: bytes, body: bytes, stream: bool, tmp_path: Path
) -> None:
    kind = b"text/event-stream" if stream else b"application/json"
    answer = plain(body, b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Encoding: %s" % (kind, coding))
    async with whole(tmp_path, fixed(answer)) as warmfold:
        for _ in range(2):
            got = await ask(warmfold.port, post(conversation(stream=stream)))
            assert (got.status, got.body, got.all(b"content-encoding")) == (200, body, [coding])
            assert got.all(b"content-length") == [b"%d" % len(body)]
        await warmfold.settled()
        assert len(warmfold.up.requests) == 2


@pytest.mark.parametrize("coding", ["gzip", "zstd", "x-foo"])
async def test_a_request_in_whatever_coding_arrives_as_it_is(coding: str, tmp_path: Path) -> None:
    body = conversation()
    packed = {"gzip": gzip.compress(body), "zstd": zstandard.compress(body), "x-foo": body[::-1]}[coding]
    async with whole(tmp_path, fixed(plain(json.dumps(WHOLE).encode()))) as warmfold:
        await ask(warmfold.port, post(packed, b"Content-Encoding: %s\r\n" % coding.encode()))
        assert warmfold.count('warmfold_unread_requests_total{because="coded"}') == 1
    (request,) = warmfold.up.requests
    assert (request.body, request.all(b"content-encoding")) == (packed, [coding.encode()])
    assert request.all(b"content-length") == [b"%d" % len(packed)]


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_failure_that_the_provider_answers_is_the_clients_to_try_again(
    status: int, stream: bool, tmp_path: Path
) -> None:
    """A generation may have been paid for."""
    body = b'{"error":{"message":"busy","type":"server_error"}}'
    answer = plain(body, b"HTTP/1.1 %d Odd\r\nRetry-After: 1\r\nx-should-retry: true" % status)
    async with whole(tmp_path, fixed(answer), upstream__stream_usage="never") as warmfold:
        got = await ask(warmfold.port, post(conversation(stream=stream)))
        await warmfold.settled()
        assert (got.status, got.body, got.all(b"retry-after")) == (status, body, [b"1"])
        assert got.all(b"x-warmfold-error") == []
        assert len(warmfold.up.requests) == 1


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("then", [b"", b"H"], ids=["silence", "a byte"])
async def test_a_provider_that_takes_a_request_and_hangs_up_is_not_asked_again(
    stream: bool, then: bytes, tmp_path: Path
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(then)
        exchange.writer.close()

    async with whole(tmp_path, script) as warmfold:
        got = await ask(warmfold.port, post(conversation(stream=stream)))
        await warmfold.settled()
        assert (got.status, got.all(b"x-warmfold-error")) == (502, [b"upstream_broken"])
        assert len(warmfold.up.requests) == 1


HEADERS = b"".join(b"X-Stainless-%d: %d\r\n" % (n, n) for n in range(20)) + (
    b"anthropic-beta: a,b\r\nAnthropic-Beta: c\r\nhelicone-Auth: Bearer x\r\nX-Empty:\r\nX-L: caf\xe9\r\nX-U: \xe4\xb8\xad\r\n"
    b"OpenAI-Organization: org\r\nIdempotency-Key: stainless-python-retry-1\r\nX-Dup: 1\r\nx-dup: 2\r\nX-Dup: 1\r\n"
)


@pytest.mark.parametrize("members", [{}, {"stream": True}], ids=["whole", "stream"])
async def test_headers_of_a_chat_completion_are_the_same_with_and_without_a_stream(
    members: dict[str, Any], tmp_path: Path
) -> None:
    request = post(conversation(**members), HEADERS + b"X-Warmfold-Session: mine\r\n")
    head = (SSE.rstrip(b"\r\n") if members else b"HTTP/1.1 200 OK\r\nContent-Type: application/json") + (
        b"\r\nDate: today\r\nserver: s\r\nSet-Cookie: a=1\r\nset-cookie: b=2\r\nX-Up: \xe9\r\n"
    )
    body = chunk(STREAM) + b"0\r\n\r\n" if members else json.dumps(WHOLE).encode()
    framing = b"\r\n" if members else b"Content-Length: %d\r\n\r\n" % len(body)
    async with whole(tmp_path, fixed(head + framing + body)) as warmfold:
        direct = await ask(warmfold.up.port, request)
        got = await ask(warmfold.port, request)
        await warmfold.settled()
    before, behind = warmfold.up.requests
    ours = [pair for pair in before.headers if pair[0] not in (b"Host", b"X-Warmfold-Session")]
    assert [pair for pair in behind.headers if pair[0].lower() != b"host"] == ours
    assert behind.body == before.body
    theirs = [h for h in got.headers if not h[0].startswith(b"x-warmfold-")]
    assert sorted(theirs) == sorted(direct.headers)
    assert [h for h in theirs if h[0].lower() == b"set-cookie"] == [(b"Set-Cookie", b"a=1"), (b"set-cookie", b"b=2")]


async def test_nothing_in_a_request_names_another_provider_or_another_key(tmp_path: Path) -> None:
    """Neither fields of the body that other gateways obey nor headers: they are the provider's to read."""
    async with upstream(fixed(plain())) as evil:
        there = f"http://127.0.0.1:{evil.port}/v1"
        body = conversation(
            api_base=there, base_url=there, api_key="theirs", custom_llm_provider="openai", extra_headers={"X": there}
        )
        more = f"X-Upstream-Url: {there}\r\nX-Base-Url: {there}\r\nX-Forwarded-Host: 127.0.0.1:{evil.port}\r\n"
        environ = {"PROVIDER_KEY": "operators\r\n"}
        flags = {"upstream__api_key_env": "PROVIDER_KEY"}
        async with whole(tmp_path, fixed(plain(json.dumps(WHOLE).encode())), environ, **flags) as warmfold:
            got = await ask(warmfold.port, post(body, more.encode()))
        assert (got.status, evil.connections) == (200, 0)
    (request,) = warmfold.up.requests
    assert (request.body, request.all(b"authorization")) == (body, [b"Bearer operators"])
    assert request.all(b"host") == [b"127.0.0.1:%d" % warmfold.up.port]


CANARIES = ("key-canary", "cookie-canary", "query-canary", "prompt-canary", "answer-canary")


@pytest.mark.parametrize("kind", ["answered", "an error that quotes", "hung up", "broken off", "an answer of nonsense"])
async def test_nothing_of_what_passes_is_logged_or_counted_at_any_level(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    said = {**WHOLE, "choices": [{"index": 0, "finish_reason": "stop", "message": {"content": "answer-canary"}}]}
    quoting = b'{"error":{"message":"prompt-canary: maximum context length is 9 tokens, answer-canary"}}'
    answers = {
        "answered": plain(json.dumps(said).encode()),
        "an error that quotes": plain(quoting, b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json"),
        "hung up": b"",
        "broken off": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nanswer-canary",
        "an answer of nonsense": b"answer-canary\r\n\r\n",
    }

    async def script(exchange: Exchange) -> None:
        await exchange.send(answers[kind])
        exchange.writer.close()

    headers = b"Cookie: a=cookie-canary\r\nApi-Key: key-canary\r\n"
    body = conversation().replace(b"And?", b"prompt-canary?")
    request = (
        post(body, headers)
        .replace(b"completions HTTP", b"completions?key=query-canary HTTP")
        .replace(b"Bearer k\r", b"Bearer key-canary\r")
    )
    async with whole(tmp_path, script) as warmfold:
        got = await ask(warmfold.port, request)
        await warmfold.settled()
        seen = caplog.text + warmfold.running.metrics.render().decode()
    assert not [canary for canary in CANARIES if canary in seen]
    if got.all(b"x-warmfold-error"):
        assert b"canary" not in got.body


async def test_a_form_of_many_parts_goes_up_and_a_file_comes_down_as_they_come(tmp_path: Path) -> None:
    """Larger than the largest chat completion, and the next part is sent only once the provider has the last one."""
    parts, size = 8, 1 << 20
    blob = random.Random(1).randbytes(size)
    taken = asyncio.Semaphore(0)
    received = bytearray()

    async def script(exchange: Exchange) -> None:
        for _ in range(parts):
            received.extend(await exchange.reader.readexactly(size))
            taken.release()
        await exchange.send(plain(bytes(received), b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream"))

    async with (
        whole(tmp_path, script, heads_only=True, server__max_body_bytes=size) as warmfold,
        connected(warmfold.port) as (reader, writer),
    ):
        kind = b"multipart/form-data; boundary=x"
        writer.write(
            b"POST /v1/files HTTP/1.1\r\nHost: h\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
            % (kind, parts * size)
        )
        for _ in range(parts):
            writer.write(blob)
            await soon(taken.acquire())
        got: Message = await soon(read_message(reader))
        assert (got.body == blob * parts, got.complete) == (True, True)
    assert warmfold.up.requests[0].all(b"content-type") == [kind]


async def test_a_stream_stays_one_while_its_conversation_is_compacted_behind_and_in_front_of_it(tmp_path: Path) -> None:
    """Each event is sent once the client has the last one: on the turn that sets a compaction off, on the rewritten one, and on one that would not
    have fit and is compacted first.
    """
    seen = asyncio.Semaphore(0)
    compactions: list[bytes] = []
    events = [event(delta(content=f"{number} ")) for number in range(10)]
    full = {"prompt_tokens": 7000, "completion_tokens": 10, "total_tokens": 7010}

    async def script(exchange: Exchange) -> None:
        body = exchange.request.body
        if b"You are now acting as a compaction engine" in body:
            compactions.append(body)
            said = {"role": "assistant", "content": "Task and intent: go on with the parts. Decisions: none."}
            choice = {"index": 0, "finish_reason": "stop", "message": said}
            await exchange.send(plain(json.dumps({**WHOLE, "choices": [choice]}).encode()))
            return
        await exchange.send(SSE)
        for one in events:
            await exchange.send(chunk(one))
            await soon(seen.acquire())
        usage = event({**delta(), "choices": [], "usage": full})
        await exchange.send(chunk(event(delta("stop")) + usage + DONE) + b"0\r\n\r\n")

    said = [{"role": role, "content": prose((role, at), 350)} for at in range(6) for role in ("user", "assistant")]

    async def turn(port: int, *more: dict[str, str]) -> Message:
        said.extend(more)
        body = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, "messages": said}
        async with connected(port) as (reader, writer):
            writer.write(post(json.dumps(body).encode()))
            head = await soon(read_head(reader))
            got = []
            async for piece in chunks(reader):
                got.append(piece)
                seen.release()
            assert got[:10] == events
            while not seen.locked():
                await seen.acquire()
            return head

    flags = {
        "compaction__max_context_tokens": 8000,
        "compaction__when": "after_turn",
        "compaction__keep_recent_turns": 1,
    }
    async with whole(tmp_path, script, **flags) as warmfold:
        first = await turn(warmfold.port, {"role": "user", "content": "And?"})
        await warmfold.settled()
        assert (first.all(b"x-warmfold-compaction"), len(compactions)) == ([b"none"], 1)
        answer = {"role": "assistant", "content": "".join(f"{number} " for number in range(10))}
        second = await turn(warmfold.port, answer, {"role": "user", "content": "And then?"})
        assert second.all(b"x-warmfold-checkpoint")
        large = {"role": "user", "content": prose("large", 6000)}
        third = await turn(
            warmfold.port,
            {"role": "assistant", "content": "So."},
            large,
            *said[1:2],
            {"role": "user", "content": "So?"},
        )
        await warmfold.settled()
        assert third.all(b"x-warmfold-compaction") == [b"inline"]
    assert all(b'"stream"' not in body for body in compactions)
