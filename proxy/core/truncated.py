"""Did the provider read less than it was sent, and say nothing of it? And what does that teach?

Some servers drop the beginning of a prompt that is too long and answer the rest (Ollama). Others count only what they had not cached. In either case
the count says nothing about how full the window is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from proxy.core import overflow, said, tokens
from proxy.core.conversation import Conversation
from proxy.core.model import Checkpoint

LESSON_TIMES = 3
LESSON_FLOOR_TOKENS = 2048
"""Ollama's default context before 2025, and the shortest that a chat model is served with. A smaller count is some stub's constant."""

_MAX_ATTACHED_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Truncated:
    """The provider counted `counted` prompt tokens, where the text in the prompt alone is estimated at `text`."""

    counted: int
    text: int


def truncated(
    conversation: Conversation, applied: Checkpoint | None, counted: int | None, weight: int
) -> Truncated | None:
    """What the count of a routed request gives away; None where it is no fewer than may be. `weight`: the estimate of all of the prompt.

    Judged by the text alone, which every provider counts: images are priced in many ways, thoughts of earlier turns are dropped by many
    templates, and not every server knows tools. `weight` is no less than that, so most turns are settled without a look at their messages.
    """
    if counted is None or not overflow.silent(counted, weight):
        return None
    text = text_tokens(conversation, applied)
    return Truncated(counted, text) if overflow.silent(counted, text) else None


def text_tokens(conversation: Conversation, applied: Checkpoint | None) -> int:
    """Estimated tokens of what is said in the routed request, in words and in the arguments of calls."""
    messages = conversation.messages
    sent = messages if applied is None else (*messages[: applied.from_], *messages[applied.k :])
    total = tokens.of_text(applied.frame) if applied is not None else 0
    for element in (*conversation.request.messages[: conversation.preamble_length], *sent):
        # A large message with an attachment in it is next to no text, and takes long to read.
        if len(element) > _MAX_ATTACHED_BYTES and b";base64," in element:
            continue
        if (message := said.parsed(element)) is not None:
            total += tokens.of_text(said.text(message))
            total += sum(tokens.of_text(arguments) for _, arguments in said.calls(message))
    return total


@dataclass(frozen=True, slots=True)
class Suspicion:
    """The same count came `times` times in a row, each time for more text; the last time for `text` tokens of it."""

    counted: int
    text: int
    times: int = 1

    @property
    def limit(self) -> int | None:
        """The window that this teaches; None as long as it may be chance."""
        return self.counted if self.times >= LESSON_TIMES and self.counted >= LESSON_FLOOR_TOKENS else None


def suspected(before: Suspicion | None, found: Truncated) -> Suspicion:
    """What is suspected of a model after one more such count.

    A count that stands still while the text grows is where the prompt is cut. One that moves tells nothing: whole messages are dropped, or
    only what is new is counted. A wrong lesson would compact every conversation down to it, in front of its requests, so anything but
    equal counts starts anew.
    """
    if before is None or before.counted != found.counted:
        return Suspicion(found.counted, found.text)
    return replace(before, text=found.text, times=before.times + 1) if found.text > before.text else before
