"""The compaction: take the session's lock, ask for a summary, validate, commit. One flight per session over all workers; nothing here fails a turn."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

from proxy import clock
from proxy.core import journal, last_resort, pressure
from proxy.core.checkpoint import Rejected
from proxy.core.compose import compose
from proxy.core.journal import Before, Miss
from proxy.core.limits import Limits
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
from proxy.core.region import Region
from proxy.economy import Economy
from proxy.job import Job, Outcome
from proxy.metrics import Metrics
from proxy.rest import Rest
from proxy.spare import Spare
from proxy.store import Checkpoints
from proxy.summariser import Summariser
from proxy.target import Targets
from proxy.tasks import Tasks
from proxy.upstream import Sender

log = logging.getLogger("warmfold.compaction")

LOCK_TTL_S = 20.0
_POLL_S = 0.1
_MECHANICAL = "mechanical"
"""The strategy of the last resort."""


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A compaction that runs, and when it began, in seconds of clock.monotonic()."""

    task: asyncio.Task[Outcome]
    began_s: float


class Compactor:
    """Runs compactions, in the background or inline."""

    def __init__(self, store: Checkpoints, sender: Sender, targets: Targets, tasks: Tasks, metrics: Metrics) -> None:
        self._store = store
        self._targets = targets
        self._summariser = Summariser(sender, metrics, targets)
        self._tasks = tasks
        self._metrics = metrics
        self._flights: dict[str, _Flight] = {}
        self._waiting: dict[str, asyncio.Task[None]] = {}
        self.spare = Spare()
        self.economy = Economy()
        self.rest = Rest()

    def is_busy(self, session: str) -> bool:
        """Whether a compaction of this session runs in this worker."""
        return self._flight_of(session) is not None

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

        self._waiting[name] = self._tasks.spawn(wait(), "compaction-settle", idle=True)

    def start(self, job: Job) -> asyncio.Task[Outcome]:
        """The running compaction of this session: a new one, or the one in flight, which is joined."""
        name = str(job.warm.session)
        running = self._flight_of(name)
        if running is None:
            running = _Flight(self._tasks.spawn(self._fly(job), "compaction"), clock.monotonic())
            self._flights[name] = running
            running.task.add_done_callback(lambda _: self._landed(name, running))
        return running.task

    def _flight_of(self, session: str) -> _Flight | None:
        """The one that runs. Whoever wakes up between its end and its callback must not take it for one: it would be joined for ever."""
        found = self._flights.get(session)
        return None if found is None or found.task.done() else found

    async def _fly(self, job: Job) -> Outcome:
        """The compaction. A fault of our own ends it like any other failure: with a reason, and with a pause before the next one."""
        try:
            return await self.compact(job)
        except Exception as error:
            log.error("compaction failed session=%s error=%s", job.warm.session, type(error).__name__)
            self._metrics.step_failed("compact")
            attempt = _attempt(job, "failed", Because.INTERNAL)
            await self._noted(job, attempt, pressure.after_failure(job.counters, clock.now_ms()))
            return Outcome(None, Because.INTERNAL, False, attempt)

    def _landed(self, session: str, flight: _Flight) -> None:
        if self._flights.get(session) is flight:
            del self._flights[session]

    async def inline(self, job: Job, timeout_s: float) -> Outcome:
        """The compaction, waited for at most `timeout_s` since it began; then the last resort, which serves this request alone.

        It outlives a caller that gives up: whoever comes next for this session joins it. While failures back off nobody is asked.
        """
        if await self._backs_off(job):
            return await self.without_model(job, Because.BACKOFF)
        running = self._flight_of(str(job.warm.session))
        left_s = timeout_s if running is None else max(0.0, timeout_s - (clock.monotonic() - running.began_s))
        try:
            async with asyncio.timeout(left_s):
                outcome = await self._flown(job, left_s)
        except TimeoutError:
            return await self.without_model(job, Because.TIMEOUT)
        return await self.without_model(job, Because.INTERNAL) if outcome.because is Because.INTERNAL else outcome

    async def _backs_off(self, job: Job) -> bool:
        """Whether nobody is to be asked after failures. That a summary was too long beside a conversation is none: in front of a request any
        that is shorter than its region will do.
        """
        if not job.counters.failures or clock.now_ms() >= job.counters.not_before_ms:
            return False
        failed = (one for one in await self._store.journal(job.warm.session) if one.outcome == "failed")
        last = next(failed, None)
        return last is None or (last.because, last.trigger) != (Because.INFLATED, Trigger.SOFT)

    async def _flown(self, job: Job, timeout_s: float) -> Outcome:
        """How the flight for this job ended: our own, one that was joined, or another worker's that was waited for."""
        name = str(job.warm.session)
        while True:
            joined = self.is_busy(name)
            outcome = await asyncio.shield(self.start(job))
            if outcome.because in (Because.IN_FLIGHT, Because.SUPERSEDED):
                made = await self.wait_elsewhere(job.warm, timeout_s)
                if made is not None:
                    return Outcome(made, None, False, None)
            if outcome.because is Because.IN_FLIGHT:
                continue  # it ended in vain: the next one is our own
            # A joined flight may be another trigger's, with other rights, or another branch's: then the next one is our own.
            if not joined or _is_for(outcome.checkpoint, job.warm):
                return outcome

    async def without_model(self, job: Job, because: Because) -> Outcome:
        """The last resort beside a compaction that still runs, or that is not to be asked for now. It is committed only where none runs."""
        known = None if await self._is_flown(job.warm.session) else await self._store.session(job.warm.session)
        counters = replace(job.counters, last_turn=job.counters.turns)
        planner = Planner(job.warm, job.limits, job.policy)
        return await self._last_resort(job, planner, known, because, counters) or Outcome(None, because, False, None)

    async def commit_later(
        self, session: SessionId, checkpoint: Checkpoint, attempt: Attempt | None, counters: Counters
    ) -> None:
        """Commit such a checkpoint, now that the session is stored, unless something better is on its way: then a later turn tries again."""
        known = None if await self._is_flown(session) else await self._store.session(session)
        if known is None:
            return
        offered = await self._store.offered(session)
        if offered is not None and offered.made_at_ms > checkpoint.made_at_ms:
            checkpoint, attempt = offered, None  # the summary that the last resort stood in for
        await self._commit_late(known, checkpoint, attempt, counters)

    async def _commit_late(
        self, known: Session, checkpoint: Checkpoint, attempt: Attempt | None, counters: Counters
    ) -> None:
        """Commit a checkpoint that was made when the store had not the session, on what it has now."""
        if not await self._is_outdated(known, checkpoint):
            generation = known.generation + 1
            numbered = replace(checkpoint, ref=replace(checkpoint.ref, generation=generation))
            if not await self._store.commit(Commit(known.id, known.version, numbered)):
                return
            if attempt is not None:
                noted = replace(attempt, outcome="committed", generation=generation)
                await self._store.note(known.id, noted, counters)
        self.spare.drop(known.id, checkpoint)

    async def _is_outdated(self, known: Session, checkpoint: Checkpoint) -> bool:
        """Whether the session has it, or a newer one: the summary that took longer than the last resort covers less, and says more."""
        if any(ref.id == checkpoint.id for ref in known.checkpoints):
            return True
        alive = [ref for ref in known.checkpoints if not ref.dead]
        newest = await self._store.checkpoint(known.id, alive[-1].id) if alive else None
        return newest is not None and newest.made_at_ms > checkpoint.made_at_ms

    async def _is_flown(self, session: SessionId) -> bool:
        """Whether a compaction of this session runs, in this worker or in another one."""
        return self.is_busy(str(session)) or await self._store.is_in_flight(session) is True

    def planned(self, job: Job) -> tuple[Job, Plan | Because]:
        """The job with the model that would be asked, and what it would be asked, or why it would not."""
        job = self._targets.aimed(job, None)
        return job, self._summariser.planner(job).plan(job.trigger, job.span)

    async def waits(self, session: SessionId, attempt: Attempt) -> None:
        """Note that a soft compaction is due and waits: a line in the journal, under the lock since a compaction changes the same counters."""
        async with self._store.flight(session, LOCK_TTL_S) as mine:
            known = await self._store.session(session) if mine else None
            if known is not None:
                await self._store.note(session, attempt, known.counters)

    async def observe(self, job: Job) -> None:
        """Note what would have been done, and do nothing: `mode = "observe"`. It counts for the debounce as the real one would."""
        job, planned = self.planned(job)
        because = planned if isinstance(planned, Because) else Because.OBSERVE
        attempt = _attempt(job, "skipped", because, None if isinstance(planned, Because) else planned)
        await self._noted(job, attempt, replace(job.counters, last_turn=job.counters.turns))

    async def compact(self, job: Job) -> Outcome:
        """One compaction, from the lock to the commit."""
        session = job.warm.session
        async with self._store.flight(session, LOCK_TTL_S) as mine:
            if mine is False:
                return self._ended(job, Because.IN_FLIGHT)
            known = await self._store.session(session)
            if job.trigger not in (Trigger.GUARD, Trigger.OVERFLOW) and (mine is None or known is None):
                # Its result could not be committed: paid for and thrown away.
                return self._ended(job, Because.STORE)
            if await self._is_superseded(job.warm, known):
                return self._ended(job, Because.SUPERSEDED)
            if known is not None and job.trigger is Trigger.SOFT:
                # Who decided may have known the session as it was before another one, beside it or in another worker, had failed.
                because = pressure.rests(known.counters, job.limits, clock.now_ms())
                if because is not None:
                    return self._ended(job, because)
            if known is not None:
                return await self._made(replace(job, counters=known.counters), known)  # as they are now, under the lock
            outcome = await self._made(job, None)
            if mine and outcome.checkpoint is not None:
                await self._hand_over(session, outcome.checkpoint, outcome.attempt)
            return outcome

    async def _is_superseded(self, warm: Warm, known: Session | None) -> bool:
        """Whether somebody else was faster, or the request carries what was undone since."""
        if known is not None and (_newer(known, warm) or _is_undone(known, warm)):
            return True
        offered = await self._store.offered(warm.session)
        if offered is None or not _is_for(offered, warm):
            return False
        if known is not None:  # the turn that it was made for is stored, but who was to commit it has not come to it
            await self._commit_late(known, offered, None, known.counters)
        return True

    async def _hand_over(self, session: SessionId, made: Checkpoint, attempt: Attempt | None) -> None:
        """A checkpoint for whoever waits for this flight. Before the session's first turn is stored, nothing can be committed."""
        known = await self._store.session(session)
        if known is None:
            await self._store.offer(session, made)
        else:  # the last resort has served that turn meanwhile
            await self._commit_late(known, made, attempt, replace(known.counters, last_turn=known.counters.turns))

    async def _made(self, job: Job, known: Session | None) -> Outcome:
        """What comes of it now that nobody else is at it. `known`: the session under the lock, None where the store has it not."""
        job = self._targets.aimed(job, known)
        planner = self._summariser.planner(job)
        rests = self.rest.is_on(job.upstream.name, job.warm.session.tenant, clock.monotonic())
        planned = Because.RATE_LIMITED if rests else planner.plan(job.trigger, job.span)
        if isinstance(planned, Plan):
            return await self._call(job, planned, known, planner)
        if planned in (Because.NO_ROOM, Because.NO_MODEL, Because.RATE_LIMITED):
            counters = pressure.after_success(job.counters, clock.now_ms(), applied=job.warm.applied is not None)
            if rests:  # that ends no back-off of this session's own
                counters = replace(job.counters, last_turn=job.counters.turns)
            if outcome := await self._last_resort(job, planner, known, planned, counters):
                return outcome
        return await self._skipped(job, planned)

    async def _call(self, job: Job, plan: Plan, known: Session | None, planner: Planner) -> Outcome:
        began = clock.monotonic()
        try:
            reading, plan = await self._summariser.summary(job, plan, planner)
        except asyncio.CancelledError:  # the process ends: a note while the store is still there, and nobody's failure
            await self._noted(job, _attempt(job, "skipped", Because.STOPPED, plan), job.counters)
            raise
        made: Checkpoint | Rejected
        if isinstance(reading.verdict, Rejected):
            made = reading.verdict
        else:
            made = await asyncio.to_thread(  # up to half a second for a megabyte: other requests go on
                compose,
                reading.verdict,
                plan.region,
                plan.read_to,
                job.warm,
                job.limits,
                generation=known.generation + 1 if known is not None else 1,
                scope=plan.scope,
                strategy=job.strategy,
                model=job.model,
                made_at_ms=clock.now_ms(),
                anyway=job.trigger is not Trigger.SOFT,
                answer=plan.answer,
            )
        duration_ms = round((clock.monotonic() - began) * 1000)
        if isinstance(made, Rejected):
            attempt = _attempt(job, "failed", made.because, plan, reading.usage, duration_ms)
            pause_s = pressure.BACKOFF_FIRST_S if reading.retry_after_s is None else reading.retry_after_s
            if made.because is Because.RATE_LIMITED:
                self.rest.begin(job.upstream.name, job.warm.session.tenant, clock.monotonic() + pause_s)
            counters = pressure.after_failure(job.counters, clock.now_ms(), pause_s)
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
        if job.trigger not in (Trigger.GUARD, Trigger.OVERFLOW):
            return None
        region = planner.without_call()
        if isinstance(region, Because):
            return None
        warm, generation = job.warm, known.generation + 1 if known is not None else 1
        made = await asyncio.to_thread(_mechanical, warm, region, job.limits, generation, clock.now_ms())
        if isinstance(made, Rejected):
            return None
        log.warning("mechanical checkpoint session=%s because=%s covered=%d", warm.session, because, region.k)
        attempt = _attempt(job, "committed", because, made=made)
        return await self._commit(job, made, known, attempt, counters)

    async def _commit(
        self, job: Job, made: Checkpoint, known: Session | None, attempt: Attempt, counters: Counters
    ) -> Outcome:
        """Make it the session's newest. A session that the store does not know has no version yet: it is committed behind its first turn."""
        if made.strategy != _MECHANICAL:  # that one cost nothing
            self.economy.made(job.warm.session.tenant, str(job.warm.session), job.counters.turns, clock.monotonic())
        if known is None:
            attempt = replace(attempt, outcome="made")
            self._count(job, attempt)
            self.spare.keep(job.warm.session, made)
            return Outcome(made, None, False, attempt)
        if not await self._store.commit(Commit(job.warm.session, known.version, made)):
            attempt = replace(attempt, outcome="failed", because=Because.CONFLICT, generation=0)
            await self._noted(job, attempt, replace(job.counters, last_turn=job.counters.turns))
            return Outcome(made, Because.CONFLICT, False, attempt)
        self.spare.drop(job.warm.session, made)
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
        while True:
            # Asked first: what a flight made is in the store before its lock is let go of.
            flies = await self._store.is_in_flight(warm.session)
            made = await self._from_elsewhere(warm)
            if made is not None or not flies or clock.monotonic() >= until:
                return made
            await asyncio.sleep(_POLL_S)

    async def _from_elsewhere(self, warm: Warm) -> Checkpoint | None:
        """What another worker has made of this session for a request like this one."""
        known = await self._store.session(warm.session)
        newest = _newer(known, warm) if known is not None else None
        if newest is not None:
            return await self._store.checkpoint(warm.session, newest.id)
        offered = await self._store.offered(warm.session)
        return offered if _is_for(offered, warm) else None


def _mechanical(warm: Warm, region: Region, limits: Limits, generation: int, made_at_ms: int) -> Checkpoint | Rejected:
    """The checkpoint of the last resort."""
    covered = (*warm.covered(region)[0], *warm.covered(region)[1])
    budget = int(limits.summary / max(1.0, warm.factor))
    return compose(
        last_resort.summary(covered, warm.applied.text if warm.applied else "", budget),
        region,
        region.k,
        warm,
        limits,
        generation=generation,
        scope=Scope.REGION,
        strategy=_MECHANICAL,
        model=warm.model,
        made_at_ms=made_at_ms,
        anyway=True,
    )


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
        strategy=job.strategy,
        plan=plan,
        usage=usage,
        duration_ms=duration_ms,
        made=made,
        before=Before(job.warm, job.last, job.upstream.name, job.policy.cache_ttl_s),
        figures=job.figures,
    )
