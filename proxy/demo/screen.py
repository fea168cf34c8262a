"""What the demo prints: coloured in a terminal, plain lines where its output is piped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from proxy.demo.calls import Call
from proxy.demo.play import Score, Turn

_BAR_CELLS = 10
_WIDTH = 80
"""Of a piped output, and what every line fits into on a terminal."""
_LEGEND = (
    "Prompt tokens computed: those that the provider did not have in its cache, of",
    "the turns served and of the compactions. Facts: asked for after the last turn;",
    "refused: the window was full by then. The model is simulated and writes down",
    "every fact that it is shown: a replay shows it all, a transcript the first 500",
    "characters of each tool result.",
)


class Screen:
    """Writes to standard output as the demo goes on."""

    def __init__(self, window_tokens: int, console: Console | None = None) -> None:
        self._window = window_tokens
        self._console = console or _console()
        self._fancy = self._console.encoding.lower().startswith("utf")

    def opening(self, turns: int) -> None:
        """Who plays against whom."""
        lines = Text.assemble(
            ("warmfold demo", "bold cyan"),
            f"\nA coding agent, {turns} turns, against a simulated provider with a prefix cache\n",
            f"and a window of {self._window:,} tokens. All on this machine: no key, no network.",
        )
        if self._console.is_terminal:
            self._console.print(Panel(lines, border_style="cyan", expand=False))
        else:
            self._console.print(lines.plain)
        self._console.print()

    def part(self, letter: str, text: str) -> None:
        """The next of the three ways."""
        self._console.print(Text.assemble((f"({letter}) ", "bold cyan"), (text, "bold")))

    def done(self, score: Score) -> None:
        """The outcome of one way, in a line."""
        full = score.served == score.turns
        style = "green" if full else "red"
        text = f"    {score.served} of {score.turns} turns served" + ("" if full else ", then the window was full")
        self._console.print(Text(text, style=style))
        self._console.print()

    def columns(self) -> None:
        """The heading of the turns."""
        bar = "pressure".ljust(_BAR_CELLS + 6)
        self._console.print(Text(f"  turn  history   prompt   cached   {bar} checkpoint", style="dim"))

    def turn(self, turn: Turn) -> None:
        """One turn: what the client holds, what the provider read, how full the window is, what stands for the beginning."""
        pressure = turn.used_tokens / self._window
        colour = "green" if pressure < 0.6 else "yellow" if pressure < 0.75 else "red"
        note = f"covers {turn.covered} messages" if turn.checkpoint else "-"
        if turn.compaction in {"inline", "recovered"}:
            note += f" ({turn.compaction})"
        self._console.print(
            Text.assemble(
                f"  {turn.number:>4}  {turn.history_tokens:>7,}  {turn.prompt_tokens:>7,}  {turn.cached_tokens:>7,}   ",
                (f"{pressure:>4.0%} {self._bar(pressure)}", colour),
                ("  " + note, "cyan" if turn.checkpoint else "dim"),
            )
        )

    def compaction(self, number: int, call: Call) -> None:
        """A compaction by replay and how much of it the provider did not have to read again."""
        share = call.cached / call.prompt_tokens
        mark = "└─" if self._fancy else "->"
        text = f"    {mark} checkpoint {number}: replay of {call.prompt_tokens:,} tokens, {call.cached:,} of them cached ({share:.1%})"
        self._console.print(Text(text, style="bold magenta"))

    def table(self, scores: Sequence[Score], seconds: float) -> None:
        """All three side by side."""
        table = Table(box=(box.ROUNDED if self._fancy else box.ASCII), header_style="bold")
        table.add_column("", no_wrap=True)
        for score in scores:
            table.add_column(score.name, justify="right", no_wrap=True)
        for name, figure in _ROWS:
            table.add_row(name, *map(figure, scores))
        self._console.print(table)
        for line in _LEGEND:
            self._console.print(Text(line, style="dim"))
        self._console.print(Text(f"{seconds:.1f} s", style="dim"))

    def failed(self, what: str) -> None:
        """Why there is nothing to show."""
        self._console.print(Text(f"warmfold demo: {what}", style="bold red"))

    def _bar(self, pressure: float) -> str:
        full, empty = ("█", "·") if self._fancy else ("#", ".")
        cells = min(_BAR_CELLS, round(pressure * _BAR_CELLS))
        return full * cells + empty * (_BAR_CELLS - cells)


def _console() -> Console:
    console = Console(highlight=False)
    # Lines must not be broken where a program reads them.
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


def _rated(text: str, good: bool) -> Text:
    return Text(text, style="green" if good else "red")


def _served(score: Score) -> Text:
    return _rated(f"{score.served} of {score.turns}", score.served == score.turns)


def _computed(score: Score) -> Text:
    return Text(f"{score.computed:,}")


def _compactions(score: Score) -> Text:
    return Text(str(len(score.compactions)) if score.compactions else "-")


def _computed_for_them(score: Score) -> Text:
    return Text(f"{score.compaction_computed:,}" if score.compactions else "-")


def _cached(score: Score) -> Text:
    share = score.compaction_cached
    return Text("-") if share is None else _rated(f"{share:.1%}", share > 0.9)


def _written(score: Score) -> Text:
    """Tokens of the summaries: replay spares the provider its reading, not its writing."""
    written = sum(len(call.answer.tokens()) for call in score.compactions if call.answer is not None)
    return Text(f"{written:,}" if score.compactions else "-")


def _facts(score: Score) -> Text:
    """A conversation that was refused for its length cannot be asked either: that says nothing about what it knew."""
    if score.served < score.turns and not score.answered:
        return Text("refused", style="red")
    return _rated(f"{score.answered} of {score.questions}", score.answered == score.questions)


_ROWS: Final[Sequence[tuple[str, Callable[[Score], Text]]]] = (
    ("turns served", _served),
    ("prompt tokens computed", _computed),
    ("compactions", _compactions),
    ("  prompt tokens computed", _computed_for_them),
    ("  of their prompts cached", _cached),
    ("  tokens written", _written),
    ("facts known at the end", _facts),
)
