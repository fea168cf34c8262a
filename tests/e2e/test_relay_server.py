"""The process: it starts or says in one line why not, and it ends when it is told to."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from proxy.config import load
from proxy.listener import CannotListen
from proxy.server import start
from tests.e2e.relay_wire import (
    Exchange,
    Script,
    ask,
    chunks,
    connected,
    counted,
    fixed,
    on_uvloop,
    plain,
    proxy,
    read_head,
    soon,
    upstream,
)

SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n"
GET = b"GET /v1/x HTTP/1.1\r\nHost: h\r\n\r\n"


def written(
    folder: Path, base_url: str, *, port: int = 0, admin_port: int = 0, host: str = "127.0.0.1", grace_s: int = 30
) -> Path:
    """A configuration file."""
    path = folder / "config.toml"
    path.write_text(
        f'[server]\nhost = "{host}"\nport = {port}\ngrace_s = {grace_s}\n[admin]\nport = {admin_port}\n'
        f'[upstream]\nbase_url = "{base_url}"\n[store]\ndata_dir = "{folder / "store"}"\n'
    )
    return path


@dataclass
class Served:
    process: asyncio.subprocess.Process
    port: int
    told: str = ""
    """What was written to stderr up to the line that says where it serves."""

    async def ended(self) -> tuple[int, str]:
        """Exit status, and what was written to stderr since it began to serve."""
        _, errors = await asyncio.wait_for(self.process.communicate(), 30)
        assert self.process.returncode is not None
        return self.process.returncode, errors.decode()


async def launched(*flags: str | Path, folder: Path | None = None) -> asyncio.subprocess.Process:
    command = (sys.executable, "-W", "error", "-m", "proxy", "serve", *map(str, flags))
    paths = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=folder, env=paths
    )


@asynccontextmanager
async def serving(config: Path | None, *flags: str | Path, folder: Path | None = None) -> AsyncIterator[Served]:
    """`warmfold serve`, up; started in `folder`."""
    process = await launched(*(["--config", config] if config else []), *flags, folder=folder)
    try:
        assert process.stderr is not None
        seen = b""
        while not (found := re.search(rb"base_url=http://127\.0\.0\.1:(\d+)/v1", seen)):
            line = await asyncio.wait_for(process.stderr.readline(), 30)
            assert line, seen
            seen += line
        yield Served(process, int(found[1]), seen.decode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def endless(exchange: Exchange) -> None:
    await exchange.send(SSE)
    await exchange.watch()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@on_uvloop
async def test_a_signal_lets_streams_end(number: signal.Signals, tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.send(SSE)
        await soon(go_on.wait())
        await exchange.send(b"0\r\n\r\n")

    async with (
        upstream(script) as up,
        serving(written(tmp_path, up.base_url)) as served,
        connected(served.port) as (reader, writer),
    ):
        writer.write(GET)
        await soon(read_head(reader))
        served.process.send_signal(number)
        assert b"stopping" in await soon(_line(served))
        go_on.set()
        assert [piece async for piece in chunks(reader)] == [b"a"]
        status, errors = await served.ended()
    assert (status, "Traceback" in errors, "WARNING" in errors) == (0, False, False)


@on_uvloop
async def test_streams_that_outlast_the_grace_are_cut(tmp_path: Path) -> None:
    async with upstream(endless) as up, serving(written(tmp_path, up.base_url, grace_s=0)) as served:
        async with connected(served.port) as (reader, writer):
            writer.write(GET)
            await soon(read_head(reader))
            served.process.terminate()
            with pytest.raises(EOFError):
                _ = [piece async for piece in chunks(reader)]
        status, errors = await served.ended()
    assert (status, "Traceback" in errors) == (0, False)


@on_uvloop
async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with (
        upstream(endless) as up,
        serving(written(tmp_path, up.base_url, grace_s=3600)) as served,
        connected(served.port) as (reader, writer),
    ):
        writer.write(GET)
        await soon(read_head(reader))
        served.process.send_signal(signal.SIGINT)
        assert b"stopping" in await soon(_line(served))
        served.process.send_signal(signal.SIGINT)
        status, errors = await served.ended()
    assert (status, errors) == (-signal.SIGINT, "")


async def _line(served: Served) -> bytes:
    assert served.process.stderr is not None
    return await served.process.stderr.readline()


@on_uvloop
async def test_what_keeps_it_from_starting_is_one_line(tmp_path: Path) -> None:
    async with upstream(fixed(plain())) as up:
        cases = [
            (
                written(_made(tmp_path / "1"), "http://127.0.0.1:1/v1", port=up.port),
                rf"server\.port: cannot listen on 127\.0\.0\.1:{up.port}: address already in use",
            ),
            (
                written(_made(tmp_path / "2"), up.base_url, host="nowhere.invalid"),
                r"server\.host: nowhere\.invalid [^\n]+",
            ),
            (
                written(_made(tmp_path / "3"), up.base_url, admin_port=up.port),
                rf"admin\.port: cannot listen on 127\.0\.0\.1:{up.port}: address already in use",
            ),
        ]
        ended = await asyncio.gather(*(_refusal(path) for path, _ in cases))
    for (status, errors), (_, line) in zip(ended, cases, strict=True):
        assert status == 1
        assert re.fullmatch(line + "\n", errors), errors


@on_uvloop
async def test_a_directory_that_cannot_be_ours_is_refused_by_the_file_that_names_it(tmp_path: Path) -> None:
    taken = _made(tmp_path / "store")
    taken.chmod(0o755)
    (taken / "somebody's").touch()
    path = written(tmp_path, "http://127.0.0.1:1/v1")
    status, errors = await _refusal(path)
    assert status == 2
    assert errors.startswith(f"{path}: store.data_dir: found ")
    assert errors.count("\n") == 1


async def told(config: Path | None, *flags: str | Path, folder: Path | None = None) -> str:
    """What a proxy says on stderr up to the line that says where it serves. It is ended again."""
    async with serving(config, *flags, folder=folder) as served:
        served.process.terminate()
        assert (await served.ended())[0] == 0
        return served.told


@on_uvloop
async def test_the_first_lines_say_what_would_surprise_somebody(tmp_path: Path) -> None:
    config = written(_made(tmp_path / "a"), "http://127.0.0.1:1/v1")
    first = await told(config)
    assert f"configuration file={config} store=embedded data_dir={tmp_path / 'a' / 'store'}\n" in first
    assert (
        "INFO warmfold.server no window configured: upstreams are asked how long their models' contexts are; " in first
    )
    assert "no window configured" not in await told(config, "--window", "64000")
    config.write_text(config.read_text() + '[[models]]\nmatch = "a"\nmax_context_tokens = 9000\n')
    assert "no window configured" not in await told(config)


@on_uvloop
async def test_a_file_of_the_working_directory_is_not_read_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "warmfold.toml").write_text("[server]\nport = 'unreadable'\n")
    monkeypatch.setenv("WARMFOLD_ADMIN__PORT", "0")
    flags = ("--port", "0", "--window", "9000", "--upstream", "http://127.0.0.1:1/v1")
    first = await told(None, *flags, folder=tmp_path)
    assert "WARNING warmfold.server warmfold.toml in the working directory is not read; --config " in first
    assert f"configuration file=none store=embedded data_dir={tmp_path / '.warmfold'}\n" in first
    other = _made(tmp_path / "other") / "config.toml"
    other.touch()
    assert "is not read" not in await told(other, *flags, folder=tmp_path)


ASKING = b"GET /v1/x?key=query-canary HTTP/1.1\r\nHost: h\r\n\r\n"


async def _hang_up(exchange: Exchange) -> None:
    exchange.writer.close()


async def _silent(exchange: Exchange) -> None:
    await exchange.watch()


async def _break_off(exchange: Exchange) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\nX-Note: answer-canary\r\nContent-Length: 100\r\n\r\nanswer-canary")
    exchange.writer.close()


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (
            None,
            "upstream failed status=502 code=upstream_unreachable: warmfold cannot reach the upstream http://127.0.0.1:1",
        ),
        (_hang_up, "upstream failed status=502 code=upstream_broken: The upstream http://127.0.0.1:"),
        (_silent, "upstream failed status=504 code=upstream_read_timeout: The upstream http://127.0.0.1:"),
        (_break_off, "upstream failed in the middle of its answer status=200 code=upstream_broke"),
    ],
    ids=["nobody listens", "hangs up", "says nothing", "breaks off"],
)
@on_uvloop
async def test_a_failure_of_the_provider_is_one_warning_without_its_words(
    script: Script | None, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncExitStack() as stack:
        base_url = "http://127.0.0.1:1/v1"
        if script is not None:
            base_url = (await stack.enter_async_context(upstream(script))).base_url
        warmfold = await stack.enter_async_context(proxy(base_url, read_idle_timeout_s=0.2))
        await ask(warmfold.port, ASKING)
        status = "2xx" if script is _break_off else "5xx"
        await counted(warmfold, f'warmfold_requests_total{{route="other",status="{status}"}}')
    warned = [r.getMessage() for r in caplog.records if r.name == "warmfold.listener" and r.levelno == logging.WARNING]
    assert [line[: len(says)] for line in warned] == [says]
    assert "canary" not in caplog.text


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


async def _refusal(path: Path) -> tuple[int, str]:
    process = await launched("--config", path)
    return await Served(process, 0).ended()


@on_uvloop
async def test_a_start_that_fails_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    async with upstream(fixed(plain(b"up"))) as up:
        with pytest.raises(CannotListen):
            await start(load(written(tmp_path, up.base_url, admin_port=up.port), {}, {}))
        running = await start(load(written(tmp_path, up.base_url), {}, {}))
        try:
            got = await ask(int(running.base_url.split(":")[2].split("/")[0]), GET)
            assert (got.body, running.base_url.endswith("/v1")) == (b"up", True), "the store's directory is free again"
            metrics = await ask(
                int(running.admin_url.rsplit(":", 1)[1]), b"GET /metrics HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n"
            )
            assert b'warmfold_requests_total{route="other",status="2xx"} 1.0' in metrics.body
        finally:
            await running.stop()
