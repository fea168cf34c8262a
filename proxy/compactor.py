"""The compaction: take the session's lock, replay, validate, commit. One flight per session over all workers; nothing here fails a turn."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from proxy import clock
from proxy.core import journal, last_resort, pressure
from proxy.core.checkpoint import Rejected
from proxy.core.compose import compose
from proxy.core.journal import Miss
from proxy.core.model import (
    NOT_COUNTED,
    Attempt,
    Because,
    Checkpoint,
    CheckpointRef,
    Commit,
    Counters,
    Scope,
    Session,
    SessionId,
    Trigger,
    Usage,
)
from proxy.core.plan import Plan, Planner, Warm
from proxy.economy import Economy
from proxy.job import Job, Outcome
from proxy.metrics import Metrics
from proxy.spare import Spare
from proxy.store import Checkpoints
from proxy.summariser import Summariser
from proxy.tasks import Tasks
from proxy.upstream import Sender

log = logging.getLogger("warmfold.compaction")

LOCK_TTL_S = 20.0
_POLL_S = 0.1


class Compactor:
    """Runs compactions, in the background or inline."""

    def __init__(self, store: Checkpoints, sender: Sender, tasks: Tasks, metrics: Metrics) -> None:
        self._store = store
        self._summariser = Summariser(sender, metrics)
        self._tasks = tasks
        self._metrics = metrics
        self._flights: dict[str, asyncio.Task[Outcome]] = {}
        self._waiting: dict[str, asyncio.Task[None]] = {}
        self._began: dict[str, float] = {}
        self.spare = Spare()
        self.economy = Economy()

    def is_busy(self, session: str) -> bool:
        """Whether a compaction of this session runs in this worker."""
        return session in self._flights

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
            return await self.without_model(job, Because.BACKOFF)
        name = str(job.warm.session)
        began = self._began.get(name, clock.monotonic())
        try:
            async with asyncio.timeout(max(0.0, timeout_s - (clock.monotonic() - began))):
                while True:
                    joined = name in self._flights
                    outcome = await asyncio.shield(self.start(job))
                    # A joined flight may be another trigger's, with other rights, or another branch's: then the next one is our own.
                    if not joined or _is_for(outcome.checkpoint, job.warm):
                        return outcome
        except TimeoutError:
            return await self.without_model(job, Because.TIMEOUT)

    async def without_model(self, job: Job, because: Because) -> Outcome:
        """The last resort beside a compaction that still runs, or that is not to be asked for now. It is committed only where none runs."""
        known = None if self.is_busy(str(job.warm.session)) else await self._store.session(job.warm.session)
        counters = replace(job.counters, last_turn=job.counters.turns)
        planner = Planner(job.warm, job.limits, job.policy)
        return await self._last_resort(job, planner, known, because, counters) or Outcome(None, because, False, None)

    async def commit_later(
        self, session: SessionId, checkpoint: Checkpoint, attempt: Attempt | None, counters: Counters
    ) -> None:
        """Commit such a checkpoint, now that the session is stored."""
        if await self._store.commit(Commit(session, 0, checkpoint)):
            self.spare.drop(session, checkpoint.id)
            if attempt is not None:
                await self._store.note(session, replace(attempt, outcome="committed"), counters)

    async def observe(self, job: Job) -> None:
        """Note what would have been done, and do nothing: `mode = "observe"`. It counts for the debounce as the real one would."""
        planned = Planner(job.warm, job.limits, job.policy).plan(job.trigger, job.span)
        because = planned if isinstance(planned, Because) else Because.OBSERVE
        attempt = _attempt(job, "skipped", because, None if isinstance(planned, Because) else planned)
        await self._noted(job, attempt, replace(job.counters, last_turn=job.counters.turns))

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
            if known is not None and (_newer(known, job.warm) or _is_undone(known, job.warm)):
                return self._ended(job, Because.SUPERSEDED)
            shape = self._summariser.shape(job.upstream.name, job.warm.model)
            if known is not None:
                job = replace(job, counters=known.counters)  # as they are now, under the lock
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
        reading, plan = await self._summariser.summary(job, plan, planner)
        made: Checkpoint | Rejected
        if isinstance(reading.verdict, Rejected):
            made = reading.verdict
        else:
            made = compose(
                reading.verdict,
                plan.region,
                plan.read_to,
                job.warm,
                job.limits,
                generation=known.generation + 1 if known is not None else 1,
                scope=plan.scope,
                strategy="replay",
                made_at_ms=clock.now_ms(),
                anyway=job.trigger is not Trigger.SOFT,
                answer=plan.answer,
            )
        duration_ms = round((clock.monotonic() - began) * 1000)
        if isinstance(made, Rejected):
            attempt = _attempt(job, "failed", made.because, plan, reading.usage, duration_ms)
            counters = pressure.after_failure(job.counters, clock.now_ms(), reading.retry_after_s)
            await self._noted(job, attempt, counters)
            resort = await self._last_resort(job, planner, known, made.because, counters)
            return resort or Outcome(None, made.because, False, attempt)
        counters = pressure.after_success(job.counters, clock.now_ms(), applied=job.warm.applied is not None)
        attempt = _attempt(job, "committed", "", plan, reading.usage, duration_ms, made)
        return await self._commit(job, made, known, attempt, counters)

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
        covered = (*warm.covered(region)[0], *warm.covered(region)[1])
        budget = int(job.limits.summary / max(1.0, warm.factor))
        made = compose(
            last_resort.summary(covered, warm.applied.text if warm.applied else "", budget),
            region,
            region.k,
            warm,
            job.limits,
            generation=known.generation + 1 if known is not None else 1,
            scope=Scope.REGION,
            strategy="mechanical",
            made_at_ms=clock.now_ms(),
            anyway=True,
        )
        if isinstance(made, Rejected):
            return None
        log.warning("mechanical checkpoint session=%s because=%s covered=%d", warm.session, because, region.k)
        attempt = _attempt(job, "committed", because, made=made)
        return await self._commit(job, made, known, attempt, counters)

    async def _commit(
        self, job: Job, made: Checkpoint, known: Session | None, attempt: Attempt, counters: Counters
    ) -> Outcome:
        """Make it the session's newest. A session that the store does not know has no version yet: it is committed behind its first turn."""
        if known is None:
            attempt = replace(attempt, outcome="made")
            self._count(job, attempt)
            self.spare.keep(job.warm.session, made)
            return Outcome(made, None, False, attempt)
        if not await self._store.commit(Commit(job.warm.session, known.version, made)):
            attempt = replace(attempt, outcome="failed", because=Because.CONFLICT, generation=0)
            await self._noted(job, attempt, replace(job.counters, last_turn=job.counters.turns))
            return Outcome(made, Because.CONFLICT, False, attempt)
        if job.trigger is Trigger.SOFT:
            self.economy.made(job.warm.session.tenant, clock.monotonic())
        await self._noted(job, attempt, counters)
        return Outcome(made, None, True, attempt)

    async def _skipped(self, job: Job, because: Because) -> Outcome:
        """Not worth it: said in the journal, and not asked again for debounce_turns turns."""
        attempt = _attempt(job, "skipped", because)
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
        """A checkpoint that another worker is making for this session, if it comes within `timeout_s` and before that flight ends in vain."""
        until = clock.monotonic() + timeout_s
        while clock.monotonic() < until:
            known = await self._store.session(warm.session)
            newest = _newer(known, warm) if known is not None else None
            if newest is not None:
                return await self._store.checkpoint(warm.session, newest.id)
            async with self._store.flight(warm.session, LOCK_TTL_S) as mine:
                if mine is not False:
                    return None
            await asyncio.sleep(_POLL_S)
        return None


