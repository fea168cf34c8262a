"""Every known way in which a provider says that a prompt is too long, said in the middle of a conversation: the client never sees it.

And everything that only sounds like it, which the client gets as it came. The recorded errors are sent with their own status, headers and
bytes; known sentences in the body that their provider puts them into, and where it does so as the first event of a stream.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests import samples
from tests.journeys.player import Answered, Player
from tests.journeys.test_main_job import long_text
from tests.journeys.test_overflow import Stub, covered, history, in_front_of, note, user
from tests.samples import Sample

JSON = (("Content-Type", "application/json"),)
SSE = (("Content-Type", "text/event-stream"),)
UNSAID = 0.8
"""Of the request that is refused: what a provider that states no numbers takes."""
FRAMING = {"content-length", "content-encoding", "transfer-encoding", "connection", "keep-alive"}


@dataclass(frozen=True)
class Error:
    """An answer that is no turn. `share`: how much of the request that it refuses would fit; `limit`: the window that it states."""

    name: str
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    share: float = UNSAID
    limit: int | None = None

    def response(self) -> web.Response:
        return web.Response(status=self.status, body=self.body, headers=list(self.headers))


def _error(name: str, row: Mapping[str, Any]) -> Error:
    """The sentence of a row in its provider's own body."""
    stated = {key: float(value.replace(",", "")) for key, value in (row.get("sample_values") or {}).items()}
    share = min(UNSAID, stated["limit"] / stated["used"]) if {"limit", "used"} <= stated.keys() else UNSAID
    limit = int(stated["limit"]) if "limit" in stated else None
    return Error(name, row["status"], JSON, json.dumps(_shaped(row), ensure_ascii=False).encode(), share, limit)


def _shaped(row: Mapping[str, Any]) -> Any:
    """By what is known of the provider's bodies; OpenAI's where nothing is."""
    said, shape, code, kind = row["sample"], row.get("body_shape") or "", row.get("code"), row.get("type")
    if said.startswith("{"):
        return json.loads(said)
    if shape.startswith("["):
        return [{"error": {"code": 400, "message": said, "status": kind}}]
    if shape.startswith('{"error":"<text>'):
        return {"error": said, "error_type": kind or "error"}
    if shape.startswith('{"code":"<sentence>"'):
        return {"code": "Client specified an invalid argument", "error": said}
    if shape.startswith('{"code":20015'):
        return {"code": 20015, "message": said, "data": None}
    if '"object":"error"' in shape and '"error":{' not in shape:
        return {"object": "error", "message": said, "type": kind, "param": None, "code": code}
    return {"error": {"message": said, "type": kind or "invalid_request_error", "param": None, "code": code}}


def _event(error: Error) -> Error:
    """The same as the first event of a stream."""
    body = b": PROCESSING\n\ndata: " + b" ".join(error.body.split(b"\n")) + b"\n\ndata: [DONE]\n\n"
    return Error(f"{error.name} in a stream", 200, SSE, body, error.share, error.limit)


def _recorded(sample: Sample) -> Error:
    """With the headers that do not speak of its transfer."""
    headers = tuple((key, value) for key, value in sample.headers if key.lower() not in FRAMING)
    return Error(sample.name, sample.status, headers, sample.body)


