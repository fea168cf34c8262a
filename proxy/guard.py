"""Makes a request fit while it waits: before it is sent, and once the provider has said that it was too long."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from proxy import clock
from proxy.compactor import Compactor
from proxy.core import compose, pressure, rewrite, truncated, turn
from proxy.core import conversation as conversations
from proxy.core.model import Because, Checkpoint, Recalled, Trigger
from proxy.job import Outcome
from proxy.metrics import Metrics
from proxy.talk import Route, Talk

log = logging.getLogger("warmfold.guard")

_DOUBT = 1.05
"""Our own count of a text may be off by so much."""

_CUT_DOUBT = 0.02
"""Of the prompt, in front of which a checkpoint is cut: each token of doubt is one less of the checkpoint."""


@dataclass(frozen=True, slots=True)
class Aim:
    """Why a request is compacted while it waits. `is_met` tells from a prompt's estimated tokens whether it fits, with room for what
    comes; `most` is how many of them the provider takes at all; `note` is for the client.
    """

    trigger: Trigger
    is_met: Callable[[int], bool]
    most: int
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

        if fits(estimate) or self._may_go_as_it_came(talk, estimate):
            return route
        aim = Aim(Trigger.GUARD, fits, _room(talk, least), "inline")
        shorter = await self.shortened(talk, route, aim)
        return self.cut(talk, shorter, aim) if _is_surely_above(talk, shorter, aim.most) else shorter

    def _may_go_as_it_came(self, talk: Talk, estimate: int) -> bool:
        """Whether the window takes it, and a checkpoint would most likely serve this request alone: the client writes its history anew each turn."""
        turns = talk.lineage.counters.turns + 1
        if not self._compactor.economy.is_paused(talk.lineage.id.tenant, turns, clock.monotonic()):
            return False
        window = talk.limits.window
        reserved = 0 if window.input_only else talk.conversation.request.requested_output
        return round(estimate * _DOUBT) + reserved <= window.tokens

    async def shortened(self, talk: Talk, route: Route, aim: Aim) -> Route:
        """The route with newer checkpoints until the aim is met, or as far as it goes; its note tells what came of it."""
        if not aim.is_met(talk.least):
            return self._failed(route, Outcome(None, Because.UNSHRINKABLE, False, None), aim)
        if route.whole is not None:
            routed = rewrite.route(talk.conversation.request, talk.conversation.preamble_length, route.whole)
            route = replace(route, routed=routed, whole=None)
        until = clock.monotonic() + talk.policy.inline_timeout_s
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

    def cut(self, talk: Talk, route: Route, aim: Aim) -> Route:
        """The route with its checkpoint cut, for this one request, to the room that the newest messages leave; as it is where there is room enough, or
        next to none.
        """
        whole = route.routed.applied
        if whole is None or talk.estimate(whole) <= aim.most:
            return route
        rooms = _rooms(talk, whole, aim.most)
        part = next(filter(None, (compose.cut(whole, room, talk.factor) for room in rooms)), None)
        if part is None:
            return route
        log.warning(
            "checkpoint cut session=%s tokens=%d of %d", talk.name, part.checkpoint_tokens, whole.checkpoint_tokens
        )
        routed = rewrite.route(talk.conversation.request, talk.conversation.preamble_length, part)
        return replace(route, routed=routed, note=aim.note, whole=whole)

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


def _room(talk: Talk, least: int) -> int:
    """Tokens that the prompt may have: the window, without the room for the answer where `least` of the prompt leaves any."""
    window = talk.limits.window
    reserved = 0 if window.input_only else min(talk.conversation.request.requested_output, window.tokens // 4)
    return window.tokens - (reserved if least + talk.limits.ledger + reserved <= window.tokens else 0)


def _is_surely_above(talk: Talk, route: Route, most: int) -> bool:
    """Whether the text alone is too long: images are priced in many ways. Where that is not certain the provider had better say so, and by how much."""
    applied = route.routed.applied
    if applied is None or talk.estimate(applied) <= most * _DOUBT:
        return False
    return truncated.text_tokens(talk.conversation, applied) > most * _DOUBT


def _rooms(talk: Talk, whole: Checkpoint, most: int) -> tuple[int, ...]:
    """Tokens that a checkpoint may have where the prompt may have `most`: cautious ones first, then bolder ones, since without any the request
    fails for certain.
    """
    weight, estimate = conversations.checkpoint_weight(whole), talk.estimate(whole)
    # What we count too high is rather the other messages, images above all: then a checkpoint's text is worth what we count.
    bold = max(1.0, talk.factor)
    factors = (talk.factor, (talk.factor + bold) / 2, bold)
    # Not every provider counts the answer's room.
    rooms = [round(weight * factor) - estimate + limit for factor in factors for limit in (most, talk.window.tokens)]
    return rooms[0] - round(most * _CUT_DOUBT), *rooms
