"""What follows an answer: the turn is saved, and compacted if that is due. And what runs beside the next one."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from proxy import clock
from proxy.bounded import remember
from proxy.compactor import Compactor
from proxy.config import Config
from proxy.core import journal, payback, pressure, quota, turn
from proxy.core.answer import Tap, with_headers
from proxy.core.limits import limits
from proxy.core.model import NO_FIGURES, Because, Figures, Pending, Saved, Session, Trigger
from proxy.core.quota import Headers
from proxy.core.turn import Forwarded
from proxy.counts import Counts
from proxy.job import Job
from proxy.locality import is_local
from proxy.metrics import Metrics
from proxy.mode import Mode
from proxy.store import Store
from proxy.talk import Route, Talk
from proxy.tasks import Tasks
from proxy.unwritten import Unwritten
from proxy.upstream import Reply
from proxy.warm import stored_warm
from proxy.windows import Windows
from proxy.worth import Worth

_MAX_REMEMBERED = 10_000
"""Sessions. Of one that is forgotten a line is told once more, or lacks its figures."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of a reply before it went on: its headers; and why a compaction that waited for this turn waits on, None: it does not."""

    headers: Headers
    because: Because | None = None
    figures: Figures = NO_FIGURES


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows a turn: `job` is to be made now, or beside the next request (`later`), unless there is a reason against it."""

    job: Job | None
    because: Because | None
    later: bool = False


class Observer:
    """Observes turns, decides, and starts compactions."""

    def __init__(
        self,
        config: Config,
        store: Store,
        compactor: Compactor,
        worth: Worth,
        windows: Windows,
        counts: Counts,
        unwritten: Unwritten,
        tasks: Tasks,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._store = store
        self._compactor = compactor
        self._worth = worth
        self._windows = windows
        self._counts = counts
        self._unwritten = unwritten
        self._tasks = tasks
        self._metrics = metrics
        self._told: OrderedDict[str, Because] = OrderedDict()
        self._figures: OrderedDict[str, Figures] = OrderedDict()

    async def after(self, talk: Talk, route: Route, tap: Tap, seen: Seen) -> None:
        """What follows a complete answer: save the request header; compact if it is due."""
        talk = self._measured(talk)
        estimate = talk.estimate(route.routed.applied)
        pressing = talk.mode is Mode.FORCE or estimate >= talk.limits.soft // 2
        answer = with_headers(tap.answer(want_text=pressing), seen.headers)
        if not answer.complete:
            return
        forwarded = turn.forwarded(talk.conversation, route.routed, answer, estimate)
        self._counts.seen(talk, forwarded)
        self._metrics.turn(answer.usage, applied=route.routed.applied is not None)
        talk = _counted(talk, route)
        decision = self._decided(talk, route, forwarded, seen)
        if seen.because is not None:  # before the turn is saved: a note forgets what is pending
            await self._tell(talk, seen.because, forwarded.used, seen.figures)
        pending = Pending(Trigger.SOFT, clock.now_ms()) if decision.later else None
        saved = self._saved(talk, route, forwarded, pending)
        stored = await self._unwritten.save(saved, talk.conversation, talk.lineage.known)
        if stored and route.uncommitted is not None:
            await self._compactor.commit_later(talk.lineage.id, route.uncommitted, route.attempt, talk.lineage.counters)
        if stored and decision.job is not None:
            await self._carry_out(talk, replace(decision.job, last=saved.turn), decision)
        elif stored and decision.because is Because.UNAPPLIED:  # no other line tells why nothing is made
            await self._tell(talk, decision.because, forwarded.used, NO_FIGURES)

    async def _carry_out(self, talk: Talk, job: Job, decision: Decision) -> None:
        """Make the compaction, have it wait for the next request, or say why it waits."""
        if decision.because is Because.OBSERVE:
            await self._compactor.observe(job)
        elif decision.because is not None:
            await self._tell(talk, decision.because, job.used, job.figures)
        elif decision.later:
            remember(self._figures, talk.name, job.figures, _MAX_REMEMBERED)
        else:
            self._told.pop(talk.name, None)
            self._compactor.later(job, talk.policy.settle_s)

    async def _tell(self, talk: Talk, because: Because, used: int | None, figures: Figures) -> None:
        """Note in the journal that a soft compaction is due and waits: once, until it waits for another reason, or is made."""
        if self._told.get(talk.name) is not because:
            share = None if used is None else round(used / talk.window.tokens, 4)
            strategy = "transcript" if talk.policy.summary_model else talk.policy.strategy
            attempt = journal.attempt(
                *(Trigger.SOFT, share, "skipped", because), at_ms=clock.now_ms(), strategy=strategy, figures=figures
            )
            await self._compactor.waits(talk.lineage.id, attempt)
        remember(self._told, talk.name, because, _MAX_REMEMBERED)

    def _measured(self, talk: Talk) -> Talk:
        """With the window as it is known by now: the upstream may have told it while it was answering, or an error taught it."""
        window = self._windows.of(
            talk.upstream.name, talk.conversation.request.model, talk.policy, tenant=talk.lineage.id.tenant
        )
        if window == talk.window:
            return talk
        return replace(talk, window=window, limits=limits(talk.policy, window, reasons=talk.conversation.reasons))

    def _decided(self, talk: Talk, route: Route, forwarded: Forwarded, seen: Seen) -> Decision:
        """What shall be done after this turn.

        One that waited for this turn and found the cache cold is made right behind it: a conversation with such pauses finds it cold each time.
        """
        forced = talk.mode is Mode.FORCE
        because = None if forced else self._undue(talk, route, forwarded)
        if route.whole is not None:  # what the cut form leaves out would be lost for good
            because = Because.NO_ROOM
        if because is not None:
            self._metrics.decision(because)
            if because is Because.BELOW_WATERMARK:
                self._told.pop(talk.name, None)
            return Decision(None, because)
        warm = turn.warm_after(
            talk.lineage.id, talk.conversation, route.routed, talk.lineage.known, forwarded, talk.factor
        )
        job = talk.job(warm, Trigger.FORCE if forced else Trigger.SOFT, forwarded.used)
        if forced:
            return Decision(job, None)
        later = self._waits_for_next_turn(talk) and seen.because is not Because.COLD
        requested = talk.conversation.request.requested_output
        last_chance = pressure.is_last_chance(forwarded.used, requested, talk.limits)
        job, because = self._worth.weighed(job, _share_found(talk, forwarded, job), last_chance=last_chance)
        if because is None and not later:
            because, figures = self._worth.barred(talk, forwarded.used, seen.headers)
            job = replace(job, figures=_both(job.figures, figures))
        if because is None and talk.mode is Mode.OBSERVE:
            because = Because.OBSERVE
        self._metrics.decision(because)
        return Decision(job, because, later and because is None)

    def _undue(self, talk: Talk, route: Route, forwarded: Forwarded) -> Because | None:
        """Why no soft compaction is due after this turn."""
        counters = replace(talk.lineage.counters, turns=talk.lineage.counters.turns + 1)
        because = pressure.due(
            forwarded.used,
            talk.limits,
            counters,
            clock.now_ms(),
            applied=route.routed.applied is not None,
            root_unapplied=talk.recalled.root_unapplied if talk.recalled else 0,
        )
        tenant, now = talk.lineage.id.tenant, clock.monotonic()
        if because is None and self._compactor.economy.is_paused(tenant, counters.turns, now):
            because = Because.UNAPPLIED
        if because is None and self._compactor.is_busy(talk.name):
            because = Because.IN_FLIGHT
        return because

    def _waits_for_next_turn(self, talk: Talk) -> bool:
        """Whether a soft compaction is made beside the next request."""
        if talk.mode is Mode.OBSERVE or talk.policy.when == "after_turn":
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

    async def replied(self, talk: Talk, reply: Reply) -> Seen:
        """What the reply tells. Beside one that is an answer a compaction that waited for it begins; one that says that the provider has had enough
        lets all of this tenant's rest.
        """
        if quota.has_had_enough(reply.status):
            said = quota.retry_after_s(reply.headers, clock.now_ms())
            until = clock.monotonic() + (pressure.BACKOFF_FIRST_S if said is None else said)
            self._compactor.rest.begin(talk.upstream.name, talk.lineage.id.tenant, until)
        known = talk.lineage.known
        if reply.status != 200 or known is None or known.pending is None or talk.mode is Mode.OBSERVE:
            return Seen(reply.headers)
        because, figures = self._beside(talk, known, reply.headers)
        if because is not None:
            self._metrics.decision(because)
        return Seen(reply.headers, because, figures)

    def _beside(self, talk: Talk, known: Session, headers: Headers) -> tuple[Because | None, Figures]:
        """Replay the previous warm request beside this turn (`when = "next_turn"`), or why that waits: this turn decides again."""
        if known.turn is None or self._compactor.is_busy(str(known.id)):
            return None, NO_FIGURES
        if (known.turn.upstream, known.turn.model) != (talk.upstream.name, talk.conversation.request.model):
            return None, NO_FIGURES  # the conversation moved on to another model: what was warm is at another provider
        idle_s = (clock.now_ms() - known.turn.finished_ms) / 1000
        if idle_s > talk.policy.cache_ttl_s:
            return Because.COLD, Figures(idle_s=round(idle_s, 1))
        because, figures = self._worth.barred(talk, known.turn.usage.used or known.turn.weight, headers)
        if because is None:
            decided = self._figures.pop(talk.name, None)
            self._told.pop(talk.name, None)
            self._tasks.spawn(self._replay_stored(talk, known, decided, figures), "compact-beside")
        return because, figures

    async def _replay_stored(self, talk: Talk, known: Session, decided: Figures | None, of_quota: Figures) -> None:
        """Start the compaction. `decided`: the figures that its turn's decision went by, None where this worker did not decide."""
        warm = await stored_warm(self._store, known)
        if warm is None:
            self._metrics.decision(Because.WARM_MISSING)
            return
        used = known.turn.usage.used if known.turn else None
        job = talk.job(turn.with_answer(warm, known, talk.conversation), Trigger.SOFT, used)
        if (
            decided is None
        ):  # by another worker, or before a restart: what its turn had found in the cache is not known here
            decided = self._worth.weighed(job, 1.0, last_chance=True)[0].figures
        self._compactor.start(replace(job, figures=_both(decided, of_quota)))


