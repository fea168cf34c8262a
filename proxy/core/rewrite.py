"""The client's request with a checkpoint in place of what it covers: preamble, kept head, checkpoint, tail verbatim.

The checkpoint is a user message. Where the tail begins with a user message it is spliced into that one, in front, so that no two
user messages meet that did not meet before. All other bytes of the tail stay as they came.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core import echo, jsonslice, region
from proxy.core.conversation import Conversation
from proxy.core.jsonslice import NotSliceable
from proxy.core.model import Checkpoint, Recalled
from proxy.core.openai import ChatRequest


@dataclass(frozen=True, slots=True)
class Routed:
    """A request on its way to the provider. `messages` are its elements as sent, preamble included; `applied` what stands in them.

    `body` is the client's own bytes where nothing was applied.
    """

    body: bytes
    messages: tuple[bytes, ...]
    applied: Checkpoint | None


def as_sent(request: ChatRequest) -> Routed:
    """The client's request as it came."""
    return Routed(request.body, request.messages, None)


def applicable(recalled: Recalled | None, conversation: Conversation) -> Checkpoint | None:
    """The checkpoint for this request: its own session's, else one of another session with an equal preamble.

    This is the one gate between a checkpoint and a request, wherever it comes from: a wrong one would hand text to a stranger.
    """
    if recalled is None:
        return None
    if recalled.own is not None and _covers(recalled.own, conversation):
        return recalled.own
    for checkpoint in recalled.foreign:
        if checkpoint.ref.preamble == conversation.preamble and _covers(checkpoint, conversation):
            return checkpoint
    return None


def _covers(checkpoint: Checkpoint, conversation: Conversation) -> bool:
    """Whether covered and seen prefix are this request's, with at least one message left for the tail, and nothing since speaks against it."""
    ref, chain = checkpoint.ref, conversation.chain
    if ref.dead or not 0 <= ref.from_ < ref.k < len(chain) or not ref.k <= ref.seen_len <= len(chain):
        return False
    on_chain = chain[ref.k - 1] == ref.digest_k and chain[ref.seen_len - 1] == ref.seen
    return on_chain and not is_outdated(conversation, checkpoint)


def is_outdated(conversation: Conversation, checkpoint: Checkpoint) -> bool:
    """Whether what came after it speaks against a checkpoint of this chain: the answer it read was another, or a covered call's result is here."""
    ref, facts = checkpoint.ref, conversation.facts
    return region.parts(facts, (ref.from_, ref.k)) or echo.refutes(conversation.messages, checkpoint)


def route(request: ChatRequest, preamble_length: int, checkpoint: Checkpoint | None) -> Routed:
    """The request with the checkpoint applied, or as it came where there is none or it cannot be put in."""
    if checkpoint is None:
        return as_sent(request)
    messages = substitute(request.messages, preamble_length, checkpoint)
    if messages is None:
        return as_sent(request)
    return Routed(request.head + b",".join(messages) + request.tail, messages, checkpoint)


def substitute(messages: Sequence[bytes], preamble_length: int, checkpoint: Checkpoint) -> tuple[bytes, ...] | None:
    """All messages with [from_, k) replaced; None where the tail cannot take the checkpoint."""
    k = preamble_length + checkpoint.k
    tail = with_checkpoint(messages[k:], checkpoint.frame)
    if tail is None:
        return None
    return (*messages[: preamble_length + checkpoint.from_], *tail)


def with_checkpoint(tail: Sequence[bytes], frame: str) -> tuple[bytes, ...] | None:
    """The checkpoint and the tail: spliced into a user message in front, else as a message of its own. None: no place for it."""
    if not tail:
        return None
    try:
        fields = {m.key: m for m in jsonslice.members(tail[0])}
        role = json.loads(tail[0][fields["role"].start : fields["role"].end])
    except (NotSliceable, KeyError, ValueError):
        return None
    text = encode(frame)
    if role != "user":
        return (b'{"role":"user","content":%s}' % text, *tail)
    content = fields.get("content")
    if content is None:
        return None
    spliced = _splice(tail[0], content.start, text)
    return None if spliced is None else (spliced, *tail[1:])


def _splice(element: bytes, at: int, text: bytes) -> bytes | None:
    """The message with the frame (a JSON string) in front of its content, which starts at `at`; None for null content."""
    if element[at : at + 1] == b'"':
        return element[: at + 1] + text[1:-1] + rb"\n\n" + element[at + 1 :]
    if element[at : at + 1] == b"[":
        rest = element[at + 1 :]
        comma = b"" if rest.lstrip(b" \t\r\n")[:1] == b"]" else b","
        return element[: at + 1] + b'{"type":"text","text":%s}' % text + comma + rest
    return None


def encode(text: str) -> bytes:
    """A JSON string, quotes included: always the same bytes for the same text."""
    return json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")
