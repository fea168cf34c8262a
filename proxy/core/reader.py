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

_BUCKET = 16
"""So many conversations with the same start are compared; beyond that the oldest is read anew next time."""


@dataclass(frozen=True, slots=True)
class _Known:
    """`prefix`: a request's bytes up to its last message, which is read again with what follows: so there always is one to read."""

    prefix: bytes
    conversation: Conversation


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
            head, known = found.conversation.request.head, found.conversation
            rest = openai.read(head + body[len(found.prefix) :], fields)
            if rest is not None and rest.head == head:
                messages = (*known.request.messages[:-1], *rest.messages)
                return replace(rest, body=body, messages=messages), known
        request = openai.read(body, fields)
        return None if request is None else (request, None)

    def facts(self, request: ChatRequest, known: Conversation | None) -> Iterator[Facts]:
        """The facts of its messages, in order. New ones are read as they are asked for, so a long request can be read in pieces."""
        if known is not None:
            old = (*known.preamble_facts, *known.facts)[:-1]
            yield from old
            messages = request.messages[len(old) :]
        else:
            messages = request.messages
        for element in messages:
            yield self._facts.of(element)

    def remember(self, conversation: Conversation, known: Conversation | None) -> None:
        """Keep a conversation for its next request, in place of the one that it continues."""
        request = conversation.request
        prefix = _prefix(request)
        if len(prefix) < _KEY_BYTES[-1] or len(prefix) > self._max_bytes // 4:
            return
        if known is not None:
            self._forget(known)
        number, self._next = self._next, self._next + 1
        self._known[number] = _Known(prefix, conversation)
        self._bytes += 2 * len(prefix)
        bucket = self._buckets.setdefault(_key(prefix, _size(prefix)), [])
        bucket.append(number)
        if len(bucket) > _BUCKET:
            self._drop(bucket[0])
        while self._bytes > self._max_bytes and self._known:
            self._drop(next(iter(self._known)))

    def _find(self, body: bytes) -> _Known | None:
        """The longest remembered prefix of the body."""
        for size in _KEY_BYTES:
            if len(body) < size:
                continue
            numbers = self._buckets.get(_key(body, size))
            if not numbers:
                continue
            fitting = [n for n in numbers if body.startswith(self._known[n].prefix)]
            if fitting:
                number = max(fitting, key=lambda n: len(self._known[n].prefix))
                self._known.move_to_end(number)
                return self._known[number]
        return None

    def _forget(self, conversation: Conversation) -> None:
        """Drop the entry of a conversation that has gone on."""
        prefix = _prefix(conversation.request)
        for number in self._buckets.get(_key(prefix, _size(prefix)), ()):
            if self._known[number].conversation is conversation:
                self._drop(number)
                return

    def _drop(self, number: int) -> None:
        known = self._known.pop(number)
        self._bytes -= 2 * len(known.prefix)
        key = _key(known.prefix, _size(known.prefix))
        bucket = self._buckets[key]
        bucket.remove(number)
        if not bucket:
            del self._buckets[key]


def _prefix(request: ChatRequest) -> bytes:
    return request.body[: len(request.body) - len(request.tail) - len(request.messages[-1])]


def _size(prefix: bytes) -> int:
    return next((size for size in _KEY_BYTES if size <= len(prefix)), 0)


def _key(data: bytes, size: int) -> int:
    return xxhash.xxh3_64_intdigest(data[:size]) ^ size
