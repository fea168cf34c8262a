"""The listener's answers on a terminal, or plain and in full where the output goes into a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], object]]
"""A heading and what stands under it."""

_SESSIONS: Sequence[Column] = (
    ("session", lambda s: s["id"]),
    ("model", lambda s: s["model"]),
    ("turns", lambda s: s["turns"]),
    ("messages", lambda s: s["messages"]),
    ("used", lambda s: s["used"]),
    ("window", lambda s: s["window"]),
    ("pressure", lambda s: _percent(s["pressure"])),
    ("covered", lambda s: max((c["to"] for c in s["checkpoints"] if not c["dead"]), default=None)),
    ("last turn", lambda s: s["last_turn_at"]),
)

_CHECKPOINTS: Sequence[Column] = (
    ("checkpoint", lambda c: c["id"]),
    ("generation", lambda c: c["generation"]),
    ("from", lambda c: c["from"]),
    ("to", lambda c: c["to"]),
    ("seen", lambda c: c["seen"]),
    ("state", lambda c: "undone" if c["dead"] else "alive"),
)

_JOURNAL: Sequence[Column] = (
    ("at", lambda a: a["at"]),
    ("trigger", lambda a: a["trigger"]),
    ("outcome", lambda a: a["outcome"]),
    ("because", lambda a: a["because"]),
    ("pressure", lambda a: _percent(a["pressure"])),
    ("from", lambda a: a["from"]),
    ("to", lambda a: a["to"]),
    ("prompt", lambda a: a["prompt"]),
    ("cached", lambda a: a["cached"]),
    ("new", lambda a: a["new"]),
    ("answer", lambda a: a["completion"]),
    ("saved", lambda a: a["saved_tokens"]),
    ("miss", lambda a: a["miss"]),
    ("ms", lambda a: a["duration_ms"]),
)

_FACTS: Sequence[Column] = (
    ("session", lambda s: s["id"]),
    ("tenant", lambda s: s["tenant"]),
    ("explicit id", lambda s: s["explicit"]),
    ("model", lambda s: s["model"]),
    ("upstream", lambda s: s["upstream"]),
    ("turns", lambda s: s["turns"]),
    ("messages", lambda s: s["messages"]),
    ("pressure", lambda s: _percent(s["pressure"])),
    ("used", lambda s: s["used"]),
    ("window", lambda s: s["window"]),
    ("window from", lambda s: s["window_origin"]),
    ("cached", lambda s: (s["usage"] or {}).get("cached")),
    ("pending", lambda s: (s["pending"] or {}).get("trigger")),
    ("failures", lambda s: s["counters"]["failures"]),
    ("not before", lambda s: s["counters"]["not_before"]),
    ("unapplied", lambda s: s["counters"]["unapplied"]),
    ("version", lambda s: s["version"]),
    ("created", lambda s: s["created"]),
    ("last turn", lambda s: s["last_turn_at"]),
)


def sessions(found: Sequence[Row]) -> None:
    """One row per session."""
    _table(_SESSIONS, found)


def session(of: Row) -> None:
    """The facts one below the other, then the checkpoints, then the journal, newest attempt first."""
    facts = _grid()
    for name, fact in _FACTS:
        facts.add_row(name, _cell(fact(of)))
    _print(facts)
    for heading, columns, rows in (
        ("checkpoints", _CHECKPOINTS, of["checkpoints"]),
        ("journal", _JOURNAL, of["journal"]),
    ):
        line("")
        line(f"{heading}:" if rows else f"{heading}: none")
        if rows:
            _table(columns, rows)


def compaction(told: Row) -> None:
    """What a compaction by hand has made."""
    made = told["checkpoint"]
    line(
        f"compacted: generation {made['generation']} covers messages {made['from']} to {made['to']},"
        f" {made['region_tokens']} tokens became {made['checkpoint_tokens']} (checkpoint {made['id']})"
    )


def line(text: str) -> None:
    """One line."""
    sys.stdout.write(_harmless(text) + "\n")


def text(of: str) -> None:
    """A text as it is; on a terminal without what would move its cursor or change its title."""
    sys.stdout.write((_harmless(of) if sys.stdout.isatty() else of).rstrip("\n") + "\n")


def _table(columns: Sequence[Column], rows: Iterable[Row]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False) if sys.stdout.isatty() else _grid()
    cells = [[_cell(of(row)) for _, of in columns] for row in rows]
    for index, (heading, _) in enumerate(columns):
        numbers = bool(cells) and all(
            one[index].plain.rstrip("%").isdecimal() or one[index].plain == "-" for one in cells
        )
        table.add_column(Text(heading), justify="right" if numbers else "left", no_wrap=True)
    if table.box is None:
        table.add_row(*(heading.replace(" ", "_") for heading, _ in columns))
    for one in cells:
        table.add_row(*one)
    _print(table)


def _grid() -> Table:
    return Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))


def _print(table: Table) -> None:
    # As wide as the rows, not as the terminal, and a pipe has no width at all: an id cut or folded over lines cannot be copied.
    width = Console(width=100_000).measure(table).maximum
    Console(file=sys.stdout, highlight=False, width=width).print(table, crop=False, soft_wrap=False)


def _cell(value: object) -> Text:
    """`-` for what is unknown or empty, so that each row of a pipe has as many words as the heading. Text: no markup is read in it."""
    return Text("-" if value is None or value == "" else _harmless(str(value)).replace("\n", " "))


def _harmless(value: str) -> str:
    """Without control characters: model names come from clients, checkpoints from models."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in value)


def _percent(ratio: float | None) -> str | None:
    return None if ratio is None else f"{ratio:.0%}"
