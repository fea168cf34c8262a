"""Raw sockets around the real listener: what goes over the wire, byte for byte, on both sides of the proxy."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import uvloop

from proxy.config import Config
from proxy.config.model import Loaded
from proxy.downstream import Client
from proxy.listener import Chat, Listener
from proxy.metrics import Metrics
from proxy.relay import relay
from proxy.upstream import Upstreams

PATIENCE_S = 10.0
"""How long a test waits for what must happen. Nothing is asserted about how long it takes."""

T = TypeVar("T")
Pairs = list[tuple[bytes, bytes]]


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test, on the loop that the product runs on."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        run_on(uvloop.new_event_loop, test(*args, **kwargs))

    return run


def run_on(new_loop: Callable[[], asyncio.AbstractEventLoop], work: Coroutine[Any, Any, None]) -> None:
    """Run `work` on a loop of that kind."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(work)


async def soon(awaitable: Awaitable[T]) -> T:
    """What it brings, within our patience."""
    return await asyncio.wait_for(awaitable, PATIENCE_S)


@dataclass
class Message:
    """A request or an answer as it stood on the wire, its body unframed."""

    first: bytes
    headers: Pairs
    body: bytes = b""
    complete: bool = True

    @property
    def status(self) -> int:
        return int(self.first.split(b" ", 2)[1])

    def all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name.lower()]

    def end_to_end(self, *beside: bytes) -> Pairs:
        """Headers as a multiset, without those of one hop and without `beside`."""
        hop = {b"connection", b"keep-alive", b"transfer-encoding", b"host", *beside}
        return sorted((key, value) for key, value in self.headers if key.lower() not in hop)


async def read_head(reader: asyncio.StreamReader) -> Message:
    """First line and headers. Raises EOFError where the connection ended before them."""
    raw = await reader.readuntil(b"\r\n\r\n")
    first, *lines = raw[:-4].split(b"\r\n")
    headers = [(name, value.strip(b" ")) for name, _, value in (line.partition(b":") for line in lines)]
    return Message(first, headers)


async def read_message(reader: asyncio.StreamReader, *, bodiless: bool = False, until_close: bool = False) -> Message:
    """A whole message. `until_close`: without framing the body goes on to the end of the connection (answers only)."""
    message = await read_head(reader)
    if bodiless:
        return message
    try:
        if any(b"chunked" in value.lower() for value in message.all(b"transfer-encoding")):
            async for chunk in chunks(reader):
                message.body += chunk
        elif lengths := message.all(b"content-length"):
            message.body = await reader.readexactly(int(lengths[0]))
        elif until_close:
            message.body = await reader.read()
    except asyncio.IncompleteReadError as error:
        message.body += error.partial
        message.complete = False
    except ConnectionError:
        message.complete = False
    return message


async def chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The chunks of a chunked body. Raises IncompleteReadError where it is broken off."""
    while True:
        size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
        data = await reader.readexactly(size + 2)
        if size == 0:
            return
        yield data[:-2]


Script = Callable[["Exchange"], Awaitable[None]]


@dataclass
class Exchange:
    """One connection to the upstream, as a script sees it. `request` is the newest; `closed` is set once the peer has hung up."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    request: Message
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def watch(self) -> None:
        """Returns when the peer hangs up."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass
        self.closed.set()


@dataclass
class RawUpstream:
    """A TCP server that hands each request to a script. `requests` holds all that came, `connections` counts them."""

    script: Script
    requests: list[Message] = field(default_factory=list)
    connections: int = 0
    heads_only: bool = False
    port: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self.serve(reader, writer))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                request = await (read_head if self.heads_only else read_message)(reader)
                self.requests.append(request)
                await self.script(Exchange(reader, writer, request))
                if writer.is_closing():
                    break
        except (ConnectionError, EOFError):
            pass
        finally:
            writer.close()


def fixed(answer: bytes) -> Script:
    """A script that answers each request with these bytes."""

    async def script(exchange: Exchange) -> None:
        await exchange.send(answer)

    return script


def plain(body: bytes = b"{}", head: bytes = b"HTTP/1.1 200 OK\r\nContent-Type: application/json") -> bytes:
    """An answer with a Content-Length."""
    return head + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body


@asynccontextmanager
async def upstream(script: Script, *, heads_only: bool = False, tls: Any = None) -> AsyncIterator[RawUpstream]:
    """A running upstream."""
    made = RawUpstream(script, heads_only=heads_only)
    server = await asyncio.start_server(made.accept, "127.0.0.1", 0, ssl=tls)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)


@dataclass
class Proxy:
    """The running listener."""

    listener: Listener
    metrics: Metrics
    upstreams: Upstreams
    config: Config
    port: int

    def count(self, series: str) -> float:
        """The value of one series, as in `warmfold_requests_total{route="chat",status="2xx"}`."""
        for line in self.metrics.render().decode().splitlines():
            if line.startswith(series + " "):
                return float(line.rpartition(" ")[2])
        return 0.0


async def counted(proxy: Proxy, series: str, value: float = 1) -> None:
    """Returns once a series has this value: what is counted behind an answer may come after it."""

    async def until() -> None:
        while proxy.count(series) != value:
            await asyncio.sleep(0.005)

    await soon(until())


@asynccontextmanager
async def proxy(
    base_url: str,
    *,
    chat: Callable[[Upstreams, Config], Chat] | None = None,
    server: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    **keys: Any,
) -> AsyncIterator[Proxy]:
    """The public listener in front of `base_url`; `keys` are those of [upstream]. No store, no admin."""
    tables = {"server": {"port": 0, **(server or {})}, "upstream": {"base_url": base_url, **keys}}
    config = Config.model_validate(tables, context=Loaded(environ or {}))
    metrics = Metrics()
    upstreams = Upstreams(config, metrics)
    listener = Listener(config, upstreams, metrics, chat(upstreams, config) if chat else None)
    try:
        url = await listener.open()
        yield Proxy(listener, metrics, upstreams, config, int(url.rsplit(":", 1)[1].split("/")[0]))
    finally:
        await listener.close(0)
        await upstreams.close()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A raw connection to a port."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def ask(port: int, request: bytes, *, bodiless: bool = False) -> Message:
    """The answer to one raw request on a connection of its own."""
    async with connected(port) as (reader, writer):
        writer.write(request)
        return await soon(read_message(reader, bodiless=bodiless, until_close=True))


@asynccontextmanager
async def pair(script: Script, **keys: Any) -> AsyncIterator[tuple[RawUpstream, Proxy]]:
    """An upstream and the proxy in front of it."""
    async with AsyncExitStack() as stack:
        up = await stack.enter_async_context(upstream(script, heads_only=keys.pop("heads_only", False)))
        yield up, await stack.enter_async_context(proxy(up.base_url, **keys))


def reads_whole_bodies(upstreams: Upstreams, config: Config) -> Chat:
    """A chat handler that holds each body before it sends it on."""

    async def answer(client: Client) -> None:
        await relay(await upstreams.send(await client.read(), config.upstream), client)

    return answer
