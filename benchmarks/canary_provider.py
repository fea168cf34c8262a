"""A provider that looks for foreign canaries: `python -m benchmarks.canary_provider --port N`.

Each text of a client carries a canary, `cnry-CONVERSATION-BRANCH-NUMBER`, and each request's last message says whose request it is and
which canaries are its own: `own=TENANT/CONVERSATION/BRANCH:FIRST-LAST,...;`. Without that it is an opening, which has none. Every canary
anywhere in a request that is not among them is foreign, and so is a credential of another tenant. A compaction request has no last message
of the client's: it is judged by the header `x-own` of the request that it was made for, which says the same. Summaries pass on the canaries
that their author has read. Nothing is kept but counts and a few examples; GET shows them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import uvloop

OPENING_ANSWER: Final = b"Noted."
_CANARY: Final = re.compile(rb"cnry-(\d+)-(\d+)-(\d+)\.")
_OWN: Final = re.compile(rb"own=(\d+)/(\d+)/([\d:,-]+);")
_USER: Final = b'{"role":"user","content":"'
_ENGINE: Final = _USER + b"You are now acting as a compaction engine"
_FRAME_END: Final = b"do not acknowledge this note."
_CARRIED: Final = 6, 12
"""Canaries that a summary passes on: the first ones and the last ones read."""
_SLOWEST_MS: Final = 41
_EXAMPLES: Final = 8

Ranges = Sequence[tuple[int, int, int]]
"""Branch, first and last number."""


def canary(conversation: int, branch: int, number: int) -> bytes:
    """A text that nobody else writes."""
    return b"cnry-%d-%d-%d." % (conversation, branch, number)


def own(tenant: int, conversation: int, ranges: Ranges) -> bytes:
    """What a request's last message says."""
    return b"own=%d/%d/%b;" % (tenant, conversation, b",".join(b"%d:%d-%d" % one for one in ranges))


def answer(newest: bytes) -> bytes:
    """What is answered to a request whose last message carries this canary."""
    return b"That part is done: " + newest if newest else OPENING_ANSWER


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose request it is. None and no ranges for an opening. `newest`: the canary of its last message."""

    tenant: int | None
    conversation: int | None
    ranges: tuple[tuple[int, int, int], ...]
    newest: bytes

    @classmethod
    def of(cls, text: bytes) -> Owner:
        """What a text says."""
        said, marks = _OWN.search(text), _CANARY.findall(text)
        newest = canary(*map(int, marks[-1])) if marks else b""
        if said is None:
            return cls(None, None, (), newest)
        ranges = (tuple(map(int, re.split(rb"[:-]", one))) for one in said[3].split(b","))
        return cls(int(said[1]), int(said[2]), tuple((b, first, last) for b, first, last in ranges), newest)

    def has(self, conversation: int, branch: int, number: int) -> bool:
        """Whether a canary is its own."""
        return conversation == self.conversation and any(
            branch == b and first <= number <= last for b, first, last in self.ranges
        )


class Judge:
    """What has been seen so far."""

    def __init__(self) -> None:
        self.seen = {"requests": 0, "compactions": 0, "rewritten": 0, "canaries": 0, "foreign": 0, "tainted": 0}
        self.examples: list[str] = []

    def judge(self, head: bytes, body: bytes) -> tuple[bytes, float]:
        """The answer to a request, and after how many seconds. `head`: request line and headers in lower case."""
        is_compaction = _ENGINE in body
        # Behind a checkpoint that may stand in front of the last message.
        last = body[body.rfind(_USER) :].rpartition(_FRAME_END)[2]
        owner = Owner.of(head.partition(b"\r\nx-own:")[2].partition(b"\r\n")[0] if is_compaction else last)
        found = [(int(c), int(b), int(n)) for c, b, n in _CANARY.findall(body)]
        foreign = [one for one in found if not owner.has(*one)]
        mine = owner.tenant is None or b"authorization: bearer sk-%d\r" % owner.tenant in head + b"\r"
        self._count(owner, len(found), foreign, mine=mine, rewritten=_FRAME_END in body, compaction=is_compaction)
        if not is_compaction:
            return answer(owner.newest), 0.0
        read = list(dict.fromkeys(found))
        first, newest = _CARRIED
        carried = b" ".join(canary(*one) for one in (*read[:first], *read[first:][-newest:]))
        # A model takes its time, and other requests of the conversation come meanwhile.
        return b"## Task and intent\\nGo on.\\n\\n## Decisions\\n" + carried, len(body) % _SLOWEST_MS / 1000

    def _count(
        self, owner: Owner, found: int, foreign: Sequence[object], *, mine: bool, rewritten: bool, compaction: bool
    ) -> None:
        self.seen["requests"] += 1
        self.seen["compactions"] += compaction
        self.seen["rewritten"] += rewritten and not compaction
        self.seen["canaries"] += found
        self.seen["foreign"] += len(foreign)
        if not foreign and mine:
            return
        self.seen["tainted"] += 1
        if len(self.examples) < _EXAMPLES:
            what = "compaction" if compaction else "turn"
            self.examples.append(f"{what} of {owner}: {sorted(set(map(str, foreign)))[:5]}, own credential: {mine}")


class Provider(asyncio.Protocol):
    """One connection. It reads as much of HTTP/1.1 as warmfold sends: Content-Length only."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep where the answer goes."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Answer once the request is whole."""
        self._data += data
        at = self._data.find(b"\r\n\r\n")
        if at < 0:
            return
        head = bytes(self._data[:at]).lower()
        if not head.startswith(b"post"):
            self._data.clear()
            self._send(json.dumps({"seen": self._judge.seen, "examples": self._judge.examples}).encode())
            return
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(self._data) < at + 4 + length:
            return
        body = bytes(self._data[at + 4 :])
        self._data.clear()
        text, wait_s = self._judge.judge(head, body)
        completion = _completion(text, len(body) // 4)
        if wait_s:
            asyncio.get_running_loop().call_later(wait_s, self._send, completion)
        else:
            self._send(completion)

    def _send(self, body: bytes) -> None:
        if not self._transport.is_closing():
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
            self._transport.write(head + body)


def _completion(text: bytes, prompt: int) -> bytes:
    """A chat completion. `text` is written into a JSON string as it is."""
    return (
        b'{"id":"chatcmpl-canary","object":"chat.completion","created":1700000000,"model":"stub","choices":[{"index":0,"message":'
        b'{"role":"assistant","content":"%b"},"finish_reason":"stop"}],"usage":{"prompt_tokens":%d,"completion_tokens":%d,'
        b'"total_tokens":%d}}' % (text, prompt, len(text) // 4, prompt + len(text) // 4)
    )


async def _serve(port: int) -> None:
    judge = Judge()
    server: Any = await asyncio.get_running_loop().create_server(
        lambda: Provider(judge), "127.0.0.1", port, backlog=1024
    )
    await server.serve_forever()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.canary_provider", description="A provider that looks for foreign canaries."
    )
    parser.add_argument("--port", type=int, required=True, help="port on 127.0.0.1")
    uvloop.run(_serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
