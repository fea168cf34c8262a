"""Asks upstreams how long their models' contexts are: in the background, rarely, and never for a model whose window is configured.

No request waits for it. The question goes where the request goes that made it necessary, and with its headers, so with the same
credential; nothing of them is kept. What the answers mean: core/discovery.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from dataclasses import dataclass, replace
from typing import Final, assert_never

from proxy import clock
from proxy.config import ASSUMED_WINDOW_TOKENS, Upstream
from proxy.core import discovery
from proxy.core.discovery import MAX_NAME_LENGTH, Listing, Said, Server
from proxy.core.model import Window
from proxy.errors import Refused, UpstreamFailed
from proxy.outbound import Inbound
from proxy.tasks import Tasks
from proxy.upstream import Sender
from proxy.windows import Windows

log = logging.getLogger("warmfold.discovery")

MAX_BODY_BYTES: Final = 8 * 1024 * 1024
"""OpenRouter's list of all models has 1 MB."""

# What speaks of the body or the answer of the request that is at hand, and not of its sender.
_OF_THE_REQUEST: Final = (
    "content-",
    "accept",
    "if-",
    "range",
    "expect",
    "idempotency-key",
    "x-idempotency-key",
    "x-stainless-",
)
_ANSWER_AS: Final = (("Accept", "application/json"), ("Accept-Encoding", "identity"))


@dataclass(frozen=True, slots=True)
class Pace:
    """How far apart the questions to one upstream are, in seconds, and how long one may take.

    `refresh_s` after an answer. `retry_s` after none, doubling up to `refresh_s`; also for a model that a local server has not loaded yet.
    """

    refresh_s: float = 600.0
    retry_s: float = 30.0
    timeout_s: float = 5.0


@dataclass(frozen=True, slots=True)
class _Asked:
    """The last question to an upstream: when it ended, and how many in a row were in vain.

    `final`: the upstream has said all that it can say; else another model may be known once it is loaded.
    """

    at: float = -math.inf
    misses: int = 0
    final: bool = False

    def due_at(self, pace: Pace, *, known: bool) -> float:
        """When to ask again. `known`: the upstream has said what is wanted, and it is only to be refreshed."""
        if known or self.final:
            return self.at + pace.refresh_s
        return self.at + min(pace.refresh_s, pace.retry_s * (1 << min(max(0, self.misses - 1), 16)))


_NEVER: Final = _Asked()
_RUNNING: Final = _Asked(at=math.inf)


_LOAD_LATER: Final = (Server.OLLAMA, Server.LM_STUDIO)
"""They say how long the context of a model is once they have loaded it."""


class Discovery:
    """Tells `windows` what upstreams say. Remembers of each upstream when it was asked last, and with what success."""

    def __init__(self, sender: Sender, windows: Windows, tasks: Tasks, pace: Pace | None = None) -> None:
        self._sender = sender
        self._windows = windows
        self._tasks = tasks
        self._pace = pace or Pace()
        self._asked: dict[str, _Asked] = {}
        self._silent: set[str] = set()

    def ask(self, inbound: Inbound, upstream: Upstream, model: str, window: Window) -> None:
        """Ask the upstream of this request in the background, if nobody set the model's window and the last question is long enough ago."""
        if window.origin == "config":
            return
        last = self._asked.get(upstream.name, _NEVER)
        if clock.monotonic() < last.due_at(self._pace, known=window.origin == "upstream"):
            return
        self._asked[upstream.name] = _RUNNING
        question = _Question(self._sender, upstream, _of_its_sender(inbound))
        self._tasks.spawn(self._find_out(question, model, last.misses, assumed=window.assumed), "ask-for-windows")

    async def _find_out(self, question: _Question, model: str, misses: int, *, assumed: bool) -> None:
        name = question.upstream.name
        asked = _Asked(misses=misses + 1)
        try:
            async with asyncio.timeout(self._pace.timeout_s):
                listing = await question.listing()
                said = await question.said(listing, model) if listing is not None else Said()
            self._windows.said(name, said)
            known = said.of(model) is not None
            final = listing is not None and listing.server not in _LOAD_LATER
            asked = _Asked(misses=0 if known else misses + 1, final=final)
            if assumed and not known and (final or listing is None):
                self._warn(name)
        except (UpstreamFailed, Refused, TimeoutError):
            log.info("the upstream did not say how long its models' contexts are upstream=%s", name)
        finally:
            self._asked[name] = replace(asked, at=clock.monotonic())

    def _warn(self, upstream: str) -> None:
        """Once for each upstream. No model is named: names come from clients, and may be anything."""
        if upstream not in self._silent:
            self._silent.add(upstream)
            log.warning(
                "nobody says how long a model's context is, %d tokens assumed upstream=%s; set max_context_tokens in [[models]]",
                ASSUMED_WINDOW_TOKENS,
                upstream,
            )


