"""Thoughts that a model writes into its text."""

from __future__ import annotations

import re
from collections.abc import Sequence

# <think>, as most models have it; [THINK] of Mistral's, <seed:think> of ByteDance's, ◁think▷ of Moonshot's.
_THOUGHT = r"(?:seed:)?(?:think|thinking|thought|reasoning)"
_OPEN_THOUGHT = re.compile(rf"\s*[<\[◁]({_THOUGHT})[>\]▷]", re.IGNORECASE)
_OPEN_ANYWHERE = re.compile(rf"[<\[◁]{_THOUGHT}[>\]▷]", re.IGNORECASE)
_CLOSE_THOUGHT = re.compile(rf"[<\[◁]/{_THOUGHT}[>\]▷]", re.IGNORECASE)

_MAX_BLOCKS = 64


def without_thoughts(raw: str, headings: Sequence[str] = ()) -> str:
    """The text behind its leading thoughts; "" where they never end. `headings`: those that the text was asked for, in their order.

    Only at the start: a checkpoint may quote such a tag. Some templates write the opening tag into the prompt: then the answer
    starts inside the block, and a closing tag without an opening one ends it.
    """
    text = raw
    for _ in range(_MAX_BLOCKS):
        opening = _OPEN_THOUGHT.match(text)
        if opening is None:
            break
        closing = re.compile(rf"[<\[◁]/{opening[1]}[>\]▷]", re.IGNORECASE).search(text, opening.end())
        if closing is None:
            return ""
        text = text[closing.end() :]
    for _ in range(_MAX_BLOCKS):
        stray = _CLOSE_THOUGHT.search(text)
        if stray is None or not _ends_thoughts(text[: stray.start()], text[stray.end() :], headings):
            break
        text = text[stray.end() :]
    return text.strip()


def _ends_thoughts(before: str, behind: str, headings: Sequence[str]) -> bool:
    """Whether a closing tag without an opening one ends thoughts, or the text quotes it.

    The headings that were asked for come in their order. Where they begin anew behind the tag, what stands in front of it was a draft;
    where they only go on, the tag is part of the text. Without headings a text that quotes is told by its marks.
    """
    told, follow = _standing(before, headings), _standing(behind, headings)
    if len(follow) >= 2:
        return not told or follow[0] <= told[0]
    return not told and "`" not in before and not _OPEN_ANYWHERE.search(before)


def _standing(text: str, headings: Sequence[str]) -> list[int]:
    """Which of the headings stand in a text, ascending."""
    low = text.lower()
    return [at for at, heading in enumerate(headings) if heading.lower() in low]
