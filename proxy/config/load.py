"""File, environment and flags -> Config, or all faults at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from proxy.config.checks import findings
from proxy.config.fault import ConfigError, Fault
from proxy.config.layers import Layer, from_environment, from_file, from_flags
from proxy.config.model import Config, Loaded
from proxy.config.strays import strays
from proxy.config.translate import LISTS, Place, fault, is_unknown


def load(path: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]) -> Config:
    """The effective configuration: flags before environment before file before defaults.

    `path` None: no file. `flags` by `section.key`, None where a flag was not given. Raises ConfigError with every fault there is.
    """
    file = from_file(path)
    layers = (file, from_environment(environ), from_flags(flags))
    data = _merged(layers)
    loaded = Loaded(environ, {key: where for layer in layers for key, where in layer.origins.items()})
    faults = [found for layer in layers for found in layer.faults]
    try:
        config = Config.model_validate(data, context=loaded)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        faults += [fault(e, loaded.origins) for e in errors]
        # What is left without the faulty values is valid, and may still contradict itself.
        config = Config.model_validate(_without(data, [e["loc"] for e in errors]), context=loaded)
    named = frozenset(config.variables().values())  # whatever they are called, a key says what they are for
    faults = [found for found in faults if found.where not in named or not is_unknown(found)]
    if not file.faults:  # a file that could not be read might have held the key that a finding misses
        faults += _cross_faults(config, loaded, {found.key for found in faults})
        faults += strays(environ, named)
    if faults:
        raise ConfigError(faults)
    return config


def _merged(layers: Iterable[Layer]) -> dict[str, object]:
    data: dict[str, object] = {}
    for layer in layers:
        for section, values in layer.data.items():
            earlier = data.get(section)
            data[section] = {**earlier, **values} if isinstance(earlier, dict) and isinstance(values, dict) else values
    return data


def _without(data: Mapping[str, object], places: Iterable[Place]) -> dict[str, object]:
    left = dict(data)
    for section, *keys in places:
        table = left.get(str(section))
        if keys and section not in LISTS and isinstance(table, dict):
            left[str(section)] = {key: value for key, value in table.items() if key != keys[0]}
        else:  # a list goes as a whole: its places would move
            left.pop(str(section), None)
    return left


def _cross_faults(config: Config, loaded: Loaded, known: set[str]) -> Iterator[Fault]:
    """The contradictions in which no key takes part that is a fault already."""
    for finding in findings(config, loaded.environ):
        if known.isdisjoint(finding.keys):
            where = next((config.origin(key) for key in finding.keys if config.origin(key) != "default"), "default")
            yield Fault(where, finding.keys[0], finding.found, finding.allowed)
