"""The configuration: every fault is found, all at once, and what is right takes effect in the right order."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from proxy.config import ASSUMED_WINDOW_TOKENS, Config, ConfigError, Upstream, is_loopback, load, masked_url
from proxy.config.kinds import allowed, shown
from proxy.config.translate import LISTS, TABLES, fields, variable

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "config.example.toml"
DOCUMENT = ROOT / "docs" / "configuration.md"
FLAGLESS: Mapping[str, object] = {}


def written(directory: Path, text: str | bytes) -> Path:
    path = directory / "w.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def faults(path: Path | None, environ: Mapping[str, str] = {}, flags: Mapping[str, object] = FLAGLESS) -> list[str]:
    """The fault lines, the file's directory taken off."""
    with pytest.raises(ConfigError) as caught:
        load(path, environ, flags)
    lines = [str(fault) for fault in caught.value.faults]
    assert str(caught.value).split("\n") == lines, "a fault is one line"
    return [line.removeprefix(f"{path.parent}/") if path else line for line in lines]


ONE_FAULT: dict[str, tuple[str | bytes, str]] = {
    "ratio beyond 1": (
        "[compaction]\ntrigger_ratio = 1.7",
        "w.toml: compaction.trigger_ratio: found 1.7; allowed: a number above 0 and at most 1",
    ),
    "negative ratio": (
        "[compaction]\nhard_ratio = -0.1",
        "w.toml: compaction.hard_ratio: found -0.1; allowed: a number above 0 and at most 1",
    ),
    "nan": (
        "[compaction]\nhard_ratio = nan",
        "w.toml: compaction.hard_ratio: found nan; allowed: a number above 0 and at most 1",
    ),
    "misspelled key": (
        "[compaction]\ntriger_ratio = 0.5",
        "w.toml: compaction.triger_ratio: found an unknown key; allowed: a key of [compaction], did you mean compaction.trigger_ratio?",
    ),
    "key of another section": (
        "[server]\ndata_dir = 'x'",
        "w.toml: server.data_dir: found an unknown key; allowed: a key of [server], did you mean store.data_dir?",
    ),
    "unknown table": (
        "[compactions]\ntrigger_ratio = 0.5",
        "w.toml: compactions: found an unknown section; allowed: one of the sections server, upstream, upstreams, store, compaction, "
        "session, admin, models, did you mean compaction?",
    ),
    "key without a table": (
        "debounce_turns = 3",
        "w.toml: debounce_turns: found an unknown section; allowed: one of the sections server, upstream, upstreams, store, compaction, "
        "session, admin, models, did you mean compaction.debounce_turns?",
    ),
    "text for a number": (
        '[server]\nport = "8080"',
        'w.toml: server.port: found "8080"; allowed: a whole number from 0 to 65535',
    ),
    "truth for a number": (
        "[server]\nport = true",
        "w.toml: server.port: found true; allowed: a whole number from 0 to 65535",
    ),
    "fraction for a whole number": (
        "[compaction]\nmax_passes = 8.0",
        "w.toml: compaction.max_passes: found 8; allowed: a whole number from 1 to 256",
    ),
    "too many passes": (
        "[compaction]\nmax_passes = 257",
        "w.toml: compaction.max_passes: found 257; allowed: a whole number from 1 to 256",
    ),
    "no such port": (
        "[admin]\nport = 65536",
        "w.toml: admin.port: found 65536; allowed: a whole number from 0 to 65535",
    ),
    "timeout of zero": (
        "[upstream]\nread_idle_timeout_s = 0",
        "w.toml: upstream.read_idle_timeout_s: found 0; allowed: a number above 0 and at most 86400",
    ),
    "no such word": (
        '[compaction]\nmode = "On"',
        'w.toml: compaction.mode: found "On"; allowed: "on", "observe" or "off"',
    ),
    "number for a truth": (
        "[compaction]\nkeep_response_format = 1",
        "w.toml: compaction.keep_response_format: found 1; allowed: true or false",
    ),
    "value for a table": ("server = 8080", "w.toml: server: found 8080; allowed: a table, [server]"),
    "table for a list": (
        '[models]\nmatch = "x"',
        "w.toml: models: found a table; allowed: a list of tables, [[models]]",
    ),
    "rule without a pattern": (
        "[[models]]\nmax_passes = 2",
        "w.toml: models[0].match: found nothing; allowed: a text that is not empty, on one line",
    ),
    "rule out of range": (
        '[[models]]\nmatch = "a"\n[[models]]\nmatch = "b"\ntrigger_ratio = 2',
        "w.toml: models[1].trigger_ratio: found 2; allowed: a number above 0 and at most 1",
    ),
    "upstream without a URL": (
        '[[upstreams]]\nname = "a"\nmatch = "b"',
        "w.toml: upstreams[0].base_url: found nothing; allowed: an http:// or https:// URL without user info, query or fragment",
    ),
    "the default upstream has no name to give": (
        '[upstream]\nname = "a"',
        "w.toml: upstream.name: found an unknown key; allowed: a key of [upstream], did you mean upstreams.name?",
    ),
    "header with a blank": (
        '[session]\nid_headers = ["ok", "x y"]',
        'w.toml: session.id_headers[1]: found "x y"; allowed: a list, each the name of an HTTP header',
    ),
    "host with a port": (
        '[server]\nhost = "127.0.0.1:80"',
        'w.toml: server.host: found "127.0.0.1:80"; allowed: an IP address or a host name, without a port',
    ),
    "host of no address": (
        '[server]\nhost = "127.0.0.256"',
        'w.toml: server.host: found "127.0.0.256"; allowed: an IP address or a host name, without a port',
    ),
    "key with a line break": (
        '[server]\n"po\\nrt" = 1',
        'w.toml: server."po\\nrt": found an unknown key; allowed: a key of [server], did you mean server.port?',
    ),
    "watermarks crossed": (
        "[compaction]\ntrigger_ratio = 0.95",
        "w.toml: compaction.trigger_ratio: found 0.95; allowed: a number below hard_ratio, which is 0.92",
    ),
    "watermarks crossed from above": (
        "[compaction]\nhard_ratio = 0.5",
        "w.toml: compaction.hard_ratio: found 0.5; allowed: a number above trigger_ratio, which is 0.75",
    ),
    "watermarks crossed by a rule": (
        '[[models]]\nmatch = "a"\nhard_ratio = 0.75',
        "w.toml: models[0].hard_ratio: found 0.75; allowed: a number above trigger_ratio, which is 0.75",
    ),
    "several workers": (
        "[server]\nworkers = 2",
        "w.toml: server.workers: found 2; allowed: 1 for now (several workers come with a later release)",
    ),
    "a store that is not built yet": (
        '[store]\nurl = "redis+sentinel://:hidden@a:1/m"',
        'w.toml: store.url: found "redis+sentinel://***@a:1/m"; '
        "allowed: embedded: or a URL that begins with redis://, rediss://, unix:// (no other is built yet)",
    ),
    "a database that is no number": (
        '[store]\nurl = "redis://:hidden@h:6379/x"',
        'w.toml: store.url: found "redis://***@h:6379/x"; '
        "allowed: redis://HOST:PORT/DATABASE, port and database numbers, other characters percent-encoded",
    ),
    "an upstream that is ourselves": (
        '[upstream]\nbase_url = "http://localhost:8080/v1"',
        'w.toml: upstream.base_url: found "http://localhost:8080/v1"; allowed: the provider\'s URL, and not that of '
        "warmfold's own listener (server.host, server.port): each request would call itself",
    ),
    "transcript's place in a replay": (
        '[compaction]\nsummary_prompt = "Sum up {messages}"',
        "w.toml: compaction.summary_prompt: found {messages} in the summary_prompt of a replay, which sends no transcript; "
        'allowed: {messages} only with strategy = "transcript" or a summary_model',
    ),
    "transcript's place in a rule's replay": (
        '[compaction]\nsummary_model = "m"\nsummary_prompt = "{messages}"\n[[models]]\nmatch = "a"\nsummary_model = ""',
        "w.toml: models[0].summary_model: found {messages} in the summary_prompt of a replay, which sends no transcript; "
        'allowed: {messages} only with strategy = "transcript" or a summary_model',
    ),
    "one port for two": (
        "[admin]\nport = 8080",
        "w.toml: admin.port: found 8080; allowed: another port than that of [server] on the same host",
    ),
    "a name taken": (
        '[[upstreams]]\nname = "default"\nmatch = "b"\nbase_url = "http://h"',
        'w.toml: upstreams[0].name: found "default"; allowed: each name once, and not "default", which is [upstream]',
    ),
    "admin open to the network": (
        '[admin]\nhost = "0.0.0.0"',
        "w.toml: admin.token_env: found the name of a variable that is not set, or empty; "
        "allowed: the name of an environment variable that holds a value",
    ),
    "admin open to the network and no token wanted": (
        '[admin]\nhost = "::"\ntoken_env = ""',
        'w.toml: admin.token_env: found ""; allowed: the name of a variable, because admin.host "::" is not loopback',
    ),
    "secret not there": (
        '[upstream]\napi_key_env = "NOWHERE"',
        "w.toml: upstream.api_key_env: found the name of a variable that is not set, or empty; "
        "allowed: the name of an environment variable that holds a value",
    ),
    "a table twice": (
        "[server]\nport = 1\n[server]\nhost = 'x'",
        "w.toml: found a syntax error: Cannot declare ('server',) twice (at line 3, column 8); allowed: TOML 1.0, each table and key once",
    ),
    "no TOML": (
        "[server\nport = 1",
        "w.toml: found a syntax error: Expected ']' at the end of a table declaration (at line 1, column 8); "
        "allowed: TOML 1.0, each table and key once",
    ),
    "no UTF-8": (
        "[server]\n# gr\u00fcn".encode("latin-1"),
        "w.toml: found no UTF-8 at byte 13; allowed: TOML, which is UTF-8",
    ),
}


