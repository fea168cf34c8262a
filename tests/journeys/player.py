"""Plays conversations through the whole proxy: real listener, real embedded store, the simulated provider behind it."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from proxy.config import Config, load
from proxy.core import openai, region
from proxy.core.fingerprint import facts
from proxy.core.replay import OPENING
from proxy.demo.provider import SimulatedProvider
from proxy.demo.template import declared_tokens, render
from proxy.server import Running, start


def config(tmp: Path, upstream: str, **flags: object) -> Config:
    """The defaults on free ports, with changes given as section__key."""
    chosen: dict[str, object] = {
        "server.port": 0,
        "admin.port": 0,
        "upstream.base_url": upstream,
        "store.data_dir": str(tmp / "store"),
        "store.timeout_ms": 2000,  # the machine may be busy: a slow store is another test's subject
    }
    chosen.update({key.replace("__", "."): value for key, value in flags.items()})
    return load(None, {}, chosen)


@dataclass
class Answered:
    """What a client got."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The parsed body."""
        return json.loads(self.body)


@dataclass
class Player:
    """A client, and what lies behind the proxy."""

    running: Running
    provider: SimulatedProvider
    http: aiohttp.ClientSession
    headers: dict[str, str] = field(default_factory=lambda: {"Authorization": "Bearer sk-player"})

    async def post(self, body: bytes | Mapping[str, Any], **headers: str) -> Answered:
        """One chat completion through the proxy."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {
            "Content-Type": "application/json",
            **self.headers,
            **{k.replace("_", "-"): v for k, v in headers.items()},
        }
        async with self.http.post(
            f"{self.running.base_url}/chat/completions", data=io.BytesIO(data), headers=sent
        ) as reply:
            return Answered(reply.status, reply.headers.copy(), await reply.read())

    async def settled(self) -> None:
        """Until what follows a turn is done: saved, and compacted where that was due."""
        async with asyncio.timeout(30):
            while self.running.busy:
                await asyncio.sleep(0.002)

    async def admin(self, path: str, method: str = "GET", **kwargs: Any) -> Any:
        """What the admin listener says."""
        async with self.http.request(method, f"{self.running.admin_url}{path}", **kwargs) as reply:
            return await reply.json()


@asynccontextmanager
async def playing(tmp: Path, provider: SimulatedProvider, **flags: object) -> AsyncIterator[Player]:
    """The proxy in front of a provider, with a client."""
    running = await start(config(tmp, provider.base_url, **flags))
    try:
        async with aiohttp.ClientSession(auto_decompress=False) as http:
            yield Player(running, provider, http)
    finally:
        await running.stop()


def elements(raw: bytes) -> tuple[bytes, ...]:
    """The messages of a request as they were sent."""
    found = openai.read(raw)
    assert found is not None
    return tuple(element.strip() for element in found.messages)


def is_extension(compaction: bytes, turns: Sequence[bytes], live: Sequence[bytes] = ()) -> bool:
    """I2: a routed request, whole or cut, then at most one rebuilt answer, then one user message with the instruction.

    `turns` are the requests that the provider got, `live` those that clients sent: one that does not fit is compacted before it is
    routed, so the provider has never seen it whole.
    """
    *before, last = elements(compaction)
    spoken = json.loads(last)
    if spoken.get("role") != "user" or not str(spoken.get("content")).startswith(OPENING):
        return False
    for turn in (*turns, *live):
        sent = elements(turn)
        for kept in (before, before[:-1]):
            answer = before[len(kept) :]
            if answer and (json.loads(answer[0]).get("role") != "assistant" or len(kept) != len(sent)):
                continue
            if tuple(kept) == sent[: len(kept)] or (turn in live and _is_live_behind_a_checkpoint(kept, sent)):
                return same_parameters(compaction, turn)
    return False


def _is_live_behind_a_checkpoint(kept: Sequence[bytes], sent: Sequence[bytes]) -> bool:
    """Preamble, a checkpoint, and messages of the client's request in their order: a further pass over a request that does not fit."""
    at = next((i for i, element in enumerate(kept) if b"<checkpoint_summary" in element), None)
    if at is None or tuple(kept[:at]) != tuple(sent[:at]):
        return False
    rest = tuple(kept[at + 1 :])
    return any(tuple(sent[i : i + len(rest)]) == rest for i in range(at, len(sent) - len(rest) + 1))


_MAY_CHANGE = frozenset(
    {
        "messages",
        "stream",
        "stream_options",
        "n",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "logprobs",
        "top_logprobs",
    }
    | {"response_format", "store", "logit_bias", "presence_penalty", "frequency_penalty"}
)


def same_parameters(compaction: bytes, turn: bytes) -> bool:
    """Whether all that shapes a prompt stands in both, byte for byte and in the same order."""

    def shaping(raw: bytes) -> list[tuple[str, str]]:
        return [(k, json.dumps(v)) for k, v in json.loads(raw).items() if k not in _MAY_CHANGE]

    return shaping(compaction) == shaping(turn)


def sizes(request: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens of a request by the provider's own count: all of it, and what no compaction can shrink (preamble, tools, newest group)."""
    whole = len(render(request))
    messages = request["messages"]
    read = [facts(json.dumps(m).encode("utf-8", "surrogatepass")) for m in messages]
    start_at = 0
    while start_at < len(read) and read[start_at].role in ("system", "developer"):
        start_at += 1
    cuts = region.legal_cuts(read[start_at:])
    newest = start_at + (cuts[-1] if cuts else 0)
    fixed = len(render({**request, "messages": [*messages[:start_at], *messages[newest:]]}))
    return whole, fixed


__all__ = ["Answered", "Player", "config", "declared_tokens", "elements", "is_extension", "playing", "sizes"]
