"""Clients with long conversations: each request is the whole history again and a little more, as agents and chat apps send it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, cast

from benchmarks.conversation import Conversation, Message, tools

_TOOLS_FROM_BYTES: Final = 8192
_REQUEST: Final = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer sk-benchmark\r\nContent-Type: application/json\r\n"
    b"Accept: application/json\r\nUser-Agent: benchmark\r\n%bContent-Length: %d\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class Script:
    """A conversation of about `size` bytes, to be told by any number of clients: `history` first, then `growth`, one piece for each later request."""

    head: bytes
    history: bytes
    growth: tuple[bytes, ...]
    tail: bytes

    @classmethod
    def of(cls, size: int, steps: int, *, stream: bool = False) -> Script:
        """A script whose body is `size` bytes long in the middle of its `steps`."""
        talk = Conversation(0, result_lines=8 if size < 16_384 else 80)
        growth = tuple(b"," + _json(talk.reply()) + b"," + _json(talk.user()) for _ in range(steps))
        head = (b'{"stream":true,' if stream else b"{") + b'"model":"stub","messages":['
        tail = b'],"tools":[%b]}' % _joined(tools()) if size >= _TOOLS_FROM_BYTES else b"]}"
        room = size - len(head) - len(tail) - sum(map(len, growth)) // 2
        history = _joined([talk.system(), talk.user()])
        while len(more := b"," + _joined([*talk.work(), talk.user()])) + len(history) <= room:
            history += more
        return cls(head, history, growth, tail)


class Client:
    """Client `number` tells the script as its own: every message differs from that of any other number. `headers`: whole lines to add."""

    def __init__(self, script: Script, number: int, headers: bytes = b"") -> None:
        self._script = script
        self._headers = headers
        self._told = script.head + self._own(script.history, number)
        self._growth = [self._own(piece, number) for piece in script.growth]
        self._step = 0

    def request(self) -> bytes:
        """The next request: the whole conversation so far, grown by an answer and a message of the user's."""
        if self._step:
            self._told += self._growth[self._step - 1]
        self._step += 1
        length = len(self._told) + len(self._script.tail)
        return _REQUEST % (self._headers, length) + self._told + self._script.tail

    @staticmethod
    def _own(messages: bytes, number: int) -> bytes:
        return messages.replace(b'"content":"', b'"content":"%06d ' % number).replace(b"call_0_", b"call_%d_" % number)


@dataclass(frozen=True, slots=True)
class Answered:
    """What the clients saw: seconds in all, and each request's milliseconds, sorted."""

    seconds: float
    latencies_ms: Sequence[float]

    @property
    def per_second(self) -> float:
        """Requests per second."""
        return len(self.latencies_ms) / self.seconds

    def percentile(self, share: float) -> float:
        """The latency in ms that this share of the requests did not exceed."""
        return self.latencies_ms[min(len(self.latencies_ms) - 1, int(share * len(self.latencies_ms)))]


async def told(port: int, clients: Sequence[Client], requests: int, concurrency: int) -> Answered:
    """Let each client send so many requests, over `concurrency` connections; the requests of one client follow one another.

    Raises ConnectionError where an answer is not 200 or not whole.
    """
    latencies: list[float] = []

    async def talk(some: Sequence[Client]) -> None:
        _, connection = await asyncio.get_running_loop().create_connection(_Connection, "127.0.0.1", port)
        for client in (one for _ in range(requests) for one in some):
            sent = client.request()
            began = time.perf_counter()
            await connection.ask(sent)
            latencies.append((time.perf_counter() - began) * 1000)
        connection.close()

    began = time.perf_counter()
    await _all(talk(clients[at::concurrency]) for at in range(concurrency))
    return Answered(time.perf_counter() - began, sorted(latencies))


class _Connection(asyncio.Protocol):
    """One kept connection; reads as much of HTTP/1.1 as the relays here send."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[None] | None = None
        self._data = b""
        self._left: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def ask(self, request: bytes) -> asyncio.Future[None]:
        """Done when the answer is there, to its last byte."""
        self._answer = asyncio.get_running_loop().create_future()
        self._data = b""
        self._left = None
        self._transport.write(request)
        return self._answer

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self._left is None:
            at = self._data.find(b"\r\n\r\n")
            if at < 0:
                return
            head, self._data = self._data[:at].lower(), self._data[at + 4 :]
            if not head.startswith(b"http/1.1 200"):
                self._end(ConnectionError(head[:200].decode("ascii", "replace")))
                return
            length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
            self._left = int(length) if length else -1
        if self._left < 0:
            if self._data.endswith(b"0\r\n\r\n"):
                self._end(None)
            else:
                self._data = self._data[-16:]
        elif len(self._data) >= self._left:
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(ConnectionError("the connection ended before the answer"))

    def _end(self, error: ConnectionError | None) -> None:
        if self._answer is None or self._answer.done():
            return
        if error is None:
            self._answer.set_result(None)
        else:
            self._answer.set_exception(error)


async def _all(work: Iterable[Coroutine[None, None, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for one in work:
            group.create_task(one)


def _joined(messages: Iterable[Message]) -> bytes:
    return b",".join(map(_json, messages))


def _json(message: Message) -> bytes:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()
