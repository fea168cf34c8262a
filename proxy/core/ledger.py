"""What the user and the system said, verbatim, in the checkpoint: written by the proxy, so it never depends on a summariser.

In this order as long as the budget lasts: covered system and developer messages, the first user message (at most half), messages
that state constraints, then the newest; user messages that share one opening (agents that send tool output as user) come last.
An earlier checkpoint's entries are carried forward and judged anew with the others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum

from proxy.core import said, tokens
from proxy.core.model import Said


class Kind(StrEnum):
    """Why an entry is kept."""

    SYSTEM = "system"
    TASK = "task"
    CONSTRAINT = "constraint"
    PLAIN = "plain"
    TEMPLATED = "templated"


# Words by which people state what must hold later on, in the languages we have test conversations for. Wide rather than narrow: a
# message taken in for nothing costs a few tokens, one left out costs the user's rule.
_CONSTRAINT = re.compile(
    r"\b(?:never|always|must(?:n['’]t)?|do(?:es)? not|don['’]t|cannot|can['’]t|should(?:n['’]t)?|shall|only|avoid|without|unless|"
    r"make sure|ensure|required?|require[sd]?|forbidden|not allowed|no longer|instead of|from now on|keep in mind|remember|important|"
    r"prefer(?:ence|ably|s|red)?|rather than|constraints?|rules?|at (?:most|least)|no more than|limit(?:ed)?|deadline|budget|policy|"
    r"i (?:want|need|like|hate)|please (?:use|keep|write|answer|stick)|use only|stick to|hands off|leave .{1,40} alone|off[- ]limits)\b"
    r"|\b(?:nie(?:mals)?|immer|muss|müssen|darf(?:st)?|dürfen|soll(?:te|en|st)?|nicht|keine?n?|nur|unbedingt|bitte|verboten|"
    r"vermeide?n?|ausschließlich|wichtig|mindestens|höchstens|statt)\b"
    r"|\b(?:jamais|toujours|doit|doivent|ne .{1,30} pas|seulement|interdit|évite[rz]?|nunca|siempre|debe[ns]?|solo|prohibido|evita[r]?)\b"
    r"|不要|不能|不得|不可|不许|不用|必须|务必|一定要|一定|禁止|请勿|切勿|别再|只能|只用|仅限|应该|应当|总是|永远|绝不|避免|记住|注意|要求|限制|优先|偏好|至少|最多|不超过|而不是"
    r"|絶対|必ず|禁止|いけません|いけない|ないでください|しないで|だけ|のみ|常に|決して|べき|注意|守って|避けて|必要|優先|以内|以上|以下|てください|代わりに",
    re.IGNORECASE,
)

# A full stop inside a word (prod.db) ends no sentence; one of the wide scripts needs no space behind it.
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n+")
_FIRST_SHARE = 0.5
_ENTRY_SHARE = 0.25
_PLAIN_SHARE = 0.125
_OPENING_CHARS = 24
_TEMPLATE_REPEATS = 3
_CUT = " […] "
_SCAN_CHARS = 20_000


def ledger(covered: Sequence[bytes], position: int, earlier: Sequence[Said], budget_tokens: int) -> tuple[Said, ...]:
    """The entries, by position. `covered` are the newly covered messages, the first at `position`; `earlier` an earlier ledger."""
    if budget_tokens <= 0:
        return ()
    entries = _judged([*earlier, *_new(covered, position)])
    kept: dict[int, Said] = {}
    left = budget_tokens
    for entry in sorted(entries, key=_rank):
        text = _fitted(entry, min(left, int(budget_tokens * _share(entry.kind))))
        cost = tokens.of_text(text) + tokens.MESSAGE_OVERHEAD
        if text and cost <= left:
            kept[entry.position] = Said(entry.role, entry.position, entry.kind, text)
            left -= cost
    return tuple(kept[at] for at in sorted(kept))


def rendered(entries: Iterable[Said]) -> str:
    """The ledger as it stands in the checkpoint: each entry in a tag of its own, so that no text can pass for another entry."""
    return "\n".join(
        f'<checkpoint_said role="{entry.role}" message="{entry.position}">{broken(entry.text)}</checkpoint_said>'
        for entry in entries
    )


_TAGS = re.compile(r"<(?=[\s/]{0,8}checkpoint_(?:summary|ledger|said))", re.IGNORECASE)


def broken(text: str) -> str:
    """A text in which none of the checkpoint's own tags stands: nothing inside can close a part, or open one."""
    return _TAGS.sub("&lt;", text)


