"""Exact identifiers that a summary lost: paths, URLs, ids, numbers with units, quoted strings. No model needed to put them back."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from proxy.core import said, tokens

# Each is tried on one word of bounded length: on a megabyte without a space they would take for ever.
_PATTERNS = (
    r"https?://[^\s<>\"'`)\]}]+",
    r"[\w.+-]+@[\w-]+\.[\w.-]+",
    r"(?:[A-Za-z]:\\|\.{0,2}/)?(?:[\w.@-]+[/\\])+[\w.@-]+",
    r"\b[\w-]+\.(?:py|js|ts|tsx|go|rs|c|h|cpp|java|rb|md|toml|yaml|yml|json|sql|db|csv|txt|sh|cfg|ini|html|css|lock)\b",
    r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b",
    r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,64}\b",
    r"\b[A-Z][A-Z0-9]+(?:_[A-Z0-9]+)+\b",
    r"\b(?=[\w#-]*\d)(?=[\w#-]*[A-Za-z])[A-Za-z0-9#]+(?:[-_][A-Za-z0-9]+)+\b",
    r"\b\d{4}-\d{2}-\d{2}(?:T\d{2}:\d{2}(?::\d{2})?)?\b",
    r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b",
    r"\bv?\d+\.\d+(?:\.\d+)*(?:-[\w.]+)?\b",
    r"[$€£¥]\d[\d,.]*",
    r"\b\d{4,}\b",
)
_WORD = re.compile("|".join(_PATTERNS))
_PHRASE = re.compile(
    r"(?<![\w`])`[^`\n]{2,60}`|\"[^\"\n\\]{3,40}\"|[「『][^」』\n]{2,40}[」』]"
    r"|\b\d{1,3}(?:[,.]\d{1,3}){0,4}\s?(?:%|ms|s|min|h|kB|KB|MB|GB|TB|KiB|MiB|GiB|Hz|kHz|MHz|GHz|px|km|kg|USD|EUR|tokens?|rows?|bytes?)\b"
)
_MAX_CHARS = 120
_SCAN_CHARS = 200_000
"""Of one message: what recurs does so early, and a log of megabytes must not hold up the loop."""


def anchors(covered: Sequence[bytes], present: str, earlier: Sequence[str], budget_tokens: int) -> tuple[str, ...]:
    """Identifiers of the covered messages that recur or that the user stated, and that are not in `present` (summary and ledger).

    Those an earlier checkpoint carried count as recurring. What the user said comes first, then what recurs most and latest.
    """
    if budget_tokens <= 0:
        return ()
    counts: Counter[str] = Counter()
    latest: dict[str, int] = {}
    stated: set[str] = set()
    for at, element in enumerate(covered):
        message = said.parsed(element)
        if message is None:
            continue
        role = said.role(message)
        texts = [said.text(message), *(arguments for _, arguments in said.calls(message))]
        for text in texts:
            for found in _found(text):
                counts[found] += 1
                latest[found] = at
                if role == "user":
                    stated.add(found)
    for anchor in earlier:
        counts[anchor] += 2
        latest.setdefault(anchor, -1)
    wanted = [a for a in counts if (a in stated or counts[a] > 1) and a not in present]
    wanted.sort(key=lambda a: (a not in stated, -min(counts[a], 5), -latest[a]))
    kept: list[str] = []
    left = budget_tokens
    for anchor in wanted:
        cost = tokens.of_text(anchor) + 1
        if cost <= left and not any(anchor in other for other in kept):
            kept.append(anchor)
            left -= cost
    return tuple(kept)


def _found(text: str) -> list[str]:
    text = text[:_SCAN_CHARS]
    found = [match[0] for match in _PHRASE.finditer(text)]
    for word in text.split():
        if len(word) <= _MAX_CHARS and not word.isalpha():
            found += [match[0] for match in _WORD.finditer(word)]
    clean = (anchor.strip('`"「」『』 ').rstrip(".,;:") for anchor in found)
    return [anchor for anchor in clean if len(anchor) > 2]