def _rows(table: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for param in samples.facts(table):
        if (row := param.values[0]) is not None:
            yield f"{table} {param.id}", row


def _known(*kinds: str, where: str) -> Iterator[Error]:
    for name, row in _rows("overflow_patterns"):
        if row["kind"] in kinds and where in row["where"]:
            yield _error(name, row)


def overflows() -> list[Error]:
    """What is recovered where it comes in the place of an answer."""
    recorded = [_recorded(sample) for sample in samples.all_of("error") if sample.is_overflow]
    return [*recorded, *_known("input", "sum", where="http")]


def overflows_in_streams() -> list[Error]:
    """What is recovered where it comes as a stream's first event: of those who do so, and of gateways that wrap another one's error."""
    return [_event(e) for e in (*_known("input", "sum", "cut", where="sse"), *_known("cut", where="finish"))] + [
        _event(_recorded(sample)) for sample in samples.all_of("error") if sample.is_overflow
    ]


def others() -> list[Error]:
    """Limits of rate, of the output and of bytes, refused shapes, missing rights."""
    recorded = [_recorded(sample) for sample in samples.all_of("error") if not sample.is_overflow]
    sounding = [
        _error(f"{name} {status}", {"status": status, **row})
        for name, row in _rows("not_overflow")
        for status in (400, 413, 429)
    ]
    return [*recorded, *sounding, *_known("output", "bytes", where="http")]


@dataclass
class Talk:
    """One conversation with a model of its own, which the provider refuses with one error."""

    error: Error
    stream: bool
    messages: list[dict[str, Any]] = field(default_factory=list)

    async def turn(self, player: Player, *more: dict[str, Any]) -> Answered:
        self.messages += more
        body = {"model": f"model of {self.error.name}", "stream": self.stream, "messages": self.messages}
        got = await player.post(body)
        await player.settled()
        return got


def _size(body: Mapping[str, Any]) -> int:
    return sum(len(json.dumps(message["content"])) for message in body["messages"])


class Provider(Stub):
    """Refuses what is longer than `most` characters with `error`, and counts a token for four of them."""

    def __init__(self) -> None:
        super().__init__(self._says)
        self.error: Error | None = None
        self.most = 0

    def _says(self, body: dict[str, Any]) -> web.StreamResponse | None:
        size = _size(body)
        self.prompt_tokens = size // 4
        return self.error.response() if self.error is not None and size > self.most else None


async def _refused_in_mid_conversation(
    provider: Provider, player: Player, error: Error, *, stream: bool
) -> tuple[Answered, list[dict[str, Any]]]:
    """What the client got for the request that is too long, and what the provider got of it."""
    talk = Talk(error, stream)
    provider.error = None
    preamble, first, *rest = history(3, 200)
    own = user(f"{error.name}: {first['content']}")  # the same beginning would be the same conversation
    assert (await talk.turn(player, preamble, own, *rest)).status == 200
    for number in range(40):
        talk.messages += [{"role": "assistant", "content": f"Part {number} is done."}, user(long_text(number, 200))]
    provider.error, provider.most = error, int(_size({"messages": talk.messages}) * error.share)
    before = len(provider.turns)
    got = await talk.turn(player)
    return got, provider.turns[before:]


Samples = Callable[[], list[Error]]


@pytest.mark.parametrize(
    ("known", "stream"),
    [
        pytest.param(overflows, False, id="an error"),
        pytest.param(overflows, True, id="an error in the place of a stream"),
        pytest.param(overflows_in_streams, True, id="the first event of a stream"),
    ],
)
async def test_a_known_overflow_in_mid_conversation_is_recovered(tmp_path: Path, known: Samples, stream: bool) -> None:
    found = known()
    if not found:
        pytest.skip(f"no recorded answers in {samples.WIRE}, no facts of providers in {samples.FACTS.parent}")
    provider = Provider()
    # Told nothing, the first event of a stream is looked at only where the prompt is near the watermark.
    async with in_front_of(provider, tmp_path, compaction__budget_tokens=9000) as player:
        for error in found:
            got, sent = await _refused_in_mid_conversation(provider, player, error, stream=stream)
            assert (got.status, note(got), covered(got) > 0) == (200, "recovered", True), error.name
            assert b"Very well." in got.body, error.name
            assert b"rror" not in got.body, error.name
            assert len(sent) == 2, error.name
            assert sent[1]["messages"][-1]["content"].endswith(sent[0]["messages"][-1]["content"]), error.name
            if error.limit is not None:
                shown = await player.admin(f"/sessions/{got.headers['x-warmfold-session']}")
                assert (shown["window"], shown["window_origin"]) == (error.limit, "learned"), error.name


@pytest.mark.parametrize("stream", [False, True])
async def test_what_only_sounds_like_an_overflow_reaches_the_client_as_it_came(tmp_path: Path, stream: bool) -> None:
    found = others()
    if not found:
        pytest.skip(f"no recorded answers in {samples.WIRE}, no facts of providers in {samples.FACTS.parent}")
    provider = Provider()
    async with in_front_of(
        provider, tmp_path, compaction__budget_tokens=9000, upstream__stream_usage="never"
    ) as player:
        for error in [*found, *map(_event, found)] if stream else found:
            got, sent = await _refused_in_mid_conversation(provider, player, error, stream=stream)
            assert (got.status, got.body) == (error.status, error.body), error.name
            assert {k.lower(): v for k, v in error.headers}.items() <= {
                k.lower(): v for k, v in got.headers.items()
            }.items(), error.name
            assert (note(got), len(sent)) == ("none", 1), error.name
            shown = await player.admin(f"/sessions/{got.headers['x-warmfold-session']}")
            assert shown["window_origin"] == "assumed", error.name
        assert not provider.compactions
