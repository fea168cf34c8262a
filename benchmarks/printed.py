"""Figures as a table: on a terminal by rich, in a pipe as plain columns, or as Markdown with date and machine for docs/benchmarks.md."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

Row = Sequence[str]


def table(title: str, headings: Row, rows: Sequence[Row], *, markdown: bool) -> None:
    """Print one table. Columns of numbers are flush right; an empty cell says that there is nothing to measure."""
    numbers = [all(_is_number(row[at]) for row in rows) for at in range(len(headings))]
    if markdown:
        marks = ["---:" if number else "---" for number in numbers]
        lines = [f"| {' | '.join(cells)} |" for cells in (headings, marks, *rows)]
        print(f"### {title}\n", *lines, "", sep="\n")
        return
    drawn = Table(title=title, title_justify="left", box=SIMPLE_HEAD if sys.stdout.isatty() else None, pad_edge=False)
    for heading, number in zip(headings, numbers, strict=True):
        drawn.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    # A pipe has no width: rich would assume 80 columns and cut.
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(drawn)


def note(text: str) -> None:
    """One line below a table."""
    print(text)


def where(*packages: str) -> str:
    """Date, machine and versions of the packages that matter."""
    found = ", ".join(f"{name} {version(name)}" for name in ("warmfold", *packages))
    today = datetime.datetime.now(tz=datetime.UTC).date()
    return f"{today}, {_processor()}, {os.cpu_count()} CPUs, Linux {platform.release()}, Python {platform.python_version()}, {found}"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _is_number(cell: str) -> bool:
    return not cell or cell.rstrip("%").replace(",", "").replace(".", "").isdecimal()
