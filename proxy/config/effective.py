"""The effective configuration line by line, for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from proxy.config.compaction import ASSUMED_WINDOW_TOKENS
from proxy.config.kinds import shown
from proxy.config.model import Config
from proxy.config.sections import Section
from proxy.config.translate import LISTS, TABLES, fields


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of the effective configuration: `path` as it is printed (`models[0].match`), `key` without positions (`models.match`).

    `value` is on one line with secrets masked, `origin` as in Config.origin; `set`: somebody set it, be it to its default.
    """

    section: str
    path: str
    key: str
    value: str
    origin: str
    set: bool


def effective(config: Config) -> Iterator[Setting]:
    """Every key in the order of the documentation; of a [[models]] rule only those it sets, because the others come from [compaction]."""
    for section in TABLES:
        value = getattr(config, section)
        if section not in LISTS:
            yield from _table(config, section, section, value)
            continue
        for i, item in enumerate(value):
            yield from _table(config, section, f"{section}[{i}]", item)


def _table(config: Config, section: str, at: str, table: Section) -> Iterator[Setting]:
    for name, info in fields(section).items():
        is_set = name in table.model_fields_set or info.is_required()
        if section == "models" and not is_set:
            continue
        text = shown(getattr(table, name), info)
        if name == "max_context_tokens" and not is_set:
            text = f"not set ({ASSUMED_WINDOW_TOKENS}, assumed)"
        key = f"{section}.{name}"
        origin = config.origin(f"{at}.{name}") if is_set else "default"
        yield Setting(section, f"{at}.{name}", key, text, origin, is_set)
