"""Whose conversation is a request, and what does the store know of it?"""

from __future__ import annotations

import asyncio
import logging

from proxy import clock, tenancy
from proxy import mode as modes
from proxy.config import Compaction, Config, Upstream
from proxy.core import conversation as conversations
from proxy.core import fingerprint, rewrite
from proxy.core.conversation import Conversation
from proxy.core.limits import Limits, limits
from proxy.core.model import Facts, Recalled, SessionId
from proxy.core.openai import ChatRequest
from proxy.core.reader import Reader
from proxy.counts import Counts
from proxy.discovery import Discovery
from proxy.metrics import Metrics, Recall, Unread
from proxy.mode import Mode
from proxy.store import Store
from proxy.talk import Talk
from proxy.target import summaries_at
from proxy.unwritten import Unwritten
from proxy.upstream import Inbound
from proxy.windows import Windows

log = logging.getLogger("warmfold.identify")

PIECE_BYTES = 65_536


class Identifier:
    """Reads requests and looks their conversations up."""

    def __init__(
        self,
        config: Config,
        store: Store,
        tenants: tenancy.Tenants,
        windows: Windows,
        counts: Counts,
        discovery: Discovery,
        unwritten: Unwritten,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._store = store
        self._tenants = tenants
        self._windows = windows
        self._counts = counts
        self._discovery = discovery
        self._unwritten = unwritten
        self._metrics = metrics
        self._reader = Reader()
        self._id_fields = frozenset(config.session.id_fields)

    def parse(self, inbound: Inbound) -> tuple[ChatRequest, Conversation | None] | None:
        """The request, and the earlier conversation that it begins with; None where it cannot be read: the provider shall judge it.

        A compressed body is not read either, and goes out as it came.
        """
        coding = tenancy.header(inbound.headers, "content-encoding").strip().lower()
        if not isinstance(inbound.body, bytes) or coding not in ("", "identity"):
            self._metrics.unread(Unread.CODED)
            return None
        parsed = self._reader.parse(inbound.body, self._id_fields)
        if parsed is None:
            self._metrics.unread(Unread.UNPARSABLE)
        return parsed

    async def talk(
        self,
        inbound: Inbound,
        upstream: Upstream,
        request: ChatRequest,
        known: Conversation | None,
        wanted: Mode | None,
    ) -> Talk | None:
        """Whose conversation this is and what the store knows of it; None where sessions are off for this request."""
        policy = self._config.compaction_for(request.model)
        mode = modes.effective(policy.mode, wanted)
        if mode is Mode.OFF:
            return None
        tenant = await self._tenants.of(inbound.headers)
        if tenant is None:
            return None
        facts = await self._facts(request, known)
        found = conversations.read(
            request, facts, tenant, fingerprint.explicit(self._explicit_id(inbound, request)), known
        )
        window = self._windows.of(upstream.name, request.model, policy, tenant=tenant)
        sizes = limits(policy, window, reasons=found.reasons if found else False)
        if found is None or (_is_too_small(found, sizes) and mode is not Mode.FORCE):
            return None
        self._discovery.ask(inbound, upstream, request.model, window)
        if policy.summary_model:
            self._ask_of_summaries(policy, upstream, inbound, tenant)
        self._reader.remember(found, known)
        recalled = await self._recall(found)
        self._metrics.recalled(_outcome(recalled))
        recalled = self._unwritten.found(recalled, found, known)
        lineage = conversations.lineage(found, recalled)
        factor = self._counts.factor(upstream.name, request.model, recalled.session if recalled else None)
        return Talk(inbound, upstream, policy, mode, found, window, sizes, recalled, lineage, factor, clock.now_ms())

    def _ask_of_summaries(self, policy: Compaction, upstream: Upstream, inbound: Inbound, tenant: str) -> None:
        """How much the summary model holds: no conversation of its own may ever ask."""
        asked, asks = summaries_at(self._config, policy, upstream, inbound)
        own = self._config.compaction_for(policy.summary_model)
        window = self._windows.of(asked.name, policy.summary_model, own, tenant=tenant)
        self._discovery.ask(asks, asked, policy.summary_model, window)

    async def _recall(self, found: Conversation) -> Recalled | None:
        """What the store knows. A checkpoint that what came later speaks against is buried: the one before stands."""
        recalled = await self._store.recall(found.query)
        own, session = (recalled.own, recalled.session) if recalled else (None, None)
        if own is None or session is None or not rewrite.is_outdated(found, own):
            return recalled
        log.info("what came later speaks against a checkpoint session=%s checkpoint=%s", session.id, own.id)
        if not await self._store.undo(session.id, session.counters.turns):
            return recalled
        return await self._store.recall(found.query)

    async def _facts(self, request: ChatRequest, known: Conversation | None) -> list[Facts]:
        """The facts of all messages. A long history that was never seen is read in pieces: nobody else's stream shall wait for it."""
        facts: list[Facts] = []
        piece = 0
        read_before = len(known.request.messages) - 1 if known is not None else 0
        for element, fact in zip(request.messages, self._reader.facts(request, known), strict=True):
            facts.append(fact)
            piece += len(element) if len(facts) > read_before else 0
            if piece > PIECE_BYTES:
                piece = 0
                await asyncio.sleep(0)
        return facts

    def _explicit_id(self, inbound: Inbound, request: ChatRequest) -> str:
        for name in ("x-warmfold-session", *self._config.session.id_headers):
            value = tenancy.header(inbound.headers, name)
            # Our own id, sent back, says nothing that the conversation does not say.
            if value and not (name == "x-warmfold-session" and SessionId.parse(value)):
                return value
        return next((value for key in self._config.session.id_fields if (value := request.text(key))), "")


def _outcome(recalled: Recalled | None) -> Recall:
    if recalled is None:
        return Recall.OUT
    if recalled.own is not None or recalled.foreign:
        return Recall.HIT
    return Recall.KNOWN if recalled.session is not None else Recall.UNKNOWN


def _is_too_small(found: Conversation, sizes: Limits) -> bool:
    """Whether no region can be in it: then there is nothing to look up. A token is at least one byte."""
    return len(found.facts) < 2 or sum(map(len, found.messages)) < sizes.min_region
