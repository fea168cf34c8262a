"""Connections that go on as something else: past the upstream's 101, bytes pass both ways as they come, whatever they mean.

Frames are not looked at, so extensions, subprotocols, fragments, pings and close codes stay what they are. All that we know of aiohttp's
connections past a 101 stands here; tests/e2e/test_relay_websocket.py notices when it changes.
"""

from __future__ import annotations

import asyncio

from aiohttp.base_protocol import BaseProtocol

from proxy.downstream import Client
from proxy.errors import Ended
from proxy.upstream import Reply


async def tunnel(reply: Reply, client: Client) -> Ended:
    """How it ended: complete where the upstream hung up. `reply` is a 101 to this client's request; it is let go at the end.

    Idle is no fault here: a session may wait for its user. A side that takes nothing for `client.stall_s` ends it, as the client's
    leaving does.
    """
    upstream, downstream = reply.switched(), client.switch(reply.reason, reply.headers)
    up = _Way(downstream, upstream)
    down = _Way(upstream, downstream)
    up.back, down.back = down, up
    try:
        downstream.set_parser(up)  # type: ignore[arg-type]  # aiohttp asks for its WebSocketReader, and calls these two methods of it
        upstream.set_parser(down, None)
        if upstream.transport is None:
            down.feed_eof()  # lost since the 101: nobody will tell
        await asyncio.gather(up.flow(client.stall_s), down.flow(client.stall_s))
        client.outcome = Ended.CLIENT_GONE if client.gone else Ended.COMPLETE
    except asyncio.CancelledError:
        # As in relay(): the client hung up, or, where its connection still stands, we are being stopped.
        task = asyncio.current_task()
        if task is None or not client.gone:
            raise
        task.uncancel()
        client.outcome = Ended.CLIENT_GONE
    finally:
        reply.part()
    return client.outcome


class _Way:
    """One direction. aiohttp calls `feed_data` and `feed_eof`, as it does with its own reader of frames; `back` is the other direction."""

    back: _Way

    def __init__(self, source: BaseProtocol, sink: BaseProtocol) -> None:
        self._source = source
        self._sink = sink
        self._over = False
        self._called = asyncio.Event()

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Write it to the other side at once; where that has no room left, stop reading until it has. False, b"": nothing is left over."""
        transport = self._sink.transport
        if transport is not None and not transport.is_closing():
            transport.write(data)
            if self._sink.writing_paused:
                self._source.pause_reading()
                self._called.set()
        return False, b""

    def feed_eof(self) -> None:
        """The source has hung up, and a WebSocket has no half-open state: both directions are over."""
        self.end()
        self.back.end()

    def end(self) -> None:
        """Let `flow` return."""
        self._over = True
        self._called.set()

    async def flow(self, stall_s: float) -> None:
        """Returns once the tunnel is over, or the sink has taken nothing for `stall_s` seconds."""
        while True:
            await self._called.wait()
            self._called.clear()
            if self._over:
                return
            try:
                async with asyncio.timeout(stall_s):
                    await self._sink._drain_helper()
            except (ConnectionError, TimeoutError):
                self.feed_eof()
                return
            self._source.resume_reading()
