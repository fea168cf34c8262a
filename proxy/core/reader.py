"""Reads requests, and remembers: a client sends its whole history each turn, so all but the newest messages were read a turn ago.

A request that begins with the bytes of an earlier one (one comparison of memory) is read from there on: the rest is taken apart as a
request of its own, and what is known of the earlier messages is taken over.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import xxhash

from proxy.core import openai
from proxy.core.conversation import Conversation
from proxy.core.fingerprint import FactsCache
from proxy.core.model import Facts
from proxy.core.openai import ChatRequest

MAX_BYTES = 64 * 1024 * 1024
_KEY_BYTES = (65_536, 8_192, 1_024)
"""Requests are looked up by how they start: conversations with a long common opening are told apart by the longer keys."""

_MESSAGE_BYTES = 600
"""What the objects of one message take besides its bytes."""

_BUCKET = 16
"""So many conversations with the same start are compared; beyond that the oldest is read anew next time."""


@dataclass(frozen=True, slots=True)
class _Known:
    """`conversation` without its body, which its messages make up; `length`: where its last message starts; `key`: of its bucket."""

    conversation: Conversation
    length: int
    key: int


class Reader:
    """One per worker. Bounded in bytes; the conversations used longest ago go first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._facts = FactsCache(max_bytes)
        self._max_bytes = max_bytes
        self._bytes = 0
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._buckets: dict[int, list[int]] = {}
        self._next = 0

    def parse(self, body: bytes, fields: frozenset[str]) -> tuple[ChatRequest, Conversation | None] | None:
        """The request, and the earlier conversation that it begins with; None where the provider shall judge it alone."""
        found = self._find(body)
        if found is not None:
            # The last known message is read again with what follows it, so there always is one to read.
            known = found.conversation
            rest = openai.read(known.request.head + body[found.length :], fields)
            if rest is not None and rest.head == known.request.head:
                return replace(rest, body=body, messages=(*known.request.messages[:-1], *rest.messages)), known
        request = openai.read(body, fields)
        return None if request is None else (request, None)

    def facts(self, request: ChatRequest, known: Conversation | None) -> Iterator[Facts]:
        """The facts of its messages, in order. New ones are read as they are asked for, so a long request can be read in pieces."""
        old = (*known.preamble_facts, *known.facts)[:-1] if known is not None else ()
        yield from old
        for element in request.messages[len(old) :]:
            yield self._facts.of(element)

    def remember(self, conversation: Conversation, known: Conversation | None) -> None:
        """Keep a conversation for its next request, in place of the one that it continues."""
        request = conversation.request
        length = len(request.body) - len(request.tail) - len(request.messages[-1])
        if not _KEY_BYTES[-1] <= length <= self._max_bytes // 4:
            return
        if known is not None:
            self._forget(known)
        number, self._next = self._next, self._next + 1
        key = _start(request.body, next(size for size in _KEY_BYTES if size <= length))
        self._known[number] = _Known(replace(conversation, request=replace(request, body=b"")), length, key)
        self._bytes += length + _MESSAGE_BYTES * len(request.messages)
        bucket = self._buckets.setdefault(key, [])
        bucket.append(number)
        if len(bucket) > _BUCKET:
            self._drop(bucket[0])
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._known)))

    def _find(self, body: bytes) -> _Known | None:
        """The longest conversation, but for its last message, that the body begins with."""
        for size in _KEY_BYTES:
            numbers = self._buckets.get(_start(body, size), ()) if len(body) >= size else ()
            fitting = [number for number in numbers if _begins(body, self._known[number].conversation.request)]
            if fitting:
                number = max(fitting, key=lambda n: self._known[n].length)
                self._known.move_to_end(number)
                return self._known[number]
        return None

    def _forget(self, conversation: Conversation) -> None:
        """Drop the entry of a conversation that has gone on."""
        number = next((n for n, known in reversed(self._known.items()) if known.conversation is conversation), None)
        if number is not None:
            self._drop(number)

    def _drop(self, number: int) -> None:
        known = self._known.pop(number)
        self._bytes -= known.length + _MESSAGE_BYTES * len(known.conversation.request.messages)
        bucket = self._buckets[known.key]
        bucket.remove(number)
        if not bucket:
            del self._buckets[known.key]


def _begins(body: bytes, request: ChatRequest) -> bool:
    """Whether a body begins with a request's bytes up to its last message: message by message, so that no second copy has to be kept."""
    at = len(request.head)
    if not body.startswith(request.head):
        return False
    starts = body.startswith
    for element in request.messages[:-1]:
        if not starts(element, at):
            return False
        at += len(element) + 1
        if body[at - 1 : at] != b",":
            return False
    return True


def _start(body: bytes, size: int) -> int:
    return xxhash.xxh3_64_intdigest(body[:size]) ^ size
