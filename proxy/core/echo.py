"""Does the client send an answer back as it got it?

A replay reads the answer to the warm request, and the summary may speak of it. A user may have it made anew, or edit it: then the summary
is about words that are not in the conversation any more. Some clients reword every answer (they strip it, or lay it out anew).
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.core import said
from proxy.core.fingerprint import byte_hash
from proxy.core.model import Checkpoint, Digest, Session
from proxy.core.thoughts import without_thoughts


def answered(element: bytes) -> Digest | None:
    """Names the text of an assistant message, thoughts and white space apart; None where it calls a tool or is no assistant's.

    All else that SDKs send back with an answer (`refusal`, `annotations`, `name`) does not count.
    """
    message = said.parsed(element)
    if (
        message is None
        or said.role(message) != "assistant"
        or message.get("tool_calls")
        or message.get("function_call")
    ):
        return None
    return byte_hash(" ".join(without_thoughts(said.text(message)).split()).encode())


def refutes(messages: Sequence[bytes], checkpoint: Checkpoint) -> bool:
    """Whether the conversation holds another answer than the one that the checkpoint's summariser read behind `seen`."""
    at = checkpoint.ref.seen_len
    return bool(checkpoint.answer) and at < len(messages) and answered(messages[at]) != checkpoint.answer


def may_be_read(known: Session | None, messages: Sequence[bytes]) -> bool:
    """Whether a replay of this request may hold the answer that comes now.

    Not where the client reworded the last answer, nor where it asks for one anew: a summary of such an answer would be of no use.
    """
    if known is None or known.turn is None:
        return True
    if known.length >= len(messages):
        return False
    return known.turn.answer is None or answered(known.turn.answer) == answered(messages[known.length])
