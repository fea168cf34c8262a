"""What can go wrong with the store, in closed words: a call that fails is counted under one of them and reads as "nothing there"."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class Trouble(StrEnum):
    """Why a call brought nothing, or less than it could have."""

    # the server
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    """It answered with an error: out of memory, read only, no permission."""
    PAUSED = "paused"
    """Not asked: it failed a moment ago."""
    # what lies in it
    TYPE = "type"
    SCHEMA = "schema"
    """Of another version of warmfold."""
    IDENTITY = "identity"
    """Of another session, root or tenant."""
    FORMAT = "format"
    ENTRIES = "entries"
    """Record and entries of a session do not belong together: one of them ran out or was lost."""
    HASH = "hash"
    """Bytes that are not those of their hash."""
    # a turn that was not kept
    DROPPED = "dropped"
    """More is waiting to be written than may wait."""
    STALE = "stale"
    """Older than the stored one: no loss."""
    GAP = "gap"
    """The session it builds on is gone or went another way."""
    TOO_LONG = "too_long"
    """More messages than a session may have."""
    MISSING = "missing"
    """Some of its bytes did not get in."""
    # a checkpoint that was not kept
    GONE = "gone"
    VERSION = "version"
    GENERATION = "generation"
    ORDER = "order"
    # others
    LOCK_LOST = "lock_lost"
    """A lock ran out while it was held: the server was away for longer than it lasts."""
    INTERNAL = "internal"
    """A fault of ours; the log names its type."""


Count = Callable[[Trouble], None]


class StoreUnavailable(Exception):
    """A call brought no answer; `trouble` has been counted. It never leaves proxy.store."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble)
        self.trouble = trouble
