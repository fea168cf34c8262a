"""Where a request goes: only ever to the configured upstream, on a path that is the client's letter for letter."""

from __future__ import annotations

import pytest

from proxy.errors import Refused
from proxy.outbound import Inbound, Place, end_to_end, origin_form, to_send
from tests.e2e.relay_wire import ask, fixed, on_uvloop, pair, plain, upstream

MAPPED = [
    ("https://api.openai.com/v1", "/v1/chat/completions", "/v1/chat/completions"),
    ("https://api.openai.com/v1", "/health", "/health"),
    ("https://api.openai.com/v1/", "/v1/models", "/v1/models"),
    ("https://openrouter.ai/api/v1", "/v1/models?x=1", "/api/v1/models?x=1"),
    ("https://openrouter.ai/api/v1", "/health", "/api/health"),
    ("https://h/v1beta/openai", "/v1/models", "/v1beta/openai/models"),
    ("https://h/v1beta/openai", "/models", "/models"),
    ("https://h", "/v1/models", "/models"),
    ("https://h", "/v1", "/"),
    ("https://h", "/v1?x", "/?x"),
    ("https://h/v1", "/v1", "/v1"),
    ("https://h/v1", "/v1?", "/v1?"),
    ("https://h/v1", "/v10/x", "/v10/x"),
    ("https://h/api/v1", "/v1x", "/api/v1x"),
    ("https://h/v1", "/", "/"),
    ("https://h/a%2Fb/v1", "/v1/x%2Fy", "/a%2Fb/v1/x%2Fy"),
]


@pytest.mark.parametrize(("base_url", "target", "path"), MAPPED)
def test_our_v1_is_the_whole_path_of_base_url(base_url: str, target: str, path: str) -> None:
    assert Place.of(base_url).url(target).raw_path_qs == path


HOSTILE = [
    "//169.254.169.254/latest/meta-data",
    "///evil",
    "/\\evil",
    "/@evil.com",
    "/v1/chat/completions@evil.com",
    "/v1@evil.com",
    "/v1//evil.com",
    "/v1/..//evil.com",
    "/http://evil.com/",
    "/?http://evil.com",
    "/#@evil.com",
    "/;@evil.com:80/",
    "/%2f%2fevil.com",
    "http://evil.com/x",
    "http://evil.com",
    "http://evil.com?x",
    "http://user:pw@evil.com:99/x",
]


@pytest.mark.parametrize("base_url", ["https://api.openai.com/v1", "http://[::1]:8080", "http://h:1/a/b/v1"])
@pytest.mark.parametrize("target", HOSTILE)
def test_no_target_changes_the_authority(base_url: str, target: str) -> None:
    place = Place.of(base_url)
    url = place.url(target)
    assert (url.scheme, url.raw_host, url.port, url.raw_user) == (
        place.origin.scheme,
        place.origin.raw_host,
        place.origin.port,
        None,
    )
    assert url.raw_path_qs.endswith(origin_form(target).removeprefix("/v1"))


@pytest.mark.parametrize("target", ["*", "evil.com:443", "evil.com", "", "http:/evil", "://evil"])
def test_targets_without_a_path_are_refused(target: str) -> None:
    with pytest.raises(Refused) as refused:
        Place.of("https://h/v1").url(target)
    assert (refused.value.status, refused.value.code) == (400, "invalid_target")


@on_uvloop
async def test_hostile_targets_reach_the_configured_upstream_or_nobody() -> None:
    async with upstream(fixed(plain())) as evil, pair(fixed(plain())) as (up, warmfold):
        for target in [
            *HOSTILE,
            f"http://127.0.0.1:{evil.port}/x",
            f"//127.0.0.1:{evil.port}/x",
            f"/@127.0.0.1:{evil.port}",
        ]:
            authority = f"127.0.0.1:{evil.port}"
            request = f"GET {target} HTTP/1.1\r\nHost: {authority}\r\nX-Forwarded-Host: {authority}\r\nX-Upstream-Url: http://{authority}\r\n\r\n"
            got = await ask(warmfold.port, request.encode())
            assert got.status in (200, 400)
        assert evil.connections == 0
        assert {request.all(b"host")[0] for request in up.requests} == {b"127.0.0.1:%d" % up.port}


