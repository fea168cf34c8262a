"""A provider on a loopback port: it validates, counts, caches and streams as hosted ones do, and keeps a record of every call.

    async with SimulatedProvider(window_tokens=12_000) as provider:
        client = AsyncOpenAI(base_url=provider.base_url, api_key="any")

Alone: python -m proxy.demo.provider --port 9999 --window 32000
"""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import click
from aiohttp import web
from multidict import CIMultiDict

from proxy.demo import refusal, wire
from proxy.demo.answers import Answer
from proxy.demo.calls import Call, Forced, OnCall, parsed
from proxy.demo.prefix_cache import Chain, PrefixCache
from proxy.demo.refusal import Refusal
from proxy.demo.settings import Settings
from proxy.demo.summariser import is_compaction
from proxy.demo.template import Message, Request, declared_tokens, render
from proxy.demo.validation import Strictness, fault, requested_output
from proxy.demo.wire import Completion

_MAX_BODY_BYTES = 1 << 30


class SimulatedProvider:
    """An OpenAI-compatible server inside the running event loop.

    `calls` are the chat completions in the order they arrived, `others` all other requests. `next_reply`, once set, is what the
    next call answers that is no compaction. `on_call` may answer in the provider's place. `aborted` counts clients that hung up.
    """

    def __init__(self, settings: Settings | None = None, *, port: int = 0, **changes: Any) -> None:
        """`changes` are fields of Settings. Port 0: a free one."""
        self.settings = replace(settings or Settings(), **changes)
        self.cache = PrefixCache(self.settings.cache_blocks)
        self.calls: list[Call] = []
        self.others: list[Call] = []
        self.next_reply: Message | None = None
        self.on_call: OnCall | None = None
        self.in_flight = 0
        self.most_in_flight = 0
        self.aborted = 0
        self._port = port
        self._runner: web.AppRunner | None = None
        self._numbers = 0
        self._events = 0
        self._stopping = False
        self._changed = asyncio.Event()

    @property
    def base_url(self) -> str:
        """What an SDK takes as base_url."""
        return f"http://127.0.0.1:{self._port}/v1"

    @property
    def compactions(self) -> list[Call]:
        """The calls that asked for a summary."""
        return [call for call in self.calls if call.is_compaction]

    @property
    def turns(self) -> list[Call]:
        """The calls that did not."""
        return [call for call in self.calls if not call.is_compaction]

    def change(self, **changes: Any) -> None:
        """From now on with these settings; the cache keeps its size."""
        self.settings = replace(self.settings, **changes)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something about the calls: asked again whenever one arrives, starts to be answered or ends."""
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    async def start(self) -> None:
        """Listen. OSError where the port is taken."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_route("*", "/{tail:.*}", self._serve)
        # Bodies stay as they were sent, and a client that hangs up cancels its handler: both are things tests look at.
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, auto_decompress=False, shutdown_timeout=0.1
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close the port and break off what is still being answered."""
        self._stopping = True
        if self._runner is not None:
            await self._runner.cleanup()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _serve(self, http: web.Request) -> web.StreamResponse:
        call = self._arrival(http, await http.read())
        chat = http.method == "POST" and http.path == "/v1/chat/completions"
        if self.settings.record:
            (self.calls if chat else self.others).append(call)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self._changed.set()
        try:
            forced = await self._hooked(call)
            if forced is not None:
                return await self._forced(http, call, forced)
            return await (self._chat(http, call) if chat else self._other(http, call))
        except (asyncio.CancelledError, ConnectionResetError):
            # Cancelled before the write, reset at the write: the same hang-up, seen at another moment.
            if not self._stopping:
                call.aborted = True
                self.aborted += 1
            raise
        finally:
            self.in_flight -= 1
            call.finished = self._tick()
            self._changed.set()

    def _arrival(self, http: web.Request, raw: bytes) -> Call:
        self._numbers += 1
        peer = http.transport.get_extra_info("peername") if http.transport else None
        call = Call(
            number=self._numbers,
            method=http.method,
            target=http.raw_path,
            headers=http.headers,
            raw=raw,
            arrived=self._tick(),
            peer=f"{peer[0]}:{peer[1]}" if peer else "",
        )
        call.request = parsed(raw, http.headers.get("Content-Encoding", ""))
        call.is_compaction = call.request is not None and is_compaction(call.request)
        return call

    def _tick(self) -> int:
        self._events += 1
        return self._events

    async def _hooked(self, call: Call) -> Forced | None:
        if self.on_call is None:
            return None
        forced = self.on_call(call)
        return await forced if inspect.isawaitable(forced) else forced

    async def _chat(self, http: web.Request, call: Call) -> web.StreamResponse:
        settings = self.settings
        refused = self._refusal(call)
        if refused is not None:
            return self._json(call, wire.dump(refused.body()), refused.status)
        assert call.request is not None
        call.tokens = render(call.request, strip_reasoning=settings.reasoning_stripped)
        call.prompt_tokens = len(call.tokens)
        refused = self._does_not_fit(call.request, call.prompt_tokens)
        if refused is not None:
            return self._json(call, wire.dump(refused.body()), refused.status)

        chain = Chain(_scope(call), call.tokens, settings.block_tokens)
        call.cached = self.cache.cached(chain)
        self.cache.store(chain)
        answer, status = await self._answer(call)
        if status != 200:
            broken = Refusal(
                "The server had an error while processing your request. Sorry about that!", type="server_error"
            )
            return self._json(call, wire.dump(broken.body()), status)
        call.answer = answer.within(self._room(call.request, call.prompt_tokens))
        completion = Completion(
            number=call.number,
            model=call.request["model"],
            answer=call.answer,
            prompt_tokens=call.prompt_tokens,
            cached_tokens=call.cached,
            choices=call.request.get("n") or 1,
            report=settings.usage,
        )
        reply = await self._stream(http, call, completion) if call.streamed else self._json(call, completion.body())
        # The last token that was generated has not been computed: nothing followed it.
        chain.extend(call.answer.tokens())
        self.cache.store(chain)
        return reply

    def _refusal(self, call: Call) -> Refusal | None:
        settings = self.settings
        key = call.headers.get("Authorization", "")
        if settings.require_key and key != f"Bearer {settings.require_key}":
            return refusal.unauthorized(bool(key))
        if call.request is None:
            return Refusal("We could not parse the JSON body of your request.")
        if not settings.stream_options_accepted and "stream_options" in call.request:
            return refusal.unknown("stream_options")
        return fault(call.request, settings.strictness, known_only=settings.known_only)

    def _does_not_fit(self, request: Request, prompt: int) -> Refusal | None:
        window, limit = self.settings.window_tokens, self.settings.max_output_tokens
        functions = declared_tokens(request)
        if prompt >= window:
            return refusal.prompt_too_long(window, prompt, functions)
        asked = requested_output(request)
        if asked is None:
            return None
        if prompt + asked[1] > window:
            return refusal.request_too_long(window, prompt, functions, asked[1])
        return refusal.output_too_long(*asked, limit) if asked[1] > limit else None

    def _room(self, request: Request, prompt: int) -> int:
        asked = requested_output(request)
        return asked[1] if asked else min(self.settings.max_output_tokens, self.settings.window_tokens - prompt)

    async def _answer(self, call: Call) -> tuple[Answer, int]:
        assert call.request is not None
        if call.is_compaction:
            summary = self.settings.summariser(call.request)
            await asyncio.sleep(summary.delay_s)
            return summary.answer, summary.status
        if self.next_reply is not None:
            reply, self.next_reply = self.next_reply, None
            return Answer.of(reply), 200
        return self.settings.answerer(call.request, call.tokens), 200

    async def _stream(self, http: web.Request, call: Call, completion: Completion) -> web.StreamResponse:
        assert call.request is not None
        settings = self.settings
        reply = web.StreamResponse(headers=self._headers(call, "text/event-stream; charset=utf-8"))
        call.status = 200
        await reply.prepare(http)
        self._changed.set()
        options = call.request.get("stream_options") or {}
        asked = settings.usage_always_streamed or bool(options.get("include_usage"))
        for event in completion.events(include_usage=asked, chunk_tokens=settings.chunk_tokens):
            await reply.write(event)
            if settings.chunk_delay_s:
                await asyncio.sleep(settings.chunk_delay_s)
        await reply.write_eof()
        return reply

    async def _other(self, http: web.Request, call: Call) -> web.StreamResponse:
        settings = self.settings
        listed = [
            {"id": id, "object": "model", "created": 1_767_225_600, "owned_by": "warmfold-demo"}
            | ({"max_model_len": settings.window_tokens} if settings.window_listed else {})
            for id in settings.models
        ]
        if http.method == "GET" and http.path == "/v1/models":
            return self._json(call, wire.dump({"object": "list", "data": listed}))
        for model in listed:
            if http.method == "GET" and http.path == f"/v1/models/{model['id']}":
                return self._json(call, wire.dump(model))
        unknown = Refusal(f"Invalid URL ({http.method} {http.path})")
        return self._json(call, wire.dump(unknown.body()), 404)

    def _json(self, call: Call, body: bytes, status: int = 200) -> web.Response:
        call.status = status
        return web.Response(status=status, body=body, headers=self._headers(call, "application/json"))

    def _headers(self, call: Call, content_type: str) -> dict[str, str]:
        return {"Content-Type": content_type, "x-request-id": f"req_{call.number:08d}", **dict(self.settings.headers)}

    async def _forced(self, http: web.Request, call: Call, forced: Forced) -> web.StreamResponse:
        call.status = forced.status
        headers = CIMultiDict({"Content-Type": "application/json"})
        headers.update(forced.headers)
        if not forced.break_off:
            return web.Response(status=forced.status, headers=headers, body=forced.body)
        reply = web.StreamResponse(status=forced.status, headers=headers)
        await reply.prepare(http)
        await reply.write(forced.body)
        if http.transport is not None:
            http.transport.close()  # after what has been written, and without the end of the chunked body
        return reply


def _scope(call: Call) -> bytes:
    """Whose cache it is: prefixes are shared under one credential and one salt only."""
    salt = (call.request or {}).get("cache_salt")
    return f"{call.headers.get('Authorization', '')}\n{salt}".encode("utf-8", "surrogatepass")


@click.command()
@click.option("--port", default=0, show_default=True, help="Port on 127.0.0.1; 0: a free one.")
@click.option("--window", default=32_000, show_default=True, help="Context length in tokens.")
@click.option("--max-output", default=16_384, show_default=True, help="Largest answer in tokens.")
@click.option("--chunk-tokens", default=4, show_default=True, help="Tokens in one event of a stream.")
@click.option("--chunk-delay-ms", default=0.0, show_default=True, help="Pause between two events of a stream.")
@click.option("--strictness", type=click.Choice([s.value for s in Strictness]), default="openai", show_default=True)
def main(*, port: int, window: int, max_output: int, chunk_tokens: int, chunk_delay_ms: float, strictness: str) -> None:
    """Serve the simulated provider until interrupted."""
    settings = Settings(
        window_tokens=window,
        max_output_tokens=max_output,
        chunk_tokens=chunk_tokens,
        chunk_delay_s=chunk_delay_ms / 1000,
        strictness=Strictness(strictness),
        record=False,
    )
    asyncio.run(_until_signalled(settings, port))


async def _until_signalled(settings: Settings, port: int) -> None:
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    async with SimulatedProvider(settings, port=port) as provider:
        print(provider.base_url, flush=True)
        await stop.wait()


if __name__ == "__main__":
    main()
