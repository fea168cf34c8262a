"""Thoughts that a model writes into its text."""

from __future__ import annotations

import re

_THOUGHT = r"think|thinking|thought|reasoning"
_OPEN_THOUGHT = re.compile(rf"\s*<({_THOUGHT})>", re.IGNORECASE)
_CLOSE_THOUGHT = re.compile(rf"</({_THOUGHT})>", re.IGNORECASE)


def without_thoughts(raw: str) -> str:
    """The text behind a leading block of thoughts; "" where the block never ends.

    Only at the start: a checkpoint may quote such a tag. Some templates write the opening tag into the prompt: then the answer
    starts inside the block, and a closing tag without an opening one ends it.
    """
    text = raw
    while opening := _OPEN_THOUGHT.match(text):
        closing = re.compile(rf"</{opening[1]}>", re.IGNORECASE).search(text, opening.end())
        if closing is None:
            return ""
        text = text[closing.end() :]
    stray = _CLOSE_THOUGHT.search(text)
    if (
        stray
        and "`" not in text[: stray.start()]
        and not re.search(rf"<({_THOUGHT})>", text[: stray.start()], re.IGNORECASE)
    ):
        text = text[stray.end() :]
    return text.strip()
