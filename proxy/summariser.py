"""Asks for a summary: the call as planned, in another shape where it is refused, once more where the answer is no summary."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from proxy import clock, tenancy
from proxy.core import checkpoint, quota, refused
from proxy.core.answer import decoded, parsed, read_whole
from proxy.core.checkpoint import Rejected, Summary
from proxy.core.model import Because, Usage
from proxy.core.plan import Plan, Planner
from proxy.errors import UpstreamBroken, UpstreamTimeout, UpstreamUnreachable
from proxy.job import Job
from proxy.metrics import Metrics
from proxy.upstream import Sender

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
    """One call's result: the summary or the reason, and what the call cost. `refused`: the provider did not take the request.

    `retry_after_s`: what it asked for; None where it did not say.
    """

    verdict: Summary | Rejected
    usage: Usage
    retry_after_s: float | None = None
    refused: bool = False


class Summariser:
    """One per worker: it remembers which shape of a call an upstream takes."""

    def __init__(self, sender: Sender, metrics: Metrics) -> None:
        self._sender = sender
        self._metrics = metrics
        self._taken: dict[tuple[str, str, str], int] = {}

    def planner(self, job: Job) -> Planner:
        """The planner of a job, for the shape of call that its upstream took for this model before; at first the usual one."""
        planner = Planner(job.warm, job.limits, job.policy, transcription=job.transcription)
        return (planner, *planner.others())[self._taken.get(_whom(job), 0)]

    async def summary(self, job: Job, plan: Plan, planner: Planner) -> tuple[Reading, Plan]:
        """What came of it, and the plan that was carried out in the end. Never raises: whatever goes wrong is a reason."""
        reading = await self._ask(job, plan)
        if reading.refused:
            reading, plan, planner = await self._in_another_shape(job, plan, planner, reading)
        verdict = reading.verdict
        if isinstance(verdict, Rejected) and verdict.because in _TRY_AGAIN:
            again = _with_more_room(job, plan, planner) if verdict.because is Because.TRUNCATED else plan
            if again is not None:
                self._metrics.compaction_retried(verdict.because)
                reading, plan = await self._ask(job, again), again
        return reading, plan

    async def _in_another_shape(
        self, job: Job, plan: Plan, planner: Planner, reading: Reading
    ) -> tuple[Reading, Plan, Planner]:
        """The provider refused the request: each of the planner's other shapes once, until one is taken. What works is remembered."""
        tried = {plan.replay.body}
        for number, shaped in enumerate(planner.others(), 1):
            other = shaped.plan(job.trigger, job.span)
            if not isinstance(other, Plan) or other.replay.body in tried:
                continue
            tried.add(other.replay.body)
            self._metrics.compaction_retried(Because.STATUS)
            reading, plan, planner = await self._ask(job, other), other, shaped
            if not reading.refused:
                if isinstance(reading.verdict, Summary) and len(self._taken) < _MAX_SHAPES:
                    self._taken[_whom(job)] = number
                break
        return reading, plan, planner

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
                    # Some gateways compress whatever they are asked.
                    data = decoded(data, tenancy.header(reply.headers, "content-encoding")) or b""
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
                Rejected(because),
                Usage(),
                quota.retry_after_s(reply.headers, clock.now_ms()),
                refused=refused.is_shape(reply.status, data),
            )
        return Reading(checkpoint.summary_of(parsed(data)), read_whole(data, want_text=False).usage)


def _whom(job: Job) -> tuple[str, str, str]:
    """Who is asked, and in which way."""
    return job.upstream.name, job.model, job.strategy


def _with_more_room(job: Job, plan: Plan, planner: Planner) -> Plan | None:
    """The same call with up to twice the room for its answer, since hidden thoughts may have used it up; None where the window has no more."""
    limits = planner.limits
    output = min(2 * limits.output, planner.window.tokens - plan.prompt)
    if output <= limits.output:
        return None
    roomier = replace(planner, limits=replace(limits, reasoning_room=output - limits.summary))
    again = roomier.plan(job.trigger, job.span)
    same = isinstance(again, Plan) and (again.region, again.read_to) == (plan.region, plan.read_to)
    return again if same and isinstance(again, Plan) else None
