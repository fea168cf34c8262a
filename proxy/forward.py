"""Sends the routed request, and mends what we made of it where the provider does not take it."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict

from proxy import clock, tenancy
from proxy.bounded import remember
from proxy.core import stream_usage
from proxy.core.answer import decoded
from proxy.core.refused import SHAPE_STATUSES, is_overflow, is_shape
from proxy.core.rewrite import Routed
from proxy.errors import UpstreamFailed
from proxy.metrics import Metrics, Retry
from proxy.talk import Route, Talk
from proxy.upstream import Reply, Sender

log = logging.getLogger("warmfold.forward")

UNREWRITTEN_S = 600.0
MAX_REMEMBERED = 10_000
_PEEKED_BYTES = 65_536

_FAILED = (500, 501)
_QUESTION = re.compile(rb"stream_?options|include_?usage", re.IGNORECASE)


class Forwarder:
    """Remembers, in bounded memory, which upstreams take no question for usage and which sessions no rewriting."""

    def __init__(self, sender: Sender, metrics: Metrics) -> None:
        self._sender = sender
        self._metrics = metrics
        self._unrewritten: OrderedDict[str, float] = OrderedDict()
        self._without_usage: OrderedDict[tuple[str, str], None] = OrderedDict()

    def is_unrewritten(self, talk: Talk) -> bool:
        """Whether the provider lately refused what we made of this session's requests."""
        return clock.monotonic() < self._unrewritten.get(talk.name, 0.0)

    async def forward(self, talk: Talk, route: Route, plain: Route) -> tuple[Reply, Route, bool]:
        """The provider's reply, what it was a reply to, and whether we asked for usage on our own account.

        What we made of the request may be refused: then it goes out once without our question, and once as it came. Each is remembered
        only if it was the cure, since the request may deserve its refusal.
        """
        asked, body = self._ask_for_usage(talk, route.routed)
        reply = await self._sender.send(talk.inbound, talk.upstream, body)
        if asked and await _is_question_refused(reply):
            await reply.close()
            reply = await self._sender.send(talk.inbound, talk.upstream, route.routed.body)
            self._metrics.retried(Retry.STREAM_OPTIONS)
            asked = False
            if reply.status not in SHAPE_STATUSES and reply.status < 500:
                log.warning("the upstream refuses stream_options upstream=%s", talk.upstream.name)
                whose = talk.upstream.name, talk.conversation.request.model
                remember(self._without_usage, whose, None, MAX_REMEMBERED)
        if route.routed.applied is not None and await _is_refused(reply):
            await reply.close()
            reply = await self._sender.send(talk.inbound, talk.upstream, plain.routed.body)
            self._metrics.retried(Retry.SHAPE)
            if reply.status == 200 or await _is_too_long(reply):
                self._leave_unrewritten(talk)
            route = plain
        return reply, route, asked

    async def again(self, talk: Talk, route: Route, *, asked: bool) -> Reply:
        """The reply to another route of a request that was forwarded before: one call, as that one went in the end."""
        body = stream_usage.asking(route.routed.body) if asked else None
        return await self._sender.send(talk.inbound, talk.upstream, body or route.routed.body)

    async def is_refused(self, talk: Talk, reply: Reply) -> bool:
        """Whether the provider does not take the shape of a request that cannot go out as it came, being too long: then its session goes on unrewritten."""
        if not await _is_refused(reply):
            return False
        self._leave_unrewritten(talk)
        return True

    def _leave_unrewritten(self, talk: Talk) -> None:
        log.warning(
            "the upstream refuses a rewritten request, its session goes on unrewritten session=%s", talk.lineage.id
        )
        remember(self._unrewritten, talk.name, clock.monotonic() + UNREWRITTEN_S, MAX_REMEMBERED)

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


async def _is_question_refused(reply: Reply) -> bool:
    """Whether the provider may not take our question for usage: it refuses the request, or fails and names what we asked with.

    Sources: 422 by Mistral, 400 by Azure's older API versions, by Fireworks and by Databricks; 500 by gateways that choke on it.
    """
    if reply.status in _FAILED and _QUESTION.search(await error_body(reply) or b""):
        return True
    return await _is_refused(reply)


async def _is_refused(reply: Reply) -> bool:
    """Whether the provider does not take what we made of the request. One that is too long is not refused: no other shape of it will fit."""
    if reply.status not in SHAPE_STATUSES and reply.status != 500:
        return False
    return is_shape(reply.status, await error_body(reply) or b"")


async def _is_too_long(reply: Reply) -> bool:
    return reply.status >= 400 and is_overflow(reply.status, await error_body(reply) or b"")


async def error_body(reply: Reply) -> bytes | None:
    """The start of an error as text; None where its coding is unknown, or it breaks off."""
    try:
        return decoded(await reply.read(_PEEKED_BYTES), tenancy.header(reply.headers, "content-encoding"))
    except UpstreamFailed:
        return None
