"""The public listener: which request goes which way, and what becomes of it when something goes wrong.

Only `POST` on the chat completions path is ours; every other method and path, /healthz and /metrics included, belongs to the upstream.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web
from yarl import URL

from proxy.config import Config
from proxy.connection import Server
from proxy.downstream import Client
from proxy.errors import Answerable, ClientGone, Ended, Refused, UpstreamFailed
from proxy.metrics import Metrics, Route
from proxy.outbound import origin_form
from proxy.relay import pass_through
from proxy.upstream import Sender

log = logging.getLogger("warmfold.listener")

CHAT_PATHS: Final = frozenset({"/v1/chat/completions", "/chat/completions"})
NOT_YET: Final = {
    prefix + path: route
    for prefix in ("/v1", "")
    for path, route in (("/responses", Route.RESPONSES), ("/messages", Route.MESSAGES))
}
"""Where other APIs hold conversations that we do not compact."""
_CUT_S: Final = 1.0
"""What is cut gets this long to notice."""

Chat = Callable[[Client], Awaitable[None]]
"""Answers one chat completion."""


class CannotListen(Exception):
    """A listener could not be opened; the message is one line that names the setting."""


class Listener:
    """Serves the public port. `chat` None: chat completions are passed through like all else."""

    def __init__(self, config: Config, sender: Sender, metrics: Metrics, chat: Chat | None) -> None:
        self._config = config
        self._sender = sender
        self._metrics = metrics
        self._chat = chat
        self._token = (config.secret(config.server.client_token_env) or "").encode()
        self._serving: set[asyncio.Task[Any]] = set()
        self._stopping = False
        self._hinted: set[str] = set()
        self._runner = web.ServerRunner(Server(self.handle, handler_cancellation=True), shutdown_timeout=_CUT_S)

    async def open(self) -> str:
        """The base URL that clients use, once the port is open. Raises CannotListen."""
        if self._config.server.client_token_env and not self._token:
            raise CannotListen("server.client_token_env: names a variable that is not set, or empty")
        return await opened(self._runner, "server", self._config.server.host, self._config.server.port) + "/v1"

    async def close(self, grace_s: float) -> None:
        """Take no new connections, let running requests end for `grace_s` seconds, then cut them off. Cancelled: cut at once."""
        self._stopping = True
        for site in self._runner.sites:
            await site.stop()
        try:
            if self._serving and grace_s > 0:
                await asyncio.wait(self._serving, timeout=grace_s)
        finally:
            cut = list(self._serving)
            for task in cut:
                task.cancel()
            if cut:
                log.warning("streams cut at shutdown count=%d", len(cut))
                await asyncio.wait(cut, timeout=_CUT_S)
            await self._runner.cleanup()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """aiohttp's handler: everything about one request."""
        config = self._config
        stall_s = config.upstream.read_idle_timeout_s
        client = Client(request, max_body_bytes=config.server.max_body_bytes, stall_s=stall_s)
        path = _posted_to(client)
        route = Route.CHAT if path in CHAT_PATHS else NOT_YET.get(path, Route.OTHER)
        if path in NOT_YET:
            self._hint(path)
        if self._stopping:
            client.close_after()
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        self._serving.add(task)
        try:
            with self._metrics.in_flight():
                await self._answered(client, route)
        finally:
            self._serving.discard(task)
            self._metrics.answered(route, client.status)
            if client.outcome is Ended.UPSTREAM_BROKE:
                log.warning(
                    "upstream failed in the middle of its answer status=%s code=%s", client.status, client.outcome
                )
            if client.outcome is not None:
                self._metrics.relayed(client.outcome)
        return client.response()

    async def _answered(self, client: Client, route: Route) -> None:
        try:
            await self._serve(client, route)
        except Answerable as error:
            if isinstance(error, UpstreamFailed):
                log.warning("upstream failed status=%d code=%s: %s", error.status, error.code, error.message)
            await _tell(client, error)
        except ClientGone:
            client.outcome = Ended.CLIENT_GONE
        except asyncio.CancelledError:
            if client.gone:
                client.outcome = Ended.CLIENT_GONE
            client.abort()
            raise
        except Exception as error:
            # The type alone: a message may quote what passed.
            log.error("request failed error=%s", type(error).__name__)
            message = "The request failed inside warmfold; its log says when."
            await _tell(client, Answerable(500, message, type="server_error", code="internal_error"))

    async def _serve(self, client: Client, route: Route) -> None:
        self._admit(client)
        if route is Route.CHAT and self._chat is not None:
            await self._chat(client)
        else:
            await pass_through(client, self._sender, self._config.upstream)

    def _hint(self, path: str) -> None:
        """Tell the operator, once for each path, that nothing is done for what passes there."""
        if path not in self._hinted:
            self._hinted.add(path)
            log.info("requests to %s pass as they are and are not compacted: only chat completions are", path)

    def _admit(self, client: Client) -> None:
        """Raises Refused for what we do not serve, and for a request without the token that server.client_token_env asks for."""
        inbound = client.inbound
        if self._token:
            scheme, _, given = (inbound.header("authorization") or "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(
                given.strip().encode("utf-8", "surrogateescape"), self._token
            ):
                message = "Incorrect API key provided: this proxy wants a token of its own (server.client_token_env)."
                raise Refused(401, message, code="invalid_api_key")
        if inbound.method == "CONNECT":
            raise Refused(501, "warmfold is no forward proxy: it does not serve CONNECT.", code="connect_not_supported")


async def opened(runner: web.BaseRunner, section: str, host: str, port: int) -> str:
    """The URL of a listener, once it is open. Raises CannotListen, which names `section`.host or `section`.port."""
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except socket.gaierror:
        raise CannotListen(f"{section}.host: {host} is no address of this machine and no name that resolves") from None
    except OSError as error:
        key = "host" if error.errno == errno.EADDRNOTAVAIL else "port"
        why = (error.strerror or str(error)).lower().rpartition(": ")[2]
        raise CannotListen(f"{section}.{key}: cannot listen on {host}:{port}: {why}") from None
    return str(URL.build(scheme="http", host=host, port=runner.addresses[0][1]))


async def _tell(client: Client, error: Answerable) -> None:
    try:
        await client.tell(error)
    except ClientGone:
        client.outcome = Ended.CLIENT_GONE


def _posted_to(client: Client) -> str:
    """The path of a POST; "" of all else."""
    if client.inbound.method == "POST":
        with contextlib.suppress(Refused):
            return origin_form(client.inbound.target).partition("?")[0]
    return ""
