"""What machines ask of the process: does it run, may traffic come, what has it counted, how is it configured."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass

from aiohttp import web

from proxy.admin.ports import Exposition, ProbeUpstream
from proxy.admin.problem import Problem, answer, encoded
from proxy.store import Inspection

log = logging.getLogger("warmfold.admin")

PROBE_TIMEOUT_S = 5.0
"""Under the 10 s that orchestrators commonly allow a probe, so that they get our answer and not their own timeout."""

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Health:
    """Handlers for /healthz, /readyz, /metrics and /config. `config` is the effective configuration as JSON, already masked."""

    store: Inspection
    probe_upstream: ProbeUpstream
    metrics: Exposition
    config: bytes

    async def healthz(self, _: web.Request) -> web.Response:
        """200 as long as the process can answer at all."""
        return answer({"status": "ok"})

    async def readyz(self, _: web.Request) -> web.Response:
        """200 where store and upstream are both reachable, else 503; each is named in both.

        A proxy whose store is out still serves its clients (it passes them through), so 503 here means "not as configured".
        """
        store, upstream = await asyncio.gather(_reached(self.store.ping()), _reached(self.probe_upstream()))
        parts = {"store": _word(store), "upstream": _word(upstream)}
        missing = [name for name, word in parts.items() if word != "ok"]
        if missing:
            message = f"Not reachable: {' and '.join(missing)}."
            raise Problem(503, "not_ready", message, beside={"status": "unready", **parts})
        return answer({"status": "ready", **parts})

    async def exposition(self, _: web.Request) -> web.Response:
        """The counters, for Prometheus."""
        return encoded(self.metrics.render(), content_type=_METRICS_TYPE)

    async def configuration(self, _: web.Request) -> web.Response:
        """The effective configuration, secrets masked."""
        return encoded(self.config)


async def _reached(probe: Awaitable[bool]) -> bool:
    """The probe's answer; False where it takes too long or breaks."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            return await probe
    except Exception as error:
        log.warning("readiness probe failed: %s", type(error).__name__)
        return False


def _word(reached: bool) -> str:
    return "ok" if reached else "unreachable"
