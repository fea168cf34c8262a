"""The listener's answers on a terminal, within its width, or plain and in full where the output goes into a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from io import StringIO
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy import clock

Row = dict[str, Any]
Fact = tuple[str, Callable[[Row], object]]
"""A name and what stands beside it."""


@dataclass(frozen=True, slots=True)
class Column:
    """A heading and what stands under it. On a terminal `short` stands in for it, where there is one, under `heading`."""

    name: str
    of: Callable[[Row], object]
    short: Callable[[Row], object] | None = None
    heading: str = ""

    def on_terminal(self) -> Column:
        """The column as a terminal shows it."""
        return Column(self.heading or self.name, self.short or self.of)


_SESSIONS: Final[Sequence[Column]] = (
    Column("session", lambda s: s["id"]),
    Column("model", lambda s: s["model"], lambda s: _cut(s["model"])),
    Column("turns", lambda s: s["turns"]),
    Column("messages", lambda s: s["messages"]),
    Column("used", lambda s: s["used"]),
    Column("window", lambda s: s["window"]),
    Column("pressure", lambda s: _percent(s["pressure"])),
    Column("covered", lambda s: max((c["to"] for c in s["checkpoints"] if not c["dead"]), default=None)),
    Column("last turn", lambda s: s["last_turn_at"], lambda s: _age(s["last_turn_at"]), "idle"),
)

_NAME_CHARS: Final = 24
_LEFT_OUT: Final = ("window", "used", "messages", "model", "turns", "covered")
"""Columns of a list that a narrow terminal does without, the first one first. The id stays whole: every other command wants it."""

_CHECKPOINTS: Final[Sequence[Column]] = (
    Column("checkpoint", lambda c: c["id"]),
    Column("generation", lambda c: c["generation"]),
    Column("from", lambda c: c["from"]),
    Column("to", lambda c: c["to"]),
    Column("seen", lambda c: c["seen"]),
    Column("state", lambda c: "undone" if c["dead"] else "alive"),
)

_JOURNAL: Final[Sequence[Column]] = (
    Column("at", lambda a: a["at"], lambda a: _to_the_second(a["at"]), "at (UTC)"),
    Column("trigger", lambda a: a["trigger"]),
    Column("outcome", lambda a: a["outcome"]),
    Column("because", lambda a: a["because"]),
    Column("strategy", lambda a: a["strategy"]),
    Column("pressure", lambda a: _percent(a["pressure"])),
    Column("from", lambda a: a["from"]),
    Column("to", lambda a: a["to"]),
    Column("prompt", lambda a: a["prompt"]),
    Column("cached", lambda a: a["cached"]),
    Column("new", lambda a: a["new"]),
    Column("expected", lambda a: a["expected_new"]),
    Column("answer", lambda a: a["completion"]),
    Column("saved", lambda a: a["saved_tokens"]),
    Column("miss", lambda a: a["miss"]),
    Column("payback", lambda a: a["figures"].get("payback_turns")),
    Column("ms", lambda a: a["duration_ms"]),
)

_FACTS: Sequence[Fact] = (
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


def sessions(found: Sequence[Row], *, full: bool = False) -> None:
    """One row per session, in this order. `full`: all columns, also where a terminal is too narrow for them."""
    if full or not sys.stdout.isatty():
        _table(_SESSIONS, found)
        return
    columns = list(_SESSIONS)
    for name in _LEFT_OUT:
        if _fits([column.on_terminal() for column in columns], found):
            break
        columns = [column for column in columns if column.name != name]
    _table([column.on_terminal() for column in columns], found)


def session(of: Row, *, full: bool = False) -> None:
    """The facts one below the other, then the checkpoints, then the journal, newest attempt first.

    Where a terminal is too narrow for a table it is shown in parts, one below the other; each begins with the first column.
    """
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
        if rows and (full or not sys.stdout.isatty()):
            _table(columns, rows)
        elif rows:
            for at, part in enumerate(_parts([column.on_terminal() for column in columns], rows)):
                if at:
                    line("")
                _table(part, rows)


def compaction(told: Row) -> None:
    """What a compaction by hand has made."""
    made = told["checkpoint"]
    line(
        f"compacted: generation {made['generation']} covers messages {made['from']} to {made['to']},"
        f" {made['region_tokens']} tokens became {made['checkpoint_tokens']} (checkpoint {made['id']})"
    )


def deletion(told: Row) -> None:
    """What was forgotten, and what is not gone yet."""
    line(f"deleted: {told['id']}")
    line(f"message texts that it alone used run out within {_hours(told['texts_gone_within_s'])}")


def line(text: str) -> None:
    """One line."""
    sys.stdout.write(_harmless(text) + "\n")


def text(of: str) -> None:
    """A text as it is; on a terminal without what would move its cursor or change its title."""
    sys.stdout.write((_harmless(of) if sys.stdout.isatty() else of).rstrip("\n") + "\n")


def _parts(columns: Sequence[Column], rows: Sequence[Row]) -> list[list[Column]]:
    """The columns in as few tables as the terminal's width allows."""
    first, *rest = columns
    parts: list[list[Column]] = []
    part = [first]
    for column in rest:
        if len(part) > 1 and not _fits([*part, column], rows):
            parts.append(part)
            part = [first]
        part.append(column)
    return [*parts, part]


