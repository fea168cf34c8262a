"""A relay in front of a model server that keeps each chat completion: what was sent, and what the server said of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp import web


@dataclass(frozen=True, slots=True)
class Exchange:
    """One chat completion. `answer` is llama.cpp's: with `usage` and `timings`."""

    request: dict[str, Any]
    answer: dict[str, Any]

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return int(self.answer["usage"]["prompt_tokens"])

    @property
    def cached(self) -> int:
        """Prompt tokens that were in the KV cache."""
        return int(self.answer["timings"]["cache_n"])

    @property
    def new(self) -> int:
        """Prompt tokens that were processed."""
        return int(self.answer["timings"]["prompt_n"])

    @property
    def prompt_ms(self) -> float:
        """Milliseconds that processing them took."""
        return float(self.answer["timings"]["prompt_ms"])

    @property
    def text(self) -> str:
        """What the model wrote."""
        return str(self.answer["choices"][0]["message"]["content"])


class Recorder:
    """Listens at `url` within its block. `exchanges`: the oldest first."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._session: aiohttp.ClientSession | None = None
        self._runner = web.ServerRunner(web.Server(self._handle))
        self.url = ""
        self.exchanges: list[Exchange] = []

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        assert self._session is not None, "it has been entered"
        sent = await request.read()
        headers = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        async with self._session.request(
            request.method, self._upstream + request.path_qs, data=sent or None, headers=headers
        ) as reply:
            told = await reply.read()
            if reply.status == 200 and request.path.endswith("/chat/completions"):
                self.exchanges.append(Exchange(json.loads(sent), json.loads(told)))
            return web.Response(status=reply.status, body=told, content_type=reply.content_type)
