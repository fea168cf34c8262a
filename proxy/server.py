"""The whole proxy, built and run: store, upstreams, journey, both listeners; and how it ends."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

import click
import uvloop
from aiohttp import web

from proxy import clock, pricelist
from proxy.admin.app import Compactor as ByHandPort
from proxy.admin.app import admin_app
from proxy.by_hand import ByHand
from proxy.compactor import Compactor
from proxy.config import Config, ConfigError, masked_url
from proxy.counts import Counts
from proxy.discovery import Discovery
from proxy.forward import Forwarder
from proxy.guard import Guard
from proxy.identify import Identifier
from proxy.journey import Journey
from proxy.listener import CannotListen, Chat, Listener, opened
from proxy.metrics import Metrics
from proxy.notices import cache_given_up
from proxy.observe import Observer
from proxy.pricelist import PriceBook
from proxy.recovery import Recovery
from proxy.refusals import placed
from proxy.store import Store
from proxy.store.connect import open_store
from proxy.target import Targets
from proxy.tasks import Tasks
from proxy.tenancy import Tenants
from proxy.unwritten import Unwritten
from proxy.upstream import Upstreams
from proxy.windows import Windows
from proxy.worth import Worth

log = logging.getLogger("warmfold.server")

_CANNOT_LISTEN: Final = 1
_BAD_CONFIGURATION: Final = 2
_UNREAD: Final = Path("warmfold.toml")
"""The name that the README uses. A file of the working directory is never read unasked: what is in force is on the command line."""


@dataclass(slots=True)
class Running:
    """A proxy that serves. `base_url` is what an SDK takes, /v1 included."""

    base_url: str
    admin_url: str
    metrics: Metrics = field(repr=False)
    _listener: Listener = field(repr=False)
    _tasks: Tasks = field(repr=False)
    _rest: AsyncExitStack = field(repr=False)

    @property
    def busy(self) -> bool:
        """Whether background work runs: a turn is being saved, or a compaction made."""
        return len(self._tasks) > 0

    async def stop(self, grace_s: float = 1.0) -> None:
        """End it: no new connections, then `grace_s` seconds for running streams and compactions together, then all is let go."""
        until = clock.monotonic() + grace_s
        try:
            await self._listener.close(grace_s)
            await self._tasks.drain(max(0.0, until - clock.monotonic()))
        finally:
            await self._rest.aclose()


async def start(config: Config) -> Running:
    """The proxy, once both ports are open. Raises CannotListen; ConfigError where the store's settings cannot work."""
    async with AsyncExitStack() as stack:
        metrics = Metrics()
        tasks = Tasks()
        store = await open_store(config.store, metrics.store_failed)
        stack.push_async_callback(store.close)
        upstreams = Upstreams(config, metrics)
        stack.push_async_callback(upstreams.close)
        windows = Windows(await pricelist.listed(config))
        prices = PriceBook(config, await pricelist.priced(config))
        chat, by_hand = build_journey(config, store, upstreams, windows, prices, tasks, metrics)

        admin = web.AppRunner(
            admin_app(config, store, by_hand, metrics, upstreams.probe), access_log=None, shutdown_timeout=1.0
        )
        stack.push_async_callback(admin.cleanup)
        admin_url = await opened(admin, "admin", config.admin.host, config.admin.port)
        # Last, so that whoever finds it open finds all of it; and cleaned up first.
        listener = Listener(config, upstreams, metrics, chat)
        stack.push_async_callback(listener.close, 0)
        base_url = await listener.open()
        return Running(base_url, admin_url, metrics, listener, tasks, stack.pop_all())
    raise AssertionError("the block above returns or raises")


def build_journey(
    config: Config,
    store: Store,
    upstreams: Upstreams,
    windows: Windows,
    prices: PriceBook,
    tasks: Tasks,
    metrics: Metrics,
) -> tuple[Chat, ByHandPort]:
    """What answers chat completions, and what compacts on an operator's word: both around one compactor."""
    tenants = Tenants(store, config.session.tenant_header, config.secret(config.session.tenant_secret_env) or "")
    compactor = Compactor(store, upstreams, Targets(config, windows), tasks, metrics)
    unwritten = Unwritten(store)
    discovery = Discovery(upstreams, windows, tasks)
    counts = Counts(windows, metrics)
    identifier = Identifier(config, store, tenants, windows, counts, discovery, unwritten, metrics)
    worth = Worth(config, prices, compactor)
    observer = Observer(config, store, compactor, worth, windows, counts, unwritten, tasks, metrics)
    guard, forwarder = Guard(compactor, metrics), Forwarder(upstreams, metrics)
    recovery = Recovery(forwarder, guard, windows, metrics)
    journey = Journey(config, upstreams, identifier, forwarder, guard, recovery, observer, compactor, tasks, metrics)
    return journey.chat_completion, ByHand(config, store, compactor, tenants, windows)


def run(config: Config, file: Path | None) -> None:
    """Serve until SIGTERM or SIGINT, then end within server.grace_s; a second signal ends the process at once.

    `file`: where the configuration is from, for the log. Exits with 1 where a port cannot be opened, with 2 where the configuration cannot
    work, each with one line on stderr.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    _calm_collector()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_serve(config, file))
        except CannotListen as error:
            _fail(error, _CANNOT_LISTEN)
        except ConfigError as error:
            _fail(ConfigError(placed(error, config)), _BAD_CONFIGURATION)


def _calm_collector() -> None:
    """Make full collections rare, and let them skip what lives for ever: remembered conversations are millions of objects without a cycle,
    and walking them held the loop up for 60 to 120 ms (measured on 2026-11-30 with 32 conversations of 256 KB).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)


async def _serve(config: Config, file: Path | None) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_report)
    told = asyncio.Event()

    def stop() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)  # whoever asks twice means it; the embedded store ends with us
        told.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    running = await start(config)
    _announce(config, file)
    log.info("serving base_url=%s upstream=%s admin=%s", running.base_url, config.upstream.base_url, running.admin_url)
    await told.wait()
    log.info("stopping grace_s=%g", config.server.grace_s)
    await running.stop(config.server.grace_s)
    log.info("stopped")


def _announce(config: Config, file: Path | None) -> None:
    """Say what is in effect and would surprise somebody: which file, where the sessions lie, a window that nobody told us, a cache that is not reused."""
    if file is None and _UNREAD.exists():
        log.warning("%s in the working directory is not read; --config %s reads it", _UNREAD, _UNREAD)
    embedded = config.store.url == "embedded:"
    log.info(
        "configuration file=%s store=%s%s",
        file.absolute() if file else "none",
        "embedded" if embedded else masked_url(config.store.url),
        f" data_dir={Path(config.store.data_dir).absolute()}" if embedded else "",
    )
    policies = (config.compaction, *(rule.over(config.compaction) for rule in config.models))
    if all(policy.max_context_tokens is None for policy in policies) and any(
        policy.mode != "off" for policy in policies
    ):
        log.info(
            "no window configured: upstreams are asked how long their models' contexts are; "
            "compaction.max_context_tokens (--window) or [[models]] sets it"
        )
    for notice in cache_given_up(config):
        log.warning("%s", notice)


def _report(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What asyncio could not hand to anybody, by type alone: its own handler prints the message, which may quote a request."""
    log.error("event loop: %s error=%s", context.get("message", ""), type(context.get("exception")).__name__)


def _fail(error: Exception, status: int) -> NoReturn:
    click.echo(str(error), err=True)
    sys.exit(status)
