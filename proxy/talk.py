"""What is known of one chat completion on its way."""

from __future__ import annotations

from dataclasses import dataclass, replace

from proxy.config import Compaction, Upstream
from proxy.core import conversation as conversations
from proxy.core import region
from proxy.core.conversation import Conversation, Lineage
from proxy.core.limits import Limits
from proxy.core.model import Attempt, Checkpoint, Recalled, Trigger, Turn, Window
from proxy.core.plan import Warm
from proxy.core.rewrite import Routed
from proxy.job import Job
from proxy.mode import Mode
from proxy.upstream import Inbound


@dataclass(frozen=True, slots=True)
class Talk:
    """One request that we know how to read, and all that was found out about it before it was forwarded."""

    inbound: Inbound
    upstream: Upstream
    policy: Compaction
    mode: Mode
    conversation: Conversation
    window: Window
    limits: Limits
    recalled: Recalled | None
    lineage: Lineage
    factor: float
    started_ms: int

    def estimate(self, applied: Checkpoint | None) -> int:
        """Tokens of the routed prompt, corrected by what the provider counted for this session before."""
        weight = conversations.weight(self.conversation, applied)
        turn = self._counted
        if turn is None or turn.usage.prompt is None or turn.applied != (applied.id if applied else None):
            return round(weight * self.factor)
        # What was counted stays counted; only what came since is estimated.
        return max(0, turn.usage.prompt + round((weight - turn.weight) * self.factor))

    @property
    def least(self) -> int:
        """Tokens that stay in the prompt however much is covered: tools, preamble, the newest messages that belong together.

        Cautious where the provider has not counted this conversation yet: our own count may be wrong by a third.
        """
        facts = self.conversation.facts
        cuts = region.legal_cuts(facts)
        coverable = sum(f.weight for f in facts[: cuts[-1]]) if cuts else 0
        whole = conversations.weight(self.conversation, None)
        doubt = region.UNSHRINKABLE if self._counted is None else 1.0
        return round((whole - coverable) * self.factor / doubt)

    @property
    def _counted(self) -> Turn | None:
        """The session's last turn, where this very model counted its prompt: another one counts the same messages otherwise."""
        turn = self.lineage.known.turn if self.lineage.known is not None else None
        if turn is None or turn.usage.prompt is None:
            return None
        asked = self.upstream.name, self.conversation.request.model
        return turn if (turn.upstream, turn.model) == asked else None

    @property
    def name(self) -> str:
        """The session's public id."""
        return str(self.lineage.id)

    def job(self, warm: Warm, trigger: Trigger, used: int | None) -> Job:
        """A compaction of this conversation, by the client's own route and credential. `used`: what the window held."""
        counters = replace(self.lineage.counters, turns=self.lineage.counters.turns + 1)
        inbound = replace(self.inbound, body=None)
        last = self.lineage.known.turn if self.lineage.known is not None else None
        return Job(warm, trigger, self.limits, self.policy, self.upstream, inbound, counters, used, last=last)


@dataclass(frozen=True, slots=True)
class Route:
    """The request as it goes out, and what happened before: `note` is the value of x-warmfold-compaction.

    `uncommitted`: the checkpoint in it was made for a session that the store does not know yet; it is committed once the turn is saved, and
    `attempt` noted then. `whole`: the checkpoint, where only a cut form of it stands in the request: no summariser may read that one instead.
    """

    routed: Routed
    note: str
    uncommitted: Checkpoint | None = None
    attempt: Attempt | None = None
    whole: Checkpoint | None = None