@pytest.mark.parametrize("name", ONE_FAULT)
def test_a_fault_names_file_key_what_was_found_and_what_is_allowed(tmp_path: Path, name: str) -> None:
    text, expected = ONE_FAULT[name]
    assert faults(written(tmp_path, text)) == [expected]


def test_the_table_holds_one_file_for_every_url_scheme(tmp_path: Path) -> None:
    for url in (
        "embedded:",
        "redis://h",
        "rediss://h:1/0",
        "unix:///run/v.sock",
    ):
        assert load(written(tmp_path, f'[store]\nurl = "{url}"'), {}, {}).store.url == url
    for url in (
        "",
        "embedded",
        "embedded:x",
        "redis:/h",
        "redis://",
        "http://h",
        "memcached://h",
        "redis+cluster://a:1,b:2",
    ):
        assert len(faults(written(tmp_path, f'[store]\nurl = "{url}"'))) == 1, url


@pytest.mark.parametrize(
    "url", ["redis://h/x", "redis://h/-1", "redis://h:x/0", "redis://h:0", "rediss://[h", "redis://u:p?q@h/0"]
)
def test_a_store_url_has_numbers_where_redis_wants_numbers(tmp_path: Path, url: str) -> None:
    [line] = faults(written(tmp_path, f'[store]\nurl = "{url}"'))
    assert line.endswith("port and database numbers, other characters percent-encoded")


