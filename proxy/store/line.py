"""The line to the server: every command goes through here, with a deadline, a breaker and a count of what failed. No retries.

redis-py's own retries and timeouts are off: with them a call to a stalled server takes seconds (3.9 s measured with 8.1 and
socket_timeout=0.03). A call that is cancelled, by its deadline or its caller, loses its connection: redis-py closes it, since the
reply is still to come and would answer the next command.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, AuthorizationError, NoScriptError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from proxy import clock
from proxy.store import scripts
from proxy.store.breaker import Breaker, Ticket
from proxy.store.scripts import Command, Script
from proxy.store.trouble import Count, StoreUnavailable, Trouble

log = logging.getLogger("warmfold.store")

T = TypeVar("T")
_LONG_FACTOR = 20
_LONG_MAX_S = 2.0
"""What runs behind a turn may take longer than what a client waits for, but not so long that shutdown waits for it."""

_NOT_LET_IN = (AuthenticationError, AuthorizationError)
_ROUNDS = 4
"""Of the loop: one to read the socket, one to wake the reader of the connection, one to wake the caller, one to spare."""


@asynccontextmanager
async def deadline(seconds: float) -> AsyncIterator[None]:
    """TimeoutError once `seconds` have passed and the loop has gone round a few times more.

    A busy loop (a long history read for the first time, a collection of garbage, many requests at once) sees the timer before the answer
    that has been waiting in the socket. Without these rounds, in which the answer is read and handed to us, each such pause would pass
    for a dead store; an idle loop goes through them in microseconds.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        pending: list[asyncio.Handle] = []

        def fire(rounds: int) -> None:
            if rounds:
                pending[:] = [loop.call_soon(fire, rounds - 1)]
            else:
                limit.reschedule(loop.time())

        pending.append(loop.call_later(seconds, fire, _ROUNDS))
        try:
            yield
        finally:
            pending[0].cancel()


class Line:
    """Commands to one server, called `name` in the log. `short_s`: deadline of what a turn waits for; `long_s`: of what runs behind it.

    Raises StoreUnavailable, with its trouble counted, and nothing else but CancelledError.
    """

    def __init__(self, client: Redis, count: Count, timeout_ms: int, name: str) -> None:
        self._name = name
        self.client = client
        self.count = count
        self.short_s = timeout_ms / 1000
        self.long_s = max(self.short_s, min(self.short_s * _LONG_FACTOR, _LONG_MAX_S))
        self._breaker = Breaker()
        self._execute: Callable[..., Awaitable[Any]] = client.execute_command  # redis-py does not type it

    async def ask(self, asking: Callable[[], Awaitable[T]], deadline_s: float) -> T:
        """What `asking` (commands to `client`) answers within the deadline."""
        ticket = self._breaker.enter(clock.monotonic())
        if ticket is None:
            raise self._counted(Trouble.PAUSED)
        try:
            async with deadline(deadline_s):
                answer = await asking()
        except (TimeoutError, RedisTimeoutError):
            if deadline_s > self.short_s and not ticket.probe:
                # Much to carry takes long on a slow line: that must not cost the other turns their store.
                raise self._counted(Trouble.TIMEOUT) from None
            raise self._failed(ticket, Trouble.TIMEOUT) from None
        except (RedisConnectionError, OSError) as error:
            if isinstance(error, _NOT_LET_IN) or isinstance(error.__cause__, _NOT_LET_IN):
                log.warning("the store refuses our user or password store=%s", self._name)
                raise self._failed(ticket, Trouble.REFUSED) from None
            raise self._failed(ticket, Trouble.UNREACHABLE) from None
        except RedisError as error:
            if str(error).startswith("WRONGTYPE"):
                self._answered(ticket)
                raise self._counted(Trouble.TYPE) from None
            # The server is there and said no. Its text may quote our arguments, so only the type is logged.
            self._answered(ticket)
            log.warning("store refused a command error=%s", type(error).__name__)
            raise self._counted(Trouble.REFUSED) from None
        except BaseException:
            self._breaker.abandoned(ticket)
            raise
        self._answered(ticket)
        return answer

    async def command(self, command: Command, deadline_s: float) -> Any:
        """The reply to one command."""
        return await self.ask(lambda: self._execute(*command), deadline_s)

    async def run(self, script: Script, keys: Sequence[bytes], args: Command, deadline_s: float) -> Any:
        """What a script returns: one round trip, two where the server does not know it yet (after a restart or SCRIPT FLUSH)."""

        async def evaluate() -> Any:
            try:
                return await self._execute(*script.call(keys, args))
            except NoScriptError:
                return await self._execute("EVAL", script.source, len(keys), *keys, *args)

        return await self.ask(evaluate, deadline_s)

    async def batch(self, commands: Sequence[Command], deadline_s: float) -> list[Any]:
        """The replies to commands sent together, in order and not as a transaction; an error reply stands as an exception in its place.

        Scripts that the server does not know are loaded and called once more, behind all the rest.
        """

        async def together() -> list[Any]:
            replies = await self._pipelined(commands)
            again = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
            if again:
                sources = {scripts.BY_SHA[commands[at][1]].source for at in again}
                loads: list[Command] = [("SCRIPT", "LOAD", source) for source in sources]
                late = (await self._pipelined([*loads, *(commands[at] for at in again)]))[len(loads) :]
                for at, reply in zip(again, late, strict=True):
                    replies[at] = reply
            return replies

        return await self.ask(together, deadline_s)

    async def _pipelined(self, commands: Sequence[Command]) -> list[Any]:
        pipeline = self.client.pipeline(transaction=False)
        queue: Callable[..., Any] = pipeline.execute_command
        for command in commands:
            queue(*command)
        return await pipeline.execute(raise_on_error=False)

    async def close(self) -> None:
        """Let go of all connections."""
        try:
            async with asyncio.timeout(self.long_s):
                await self.client.aclose()
        except (TimeoutError, RedisError, OSError):
            log.warning("store connections did not close in time")

    def _answered(self, ticket: Ticket) -> None:
        if ticket.probe:
            log.info("store answers again store=%s", self._name)
        self._breaker.answered(ticket)

    def _failed(self, ticket: Ticket, trouble: Trouble) -> StoreUnavailable:
        if self._breaker.failed(ticket, clock.monotonic()):
            log.warning("store does not answer, turns go on without it store=%s trouble=%s", self._name, trouble)
        return self._counted(trouble)

    def _counted(self, trouble: Trouble) -> StoreUnavailable:
        self.count(trouble)
        return StoreUnavailable(trouble)
