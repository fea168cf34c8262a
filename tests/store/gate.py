"""A gate in front of a real server: real sockets whose bytes can be held back, delayed, or refused."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class Gate:
    """Listens on a loopback port and passes bytes on to a server behind a unix socket.

    `stalled`: nothing comes back. `most_delay_s`: each piece of an answer waits for a random while. `asked` counts pieces that went in.
    """

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target).path
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._flow = asyncio.Event()
        self._flow.set()
        self._chance = random.Random(1)
        self.most_delay_s = 0.0
        self.asked = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def stall(self) -> None:
        """Hold all answers back."""
        self._flow.clear()

    def flow(self) -> None:
        """Let answers through again."""
        self._flow.set()

    async def open(self) -> None:
        """Listen: on the port of the last time, if there was one."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Refuse connections and break those that are open."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._open):
                writer.close()
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter) -> None:
        self._open.add(client_out)
        server_in, server_out = await asyncio.open_unix_connection(self._target)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass(client_in, server_out, answers=False))
                both.create_task(self._pass(server_in, client_out, answers=True))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(client_out)
            client_out.close()
            server_out.close()

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, answers: bool) -> None:
        while data := await source.read(65536):
            if answers:
                await asyncio.sleep(self._chance.random() * self.most_delay_s)
                await self._flow.wait()
            else:
                self.asked += 1
            target.write(data)
            await target.drain()
        raise ConnectionResetError  # one side hung up: so does the other


@asynccontextmanager
async def gate_to(url: str) -> AsyncIterator[Gate]:
    """An open gate in front of the server at this URL."""
    gate = Gate(url)
    await gate.open()
    try:
        yield gate
    finally:
        gate.flow()
        await gate.close()
