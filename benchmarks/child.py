"""Child processes: each answers on a free loopback port from `with` to the end of its block, and its CPU time can be read."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Final, Self

ROOT: Final = Path(__file__).resolve().parent.parent

_UP_WITHIN_S: Final = 60.0
_DOWN_WITHIN_S: Final = 15.0


class ChildFailed(Exception):
    """A child process did not come up; what it wrote last is in the message."""


class Child:
    """`python -m MODULE ARGUMENTS`. It is up once a GET of `ready` is answered at all."""

    def __init__(self, module: str, *arguments: str, ready: str) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._ready = ready
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the block
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, env=_environment(), stdout=self._log, stderr=subprocess.STDOUT
        )
        try:
            self._await_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._log.close()

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process is not None, "it has been entered"
        return self._process.pid

    def written(self) -> str:
        """All that it has written so far."""
        return os.pread(self._log.fileno(), 1 << 24, 0).decode("utf-8", "replace")

    def _await_ready(self) -> None:
        until = time.perf_counter() + _UP_WITHIN_S
        while time.perf_counter() < until and self._process is not None and self._process.poll() is None:
            try:
                urllib.request.urlopen(self._ready, timeout=5).close()
            except urllib.error.HTTPError as error:
                error.close()
                if error.code < 500:
                    return
            except OSError:
                pass
            else:
                return
            time.sleep(0.05)
        raise ChildFailed(f"{' '.join(self._command)}\n{self.written()[-2000:]}")

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_DOWN_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, all its threads, user and system: utime + stime of /proc/PID/stat, but in nanoseconds instead of ticks of 10 ms.

    The number of the clock is what clock_getcpuclockid(3) gives. Linux only.
    """
    return time.clock_gettime((~pid << 3) | 2)


def children(pid: int) -> list[int]:
    """The processes that this one has started and that run. Linux only."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The second field is a name in parentheses, which may hold spaces.
            parent = stat.read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if int(parent) == pid:
            found.append(int(stat.parent.name))
    return found


def free_port() -> int:
    """A loopback port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _environment() -> dict[str, str]:
    """Ours, without what would change a proxy's configuration or put another proxy in between."""
    inherited = os.environ  # noqa: TID251 - handed on to a child
    return {k: v for k, v in inherited.items() if not k.startswith("WARMFOLD_") and not k.lower().endswith("_proxy")}