@dataclass(frozen=True, slots=True)
class _Answer:
    body: bytes
    server: str


class _Question:
    """One question to one upstream, in the name of one request."""

    def __init__(self, sender: Sender, upstream: Upstream, inbound: Inbound) -> None:
        self.upstream = upstream
        self._sender = sender
        self._inbound = inbound

    async def listing(self) -> Listing | None:
        """What /v1/models says; None: nothing that can be read. The query goes along: Azure wants its api-version."""
        _, mark, query = self._inbound.target.partition("?")
        answer = await self._answer(replace(self._inbound, target=f"/v1/models{mark}{query}"))
        return discovery.listing(answer.body, answer.server) if answer is not None else None

    async def said(self, listing: Listing, model: str) -> Said:
        """What is known of the upstream's models; its own API is asked where the list says nothing of this one and looks like a server that has one."""
        if listing.said.of(model) is not None or listing.server is None:
            return listing.said
        return listing.said.then(await self._natively(listing.server, model, single=listing.single))

    async def _natively(self, server: Server, model: str, *, single: bool) -> Said:
        match server:
            case Server.LLAMA_CPP | Server.KOBOLD_CPP if not single:
                return Said()  # which of its models it would speak of is not said
            case Server.LLAMA_CPP:
                return Said(any_model=discovery.window_of_props(await self._get("/props")))
            case Server.KOBOLD_CPP:
                return Said(any_model=discovery.window_of_kobold(await self._get("/api/extra/true_max_context_length")))
            case Server.TGI:
                return Said(any_model=discovery.window_of_tgi(await self._get("/info")))
            case Server.LM_STUDIO:
                return Said(discovery.windows_of_lm_studio(await self._get("/api/v0/models")))
            case Server.OLLAMA:
                return await self._ollama(model)
            case _:
                assert_never(server)

    async def _ollama(self, model: str) -> Said:
        loaded = Said(discovery.windows_of_ollama_ps(await self._get("/api/ps")))
        if loaded.of(model) is not None or len(model) > MAX_NAME_LENGTH:
            return loaded
        shown = await self._post("/api/show", json.dumps({"model": model}).encode())
        window = discovery.window_of_ollama_show(shown)
        return loaded if window is None else loaded.then(Said({model: window}))

    async def _get(self, target: str) -> bytes:
        answer = await self._answer(replace(self._inbound, target=target))
        return answer.body if answer is not None else b""

    async def _post(self, target: str, body: bytes) -> bytes:
        headers = (*self._inbound.headers, ("Content-Type", "application/json"))
        answer = await self._answer(Inbound("POST", target, headers, body))
        return answer.body if answer is not None else b""

    async def _answer(self, inbound: Inbound) -> _Answer | None:
        """An answer with 200, None: another one. What is too long is cut off, and cannot be read then."""
        reply = await self._sender.send(inbound, self.upstream)
        try:
            if reply.status != 200:
                return None
            return _Answer(await reply.read(MAX_BODY_BYTES), reply.header("server") or "")
        finally:
            await reply.release()


def _of_its_sender(inbound: Inbound) -> Inbound:
    """A GET by whoever sent this request: credential, organisation and whatever else a gateway wants to see, without what speaks of its body."""
    kept = (pair for pair in inbound.headers if not pair[0].lower().startswith(_OF_THE_REQUEST))
    return Inbound("GET", inbound.target, (*kept, *_ANSWER_AS))
