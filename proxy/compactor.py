"""The compaction: take the session's lock, replay, validate, commit. One flight per session over all workers; nothing here fails a turn."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Protocol

import orjson

from proxy import clock
from proxy.config import Compaction, Upstream
from proxy.core import anchors, checkpoint, last_resort, ledger, pressure
from proxy.core.answer import read_whole
from proxy.core.checkpoint import Rejected, Summary
from proxy.core.fingerprint import checkpoint_id
from proxy.core.limits import Limits
from proxy.core.model import Attempt, Because, Checkpoint, Commit, Counters, Scope, Session, SessionId, Trigger, Usage
from proxy.core.plan import Plan, Planner, Shape, Warm, ref
from proxy.core.region import Region
from proxy.economy import Economy
from proxy.errors import UpstreamBroken, UpstreamTimeout, UpstreamUnreachable
from proxy.metrics import Metrics, Miss
from proxy.store import Checkpoints
from proxy.tasks import Tasks
from proxy.upstream import Inbound, Reply

log = logging.getLogger("warmfold.compaction")

MAX_ANSWER_BYTES = 4 * 1024 * 1024
LOCK_TTL_S = 20.0
_POLL_S = 0.1
_MAX_SHAPES = 4096
_MAX_UNCOMMITTED = 256
LEDGER_SHARE = 0.3
ANCHOR_SHARE = 0.1

_TRY_AGAIN = frozenset(
    {
        Because.EMPTY,
        Because.TOOL_CALL,
        Because.UNFINISHED,
        Because.ECHO,
        Because.REFUSAL,
        Because.ERROR_TEXT,
        Because.TOO_SHORT,
        Because.TRUNCATED,
    }
)
"""Invalid answers that a second try may mend; at most one."""

# Headers that belong to the client's own request and not to ours: an idempotency key would bring back the turn's own answer.
_NOT_OURS = frozenset(
    {
        "content-length",
        "content-encoding",
        "accept-encoding",
        "accept",
        "idempotency-key",
        "expect",
        "transfer-encoding",
        "if-none-match",
    }
)


class Sender(Protocol):
    """The provider."""

    async def send(self, inbound: Inbound, upstream: Upstream, body: bytes | None = None) -> Reply:
        """The provider's reply once its headers are there. Raises UpstreamUnreachable, UpstreamTimeout, UpstreamBroken."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """A compaction that is wanted. `inbound` is the client's request whose route, credential and affinity headers the call takes.

    `used` is what the window held, for the journal. `span`: a region asked for by hand.
    """

    warm: Warm
    trigger: Trigger
    limits: Limits
    policy: Compaction
    upstream: Upstream
    inbound: Inbound
    counters: Counters
    used: int | None
    span: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended: a checkpoint, or why there is none. `committed` is False where the store did not take it (it may still serve one request)."""

    checkpoint: Checkpoint | None
    because: Because | None
    committed: bool
    attempt: Attempt | None


@dataclass(frozen=True, slots=True)
class _Reading:
    """One call's result: the summary or the reason, and what the call cost. `refused`: the provider did not take the request."""

    verdict: Summary | Rejected
    usage: Usage
    retry_after_s: float = 0.0
    refused: bool = False


