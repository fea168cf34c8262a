"""The admin listener: an application of its own on a port of its own. Which path leads where stands here and nowhere else."""

from __future__ import annotations

from typing import NoReturn

from aiohttp import web

from proxy.admin.auth import guard
from proxy.admin.health import Health
from proxy.admin.ports import CompactAnswer, Compactor, Exposition, ProbeUpstream
from proxy.admin.problem import Problem, problems
from proxy.admin.settings import settings
from proxy.admin.views import Sessions
from proxy.config import Config
from proxy.store import Store

__all__ = ["CompactAnswer", "Compactor", "admin_app"]

_MAX_BODY_BYTES = 64 * 1024  # the only body that means anything holds two integers


def admin_app(
    config: Config, store: Store, compactor: Compactor, metrics: Exposition, probe_upstream: ProbeUpstream
) -> web.Application:
    """The application; the caller binds it to admin.host and admin.port. It owns nothing and closes nothing."""
    has = settings(config)
    health = Health(store, probe_upstream, metrics, has.effective)
    sessions = Sessions(store, compactor, has.debounce_turns, has.texts_live_s)
    app = web.Application(middlewares=[problems, guard(has.host, has.token)], client_max_size=_MAX_BODY_BYTES)
    app.add_routes(
        [
            web.get("/healthz", health.healthz),
            web.get("/readyz", health.readyz),
            web.get("/metrics", health.exposition),
            web.get("/config", health.configuration),
            web.get("/sessions", sessions.listing),
            web.get("/sessions/{id}", sessions.single),
            web.get("/sessions/{id}/summary", sessions.summary),
            web.post("/sessions/{id}/compact", sessions.compact),
            web.post("/sessions/{id}/undo", sessions.undo),
            web.delete("/sessions/{id}", sessions.delete),
            web.delete("/tenants/{tenant}", sessions.delete_tenant),
            web.post("/reload", _reload),
            web.get("/", _dashboard),
        ]
    )
    return app


async def _reload(_: web.Request) -> NoReturn:
    raise Problem(
        501, "not_implemented", "This version reads its configuration at start only; restart it to apply a change."
    )


async def _dashboard(_: web.Request) -> NoReturn:
    raise Problem(501, "not_implemented", "This version has no dashboard; warmfold sessions shows the same facts.")
