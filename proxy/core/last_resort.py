"""A checkpoint without a model: for the hard watermark, when no summary can be had or the region has no room in one call.

What was said is kept as it stands as long as the budget lasts: first the first user message, then from the newest message back; what
does not fit is cut to a line, and then left out with a count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from proxy.core import said, tokens
from proxy.core.checkpoint import Summary

_USER_CHARS = 1200
_OTHER_CHARS = 400
_RESULT_CHARS = 240
_LINE_CHARS = 80
_LIMITS = {
    "user": _USER_CHARS,
    "system": _USER_CHARS,
    "developer": _USER_CHARS,
    "tool": _RESULT_CHARS,
    "function": _RESULT_CHARS,
}
_EARLIER_SHARE = 0.4
"""Of the budget, for an earlier checkpoint: it stands for more than what is condensed now."""

_HEAD = "The earlier part of the conversation, shortened mechanically: long texts are cut."
_BEFORE = "Before that:"
_OMITTED = re.compile(r"^\((\d{1,9}) entries left out\)$", re.MULTILINE)
_COUNT_TOKENS = 10


@dataclass(frozen=True, slots=True)
class _Line:
    who: str
    text: str
    limit: int

    def cut(self, limit: int) -> str:
        """At most `limit` characters of it. Further lines are indented, so that none of them can pass for what somebody else said."""
        text = " ".join(self.text.split()) if limit <= _LINE_CHARS else self.text.strip()
        shown = text if len(text) <= limit else said.start(text, limit - 1) + "…"
        return f"{self.who}: " + "\n  ".join(shown.splitlines())


def summary(messages: Sequence[bytes], earlier: str, budget_tokens: int) -> Summary:
    """The text for a region. `earlier`: an earlier checkpoint's text, or "". Never raises: an unreadable message is named as such."""
    lines = [line for element in messages for line in _lines(element)]
    parts = [_HEAD]
    left = budget_tokens - tokens.of_text(_HEAD) - _COUNT_TOKENS
    before, omitted = _unframed(earlier)
    if text := shortened(before, int(left * _EARLIER_SHARE) - tokens.MESSAGE_OVERHEAD):
        parts.append(f"{_BEFORE}\n{text}")
        left -= tokens.of_text(text) + tokens.MESSAGE_OVERHEAD
    elif before:
        omitted += 1
    kept: dict[int, str] = {}
    first = next((at for at, line in enumerate(lines) if line.who == "user"), None)
    order = ([first] if first is not None else []) + [at for at in range(len(lines) - 1, -1, -1) if at != first]
    for at in order:
        for limit in (lines[at].limit, _LINE_CHARS):
            text = lines[at].cut(limit)
            cost = tokens.of_text(text) + 1
            if cost <= left:
                kept[at] = text
                left -= cost
                break
    omitted += len(lines) - len(kept)
    if omitted:
        parts.append(f"({omitted} entries left out)")
    return Summary("\n".join([*parts, *(kept[at] for at in sorted(kept))]))


def _unframed(earlier: str) -> tuple[str, int]:
    """An earlier text without what an earlier call of `summary` put around it, and how many entries that one had left out."""
    if not earlier.startswith(_HEAD):
        return earlier, 0
    omitted = sum(int(count) for count in _OMITTED.findall(earlier))
    lines = _OMITTED.sub(_BEFORE, earlier.removeprefix(_HEAD)).splitlines()
    return "\n".join(line for line in lines if line and line != _BEFORE), omitted


def shortened(text: str, budget: int) -> str:
    """Start and end of a text, together at most `budget` tokens; "" where that is next to nothing."""
    if tokens.of_text(text) <= budget:
        return text
    start, end = said.ends(text, budget)
    return f"{start} […] {end}" if start else ""


def _lines(element: bytes) -> Iterator[_Line]:
    message = said.parsed(element)
    if message is None:
        yield _Line("message", "(unreadable)", _LINE_CHARS)
        return
    role = said.role(message) or "message"
    text = said.text(message) or _otherwise(message)
    if text:
        yield _Line("result" if role in ("tool", "function") else role, text, _LIMITS.get(role, _OTHER_CHARS))
    for name, arguments in said.calls(message):
        yield _Line("called", f"{name}({arguments})", _RESULT_CHARS)


def _otherwise(message: said.Message) -> str:
    """What an answer says outside of its content: a refusal, or a sound, whose words may have come along."""
    audio = message.get("audio")
    spoken = (audio.get("transcript") or "[audio]") if isinstance(audio, Mapping) else ""
    return said.text({"content": message.get("refusal") or spoken})
