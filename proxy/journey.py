"""The way of a chat completion, from the client's bytes to the client's bytes. Start here.

read -> identify -> rewrite -> guard -> forward and relay -> observe -> decide -> compact

Each step makes a new value from earlier ones. Everything but forwarding is fail-open: where a step fails, is slow or the store is gone,
the client's request goes out as it came. The steps: identify.py, core/rewrite.py, compactor.py (the guard), forward.py, relay.py, observe.py.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from dataclasses import replace
from typing import TypeVar

from proxy import clock, tenancy
from proxy import mode as modes
from proxy.compactor import Compactor
from proxy.config import Config
from proxy.core import pressure, rewrite, turn
from proxy.core.answer import Tap
from proxy.core.model import Because, Checkpoint, Recalled, Trigger
from proxy.core.stream_usage import UsageFilter
from proxy.downstream import Client
from proxy.errors import Ended, Refused
from proxy.forward import Forwarder
from proxy.identify import Identifier
from proxy.metrics import Metrics
from proxy.mode import Mode
from proxy.observe import Observer
from proxy.relay import relay
from proxy.talk import Route, Talk
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
        observer: Observer,
        compactor: Compactor,
        tasks: Tasks,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._sender = sender
        self._identifier = identifier
        self._forwarder = forwarder
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
        if wanted is Mode.FORCE and upstream.api_key_env:
            raise Refused(403, FORCE_REFUSED, code="force_refused")

        identified = self._identifier.talk(inbound, upstream, *parsed, wanted) if parsed else None
        talk = await self._safely(identified, "identify") if identified else None
        if talk is None:
            await relay(await self._sender.send(inbound, upstream), client)
            return

        plain = Route(rewrite.as_sent(talk.conversation.request), "none")
        route = await self._safely(self._route(talk), "rewrite") or plain
        reply, route, asked = await self._forwarder.forward(talk, route, plain)
        if route.routed.applied is not None:
            self._metrics.checkpoint_applied()
            self._compactor.economy.used(talk.lineage.id.tenant)
        if reply.status == 200:
            self._observer.beside(talk)

        tap = Tap(tenancy.header(reply.headers, "content-type"), tenancy.header(reply.headers, "content-encoding"))
        ended = await relay(
            reply,
            client,
            tap,
            headers=_told(talk, route),
            keep=UsageFilter() if asked and _is_plain_stream(reply) else None,
        )
        # SDKs hang up once they have read the end of a stream: whether the turn is complete is for the answer to say.
        if ended is not Ended.UPSTREAM_BROKE and reply.status == 200:
            self._tasks.spawn(self._observer.after(talk, route, tap), "after-turn")

    async def _route(self, talk: Talk) -> Route:
        """The request as it shall go out: with its checkpoint, and compacted now where it would not fit."""
        found = talk.conversation
        if talk.mode is Mode.OBSERVE or self._forwarder.is_unrewritten(talk):
            return Route(rewrite.as_sent(found.request), self._note(talk))
        applied = self._gate(talk, talk.recalled)
        spare = self._compactor.spare.of(found.query.tenant, found.query.root)
        unsaved = self._gate(talk, Recalled(None, 0, foreign=spare)) if spare else None
        if unsaved is not None and (applied is None or applied.k < unsaved.k):
            applied = unsaved
        routed = rewrite.route(found.request, found.preamble_length, applied)
        route = Route(routed, self._note(talk), unsaved if applied is unsaved else None)
        return await self._safely(self._guard(talk, route), "guard") or route

    def _gate(self, talk: Talk, candidates: Recalled | None) -> Checkpoint | None:
        return rewrite.applicable(candidates, talk.conversation)

    def _note(self, talk: Talk) -> str:
        pending = talk.lineage.known is not None and talk.lineage.known.pending is not None
        return "pending" if pending or self._compactor.is_busy(talk.name) else "none"

    async def _guard(self, talk: Talk, route: Route) -> Route:
        """Compact before forwarding where the request would not fit: as many passes as it takes, within inline_timeout_s."""
        until = clock.monotonic() + talk.policy.inline_timeout_s
        requested = talk.conversation.request.requested_output
        for number in range(talk.policy.max_passes + 1):
            estimate = talk.estimate(route.routed.applied)
            left_s = until - clock.monotonic()
            if not pressure.must_compact(estimate, requested, talk.limits) or left_s <= 0:
                break
            warm = turn.warm_from_live(
                talk.lineage.id, talk.conversation, route.routed, talk.lineage.known, talk.factor
            )
            job = talk.job(warm, Trigger.GUARD, estimate)
            if number < talk.policy.max_passes:
                outcome = await self._compactor.inline(job, left_s)
            else:
                outcome = await self._compactor.without_model(job, Because.NO_ROOM)
            made = outcome.checkpoint
            if made is None and outcome.because in (Because.IN_FLIGHT, Because.SUPERSEDED):
                made = await self._compactor.wait_elsewhere(warm, until - clock.monotonic())
            # Whoever made it: a joined flight may have been another branch's.
            made = self._gate(talk, Recalled(None, 0, own=made))
            shorter = rewrite.route(talk.conversation.request, talk.conversation.preamble_length, made)
            if shorter.applied is None or shorter.applied.k <= (route.routed.applied.k if route.routed.applied else 0):
                if outcome.because in (Because.NO_BOUNDARY, Because.UNSHRINKABLE):
                    self._metrics.unshrinkable()
                failed = f"failed-{outcome.because or Because.CONFLICT}"
                return route if route.note == "inline" else replace(route, note=failed)
            unknown = talk.lineage.known is None and not outcome.committed and outcome.because is None
            route = Route(shorter, "inline", made if unknown else None, outcome.attempt)
        return route

    async def _safely(self, step: Awaitable[T], name: str) -> T | None:
        """The step's value, or None where it failed: the client's turn goes on without it."""
        try:
            return await step
        except Exception as error:
            log.error("step %s failed: %s; the request goes on as it came", name, type(error).__name__)
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
