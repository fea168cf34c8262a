"""How many tokens a text is likely to be, without a tokenizer: cheap enough for every new message of every request.

Used where the provider has not counted: sizes of regions, new messages since the last usage. It is corrected by what a
provider reported for the same conversation (`calibrate`), so only the proportions between messages have to be right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

MESSAGE_OVERHEAD = 4
"""Role and delimiters of one message. Source: the OpenAI cookbook's counting note gives 3 to 4 for its chat models."""

IMAGE_TOKENS = 1100
"""One image of unknown size: between 85 (low detail) and 1,600 (a large one); middle of what hosted models charge for a screenshot."""

AUDIO_TOKENS = 600
FILE_TOKENS = 1500

_PRICES = {
    **dict.fromkeys(("image_url", "image", "input_image", "image_file"), IMAGE_TOKENS),
    **dict.fromkeys(("input_audio", "audio", "audio_url"), AUDIO_TOKENS),
    **dict.fromkeys(("file", "input_file", "video_url", "video", "input_video"), FILE_TOKENS),
}
"""Parts that are priced whole, by their type."""

_MEDIA = {"image": IMAGE_TOKENS, "audio": AUDIO_TOKENS}
_DATA_URL = re.compile(r"data:(\w*)[^,]{0,200};base64,")
_BASE64 = re.compile(r"[A-Za-z0-9+/=_\r\n-]{1024}")
"""So much without a blank or a mark is no text."""

_BESIDE = frozenset({"image", "images", "video", "videos", "file", "files", "attachments"})
"""Members in which clients of some servers send attachments beside the content."""

# One match is about one token of a byte-pair vocabulary with 100k to 200k entries: a word up to 7 letters (longer ones and
# camelCase split), up to three digits or marks, a line of one mark, a line break with its indent, a run of blanks.
_ASCII = re.compile(
    r"\n\s{0,31}|[A-Z]?[a-z]{1,7}|[A-Z]{1,3}|[0-9]{1,3}|([^\sA-Za-z0-9])\1{3,31}|[^\sA-Za-z0-9]{1,3}|[ \t]{2,64}"
)
_ASCII_ONLY = re.compile(r"[^\x00-\x7f]+")
_LATIN = re.compile("[\u00c0-\u024f\u1e00-\u1eff]")
_LATIN_TOKENS = 0.6
"""What an accent adds to its word."""

# Tokens a character by the first byte of its UTF-8, which tells the script: between vocabularies of 200k entries and those of 100k, which
# split Greek, Hebrew, Thai and the scripts of India into single bytes. Measured on o200k, Qwen 3, DeepSeek and cl100k.
_BY_LEAD = {
    **dict.fromkeys(range(0xC2, 0xE0), 0.5),
    **dict.fromkeys(range(0xD0, 0xD4), 0.35),  # Cyrillic
    **dict.fromkeys(range(0xD8, 0xDC), 0.45),  # Arabic
    0xE0: 0.55,  # India, Thai
    0xE1: 0.5,
    0xE2: 0.45,  # marks, arrows, lines of boxes
    **dict.fromkeys(range(0xE3, 0xF0), 0.85),  # Chinese, Japanese, Korean
    **dict.fromkeys(range(0xF0, 0xF5), 2.2),  # emoji
}

# Beyond this much text a sample speaks for the rest: 5 MB of one letter must not stop the event loop.
_SAMPLE_CHARS = 65_536


def of_text(text: str) -> int:
    """Estimated tokens of a text in any script."""
    if len(text) > _SAMPLE_CHARS:
        step = len(text) // 4
        quarter = _SAMPLE_CHARS // 4
        sample = "".join(text[i * step : i * step + quarter] for i in range(4))
        return round(of_text(sample) * len(text) / len(sample))
    if text.isascii():
        return len(_ASCII.findall(text))
    accents = len(_LATIN.findall(text))
    plain = _LATIN.sub("e", text) if accents else text
    data = plain.encode("utf-8", "surrogatepass")
    others = sum(data.count(lead) * tokens for lead, tokens in _BY_LEAD.items())
    return round(len(_ASCII.findall(_ASCII_ONLY.sub(" ", plain))) + accents * _LATIN_TOKENS + others)


def of_message(message: Mapping[str, object]) -> int:
    """Estimated tokens of one parsed message: its texts, tool calls and parts. Base64 is priced as what it shows, not as text."""
    total = MESSAGE_OVERHEAD
    for key, value in message.items():
        if key in ("role", "cache_control"):
            continue
        if key == "audio" and isinstance(value, Mapping):
            total += AUDIO_TOKENS  # an answer that was spoken, by its id or whole
        elif key == "content":
            total += _of_content(value)
        else:
            total += _of_attached(value) if key in _BESIDE else _of_value(value)
    return total


def _of_content(content: object) -> int:
    if not isinstance(content, list):
        return _of_value(content)
    return sum(
        _of_part(cast("Mapping[str, object]", part)) if isinstance(part, Mapping) else _of_value(part)
        for part in content
    )


def _of_part(part: Mapping[str, object]) -> int:
    if (price := _price(part)) is not None:
        return price
    # What a call was given is text, whatever it holds.
    weigh = _of_value if part.get("type") == "tool_use" else _of_attached
    return sum(
        of_text(value) if key in _TEXTS and isinstance(value, str) else weigh(value)
        for key, value in part.items()
        if key not in ("type", "cache_control")
    )


_TEXTS = ("text", "content", "thinking")
"""Members of a part that are text even if they look like base64."""


def _price(part: Mapping[str, object]) -> int | None:
    kind = part.get("type")
    return _PRICES.get(kind) if isinstance(kind, str) else None


def _of_attached(value: object) -> int:
    """The same as `_of_value` for what is no text of its own: data in base64 is priced as what it shows, and so is an image in a tool's result."""
    if isinstance(value, str):
        if url := _DATA_URL.match(value):
            return _MEDIA.get(url[1], FILE_TOKENS)
        return FILE_TOKENS if _BASE64.match(value) else of_text(value)
    if not isinstance(value, (Mapping, list)):
        return 0 if value is None else 1
    if isinstance(value, list):
        total = 0
        for inner in value:
            total += _of_attached(inner)
        return total
    if (price := _price(cast("Mapping[str, object]", value))) is not None:
        return price
    total = len(value)
    for key, inner in value.items():
        total += of_text(inner) if key in _TEXTS and isinstance(inner, str) else _of_attached(inner)
    return total


def _of_value(value: object) -> int:
    """Texts anywhere inside; the frame of a JSON value costs about a token a key."""
    if isinstance(value, str):
        return of_text(value)
    if not isinstance(value, (Mapping, list)):
        return 0 if value is None else 1
    total = len(value) if isinstance(value, Mapping) else 0
    # A loop, not a sum over a generator: that would take two frames of the stack for each level of nesting.
    for inner in value.values() if isinstance(value, Mapping) else value:
        total += _of_value(inner)
    return total


def calibrate(reported: int | None, estimated: int) -> float:
    """Factor from estimate to provider's count: 1.0 where nothing was reported.

    Bounded: outside [0.5, 3] the provider counted something else than what was sent (a prompt cut silently, images priced apart).
    """
    if not reported or estimated <= 0:
        return 1.0
    return min(3.0, max(0.5, reported / estimated))
