"""Sends a request, and sends it shorter where the provider says that it was too long, before the client has seen anything of that.

An overflow is recovered from the live request, so neither the store nor a warm request is needed. One retry: where that fails as well, the client
gets the provider's first answer as it came.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from proxy import tenancy
from proxy.core import overflow
from proxy.core.answer import events, holds_event
from proxy.core.limits import Limits, limits
from proxy.core.model import Because, Trigger, Window
from proxy.core.overflow import Overflow
from proxy.errors import UpstreamFailed
from proxy.forward import Forwarder, error_body
from proxy.guard import Aim, Guard
from proxy.metrics import Metrics, Retry
from proxy.mode import Mode
from proxy.talk import Route, Talk
from proxy.upstream import Reply
from proxy.windows import Windows

log = logging.getLogger("warmfold.recovery")

HOLD_S = 2.0
"""For so long the first event of a stream is waited for, where the prompt is long enough that it may be an overflow error."""

_PEEKED_BYTES = 65_536
_UNSAID_SHARE = 0.75
"""Of the prompt: what is aimed for where the provider does not tell its limit."""

_TRIED = (f"failed-{Because.UNSHRINKABLE}", f"failed-{Because.NO_BOUNDARY}")
"""The guard has looked for something to cover, in vain."""

_MOST_OUTPUT = 0.75
"""Of the window: a client that reserves more for the answer leaves no room that a compaction could make."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A reply, and what it is a reply to. `asked`: the stream was asked for its usage on our own account."""

    talk: Talk
    route: Route
    reply: Reply
    asked: bool


class Recovery:
    """The way to the provider."""

    def __init__(self, forwarder: Forwarder, guard: Guard, windows: Windows, metrics: Metrics) -> None:
        self._forwarder = forwarder
        self._guard = guard
        self._windows = windows
        self._metrics = metrics

    async def send(self, talk: Talk, route: Route, plain: Route) -> Sent:
        """The provider's reply to the route, or to a shorter one. Raises as Upstreams.send does."""
        reply, went, asked = await self._forwarder.forward(talk, route, plain)
        is_shape_refused = route.routed.applied is not None and went.routed.applied is None
        route = went
        first = Sent(talk, route, reply, asked)
        if talk.mode is Mode.OBSERVE or self._forwarder.is_unrewritten(talk):
            return first
        try:
            said = await self._said(first, looks=talk.estimate(route.routed.applied) >= talk.limits.soft)
        except BaseException:  # the client hung up while its first event was waited for: nobody else closes it yet
            await reply.close()
            raise
        if said is None:
            return first
        if said.limit is not None:
            self._windows.learned(
                talk.upstream.name,
                talk.conversation.request.model,
                said.limit,
                said.input_only,
                tenant=talk.lineage.id.tenant,
            )
        if is_shape_refused:
            return first  # shorter is what it was at first
        if route.note in _TRIED and route.routed.applied is None:
            return first
        try:
            return await self._again(first, said)
        except Exception as error:
            log.error("recovery failed: %s; the client gets the provider's error", type(error).__name__)
            self._metrics.step_failed("recover")
            return first

    async def _said(self, sent: Sent, *, looks: bool) -> Overflow | None:
        """What the provider says of the context length; None also where what it says cannot be read."""
        try:
            return await _overflow(sent, looks=looks)
        except Exception as error:
            log.error("an answer cannot be read: %s; it goes on as it came", type(error).__name__)
            self._metrics.step_failed("recover")
            return None

    async def _again(self, first: Sent, said: Overflow) -> Sent:
        """What came of the request made shorter; the first reply where it cannot be, or is still too long."""
        talk = _informed(first, said)
        aim = _aim(talk, said)
        if aim is None:
            return replace(first, route=replace(first.route, note=f"failed-{Because.UNSHRINKABLE}"))
        shorter = self._guard.cut(talk, await self._guard.shortened(talk, first.route, aim), aim)
        if shorter.note != aim.note:
            return replace(first, route=shorter)
        self._metrics.retried(Retry.OVERFLOW)
        try:
            reply = await self._forwarder.again(talk, shorter, asked=first.asked)
        except UpstreamFailed:
            return replace(first, route=replace(first.route, note=f"failed-{Because.UNREACHABLE}"))
        second = Sent(talk, shorter, reply, first.asked)
        if await self._said(second, looks=True) is not None:
            await reply.release()
            return replace(first, route=replace(first.route, note=f"failed-{Because.OVERFLOW}"))
        if await self._forwarder.is_refused(talk, reply):
            await reply.release()
            return replace(first, route=replace(first.route, note=f"failed-{Because.STATUS}"))
        await first.reply.release()
        return second


async def _overflow(sent: Sent, *, looks: bool) -> Overflow | None:
    """What the provider says of the context length, in an error, or in the place of an answer; None where it says nothing of it.

    `looks`: a 200 is waited for and looked into as well.
    """
    reply = sent.reply
    kind, coding = tenancy.header(reply.headers, "content-type"), tenancy.header(reply.headers, "content-encoding")
    try:
        if reply.status >= 400:
            body = await error_body(reply)
            return None if body is None else overflow.of_error(reply.status, kind, body)
        if reply.status != 200 or coding or not looks:
            return None
        streams = "text/event-stream" in kind.lower()
        begun = await reply.until(holds_event if streams else bytes.strip, HOLD_S, _PEEKED_BYTES)
    except UpstreamFailed:
        return None  # whoever reads on finds out
    if not streams:
        return overflow.of_error(reply.status, kind, begun)
    return overflow.of_event(next(events(begun))) if holds_event(begun) else None


def _informed(sent: Sent, said: Overflow) -> Talk:
    """The talk with what the error taught: the true window, and how far our estimate of this prompt was off."""
    talk = sent.talk
    estimate = max(1, talk.estimate(sent.route.routed.applied))
    prompt = said.requested or estimate
    if said.limit is None:
        window = Window(min(talk.window.tokens, int(prompt * _UNSAID_SHARE)), "learned")
    else:
        window = Window(said.limit, "learned", said.input_only)
        reserved = 0 if said.input_only else talk.conversation.request.requested_output
        prompt = max(prompt, said.limit - reserved)
    sizes: Limits = limits(talk.policy, window, reasons=talk.limits.reasoning_room > 0)
    return replace(talk, window=window, limits=sizes, factor=talk.factor * prompt / estimate)


def _aim(talk: Talk, said: Overflow) -> Aim | None:
    """When the shorter request will fit; None where the answer's own room leaves it none."""
    total = talk.window.tokens
    reserved = 0 if said.input_only else talk.conversation.request.requested_output
    if reserved > total * _MOST_OUTPUT:
        return None
    # Where the newest messages reach beyond the hard watermark by themselves, it is out of reach, and the window alone counts.
    sizes, room = talk.limits, total - reserved
    is_within_reach = talk.least + sizes.summary // 2 + sizes.ledger < sizes.hard
    mark = min(room, sizes.hard - 1) if is_within_reach else room
    # Without the provider's count nobody knows how much too long it was.
    most = mark if said.requested is None else room
    return Aim(Trigger.OVERFLOW, lambda prompt: prompt <= mark, most, "recovered")
