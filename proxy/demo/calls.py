"""What the simulated provider remembers of each request, and what a hook may make it answer instead."""

from __future__ import annotations

import json
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import orjson
from multidict import CIMultiDictProxy

from proxy.demo.answers import Answer
from proxy.demo.template import Request
from proxy.demo.tokenizer import Tokens


@dataclass(slots=True)
class Call:
    """One request as it arrived and what became of it. Not frozen: it can be watched while it is being answered.

    `arrived` and `finished` come from one counter, so they tell the order of events over all calls; `finished` is None while the
    call runs. `status` is 0 until the answer began. `request` is None where the body is no JSON object.
    """

    number: int
    method: str
    target: str
    headers: CIMultiDictProxy[str]
    raw: bytes
    arrived: int
    peer: str
    request: Request | None = None
    is_compaction: bool = False
    tokens: Tokens = field(default=(), repr=False)
    prompt_tokens: int = 0
    cached: int = 0
    status: int = 0
    answer: Answer | None = None
    aborted: bool = False
    finished: int | None = None

    @property
    def new(self) -> int:
        """Prompt tokens that had to be computed."""
        return self.prompt_tokens - self.cached

    @property
    def streamed(self) -> bool:
        """Whether a stream was asked for."""
        return bool(self.request and self.request.get("stream"))


@dataclass(frozen=True, slots=True)
class Forced:
    """An answer that replaces the provider's own: bytes as they are. `break_off`: hang up after them, in the middle of the answer."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    break_off: bool = False


OnCall = Callable[[Call], Forced | Awaitable[Forced | None] | None]
"""Sees a call before it is judged; None lets it go on. It may wait, to hold a call while a test does something else."""


def parsed(raw: bytes, encoding: str) -> Request | None:
    """The JSON object that a body is, or None."""
    try:
        text = zlib.decompress(raw, wbits=47) if encoding in {"gzip", "deflate"} else raw
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            value = json.loads(
                text, parse_constant=_no_constant
            )  # lone surrogates, big integers: legal JSON all the same
    except (ValueError, RecursionError, zlib.error):
        return None
    return value if isinstance(value, dict) else None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)
