"""Handing on: an upstream's answer to the client as it comes, and any request that is none of our business both ways."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from proxy.config import Upstream
from proxy.downstream import Client
from proxy.errors import ClientGone, Ended, UpstreamFailed
from proxy.upgrade import tunnel
from proxy.upstream import Headers, Reply, Sender

__all__ = ["Ended", "Filter", "Sender", "Tap", "pass_through", "relay"]

log = logging.getLogger("warmfold.relay")


class Tap(Protocol):
    """Sees an answer pass."""

    def feed(self, chunk: bytes) -> None:
        """The next bytes, cut anywhere."""
        ...


class Filter(Protocol):
    """Withholds a part of a stream."""

    def feed(self, chunk: bytes) -> bytes:
        """What may leave now."""
        ...

    def rest(self) -> bytes:
        """What is left when the stream is over."""
        ...


async def pass_through(client: Client, sender: Sender, upstream: Upstream) -> Ended:
    """How it ended: the client's request to the upstream and its answer back, both as they come. Raises as Upstreams.send does."""
    reply = await sender.send(client.inbound, upstream)
    return await (tunnel(reply, client) if reply.status == 101 else relay(reply, client))


async def relay(
    reply: Reply, client: Client, tap: Tap | None = None, *, headers: Headers = (), keep: Filter | None = None
) -> Ended:
    """How the answer ended, once it has: each piece is written as it comes, and the next one is read when the client has taken it.

    `headers` are ours, behind the upstream's. What `keep` withholds only the tap sees; the answer then loses its Content-Length. A tap that
    raises is not fed again. The reply is closed at the end, at once where the client is gone; a broken body is broken off for the client too.
    """
    try:
        client.outcome = await _handed_on(reply, client, tap, headers, keep)
    except ClientGone:
        client.outcome = Ended.CLIENT_GONE
    except UpstreamFailed:
        client.outcome = Ended.CLIENT_GONE if client.gone else Ended.UPSTREAM_BROKE
        client.abort()
    except asyncio.CancelledError:
        # aiohttp cancels a handler whose client hangs up. Nothing else is cancelled by that, so it ends here, as a value.
        # At shutdown the connection still stands, and the cancellation goes on.
        task = asyncio.current_task()
        if task is None or not client.gone:
            client.abort()
            raise
        task.uncancel()
        client.outcome = Ended.CLIENT_GONE
    finally:
        await reply.close()
    return client.outcome


async def _handed_on(reply: Reply, client: Client, tap: Tap | None, headers: Headers, keep: Filter | None) -> Ended:
    theirs = reply.headers if keep is None else tuple(h for h in reply.headers if h[0].lower() != "content-length")
    await client.start(reply.status, reply.reason, theirs + headers)
    async for chunk in reply.chunks():
        await client.write(chunk if keep is None else keep.feed(chunk))
        tap = _fed(tap, chunk)
    if keep is not None:
        await client.write(keep.rest())
    await client.end()
    return Ended.COMPLETE


def _fed(tap: Tap | None, chunk: bytes) -> Tap | None:
    """The tap, for the next piece; None once it has failed."""
    if tap is None:
        return None
    try:
        tap.feed(chunk)
    except Exception as error:
        log.error("tap failed error=%s", type(error).__name__)
        return None
    return tap
