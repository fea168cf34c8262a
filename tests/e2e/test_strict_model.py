"""A chat template that takes user and assistant in turn and nothing else, on a real server: a conversation is compacted all the same.

llama.cpp's server with a 135M model, warmfold as a process of its own. Token counts and the shape of requests are looked at, never times or the
model's words. Run with `pytest -m real_model`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.conversation import Conversation, Message
from benchmarks.llama_server import MODEL, LlamaServer, missing
from benchmarks.local_model import COMPACTION, SPARE_TOKENS
from benchmarks.recorder import Exchange, Recorder
from benchmarks.warmfold import Warmfold
from proxy.core.replay import OPENING

pytestmark = [pytest.mark.real_model, pytest.mark.skipif(bool(missing()), reason=missing())]

TEMPLATE = Path(__file__).parents[1] / "templates" / "chatml_alternating.jinja"
KEY = {"Authorization": "Bearer strict"}
PROMPT_TOKENS = 1200
WITHIN_S = 120.0
TURNS = 4
"""What this model writes is not always a checkpoint: then the conversation goes on for a turn."""


@pytest.fixture(scope="module")
def server() -> Iterator[LlamaServer]:
    with LlamaServer(template=TEMPLATE) as running:
        yield running


@dataclass
class Chat:
    """A client that talks through the proxy."""

    server: LlamaServer
    recorder: Recorder
    proxy: Warmfold
    http: aiohttp.ClientSession
    script: Conversation
    messages: list[Message] = field(default_factory=list)
    session: str = ""

    def grow(self) -> None:
        """Questions and answers up to the size at which it is worth compacting."""
        self.messages = [self.script.system(), self.script.user()]
        while self.server.count({"messages": self.messages}) < PROMPT_TOKENS:
            self.messages += [self.script.reply(), self.script.user()]

    async def turn(self, mode: str = "on") -> tuple[Exchange, Any]:
        """One turn, which ends on the model's answer: the call as the server saw it, and the proxy's headers."""
        body = {"model": MODEL, "messages": self.messages, "max_tokens": 64, "temperature": 0}
        url = f"{self.proxy.base_url}/chat/completions"
        async with self.http.post(url, json=body, headers={**KEY, "x-warmfold-mode": mode}) as reply:
            told = await reply.json()
            assert reply.status == 200, told
        self.session = reply.headers.get("x-warmfold-session", self.session)
        self.messages = [*self.messages, {"role": "assistant", "content": told["choices"][0]["message"]["content"]}]
        return next(e for e in self.recorder.exchanges if e.answer["id"] == told["id"]), reply.headers

    async def attempt(self, attempts: int) -> dict[str, Any]:
        """The newest line of the session's journal, once it has so many."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                found = await asyncio.to_thread(self.proxy.session, self.session)
                if found and len(found["journal"]) >= attempts:
                    newest: dict[str, Any] = found["journal"][0]
                    return newest
                await asyncio.sleep(0.1)


@asynccontextmanager
async def _chat(server: LlamaServer, number: int, **compaction: str | int | float) -> AsyncIterator[Chat]:
    async with Recorder(server.url) as recorder, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()) as http:
        with Warmfold(f"{recorder.url}/v1", {**COMPACTION, **compaction}) as proxy:
            chat = Chat(server, recorder, proxy, http, Conversation(number))
            chat.grow()
            yield chat


def _roles(messages: list[Message]) -> list[str]:
    return [message["role"] for message in messages if message["role"] != "system"]


def _alternates(messages: list[Message]) -> bool:
    return all(role == ("user", "assistant")[at % 2] for at, role in enumerate(_roles(messages)))


async def test_the_server_refuses_two_user_messages_in_a_row(server: LlamaServer) -> None:
    """Else the tests below would show nothing."""
    twice = [{"role": "user", "content": "Hello."}, {"role": "user", "content": "Hello?"}]
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{server.url}/v1/chat/completions", json={"messages": twice, "max_tokens": 1}) as reply,
    ):
        assert reply.status in (400, 500), "this server takes an exception of a template for its own failure"


async def test_a_replay_with_its_answer_is_taken_and_the_next_turn_carries_the_checkpoint(server: LlamaServer) -> None:
    async with _chat(server, 1) as chat:
        for attempts in range(1, TURNS + 1):
            turn, _ = await chat.turn("force")
            attempt = await chat.attempt(attempts)
            if attempt["outcome"] == "committed":
                break
            chat.messages.append(chat.script.user())
        assert attempt["outcome"] == "committed"

        replay = next(e for e in chat.recorder.exchanges if _is_replay(e))
        sent = replay.request["messages"]
        assert _alternates(sent)
        assert len(sent) == len(_before(chat.recorder, replay).request["messages"]) + 2
        newest = [e for e in chat.recorder.exchanges if _is_replay(e)][-1]
        assert newest.cached >= turn.prompt - SPARE_TOKENS
        new = sum(server.count_text(message["content"]) for message in newest.request["messages"][-2:])
        assert newest.new <= new + SPARE_TOKENS

        covered = attempt["to"]
        chat.messages.append(chat.script.user())
        later, headers = await chat.turn()
        assert headers["x-warmfold-covered"] == str(covered)
        assert _alternates(later.request["messages"])
        assert later.prompt < turn.prompt


def _is_replay(exchange: Exchange) -> bool:
    return str(exchange.request["messages"][-1]["content"]).startswith(OPENING)


def _before(recorder: Recorder, replay: Exchange) -> Exchange:
    return recorder.exchanges[recorder.exchanges.index(replay) - 1]


async def test_a_region_that_ends_on_a_user_message_is_taken_with_an_answer_of_ours(server: LlamaServer) -> None:
    """An operator asks for it: the plain request is refused, the one with a short answer in between is not."""
    async with _chat(server, 2, replay_scope="region") as chat:
        turn, _ = await chat.turn()
        async with asyncio.timeout(WITHIN_S):
            while not await asyncio.to_thread(chat.proxy.session, chat.session):
                await asyncio.sleep(0.1)
        roles = _roles(turn.request["messages"])
        refusals = []
        # At temperature 0 the same region gives the same words: where they are no checkpoint, the next region may do.
        for to in [at for at in range(len(roles) - 3, 0, -1) if roles[at] == "assistant"]:
            url = f"{chat.proxy.admin_url}/sessions/{chat.session}/compact"
            headers = {"x-upstream-authorization": KEY["Authorization"]}
            async with chat.http.post(url, json={"from": 0, "to": to}, headers=headers) as reply:
                refusals.append((await reply.json())["because"])
            if reply.status == 200:
                break
        assert reply.status == 200, refusals
        replay = [e for e in chat.recorder.exchanges if _is_replay(e)][-1]
        sent = replay.request["messages"]
        assert sent[:-2] == turn.request["messages"][: 1 + to]
        assert [message["role"] for message in sent[-3:]] == ["user", "assistant", "user"]
        assert replay.new <= sum(server.count_text(message["content"]) for message in sent[-2:]) + SPARE_TOKENS

        chat.messages.append(chat.script.user())
        later, headers = await chat.turn()
        assert headers["x-warmfold-covered"] == str(to)
        assert _alternates(later.request["messages"])
        assert later.prompt < turn.prompt
