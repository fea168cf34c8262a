"""An HTTP proxy between us and the upstream, where the environment names one."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.e2e.certificates import certified
from tests.e2e.relay_wire import Exchange, ask, connected, fixed, on_uvloop, plain, proxy, read_message, soon, upstream

POST = b"POST /v1/x%2Fy?a=%41 HTTP/1.1\r\nHost: h\r\nX-L: caf\xe9\r\nContent-Length: 3\r\n\r\nabc"
GET = b"GET /v1/x HTTP/1.1\r\nHost: h\r\n\r\n"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@on_uvloop
async def test_plain_requests_go_to_the_proxy_with_the_whole_url(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with upstream(fixed(plain(b"through"))) as gateway:
        monkeypatch.setenv("HTTP_PROXY", f"http://user:canary%40@127.0.0.1:{gateway.port}")
        async with proxy("http://provider.invalid/api/v1") as warmfold:
            assert (await ask(warmfold.port, POST)).body == b"through"
            assert (await ask(warmfold.port, GET)).body == b"through"
            assert await warmfold.upstreams.probe()
    assert f"go through the HTTP proxy 127.0.0.1:{gateway.port} " in caplog.text
    assert "canary" not in caplog.text
    post, get = gateway.requests
    assert post.first == b"POST http://provider.invalid/api/v1/x%2Fy?a=%41 HTTP/1.1"
    assert post.all(b"proxy-authorization") == [b"Basic dXNlcjpjYW5hcnlA"]
    assert post.end_to_end(b"proxy-authorization") == [(b"Content-Length", b"3"), (b"X-L", b"caf\xe9")]
    assert (post.body, post.all(b"host")) == (b"abc", [b"provider.invalid"])
    assert get.first == b"GET http://provider.invalid/api/v1/x HTTP/1.1"


@asynccontextmanager
async def tunnelling(port: int, seen: list[bytes]) -> AsyncIterator[int]:
    """A proxy that leads every CONNECT to a port of this machine."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0])
        back, forth = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(pump(reader, forth), pump(back, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """A certificate for provider.invalid that SSL_CERT_FILE names."""
    cert, context = certified(tmp_path, "provider.invalid")
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    return context


def test_secure_requests_go_through_a_tunnel_that_the_proxy_opens(
    certificate: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    @on_uvloop
    async def run() -> None:
        seen: list[bytes] = []
        async with upstream(fixed(plain(b"through")), tls=certificate) as up, tunnelling(up.port, seen) as port:
            monkeypatch.setenv("https_proxy", f"127.0.0.1:{port}")
            async with proxy("https://provider.invalid/v1") as warmfold, connected(warmfold.port) as (reader, writer):
                for _ in range(2):
                    writer.write(POST)
                    assert (await soon(read_message(reader))).body == b"through"
        assert seen == [b"CONNECT provider.invalid:443 HTTP/1.1"], "and the tunnel is kept"
        assert [request.first for request in up.requests] == [b"POST /v1/x%2Fy?a=%41 HTTP/1.1"] * 2
        assert up.requests[0].end_to_end() == [(b"Content-Length", b"3"), (b"X-L", b"caf\xe9")]

    run()


@pytest.mark.parametrize(
    ("environ", "base_url"),
    [
        ({"NO_PROXY": "other.invalid,provider.invalid"}, "http://provider.invalid/v1"),
        ({"NO_PROXY": "*"}, "http://provider.invalid/v1"),
        ({}, "https://provider.invalid/v1"),
        ({"HTTP_PROXY": "socks5://user:canary@127.0.0.1:{port}"}, "http://provider.invalid/v1"),
        ({}, "http://127.0.0.1:1/v1"),
        ({}, "http://localhost:1/v1"),
    ],
    ids=["named", "all", "only for the other scheme", "no HTTP proxy", "this machine", "this machine by name"],
)
@on_uvloop
async def test_where_the_environment_exempts_an_upstream_the_proxy_is_not_asked(
    environ: dict[str, str], base_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with upstream(fixed(plain())) as gateway:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{gateway.port}")
        for name, value in environ.items():
            monkeypatch.setenv(name, value.format(port=gateway.port))
        async with proxy(base_url) as warmfold:
            assert (await ask(warmfold.port, GET)).status == 502
        assert gateway.connections == 0
    assert ("is not used" in caplog.text) == ("HTTP_PROXY" in environ)
    assert "canary" not in caplog.text


@on_uvloop
async def test_a_proxy_that_is_gone_or_refuses_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")

    async with upstream(refuse) as gateway:
        monkeypatch.setenv("HTTPS_PROXY", f"http://user:canary@127.0.0.1:{gateway.port}")
        async with proxy("https://provider.invalid/v1") as warmfold:
            refused = await ask(warmfold.port, GET)
    async with proxy("https://provider.invalid/v1") as warmfold:
        gone = await ask(warmfold.port, GET)
    for got, why in ((refused, "answered 407"), (gone, "cannot be reached")):
        assert (got.status, got.all(b"x-warmfold-error")) == (502, [b"upstream_unreachable"])
        message = json.loads(got.body)["error"]["message"]
        assert "HTTPS_PROXY" in message
        assert why in message
        assert "canary" not in message
