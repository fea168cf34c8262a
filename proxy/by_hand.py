"""A compaction that an operator asks for, through the admin listener."""

from __future__ import annotations

from proxy.admin.ports import CompactAnswer
from proxy.compactor import Compactor
from proxy.config import Config
from proxy.core.limits import limits
from proxy.core.model import Because, SessionId, Trigger
from proxy.job import Job
from proxy.store import Store
from proxy.tenancy import Tenants
from proxy.upstream import Inbound
from proxy.warm import stored_warm
from proxy.windows import Windows


class ByHand:
    """Replays a session's stored warm request on an operator's word."""

    def __init__(self, config: Config, store: Store, compactor: Compactor, tenants: Tenants, windows: Windows) -> None:
        self._config = config
        self._store = store
        self._compactor = compactor
        self._tenants = tenants
        self._windows = windows

    async def compact_now(
        self, session: SessionId, credential: str | None, from_: int | None, to: int | None
    ) -> CompactAnswer:
        """What became of it. The provider's credential must be of the session's tenant, unless ours is configured."""
        known = await self._store.session(session)
        if known is None or known.turn is None:
            return CompactAnswer("unknown", "", None, None)
        policy = self._config.compaction_for(known.turn.model)
        upstream = self._config.upstream_for(known.turn.model)
        if not upstream.api_key_env and not await self._may(session, credential):
            return CompactAnswer("forbidden", "", None, None)
        if policy.mode != "on":
            return CompactAnswer("skipped", Because.OBSERVE if policy.mode == "observe" else Because.OFF, None, None)
        warm = await stored_warm(self._store, known)
        if warm is None:
            return CompactAnswer("skipped", Because.WARM_MISSING, None, None)
        if self._compactor.is_busy(str(session)):
            return CompactAnswer("skipped", Because.IN_FLIGHT, None, None)
        window = self._windows.of(upstream.name, known.turn.model, policy, tenant=session.tenant)
        sizes = limits(policy, window, reasons=any(f.reasoning for f in warm.facts))
        headers = (("Content-Type", "application/json"), *((("Authorization", credential),) if credential else ()))
        inbound = Inbound(method="POST", target="/v1/chat/completions", headers=headers, body=b"")
        span = None if to is None else (from_ or 0, to)
        used, last = known.turn.usage.used, known.turn
        job = Job(warm, Trigger.MANUAL, sizes, policy, upstream, inbound, known.counters, used, span, last=last)
        outcome = await self._compactor.start(job)
        if outcome.committed:
            return CompactAnswer("committed", "", outcome.checkpoint, outcome.attempt)
        skipped = outcome.attempt is None or outcome.attempt.outcome == "skipped"
        return CompactAnswer(
            "skipped" if skipped else "failed", outcome.because or Because.STORE, None, outcome.attempt
        )

    async def _may(self, session: SessionId, credential: str | None) -> bool:
        if self._config.session.tenant_header:
            # The header names tenants and the credential is everybody's: whoever may use the admin listener has it.
            return credential is not None
        return await self._tenants.of_authorization(credential or "") == session.tenant
