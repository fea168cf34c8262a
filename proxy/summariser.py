"""Asks for a summary: the call as planned, in another shape where it is refused, once more where the answer is no summary."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from proxy import clock, tenancy
from proxy.core import checkpoint, overflow, quota, refused, tokens
from proxy.core.answer import decoded, parsed, read_whole
from proxy.core.checkpoint import Rejected, Summary
from proxy.core.model import Because, Usage, Window
from proxy.core.plan import Plan, Planner
from proxy.errors import UpstreamBroken, UpstreamTimeout, UpstreamUnreachable
from proxy.job import Job
from proxy.metrics import Metrics
from proxy.target import Targets
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

    `retry_after_s`: what it asked for, and `window_tokens`: what it said of its window when the request was too long; None where it did not say.
    """

    verdict: Summary | Rejected
    usage: Usage
    retry_after_s: float | None = None
    refused: bool = False
    window_tokens: int | None = None


class Summariser:
    """One per worker: it remembers which shape of a call an upstream takes."""

    def __init__(self, sender: Sender, metrics: Metrics, targets: Targets) -> None:
        self._sender = sender
        self._metrics = metrics
        self._targets = targets
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
        if isinstance(reading.verdict, Rejected):
            because = reading.verdict.because
            again = _second_try(job, plan, planner, because, reading.window_tokens)
            if again is not None:
                self._metrics.compaction_retried(because)
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
            too_long = overflow.of_error(reply.status, "", data)
            if too_long is not None:
                because = Because.OVERFLOW
                self._targets.taught(job, too_long)
            return Reading(
                Rejected(because),
                Usage(),
                quota.retry_after_s(reply.headers, clock.now_ms()),
                refused=refused.is_shape(reply.status, data),
                window_tokens=too_long.limit if too_long is not None else None,
            )
        usage = read_whole(data, want_text=False).usage
        # Not every server counts the cached ones as a part of the prompt.
        counted = (usage.prompt or 0) + (usage.cached or 0)
        if overflow.silent(counted, tokens.of_text(plan.replay.instruction)):
            # Not even our own message was read whole: a transcript lost its beginning, and its summary would stand for that as well.
            return Reading(Rejected(Because.OVERFLOW), usage, window_tokens=usage.prompt)
        return Reading(checkpoint.summary_of(parsed(data)), usage)


def _whom(job: Job) -> tuple[str, str, str]:
    """Who is asked, and which way comes first: a replay (""), or a transcript with the output limit under the client's name."""
    return job.upstream.name, job.model, job.transcription.output_key if job.transcription else ""


def _second_try(job: Job, plan: Plan, planner: Planner, because: Because, window_tokens: int | None) -> Plan | None:
    """What to ask after an answer that is no summary, once; None where that would be in vain."""
    if because is Because.TRUNCATED:
        return _with_more_room(job, plan, planner)
    if because is Because.OVERFLOW:
        return _shorter(job, plan, planner, window_tokens)
    return plan if because in _TRY_AGAIN else None


def _shorter(job: Job, plan: Plan, planner: Planner, window_tokens: int | None) -> Plan | None:
    """A transcript for the window that its reader stated; where that is not less, since the reader counts more tokens than we do, half of it.

    None for a replay: what it repeats was not too long a moment ago.
    """
    to = planner.transcription
    if to is None:
        return None
    for window in (window_tokens or to.window.tokens, plan.prompt // 2):
        narrower = replace(planner, transcription=replace(to, window=Window(window, "learned")))
        found = narrower.plan(job.trigger, job.span)
        if isinstance(found, Plan) and found.prompt <= plan.prompt and found.replay.body != plan.replay.body:
            return found
    return None


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
