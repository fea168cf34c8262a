"""Text -> tokens, by a rule of our own: the same everywhere, no vocabulary file, fast.

A token is the piece of text itself, so that tokens can be compared, hashed and joined back. English comes out at about four characters
a token and CJK at about one, which is what the tokenizers of real models do.
"""

from __future__ import annotations

import re
from functools import lru_cache

Tokens = tuple[str, ...]

# A word takes the space in front of it along, as in byte-pair encodings. Every repetition is bounded: a run of a million
# letters is split, and no input makes the expression go back.
_PIECE = re.compile(
    r" ?[A-Za-z]{1,8}"
    r"| ?[0-9]{1,3}"
    r"|[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]"  # CJK, kana, hangul: one each
    r"|[\u00c0-\u1fff]{1,3}"  # other alphabets
    r"|\n{1,4} {0,16}|[ \t]{1,16}"  # a line break and the indentation behind it
    r"| ?[^\sA-Za-z0-9\u00c0-\U0010ffff]{1,3}"
    r"|.",
    re.DOTALL,
)
_CACHED_CHARS = 262_144


def tokenize(text: str) -> Tokens:
    """The tokens of a text; joined they are the text again."""
    return _remembered(text) if len(text) <= _CACHED_CHARS else tuple(_PIECE.findall(text))


@lru_cache(maxsize=4096)
def _remembered(text: str) -> Tokens:
    # Histories are sent again and again: all but the newest message is found here.
    return tuple(_PIECE.findall(text))