def _newer(known: Session, warm: Warm) -> CheckpointRef | None:
    """The session's newest living checkpoint that covers more than the warm request carried, if it is one of this request's branch."""
    covered = warm.applied.k if warm.applied else 0
    chain = warm.chain
    fitting = [
        ref
        for ref in known.checkpoints
        if not ref.dead
        and covered < ref.k <= ref.seen_len <= len(chain)
        and chain[ref.k - 1] == ref.digest_k
        and chain[ref.seen_len - 1] == ref.seen
    ]
    return max(fitting, key=lambda ref: ref.generation, default=None)


def _is_for(made: Checkpoint | None, warm: Warm) -> bool:
    """Whether a checkpoint is one of this request's branch, and covers more than it carries already."""
    if made is None:
        return False
    ref, chain = made.ref, warm.chain
    on_chain = ref.seen_len <= len(chain) and chain[ref.k - 1] == ref.digest_k and chain[ref.seen_len - 1] == ref.seen
    return on_chain and ref.k > (warm.applied.k if warm.applied else 0)


def _is_undone(known: Session, warm: Warm) -> bool:
    """Whether the checkpoint that the warm request carries was buried since."""
    return warm.applied is not None and any(ref.dead and ref.id == warm.applied.id for ref in known.checkpoints)


def _attempt(
    job: Job,
    outcome: str,
    because: Because | str,
    plan: Plan | None = None,
    usage: Usage = NOT_COUNTED,
    duration_ms: int = 0,
    made: Checkpoint | None = None,
) -> Attempt:
    share = None if job.used is None else round(job.used / job.limits.window.tokens, 4)
    return journal.attempt(
        job.trigger,
        share,
        outcome,
        because,
        at_ms=clock.now_ms(),
        plan=plan,
        usage=usage,
        duration_ms=duration_ms,
        made=made,
    )
