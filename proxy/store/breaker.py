"""Whether to ask a server that has just failed. Values in, values out; times are those of clock.monotonic()."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """Leave to ask once. `probe`: this call decides whether the others may ask again."""

    probe: bool


class Breaker:
    """Closed: all ask. Open: nobody asks for a pause, which doubles. Then one call probes and the others wait for what it finds.

    Without it every turn would wait for its full deadline while the store is away.
    """

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._until_s = 0.0
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether the last news of the server was bad."""
        return self._pause_s > 0

    def enter(self, now_s: float) -> Ticket | None:
        """Leave to ask, to be handed back to exactly one of the methods below; None: do not ask now."""
        if not self.is_open:
            return Ticket(probe=False)
        if self._probing or now_s < self._until_s:
            return None
        self._probing = True
        return Ticket(probe=True)

    def answered(self, ticket: Ticket) -> None:
        """The server answered. Only a probe closes: an answer to a question from before the failure proves nothing about now."""
        if ticket.probe:
            self._probing = False
            self._pause_s = 0.0

    def failed(self, ticket: Ticket, now_s: float) -> bool:
        """No answer. True if this is news: of many calls that fail together the first one opens, and a failed probe lengthens the pause."""
        was_open = self.is_open
        if ticket.probe:
            self._probing = False
        elif was_open:
            return False
        self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2) if was_open else FIRST_PAUSE_S
        self._until_s = now_s + self._pause_s
        return not was_open

    def abandoned(self, ticket: Ticket) -> None:
        """Nobody waits for the answer any more: it tells nothing, and the next call may probe."""
        if ticket.probe:
            self._probing = False
