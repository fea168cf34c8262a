"""Background tasks are owned, their failures seen without their text, and they end."""

from __future__ import annotations

import asyncio
import logging

import pytest

from proxy import clock
from proxy.tasks import Tasks


async def test_a_task_is_kept_until_it_ends_and_its_result_is_there() -> None:
    tasks = Tasks()

    async def work() -> int:
        return 7

    task = tasks.spawn(work(), "work")
    assert (len(tasks), task.get_name()) == (1, "work")
    assert await task == 7
    await asyncio.sleep(0)
    assert len(tasks) == 0


async def test_a_failure_is_logged_by_its_type_alone(caplog: pytest.LogCaptureFixture) -> None:
    tasks = Tasks()

    async def work() -> None:
        raise ValueError("a prompt")

    await asyncio.wait([tasks.spawn(work(), "work")])
    await asyncio.sleep(0)
    assert [(one.levelno, one.getMessage()) for one in caplog.records] == [
        (logging.ERROR, "background task failed name=work error=ValueError")
    ]
    assert caplog.records[0].exc_info is None


async def test_drain_waits_for_all_and_for_what_they_spawn() -> None:
    tasks, done = Tasks(), []

    async def work(depth: int) -> None:
        await asyncio.sleep(0)
        if depth:
            tasks.spawn(work(depth - 1), "deeper")
        done.append(depth)

    tasks.spawn(work(3), "work")
    await tasks.drain(10)
    assert done == [3, 2, 1, 0]
    assert len(tasks) == 0


async def test_drain_cancels_what_does_not_end_and_waits_for_its_end(caplog: pytest.LogCaptureFixture) -> None:
    tasks, ended = Tasks(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0)
            ended.set()

    tasks.spawn(work(), "work")
    await asyncio.sleep(0)
    await tasks.drain(0)
    assert ended.is_set()
    assert len(tasks) == 0
    assert not caplog.records


async def test_drain_waits_for_nothing_that_only_waits_for_its_time() -> None:
    tasks, done = Tasks(), []

    async def wait(name: str) -> None:
        await asyncio.sleep(600)
        done.append(name)

    async def work() -> None:
        await asyncio.sleep(0)
        tasks.spawn(wait("late"), "wait", idle=True)
        done.append("work")

    tasks.spawn(wait("early"), "wait", idle=True)
    tasks.spawn(work(), "work")
    async with asyncio.timeout(60):
        await tasks.drain(600)
    assert done == ["work"]
    assert len(tasks) == 0


async def test_a_task_may_drain_its_own_owner() -> None:
    tasks = Tasks()

    async def close() -> str:
        await tasks.drain(10)
        return "closed"

    assert await tasks.spawn(close(), "close") == "closed"


def test_names_by_chance_are_names() -> None:
    names = {clock.token() for _ in range(100)}
    assert len(names) == 100
    assert all(len(name) == 16 and name.isalnum() and name.islower() for name in names)


def test_clocks() -> None:
    assert clock.now_ms() > 1_700_000_000_000
    assert clock.monotonic() <= clock.monotonic()
