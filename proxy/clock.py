"""The only home of time and of names made by chance, so that nothing else depends on either unseen."""

from __future__ import annotations

import base64
import secrets
import time


def now_ms() -> int:
    """Wall clock in milliseconds since 1970. For stamps that others read: it may jump, so never subtract two of them to wait."""
    return time.time_ns() // 1_000_000


def monotonic() -> float:
    """Seconds on a clock that never jumps; only differences mean something."""
    return time.monotonic()  # noqa: TID251  # here is where it comes from


def token() -> str:
    """A new name that nobody can guess: 16 characters of base32, lower case."""
    return base64.b32encode(secrets.token_bytes(10)).decode("ascii").lower()
