"""Makes a request fit while it waits: before it is sent, and once the provider has said that it was too long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from proxy import clock
from proxy.compactor import Compactor
from proxy.core import pressure, rewrite, turn
from proxy.core.model import Because, Checkpoint, Recalled, Trigger
from proxy.job import Outcome
from proxy.metrics import Metrics
from proxy.talk import Route, Talk


@dataclass(frozen=True, slots=True)
class Aim:
    """Why a request is compacted while it waits. `is_met` tells from a prompt's estimated tokens whether it fits; `note` is for the client."""

    trigger: Trigger
    is_met: Callable[[int], bool]
    note: str


class Guard:
    """Compacts as many times as it takes, within inline_timeout_s over all passes."""

    def __init__(self, compactor: Compactor, metrics: Metrics) -> None:
        self._compactor = compactor
        self._metrics = metrics

    async def before(self, talk: Talk, route: Route) -> Route:
        """The route, compacted where the request would not fit otherwise."""
        requested, estimate = talk.conversation.request.requested_output, talk.estimate(route.routed.applied)
        if not pressure.must_compact(estimate, requested, talk.limits):
            return route
        least = talk.least

        def fits(prompt: int) -> bool:
            return not pressure.must_compact(prompt, requested, talk.limits, least)

        if fits(estimate):
            return route
        return await self.shortened(talk, route, Aim(Trigger.GUARD, fits, "inline"))

    async def shortened(self, talk: Talk, route: Route, aim: Aim) -> Route:
        """The route with newer checkpoints until the aim is met, or as far as it goes; its note tells what came of it."""
        until = clock.monotonic() + talk.policy.inline_timeout_s
        if not aim.is_met(talk.least):
            return self._failed(route, Outcome(None, Because.UNSHRINKABLE, False, None), aim)
        for number in range(talk.policy.max_passes + 1):
            left_s = until - clock.monotonic()
            estimate = talk.estimate(route.routed.applied)
            if left_s <= 0 or (number and aim.is_met(estimate)):
                break
            warm = turn.warm_from_live(
                talk.lineage.id, talk.conversation, route.routed, talk.lineage.known, talk.factor
            )
            job = talk.job(warm, aim.trigger, estimate)
            if number < talk.policy.max_passes:
                outcome = await self._compactor.inline(job, left_s)
            else:
                outcome = await self._compactor.without_model(job, Because.NO_ROOM)
            made = outcome.checkpoint
            if made is None and outcome.because in (Because.IN_FLIGHT, Because.SUPERSEDED):
                made = await self._compactor.wait_elsewhere(warm, until - clock.monotonic())
            shorter = self._with(talk, route, made)
            if shorter is None:
                return self._failed(route, outcome, aim)
            unknown = talk.lineage.known is None and not outcome.committed and outcome.because is None
            route = Route(shorter, aim.note, made if unknown else None, outcome.attempt)
        return route

    def _with(self, talk: Talk, route: Route, made: Checkpoint | None) -> rewrite.Routed | None:
        """The request with a new checkpoint; None where it does not apply, or covers no more than the one before.

        Whoever made it: a joined flight may have been another branch's.
        """
        applied = rewrite.applicable(Recalled(None, 0, own=made), talk.conversation)
        shorter = rewrite.route(talk.conversation.request, talk.conversation.preamble_length, applied)
        covered = route.routed.applied.k if route.routed.applied else 0
        return shorter if shorter.applied is not None and shorter.applied.k > covered else None

    def _failed(self, route: Route, outcome: Outcome, aim: Aim) -> Route:
        if outcome.because in (Because.NO_BOUNDARY, Because.UNSHRINKABLE):
            self._metrics.unshrinkable()
        if route.note == aim.note:
            return route  # an earlier pass has shortened it
        return replace(route, note=f"failed-{outcome.because or Because.CONFLICT}")
