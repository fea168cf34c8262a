"""The scripts that run inside the server: one call, one moment, one slot. Their text lies in proxy/store/lua."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from proxy.store.keys import SCHEMA

Argument = bytes | str | int
Command = Sequence[Argument]
"""A command as redis-py takes it: its words."""

FIELDS = (
    "id",
    "n",
    "finish",
    "started",
    "version",
    "generation",
    "refs",
    "turns",
    "explicit",
    "last",
    "fails",
    "until",
    "idle",
    "pending",
    "since",
    "touched",
    "bodies_from",
    "created",
    "turn",
)
"""The fields of a session record, in the order in which scripts return them."""


@dataclass(frozen=True, slots=True)
class Script:
    """A script and the name under which a server that has seen it knows it."""

    source: str
    sha: str

    def call(self, keys: Sequence[bytes], args: Command) -> Command:
        """The command that runs it by its name."""
        return ("EVALSHA", self.sha, len(keys), *keys, *args)


def _load(name: str) -> Script:
    folder = resources.files("proxy.store") / "lua"
    prelude = f"local SCHEMA = '{SCHEMA}'\nlocal FIELDS = {{{', '.join(map(repr, FIELDS))}}}\n"
    source = prelude + (folder / "common.lua").read_text("utf-8") + (folder / f"{name}.lua").read_text("utf-8")
    # The server's own way to name scripts; no secret rests on it.
    return Script(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


RECALL = _load("recall")
SESSION = _load("session")
SAVE = _load("save")
COMMIT = _load("commit")
NOTE = _load("note")
UNDO = _load("undo")
DELETE = _load("delete")
LOCK = _load("lock")

_ALL = (RECALL, SESSION, SAVE, COMMIT, NOTE, UNDO, DELETE, LOCK)
BY_SHA: dict[Argument, Script] = {script.sha: script for script in _ALL}
