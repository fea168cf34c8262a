"""What is wrong with a configuration, one line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One reason to refuse a configuration; its text is one line.

    `where`: the file's path, the environment variable or the flag. `key`: `section.key`, empty where the file as a whole is meant.
    """

    where: str
    key: str
    found: str
    allowed: str

    def __str__(self) -> str:
        place = f"{self.where}: {self.key}" if self.key else self.where
        return f"{place}: found {self.found}; allowed: {self.allowed}"


class ConfigError(Exception):
    """A refused configuration: all its faults, in the order of file, environment, flags and keys. Its text is one line per fault."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = tuple(faults)