@on_uvloop
async def test_connect_and_asterisk_are_answered_by_us() -> None:
    async with pair(fixed(plain())) as (up, warmfold):
        connect = await ask(warmfold.port, b"CONNECT evil.com:443 HTTP/1.1\r\nHost: evil.com\r\n\r\n")
        asterisk = await ask(warmfold.port, b"OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n")
    assert (connect.status, connect.all(b"x-warmfold-error")) == (501, [b"connect_not_supported"])
    assert (asterisk.status, asterisk.all(b"x-warmfold-error")) == (400, [b"invalid_target"])
    assert up.requests == []


@on_uvloop
async def test_an_absolute_target_is_taken_for_its_path() -> None:
    async with pair(fixed(plain())) as (up, warmfold):
        await ask(warmfold.port, b"GET http://whoever/v1/a%2Fb?c HTTP/1.1\r\nHost: whoever\r\n\r\n")
    assert up.requests[0].first == b"GET /v1/a%2Fb?c HTTP/1.1"


KEY = {"UPSTREAM_KEY": "sk-ours", "CLIENT_TOKEN": "token"}


@pytest.mark.parametrize(
    ("server", "keys", "credential", "sent"),
    [
        ({}, {}, b"Authorization: Bearer theirs\r\n", [b"Bearer theirs"]),
        ({}, {}, b"", []),
        (
            {},
            {"api_key_env": "UPSTREAM_KEY"},
            b"AUTHORIZATION: Bearer theirs\r\nAuthorization: Basic x\r\n",
            [b"Bearer sk-ours"],
        ),
        ({}, {"api_key_env": "UPSTREAM_KEY"}, b"", [b"Bearer sk-ours"]),
        (
            {"client_token_env": "CLIENT_TOKEN"},
            {"api_key_env": "UPSTREAM_KEY"},
            b"Authorization: bearer token\r\n",
            [b"Bearer sk-ours"],
        ),
        ({"client_token_env": "CLIENT_TOKEN"}, {}, b"Authorization: Bearer token\r\n", []),
    ],
    ids=["the client's", "none", "ours instead", "ours added", "ours for a token", "a token stays here"],
)
@on_uvloop
async def test_which_credential_goes_up(
    server: dict[str, str], keys: dict[str, str], credential: bytes, sent: list[bytes]
) -> None:
    async with pair(fixed(plain()), server=server, environ=KEY, **keys) as (up, warmfold):
        got = await ask(warmfold.port, b"GET /v1/models HTTP/1.1\r\nHost: h\r\n" + credential + b"\r\n")
    assert (got.status, up.requests[0].all(b"authorization")) == (200, sent)


@pytest.mark.parametrize(
    "credential", [b"", b"Bearer wrong", b"token", b"Basic token", b"Bearer token2", b"Bearer \xff", b"Bearer"]
)
@on_uvloop
async def test_without_the_clients_token_nothing_goes_up(credential: bytes) -> None:
    async with pair(fixed(plain()), server={"client_token_env": "CLIENT_TOKEN"}, environ=KEY) as (up, warmfold):
        header = b"Authorization: %s\r\n" % credential if credential else b""
        got = await ask(warmfold.port, b"GET /v1/models HTTP/1.1\r\nHost: h\r\n" + header + b"\r\n")
    assert (got.status, got.all(b"x-warmfold-error"), up.connections) == (401, [b"invalid_api_key"], 0)
    assert b"client_token_env" in got.body


def test_a_new_body_is_framed_anew() -> None:
    chunked = Inbound("POST", "/x", (("Transfer-Encoding", "chunked"), ("X", "1")))
    assert to_send(chunked, b"abc", None, keeps_credential=True) == (("X", "1"), ("Content-Length", "3"))
    longer = Inbound("POST", "/x", (("content-length", "9"), ("X", "1"), ("Content-Length", "9")))
    assert to_send(longer, b"abc", None, keeps_credential=True) == (("content-length", "3"), ("X", "1"))
    assert to_send(longer, None, None, keeps_credential=True) == (("content-length", "0"), ("X", "1"))


def test_a_length_beside_a_coding_is_dropped() -> None:
    assert end_to_end((("Content-Length", "3"), ("transfer-encoding", "chunked"), ("X", "1"))) == (("X", "1"),)


def test_an_inbound_shows_nothing_of_itself() -> None:
    shown = repr(Inbound("POST", "/v1/x?key=canary", (("Authorization", "canary"),), b"canary"))
    assert "canary" not in shown
