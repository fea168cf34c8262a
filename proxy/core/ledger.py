"""What the user and the system said, verbatim, in the checkpoint: written by the proxy, so it never depends on a summariser.

In this order as long as the budget lasts: covered system and developer messages, the first user message (at most half), messages
that state constraints, then the newest; user messages that share one opening (agents that send tool output as user) come last.
An earlier checkpoint's entries are carried forward and judged anew with the others.

What was stated early must not fall out because more was said later: task and constraints that together take half of the budget stay
whole over any number of generations. So of the constraints the oldest come first up to that half, and only then the newest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from functools import lru_cache

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
    r"\b(?:never|always|must(?:n['’]t)?|do(?:es)? not|don['’]t|cannot|can['’]t|should(?:n['’]t)?|shall|only|avoid|without|unless|except|"
    r"make sure|ensure|required?|require[sd]?|forbidden|prohibited|mandatory|strictly|refrain|not allowed|no longer|instead of|"
    r"from now on|by default|(?:each|every) time|whenever|keep(?! going| on\b)|remember|important|"
    r"prefer(?:ence|ably|s|red)?|rather than|constraints?|rules?|at (?:most|least)|no more than|limit(?:ed)?|deadline|budget|policy|"
    r"i (?:want|need|like|hate)|i(?:['’]d| would) (?:like|rather|prefer)|(?:have|has|needs?) to|call me|allergic|"
    r"please (?:use|write|answer|stick)|use only|stick to|hands off|leave .{1,40} alone|off[- ]limits|"
    r"(?:answer|reply|respond|write|speak)(?: \w+)? in)\b"
    r"|(?:^|[.!?\n] {0,2})(?:use|stop|skip|exclude|include)\b"
    r"|\b(?:nie(?:mals)?|immer|muss|müssen|darf(?:st)?|dürfen|soll(?:te|en|st)?|nicht|keine?n?|nur|unbedingt|bitte|verboten|ohne|außer|"
    r"vermeide?n?|ausschließlich|wichtig|mindestens|höchstens|statt|bevorzug\w*|lieber|möchte|zwingend|regeln?|jedes mal|"
    r"ab (?:jetzt|sofort)|verwende|nutze|benutze|antworte)\b"
    r"|\b(?:jamais|toujours|doit|doivent|ne .{1,30} pas|seulement|uniquement|sans|interdit|évite[rz]?|il faut|je (?:veux|préfère)|"
    r"nunca|siempre|debe[ns]?|sólo|solo|únicamente|prohibido|evita[r]?|hay que|prefiero|quiero)\b"
    r"|不要|不能|不得|不可|不许|不准|不用|不想|不应|不该|必须|务必|一定要|一定|禁止|严禁|请勿|切勿|千万|别再|别用|别动|别改|只能|只用|仅限|"
    r"应该|应当|总是|永远|绝不|避免|尽量|保持|记住|注意|要求|限制|规则|约束|原则|遵守|遵循|优先|偏好|喜欢|讨厌|希望|想要|需要|请用|请使用|请以|"
    r"从现在|每次|一律|统一|除非|截止|预算|至少|最多|不超过|而不是"
    r"|絶対|必ず|禁止|厳禁|不可|いけません|いけない|ないでください|しないで|だけ|のみ|常に|毎回|今後|決して|一切|べき|なければ|ならない|注意|守って|"
    r"避けて|必要|優先|希望|好み|好き|嫌い|ほしい|欲しい|ルール|規則|制約|条件|期限|予算|以内|以上|以下|こと(?:。|$)|てください|代わりに",
    re.IGNORECASE,
)

# A full stop inside a word (prod.db) ends no sentence; one of the wide scripts needs no space behind it.
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n+")
_FIRST_SHARE = 0.5
_EARLY_SHARE = 0.5
"""Of the budget, for the task and the constraints that were stated first: later ones do not displace them."""

_ENTRY_SHARE = 0.25
_PLAIN_SHARE = 0.125
_OPENING_CHARS = 24
_LABEL = re.compile(r"[^\n:：]{2,32}[:：]")
_TEMPLATE_REPEATS = 3
_SHORT_CHARS = 200
"""A message of a template that states a constraint in so few words is taken at its word: it is a person behind a chat frontend."""

_ENTRY_TOKENS = 20
"""The tag around an entry. It counts for the budget, not for an entry's share of it: else a small budget would have no room for a rule."""

_CUT = " […] "
_CUT_TOKENS = 4
_SCAN_CHARS = 10_000


