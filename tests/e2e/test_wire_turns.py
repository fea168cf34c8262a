"""Recorded answers of many providers as answers to turns, over real sockets: the client gets their bytes, the session what they counted.

The upstream answers a model with the recording of that name, in a few pieces or broken off in the middle.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.server import Running, start
from tests import samples
from tests.e2e.relay_wire import Exchange, Message, ask, upstream
from tests.journeys.player import config
from tests.journeys.test_main_job import long_text
from tests.samples import Sample

FRAMING = {b"content-length", b"transfer-encoding", b"connection", b"keep-alive"}
WIRE = {sample.name: sample for sample in samples.all_of()}

pytestmark = pytest.mark.skipif(not WIRE, reason=f"no recorded answers in {samples.WIRE} (WARMFOLD_WIRE)")


def coded(sample: Sample) -> bytes:
    """The body as it travelled: recordings are kept without their coding, under headers that speak of it."""
    names = [value for key, value in sample.headers if key.lower() == "content-encoding"]
    assert set(names) <= {"gzip"}
    return gzip.compress(sample.body, mtime=0) if names else sample.body


def kept(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """End-to-end headers of an answer without ours."""
    return [(k, v) for k, v in headers if k.lower() not in FRAMING and not k.lower().startswith(b"x-warmfold-")]


def of(sample: Sample) -> list[tuple[bytes, bytes]]:
    return kept([(key.encode(), value.encode()) for key, value in sample.headers])


async def answer(exchange: Exchange) -> None:
    """The recording that the request names as its model, framed as its `user` says: whole, in pieces, or broken off behind so many bytes."""
    body = json.loads(exchange.request.body or b"{}")
    sample = WIRE.get(body.get("model", ""))
    if sample is None:
        await exchange.send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        return
    data = coded(sample)
    head = b"HTTP/1.1 %d Said So\r\n" % sample.status + b"".join(b"%s: %s\r\n" % pair for pair in of(sample))
    if body["user"] == "whole":
        await exchange.send(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        return
    await exchange.send(head + b"Transfer-Encoding: chunked\r\n\r\n")
    end = len(data) if body["user"] == "pieces" else int(body["user"])
    third, middle = end // 3, end // 2
    for piece in filter(None, (data[:third], data[third:middle], data[middle:end])):
        await exchange.send(b"%x\r\n%s\r\n" % (len(piece), piece))
    if body["user"] == "pieces":
        await exchange.send(b"0\r\n\r\n")
    else:
        exchange.writer.close()


@dataclass
class Proxied:
    """A client of the proxy, one conversation for each of its requests."""

    running: Running
    http: aiohttp.ClientSession
    sent: int = 0

    async def post(self, sample: Sample, framing: str, **members: Any) -> Message:
        self.sent += 1
        said = [{"role": "user", "content": f"{self.sent}. {long_text(self.sent, 200)}"}]
        said += [{"role": "assistant", "content": "So."}, {"role": "user", "content": long_text(0, 20)}]
        asked = {"model": sample.name, "user": framing, "stream": sample.kind == "sse", "messages": said, **members}
        body = json.dumps(asked).encode()
        port = int(self.running.base_url.rsplit(":", 1)[1].split("/")[0])
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body)
        got = await ask(port, head + body)
        async with asyncio.timeout(30):
            while b"warmfold_requests_in_flight 0.0" not in self.running.metrics.render() or self.running.busy:
                await asyncio.sleep(0.001)
        return got

    async def session(self, got: Message) -> dict[str, Any] | None:
        """What the admin listener shows of the turn's session; None where it has none."""
        (name,) = got.all(b"x-warmfold-session")
        async with self.http.get(f"{self.running.admin_url}/sessions/{name.decode()}") as reply:
            return await reply.json() if reply.status == 200 else None


@asynccontextmanager
async def proxied(tmp: Path, **flags: object) -> AsyncIterator[Proxied]:
    async with upstream(answer) as up:
        running = await start(config(tmp, up.base_url, compaction__max_context_tokens=100_000, **flags))
        try:
            async with aiohttp.ClientSession() as http:
                yield Proxied(running, http)
        finally:
            await running.stop()


def usage(sample: Sample) -> dict[str, int | None]:
    counted = sample.usage
    names = ("prompt", "completion", "cached", "reasoning")
    return {name: getattr(counted, name) for name in names}


async def test_each_answer_is_relayed_as_it_came_and_counted_as_it_says(tmp_path: Path) -> None:
    async with proxied(tmp_path) as client:
        for sample in WIRE.values():
            for framing in ("whole", "pieces"):
                got = await client.post(sample, framing)
                assert (got.status, kept(got.headers), got.body) == (sample.status, of(sample), coded(sample)), (
                    sample.name
                )
                assert got.complete, sample.name
                session = await client.session(got)
                assert (session is not None) is sample.is_complete, sample.name
                assert session is None or session["usage"] == usage(sample), sample.name
                (note,) = got.all(b"x-warmfold-compaction")
                assert (note != b"none") is sample.is_overflow, sample.name


