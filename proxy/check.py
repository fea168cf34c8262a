"""`warmfold check`: the effective configuration as a table, and what of it does nothing yet."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy.config import Config
from proxy.config.effective import Setting, effective

_PIPED_COLUMNS: Final = 160  # rich takes 80 for a pipe, where nothing needs the lines to be folded

_PRICES: Final = "will be used instead of the price list to tell whether a compaction pays"

NO_EFFECT_YET: Final[Mapping[str, str]] = MappingProxyType(
    {
        "server.workers": "will start that many processes; serve refuses more than 1 until then",
        "compaction.strategy": '"transcript" will send a rendered transcript; until then every compaction is a replay',
        "compaction.max_payback_turns": "will hold back soft compactions that do not pay for themselves in time",
        "compaction.summary_model": "will send a transcript to this model; until then the conversation's own model writes the summary",
        "compaction.max_tool_result_chars": "will cut tool results in a transcript",
        "compaction.max_transcript_chars": "will cut a transcript from the front",
        "models.input_usd_per_mtok": _PRICES,
        "models.cached_usd_per_mtok": _PRICES,
        "models.cache_write_usd_per_mtok": _PRICES,
        "models.output_usd_per_mtok": _PRICES,
    }
)
"""The keys that this version accepts and does not act on, and what each will do. The only list: take a key out when it works."""

_TRUE_ALREADY: Final[Mapping[str, str]] = MappingProxyType(
    {
        "server.workers": "1",
        "compaction.strategy": '"replay"',
        "compaction.max_payback_turns": "0",
        "compaction.summary_model": '""',
    }
)
"""Values of these keys that ask for what this version does anyway."""


def without_effect(config: Config) -> Iterator[tuple[Setting, str]]:
    """The settings somebody made that do nothing in this version, each with what it will do."""
    for setting in effective(config):
        key = setting.key
        if setting.section == "models" and key not in NO_EFFECT_YET:  # a rule may hold any [compaction] key
            key = key.replace("models.", "compaction.", 1)
        if setting.set and key in NO_EFFECT_YET and setting.value != _TRUE_ALREADY.get(key):
            yield setting, NO_EFFECT_YET[key]


def report(path: Path, config: Config) -> None:
    """Prints the effective configuration and the settings without effect to stdout; no escape sequences where that is no terminal."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_COLUMNS)
    console.print(Text(f"{path}: valid"), soft_wrap=True)
    console.print()
    console.print(_table(path, config))
    console.print()
    idle = list(without_effect(config))
    console.print(
        "Set, but without effect in this version:" if idle else "Every key that is set has an effect in this version."
    )
    for setting, what in idle:
        console.print(Text(f"  {setting.path} = {setting.value}: {what}"), soft_wrap=True)


def _table(path: Path, config: Config) -> Table:
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


def _origin(setting: Setting, path: Path) -> str:
    if setting.origin == "default":
        return "default"
    return "file" if setting.origin == str(path) else f"env {setting.origin}"
