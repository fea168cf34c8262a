"""Recorded answers of real providers, and what is known of each provider. They are read from beside the checkout, never copied.

WARMFOLD_WIRE and WARMFOLD_PROVIDERS name other folders. Where a folder is absent its tests are skipped, and say so.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from proxy.core.model import Usage
from tests import recorded

WIRE = Path(os.environ.get("WARMFOLD_WIRE") or recorded.FOLDER.parent / "wire")
FACTS = Path(os.environ.get("WARMFOLD_PROVIDERS") or recorded.FOLDER.parent / "providers") / "facts.json"

_EVENT = re.compile(rb".*?(?:\r\n\r\n|\n\n|\r\r)|.+\Z", re.DOTALL)


@dataclass(frozen=True)
class Sample:
    """One recorded answer. `kind`: json, sse or error. `body` is without content coding, whatever its headers say."""

    name: str
    kind: str
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def content_type(self) -> str:
        return next((value for key, value in self.headers if key.lower() == "content-type"), "")

    @property
    def is_overflow(self) -> bool:
        """Those named after the context are overflows, and the one of vLLM that left less than nothing for the output."""
        return "-context" in self.name or "neg-maxtokens" in self.name

    @property
    def events(self) -> list[bytes]:
        """A stream's events and comments, each with the blank line behind it: joined they are the body."""
        return _EVENT.findall(self.body)

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The JSON of a stream's events, or the one JSON object of another answer; none where it is no JSON object."""
        if self.kind == "sse":
            lines = [line for event in self.events for line in event.splitlines()]
            return [json.loads(line[5:]) for line in lines if line.startswith(b"data:") and b"[DONE]" not in line]
        try:
            whole = json.loads(self.body)
        except ValueError:
            return []
        return [whole] if isinstance(whole, dict) else []

    @property
    def carriers(self) -> list[dict[str, Any]]:
        """Chunks and their choices, in the order in which they came."""
        return [carrier for chunk in self.chunks for carrier in (chunk, *(chunk.get("choices") or []))]

    @property
    def has_failed(self) -> bool:
        return any(carrier.get("error") for carrier in self.carriers)

    @property
    def is_complete(self) -> bool:
        """Whether it is a whole answer to a chat completion."""
        if self.status != 200 or self.has_failed:
            return False
        if self.kind == "sse":
            return b"data: [DONE]" in self.body or any(carrier.get("finish_reason") for carrier in self.carriers)
        return any(chunk.get("choices") for chunk in self.chunks)

    @property
    def finish(self) -> str:
        """The last finish reason; "" where there is none."""
        return next((str(c["finish_reason"]) for c in reversed(self.carriers) if c.get("finish_reason")), "")

    @property
    def usage(self) -> Usage:
        """What the last usage object says, read with nothing but the standard library. Thoughts that xAI counts beside the answer are added."""
        counted = [u for c in self.carriers for u in (c.get("usage"), (c.get("x_groq") or {}).get("usage")) if u]
        if not counted:
            return Usage()
        last = counted[-1]
        details, spent = last.get("prompt_tokens_details") or {}, last.get("completion_tokens_details") or {}
        places = (details.get("cached_tokens"), last.get("prompt_cache_hit_tokens"), last.get("cached_tokens"))
        thoughts = spent.get("reasoning_tokens")
        completion = last["completion_tokens"]
        if thoughts and last["total_tokens"] == last["prompt_tokens"] + completion + thoughts:
            completion += thoughts
        return Usage(last["prompt_tokens"], completion, next((c for c in places if c is not None), None), thoughts)

    @property
    def short(self) -> bytes:
        """A stream without most of the chunks in its middle, which are all alike."""
        return b"".join(self.events if len(self.events) <= 6 else self.events[:2] + self.events[-4:])


def all_of(*kinds: str) -> Iterator[Sample]:
    """The recorded answers of these kinds, of all without any."""
    for path in sorted(WIRE.glob("*.json")):
        about = json.loads(path.read_bytes())
        if not kinds or about["kind"] in kinds:
            headers = tuple((key, value) for key, value in about["headers"])
            yield Sample(path.stem, about["kind"], about["status"], headers, path.with_suffix(".body").read_bytes())


def each(*kinds: str) -> list[Any]:
    """One parameter of a test per recorded answer."""
    found = [pytest.param(sample, id=sample.name) for sample in all_of(*kinds)]
    return found or [_absent(f"no recorded answers in {WIRE} (WARMFOLD_WIRE)")]


def facts(table: str) -> list[Any]:
    """One parameter of a test per row of what is known of providers."""
    if not FACTS.exists():
        return [_absent(f"no facts of providers in {FACTS.parent} (WARMFOLD_PROVIDERS)")]
    rows = json.loads(FACTS.read_text(encoding="utf-8"))[table]
    return [pytest.param(row, id=f"{at}-{row.get('provider', '')}") for at, row in enumerate(rows)]


def _absent(reason: str) -> Any:
    return pytest.param(None, marks=pytest.mark.skip(reason=reason), id="absent")
