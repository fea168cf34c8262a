"""The way of a chat completion, from the client's bytes to the client's bytes. Start here.

read -> identify -> rewrite -> guard -> forward and relay -> observe -> decide -> compact

Each step makes a new value from earlier ones. Everything but forwarding is fail-open: where a step fails, is slow or the store is gone,
the client's request goes out as it came.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import TypeVar

from proxy import clock, tenancy
from proxy import mode as modes
from proxy.compactor import Compactor
from proxy.config import Compaction, Config, Upstream
from proxy.core import conversation as conversations
from proxy.core import fingerprint, pressure, rewrite, stream_usage, turn
from proxy.core.answer import Tap
from proxy.core.conversation import Conversation, Lineage
from proxy.core.limits import Limits, limits
from proxy.core.model import (
    Attempt,
    Because,
    Checkpoint,
    Digest,
    Facts,
    Pending,
    Recalled,
    Saved,
    Session,
    SessionId,
    Trigger,
    Window,
)
from proxy.core.openai import ChatRequest
from proxy.core.plan import Warm
from proxy.core.reader import Reader
from proxy.core.rewrite import Routed
from proxy.core.stream_usage import UsageFilter
from proxy.core.turn import Forwarded
from proxy.downstream import Client
from proxy.errors import Ended, Refused
from proxy.job import Job
from proxy.locality import is_local
from proxy.metrics import Metrics, Recall, Retry
from proxy.mode import Mode
from proxy.relay import relay
from proxy.store import Store
from proxy.summariser import Sender
from proxy.tasks import Tasks
from proxy.upstream import Inbound, Reply
from proxy.warm import stored_warm
from proxy.windows import Windows

log = logging.getLogger("warmfold.journey")

T = TypeVar("T")
K = TypeVar("K")

PIECE_BYTES = 65_536
UNREWRITTEN_S = 600.0
MAX_REMEMBERED = 10_000
_REFUSED = frozenset({400, 422})
"""How providers say that they do not take a request's shape or parameters."""

FORCE_REFUSED = "x-warmfold-mode: force is refused where api_key_env is set: a client could spend the operator's tokens (upstream.api_key_env)."


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
        return round(conversations.weight(self.conversation, applied) * self.factor)


@dataclass(frozen=True, slots=True)
class Route:
    """The request as it goes out, and what happened before: `note` is the value of x-warmfold-compaction.

    `uncommitted`: the checkpoint in it was made for a session that the store does not know yet; it is committed once the turn is saved, and
    `attempt` noted then.
    """

    routed: Routed
    note: str
    uncommitted: Checkpoint | None = None
    attempt: Attempt | None = None


