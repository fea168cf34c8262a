"""A client that plays the demo's conversation against a base URL, turn by turn, and keeps the score."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from proxy.demo.calls import Call
from proxy.demo.conversation import Conversation
from proxy.demo.provider import SimulatedProvider
from proxy.demo.template import Message, Request, render

MODEL = "demo-model"
_HEADERS = {"Authorization": "Bearer demo"}


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn took: tokens of the history as the client keeps it, of the prompt as the provider got it, and of that from its cache."""

    number: int
    history_tokens: int
    prompt_tokens: int
    cached_tokens: int
    used_tokens: int
    checkpoint: str
    covered: str
    compaction: str


@dataclass(frozen=True, slots=True)
class Score:
    """How one way of dealing with the window came off. Tokens are prompt tokens that the provider had to compute."""

    name: str
    served: int
    turns: int
    computed: int
    compactions: tuple[Call, ...]
    answered: int
    questions: int

    @property
    def compaction_computed(self) -> int:
        """What the compactions alone took."""
        return sum(call.new for call in self.compactions)

    @property
    def compaction_cached(self) -> float | None:
        """The share of the compactions' prompts that came from the cache; None where there was none."""
        prompts = sum(call.prompt_tokens for call in self.compactions)
        return sum(call.cached for call in self.compactions) / prompts if prompts else None


Shorten = Callable[[Sequence[Message], int], Awaitable[list[Message]]]
"""From the history and the tokens of the last turn to the history to go on with."""
OnTurn = Callable[[Turn], Awaitable[None]]


class Client:
    """Sends chat completions to one base URL."""

    def __init__(self, http: aiohttp.ClientSession, base_url: str) -> None:
        base = base_url.rstrip("/")
        self._url = f"{base}/chat/completions" if base.endswith("/v1") else f"{base}/v1/chat/completions"
        self._http = http

    async def send(self, request: Request) -> tuple[Message, int, Mapping[str, str]] | None:
        """The assistant message, the tokens used in all, and the headers; None where the request was refused."""
        async with self._http.post(self._url, json=request, headers=_HEADERS) as reply:
            if reply.status != 200:
                return None
            answer = await reply.json()
            message = answer["choices"][0]["message"]
            kept = {key: value for key, value in message.items() if value is not None or key == "content"}
            return kept, answer["usage"]["total_tokens"], reply.headers

    async def say(self, request: Request) -> Message | None:
        """The assistant message alone."""
        answer = await self.send(request)
        return answer[0] if answer else None


async def play(
    name: str,
    conversation: Conversation,
    provider: SimulatedProvider,
    client: Client,
    *,
    shorten: Shorten | None = None,
    on_turn: OnTurn | None = None,
) -> Score:
    """The score after the whole conversation and its questions, or after the turn that no longer fitted."""
    tools = list(conversation.tools)
    history: list[Message] = list(conversation.system)
    full: list[Message] = list(history)
    served = used = 0
    for number, step in enumerate(conversation.steps, 1):
        history += step.incoming
        full += step.incoming
        if shorten is not None:
            history = await shorten(history, used)
        provider.next_reply = step.reply
        answer = await client.send({"model": MODEL, "messages": history, "tools": tools})
        if answer is None:
            break
        message, used, headers = answer
        served = number
        history.append(message)
        if on_turn is not None:
            call = provider.turns[-1]
            await on_turn(
                Turn(
                    number=number,
                    history_tokens=len(render({"messages": full, "tools": tools})),
                    prompt_tokens=call.prompt_tokens,
                    cached_tokens=call.cached,
                    used_tokens=used,
                    checkpoint=headers.get("x-warmfold-checkpoint", ""),
                    covered=headers.get("x-warmfold-covered", ""),
                    compaction=headers.get("x-warmfold-compaction", ""),
                )
            )
        full.append(message)
    computed = sum(call.new for call in provider.calls if call.status == 200)
    compactions = tuple(call for call in provider.compactions if call.status == 200)
    provider.next_reply = None
    answered = await _answered(conversation, client, history, tools)
    return Score(name, served, len(conversation.steps), computed, compactions, answered, len(conversation.questions))


async def _answered(
    conversation: Conversation, client: Client, history: list[Message], tools: list[dict[str, object]]
) -> int:
    """How many of the questions are answered right, asked all at once."""
    asked = {"role": "user", "content": " ".join(question.text for question in conversation.questions)}
    answer = await client.say({"model": MODEL, "messages": [*history, asked], "tools": tools})
    lines = set((answer["content"] or "").splitlines()) if answer else set()
    return sum(question.answer in lines for question in conversation.questions)