class Compactor:
    """Runs compactions, in the background or inline."""

    def __init__(self, store: Checkpoints, sender: Sender, tasks: Tasks, metrics: Metrics) -> None:
        self._store = store
        self._sender = sender
        self._tasks = tasks
        self._metrics = metrics
        self._flights: dict[str, asyncio.Task[Outcome]] = {}
        self._waiting: dict[str, asyncio.Task[None]] = {}
        self._shapes: dict[tuple[str, str], Shape] = {}
        self._began: dict[str, float] = {}
        self._uncommitted: OrderedDict[str, Checkpoint] = OrderedDict()
        self.economy = Economy()

    def is_busy(self, session: str) -> bool:
        """Whether a compaction of this session runs or waits in this worker."""
        return session in self._flights or session in self._waiting

    def later(self, job: Job, settle_s: float) -> None:
        """Compact after `settle_s`; a newer job of the session replaces one that still waits, not one that runs."""
        name = str(job.warm.session)
        waiting = self._waiting.pop(name, None)
        if waiting is not None:
            waiting.cancel()
        if settle_s <= 0:
            self.start(job)
            return

        async def wait() -> None:
            await asyncio.sleep(settle_s)
            del self._waiting[name]
            self.start(job)

        self._waiting[name] = self._tasks.spawn(wait(), "compaction-settle")

    def start(self, job: Job) -> asyncio.Task[Outcome]:
        """The running compaction of this session: a new one, or the one in flight, which is joined."""
        name = str(job.warm.session)
        running = self._flights.get(name)
        if running is None:
            running = self._tasks.spawn(self.compact(job), "compaction")
            self._flights[name] = running
            self._began[name] = clock.monotonic()
            running.add_done_callback(lambda _: self._landed(name))
        return running

    def _landed(self, name: str) -> None:
        self._flights.pop(name, None)
        self._began.pop(name, None)

    async def inline(self, job: Job, timeout_s: float) -> Outcome:
        """The compaction, waited for at most `timeout_s` since it began; then the last resort, which serves this request alone.

        It outlives a caller that gives up: whoever comes next for this session joins it. While failures back off nobody is asked.
        """
        if job.counters.failures and clock.now_ms() < job.counters.not_before_ms:
            return await self._without_model(job, Because.BACKOFF)
        left_s = timeout_s - (clock.monotonic() - self._began.get(str(job.warm.session), clock.monotonic()))
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                return await asyncio.shield(self.start(job))
        except TimeoutError:
            return await self._without_model(job, Because.TIMEOUT)

    async def _without_model(self, job: Job, because: Because) -> Outcome:
        """The last resort beside a compaction that still runs, or that is not to be asked for now. It is committed only where none runs."""
        known = None if self.is_busy(str(job.warm.session)) else await self._store.session(job.warm.session)
        counters = replace(job.counters, last_turn=job.counters.turns)
        planner = Planner(job.warm, job.limits, job.policy)
        return await self._last_resort(job, planner, known, because, counters) or Outcome(None, because, False, None)

    def uncommitted(self, session: str) -> Checkpoint | None:
        """A checkpoint made for a session before its first turn was stored: a retry of the request that it was made for may carry it."""
        return self._uncommitted.get(session)

    async def commit_later(
        self, session: SessionId, checkpoint: Checkpoint, attempt: Attempt | None, counters: Counters
    ) -> None:
        """Commit such a checkpoint, now that the session is stored."""
        if await self._store.commit(Commit(session, 0, checkpoint)):
            self._uncommitted.pop(str(session), None)
            if attempt is not None:
                await self._store.note(session, replace(attempt, outcome="committed"), counters)

    async def compact(self, job: Job) -> Outcome:
        """One compaction, from the lock to the commit."""
        async with self._store.flight(job.warm.session, LOCK_TTL_S) as mine:
            known = await self._store.session(job.warm.session)
            pressing = job.trigger in (Trigger.GUARD, Trigger.OVERFLOW)
            if mine is False and (known is not None or not pressing):
                return self._ended(job, Because.IN_FLIGHT)
            if not pressing and (mine is None or known is None):
                # Its result could not be committed: paid for and thrown away.
                return self._ended(job, Because.STORE)
            if known is not None and _is_superseded(known, job.warm):
                return self._ended(job, Because.SUPERSEDED)
            shape = self._shapes.get((job.upstream.name, job.warm.model), Shape.ANSWER)
            planner = Planner(job.warm, job.limits, job.policy, shape)
            planned = planner.plan(job.trigger, job.span)
            if isinstance(planned, Plan):
                return await self._call(job, planned, known, planner)
            if planned is Because.NO_ROOM:
                counters = pressure.after_success(job.counters, clock.now_ms(), applied=job.warm.applied is not None)
                if outcome := await self._last_resort(job, planner, known, planned, counters):
                    return outcome
            return await self._skipped(job, planned)

    async def _call(self, job: Job, plan: Plan, known: Session | None, planner: Planner) -> Outcome:
        began = clock.monotonic()
        reading = await self._read(job, plan)
        if reading.refused:
            reading, plan = await self._in_another_shape(job, plan, planner, reading)
        if isinstance(reading.verdict, Rejected) and reading.verdict.because in _TRY_AGAIN:
            self._metrics.compaction_retried(reading.verdict.because)
            reading = await self._read(job, plan)
        made = self._made(job, plan, reading.verdict, known)
        duration_ms = round((clock.monotonic() - began) * 1000)
        if isinstance(made, Rejected):
            attempt = _attempt(job, plan, reading.usage, "failed", made.because, duration_ms, None)
            counters = pressure.after_failure(job.counters, clock.now_ms(), reading.retry_after_s)
            await self._noted(job, attempt, counters)
            resort = await self._last_resort(job, planner, known, made.because, counters)
            return resort or Outcome(None, made.because, False, attempt)
        counters = pressure.after_success(job.counters, clock.now_ms(), applied=job.warm.applied is not None)
        attempt = _attempt(job, plan, reading.usage, "committed", "", duration_ms, made)
        return await self._commit(job, made, known, attempt, counters)

    async def _in_another_shape(
        self, job: Job, plan: Plan, planner: Planner, reading: _Reading
    ) -> tuple[_Reading, Plan]:
        """The provider refused the request: once without the rebuilt answer, once with an answer of ours in between. What works is remembered.

        Templates of the Mistral and Gemma families refuse a user message behind another one, or behind a tool result.
        """
        tried = {plan.replay.body}
        for shape in (Shape.PLAIN, Shape.BRIDGED):
            other = replace(planner, shape=shape).plan(job.trigger, job.span)
            if not isinstance(other, Plan) or other.replay.body in tried:
                continue
            tried.add(other.replay.body)
            self._metrics.compaction_retried(Because.STATUS)
            reading, plan = await self._read(job, other), other
            if not reading.refused:
                if len(self._shapes) < _MAX_SHAPES:
                    self._shapes[job.upstream.name, job.warm.model] = shape
                break
        return reading, plan

    async def _last_resort(
        self, job: Job, planner: Planner, known: Session | None, because: Because, counters: Counters
    ) -> Outcome | None:
        """A checkpoint without a model, where the request would not fit otherwise; None where that is not so, or nothing can be covered.

        `counters` are those that hold after it: it is no success, so it ends no back-off.
        """
        if job.trigger not in (Trigger.GUARD, Trigger.OVERFLOW) or job.limits.window.assumed:
            return None
        region = planner.without_call()
        if isinstance(region, Because):
            return None
        warm = job.warm
        earlier = warm.applied.text if warm.applied else ""
        covered = (*warm.covered(region)[0], *warm.covered(region)[1])
        budget = int(job.limits.summary / max(1.0, warm.factor))
        text = last_resort.summary(covered, earlier, budget)
        made = self._checkpoint(job, region, region.k, text, known, Scope.REGION, "mechanical")
        if isinstance(made, Rejected):
            return None
        log.warning("mechanical checkpoint session=%s because=%s covered=%d", warm.session, because, region.k)
        attempt = _attempt(job, None, Usage(), "committed", because, 0, made)
        attempt = replace(attempt, from_=region.from_, k=region.k, strategy="mechanical")
        return await self._commit(job, made, known, attempt, counters)

    async def _commit(
        self, job: Job, made: Checkpoint, known: Session | None, attempt: Attempt, counters: Counters
    ) -> Outcome:
        """Make it the session's newest. A session that the store does not know has no version yet: it is committed behind its first turn."""
        if known is None:
            attempt = replace(attempt, outcome="made")
            self._count(job, attempt)
            self._uncommitted[str(job.warm.session)] = made
            if len(self._uncommitted) > _MAX_UNCOMMITTED:
                self._uncommitted.popitem(last=False)
            return Outcome(made, None, False, attempt)
        if not await self._store.commit(Commit(job.warm.session, known.version, made)):
            attempt = replace(attempt, outcome="failed", because=Because.CONFLICT, generation=0)
            await self._noted(job, attempt, job.counters)
            return Outcome(made, Because.CONFLICT, False, attempt)
        if job.trigger is Trigger.SOFT:
            self.economy.made(job.warm.session.tenant, clock.monotonic())
        await self._noted(job, attempt, counters)
        return Outcome(made, None, True, attempt)

    async def _read(self, job: Job, plan: Plan) -> _Reading:
        """Ask for the summary once. Whatever goes wrong is a reason."""
        headers = tuple((k, v) for k, v in job.inbound.headers if k.lower() not in _NOT_OURS)
        inbound = replace(
            job.inbound, headers=(*headers, ("Accept", "application/json"), ("Accept-Encoding", "identity"))
        )
        try:
            async with asyncio.timeout(job.policy.timeout_s):
                reply = await self._sender.send(inbound, job.upstream, plan.replay.body)
                try:
                    data = await reply.read(MAX_ANSWER_BYTES)
                finally:
                    await reply.close()
        except (TimeoutError, UpstreamTimeout):
            return _Reading(Rejected(Because.TIMEOUT), Usage())
        except (UpstreamUnreachable, UpstreamBroken):
            return _Reading(Rejected(Because.UNREACHABLE), Usage())
        if reply.status != 200:
            because = Because.RATE_LIMITED if reply.status in (429, 503) else Because.STATUS
            return _Reading(Rejected(because), Usage(), _retry_after_s(reply), refused=reply.status in (400, 422))
        try:
            answer = orjson.loads(data)
        except orjson.JSONDecodeError:
            return _Reading(Rejected(Because.MALFORMED), Usage())
        return _Reading(checkpoint.summary_of(answer), read_whole(data, want_text=False).usage)

    def _made(self, job: Job, plan: Plan, verdict: Summary | Rejected, known: Session | None) -> Checkpoint | Rejected:
        if isinstance(verdict, Rejected):
            return verdict
        return self._checkpoint(job, plan.region, plan.read_to, verdict, known, plan.scope, "replay")

    def _checkpoint(
        self,
        job: Job,
        region: Region,
        read_to: int,
        summary: Summary,
        known: Session | None,
        scope: Scope,
        strategy: str,
    ) -> Checkpoint | Rejected:
        warm = job.warm
        in_front, behind = warm.covered(region)
        before = warm.applied
        # Estimates, not yet corrected; and never more of a small region than leaves room for it to shrink.
        share = 1 / max(1.0, warm.factor)
        most = region.tokens * share
        room = int(min(job.limits.ledger * share, most * LEDGER_SHARE))
        earlier = (*ledger.ledger(in_front, region.from_, (), room), *(before.ledger if before else ()))
        words = ledger.ledger(behind, max(region.from_, warm.offset), earlier, room)
        present = f"{summary.text}\n{ledger.rendered(words)}"
        exact = anchors.anchors(
            (*in_front, *behind),
            present,
            before.anchors if before else (),
            int(min(job.limits.anchors * share, most * ANCHOR_SHARE)),
        )
        generation = known.generation + 1 if known is not None else 1
        name = checkpoint_id(str(job.warm.session), generation, summary.text)
        return checkpoint.make(
            summary,
            ref(region, read_to, job.warm, name, generation),
            session=str(job.warm.session),
            ledger=words,
            anchors=exact,
            region_tokens=region.tokens,
            factor=job.warm.factor,
            model=job.warm.model,
            scope=scope,
            strategy=strategy,
            made_at_ms=clock.now_ms(),
            anyway=job.trigger is not Trigger.SOFT,
        )

    async def _skipped(self, job: Job, because: Because) -> Outcome:
        """Not worth it: said in the journal, and not asked again for debounce_turns turns."""
        attempt = _attempt(job, None, Usage(), "skipped", because, 0, None)
        counters = replace(job.counters, last_turn=job.counters.turns)
        await self._noted(job, attempt, counters)
        return Outcome(None, because, False, attempt)

    def _ended(self, job: Job, because: Because) -> Outcome:
        """Somebody else did or does it: no line in the journal, it is theirs."""
        self._metrics.compaction(job.trigger, "skipped", because, Usage(), None, 0.0, 0)
        return Outcome(None, because, False, None)

    async def _noted(self, job: Job, attempt: Attempt, counters: Counters) -> None:
        self._count(job, attempt)
        await self._store.note(job.warm.session, attempt, counters)

    def _count(self, job: Job, attempt: Attempt) -> None:
        usage = Usage(prompt=attempt.prompt, completion=attempt.completion, cached=attempt.cached)
        saved = attempt.saved_tokens or 0
        if attempt.miss:
            self._metrics.cache_missed(Miss(attempt.miss))
        self._metrics.compaction(
            job.trigger, attempt.outcome, attempt.because, usage, attempt.new, attempt.duration_ms / 1000, saved
        )
        log.info(
            "compaction %s session=%s trigger=%s because=%s covered=%d prompt=%s cached=%s new=%s expected_new=%s duration_ms=%d",
            attempt.outcome,
            job.warm.session,
            attempt.trigger,
            attempt.because or "-",
            attempt.k,
            attempt.prompt,
            attempt.cached,
            attempt.new,
            attempt.expected_new,
            attempt.duration_ms,
        )

    async def wait_elsewhere(self, warm: Warm, timeout_s: float) -> Checkpoint | None:
        """A checkpoint that another worker is making for this session, if it comes within `timeout_s`."""
        until = clock.monotonic() + timeout_s
        while clock.monotonic() < until:
            known = await self._store.session(warm.session)
            if known is None:
                return None
            if _is_superseded(known, warm):
                newest = max((r for r in known.checkpoints if not r.dead), key=lambda r: r.generation)
                return await self._store.checkpoint(warm.session, newest.id)
            await asyncio.sleep(_POLL_S)
        return None


