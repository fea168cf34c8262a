"""A directory for one process: mode 0700, locked as long as the process lives."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

_LOCK = "warmfold.lock"


class DirectoryRefused(Exception):
    """The directory cannot be used; the text says what is allowed instead."""


def claimed(directory: Path) -> IO[str]:
    """The lock on a directory, which is made if need be; closing it, or dying, lets go.

    Raises DirectoryRefused where another process holds it, others could read it, or it cannot be made.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_private(directory)
        # Not truncated: it names the holder until we are it.
        lock = os.fdopen(os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600), "r+")
    except OSError as error:
        raise DirectoryRefused(
            f"a directory that we can make, write to and keep for ourselves, such as one below it ({error.strerror})"
        ) from None
    try:
        # Not a file that exists or not: the kernel lets go of this when its holder dies, however it dies.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = lock.read(32).strip()
        lock.close()
        raise DirectoryRefused(
            f"a directory that no other warmfold uses (this one is used by process {holder or 'unknown'})"
        ) from None
    lock.truncate()
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def _make_private(directory: Path) -> None:
    """Take the rights of others away, from a directory that is new or was ours before: any other may serve somebody else too."""
    if not directory.stat().st_mode & 0o077:
        return
    inside = os.listdir(directory)
    if inside and _LOCK not in inside:
        raise DirectoryRefused(
            "an empty directory, or one that only we can enter (mode 0700): others can enter this one, and it holds other files"
        )
    directory.chmod(0o700)
