"""The way of a chat completion, from the client's bytes to the client's bytes. Start here.

read -> identify -> rewrite -> guard -> forward, shorter where it overflows -> relay -> observe -> decide -> compact

Each step makes a new value from earlier ones. Everything but forwarding is fail-open: where a step fails, is slow or the store is gone,
the client's request goes out as it came. The steps: identify.py, core/rewrite.py, guard.py, recovery.py (forward.py), relay.py, observe.py, compactor.py.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import TypeVar

from proxy import mode as modes
from proxy import tenancy
from proxy.compactor import Compactor
from proxy.config import Config
from proxy.core import rewrite
from proxy.core.answer import Tap
from proxy.core.model import Checkpoint, Recalled
from proxy.core.stream_usage import UsageFilter
from proxy.downstream import Client
from proxy.errors import Ended, Refused
from proxy.forward import Forwarder
from proxy.guard import Guard
from proxy.identify import Identifier
from proxy.metrics import Metrics
from proxy.mode import Mode
from proxy.observe import Observer, Seen
from proxy.recovery import Recovery
from proxy.relay import relay
from proxy.talk import Route, Talk
from proxy.target import spends_our_key
from proxy.tasks import Tasks
from proxy.upstream import Reply, Sender

log = logging.getLogger("warmfold.journey")

T = TypeVar("T")

FORCE_REFUSED = "x-warmfold-mode: force is refused where api_key_env is set: a client could spend the operator's tokens (upstream.api_key_env)."


class Journey:
    """Carries chat completions from client to provider and back."""

    def __init__(
        self,
        config: Config,
        sender: Sender,
        identifier: Identifier,
        forwarder: Forwarder,
        guard: Guard,
        recovery: Recovery,
        observer: Observer,
        compactor: Compactor,
        tasks: Tasks,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._sender = sender
        self._identifier = identifier
        self._forwarder = forwarder
        self._guard = guard
        self._recovery = recovery
        self._observer = observer
        self._compactor = compactor
        self._tasks = tasks
        self._metrics = metrics

    async def chat_completion(self, client: Client) -> None:
        """Answer one chat completion."""
        inbound = await client.read()
        parsed = self._identifier.parse(inbound)
        upstream = self._config.upstream_for(parsed[0].model if parsed else "")
        wanted = modes.requested(inbound.headers)
        if wanted is Mode.FORCE and spends_our_key(self._config, parsed[0].model if parsed else ""):
            raise Refused(403, FORCE_REFUSED, code="force_refused")

        identified = self._identifier.talk(inbound, upstream, *parsed, wanted) if parsed else None
        talk = await self._safely(identified, "identify") if identified else None
        if talk is None:
            await relay(await self._sender.send(inbound, upstream), client)
            return

        plain = Route(rewrite.as_sent(talk.conversation.request), "none")
        route = await self._safely(self._route(talk), "rewrite") or plain
        sent = await self._recovery.send(talk, route, plain)
        talk, route, reply = sent.talk, sent.route, sent.reply
        if route.routed.applied is not None:
            self._metrics.checkpoint_applied()
        seen = await self._safely(self._observer.replied(talk, reply), "beside") or Seen(reply.headers)

        tap = Tap(tenancy.header(reply.headers, "content-type"), tenancy.header(reply.headers, "content-encoding"))
        ended = await relay(
            reply,
            client,
            tap,
            headers=_told(talk, route),
            keep=UsageFilter() if sent.asked and _is_plain_stream(reply) else None,
        )
        # SDKs hang up once they have read the end of a stream: whether the turn is complete is for the answer to say.
        if ended is not Ended.UPSTREAM_BROKE and reply.status == 200:
            self._tasks.spawn(self._safely(self._observer.after(talk, route, tap, seen), "observe"), "after-turn")

    async def _route(self, talk: Talk) -> Route:
        """The request as it shall go out: with its checkpoint, and compacted now where it would not fit."""
        found = talk.conversation
        if talk.mode is Mode.OBSERVE or self._forwarder.is_unrewritten(talk):
            return Route(rewrite.as_sent(found.request), self._note(talk))
        applied = self._gate(talk, talk.recalled)
        spare = self._compactor.spare.of(talk.lineage.id, stored=talk.recalled is not None)
        own = self._compactor.spare.own(talk.lineage.id)
        unsaved = self._gate(talk, Recalled(None, 0, own=own, foreign=spare)) if spare else None
        if unsaved is not None and (
            applied is None or (applied.k < unsaved.k and applied.made_at_ms <= unsaved.made_at_ms)
        ):
            applied = unsaved
        if applied is not None:
            self._compactor.economy.used(talk.lineage.id.tenant, applied.session)
        routed = rewrite.route(found.request, found.preamble_length, applied)
        route = Route(routed, self._note(talk), unsaved if applied is unsaved else None)
        return await self._safely(self._guard.before(talk, route), "guard") or route

    def _gate(self, talk: Talk, candidates: Recalled | None) -> Checkpoint | None:
        return rewrite.applicable(candidates, talk.conversation)

    def _note(self, talk: Talk) -> str:
        pending = talk.lineage.known is not None and talk.lineage.known.pending is not None
        return "pending" if pending or self._compactor.is_busy(talk.name) else "none"

    async def _safely(self, step: Awaitable[T], name: str) -> T | None:
        """The step's value, or None where it failed: the client's turn goes on without it."""
        try:
            return await step
        except Exception as error:
            log.error("step %s failed: %s; the turn goes on without it", name, type(error).__name__)
            self._metrics.step_failed(name)
            return None


def _is_plain_stream(reply: Reply) -> bool:
    """Whether events can be told apart in it."""
    coding = tenancy.header(reply.headers, "content-encoding").lower()
    return coding in ("", "identity") and "text/event-stream" in tenancy.header(reply.headers, "content-type").lower()


def _told(talk: Talk, route: Route) -> tuple[tuple[str, str], ...]:
    """Our headers on the answer."""
    told = [("x-warmfold-session", str(talk.lineage.id)), ("x-warmfold-compaction", route.note)]
    if route.routed.applied is not None:
        told += [
            ("x-warmfold-checkpoint", route.routed.applied.id),
            ("x-warmfold-covered", str(route.routed.applied.k)),
        ]
    return tuple(told)
