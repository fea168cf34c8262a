"""Becomes a program that ends when its parent does: `leash.py PARENT PROGRAM ARGUMENT...`. Run as a file, with nothing of ours imported.

A step of its own between fork and exec, since code that runs there inside the proxy (preexec_fn) can hang in a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # man 2 prctl; kept over exec


def main() -> None:
    """Never returns."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)  # it died before the line above took effect
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
