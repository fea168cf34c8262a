"""The command line as an operator meets it: what is printed where, and how it ends."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from proxy import __version__
from proxy.__main__ import main
from proxy.config import Config
from proxy.config.layers import FLAGS
from proxy.config.translate import TABLES, fields
from proxy.core.limits import limits
from proxy.core.model import Window

EXAMPLE = Path(__file__).parent.parent / "config.example.toml"
FULL = """
[server]
workers = 1
[store]
url = "redis://u:hidden@h"
[compaction]
strategy = "transcript"
anchor_tokens = 0
ledger_tokens = 2000
summary_prompt = "hidden {messages}"
[[models]]
match = "gpt-4o[ab]*"
max_payback_turns = 3
input_usd_per_mtok = 2.5
"""


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WARMFOLD_")]:
        monkeypatch.delenv(name)


def invoke(*arguments: str | Path, **environ: str) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)), env=environ)


def written(directory: Path, text: str) -> Path:
    path = directory / "w.toml"
    path.write_text(text)
    return path


def test_version_and_help() -> None:
    assert invoke("--version").output == f"warmfold, version {__version__}\n"
    listed = invoke("--help")
    assert listed.exit_code == 0
    assert all(command in listed.output for command in ("serve", "check", "demo", "sessions"))
    flags = invoke("serve", "--help").output
    assert all(flag in flags for flag in ("--config", *FLAGS.values()))


@pytest.mark.parametrize("arguments", [[], ["serve"], ["check"], ["demo"], ["sessions"], ["sessions", "compact"]])
def test_no_help_text_is_cut_or_wider_than_a_terminal(arguments: list[str]) -> None:
    lines = invoke(*arguments, "--help").output.splitlines()
    assert [line for line in lines if line.rstrip().endswith("...") and not line.startswith("Usage: ")] == []
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    "arguments",
    [
        ["serv"],
        ["serve", "--prot", "1"],
        ["serve", "--port", "http"],
        ["serve", "extra"],
        ["check", "a", "b"],
        ["sessions", "show"],
        ["sessions", "undo"],
        ["sessions", "list", "--limit", "0"],
        ["sessions", "--limit", "0"],
        ["sessions", "forget", "x"],
    ],
)
def test_bad_usage_ends_with_status_2(arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage: " in result.stderr


@pytest.mark.parametrize("command", [["check"], ["serve", "--config"]])
def test_a_refused_configuration_prints_each_fault_on_stderr_and_ends_with_status_2(
    tmp_path: Path, command: list[str]
) -> None:
    path = written(tmp_path, "[server]\nprot = 1\n[compaction]\ntrigger_ratio = 1.7\n")
    result = invoke(*command, path, WARMFOLD_STORE__TIMEOUT_MS="soon")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        f"{path}: server.prot: found an unknown key; allowed: a key of [server], did you mean server.port?",
        'WARMFOLD_STORE__TIMEOUT_MS: store.timeout_ms: found "soon"; allowed: a whole number from 1 to 60000',
        f"{path}: compaction.trigger_ratio: found 1.7; allowed: a number above 0 and at most 1",
    ]


REFUSED_BY_SERVE = {
    "workers": ("[server]\nworkers = 2", "{path}: server.workers: found 2; allowed: 1 for now"),
    "cluster": (
        '[store]\nurl = "redis+cluster://h:1"',
        '{path}: store.url: found "redis+cluster://h:1"; allowed: embedded: or',
    ),
    "database": (
        '[store]\nurl = "redis://127.0.0.1:1/x"',
        '{path}: store.url: found "redis://127.0.0.1:1/x"; allowed: redis://',
    ),
    "option": (
        '[store]\nurl = "redis://127.0.0.1:1/0?colour=hidden"',
        "{path}: store.url: found redis://127.0.0.1:1/0?***; allowed: a URL whose port, database and options redis-py knows",
    ),
    "loop": (
        '[upstream]\nbase_url = "http://[::1]:8080"',
        '{path}: upstream.base_url: found "http://[::1]:8080"; allowed: the provider',
    ),
}


@pytest.mark.parametrize("name", REFUSED_BY_SERVE)
def test_check_refuses_what_serve_refuses_in_the_same_words(tmp_path: Path, name: str) -> None:
    text, says = REFUSED_BY_SERVE[name]
    path = written(tmp_path, text)
    served, checked = invoke("serve", "--config", path), invoke("check", path)
    assert (served.exit_code, served.stdout) == (checked.exit_code, checked.stdout) == (2, "")
    assert served.stderr == checked.stderr
    assert checked.stderr.startswith(says.format(path=path))
    assert checked.stderr.count("\n") == 1
    assert "hidden" not in checked.stderr


def test_check_takes_a_url_with_an_option_that_its_connection_knows(tmp_path: Path) -> None:
    path = written(tmp_path, '[store]\nurl = "rediss://h:1/0?ssl_cert_reqs=none"')
    assert invoke("check", path).exit_code == 0


def test_serve_names_the_flag_that_is_wrong_even_where_the_file_is_right(tmp_path: Path) -> None:
    path = written(tmp_path, "[server]\nport = 1\n")
    result = invoke("serve", "--config", path, "--port", "70000", "--upstream", "h", "--store", "x", "--host", "a b")
    assert result.exit_code == 2
    assert [line.split(" ")[0] for line in result.stderr.splitlines()] == [
        "--host:",
        "--port:",
        "--upstream:",
        "--store:",
    ]


def test_serve_without_the_file_it_was_given_does_not_start(tmp_path: Path) -> None:
    result = invoke("serve", "--config", tmp_path / "w.toml")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("where", ["file", "env", "flag"])
def test_serve_refuses_several_workers_for_now(tmp_path: Path, where: str) -> None:
    path = written(tmp_path, "[server]\nworkers = 2\n" if where == "file" else "")
    arguments: list[str | Path] = ["serve", "--config", path, *(["--workers", "2"] if where == "flag" else [])]
    result = invoke(*arguments, **({"WARMFOLD_SERVER__WORKERS": "2"} if where == "env" else {}))
    origin = {"file": str(path), "env": "WARMFOLD_SERVER__WORKERS", "flag": "--workers"}[where]
    assert result.exit_code == 2
    assert (
        result.stderr
        == f"{origin}: server.workers: found 2; allowed: 1 for now (several workers come with a later release)\n"
    )


def test_check_prints_every_key_with_its_value_and_where_it_comes_from(tmp_path: Path) -> None:
    path = written(tmp_path, FULL)
    result = invoke("check", path, WARMFOLD_SERVER__PORT="81")
    assert (result.exit_code, result.stderr) == (0, "")
    rows = {
        line.split()[0]: line.split(maxsplit=1)[1].strip()
        for line in result.stdout.splitlines()
        if line.partition(" ")[0].count(".") == 1
    }
    for section in TABLES.keys() - {"models", "upstreams"}:
        assert {f"{section}.{key}" for key in fields(section)} <= rows.keys()
    assert rows["server.host"].split() == ['"127.0.0.1"', "default"]
    assert rows["server.port"].split() == ["81", "env", "WARMFOLD_SERVER__PORT"]
    assert rows["server.workers"].split() == ["1", "file"]
    assert rows["models[0].match"].split() == ['"gpt-4o[ab]*"', "file"]
    assert rows["models[0].max_payback_turns"].split() == ["3", "file"]
    assert "models[0].max_passes" not in rows, "not set by the rule"
    assert rows["store.url"].split() == ['"redis://***@h"', "file"]
    assert "hidden" not in result.output


def test_check_without_a_file_shows_what_the_environment_makes_of_the_defaults() -> None:
    result = invoke("check", WARMFOLD_COMPACTION__DEBOUNCE_TURNS="5")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("No file, environment and defaults: valid\n")
    assert re.search(
        r"^compaction\.debounce_turns +5 +env WARMFOLD_COMPACTION__DEBOUNCE_TURNS$", result.stdout, re.MULTILINE
    )
    assert invoke("check", WARMFOLD_COMPACTION_DEBOUNCE_TURNS="5").exit_code == 2


def test_check_shows_the_sizes_that_follow_for_each_rule(tmp_path: Path) -> None:
    text = '[[models]]\nmatch = "gpt-4o*"\nmax_context_tokens = 128000\n[[models]]\nmatch = "x[1]"\nledger_tokens = 0\n'
    lines = invoke("check", written(tmp_path, text)).stdout.splitlines()
    [heading] = [at for at, line in enumerate(lines) if line.split()[:2] == ["model", "window"]]
    rows = [line.split() for line in lines[heading + 2 : heading + 5]]
    expected = limits(Config().compaction, Window(128_000, "config"), reasons=False)
    assert rows[0] == [
        "gpt-4o*",
        "128000",
        str(expected.soft),
        str(expected.hard),
        f"{expected.keep_recent}..{expected.tail_cap}",
        *map(str, (expected.summary, expected.ledger, expected.anchors, expected.min_region)),
    ]
    assert rows[1][:4] == ["x[1]", "32000*", "24000", "-"], "an assumed window has no hard watermark"
    assert (rows[1][6], rows[2][6]) == ("0", "2000")
    assert rows[2][0] == "*"


def test_check_takes_the_example() -> None:
    assert invoke("check", EXAMPLE).exit_code == 0


PLAIN = {"PATH": "/usr/bin:/bin", "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}


def test_check_writes_plain_text_into_a_pipe(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "proxy", "check", str(written(tmp_path, FULL))]
    done = subprocess.run(command, capture_output=True, env=PLAIN, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\x1b" not in done.stdout
    assert b'["x-session-id", "x-conversation-id", "session_id"]' in done.stdout, "not folded"
    assert [line for line in done.stdout.splitlines() if line != line.rstrip()] == []


def test_check_may_dress_up_for_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "proxy", "check", str(written(tmp_path, ""))], stdout=theirs, env=PLAIN
    ) as running:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: how Linux says that the other end is closed
            while piece := os.read(ours, 65536):
                shown += piece
    os.close(ours)
    assert running.returncode == 0
    assert b"\x1b[" in shown
    assert b"compaction.trigger_ratio" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["list"],
        ["list", "--limit", "3"],
        ["--limit", "3"],
        ["--limit", "3", "list"],
        ["--full", "list"],
        ["show", "a-b-c"],
        ["show", "--full", "a-b-c"],
        ["compact", "a-b-c"],
        ["undo", "a-b-c"],
        ["delete", "a-b-c"],
    ],
)
@pytest.mark.parametrize("before", [True, False], ids=["option first", "option last"])
def test_sessions_says_that_no_admin_listener_answers(arguments: list[str], before: bool) -> None:
    nobody = ["--admin", "http://127.0.0.1:1"]
    result = invoke(
        "sessions",
        *([*nobody, *arguments] if before else [*arguments, *nobody]),
        WARMFOLD_ADMIN_TOKEN="hidden-token",
        OPENAI_API_KEY="hidden-key",
    )
    assert (result.exit_code, result.stdout) == (1, "")
    assert "http://127.0.0.1:1" in result.stderr
    assert "hidden" not in result.stderr
