"""The least that a relay with aiohttp can do: read the body, send it on over a pooled connection, hand the answer back as it comes.

`python -m benchmarks.bare_relay --port N --upstream URL`. No sessions, no limits, no retries, no errors told: what warmfold costs beyond this
is what its features cost.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Final

import aiohttp
import uvloop
from aiohttp import web

_HOP_BY_HOP: Final = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "host", "content-length"}
)


class Relay:
    """Sends every request on to `upstream` (scheme, host and port)."""

    def __init__(self, upstream: str, session: aiohttp.ClientSession) -> None:
        self._upstream = upstream
        self._session = session

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """The upstream's answer."""
        body = await request.content.read()  # request.read() refuses more than 1 MiB
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        async with self._session.request(
            request.method, self._upstream + request.path_qs, data=body or None, headers=headers
        ) as reply:
            kept = {k: v for k, v in reply.headers.items() if k.lower() not in _HOP_BY_HOP}
            answer = web.StreamResponse(status=reply.status, headers=kept)
            answer.content_length = reply.content_length
            await answer.prepare(request)
            async for chunk in reply.content.iter_any():
                await answer.write(chunk)
            await answer.write_eof()
            return answer


async def _serve(port: int, upstream: str) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
        runner = web.ServerRunner(web.Server(Relay(upstream, session).handle))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
        await asyncio.Event().wait()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bare_relay", description="A relay without features.")
    parser.add_argument("--port", type=int, required=True, help="port on 127.0.0.1")
    parser.add_argument("--upstream", required=True, help="where requests go: http://127.0.0.1:PORT")
    given = parser.parse_args()
    uvloop.run(_serve(given.port, given.upstream))


if __name__ == "__main__":
    main()