def states_constraint(text: str) -> bool:
    """Whether a text says what must hold later on."""
    return _CONSTRAINT.search(_ends(text)) is not None


def _ends(text: str) -> str:
    """What of a text is searched: a message of megabytes is pasted data, with the user's own words in front of it or behind."""
    return text if len(text) <= 2 * _SCAN_CHARS else f"{text[:_SCAN_CHARS]}\n{text[-_SCAN_CHARS:]}"


def _new(covered: Sequence[bytes], position: int) -> Iterable[Said]:
    for at, element in enumerate(covered):
        message = said.parsed(element)
        if message is None or said.role(message) not in ("user", "system", "developer"):
            continue
        text = said.text(message).strip()
        if text:
            yield Said(said.role(message), position + at, "", text)


def _judged(entries: Sequence[Said]) -> list[Said]:
    """Each entry with its kind. What once was system, task or constraint stays it: an entry may have been cut since."""
    openings = Counter(_opening(entry.text) for entry in entries if entry.role == "user")
    first = min((entry.position for entry in entries if entry.role == "user"), default=-1)
    judged = []
    for entry in entries:
        if entry.role != "user":
            kind = Kind.SYSTEM
        elif entry.position == first:
            kind = Kind.TASK
        elif openings[_opening(entry.text)] >= _TEMPLATE_REPEATS or entry.kind == Kind.TEMPLATED:
            kind = Kind.TEMPLATED
        elif entry.kind == Kind.CONSTRAINT or states_constraint(entry.text):
            kind = Kind.CONSTRAINT
        else:
            kind = Kind.PLAIN
        judged.append(Said(entry.role, entry.position, kind, entry.text))
    return judged


def _opening(text: str) -> str:
    """How a text starts, without what differs between uses of one template."""
    return re.sub(r"\d+", "0", text[:_OPENING_CHARS].lower())


def _rank(entry: Said) -> tuple[int, int]:
    """System in the order it came, the task, then the others newest first."""
    order = list(Kind).index(Kind(entry.kind))
    return (order, entry.position if entry.kind in (Kind.SYSTEM, Kind.TASK) else -entry.position)


def _share(kind: str) -> float:
    if kind == Kind.TASK:
        return _FIRST_SHARE
    return _ENTRY_SHARE if kind in (Kind.SYSTEM, Kind.CONSTRAINT) else _PLAIN_SHARE


def _fitted(entry: Said, budget: int) -> str:
    """The text, whole if it fits, else those of its sentences that state constraints, else its start and its end."""
    room = budget - tokens.MESSAGE_OVERHEAD
    if room <= 0:
        return ""
    if tokens.of_text(entry.text) <= room:
        return entry.text
    if entry.kind in (Kind.CONSTRAINT, Kind.SYSTEM, Kind.TASK):
        ruling = [s.strip() for s in _SENTENCE_END.split(_ends(entry.text)) if s.strip() and states_constraint(s)]
        start = _cut(entry.text, room // 3) if entry.kind == Kind.TASK else ""
        chosen = [start] if start else []
        left = room - tokens.of_text(start)
        for sentence in ruling:
            cost = tokens.of_text(sentence) + 2
            if cost <= left and sentence not in start:
                chosen.append(sentence)
                left -= cost
        if len(chosen) > (1 if start else 0):
            return _CUT.join(chosen)
    return _cut(entry.text, room)


def _cut(text: str, room: int) -> str:
    """Start and end of a text within about `room` tokens."""
    size = tokens.of_text(text)
    if size <= room:
        return text
    keep = max(0, len(text) * max(0, room - 4) // size)
    return text[: keep * 2 // 3].rstrip() + _CUT + text[len(text) - keep // 3 :].lstrip() if keep > 30 else ""
