"""A client that writes its requests by hand, byte for byte, and what to look at in what the provider got of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from proxy.demo.calls import Call
from tests.journeys.player import Answered, Player
from tests.journeys.talks import prose

FRAME = b"<checkpoint_summary"
ROOMY = {"compaction__max_context_tokens": 32_000, "compaction__when": "after_turn"}
"""A window in which nothing happens unasked."""


def compact(value: object) -> bytes:
    """JSON without blanks, as most SDKs write it; half surrogate pairs as escapes."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def said(role: str, about: object, words: int = 80, **more: Any) -> bytes:
    """A message in text that no other one shares."""
    return compact({"role": role, "content": prose((role, about), words), **more})


def exchanges(number: int, words: int = 80) -> list[bytes]:
    """So many user messages, each with its answer."""
    return [said(role, at, words) for at in range(number) for role in ("user", "assistant")]


@dataclass
class Writer:
    """`head` + messages joined by "," + `tail` is what it sends. `preamble`: how many of the messages are the preamble."""

    player: Player
    head: bytes = b'{"model":"demo-model","messages":['
    tail: bytes = b"]}"
    messages: list[bytes] = field(default_factory=list)
    preamble: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    session: str = ""

    @property
    def body(self) -> bytes:
        """The request as it stands."""
        return self.head + b",".join(self.messages) + self.tail

    async def send(self, *more: bytes, status: int = 200, **headers: str) -> Answered:
        """All that was said, and more. Returns when nothing runs behind it any longer."""
        self.messages += more
        got = await self.player.post(self.body, **{**self.headers, **headers})
        await self.player.settled()
        assert got.status == status, got.body
        self.session = got.headers.get("x-warmfold-session", self.session)
        return got

    async def compact(self, to: int) -> Call:
        """An operator has the first `to` messages of the conversation covered: the call that was made for it."""
        before = len(self.player.provider.compactions)
        done = await self.ask_to_compact(to)
        assert done["outcome"] == "committed", done
        (call,) = self.player.provider.compactions[before:]
        return call

    async def ask_to_compact(self, to: int) -> Any:
        """The admin listener's answer to that wish."""
        return await self.player.admin(
            f"/sessions/{self.session}/compact",
            "POST",
            json={"from": 0, "to": to},
            headers={"x-upstream-authorization": self.player.headers["Authorization"]},
        )

    @property
    def sent(self) -> bytes:
        """What the provider got last that was no compaction."""
        return self.player.provider.turns[-1].raw

    def replaced(self, covered: int) -> bytes:
        """What the provider got in place of the covered messages and the first one behind them, when all around them came as it was sent."""
        at = self.preamble + covered
        front = self.head + b"".join(message + b"," for message in self.messages[: self.preamble])
        behind = b"".join(b"," + message for message in self.messages[at + 1 :]) + self.tail
        assert self.sent.startswith(front)
        assert self.sent.endswith(behind)
        assert FRAME in self.sent
        return self.sent[len(front) : len(self.sent) - len(behind)]

    def replayed(self, call: Call) -> bytes:
        """What a compaction call has behind the messages of this request, all of which it repeats as they were sent."""
        front = b",".join(self.messages)
        assert front in call.raw
        return call.raw[call.raw.index(front) + len(front) :]