def _is_superseded(known: Session, warm: Warm) -> bool:
    """Whether the session has a living checkpoint that covers more than the warm request carried."""
    covered = warm.applied.k if warm.applied else 0
    return any(
        not r.dead and r.k > covered and r.k <= len(warm.chain) and warm.chain[r.k - 1] == r.digest_k
        for r in known.checkpoints
    )


def _retry_after_s(reply: Reply) -> float:
    """Seconds of a Retry-After, which may also be a date; at most an hour."""
    value = next((value for name, value in reply.headers if name.lower() == "retry-after"), "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - clock.now_ms() / 1000
        except ValueError:
            return 0.0
    return min(3600.0, max(0.0, seconds))


def _attempt(
    job: Job,
    plan: Plan | None,
    usage: Usage,
    outcome: str,
    because: Because | str,
    duration_ms: int,
    made: Checkpoint | None,
) -> Attempt:
    new = usage.prompt - usage.cached if usage.prompt is not None and usage.cached is not None else None
    expected = plan.expected_new if plan else None
    return Attempt(
        at_ms=clock.now_ms(),
        trigger=job.trigger,
        outcome=outcome,
        because=str(because),
        pressure=None if job.used is None else round(job.used / job.limits.window.tokens, 4),
        from_=plan.region.from_ if plan else 0,
        k=plan.region.k if plan else 0,
        strategy="replay",
        scope=str(plan.scope) if plan else "",
        prompt=usage.prompt,
        cached=usage.cached,
        new=new,
        expected_new=expected,
        completion=usage.completion,
        miss=_miss(plan, new) or "",
        duration_ms=duration_ms,
        generation=made.ref.generation if made else 0,
        saved_tokens=made.region_tokens - made.checkpoint_tokens if made else None,
    )


def _miss(plan: Plan | None, new: int | None) -> Miss | None:
    """The likely reason where more was processed than expected."""
    if plan is None or new is None or new <= plan.expected_new:
        return None
    return Miss.PARAMETER_DROPPED if plan.replay.costly else Miss.UNKNOWN