@pytest.mark.parametrize(
    ("base_url", "host", "port", "ours"),
    [
        ("http://127.0.0.1:8080/v1", "127.0.0.1", 8080, True),
        ("http://LOCALHOST:8080", "127.0.0.1", 8080, True),
        ("http://[::1]:8080/v1", "localhost", 8080, True),
        ("http://warmfold.localhost:8080/v1", "::1", 8080, True),
        ("http://0.0.0.0:8080/v1", "127.0.0.1", 8080, True),
        ("http://127.0.0.2:8080/v1", "0.0.0.0", 8080, True),
        ("http://proxy.example/v1", "Proxy.example", 80, True),
        ("http://10.0.0.7:8080/v1", "10.0.0.7", 8080, True),
        ("http://127.0.0.1:8081/v1", "127.0.0.1", 8080, False),
        ("http://127.0.0.2:8080/v1", "127.0.0.1", 8080, False),
        ("http://provider.example:8080/v1", "0.0.0.0", 8080, False),
        ("https://provider.example/v1", "127.0.0.1", 0, False),
    ],
)
def test_an_upstream_that_is_our_own_listener_is_refused(
    tmp_path: Path, base_url: str, host: str, port: int, ours: bool
) -> None:
    text = (
        f'[server]\nhost = "{host}"\nport = {port}\n[[upstreams]]\nname = "a"\nmatch = "b"\nbase_url = "{base_url}"\n'
    )
    if ours:
        [line] = faults(written(tmp_path, text))
        assert line.startswith("w.toml: upstreams[0].base_url: found ")
    else:
        load(written(tmp_path, text), {}, {})


