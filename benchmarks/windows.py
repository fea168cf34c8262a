"""Recorded conversations in windows that are far too small for them: what the client notices, and what it costs.

`python -m benchmarks.windows [--quick] [--only NAME] [--markdown]`

Each recording is played request by request through the whole proxy (its real listener and embedded store) to the simulated provider, which
refuses what OpenAI refuses: once with a window of a half, of a third and of a sixth of the conversation, but never below 1.5 times what no
compaction can shrink + 1024 tokens. Where two shares give the same window it is played once. Takes two minutes on two CPUs, one with --quick.

Must be zero, else it ends with 1: `errors` (answers that a provider without a limit would not have given), `refused` (requests of ours that the
provider did not take), `parted` (calls without their results), `altered` (messages that did not arrive as sent), `no extension`
(compaction requests that are not a routed request and one more message). Of the others: `calls` are compactions, `fit alone` are turns that the
window would have held without them, `processed` are prompt tokens not found in the cache, compactions included, and `processed alone` what a
provider without a limit processes for the same turns. Turns follow each other at once: a back-off of 30 s lasts for the rest of a recording.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks import printed
from proxy.demo.validation import requested_output
from tests import recorded
from tests.journeys.played import Played, direct, measured, play, window_of
from tests.recorded import Step

SHARES: Final = ((1 / 2, "1/2"), (1 / 3, "1/3"), (1 / 6, "1/6"))
LONGEST: Final = "pi-coding-large"
"""Takes half of the time: left out with --quick."""

OUTPUT_SHARE: Final = 8
"""A client asks a model with this window for at most window / 8 tokens; some recordings ask for more than the small window has."""

_HEADINGS: Final = (
    "conversation", "share", "window", "turns", "errors", "refused", "parted", "altered", "calls", "no extension",
    "fit alone", "with a checkpoint", "processed alone", "processed", "largest",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation in one window. `fitting`: turns that this window would have served without compaction. `alone`: tokens that a provider
    without a limit processes for all turns.
    """

    name: str
    share: str
    played: Played
    fitting: int
    alone: int
    largest: int

    @property
    def zeros(self) -> tuple[int, int, int, int, int]:
        """What must be zero: errors that only we give, requests of ours that were refused, calls parted from results, messages that did not arrive
        as sent, compaction requests that extend no routed request.
        """
        played = self.played
        return (
            len(played.errors),
            len(played.refused),
            len(played.orphaned),
            len(played.altered),
            played.compactions - played.extended,
        )

    def cells(self) -> tuple[str, ...]:
        """The row as it is printed."""
        played = self.played
        errors, refused, parted, altered, unextended = self.zeros
        return (
            self.name, self.share, f"{played.window:,}", f"{played.turns:,}", f"{errors}", f"{refused}", f"{parted}", f"{altered}",
            f"{played.compactions:,}", f"{unextended}", f"{self.fitting:,}", f"{played.applied:,}", f"{self.alone:,}", f"{played.processed:,}",
            f"{self.largest:,}",
        )  # fmt: skip


async def measure(name: str) -> list[Row]:
    """The rows of one recording."""
    steps = list(recorded.steps(recorded.load(name)))
    whole, fixed = measured(steps)
    counted = direct(steps)
    alone = sum(processed for _, processed in counted)
    rows: list[Row] = []
    for share, said in SHARES:
        window = window_of(whole, fixed, share)
        if rows and rows[-1].played.window == window:
            rows[-1] = replace(rows[-1], share=f"{rows[-1].share} {said}")
            continue
        modest = [_modest(step, window) for step in steps]
        fitting = sum(prompt < window for prompt, _ in counted)
        with tempfile.TemporaryDirectory(prefix="warmfold-") as folder:
            rows.append(Row(name, said, await play(modest, window, Path(folder)), fitting, alone, whole))
    return rows


def _modest(step: Step, window: int) -> Step:
    """The same request, with no more output asked for than such a model would be asked for."""
    asked = requested_output(step.request)
    if asked is None or asked[1] <= window // OUTPUT_SHARE:
        return step
    return replace(step, request={**step.request, asked[0]: window // OUTPUT_SHARE})


async def _measured(names: Sequence[str]) -> list[Row]:
    found: list[Row] = []
    for name in names:
        found += await measure(name)
    return found


def _totals(rows: Sequence[Row]) -> tuple[str, ...]:
    sums = [sum(column) for column in zip(*(row.zeros for row in rows), strict=True)]
    played = [row.played for row in rows]
    return (
        "all", "", "", f"{sum(p.turns for p in played):,}", *(f"{n}" for n in sums[:4]), f"{sum(p.compactions for p in played):,}", f"{sums[4]}",
        f"{sum(row.fitting for row in rows):,}", f"{sum(p.applied for p in played):,}", f"{sum(row.alone for row in rows):,}",
        f"{sum(p.processed for p in played):,}", "",
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.windows", description="Recorded conversations in windows far too small for them."
    )
    parser.add_argument("--quick", action="store_true", help=f"without {LONGEST}")
    parser.add_argument("--only", action="append", metavar="NAME", help="only this recording; may be given again")
    parser.add_argument("--markdown", action="store_true", help="print Markdown, with date and machine")
    given = parser.parse_args(argv)
    names = [name for name in recorded.names() if not (given.quick and name == LONGEST)]
    if given.only:
        names = [name for name in names if name in given.only]
    if not names:
        raise SystemExit(
            f"no such recorded conversations in {recorded.FOLDER}; WARMFOLD_CONVERSATIONS names the folder"
        )
    logging.disable(logging.WARNING)  # a mechanical checkpoint is worth a line to an operator, not to a table
    rows = asyncio.run(_measured(names))
    printed.table(
        "Recorded conversations in small windows",
        _HEADINGS,
        [*(row.cells() for row in rows), _totals(rows)],
        markdown=given.markdown,
    )
    if given.markdown:
        printed.note(printed.where())
    faults = [(row, fault) for row in rows for fault in row.played.faults]
    for row, fault in faults:
        printed.note(f"{row.name} in {row.played.window:,}: {fault}")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