def ledger(covered: Sequence[bytes], position: int, earlier: Sequence[Said], budget_tokens: int) -> tuple[Said, ...]:
    """The entries, by position. `covered` are the newly covered messages, the first at `position`; `earlier` an earlier ledger."""
    if budget_tokens <= 0:
        return ()
    entries = _judged(_distinct([*earlier, *_new(covered, position)]))
    kept: dict[int, Said] = {}
    left = budget_tokens

    def take(shelf: Iterable[Said], most: int | None = None) -> None:
        """Keep of these what there is room for; with `most` only up to that many tokens in all, and what would be cut for it waits."""
        nonlocal left
        room = left if most is None else min(left, most)
        for entry in shelf:
            share = _share(entry.kind, budget_tokens)
            size = share if most is not None else min(room - _ENTRY_TOKENS, share)
            text = "" if entry.position in kept else _fitted(entry, size)
            cost = tokens.of_text(text) + _ENTRY_TOKENS
            if text and cost <= room:
                kept[entry.position] = Said(entry.role, entry.position, entry.kind, text)
                room -= cost
                left -= cost

    of_kind = {kind: [entry for entry in entries if entry.kind == kind] for kind in Kind}
    take(of_kind[Kind.SYSTEM], most=int(budget_tokens * _ENTRY_SHARE))
    before = left
    take(of_kind[Kind.TASK])
    early = int(budget_tokens * _EARLY_SHARE) - (before - left)
    take(of_kind[Kind.CONSTRAINT], most=max(early, left // 2))
    for kind in (Kind.CONSTRAINT, Kind.SYSTEM, Kind.PLAIN):
        take(reversed(of_kind[kind]))
    take(sorted(of_kind[Kind.TEMPLATED], key=lambda entry: (not states_constraint(entry.text), -entry.position)))
    return tuple(kept[at] for at in sorted(kept))


def within(entries: Sequence[Said], budget_tokens: int) -> tuple[Said, ...]:
    """A ledger's entries in less room than they had. The task comes first: no other without it, and it may have more than half."""
    kept = ledger((), 0, entries, budget_tokens)
    whole = task(entries)
    if whole is None:
        return kept
    others = [entry for entry in kept if entry.position != whole.position] if task(kept) else []
    cost = sum(tokens.of_text(entry.text) + _ENTRY_TOKENS for entry in others)
    text = _fitted(whole, budget_tokens - cost - _ENTRY_TOKENS)
    first = [Said(whole.role, whole.position, whole.kind, text)] if text else []
    return tuple(sorted((*first, *others), key=lambda entry: entry.position))


def task(entries: Iterable[Said]) -> Said | None:
    """The first user message of a ledger; None where it has none."""
    return next((entry for entry in entries if entry.kind == Kind.TASK), None)


def rendered(entries: Iterable[Said]) -> str:
    """The ledger as it stands in the checkpoint: each entry in a tag of its own, so that no text can pass for another entry."""
    return "\n".join(
        f'<checkpoint_said role="{entry.role}" message="{entry.position}">{broken(entry.text)}</checkpoint_said>'
        for entry in entries
    )


# A reader takes a tag for one whatever blanks, slashes and invisible characters stand in it.
_TAGS = re.compile(r"<(?=[^\w<>]*checkpoint_(?:summary|ledger|said))", re.IGNORECASE)


def broken(text: str) -> str:
    """A text in which none of the checkpoint's own tags stands: nothing inside can close a part, or open one."""
    return _TAGS.sub("&lt;", text)


def states_constraint(text: str) -> bool:
    """Whether a text says what must hold later on."""
    return _constrains(_ends(text))


@lru_cache(maxsize=1024)
def _constrains(text: str) -> bool:
    # Asked several times for the same message; half a millisecond each for a long one.
    return _CONSTRAINT.search(text) is not None


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


def _distinct(entries: Sequence[Said]) -> Iterator[Said]:
    """The entries by position, without those that repeat another one word for word."""
    seen: set[tuple[str, str]] = set()
    for entry in sorted(entries, key=lambda entry: entry.position):
        if (entry.role, entry.text) not in seen:
            seen.add((entry.role, entry.text))
            yield entry


def _judged(distinct: Iterable[Said]) -> list[Said]:
    """Each entry with its kind. What once was system, task or constraint stays it: an entry may have been cut since."""
    entries = list(distinct)
    openings = Counter(_opening(entry.text) for entry in entries if entry.role == "user")
    first = min((entry.position for entry in entries if entry.role == "user"), default=-1)
    judged = []
    for entry in entries:
        states = entry.kind == Kind.CONSTRAINT or states_constraint(entry.text)
        repeats = openings[_opening(entry.text)] >= _TEMPLATE_REPEATS
        if entry.role != "user":
            kind = Kind.SYSTEM
        elif entry.position == first:
            kind = Kind.TASK
        elif entry.kind == Kind.TEMPLATED or (repeats and not (states and len(entry.text) <= _SHORT_CHARS)):
            kind = Kind.TEMPLATED
        else:
            kind = Kind.CONSTRAINT if states else Kind.PLAIN
        judged.append(Said(entry.role, entry.position, kind, entry.text))
    return judged


def _opening(text: str) -> str:
    """How a text starts, without what differs between uses of one template: its label (`Observation:`), else its first characters."""
    label = _LABEL.match(text)
    return re.sub(r"\d+", "0", (label[0] if label else text[:_OPENING_CHARS]).lower())


def _share(kind: str, budget: int) -> int:
    """Tokens that the text of one entry may have."""
    if kind == Kind.TASK:
        return int(budget * _FIRST_SHARE)
    return int(budget * (_ENTRY_SHARE if kind in (Kind.SYSTEM, Kind.CONSTRAINT) else _PLAIN_SHARE))


def _fitted(entry: Said, room: int) -> str:
    """The text, whole if it fits, else those of its sentences that state constraints (for the task between its start and its end),
    else its start and its end.
    """
    if room <= 0:
        return ""
    if tokens.of_text(entry.text) <= room:
        return entry.text
    chosen: list[str] = []
    left = room // 2 if entry.kind == Kind.TASK else room
    for sentence in filter(states_constraint, map(str.strip, _SENTENCE_END.split(_ends(entry.text)))):
        cost = tokens.of_text(sentence) + _CUT_TOKENS
        if cost <= left:
            chosen.append(sentence)
            left -= cost
    if entry.kind != Kind.TASK and chosen:
        return _CUT.join(chosen)
    start, end = said.ends(entry.text, left + room // 2 if chosen else room)
    middle = [sentence for sentence in chosen if sentence not in start and sentence not in end]
    return _CUT.join(part for part in (start, *middle, end) if part)
