"""A soft compaction is due: is it worth its price, and may it be made now? The core judges; here it is given the figures."""

from __future__ import annotations

import math
from dataclasses import replace

from proxy import clock
from proxy.compactor import Compactor
from proxy.config import Config
from proxy.core import payback, pressure, quota
from proxy.core.limits import INSTRUCTION_TOKENS
from proxy.core.model import Because, Figures
from proxy.core.payback import Payback
from proxy.core.plan import BLOCK_TOKENS, Plan
from proxy.core.quota import Headers, Need
from proxy.job import Job
from proxy.pricelist import PriceBook
from proxy.talk import Talk


class Worth:
    """Weighs soft compactions."""

    def __init__(self, config: Config, prices: PriceBook, compactor: Compactor) -> None:
        self._config = config
        self._prices = prices
        self._compactor = compactor

    def weighed(self, job: Job, share: float, *, last_chance: bool) -> tuple[Job, Because | None]:
        """The job with the figures of its payback, and why it had better wait. `share`: core/payback.py.

        At its last chance it waits for nothing: the next request would be compacted while its client waits.
        """
        aimed, plan = self._compactor.planned(job)
        if isinstance(plan, Because):
            return job, None  # for the compactor to say, which then keeps its distance
        found = self._payback(job, aimed, plan, share)
        warm = job.warm
        thinks = aimed.strategy == "replay" and pressure.thinks_behind_user(warm.facts[: plan.read_to - warm.offset])
        because = None if last_chance else pressure.waits(found, job.policy.max_payback_turns, thinks=thinks)
        return (job if found is None else replace(job, figures=_figures(found))), because

    def _payback(self, job: Job, aimed: Job, plan: Plan, share: float) -> Payback | None:
        """What it costs and saves; None where a price is not known. `aimed`: the job with the model that writes the summary."""
        own = self._prices.of(job.upstream.name, job.warm.model)
        writer = self._prices.of(aimed.upstream.name, aimed.model)
        if own is None or writer is None:
            return None
        return payback.payback(payback.sizes(plan, job.limits), own, writer, share=share)

    def barred(self, talk: Talk, used: int, headers: Headers) -> tuple[Because | None, Figures]:
        """Why no soft compaction of this conversation may be made now, and the figures. `used`: tokens that the call repeats; `headers`: of the
        provider's newest answer to this tenant.
        """
        asked = self._config.upstream_for(talk.policy.summary_model) if talk.policy.summary_model else talk.upstream
        if self._compactor.rest.is_on(asked.name, talk.lineage.id.tenant, clock.monotonic()):
            return Because.RATE_LIMITED, Figures()
        if asked.name != talk.upstream.name:
            return None, Figures()  # nobody has told us of its quota
        need, left = _need(talk, used), quota.remaining(headers)
        figures = Figures(needed_tokens=need.of(left), remaining_tokens=left.tokens, remaining_requests=left.requests)
        return (None if quota.is_enough(left, need) else Because.QUOTA), figures


def _need(talk: Talk, used: int) -> Need:
    """What a call takes of the quota. Of a replay the instruction alone is new; a transcript is at most as long, and all of it is new."""
    replays = talk.policy.strategy == "replay" and not talk.policy.summary_model
    prompt = used + INSTRUCTION_TOKENS
    return Need(prompt, INSTRUCTION_TOKENS + BLOCK_TOKENS if replays else prompt, talk.limits.output)


def _figures(of: Payback) -> Figures:
    turns = None if math.isinf(of.turns) else round(of.turns, 2)
    return Figures(payback_turns=turns, cost_usd=round(of.cost_usd, 6), saving_usd=round(of.saving_usd, 6))
