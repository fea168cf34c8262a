"""What the tests of the core build on: conversations in a short notation, checkpoints that apply, sizes as an operator sets them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from proxy.core import checkpoint as checkpoints
from proxy.core import conversation as conversations
from proxy.core import fingerprint, openai
from proxy.core.conversation import Conversation
from proxy.core.limits import Limits
from proxy.core.limits import limits as limits_of
from proxy.core.model import Checkpoint, CheckpointRef, Facts, Scope, Window
from tests.strategies import spelled

_REPOSITORY = Path(__file__).parents[2]
CONVERSATIONS = _REPOSITORY / os.getenv("WARMFOLD_CONVERSATIONS", "../shared/conversations")
WIRE = _REPOSITORY / os.getenv("WARMFOLD_WIRE", "../shared/wire")


@dataclass(frozen=True, slots=True)
class Policy:
    """The keys of [compaction] that the core reads, with their documented defaults."""

    trigger_ratio: float = 0.75
    hard_ratio: float = 0.92
    budget_tokens: int = 0
    debounce_turns: int = 3
    keep_head_messages: int = 0
    keep_recent_turns: int = 2
    keep_recent_tokens: int = 8000
    min_region_tokens: int = 1024
    max_summary_tokens: int = 4096
    ledger_tokens: int = 2000
    anchor_tokens: int = 500
    replay_scope: str = "warm"
    summary_prompt: str = ""
    keep_response_format: bool = False


def limits(tokens: int = 32_000, origin: str = "config", *, reasons: bool = False, **keys: Any) -> Limits:
    """The sizes for a window."""
    return limits_of(Policy(**keys), Window(tokens, origin), reasons=reasons)


def message(word: str) -> dict[str, Any]:
    """One message in short: role letter, then ids.

    u user, a assistant, s system, d developer, 0 user with null content; a:x,y calls x and y; t:x result of x; l:name legacy call,
    f:name its result; A:x tool_use part, U:x,y tool_result parts. A number behind * repeats a word that often as its text.
    """
    word, _, times = word.partition("*")
    kind, _, ids = word.partition(":")
    names = ids.split(",") if ids else []
    text = "word " * int(times or 1)
    roles = {"u": "user", "a": "assistant", "s": "system", "d": "developer"}
    if kind == "a" and names:
        calls = [{"id": i, "type": "function", "function": {"name": "read", "arguments": "{}"}} for i in names]
        return {"role": "assistant", "content": text if times else None, "tool_calls": calls}
    if kind in roles:
        return {"role": roles[kind], "content": text}
    if kind == "0":
        return {"role": "user", "content": None}
    if kind == "t":
        return {"role": "tool", "tool_call_id": names[0], "content": text}
    if kind == "l":
        return {"role": "assistant", "content": None, "function_call": {"name": names[0], "arguments": "{}"}}
    if kind == "f":
        return {"role": "function", "name": names[0], "content": text}
    if kind == "A":
        return {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": i, "name": "read", "input": {}} for i in names],
        }
    if kind == "U":
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": i, "content": text} for i in names]}
    raise ValueError(word)


def talk(notation: str) -> list[dict[str, Any]]:
    """A conversation in short, words parted by blanks."""
    return [message(word) for word in notation.split()]


def elements(messages: Sequence[Any]) -> tuple[bytes, ...]:
    """Messages as bytes."""
    return tuple(spelled(m) for m in messages)


def facts_of(messages: Sequence[Any] | str) -> tuple[Facts, ...]:
    """The facts of messages, or of a notation."""
    return tuple(fingerprint.facts(e) for e in elements(talk(messages) if isinstance(messages, str) else messages))


def body_of(messages: Sequence[Any] | str, **members: Any) -> bytes:
    """A request with these messages and members."""
    return spelled(
        {"model": "m", **members, "messages": talk(messages) if isinstance(messages, str) else list(messages)}
    )


def read(body: bytes, *, tenant: str = "tenant", explicit: str = "") -> Conversation:
    """The conversation of a request that is one."""
    request = openai.read(body)
    assert request is not None
    found = conversations.read(request, [fingerprint.facts(m) for m in request.messages], tenant, explicit)
    assert found is not None
    return found


def checkpoint(
    conversation: Conversation,
    k: int,
    *,
    from_: int = 0,
    seen_len: int | None = None,
    text: str = "What happened so far.",
    id: str = "ckpt",
    **ref: Any,
) -> Checkpoint:
    """A checkpoint over [from_, k) of this very conversation, made by a summariser that read `seen_len` messages (else k)."""
    seen_len = k if seen_len is None else seen_len
    claim = CheckpointRef(
        id=id,
        generation=1,
        from_=from_,
        k=k,
        digest_k=conversation.chain[k - 1],
        seen_len=seen_len,
        seen=conversation.chain[seen_len - 1],
        preamble=conversation.preamble,
    )
    return Checkpoint(
        ref=replace(claim, **ref),
        session="tenant-root-lineage",
        text=text,
        ledger=(),
        anchors=(),
        frame=checkpoints.frame(text),
        region_tokens=1000,
        checkpoint_tokens=50,
        model="m",
        scope=Scope.WARM,
        strategy="replay",
        made_at_ms=1,
    )


def calls_and_results(messages: Sequence[Any]) -> list[tuple[int, int]]:
    """Which call each result belongs to, as positions, found the slow way: the judge of `region`.

    Going back from a result, the first call of its id that has no result yet; where all have one, the nearest of its id.
    """
    made: dict[tuple[str, object], list[tuple[int, int]]] = {}
    answered: set[tuple[int, int]] = set()
    pairs = []
    for at, message in enumerate(messages):
        for wanted in _results(message):
            same_id = made.get(wanted, [])[::-1]
            open_ones = [place for place in same_id if place not in answered]
            if same_id:
                place = (open_ones or same_id)[0]
                answered.add(place)
                pairs.append((place[0], at))
        for slot, name in enumerate(_calls(message)):
            made.setdefault(name, []).append((at, slot))
    return pairs


def _calls(message: Any) -> list[tuple[str, object]]:
    if not isinstance(message, Mapping):
        return []
    found = [("id", call.get("id") or "") for call in message.get("tool_calls") or []]
    if message.get("function_call"):
        found.append(("name", message["function_call"]["name"]))
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return found + [("id", part["id"]) for part in parts if part["type"] == "tool_use"]


def _results(message: Any) -> list[tuple[str, object]]:
    if not isinstance(message, Mapping):
        return []
    if message["role"] == "tool":
        return [("id", message.get("tool_call_id") or "")]
    if message["role"] == "function":
        return [("name", message["name"])]
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return [("id", part["tool_use_id"]) for part in parts if part["type"] == "tool_result"]


def is_whole(messages: Sequence[Any], cut: int) -> bool:
    """Whether no result behind the cut belongs to a call in front of it."""
    return not any(call < cut <= result for call, result in calls_and_results(messages))


def recorded() -> list[tuple[str, list[Any]]]:
    """The recorded conversations, by name; none where the folder is absent."""
    files = sorted(CONVERSATIONS.glob("*.json"))
    return [(file.stem, json.loads(file.read_bytes())["messages"]) for file in files]


NO_OBJECTS = (
    pytest.param(b"", id="nothing"),
    pytest.param(b"x", id="no JSON"),
    pytest.param(b"[]", id="a list"),
    pytest.param(b"null", id="null"),
    pytest.param(b'{"a":1', id="broken off"),
    pytest.param(b'{"a":1,}', id="a comma too many"),
    pytest.param(b'{"a":1}{}', id="something behind"),
    pytest.param(b'{"a":NaN}', id="NaN"),
    pytest.param(b"\xef\xbb\xbf{}", id="byte order mark"),
    pytest.param('{"a":1}'.encode("utf-16"), id="UTF-16"),
    pytest.param(b"[" * 1_000_000, id="a million brackets"),
    pytest.param(b'{"a":' * 1_000_000, id="a million objects"),
    pytest.param(b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}", id="5,000 levels"),
    pytest.param(b'{"a":1,"a":1}', id="a key twice, equal values"),
    pytest.param(b'{"a":1,"a":2}', id="a key twice"),
    pytest.param(b'{"a":12,"a":1}', id="a key twice, the first value starts like the last"),
    pytest.param(b'{"a":1,"b":2,"a":1}', id="a key twice, another between"),
    pytest.param(b'{"a":1,"a":"xx}xxxx"}', id="a key twice, a brace where the first value would end"),
    pytest.param(b'{"a":1,"\\u0061":1}', id="a key twice in two spellings"),
    pytest.param(b'{"\xff":1}', id="a key that is no UTF-8"),
)
"""Bodies that no one may take apart: no object, broken, a key twice, too deep."""