def breaks(sample: Sample) -> list[int]:
    """Where an answer breaks off: behind its first byte and so on; a stream also inside and behind each of its first and last events.

    The last place is its very end, where nothing is missing but the end of the transfer.
    """
    data = coded(sample)
    ends = list(accumulate(map(len, sample.events))) if sample.kind == "sse" and data == sample.body else []
    around = [at + by for at in (*ends[:2], *ends[-4:]) for by in (-9, -1, 0)]
    return sorted({1, len(data) // 4, len(data) // 2, len(data) - 1, len(data), *around} & set(range(1, len(data) + 1)))


async def test_an_answer_that_breaks_off_ends_broken_and_is_no_turn(tmp_path: Path) -> None:
    """Nor is one of which all came but the end of the transfer: a proxy in between may have cut it off just there."""
    async with proxied(tmp_path) as client:
        for sample in samples.all_of("sse", "json"):
            data = coded(sample)
            for at in breaks(sample):
                got = await client.post(sample, str(at))
                assert not got.complete, (sample.name, at)
                assert (got.status, got.body) == (sample.status, data[:at]), (sample.name, at)
                assert await client.session(got) is None, (sample.name, at)


async def test_of_a_broken_stream_that_we_asked_for_its_usage_the_client_gets_each_whole_event(tmp_path: Path) -> None:
    """What came of the event that broke off may be the beginning of the chunk that is withheld."""
    async with proxied(tmp_path, upstream__stream_usage="always") as client:
        for sample in filter(_is_told_apart, samples.all_of("sse")):
            ends = list(accumulate(map(len, sample.events)))
            for at in breaks(sample):
                got = await client.post(sample, str(at))
                whole = [event for event, end in zip(sample.events, ends, strict=True) if end <= at]
                passed = b"".join(e for e in whole if e.endswith((b"\n\n", b"\r\n\r\n")) and not _is_usage_alone(e))
                assert (got.body, got.complete) == (passed, False), (sample.name, at)
                assert await client.session(got) is None, (sample.name, at)


async def test_of_a_stream_that_we_asked_for_its_usage_only_that_is_withheld(tmp_path: Path) -> None:
    """A client that asked itself gets it all; of others' streams everything but the chunk with empty choices and usage in it."""
    async with proxied(tmp_path, upstream__stream_usage="always") as client:
        for sample in samples.all_of("sse"):
            for framing in ("whole", "pieces"):
                got = await client.post(sample, framing)
                assert got.body == b"".join(event for event in sample.events if not _is_usage_alone(event)), sample.name
                assert got.complete, sample.name
                session = await client.session(got)
                assert session is None or session["usage"] == usage(sample), sample.name
                asked = await client.post(sample, framing, stream_options={"include_usage": True})
                assert asked.body == sample.body, sample.name


def _is_told_apart(sample: Sample) -> bool:
    """Whether it says that it is a stream of events, and comes uncoded: another one is handed on as it comes."""
    return "event-stream" in sample.content_type and coded(sample) == sample.body


def _is_usage_alone(event: bytes) -> bool:
    said = [json.loads(line[5:]) for line in event.splitlines() if line.startswith(b"data: {")]
    return any(chunk.get("choices") == [] and chunk.get("usage") for chunk in said)


@pytest.mark.parametrize(
    "pack",
    [
        pytest.param(lambda data: gzip.compress(data, mtime=0), id="gzip"),
        pytest.param(zlib.compress, id="deflate"),
    ],
)
async def test_a_coded_stream_is_read_and_nothing_of_it_withheld(
    tmp_path: Path, pack: Callable[[bytes], bytes], request: pytest.FixtureRequest
) -> None:
    """Events cannot be told apart in it, so the client gets it with the chunk that it did not ask for."""
    coding = request.node.callspec.id
    sample = next(s for s in samples.all_of("sse") if any(map(_is_usage_alone, s.events)))
    data = pack(sample.body)

    async def script(exchange: Exchange) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: %s\r\n" % coding.encode()
        await exchange.send(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)

    async with upstream(script) as up:
        flags = {"compaction__max_context_tokens": 100_000, "upstream__stream_usage": "always"}
        running = await start(config(tmp_path, up.base_url, **flags))
        try:
            async with aiohttp.ClientSession() as http:
                client = Proxied(running, http)
                got = await client.post(sample, "whole")
                session = await client.session(got)
        finally:
            await running.stop()
    assert (got.body, got.complete) == (data, True)
    assert session is not None
    assert session["usage"] == usage(sample)
