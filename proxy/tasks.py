"""The only home of background work: it is owned, its failures are seen, and it ends before the process does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from proxy import clock

log = logging.getLogger("warmfold.tasks")

T = TypeVar("T")

_CANCEL_ROUNDS = 3


class Tasks:
    """Background tasks of one owner. asyncio itself keeps only a weak reference to a task: an unowned one may vanish midway."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._idle: set[asyncio.Task[Any]] = set()
        self._ends = False

    def __len__(self) -> int:
        """How many run."""
        return len(self._running)

    def spawn(self, work: Coroutine[Any, Any, T], name: str, *, idle: bool = False) -> asyncio.Task[T]:
        """The task that runs `work`. Its failure is logged by type alone: the text of an exception may quote a prompt.

        `idle`: so far it only waits for its time, and a process that ends need not wait for that.
        """
        task = asyncio.create_task(work, name=name)  # noqa: TID251  # here is where it is owned
        self._running.add(task)
        if idle:
            self._idle.add(task)
            if self._ends:
                task.cancel()
        task.add_done_callback(self._ended)
        return task

    async def drain(self, timeout_s: float) -> None:
        """Wait for all tasks, those they spawn meanwhile included, at most `timeout_s`; cancel what still runs then and wait for its end.

        Idle ones are cancelled at once.
        """
        self._ends = True
        for task in self._idle:
            task.cancel()
        until = clock.monotonic() + timeout_s
        while others := self._others():
            left = until - clock.monotonic()
            if left <= 0:
                break
            await asyncio.wait(others, timeout=left)
        for _ in range(_CANCEL_ROUNDS):
            others = self._others()
            if not others:
                return
            for task in others:
                task.cancel()
            # Cancelled work may clean up, and spawn for that; a task that swallows its cancellation is asked again.
            await asyncio.wait(others, timeout=1.0)
        for task in self._others():
            log.error("background task did not end name=%s", task.get_name())

    def _others(self) -> set[asyncio.Task[Any]]:
        """The running tasks without the one that asks: a task that drains its own owner must not wait for itself."""
        return self._running - {asyncio.current_task()}

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        self._idle.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            log.error("background task failed name=%s error=%s", task.get_name(), type(error).__name__)
