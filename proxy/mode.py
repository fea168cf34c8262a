"""How far compaction may go for one request: what is configured, lowered by the request's own x-warmfold-mode header."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from proxy.tenancy import header

HEADER = "x-warmfold-mode"


class Mode(IntEnum):
    """Ordered: a request may only lower what is configured, except FORCE (compact after this turn whatever the pressure)."""

    OFF = 0
    OBSERVE = 1
    ON = 2
    FORCE = 3


def requested(headers: Sequence[tuple[str, str]]) -> Mode | None:
    """The mode that the client asks for; None where it asks for none, or for one we do not know."""
    return {mode.name.lower(): mode for mode in Mode}.get(header(headers, HEADER).strip().lower())


def effective(configured: str, wanted: Mode | None) -> Mode:
    """The mode that holds. FORCE counts only where compaction is on."""
    allowed = Mode[configured.upper()]
    if wanted is None:
        return allowed
    if wanted is Mode.FORCE:
        return Mode.FORCE if allowed is Mode.ON else allowed
    return min(allowed, wanted)
