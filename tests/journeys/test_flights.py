"""A compaction that is just over is over: whoever looks for one at that moment starts the next one."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.compactor import Compactor
from proxy.core.model import Because, Counters, SessionId
from proxy.job import Job, Outcome
from proxy.metrics import Metrics
from proxy.tasks import Tasks

NONE: Any = None


class Ends(Compactor):
    """Each compaction comes to nothing, and somebody else wakes up in the very moment in which it ends."""

    def __init__(self) -> None:
        super().__init__(NONE, NONE, NONE, Tasks(), Metrics())
        self.begun = 0
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def compact(self, job: Job) -> Outcome:
        self.begun += 1
        await asyncio.sleep(0)
        if not self.over.done():
            self.over.set_result(None)
        return Outcome(None, Because.REGION_TOO_SMALL, False, None)


@pytest.fixture
def never_spins() -> Iterator[None]:
    """A loop that never yields lets no timeout run but this one."""

    def spins(*_: object) -> None:
        raise AssertionError("the event loop is stuck")

    before = signal.signal(signal.SIGALRM, spins)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("never_spins")
async def test_one_that_has_just_ended_is_not_joined() -> None:
    compactor = Ends()
    job = cast(Job, SimpleNamespace(warm=SimpleNamespace(session=SessionId("a", "b", "c")), counters=Counters()))
    first = compactor.start(job)
    await compactor.over
    assert first.done()  # and its callbacks have not run yet
    assert not compactor.is_busy("a-b-c")
    outcome = await compactor.inline(job, 10)
    assert outcome.because is Because.REGION_TOO_SMALL
    assert compactor.begun == 2


@pytest.mark.usefixtures("never_spins")
async def test_and_its_end_does_not_end_the_next_one() -> None:
    compactor = Ends()
    job = cast(Job, SimpleNamespace(warm=SimpleNamespace(session=SessionId("a", "b", "c")), counters=Counters()))
    compactor.start(job)
    await compactor.over
    second = compactor.start(job)
    await asyncio.sleep(0)  # the first one's callbacks run
    assert compactor.is_busy("a-b-c")
    assert compactor.start(job) is second
    await second