def _share_found(talk: Talk, forwarded: Forwarded, job: Job) -> float:
    """Of what the provider should have had in its cache, the share that this turn found there."""
    before = talk.lineage.known.turn if talk.lineage.known is not None else None
    applied = job.warm.applied.id if job.warm.applied is not None else None
    if before is not None and (before.upstream, before.model) != (talk.upstream.name, job.warm.model):
        return 1.0  # each model has a cache of its own
    gap_ms = talk.started_ms - before.finished_ms if before is not None else 0
    return payback.share_found(before, forwarded.usage, applied, gap_ms, talk.policy.cache_ttl_s)


def _both(of_payback: Figures, of_quota: Figures) -> Figures:
    return replace(
        of_payback,
        needed_tokens=of_quota.needed_tokens,
        remaining_tokens=of_quota.remaining_tokens,
        remaining_requests=of_quota.remaining_requests,
    )


def _counted(talk: Talk, route: Route) -> Talk:
    """With the compaction that this request went through in its counters: the next soft one keeps its distance from it."""
    if route.note not in ("inline", "recovered"):
        return talk
    applied = route.routed.applied
    counters = pressure.after_success(
        replace(talk.lineage.counters, turns=talk.lineage.counters.turns + 1), 0, applied=applied is not None
    )
    return replace(talk, lineage=replace(talk.lineage, counters=replace(counters, turns=talk.lineage.counters.turns)))
