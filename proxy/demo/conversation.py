"""A long day of a coding agent: the conversation that the demo plays, some 40 requests and 35,000 tokens.

The user states facts and rules early on and asks for them at the very end. Each fact stands in one place only, so who still knows it
has kept it. Ids of tool calls start again with every user message, as in real logs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.demo.template import Message
from proxy.demo.workspace import diff, hits, listing, log, pytest_output, source, table


@dataclass(frozen=True, slots=True)
class Step:
    """One turn: what the client adds to its history before the request, and the reply that the provider shall give."""

    incoming: tuple[Message, ...]
    reply: Message


@dataclass(frozen=True, slots=True)
class Question:
    """Asked at the end: a user message, and what an answer must contain to be right."""

    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """A recorded conversation and the questions that show what is left of it."""

    system: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    steps: tuple[Step, ...]
    questions: tuple[Question, ...]

    def requests(self) -> Iterator[tuple[list[Message], Message]]:
        """For each turn the whole history that a client sends, and the reply to it, which the next history holds."""
        history = list(self.system)
        for step in self.steps:
            history += step.incoming
            yield list(history), step.reply
            history.append(step.reply)

    def history(self) -> list[Message]:
        """Everything up to and including the last reply."""
        return [*self.system, *(m for step in self.steps for m in (*step.incoming, step.reply))]


FACTS = {
    "TICKET": "TAL-4417",
    "REPORT_PATH": "var/reports/refunds-2031q2.csv",
    "RELEASE_DATE": "2031-07-14",
    "BATCH_ROWS": "2500",
    "CHECKSUM_SALT": "b7f3-91ac-0d52",
    "LEDGER_EPOCH": "2019-04-01",
    "FIRST_BAD_BATCH": "48213",
    "BAD_COMMIT": "9e41c07",
    "SIGN_RULE": "keep_negative_with_reference",
    "ROUNDING": "half_even",
    "FX_SOURCE": "ecb-fixing-1415",
    "REVIEWER": "ines.okafor",
}
"""What the questions ask for."""

_SYSTEM = """You are a coding agent in the repository /srv/tally, the ledger of a back office. You work with the tools you are given and
nothing else. Read before you edit, run the tests after each edit, and make the smallest change that does the job. Say in one or two
sentences what you found or did; leave out what the user can see. If something is unclear, choose the careful way and say so."""


def demo_conversation() -> Conversation:
    """The same conversation each time."""
    script = _Script()
    _find_the_fault(script)
    _fix_it(script)
    _totals_by_currency(script)
    _speed(script)
    _archive(script)
    _clean_up(script)
    questions = [Question(f"What is the value of {key}?", f"{key} = {value}") for key, value in FACTS.items()]
    return Conversation(({"role": "system", "content": _SYSTEM},), _tools(), tuple(script.steps), tuple(questions))


@dataclass(slots=True)
class _Script:
    """Puts steps together: what was said or returned last waits for the next reply."""

    steps: list[Step] = field(default_factory=list)
    _waiting: tuple[Message, ...] = ()
    _ids: int = 0

    def user(self, text: str) -> None:
        self._waiting += ({"role": "user", "content": " ".join(text.split())},)
        self._ids = 0

    def says(self, text: str) -> None:
        self._step({"role": "assistant", "content": " ".join(text.split())})

    def calls(self, *calls: tuple[str, dict[str, Any], str], text: str | None = None) -> None:
        """The assistant calls tools, several at a time if several are given; each call with its result."""
        made, results = [], []
        for name, arguments, result in calls:
            self._ids += 1
            id = f"call_{self._ids}"
            made.append({"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}})
            results.append({"role": "tool", "tool_call_id": id, "content": result})
        self._step({"role": "assistant", "content": text, "tool_calls": made})
        self._waiting = tuple(results)

    def _step(self, reply: Message) -> None:
        self.steps.append(Step(self._waiting, reply))
        self._waiting = ()


def _read(
    path: str, functions: Sequence[str], constants: dict[str, object] | None = None
) -> tuple[str, dict[str, Any], str]:
    return "read_file", {"path": path}, source(path.rpartition("/")[2].removesuffix(".py"), functions, constants)


def _edit(path: str, old: str, new: str) -> tuple[str, dict[str, Any], str]:
    return "edit_file", {"path": path, "old": old, "new": new}, diff(path, old, new)


def _read_long(path: str, functions: Sequence[str]) -> tuple[str, dict[str, Any], str]:
    return _read(path, [*functions, "_key_of", "_checked", "_as_row", "_sorted_by"])


def _tests(
    target: str, files: Sequence[str], failing: Sequence[str] = (), note: str = ""
) -> tuple[str, dict[str, Any], str]:
    return "run_tests", {"target": target}, pytest_output(files, failing, note)


_TESTS = (
    "tests/test_cli.py",
    "tests/test_export.py",
    "tests/test_ledger.py",
    "tests/test_refunds.py",
    "tests/test_schema.py",
)


def _find_the_fault(script: _Script) -> None:
    script.user(
        """The quarterly export drops refunds since some time this spring: finance counts 312 of them and the file has none. Find out why and
        fix it. Ticket: TICKET = TAL-4417. You must never touch prod.db, not even to read it; work on the copy under var/scratch only. The
        report has to be CSV with semicolons, never commas, and goes to REPORT_PATH = var/reports/refunds-2031q2.csv. We ship on
        RELEASE_DATE = 2031-07-14."""
    )
    script.calls(
        (
            "list_dir",
            {"path": "src/tally"},
            listing(
                "src/tally",
                ["__init__.py", "archive.py", "checks.py", "cli.py", "currency.py", "export.py", "importer.py", "ledger.py", "refunds.py",
                 "report.py", "rounding.py", "schema.py", "settings.py", "sql/", "templates/"],
            ),
        ),
        ("list_dir", {"path": "tests"}, listing("tests", ["conftest.py", *(path.removeprefix("tests/") for path in _TESTS), "data/"])),
    )  # fmt: skip
    script.calls(
        _read("src/tally/export.py", ["select_lines", "left_out", "write_rows", "period_of", "merge_lines"]),
        _read(
            "src/tally/settings.py",
            ["read_settings", "override", "known_keys", "paths"],
            {"BATCH_ROWS": 2500, "CHECKSUM_SALT": FACTS["CHECKSUM_SALT"], "LEDGER_EPOCH": FACTS["LEDGER_EPOCH"]},
        ),
        text="The export and its settings first.",
    )
    script.calls(
        (
            "search",
            {"pattern": "amount <", "path": "src"},
            hits(
                "amount <",
                "if {noun}.amount < {number}:",
                [f"src/tally/{m}.py" for m in ("checks", "export", "refunds", "report")],
                22,
            ),
        )
    )
    script.calls(
        _tests(
            "tests",
            _TESTS,
            [
                "tests/test_refunds.py::test_negative_lines_are_exported",
                "tests/test_export.py::test_all_lines_of_a_period",
            ],
        )
    )
    script.calls(
        (
            "read_file",
            {"path": "var/log/importer.log", "tail": 30},
            log(
                "importer",
                26,
                "batch refused: FIRST_BAD_BATCH = 48213, 14 negative lines, rule introduced with BAD_COMMIT = 9e41c07",
            ),
        )
    )
    script.says(
        """Found it: select_lines filters on amount > 0, which came in as a guard against typing errors and throws every refund away. I would
        rather treat a negative amount as valid where it carries a reference to the original voucher. I note this decision as
        SIGN_RULE = keep_negative_with_reference."""
    )


def _fix_it(script: _Script) -> None:
    script.user(
        """Yes, do it that way. Two more things to remember for everything that follows: amounts are rounded with ROUNDING = half_even, and
        rates come from FX_SOURCE = ecb-fixing-1415 only. REVIEWER = ines.okafor will look at it; do not push anything before that."""
    )
    script.calls(
        _read_long(
            "src/tally/refunds.py",
            ["match_refund", "original_of", "refund_total", "open_refunds", "split_refund", "note_refund"],
        )
    )
    script.calls(
        _edit("src/tally/export.py", "if line.amount > 0:", "if line.amount > 0 or line.reference is not None:"),
        _edit("src/tally/refunds.py", "abs(line.amount)", "line.amount"),
    )
    script.calls(
        _tests(
            "tests/test_export.py tests/test_refunds.py",
            _TESTS[1::2],
            ["tests/test_refunds.py::test_a_refund_without_reference"],
        )
    )
    script.calls(
        _read_long(
            "tests/test_refunds.py",
            ["test_match", "test_original", "test_total", "test_split", "test_note", "test_open"],
        )
    )
    script.calls(
        _edit(
            "src/tally/refunds.py", "return original_of(line)", "return original_of(line) if line.reference else None"
        )
    )
    script.calls(_tests("tests", _TESTS))
    script.says(
        "Refunds with a reference are exported, those without are reported in the log as before. All tests pass."
    )


def _totals_by_currency(script: _Script) -> None:
    script.user(
        """Good. Finance has a new wish: below the rows they want totals by currency, and always the original currency beside the euro amount.
        Look at how currency.py and report.py do it today before you decide where that belongs."""
    )
    script.calls(
        _read_long("src/tally/currency.py", ["rate_on", "known_currencies", "convert", "cached_rate", "missing_rates"])
    )
    script.calls(
        _read("src/tally/report.py", ["render", "footer", "header", "group_rows"]),
        _read("src/tally/rounding.py", ["round_amount", "round_total", "spread_cents"]),
    )
    script.calls(
        (
            "search",
            {"pattern": "convert(", "path": "src"},
            hits(
                "convert(",
                "{noun}_euro = convert({noun}.{field}, on=day[{number}])",
                [f"src/tally/{m}.py" for m in ("archive", "currency", "ledger", "report")],
                18,
            ),
        )
    )
    script.calls(
        _edit("src/tally/report.py", "def footer(rows):", "def footer(rows, totals):"),
        text="The totals belong in the footer of the report.",
    )
    script.calls(
        _tests(
            "tests/test_export.py",
            _TESTS[1:3],
            ["tests/test_export.py::test_footer_has_one_total", "tests/test_export.py::test_empty_period"],
        )
    )
    script.calls(
        _edit("src/tally/report.py", "total = sum(rows)", "totals = by_currency(rows)"),
        _edit("tests/test_export.py", "one_total", "a_total_for_each_currency"),
    )
    script.calls(_tests("tests", _TESTS))
    script.calls(
        (
            "read_file",
            {"path": "var/scratch/report-preview.csv"},
            table("preview", ["voucher", "original", "euro", "fee", "balance"], 34),
        )
    )
    script.says(
        "The footer has one total for each currency now, the original amount stands beside the euro amount, and the preview looks right."
    )


def _speed(script: _Script) -> None:
    script.user(
        """The export of the whole year takes nine minutes on my machine. Please see what is slow, but do not change the format of the file and do
        not add a dependency for it."""
    )
    script.calls(("read_file", {"path": "var/log/export.log", "tail": 40}, log("export", 34)))
    script.calls(
        _read_long("src/tally/ledger.py", ["select", "book", "reverse", "balance_of", "counterparts", "journal"])
    )
    script.calls(
        (
            "search",
            {"pattern": "store.select", "path": "src"},
            hits(
                "store.select",
                'for {noun} in store.select("{noun}", {noun}.{field}, after={number}):',
                [f"src/tally/{m}.py" for m in ("export", "ledger", "refunds", "report")],
                24,
            ),
        )
    )
    script.calls(
        _edit("src/tally/ledger.py", "for id in ids: yield self.select(id)", "yield from self.select_many(ids)"),
        _edit("src/tally/export.py", "store.select(", "store.select_many("),
        text="One query for each line is what costs the time; one for each batch will do.",
    )
    script.calls(_tests("tests", _TESTS, ["tests/test_ledger.py::test_order_of_lines"]))
    script.calls(_edit("src/tally/ledger.py", "order by id", "order by posted_on, id"))
    script.calls(_tests("tests", _TESTS))
    script.calls(("read_file", {"path": "var/log/export.log", "tail": 40}, log("export again", 36)))
    script.says(
        "The whole year takes forty seconds now. Lines come in the old order, and the file is the same byte for byte."
    )


def _archive(script: _Script) -> None:
    script.user(
        "Next: old periods should go to the archive after the export. See what archive.py can do, and what the schema says about closed periods."
    )
    script.calls(
        _read("src/tally/archive.py", ["pack", "unpack", "verify", "list_archives"]),
        _read("src/tally/schema.py", ["tables", "migrate", "version_of"]),
    )
    script.calls(
        (
            "list_dir",
            {"path": "var/archive"},
            listing("var/archive", [f"{year}Q{q}.tar.zst" for year in range(2022, 2031) for q in range(1, 5)]),
        )
    )
    script.calls(
        _edit("src/tally/archive.py", "def pack(period):", "def pack(period, closed_only=True):"),
        _edit("src/tally/cli.py", "export(", "export_and_archive("),
    )
    script.calls(
        _tests(
            "tests",
            _TESTS,
            ["tests/test_cli.py::test_export_leaves_open_periods", "tests/test_schema.py::test_closed_periods"],
        )
    )
    script.calls(
        _read_long(
            "tests/test_cli.py", ["test_help", "test_export", "test_period", "test_dry_run", "test_unknown_period"]
        )
    )
    script.calls(_edit("src/tally/cli.py", "period.end < today", "period.closed_on is not None"))
    script.calls(_tests("tests", _TESTS))
    script.says("Closed periods are packed after the export and open ones stay; --dry-run lists what would be packed.")


def _clean_up(script: _Script) -> None:
    script.user(
        "Almost there. Check the command line once more, look over the checks module for anything that still assumes positive amounts, and sum up."
    )
    script.calls(
        _read_long(
            "src/tally/cli.py",
            ["main", "export_command", "archive_command", "import_command", "parse_period", "exit_code"],
        )
    )
    script.calls(
        _read_long(
            "src/tally/checks.py", ["check_signs", "check_sums", "check_periods", "check_references", "check_rates"]
        )
    )
    script.calls(
        _edit("src/tally/checks.py", "assert line.amount > 0", "assert line.amount != 0"),
        _edit("src/tally/cli.py", "help='export'", "help='export and archive'"),
    )
    script.calls(_tests("tests", _TESTS))
    script.says("Nothing assumes positive amounts any more, the command line says what it does, and all tests pass.")


def _tools() -> tuple[dict[str, Any], ...]:
    path = {"type": "string", "description": "Path relative to the root of the repository."}
    return (
        _tool(
            "read_file",
            "Read a text file, whole or from its end.",
            path=path,
            tail={"type": "integer", "description": "Only the last lines."},
        ),
        _tool("list_dir", "List a directory with sizes and dates.", path=path),
        _tool(
            "search",
            "Search files for a text and show the lines found.",
            pattern={"type": "string", "description": "The text."},
            path=path,
        ),
        _tool(
            "run_tests",
            "Run the tests and show what failed.",
            target={"type": "string", "description": "Files or directories, separated by spaces."},
        ),
        _tool(
            "edit_file",
            "Replace a text in a file wherever it occurs.",
            path=path,
            old={"type": "string", "description": "The text to replace."},
            new={"type": "string", "description": "The text to put there."},
        ),
    )


def _tool(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    required = [key for key in properties if key != "tail"]
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
