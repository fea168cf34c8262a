"""Asks the provider for a summary: the replay as planned, in another shape where it is refused, once more where the answer is no summary."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime

import orjson

from proxy import clock
from proxy.core import checkpoint, refused
from proxy.core.answer import read_whole
from proxy.core.checkpoint import Rejected, Summary
from proxy.core.model import Because, Usage
from proxy.core.plan import Plan, Planner, Shape
from proxy.errors import UpstreamBroken, UpstreamTimeout, UpstreamUnreachable
from proxy.job import Job
from proxy.metrics import Metrics
from proxy.upstream import Reply, Sender

MAX_ANSWER_BYTES = 4 * 1024 * 1024
_MAX_SHAPES = 4096

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


@dataclass(frozen=True, slots=True)
class Reading:
    """One call's result: the summary or the reason, and what the call cost. `refused`: the provider did not take the request."""

    verdict: Summary | Rejected
    usage: Usage
    retry_after_s: float = 0.0
    refused: bool = False


class Summariser:
    """One per worker: it remembers which shape an upstream takes."""

    def __init__(self, sender: Sender, metrics: Metrics) -> None:
        self._sender = sender
        self._metrics = metrics
        self._shapes: dict[tuple[str, str], Shape] = {}

    def shape(self, upstream: str, model: str) -> Shape:
        """The shape of compaction request that this upstream took for this model; at first the one with the rebuilt answer."""
        return self._shapes.get((upstream, model), Shape.ANSWER)

    async def summary(self, job: Job, plan: Plan, planner: Planner) -> tuple[Reading, Plan]:
        """What came of it, and the plan that was carried out in the end. Never raises: whatever goes wrong is a reason."""
        reading = await self._ask(job, plan)
        if reading.refused:
            reading, plan = await self._in_another_shape(job, plan, planner, reading)
        if isinstance(reading.verdict, Rejected) and reading.verdict.because in _TRY_AGAIN:
            self._metrics.compaction_retried(reading.verdict.because)
            reading = await self._ask(job, plan)
        return reading, plan

    async def _in_another_shape(self, job: Job, plan: Plan, planner: Planner, reading: Reading) -> tuple[Reading, Plan]:
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
            reading, plan = await self._ask(job, other), other
            if not reading.refused:
                if isinstance(reading.verdict, Summary) and len(self._shapes) < _MAX_SHAPES:
                    self._shapes[job.upstream.name, job.warm.model] = shape
                break
        return reading, plan

    async def _ask(self, job: Job, plan: Plan) -> Reading:
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
            return Reading(Rejected(Because.TIMEOUT), Usage())
        except (UpstreamUnreachable, UpstreamBroken):
            return Reading(Rejected(Because.UNREACHABLE), Usage())
        if reply.status != 200:
            because = Because.RATE_LIMITED if reply.status in (429, 503) else Because.STATUS
            if refused.is_overflow(reply.status, data):
                because = Because.OVERFLOW
            return Reading(
                Rejected(because), Usage(), _retry_after_s(reply), refused=refused.is_shape(reply.status, data)
            )
        try:
            answer = orjson.loads(data)
        except orjson.JSONDecodeError:
            return Reading(Rejected(Because.MALFORMED), Usage())
        return Reading(checkpoint.summary_of(answer), read_whole(data, want_text=False).usage)


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