@pytest.mark.parametrize(
    "url",
    [
        "",
        "h/v1",
        "ftp://h/v1",
        "http://",
        "http://u@h/v1",
        "http://h/v1?k=1",
        "http://h/v1#a",
        "http://h:x/v1",
        "http://h /v1",
        "http://[::1/v1",
    ],
)
def test_a_base_url_is_http_and_has_neither_user_info_nor_query(tmp_path: Path, url: str) -> None:
    assert len(faults(written(tmp_path, f"[upstream]\nbase_url = '{url}'"))) == 1


def test_all_faults_of_file_environment_and_flags_come_at_once(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        [server]
        prot = 8080
        [upstream]
        connect_timeout_s = -1
        [compaction]
        trigger_ratio = 0.95
        mode = 1
        [[models]]
        trigger_ratio = 0.1
        [admin]
        host = "0.0.0.0"
        """,
    )
    found = faults(
        path,
        {"WARMFOLD_STORE__TIMEOUT_MS": "fast", "WARMFOLD_SERVR__PORT": "1", "WARMFOLD_COMPACTION__MODES": "on"},
        {"server.port": 70000},
    )
    assert [line.partition(": found")[0] for line in found] == [
        "WARMFOLD_SERVR__PORT: servr.port",
        "--port: server.port",
        "w.toml: server.prot",
        "w.toml: upstream.connect_timeout_s",
        "WARMFOLD_STORE__TIMEOUT_MS: store.timeout_ms",
        "w.toml: compaction.mode",
        "WARMFOLD_COMPACTION__MODES: compaction.modes",
        "w.toml: models[0].match",
        "w.toml: compaction.trigger_ratio",
        "w.toml: admin.token_env",
    ]


def test_a_contradiction_is_not_reported_where_its_other_half_is_a_fault_already(tmp_path: Path) -> None:
    assert len(faults(written(tmp_path, "[compaction]\nhard_ratio = 1.7\ntrigger_ratio = 0.95"))) == 1


def test_a_file_that_cannot_be_read_is_one_fault(tmp_path: Path) -> None:
    expected = "found no such file or directory; allowed: a file that can be read"
    assert faults(tmp_path / "absent.toml") == [f"absent.toml: {expected}"]
    assert faults(tmp_path / "absent.toml", {"WARMFOLD_SERVER__PORT": "x"})[1].startswith(
        "WARMFOLD_SERVER__PORT: server.port"
    )
    (tmp_path / "d").mkdir()
    assert faults(tmp_path / "d") == ["d: found is a directory; allowed: a file that can be read"]


@pytest.mark.parametrize("text", [b"", b"\n", b"\xef\xbb\xbf", b"# nothing", b"[server]\r\n[compaction]\r\n"])
def test_an_empty_file_gives_the_defaults(tmp_path: Path, text: bytes) -> None:
    assert load(written(tmp_path, text), {}, {}).model_dump() == Config().model_dump()


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    path = written(tmp_path, b'\xef\xbb\xbf[server]\r\nport = 81\r\n[compaction]\r\nsummary_prompt = """a\r\nb"""\r\n')
    config = load(path, {}, {})
    assert (config.server.port, config.compaction.summary_prompt) == (81, "a\nb")


def test_a_file_too_deep_to_read_is_a_fault_and_no_crash(tmp_path: Path) -> None:
    [line] = faults(written(tmp_path, b"a = " + b"[" * 5000))
    assert line.startswith("w.toml: found a syntax error: ")


def test_an_int_is_taken_for_a_float(tmp_path: Path) -> None:
    config = load(written(tmp_path, "[compaction]\ntimeout_s = 5"), {}, {})
    assert isinstance(config.compaction.timeout_s, float)


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    path = written(
        tmp_path, "[server]\nport = 1\nhost = 'localhost'\n[compaction]\ntrigger_ratio = 0.1\ndebounce_turns = 9\n"
    )
    environ = {"WARMFOLD_SERVER__PORT": "2", "WARMFOLD_COMPACTION__TRIGGER_RATIO": "0.2"}
    config = load(path, environ, {"server.port": 3, "server.host": None})
    assert (config.server.port, config.server.host) == (3, "localhost")
    assert (config.compaction.trigger_ratio, config.compaction.debounce_turns, config.compaction.hard_ratio) == (
        0.2,
        9,
        0.92,
    )
    origins = [config.origin(f"server.{key}") for key in ("port", "host", "workers")]
    assert origins == ["--port", str(path), "default"]
    assert config.origin("compaction.trigger_ratio") == "WARMFOLD_COMPACTION__TRIGGER_RATIO"


ENVIRONMENT: dict[str, tuple[str, str, object]] = {
    "int": ("WARMFOLD_STORE__TIMEOUT_MS", "75", 75),
    "optional int": ("WARMFOLD_COMPACTION__MAX_CONTEXT_TOKENS", "9000", 9000),
    "float": ("WARMFOLD_COMPACTION__SETTLE_S", "2", 2.0),
    "bool": ("WARMFOLD_COMPACTION__KEEP_RESPONSE_FORMAT", "true", True),
    "word": ("WARMFOLD_COMPACTION__MODE", "observe", "observe"),
    "text that looks like a number": ("WARMFOLD_COMPACTION__SUMMARY_MODEL", "42", "42"),
    "empty text": ("WARMFOLD_ADMIN__TOKEN_ENV", "", ""),
    "list with commas": ("WARMFOLD_SESSION__ID_HEADERS", "X-A, x-b", ("x-a", "x-b")),
    "list as JSON": ("WARMFOLD_SESSION__ID_FIELDS", '["a,b"]', ("a,b",)),
}


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_the_environment_is_read_by_the_type_of_the_key(name: str) -> None:
    variable_name, text, expected = ENVIRONMENT[name]
    section, _, key = variable_name.removeprefix("WARMFOLD_").lower().partition("__")
    value = getattr(getattr(load(None, {variable_name: text}, {}), section), key)
    assert value == expected
    assert type(value) is type(expected)


def test_every_key_of_a_table_can_be_set_by_the_environment() -> None:
    samples = {int: "256", float: "0.9", bool: "true"}
    for section in TABLES.keys() - LISTS:
        for key, info in fields(section).items():
            kind: Any = int if key == "max_context_tokens" else info.annotation
            text = "1" if key == "workers" else samples.get(kind, shown(info.default).strip('"'))
            config = load(None, {variable(section, key): text}, {})
            assert config.origin(f"{section}.{key}") == variable(section, key)
            assert key in getattr(config, section).model_fields_set


def test_lists_of_tables_come_from_the_environment_as_json() -> None:
    config = load(None, {"WARMFOLD_MODELS": '[{"match": "a*", "max_passes": 2}]'}, {})
    assert config.compaction_for("abc").max_passes == 2
    assert faults(None, {"WARMFOLD_MODELS": "a*"}) == [
        'WARMFOLD_MODELS: models: found "a*"; allowed: a list of tables, [[models]]'
    ]
    assert faults(None, {"WARMFOLD_MODELS__MATCH": "a*"}) == [
        "WARMFOLD_MODELS__MATCH: models.match: found a list of tables; allowed: the whole list as JSON in WARMFOLD_MODELS"
    ]


def test_a_variable_that_names_no_key_is_a_fault_with_the_one_that_was_meant() -> None:
    assert faults(None, {"WARMFOLD_COMPACTION__TRIGER_RATIO": "0.5"}) == [
        "WARMFOLD_COMPACTION__TRIGER_RATIO: compaction.triger_ratio: found an unknown key; "
        "allowed: a key of [compaction], did you mean WARMFOLD_COMPACTION__TRIGGER_RATIO?"
    ]
    assert "did you mean WARMFOLD_SERVER__PORT?" in faults(None, {"WARMFOLD_SERVR__PORT": "1"})[0]
    load(None, {"WARMFOLD_ADMIN_TOKEN": "t", "WARMFOLD_CONVERSATIONS": "x", "PATH": "/", "OTHER__KEY": "1"}, {})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("WARMFOLD_COMPACTION_MODE", "WARMFOLD_COMPACTION__MODE"),
        ("WARMFOLD_PORT", "WARMFOLD_SERVER__PORT"),
        ("WARMFOLD_TRIGGER_RATIO", "WARMFOLD_COMPACTION__TRIGGER_RATIO"),
        ("WARMFOLD_UPSTREAM", "WARMFOLD_UPSTREAM__BASE_URL"),
        ("WARMFOLD_WINDOW", "WARMFOLD_COMPACTION__MAX_CONTEXT_TOKENS"),
        ("WARMFOLD_MODEL", "WARMFOLD_MODELS"),
        ("WARMFOLD_ADMIN_TOKN", "WARMFOLD_ADMIN_TOKEN"),
        ("WARMFOLD_QWXYZ", ""),
    ],
)
def test_a_variable_that_begins_like_ours_and_is_none_is_a_fault(name: str, meant: str) -> None:
    [line] = faults(None, {name: "hidden"})
    assert line.startswith(
        f"{name}: found a variable that sets nothing; allowed: WARMFOLD_SECTION__KEY with two underscores"
    )
    assert line.endswith(f", did you mean {meant}?" if meant else "one that a key ending in _env names")
    assert "hidden" not in line


def test_a_variable_that_a_key_names_may_be_called_anything() -> None:
    for name in ("WARMFOLD_MY_KEY", "WARMFOLD_UPSTREAM__API_KEY", "WARMFOLD_MY__KEY"):
        assert load(None, {"WARMFOLD_UPSTREAM__API_KEY_ENV": name, name: "k"}, {}).secret(name) == "k"


def test_what_kubernetes_says_of_a_service_called_warmfold_is_no_fault() -> None:
    service = {
        "WARMFOLD_SERVICE_HOST": "10.0.0.1",
        "WARMFOLD_SERVICE_PORT": "8080",
        "WARMFOLD_SERVICE_PORT_HTTP": "8080",
        "WARMFOLD_PORT": "tcp://10.0.0.1:8080",
        "WARMFOLD_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "WARMFOLD_PORT_8080_TCP_ADDR": "10.0.0.1",
        "WARMFOLD_VALKEY_PORT": "tcp://10.0.0.2:6379",
        "WARMFOLD_VALKEY_SERVICE_HOST": "10.0.0.2",
    }
    assert load(None, service, {}).model_dump() == Config().model_dump()


def test_the_window_has_a_flag_and_a_rule_wins_over_it(tmp_path: Path) -> None:
    path = written(tmp_path, '[[models]]\nmatch = "a"\nmax_context_tokens = 9000')
    config = load(path, {}, {"compaction.max_context_tokens": 64000})
    assert [config.compaction_for(model).max_context_tokens for model in ("a", "b")] == [9000, 64000]
    assert faults(None, {}, {"compaction.max_context_tokens": 5}) == [
        "--window: compaction.max_context_tokens: found 5; allowed: a whole number of at least 256"
    ]


def test_only_the_environment_that_was_handed_in_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMFOLD_SERVER__PORT", "99")
    assert load(None, {}, {}).server.port == Config().server.port == 8080


def test_the_first_rule_that_matches_wins_and_changes_only_what_it_sets(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        [compaction]
        debounce_turns = 7
        keep_recent_turns = 1
        [[models]]
        match = "gpt-4o*"
        max_context_tokens = 128000
        debounce_turns = 3
        [[models]]
        match = "gpt-*"
        keep_recent_turns = 5
        input_usd_per_mtok = 2
        """,
    )
    config = load(path, {}, {})
    first, second, neither = map(config.compaction_for, ("gpt-4o-mini", "gpt-5", "GPT-5"))
    # debounce_turns = 3 is the built-in default, and still set by the rule
    assert (first.max_context_tokens, first.debounce_turns, first.keep_recent_turns) == (128000, 3, 1)
    assert (second.max_context_tokens, second.debounce_turns, second.keep_recent_turns) == (None, 7, 5)
    assert neither is config.compaction
    assert config.compaction_for("gpt-4o") is first, "merged once, not per request"
    rule = config.rule_for("gpt-5")
    assert rule is not None
    assert (rule.input_usd_per_mtok, rule.output_usd_per_mtok) == (2.0, None)
    assert config.rule_for("o3") is None
    assert ASSUMED_WINDOW_TOKENS == 32000


