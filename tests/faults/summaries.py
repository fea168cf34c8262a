"""Answers to compaction calls, written by hand, and clients at work while they are given."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from proxy.demo.calls import Call, Forced
from proxy.demo.template import render
from tests.journeys.player import Player
from tests.journeys.talks import SYSTEM, Message, assistant, prose, user

SUMMARY = (
    "## Task and intent\nRebuild the order import.\n## Decisions\nKeep the old table until Friday.\n"
    "## State of the work\nThe reader is done, the writer is not.\n## Next steps\nWrite the writer."
)
"""A checkpoint under some of the headings that were asked for."""

WINDOW = 8000
"""Tokens, of a window in which a few turns are enough."""

LOOK: Message = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def completion(message: Mapping[str, Any] | str = SUMMARY, finish: object = "stop", **choice: Any) -> Forced:
    """A 200 with one choice. `finish` Ellipsis: it has no finish reason at all."""
    told = {"content": message} if isinstance(message, str) else message
    made = {"index": 0, "message": {"role": "assistant", **told}, "finish_reason": finish, **choice}
    if finish is ...:
        del made["finish_reason"]
    usage = {"prompt_tokens": 4000, "completion_tokens": 100, "total_tokens": 4100}
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [made], "usage": usage}
    return Forced(body=json.dumps(body).encode())


def flags(window: int = WINDOW, **more: Any) -> dict[str, object]:
    """Compaction right after the turn, in a window that the operator named; `more` are keys of [compaction]."""
    keys = {"max_context_tokens": window, "when": "after_turn", **more}
    return {f"compaction__{key}": value for key, value in keys.items()}


def history(tokens: int) -> list[Message]:
    """A conversation of about so many tokens; it ends on the user."""
    messages = [SYSTEM, user("task", 40)]
    while len(render({"messages": messages})) < tokens:
        messages += [assistant(len(messages), 50), user(len(messages), 60)]
    return messages


async def by_hand(player: Player, session: str, to: int) -> Any:
    """The admin listener's answer to the wish that the first `to` messages of a conversation be covered."""
    return await player.admin(
        f"/sessions/{session}/compact",
        "POST",
        json={"from": 0, "to": to},
        headers={"x-upstream-authorization": player.headers["Authorization"]},
    )


class Summaries:
    """What compaction calls are answered: the first the first, and all behind the last one the last. None: the provider's own."""

    def __init__(self, *answers: Forced | None) -> None:
        self._answers = list(answers)

    def __call__(self, call: Call) -> Forced | None:
        if not call.is_compaction:
            return None
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


class Gate:
    """Holds the first compaction call until it is opened; `answer` is what that call gets then, None: the provider's own."""

    def __init__(self, answer: Forced | None = None) -> None:
        self.answer = answer
        self._open = asyncio.Event()
        self._held = False

    async def __call__(self, call: Call) -> Forced | None:
        if not call.is_compaction or self._held:
            return None
        self._held = True
        await self._open.wait()
        return self.answer

    def open(self) -> None:
        """Let it go on."""
        self._open.set()


def answer(body: bytes) -> Message:
    """The assistant message that a client makes of what it got, streamed or whole."""
    if body.startswith(b"{"):
        whole: str = json.loads(body)["choices"][0]["message"]["content"]
        return {"role": "assistant", "content": whole}
    events = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return {"role": "assistant", "content": "".join(delta.get("content") or "" for delta in deltas)}


async def work(player: Player, messages: list[Message], number: int, words: int = 60, **members: Any) -> list[Any]:
    """An agent that makes one tool call after another; call and result are added to `messages`. The answers' headers."""
    seen = []
    for _ in range(number):
        id_ = f"call_{len(messages):09d}"
        function = {"name": "look", "arguments": json.dumps({"file": len(messages)})}
        calling = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": id_, "type": "function", "function": function}],
        }
        player.provider.next_reply = calling
        got = await player.post({"model": "demo-model", "tools": [LOOK], **members, "messages": messages})
        await player.settled()
        assert got.status == 200, got.body
        seen.append(got.headers)
        messages += [calling, {"role": "tool", "tool_call_id": id_, "content": prose(("result", id_), words)}]
    return seen
