"""The configured store, opened: which server, and how to talk to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from proxy.config import ConfigError, Fault
from proxy.config.kinds import masked_url
from proxy.store import Store, keys
from proxy.store.embedded import DirectoryRefused, EmbeddedServer, Unsupported
from proxy.store.line import Line
from proxy.store.redis import RedisStore
from proxy.store.trouble import Count
from proxy.store.writer import Lifetimes
from proxy.tasks import Tasks

_MAX_CONNECTIONS = 32
"""Per worker. A call holds one for about 0.2 ms, so this is plenty for some ten thousand turns a second."""

_OURS: dict[str, Any] = {
    "max_connections": _MAX_CONNECTIONS,
    "timeout": None,  # waiting for a free connection is part of the call, which has a deadline of its own
    "socket_timeout": None,
    "socket_connect_timeout": None,
    "health_check_interval": 0,
    # RESP2: RESP3 would ask each new connection for maintenance notifications, which Valkey does not know.
    "protocol": 2,
    "decode_responses": False,
    "client_name": "warmfold",
    "driver_info": None,
}

_UNLOCK_S = 2.0

_PLAIN = ("redis://", "rediss://", "unix://")


class Settings(Protocol):
    """The keys of [store]."""

    @property
    def url(self) -> str: ...
    @property
    def data_dir(self) -> str: ...
    @property
    def session_ttl_s(self) -> int: ...
    @property
    def checkpoint_ttl_s(self) -> int: ...
    @property
    def timeout_ms(self) -> int: ...


async def open_store(settings: Settings, count: Count) -> Store:
    """The store that `settings` name. `count` hears of every trouble with it.

    A server that does not answer is no error: it is logged, turns go on without it, and the first call that gets through finds it.
    Raises ConfigError where the settings themselves cannot work.
    """
    if settings.url == "embedded:":
        server = await start_embedded(settings)
        store = _store(server.url, settings, count, server)
    else:
        store = _store(settings.url, settings, count, None)
    await store.ping()
    return store


async def start_embedded(settings: Settings) -> EmbeddedServer:
    """The embedded server, started: for a process whose workers open `url` as their store.

    Raises ConfigError where its directory or this machine cannot have one.
    """
    server = EmbeddedServer(Path(settings.data_dir))
    try:
        await server.start()
    except DirectoryRefused as refused:
        raise _refused("data_dir", str(server.data_dir), str(refused)) from None
    except Unsupported as unsupported:
        raise _refused("url", "embedded:", f"the URL of a Redis or Valkey server ({unsupported})") from None
    await _unlocked(server.url)
    return server


async def _unlocked(url: str) -> None:
    """Remove the locks of a process that is gone: nobody else had this server, and the first request would wait until they run out."""
    server = client(url)
    with suppress(RedisError, OSError, TimeoutError):
        async with asyncio.timeout(_UNLOCK_S):
            async for name in server.scan_iter(match=keys.LOCKS, count=1000):
                await server.unlink(name)
    await server.aclose(close_connection_pool=True)


def _store(url: str, settings: Settings, count: Count, server: EmbeddedServer | None) -> RedisStore:
    lifetimes = Lifetimes(settings.session_ttl_s * 1000, settings.checkpoint_ttl_s * 1000)
    line = Line(client(url), count, settings.timeout_ms, masked_url(url) if server is None else "embedded")
    return RedisStore(line, Tasks(), lifetimes, *([server.close] if server else []))


def client(url: str) -> Redis:
    if not url.startswith(_PLAIN):
        # A cluster or Sentinel client takes this place: all that the store asks of it is execute_command, pipeline and aclose, and all
        # keys of a script or a turn lie in one slot. scan.py is the one that asks each node.
        raise _refused(
            "url", masked_url(url), f"embedded: or a URL that begins with {', '.join(_PLAIN)} (no other is built yet)"
        )
    try:
        # Ours last: a query option such as socket_timeout would bring redis-py's own waiting back.
        options = {**parse_url(url), **_OURS, "retry": Retry(NoBackoff(), 0)}
        pool = BlockingConnectionPool(**options)
        make_connection: Callable[[], object] = pool.make_connection
        make_connection()  # not connected: shows an option that no connection takes
    except (ValueError, TypeError):
        raise _refused("url", masked_url(url), "a URL whose port, database and options redis-py knows") from None
    return Redis.from_pool(pool)


def _refused(key: str, found: str, allowed: str) -> ConfigError:
    return ConfigError([Fault("configuration", f"store.{key}", found, allowed)])
