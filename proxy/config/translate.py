"""pydantic's errors as faults: which key, what was found there, what is allowed, and which key was probably meant."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Final, TypeGuard, get_args

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from proxy.config.fault import Fault
from proxy.config.kinds import allowed, quoted, shown
from proxy.config.model import Config
from proxy.config.sections import Section

PREFIX: Final = "WARMFOLD_"
_UNKNOWN_SECTION: Final = "an unknown section"
_UNKNOWN_KEY: Final = "an unknown key"

Place = tuple[int | str, ...]
"""Where in the configuration: (section, key), or (section, index, key) in a list of tables."""


def is_section(type_: object) -> TypeGuard[type[Section]]:
    """Whether this is the class of a table."""
    return isinstance(type_, type) and issubclass(type_, Section)


def _table(info: FieldInfo) -> type[Section]:
    return next(t for t in (info.annotation, *get_args(info.annotation)) if is_section(t))


TABLES: Final[Mapping[str, type[Section]]] = {name: _table(info) for name, info in Config.model_fields.items()}
"""The tables by name, in the order of the documentation."""

LISTS: Final = frozenset(name for name, info in Config.model_fields.items() if not is_section(info.annotation))
"""Those of them that are lists of tables."""


def fields(section: str) -> Mapping[str, FieldInfo]:
    """The keys of a table as they are written, in order; what an entry of a list adds to its base comes first."""
    table = TABLES[section]
    base = table.__base__
    inherited = base.model_fields if is_section(base) else {}
    infos = sorted(table.model_fields.items(), key=lambda item: item[0] in inherited)
    return {info.alias or name: info for name, info in infos}


def variable(section: str, key: str) -> str:
    """The environment variable that sets a key."""
    return f"{PREFIX}{section}__{key}".upper()


def dotted(place: Place) -> str:
    """`compaction.trigger_ratio`, `models[0].match`, `session.id_headers[1]`; a name that is no bare TOML key is quoted."""
    text = ""
    for part in place:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            bare = part.isascii() and part.replace("-", "_").isidentifier()
            text += ("." if text else "") + (part if bare and len(part) <= 80 else quoted(part))
    return text


def origin_of(place: Place, origins: Mapping[str, str]) -> str:
    """Where a value was set: by its key, else by its table."""
    return next((origins[key] for key in (dotted(place[:2]), dotted(place[:1])) if key in origins), "default")


def fault(error: ErrorDetails, origins: Mapping[str, str]) -> Fault:
    """One of pydantic's errors in our words."""
    place = error["loc"]
    where = origin_of(place, origins)
    if error["type"] == "extra_forbidden":
        return unknown(place, where)
    section = str(place[0])
    names = [part for part in place[1:] if isinstance(part, str)]
    if not names:
        kind = "a table" if section not in LISTS else "a list of tables" if len(place) == 1 else "a table in the list"
        return Fault(where, dotted(place), shown(error["input"]), f"{kind}, {_header(section)}")
    info = fields(section)[names[0]]
    found = "nothing" if error["type"] == "missing" else shown(error["input"], info)
    return Fault(where, dotted(place), found, allowed(info))


def unknown(place: Place, where: str) -> Fault:
    """A section or key that does not exist, with the one that was probably meant. Its value is not shown."""
    section, name = str(place[0]), str(place[-1])
    by_variable = where == variable(section, name)

    def spelled(section: str, key: str) -> str:
        return variable(section, key) if by_variable else f"{section}.{key}"

    if by_variable and section in LISTS:
        return Fault(where, dotted(place), "a list of tables", f"the whole list as JSON in {PREFIX}{section.upper()}")
    if section not in TABLES:
        what, known = _UNKNOWN_SECTION, "one of the sections " + ", ".join(TABLES)
        near = [spelled(s, name) if by_variable else s for s in get_close_matches(section, TABLES, 1)]
    else:
        what, known = _UNKNOWN_KEY, f"a key of {_header(section)}"
        near = [spelled(section, key) for key in get_close_matches(name, fields(section), 1)]
    near = near or [spelled(s, name) for s in TABLES if name in fields(s)]
    return Fault(where, dotted(place), what, known + (f", did you mean {near[0]}?" if near else ""))


def is_unknown(of: Fault) -> bool:
    """Whether a fault is a section or key that does not exist."""
    return of.found in (_UNKNOWN_SECTION, _UNKNOWN_KEY)


def _header(section: str) -> str:
    return f"[[{section}]]" if section in LISTS else f"[{section}]"
