"""Where values come from: the file, the environment, the flags. Each is a layer, and each reports its own faults."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from proxy.config.fault import Fault
from proxy.config.kinds import quoted
from proxy.config.model import Config
from proxy.config.translate import LISTS, PREFIX, TABLES, dotted, fields, is_section, unknown

FLAGS: Final = {
    "upstream.base_url": "--upstream",
    "server.host": "--host",
    "server.port": "--port",
    "server.workers": "--workers",
    "store.url": "--store",
    "compaction.max_context_tokens": "--window",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """Values by section and key as they were found, and where each was set."""

    data: Mapping[str, object] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()


def from_file(path: Path | None) -> Layer:
    """The file's values. A byte order mark and CRLF line ends are taken as they come; no file, no values."""
    if path is None:
        return Layer()
    where = str(path)
    try:
        data = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        return Layer(faults=(Fault(where, "", (error.strerror or "an error").lower(), "a file that can be read"),))
    except UnicodeDecodeError as error:
        return Layer(faults=(Fault(where, "", f"no UTF-8 at byte {error.start}", "TOML, which is UTF-8"),))
    except (ValueError, RecursionError) as error:
        problem = "too many levels" if isinstance(error, RecursionError) else str(error)
        return Layer(
            faults=(Fault(where, "", f"a syntax error: {quoted(problem)[1:-1]}", "TOML 1.0, each table and key once"),)
        )
    origins = {dotted((section,)): where for section in data}
    origins |= {
        dotted((section, key)): where for section, table in data.items() if isinstance(table, dict) for key in table
    }
    return Layer(data, origins)


class _Names(Config, BaseSettings):
    """The configuration in the form in which pydantic-settings asks for it; never made, only read for its fields."""

    # Not strict: else the source reads texts by type itself, which it does from 2.12 on, and in 2.14.0 raises at the first misfit.
    model_config = SettingsConfigDict(strict=False)


class _Environment(EnvSettingsSource):
    """Values from an environment that is handed in: os.environ is not read."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        super().__init__(_Names, env_prefix=PREFIX.lower(), env_nested_delimiter="__", env_nested_max_split=1)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {name.lower(): value for name, value in self._environ.items()}

    def decode_complex_value(self, field_name: str, field: FieldInfo | None, value: Any) -> Any:
        """A list as JSON, or of texts separated by commas. What is neither stays text, for validation to report with all else."""
        try:
            return json.loads(value)
        except ValueError:
            texts = (
                field is not None and isinstance(value, str) and not any(map(is_section, get_args(field.annotation)))
            )
            return [item.strip() for item in value.split(",")] if texts else value


def from_environment(environ: Mapping[str, str]) -> Layer:
    """The values of WARMFOLD_SECTION__KEY, parsed by the key's type, and of the lists WARMFOLD_MODELS and WARMFOLD_UPSTREAMS (JSON).

    One with two underscores that names no section is a fault; the others that begin with WARMFOLD_ are judged by strays.py.
    """
    lists = {f"{PREFIX}{name}".upper(): name for name in LISTS}
    ours: dict[str, str] = {}
    origins: dict[str, str] = {}
    faults: list[Fault] = []
    for name, value in environ.items():
        if name in lists:
            origins[lists[name]] = name
            ours[name] = value
        elif name.startswith(PREFIX) and "__" in name:
            section, _, key = name.removeprefix(PREFIX).lower().partition("__")
            if section in TABLES and section not in LISTS:
                origins[dotted((section, key))] = name
                ours[name] = value
            else:
                faults.append(unknown((section, key), name))
    data = {section: _parsed(section, values) for section, values in _Environment(ours)().items()}
    return Layer(data, origins, tuple(faults))


def _parsed(section: str, values: Any) -> Any:
    """The texts of a table read by the types of their keys; what cannot be read stays text, for validation to report with all else."""
    if section in LISTS:
        return values
    parsed = dict(values)
    for key, info in fields(section).items():
        if isinstance(parsed.get(key), str):
            with suppress(ValidationError):
                parsed[key] = TypeAdapter(info.annotation or str).validate_python(parsed[key])
    return parsed


def from_flags(flags: Mapping[str, object]) -> Layer:
    """The values of the flags that were given, by `section.key`; None: not given."""
    data: dict[str, dict[str, object]] = {}
    for name, value in flags.items():
        if value is not None:
            section, _, key = name.partition(".")
            data.setdefault(section, {})[key] = value
    return Layer(data, {name: FLAGS.get(name, name) for name, value in flags.items() if value is not None})
