"""The configuration: `load` makes a Config of file, environment and flags, or raises ConfigError with all faults at once.

Start at sections.py and compaction.py for the keys, at load.py for how they come together. Nothing else reads the environment.
"""

from proxy.config.compaction import ASSUMED_WINDOW_TOKENS, Compaction, ModelRule
from proxy.config.fault import ConfigError, Fault
from proxy.config.kinds import is_loopback, masked_url
from proxy.config.load import load
from proxy.config.model import Config
from proxy.config.sections import (
    Admin,
    NamedUpstream,
    Server,
    Session,
    Store,
    Upstream,
)

__all__ = [
    "ASSUMED_WINDOW_TOKENS",
    "Admin",
    "Compaction",
    "Config",
    "ConfigError",
    "Fault",
    "ModelRule",
    "NamedUpstream",
    "Server",
    "Session",
    "Store",
    "Upstream",
    "is_loopback",
    "load",
    "masked_url",
]
