"""A provider that answers at once: one small completion with usage, or a stream of small chunks.

`python -m benchmarks.stub_provider --port N`. As cheap as Python can be, so that the proxy is what limits a run: it reads HTTP/1.1 with
Content-Length only, which is what relays send, and checks nothing.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Final, cast

import uvloop

CHUNKS: Final = 250
"""Content chunks of one stream."""
CHUNK_EVERY_S: Final = 0.02

_USAGE: Final = (
    b'"usage":{"prompt_tokens":%d,"completion_tokens":7,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}'
)
_COMPLETION: Final = (
    b'{"id":"chatcmpl-stub","object":"chat.completion","created":1700000000,"model":"stub","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"Done. The tests pass."},"finish_reason":"stop"}],' + _USAGE + b"}"
)
_CHUNK: Final = (
    b'data: {"id":"chatcmpl-stub","object":"chat.completion.chunk","created":1700000000,"model":"stub","choices":'
    b'[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
)
_LAST: Final = (
    b'data: {"id":"chatcmpl-stub","object":"chat.completion.chunk","created":1700000000,"model":"stub","choices":'
    b'[{"index":0,"delta":{},"finish_reason":"stop"}],' + _USAGE + b"}\n\ndata: [DONE]\n\n"
)
_JSON_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
_STREAM_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_MODELS: Final = b'{"object":"list","data":[]}'


class Provider(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._head = b""
        self._left = 0
        self._length = 0
        self._streams = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep where the answer goes."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Count the body's bytes; answer at its end."""
        if not self._left:
            self._head += data
            at = self._head.find(b"\r\n\r\n")
            if at < 0:
                return
            head, data, self._head = self._head[:at].lower(), self._head[at + 4 :], b""
            if not head.startswith(b"post"):
                self._transport.write(_JSON_HEAD % len(_MODELS) + _MODELS)
                return
            self._length = self._left = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
            # The load generator puts it first, and no relay moves it.
            self._streams = data.startswith(b'{"stream":true')
        self._left -= len(data)
        if self._left <= 0:
            self._answer()

    def _answer(self) -> None:
        prompt = self._length // 4
        counts = (prompt, prompt + 7, prompt)
        if not self._streams:
            body = _COMPLETION % counts
            self._transport.write(_JSON_HEAD % len(body) + body)
            return
        self._transport.write(_STREAM_HEAD)
        asyncio.get_running_loop().call_later(CHUNK_EVERY_S, self._chunk, CHUNKS, _LAST % counts)

    def _chunk(self, left: int, last: bytes) -> None:
        if self._transport.is_closing():
            return
        piece = _CHUNK if left else last
        self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        if left:
            asyncio.get_running_loop().call_later(CHUNK_EVERY_S, self._chunk, left - 1, last)
        else:
            self._transport.write(b"0\r\n\r\n")


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Provider, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stub_provider", description="A provider that answers at once."
    )
    parser.add_argument("--port", type=int, required=True, help="port on 127.0.0.1")
    uvloop.run(_serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
