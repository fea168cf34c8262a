"""What the admin listener takes from the configuration, read once at start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import orjson

from proxy.config import Config
from proxy.core.model import Session
from proxy.store.writer import Lifetimes


@dataclass(frozen=True, slots=True)
class Settings:
    """`token` "": none is asked for. `effective` is the configuration as JSON, masked: it is what GET /config answers.

    `texts_live_s`: how long a message's bytes live at most once no turn renews them.
    """

    host: str
    token: str = field(repr=False)
    effective: bytes
    debounce_turns: Callable[[Session], int]
    texts_live_s: int


def settings(config: Config) -> Settings:
    """The settings. A host open to the network without a token is refused by `proxy.config.load`, not here."""
    return Settings(
        host=config.admin.host,
        token=config.secret(config.admin.token_env) or "",
        effective=_effective(config),
        debounce_turns=lambda session: config.compaction_for(session.turn.model if session.turn else "").debounce_turns,
        texts_live_s=Lifetimes(config.store.session_ttl_s * 1000, config.store.checkpoint_ttl_s * 1000).body_ms // 1000,
    )


def _effective(config: Config) -> bytes:
    """Every key, and of a rule in [[models]] those it sets: its other keys are not its own but those of [compaction]."""
    # It holds no secret but what a store URL may carry, and that is masked when it is dumped: secrets are named by variable.
    value = config.model_dump(mode="json", by_alias=True)
    value["models"] = [rule.model_dump(mode="json", by_alias=True, exclude_unset=True) for rule in config.models]
    return orjson.dumps(value)
