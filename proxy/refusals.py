"""What a start refuses although every key is right by itself, each with where the key was set: `check` and `serve` say the same."""

from __future__ import annotations

from dataclasses import replace

from proxy.config import Config, ConfigError, Fault
from proxy.store import connect


def store_url(config: Config) -> tuple[Fault, ...]:
    """The faults that show only when a client for the store is made: an option that no connection takes. Nothing is connected to."""
    if config.store.url == "embedded:":
        return ()
    try:
        connect.client(config.store.url)
    except ConfigError as error:
        return placed(error, config)
    return ()


def placed(error: ConfigError, config: Config) -> tuple[Fault, ...]:
    """The faults with the file, variable or flag that set the key; as they came where nobody set it."""
    origins = {fault.key: config.origin(fault.key) for fault in error.faults}
    return tuple(
        fault if origins[fault.key] == "default" else replace(fault, where=origins[fault.key]) for fault in error.faults
    )