class Journey:
    """Carries chat completions from client to provider and back."""

    def __init__(
        self,
        config: Config,
        store: Store,
        sender: Sender,
        compactor: Compactor,
        tenants: tenancy.Tenants,
        windows: Windows,
        tasks: Tasks,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._store = store
        self._sender = sender
        self._compactor = compactor
        self._tenants = tenants
        self._windows = windows
        self._tasks = tasks
        self._metrics = metrics
        self._reader = Reader()
        self._unwritten: dict[Digest, Session] = {}
        self._unrewritten: dict[str, float] = {}
        self._without_usage: dict[tuple[str, str], float] = {}
        self._id_fields = frozenset(config.session.id_fields)

    async def chat_completion(self, client: Client) -> None:
        """Answer one chat completion."""
        inbound = await client.read()
        wanted = modes.requested(inbound.headers)
        if wanted is Mode.FORCE and self._config.upstream.api_key_env:
            raise Refused(403, FORCE_REFUSED, code="force_refused")
        text = _json(inbound)
        parsed = self._reader.parse(text, self._id_fields) if text else None
        upstream = self._config.upstream_for(parsed[0].model if parsed else "")

        talk = await self._safely(self._identify(inbound, upstream, *parsed, wanted), "identify") if parsed else None
        if talk is None:
            await relay(await self._sender.send(inbound, upstream), client)
            return

        plain = Route(rewrite.as_sent(talk.conversation.request), "none")
        route = await self._safely(self._route(talk), "rewrite") or plain
        reply, route, asked = await self._forward(talk, route, plain)
        if route.routed.applied is not None:
            self._metrics.checkpoint_applied()
            self._compactor.economy.used(talk.lineage.id.tenant)
        self._compact_beside(talk)

        tap = Tap(tenancy.header(reply.headers, "content-type"), tenancy.header(reply.headers, "content-encoding"))
        ended = await relay(reply, client, tap, headers=_told(talk, route), keep=UsageFilter() if asked else None)
        # SDKs hang up once they have read the end of a stream: whether the turn is complete is for the answer to say.
        if ended is not Ended.UPSTREAM_BROKE and reply.status == 200:
            self._tasks.spawn(self._after(talk, route, tap), "after-turn")

    # 2. Identify

    async def _identify(
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
        window = self._windows.of(upstream.name, request.model, policy)
        sizes = limits(policy, window, reasons=found.reasons if found else False)
        if found is None or (_is_too_small(found, sizes) and mode is not Mode.FORCE):
            return None
        self._reader.remember(found, known)
        recalled = await self._store.recall(found.query)
        self._metrics.recalled(_outcome(recalled))
        recalled = self._with_unwritten(recalled, found, known)
        lineage = conversations.lineage(found, recalled)
        factor = conversations.factor(recalled.session if recalled else None)
        return Talk(inbound, upstream, policy, mode, found, window, sizes, recalled, lineage, factor, clock.now_ms())

    def _with_unwritten(
        self, recalled: Recalled | None, found: Conversation, known: Conversation | None
    ) -> Recalled | None:
        """What the store knows, or will know once it has written this conversation's last turn: under load the next one may be faster."""
        if recalled is None or recalled.session is not None or known is None:
            return recalled
        session = self._unwritten.get(known.chain[-1])
        if session is None or session.explicit != found.query.explicit or session.length >= len(found.chain):
            return recalled
        if found.chain[session.length - 1] != known.chain[-1]:
            return recalled
        return replace(recalled, session=session, matched=session.length)

    async def _facts(self, request: ChatRequest, known: Conversation | None) -> list[Facts]:
        """The facts of all messages. A long history that was never seen is read in pieces: nobody else's stream shall wait for it."""
        facts: list[Facts] = []
        piece = 0
        for element, fact in zip(request.messages, self._reader.facts(request, known), strict=True):
            facts.append(fact)
            piece += len(element)
            if known is None and piece > PIECE_BYTES:
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

    # 3. Rewrite

    async def _route(self, talk: Talk) -> Route:
        """The request as it shall go out: with its checkpoint, and compacted now where it would not fit."""
        found = talk.conversation
        if talk.mode is Mode.OBSERVE or self._is_unrewritten(talk):
            return Route(rewrite.as_sent(found.request), self._note(talk))
        applied = rewrite.applicable(talk.recalled, found.chain, found.preamble)
        made = self._compactor.uncommitted(str(talk.lineage.id))
        if applied is None and made is not None:
            applied = rewrite.applicable(Recalled(None, 0, own=made), found.chain, found.preamble)
        routed = rewrite.route(found.request, found.preamble_length, applied)
        route = Route(routed, self._note(talk), made if made is not None and applied is made else None)
        return await self._safely(self._guard(talk, route), "guard") or route

    def _is_unrewritten(self, talk: Talk) -> bool:
        return clock.monotonic() < self._unrewritten.get(str(talk.lineage.id), 0.0)

    def _note(self, talk: Talk) -> str:
        pending = talk.lineage.known is not None and talk.lineage.known.pending is not None
        return "pending" if pending or self._compactor.is_busy(str(talk.lineage.id)) else "none"

    # 4. Guard

    async def _guard(self, talk: Talk, route: Route) -> Route:
        """Compact before forwarding where the request would not fit: as many passes as it takes, within inline_timeout_s."""
        until = clock.monotonic() + talk.policy.inline_timeout_s
        requested = talk.conversation.request.requested_output
        for _ in range(talk.policy.max_passes):
            estimate = talk.estimate(route.routed.applied)
            left_s = until - clock.monotonic()
            if not pressure.must_compact(estimate, requested, talk.limits) or left_s <= 0:
                break
            warm = turn.warm_from_live(
                talk.lineage.id, talk.conversation, route.routed, talk.lineage.known, talk.factor
            )
            job = self._job(talk, warm, Trigger.GUARD, estimate)
            outcome = await self._compactor.inline(job, left_s)
            made = outcome.checkpoint
            if made is None and outcome.because in (Because.IN_FLIGHT, Because.SUPERSEDED):
                made = await self._compactor.wait_elsewhere(warm, until - clock.monotonic())
            shorter = rewrite.route(talk.conversation.request, talk.conversation.preamble_length, made)
            if shorter.applied is None or shorter.applied.k <= (route.routed.applied.k if route.routed.applied else 0):
                if outcome.because is Because.NO_BOUNDARY:
                    self._metrics.unshrinkable()
                failed = f"failed-{outcome.because or Because.CONFLICT}"
                return route if route.note == "inline" else replace(route, note=failed)
            unknown = talk.lineage.known is None and not outcome.committed and outcome.because is None
            route = Route(shorter, "inline", made if unknown else None, outcome.attempt)
        return route

    # 5. Forward

    async def _forward(self, talk: Talk, route: Route, plain: Route) -> tuple[Reply, Route, bool]:
        """The provider's reply, what it was a reply to, and whether we asked for usage on our own account.

        What we made of the request may be refused: then it goes out once without our question, and once as it came. Each is remembered
        only if it was the cure, since the request may deserve its refusal.
        """
        asked, body = self._ask_for_usage(talk, route.routed)
        reply = await self._sender.send(talk.inbound, talk.upstream, body)
        if asked and reply.status in _REFUSED:
            await reply.close()
            reply = await self._sender.send(talk.inbound, talk.upstream, route.routed.body)
            self._metrics.retried(Retry.STREAM_OPTIONS)
            asked = False
            if reply.status not in _REFUSED:
                log.warning("the upstream refuses stream_options upstream=%s", talk.upstream.name)
                _bounded(self._without_usage, (talk.upstream.name, talk.conversation.request.model), math.inf)
        if route.routed.applied is not None and reply.status in _REFUSED:
            await reply.close()
            reply = await self._sender.send(talk.inbound, talk.upstream, plain.routed.body)
            self._metrics.retried(Retry.SHAPE)
            if reply.status not in _REFUSED:
                log.warning(
                    "the upstream refuses a rewritten request, its session goes on unrewritten session=%s",
                    talk.lineage.id,
                )
                _bounded(self._unrewritten, str(talk.lineage.id), clock.monotonic() + UNREWRITTEN_S)
            route = plain
        return reply, route, asked

    def _ask_for_usage(self, talk: Talk, routed: Routed) -> tuple[bool, bytes]:
        """Whether we ask the stream for its usage on our own account, and the body to send."""
        request = talk.conversation.request
        wanted = talk.upstream.stream_usage
        if not request.stream or request.asks_for_usage or wanted == "never":
            return False, routed.body
        if (talk.upstream.name, request.model) in self._without_usage:
            return False, routed.body
        if wanted == "auto" and talk.estimate(routed.applied) < talk.limits.soft // 2:
            return False, routed.body
        asking = stream_usage.asking(routed.body)
        return (False, routed.body) if asking is None else (True, asking)

    # 6. to 8. Observe, decide, compact

    async def _after(self, talk: Talk, route: Route, tap: Tap) -> None:
        """What follows a complete answer: save the request header; compact if it is due."""
        estimate = talk.estimate(route.routed.applied)
        pressing = talk.mode is Mode.FORCE or estimate >= talk.limits.soft // 2
        answer = tap.answer(want_text=pressing)
        if not answer.complete:
            return
        forwarded = turn.forwarded(talk.conversation, route.routed, answer, estimate)
        self._windows.proved(talk.upstream.name, talk.conversation.request.model, talk.window, forwarded.used)
        self._metrics.turn(forwarded.usage, applied=route.routed.applied is not None)
        talk = _counted(talk, route)
        trigger = self._due(talk, route, forwarded)
        waits = trigger is not None and self._waits_for_next_turn(talk, trigger)
        pending = Pending(trigger, clock.now_ms()) if trigger is not None and waits else None
        saved = await self._save(talk, self._saved(talk, route, forwarded, pending))
        if saved and route.uncommitted is not None:
            await self._compactor.commit_later(talk.lineage.id, route.uncommitted, route.attempt, talk.lineage.counters)
        if trigger is not None and not waits and saved:
            warm = turn.warm_after(talk.lineage.id, talk.conversation, route.routed, forwarded, talk.factor)
            self._compactor.later(self._job(talk, warm, trigger, forwarded.used), talk.policy.settle_s)

    async def _save(self, talk: Talk, saved: Saved) -> bool:
        session = turn.as_stored(saved, talk.conversation, talk.lineage.known)
        self._unwritten[saved.end] = session
        try:
            return await self._store.save(saved)
        finally:
            if self._unwritten.get(saved.end) is session:
                del self._unwritten[saved.end]

    def _due(self, talk: Talk, route: Route, forwarded: Forwarded) -> Trigger | None:
        """Whether a compaction is due after this turn."""
        if talk.mode is Mode.FORCE:
            return Trigger.FORCE
        counters = replace(talk.lineage.counters, turns=talk.lineage.counters.turns + 1)
        applied = route.routed.applied is not None
        because = pressure.due(
            forwarded.used,
            talk.limits,
            counters,
            clock.now_ms(),
            applied=applied,
            root_unapplied=talk.recalled.root_unapplied if talk.recalled else 0,
        )
        if because is None and self._compactor.economy.is_paused(talk.lineage.id.tenant, clock.monotonic()):
            because = Because.UNAPPLIED
        if because is None and self._compactor.is_busy(str(talk.lineage.id)):
            because = Because.IN_FLIGHT
        if because is None and talk.mode is Mode.OBSERVE:
            because = Because.OBSERVE
        self._metrics.decision(because)
        return None if because is not None else Trigger.SOFT

    def _waits_for_next_turn(self, talk: Talk, trigger: Trigger) -> bool:
        if trigger is Trigger.FORCE or talk.policy.when == "after_turn":
            return False
        return talk.policy.when == "next_turn" or not is_local(talk.upstream.base_url)

    def _saved(self, talk: Talk, route: Route, forwarded: Forwarded, pending: Pending | None) -> Saved:
        return turn.saved(
            talk.lineage,
            talk.conversation,
            route.routed,
            forwarded,
            upstream=talk.upstream.name,
            window=talk.window,
            started_ms=talk.started_ms,
            now_ms=clock.now_ms(),
            renew_after_ms=self._config.store.session_ttl_s * 250,
            pending=pending,
        )

    def _compact_beside(self, talk: Talk) -> None:
        """A compaction that waited for this turn (`when = "next_turn"`): replay the previous warm request beside it."""
        known = talk.lineage.known
        if known is None or known.pending is None or known.turn is None or talk.mode is Mode.OBSERVE:
            return
        if clock.now_ms() - known.turn.finished_ms > talk.policy.cache_ttl_s * 1000 or self._compactor.is_busy(
            str(known.id)
        ):
            return  # cold by now: this turn warms it, and decides again
        self._tasks.spawn(self._replay_stored(talk, known.pending.trigger), "compact-beside")

    async def _replay_stored(self, talk: Talk, trigger: Trigger) -> None:
        known = talk.lineage.known
        if known is None:
            return
        warm = await stored_warm(self._store, known)
        if warm is None:
            self._metrics.decision(Because.WARM_MISSING)
            return
        used = known.turn.usage.used if known.turn else None
        self._compactor.start(self._job(talk, warm, trigger, used))

    def _job(self, talk: Talk, warm: Warm, trigger: Trigger, used: int | None) -> Job:
        counters = replace(talk.lineage.counters, turns=talk.lineage.counters.turns + 1)
        return Job(warm, trigger, talk.limits, talk.policy, talk.upstream, talk.inbound, counters, used)

    async def _safely(self, step: Awaitable[T], name: str) -> T | None:
        """The step's value, or None where it failed: the client's turn goes on without it."""
        try:
            return await step
        except Exception as error:
            log.error("step %s failed: %s; the request goes on as it came", name, type(error).__name__)
            self._metrics.step_failed(name)
            return None


def _counted(talk: Talk, route: Route) -> Talk:
    """With the compaction that this request went through in its counters: the next soft one keeps its distance from it."""
    if route.note != "inline":
        return talk
    applied = route.routed.applied
    counters = pressure.after_success(
        replace(talk.lineage.counters, turns=talk.lineage.counters.turns + 1), 0, applied=applied is not None
    )
    return replace(talk, lineage=replace(talk.lineage, counters=replace(counters, turns=talk.lineage.counters.turns)))


def _outcome(recalled: Recalled | None) -> Recall:
    if recalled is None:
        return Recall.OUT
    if recalled.own is not None or recalled.foreign:
        return Recall.HIT
    return Recall.KNOWN if recalled.session is not None else Recall.UNKNOWN


def _json(inbound: Inbound) -> bytes | None:
    """The body where it can be read as it stands; None for a compressed one, which goes out as it came."""
    return (
        inbound.body
        if isinstance(inbound.body, bytes) and not tenancy.header(inbound.headers, "content-encoding")
        else None
    )


def _is_too_small(found: Conversation, sizes: Limits) -> bool:
    """Whether no region can be in it: then there is nothing to look up. A token is at least one byte."""
    return len(found.facts) < 2 or sum(map(len, found.messages)) < sizes.min_region


def _bounded(memory: dict[K, float], key: K, value: float) -> None:
    """Remember something about what clients name; forget all of it where they name too much."""
    if len(memory) >= MAX_REMEMBERED:
        memory.clear()
    memory[key] = value


def _told(talk: Talk, route: Route) -> tuple[tuple[str, str], ...]:
    """Our headers on the answer."""
    told = [("x-warmfold-session", str(talk.lineage.id)), ("x-warmfold-compaction", route.note)]
    if route.routed.applied is not None:
        told += [
            ("x-warmfold-checkpoint", route.routed.applied.id),
            ("x-warmfold-covered", str(route.routed.applied.k)),
        ]
    return tuple(told)