def test_a_model_finds_its_upstream_or_the_default_one(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        [upstream]
        base_url = "https://one.example/v1/"
        api_key_env = "K"
        [[upstreams]]
        name = "local"
        match = "llama-[23]*"
        base_url = "http://127.0.0.1:8000/v1"
        """,
    )
    config = load(path, {"K": "k"}, {})
    local, default = config.upstream_for("llama-3.1"), config.upstream_for("llama-4")
    assert (local.name, local.base_url, local.api_key_env) == ("local", "http://127.0.0.1:8000/v1", "")
    assert (default.name, default.base_url, default.api_key_env) == ("default", "https://one.example/v1", "K")
    assert default is config.upstream


SECRET = "sk-very-secret"


def test_a_secret_is_stripped_when_read_and_shows_nowhere(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        f"""
        [server]
        host = "0.0.0.0"
        client_token_env = "TOKEN"
        [upstream]
        api_key_env = "KEY"
        [session]
        tenant_secret_env = "SALT"
        [store]
        url = "redis://u:{SECRET}@h:1/0?password={SECRET}"
        """,
    )
    environ = {
        "KEY": f"{SECRET}\r\n",
        "TOKEN": f"  {SECRET}\t",
        "SALT": f"{SECRET}ü",
        "WARMFOLD_ADMIN_TOKEN": "",
        "OTHER": SECRET,
    }
    config = load(path, environ, {})
    assert [config.secret(name) for name in ("KEY", "TOKEN", "SALT")] == [SECRET, SECRET, f"{SECRET}ü"]
    assert config.secret("WARMFOLD_ADMIN_TOKEN") is None
    assert config.secret("OTHER") is None, "only what the configuration names"
    environ["KEY"] = "later"
    assert config.secret("KEY") == SECRET, "read once, at load"
    for text in (
        repr(config),
        str(config),
        config.model_dump_json(),
        repr(config.model_dump()),
        repr(config.__pydantic_private__),
    ):
        assert SECRET not in text
    assert config.store.url.startswith(f"redis://u:{SECRET}@"), "the store itself gets it whole"


@pytest.mark.parametrize(
    ("text", "environ"),
    [
        (f'[upstream]\napi_key_env = "{SECRET}"', {}),
        ('[upstream]\napi_key_env = "sk_secret_as_a_name"', {}),
        ('[upstream]\napi_key_env = "KEY"', {"KEY": f"{SECRET}\nx"}),
        ('[upstream]\napi_key_env = "KEY"', {"KEY": f"{SECRET}ü"}),
        (f'[upstream]\nbase_url = "https://u:{SECRET}@h/v1"', {}),
        (f'[upstream]\nbase_url = "https://h/v1?key={SECRET}"', {}),
        (f'[store]\nurl = "redis:/:{SECRET}@h"', {}),
        (f'[store]\nurl = "rediss:{SECRET}@h"', {}),
        (f'[server]\nclient_token = "{SECRET}"', {}),
        (f'[compaction]\nsummary_prompt = ["{SECRET}"]', {}),
        ("", {"WARMFOLD_UPSTREAM__API_KEY": SECRET}),
    ],
)
def test_a_fault_does_not_echo_a_secret(tmp_path: Path, text: str, environ: dict[str, str]) -> None:
    lines = faults(written(tmp_path, text), environ)
    assert len(lines) == 1
    assert "secret" not in lines[0]


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("embedded:", "embedded:"),
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://:p@h", "redis://***@h"),
        ("redis://u:p@ss?w@h/0?x=y", "redis://***@h/0?***"),
        ("redis://h?password=p", "redis://h?***"),
        ("u:p@h", "***@h"),
    ],
)
def test_a_url_is_masked(url: str, masked: str) -> None:
    assert masked_url(url) == masked


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("me.local", False),
    ],
)
def test_a_borrowed_key_needs_a_token_where_the_network_can_reach_it(tmp_path: Path, host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    text = (
        f'[server]\nhost = "{host}"\n[[upstreams]]\nname = "a"\nmatch = "b"\nbase_url = "http://h"\napi_key_env = "KEY"'
    )
    environ = {"KEY": "k", "TOKEN": "t"}
    path = written(tmp_path, text)
    if loopback:
        load(path, environ, {})
    else:
        [line] = faults(path, environ)
        assert line.startswith("w.toml: server.client_token_env: found")
        assert host in line
    load(path, {**environ, "WARMFOLD_SERVER__CLIENT_TOKEN_ENV": "TOKEN"}, {})
    load(written(tmp_path, f'[server]\nhost = "{host}"'), {}, {})  # the client's own credential: nothing is lent


def test_the_admin_listener_on_the_network_needs_a_token_that_is_not_blank() -> None:
    open_to_all = {"WARMFOLD_ADMIN__HOST": "0.0.0.0"}
    assert len(faults(None, {**open_to_all, "WARMFOLD_ADMIN_TOKEN": " \n"})) == 1
    assert load(None, {**open_to_all, "WARMFOLD_ADMIN_TOKEN": "t\n"}, {}).secret("WARMFOLD_ADMIN_TOKEN") == "t"


def test_on_loopback_only_the_default_variable_of_the_admin_token_may_be_unset() -> None:
    assert load(None, {}, {}).secret("WARMFOLD_ADMIN_TOKEN") is None
    assert len(faults(None, {"WARMFOLD_ADMIN__TOKEN_ENV": "MINE"})) == 1
    assert load(None, {"WARMFOLD_ADMIN__TOKEN_ENV": "MINE", "MINE": "t"}, {}).secret("MINE") == "t"


def test_a_secret_that_is_missing_is_reported_beside_a_listener_that_is_wrong() -> None:
    environ = {"WARMFOLD_ADMIN__HOST": "a b", "WARMFOLD_UPSTREAM__API_KEY_ENV": "NOWHERE"}
    assert [line.split(":")[0] for line in faults(None, environ)] == [
        "WARMFOLD_ADMIN__HOST",
        "WARMFOLD_UPSTREAM__API_KEY_ENV",
    ]


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Config().server.port = 1
    with pytest.raises(ValidationError):
        Upstream(base_url="no URL")


@given(st.one_of(st.binary(max_size=200), st.text(alphabet='[]ab.=" \n#{},1', max_size=60).map(str.encode)))
def test_no_file_whatever_raises_anything_but_faults_of_one_line(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = written(tmp_path_factory.getbasetemp(), content)
    lines: list[str] = []
    try:
        load(path, {}, {})
    except ConfigError as error:
        lines = [str(fault) for fault in error.faults]
    assert all(line.isprintable() for line in lines)


# The documents: every key, every default, every range.


def _example(switched_on: bool) -> dict[str, Any]:
    text = EXAMPLE.read_text()
    return tomllib.loads(re.sub(r"(?m)^#(?=[a-z\[])", "", text) if switched_on else text)


def test_the_example_is_the_default_configuration() -> None:
    assert load(EXAMPLE, {}, {}).model_dump() == Config().model_dump()
    assert "max_context_tokens" not in _example(switched_on=False)["compaction"], "set, it would count as configured"


def test_the_example_holds_every_key_with_its_default() -> None:
    example = _example(switched_on=True)
    assert list(example) == list(TABLES)
    for section, value in example.items():
        keys = fields(section)
        table = value[0] if section in LISTS else value
        if section == "models":  # any key of [compaction] besides
            assert {key for key in keys if key not in fields("compaction")} <= table.keys() <= keys.keys()
            continue
        assert list(table) == list(keys), section
        for key, found in table.items():
            if key != "max_context_tokens" and not keys[key].is_required():
                assert found == (list(keys[key].default) if isinstance(found, list) else keys[key].default), key
    assert example["compaction"]["max_context_tokens"] == ASSUMED_WINDOW_TOKENS


def test_the_example_with_everything_switched_on_is_valid(tmp_path: Path) -> None:
    load(written(tmp_path, re.sub(r"(?m)^#(?=[a-z\[])", "", EXAMPLE.read_text())), {}, {})


def _documented() -> dict[str, dict[str, list[str]]]:
    """The cells of each row by section and key."""
    found: dict[str, dict[str, list[str]]] = {}
    rows: dict[str, list[str]] = {}
    for line in DOCUMENT.read_text().splitlines():
        if heading := re.fullmatch(r"## `\[+(\w+)\]+`", line):
            rows = found.setdefault(heading[1], {})
        elif row := re.fullmatch(r"\| `(\w+)` \|(.*)\|", line):
            rows[row[1]] = [cell.strip() for cell in row[2].split("|")]
    return found


def test_the_document_holds_every_key_with_its_default_and_range() -> None:
    documented = _documented()
    assert list(documented) == list(TABLES)
    for section, rows in documented.items():
        keys = fields(section)
        own = [key for key in keys if section != "models" or key not in fields("compaction")]
        assert list(rows) == own
        for key, (default, range_, _) in rows.items():
            info = keys[key]
            if info.is_required():
                assert default == "required", key
            else:
                assert default == ("not set" if info.default is None else f"`{shown(info.default)}`"), key
            assert range_ == allowed(info), key


def test_every_key_says_what_it_is_for() -> None:
    for section in TABLES:
        for key, info in fields(section).items():
            assert info.description, f"{section}.{key}"
