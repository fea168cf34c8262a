"""`warmfold check`: the effective configuration as a table, and the sizes that follow from it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy.config import ASSUMED_WINDOW_TOKENS, Compaction, Config
from proxy.config.effective import Setting, effective
from proxy.core.limits import limits
from proxy.core.model import Window
from proxy.notices import cache_given_up

_PIPED_COLUMNS: Final = 160  # rich takes 80 for a pipe, where nothing needs the lines to be folded


def report(path: Path | None, config: Config) -> None:
    """Prints what is in effect to stdout; no escape sequences where that is no terminal. `path` None: there is no file."""
    _line(f"{path or 'No file, environment and defaults'}: valid")
    _line("")
    _print(_settings(path, config))
    _line("")
    _line("What follows from it, by model and its window, in tokens:")
    _line("")
    _print(_sizes(config))
    _line("")
    for note in _notes(config):
        _line(note)


def _settings(path: Path | None, config: Config) -> Table:
    table = Table("key", "value", "from", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.columns[1].overflow = "fold"
    at = ""
    for setting in effective(config):
        section = setting.path.rpartition(".")[0]
        if at and section != at:
            table.add_section()
        at = section
        # Text, because a value is not markup: "[abc]" is a pattern of model names.
        table.add_row(Text(setting.path), Text(setting.value), Text(_origin(setting, path)))
    return table


def _origin(setting: Setting, path: Path | None) -> str:
    if setting.origin == "default":
        return "default"
    return "file" if setting.origin == str(path) else f"env {setting.origin}"


def _policies(config: Config) -> Iterator[tuple[str, Compaction]]:
    """What each rule makes of [compaction], by its pattern, and then [compaction] itself for all other models."""
    for rule in config.models:
        yield rule.match, rule.over(config.compaction)
    yield "*", config.compaction


def _sizes(config: Config) -> Table:
    """What the caps and shares of the configuration come to, per rule."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=0)
    table.add_column("model", overflow="fold", min_width=12)
    for heading in ("window", "soft", "hard", "tail", "summary", "ledger", "anchors"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("min region", justify="right", width=6)  # the heading on two lines: all of it within 80 columns
    for name, policy in _policies(config):
        given = policy.max_context_tokens
        window = Window(given or ASSUMED_WINDOW_TOKENS, "config" if given else "assumed")
        size = limits(policy, window, reasons=False)
        tail = str(size.keep_recent) if size.keep_recent == size.tail_cap else f"{size.keep_recent}..{size.tail_cap}"
        cells = (
            size.soft,
            "-" if window.assumed else size.hard,
            tail,
            size.summary,
            size.ledger,
            size.anchors,
            size.min_region,
        )
        table.add_row(Text(name), f"{window.tokens}{'*' if window.assumed else ''}", *map(str, cells))
    return table


def _notes(config: Config) -> Iterator[str]:
    if any(policy.max_context_tokens is None for _, policy in _policies(config)):
        yield "* assumed until the upstream, an overflow error or the price list says another: nothing is compacted before a request."
    yield "Where answers hold thoughts, hard is lower by room for them, at most window/8."
    yield "The tail depends on keep_recent_turns within these bounds."
    for notice in cache_given_up(config):
        yield f"Warning: {notice}"


def _line(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _print(table: Table) -> None:
    terminal = sys.stdout.isatty()
    width = Console(file=sys.stdout).width if terminal else _PIPED_COLUMNS
    target = StringIO()
    Console(file=target, force_terminal=terminal, highlight=False, width=width).print(table)
    sys.stdout.write("".join(f"{row.rstrip()}\n" for row in target.getvalue().splitlines()))
