"""Exact identifiers that a summary lost: paths, URLs, ids, numbers with units, quoted strings. No model needed to put them back."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import nsmallest

from proxy.core import said, tokens

# Each is tried on one word of bounded length: on a megabyte without a space they would take for ever.
_PATTERNS = (
    r"https?://[^\s<>\"'`)\]}]+",
    r"[\w.+-]+@[\w-]+\.[\w.-]+",
    r"(?:[A-Za-z]:\\|\.{0,2}/)?(?:[\w.@-]+[/\\])+[\w.@-]+",
    r"\b[\w-]+\.(?:py|js|ts|tsx|go|rs|c|h|cpp|java|rb|md|toml|yaml|yml|json|sql|db|csv|txt|sh|cfg|ini|html|css|lock)\b",
    r"\b\d{4}-\d{2}-\d{2}(?:T\d{2}:\d{2}(?::\d{2})?)?\b",
    r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b",
    r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,64}\b",
    r"\b[A-Z][A-Z0-9]+(?:_[A-Z0-9]+)+\b",
    r"\b(?=[\w#-]*\d)(?=[\w#-]*[A-Za-z])[A-Za-z0-9#]+(?:[-_][A-Za-z0-9]+)+\b",
    r"\b(?=[A-Z0-9]*\d)(?=[A-Z0-9]*[A-Z])[A-Z0-9]{5,24}\b",
    r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b",
    r"\bv?\d+\.\d+(?:\.\d+)*(?:-[\w.]+)?\b",
    r"[$€£¥]\d[\d,.]*",
    r"\b\d{4,}\b",
)
_WORD = re.compile("|".join(_PATTERNS), re.ASCII)
_UNITS = (
    r"%|ms|s|min|h|kB|KB|MB|GB|TB|KiB|MiB|GiB|Hz|kHz|MHz|GHz|px|km|kg|USD|EUR|tokens?|rows?|bytes?|"
    r"[万亿億]?(?:美元|欧元|元|円|人|个|個|次|回|件|页|頁|ページ|天|日|小时|時間|分钟|分|秒)"
)
# The first alternative has no group: a quoted string in front of a colon is a key of JSON and names nothing, nor does one of two letters.
_PHRASE = re.compile(
    r"\"[^\"\n\\]{0,60}\"\s?:|\"[^\"\n\\]{0,2}\""
    r"|((?<![\w`])`[^`\n]{2,60}`|\"[^\"\n\\]{3,40}\"|“[^”\n]{2,40}”|[「『][^」』\n]{2,40}[」』]"
    rf"|\b\d{{1,3}}(?:[,.]\d{{1,3}}){{0,4}}\s?(?:{_UNITS})(?!\w))",
    re.ASCII,
)
# Scripts without blanks between words: what is exact among them is written in the letters of this pattern's complement.
_RUN = re.compile(r"[^\s\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef]{3,}")
_QUOTES = '`"“”「」『』 '
_MAX_CHARS = 120
_MAX_CANDIDATES = 2000
_SCAN_CHARS = 20_000
"""Of one message: what recurs does so early, and a log of megabytes must not hold up the loop."""

_REGION_CHARS = 400_000
"""Of all messages together, the newest first."""


def anchors(covered: Sequence[bytes], present: str, earlier: Sequence[str], budget_tokens: int) -> tuple[str, ...]:
    """Identifiers of the covered messages that recur (in two of them) or that the user stated, and that are not in `present` (summary and ledger).

    Those an earlier checkpoint carried count as recurring. What the user said comes first, then what recurs most and latest; bare
    numbers, most of which count lines, come last.
    """
    if budget_tokens <= 0:
        return ()
    counts: Counter[str] = Counter()
    latest: dict[str, int] = {}
    stated: set[str] = set()
    scanned = 0
    # The newest first: of a huge region the oldest part goes without, since all this holds up the loop.
    for at, element in reversed(tuple(enumerate(covered))):
        message = said.parsed(element) if scanned < _REGION_CHARS else None
        if message is None:
            continue
        scanned += min(len(element), _SCAN_CHARS)
        role = said.role(message)
        texts = (said.text(message), *(_values(arguments) for _, arguments in said.calls(message)))
        for found in dict.fromkeys(anchor for text in texts for anchor in _found(text)):
            counts[found] += 1
            latest[found] = max(at, latest.get(found, -1))
            if role == "user":
                stated.add(found)
    for anchor in earlier:
        counts[anchor] += 2
        latest.setdefault(anchor, -1)

    def rank(anchor: str) -> tuple[bool, bool, int, int]:
        return (anchor not in stated, anchor.isdigit(), -min(counts[anchor], 5), -latest[anchor])

    kept: list[str] = []
    left = budget_tokens
    for anchor in nsmallest(_MAX_CANDIDATES, (a for a in counts if a in stated or counts[a] > 1), key=rank):
        cost = tokens.of_text(anchor) + 1
        if cost <= left and not _stands_in(anchor, present) and not any(_stands_in(anchor, other) for other in kept):
            kept.append(anchor)
            left -= cost
    return tuple(kept)


def _values(arguments: str) -> str:
    """What a call's arguments say, without their keys and without the escapes of JSON."""
    read = said.parsed(arguments.encode())
    if read is None:
        return arguments
    values = (v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in read.values())
    return "\n".join(values).encode("utf-8", "replace").decode()


def _stands_in(anchor: str, text: str) -> bool:
    """Whether a text holds the anchor as such: 8080 is not in 18080, nor a.py in data.py."""
    at = text.find(anchor)
    while at >= 0:
        end = at + len(anchor)
        before, after = text[at - 1 : at], text[end : end + 1]
        if not (_is_letter(before) and _is_letter(anchor[0])) and not (_is_letter(after) and _is_letter(anchor[-1])):
            return True
        at = text.find(anchor, end)
    return False


def _is_letter(char: str) -> bool:
    return char.isascii() and char.isalnum()


def _found(text: str) -> Iterator[str]:
    text = text[:_SCAN_CHARS]
    for match in _PHRASE.finditer(text):
        yield from _clean(match[1] or "")
    for word in _RUN.findall(text):
        if len(word) <= _MAX_CHARS and not word.isalpha():
            for match in _WORD.finditer(word):
                yield from _clean(match[0])


def _clean(found: str) -> Iterator[str]:
    anchor = found.strip(_QUOTES).rstrip(".,;:")
    if len(anchor) > 2:
        yield anchor
