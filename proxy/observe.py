"""What follows an answer: the turn is saved, and compacted if that is due. And what runs beside the next one."""

from __future__ import annotations

from dataclasses import replace

from proxy import clock
from proxy.compactor import Compactor
from proxy.config import Config
from proxy.core import pressure, turn
from proxy.core.answer import Tap
from proxy.core.limits import limits
from proxy.core.model import Because, Pending, Saved, Trigger
from proxy.core.turn import Forwarded
from proxy.locality import is_local
from proxy.metrics import Metrics
from proxy.mode import Mode
from proxy.store import Store
from proxy.talk import Route, Talk
from proxy.tasks import Tasks
from proxy.unwritten import Unwritten
from proxy.warm import stored_warm
from proxy.windows import Windows


class Observer:
    """Observes turns, decides, and starts compactions."""

    def __init__(
        self,
        config: Config,
        store: Store,
        compactor: Compactor,
        windows: Windows,
        unwritten: Unwritten,
        tasks: Tasks,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._store = store
        self._compactor = compactor
        self._windows = windows
        self._unwritten = unwritten
        self._tasks = tasks
        self._metrics = metrics

    async def after(self, talk: Talk, route: Route, tap: Tap) -> None:
        """What follows a complete answer: save the request header; compact if it is due."""
        talk = self._measured(talk)
        estimate = talk.estimate(route.routed.applied)
        pressing = talk.mode is Mode.FORCE or estimate >= talk.limits.soft // 2
        answer = tap.answer(want_text=pressing)
        if not answer.complete:
            return
        forwarded = turn.forwarded(talk.conversation, route.routed, answer, estimate)
        self._windows.proved(talk.upstream.name, talk.conversation.request.model, talk.window, forwarded.used)
        self._metrics.turn(forwarded.usage, applied=route.routed.applied is not None)
        talk = _counted(talk, route)
        due = self._due(talk, route, forwarded)
        trigger = due if isinstance(due, Trigger) else None
        waits = trigger is not None and self._waits_for_next_turn(talk, trigger)
        pending = Pending(trigger, clock.now_ms()) if trigger is not None and waits else None
        saved = await self._unwritten.save(
            self._saved(talk, route, forwarded, pending), talk.conversation, talk.lineage.known
        )
        if saved and route.uncommitted is not None:
            await self._compactor.commit_later(talk.lineage.id, route.uncommitted, route.attempt, talk.lineage.counters)
        if not saved or waits or (trigger is None and due is not Because.OBSERVE):
            return
        warm = turn.warm_after(
            talk.lineage.id, talk.conversation, route.routed, talk.lineage.known, forwarded, talk.factor
        )
        job = talk.job(warm, trigger or Trigger.SOFT, forwarded.used)
        if trigger is None:
            await self._compactor.observe(job)
        else:
            self._compactor.later(job, talk.policy.settle_s)

    def _measured(self, talk: Talk) -> Talk:
        """With the window as it is known by now: the upstream may have told it while it was answering, or an error taught it."""
        window = self._windows.of(talk.upstream.name, talk.conversation.request.model, talk.policy)
        if window == talk.window:
            return talk
        return replace(talk, window=window, limits=limits(talk.policy, window, reasons=talk.conversation.reasons))

    def _due(self, talk: Talk, route: Route, forwarded: Forwarded) -> Trigger | Because:
        """What asks for a compaction after this turn, or why none is wanted."""
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
        if because is None and self._compactor.is_busy(talk.name):
            because = Because.IN_FLIGHT
        if because is None and talk.mode is Mode.OBSERVE:
            because = Because.OBSERVE
        self._metrics.decision(because)
        return Trigger.SOFT if because is None else because

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

    def beside(self, talk: Talk) -> None:
        """A compaction that waited for this turn (`when = "next_turn"`): replay the previous warm request beside it."""
        known = talk.lineage.known
        if known is None or known.pending is None or known.turn is None or talk.mode is Mode.OBSERVE:
            return
        if (known.turn.upstream, known.turn.model) != (talk.upstream.name, talk.conversation.request.model):
            return  # the conversation moved on to another model: what was warm is at another provider
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
        warm = turn.with_answer(warm, known, talk.conversation)
        self._compactor.start(talk.job(warm, trigger, used))


def _counted(talk: Talk, route: Route) -> Talk:
    """With the compaction that this request went through in its counters: the next soft one keeps its distance from it."""
    if route.note not in ("inline", "recovered"):
        return talk
    applied = route.routed.applied
    counters = pressure.after_success(
        replace(talk.lineage.counters, turns=talk.lineage.counters.turns + 1), 0, applied=applied is not None
    )
    return replace(talk, lineage=replace(talk.lineage, counters=replace(counters, turns=talk.lineage.counters.turns)))