def _fits(columns: Sequence[Column], rows: Sequence[Row]) -> bool:
    return _width(_built(columns, rows, boxed=True)) <= Console(file=sys.stdout).width


def _table(columns: Sequence[Column], rows: Iterable[Row]) -> None:
    _print(_built(columns, rows, boxed=sys.stdout.isatty()))


def _built(columns: Sequence[Column], rows: Iterable[Row], *, boxed: bool) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0)) if boxed else _grid()
    cells = [[_cell(column.of(row)) for column in columns] for row in rows]
    for index, column in enumerate(columns):
        numbers = bool(cells) and all(
            one[index].plain.rstrip("%").isdecimal() or one[index].plain == "-" for one in cells
        )
        table.add_column(Text(column.name), justify="right" if numbers else "left", no_wrap=True)
    if not boxed:
        table.add_row(*(column.name.replace(" ", "_") for column in columns))
    for one in cells:
        table.add_row(*one)
    return table


def _grid() -> Table:
    return Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))


def _width(table: Table) -> int:
    return Console(width=100_000).measure(table).maximum


def _print(table: Table) -> None:
    # As wide as the rows, not as the terminal, and a pipe has no width at all: an id cut or folded over lines cannot be copied.
    terminal = sys.stdout.isatty()
    target = StringIO()
    console = Console(file=target, force_terminal=terminal, highlight=False, width=_width(table))
    console.print(table, crop=False, soft_wrap=False)
    sys.stdout.write("".join(f"{row.rstrip()}\n" for row in target.getvalue().strip("\n").split("\n")))


def _cell(value: object) -> Text:
    """`-` for what is unknown or empty, so that each row of a pipe has as many words as the heading. Text: no markup is read in it."""
    return Text("-" if value is None or value == "" else _harmless(str(value)).replace("\n", " "))


def _harmless(value: str) -> str:
    """Without control characters: model names come from clients, checkpoints from models."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in value)


def _percent(ratio: float | None) -> str | None:
    return None if ratio is None else f"{ratio:.0%}"


def _cut(name: str | None) -> str | None:
    return name if name is None or len(name) <= _NAME_CHARS else name[: _NAME_CHARS - 1] + "…"


def _to_the_second(iso: str) -> str:
    return iso.partition(".")[0].replace("T", " ")


def _age(iso: str | None) -> str | None:
    """How long ago that was, in the largest unit that fits."""
    if iso is None:
        return None
    seconds = max(0, clock.now_ms() // 1000 - int(datetime.fromisoformat(iso).timestamp()))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _hours(seconds: int) -> str:
    return f"{seconds} seconds" if seconds < 3600 else f"{-(-seconds // 3600)} hours"
