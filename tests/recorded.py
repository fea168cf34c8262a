"""Recorded conversations as the requests that a client would have sent. They are read from where WARMFOLD_CONVERSATIONS says; never copied."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path(os.environ.get("WARMFOLD_CONVERSATIONS") or ROOT.parent / "shared" / "conversations")

_SET_BY_US = frozenset({"stream", "stream_options", "messages", "model", "tools"})


@dataclass(frozen=True)
class Step:
    """One request of a recorded client and the answer it got; `reply` None: the recording ends before it."""

    request: dict[str, Any]
    reply: dict[str, Any] | None

    def body(self) -> bytes:
        """As an SDK writes it."""
        return json.dumps(self.request, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def names() -> list[str]:
    """The conversations that are there; none where the folder is absent."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str) -> Mapping[str, Any]:
    """A recording: messages, tools, params, model."""
    found: Mapping[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def steps(recording: Mapping[str, Any], *, stream: bool = False) -> Iterator[Step]:
    """One request per assistant message that answers something: everything before it. The last may be unanswered."""
    messages = recording["messages"]
    shared = {k: v for k, v in (recording.get("params") or {}).items() if k not in _SET_BY_US}
    ends = [
        (at, message)
        for at, message in enumerate(messages)
        if message.get("role") == "assistant" and at and messages[at - 1].get("role") != "assistant"
    ]
    if messages and messages[-1].get("role") != "assistant":
        ends.append((len(messages), None))
    for end, reply in ends:
        request: dict[str, Any] = {"model": recording.get("model") or "gpt-4o", "messages": messages[:end]}
        if recording.get("tools"):
            request["tools"] = recording["tools"]
        request.update(shared)
        if stream:
            request |= {"stream": True, "stream_options": {"include_usage": True}}
        yield Step(request, reply)
