"""What the tools of the demo's agent return: a made-up repository, its tests and its logs, generated the same way each time."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

_NOUNS = (
    "line",
    "lot",
    "booking",
    "voucher",
    "period",
    "account",
    "rate",
    "posting",
    "row",
    "balance",
    "journal",
    "counterpart",
)
_FIELDS = (
    "amount",
    "currency",
    "posted_on",
    "reference",
    "account_id",
    "reversed_by",
    "source_file",
    "checksum",
    "booked_at",
)
_EVENTS = (
    "batch read",
    "rows checked",
    "period closed",
    "voucher matched",
    "rate looked up",
    "file archived",
    "journal flushed",
)
_BODIES = (
    """def {name}({noun}s: Iterable[{type}], limit: int = {number}) -> list[{type}]:
    \"\"\"The {noun}s whose {field} is set, oldest first, at most `limit`.\"\"\"
    kept = [{noun} for {noun} in {noun}s if {noun}.{field} is not None]
    kept.sort(key=lambda {noun}: ({noun}.{other}, {noun}.id))
    if len(kept) > limit:
        log.warning("{name}: %d of %d {noun}s left out", len(kept) - limit, len(kept))
    return kept[:limit]
""",
    """def {name}(store: Store, {noun}: {type}) -> Decimal:
    \"\"\"Sum of {field} over everything booked against this {noun}.\"\"\"
    total = Decimal(0)
    for booked in store.select("{noun}", {noun}.id, after={number}):
        if booked.{other} == {noun}.{other}:
            total += booked.{field}
        elif booked.{other} is None:
            raise UnknownReference({noun}.id, booked.id)
    return total.quantize(CENT)
""",
    """class {type}Reader:
    \"\"\"Reads {noun}s from a file, {number} at a time, and remembers where it stopped.\"\"\"

    def __init__(self, path: Path, encoding: str = "utf-8-sig") -> None:
        self._path, self._encoding = path, encoding
        self._offset = 0

    def {name}(self) -> Iterator[{type}]:
        with self._path.open(encoding=self._encoding, newline="") as file:
            file.seek(self._offset)
            for row in csv.DictReader(file, delimiter=";"):
                yield {type}(row["{field}"], row["{other}"].strip() or None)
            self._offset = file.tell()
""",
    """def {name}(old: {type}, new: {type}) -> {type}:
    \"\"\"The newer {noun}, with the {field} of the older one where the newer one has none.\"\"\"
    if old.id != new.id:
        raise ValueError(f"{{old.id}} and {{new.id}} are two {noun}s")
    if new.{field} is None or new.{other} < old.{other}:
        return replace(new, {field}=old.{field})
    return new
""",
)
_FAILURE = """____________________________ {test} ____________________________

store = <tally.ledger.Store object at 0x7f1c{number:04x}a0>

    def {test}(store):
        lines = [line(reference="R-{number}", {field}=Decimal("-{amount}")), line({field}=Decimal("{other_amount}"))]
        report = export(lines, store, period="2031Q2")
>       assert [row.{field} for row in report.rows] == [Decimal("-{amount}"), Decimal("{other_amount}")]
E       AssertionError: assert [Decimal('{other_amount}')] == [Decimal('-{amount}'), Decimal('{other_amount}')]
E         Right contains one more item: Decimal('{other_amount}')
E         Use -v to get more diff

{path}:{line}: AssertionError
----------------------------- Captured log call -----------------------------
WARNING  tally.export:export.py:{line} left out R-{number}: {field} -{amount}
"""


def source(module: str, functions: Sequence[str], constants: Mapping[str, object] | None = None) -> str:
    """A Python file: imports, half of the functions, constants, the other half."""
    rng = random.Random(f"source {module}")
    bodies = [_body(name, rng) for name in functions]
    named = "".join(f"{key} = {value!r}\n" for key, value in (constants or {}).items())
    middle = len(bodies) // 2
    opening = (
        f'"""{module}: part of tally, the ledger of the back office."""\n\nfrom __future__ import annotations\n\nimport csv\nimport logging\n'
        "from collections.abc import Iterable, Iterator\nfrom dataclasses import replace\nfrom decimal import Decimal\nfrom pathlib import Path\n"
        f"\nfrom tally.ledger import CENT, Store, UnknownReference\n\nlog = logging.getLogger(__name__)\n"
    )
    return "\n\n".join([opening, *bodies[:middle], *([named] if named else []), *bodies[middle:]])


def _body(name: str, rng: random.Random) -> str:
    noun = rng.choice(_NOUNS)
    field, other = rng.sample(_FIELDS, 2)
    return rng.choice(_BODIES).format(
        name=name, noun=noun, type=noun.capitalize(), field=field, other=other, number=rng.randrange(10, 900)
    )


def listing(path: str, names: Sequence[str]) -> str:
    """What list_dir says: size, date and name."""
    rng = random.Random(f"listing {path}")
    lines = [f"{path}: {len(names)} entries"]
    for name in names:
        size = 0 if name.endswith("/") else rng.randrange(180, 48_000)
        lines.append(
            f"{size:>8}  2031-{rng.randrange(1, 7):02}-{rng.randrange(1, 29):02} {rng.randrange(24):02}:{rng.randrange(60):02}  {name}"
        )
    return "\n".join(lines)


def hits(pattern: str, line: str, paths: Sequence[str], count: int) -> str:
    """What search says: path, line number and line; `line` is a template with {noun}, {field} and {number}."""
    rng = random.Random(f"hits {pattern}")
    lines = [f"{count} lines contain {pattern!r}"]
    per_file = -(-count // len(paths))
    for path in paths:
        for at in sorted(rng.sample(range(12, 480), min(per_file, count + 1 - len(lines)))):
            found = line.format(noun=rng.choice(_NOUNS), field=rng.choice(_FIELDS), number=rng.randrange(100))
            lines.append(f"{path}:{at}:    {found}")
    return "\n".join(lines)


def pytest_output(files: Sequence[str], failing: Sequence[str] = (), note: str = "") -> str:
    """What run_tests says: dots by file, each failure with its assertion, the summary."""
    rng = random.Random(f"tests {files} {failing}")
    lines = [
        "============================= test session starts =============================",
        "platform linux -- Python 3.11.7, pytest-8.4.2",
    ]
    total = 0
    for i, file in enumerate(files):
        count = rng.randrange(9, 38)
        dots = ["."] * count
        for test in failing:
            if test.startswith(f"{file}::"):
                dots[rng.randrange(count)] = "F"
        total += count
        lines.append(f"{file} {''.join(dots)} [{100 * (i + 1) // len(files):>3}%]")
    if note:
        lines.append(note)
    for test in failing:
        path, _, name = test.partition("::")
        amounts = {
            "amount": f"{rng.randrange(10, 900)}.{rng.randrange(10, 99)}",
            "other_amount": f"{rng.randrange(10, 900)}.00",
        }
        lines.append(
            _FAILURE.format(
                test=name,
                path=path,
                field=rng.choice(_FIELDS),
                number=rng.randrange(999),
                line=rng.randrange(20, 300),
                **amounts,
            )
        )
    lines.append("============================ slowest 10 durations ==============================")
    for seconds in sorted((rng.random() for _ in range(10)), reverse=True):
        lines.append(f"{seconds:.2f}s call     {rng.choice(files)}::test_{rng.choice(_NOUNS)}_{rng.choice(_FIELDS)}")
    lines += [f"FAILED {test} - AssertionError" for test in failing]
    failed = f"{len(failing)} failed, " if failing else ""
    lines.append(
        f"===================== {failed}{total - len(failing)} passed in {rng.randrange(2, 9)}.{rng.randrange(10, 99)}s ====================="
    )
    return "\n".join(lines)


def log(name: str, count: int, note: str = "") -> str:
    """The tail of a log file; `note` stands in the middle of it."""
    rng = random.Random(f"log {name}")
    lines = []
    second = 4 * 3600
    for i in range(count):
        second += rng.randrange(1, 40)
        stamp = f"2031-06-28 {second // 3600:02}:{second // 60 % 60:02}:{second % 60:02},{rng.randrange(1000):03}"
        event = rng.choice(_EVENTS)
        lines.append(
            f"{stamp} INFO  tally.{name} {event} id={rng.randrange(10_000, 99_999)} rows={rng.randrange(2500)} elapsed={rng.random():.3f}s"
        )
        if note and i == count // 2:
            lines.append(f"{stamp} ERROR tally.{name} {note}")
    return "\n".join(lines)


def table(name: str, columns: Sequence[str], count: int) -> str:
    """Rows of a CSV file with semicolons."""
    rng = random.Random(f"table {name}")
    rows = [";".join(columns)]
    for i in range(count):
        cells = [f"R-{40_000 + 7 * i}", *(f"{rng.randrange(-900, 9000)}.{rng.randrange(100):02}" for _ in columns[1:])]
        rows.append(";".join(cells))
    return "\n".join(rows)


def diff(path: str, old: str, new: str) -> str:
    """What edit_file says: the change with the lines around it."""
    rng = random.Random(f"diff {path} {old}")
    around = [
        f"     {rng.choice(_NOUNS)}.{rng.choice(_FIELDS)} = {rng.choice(_NOUNS)}_{rng.choice(_FIELDS)}({rng.randrange(100)})"
        for _ in range(6)
    ]
    at = rng.randrange(20, 200)
    changed = [f"-    {old}", f"+    {new}"]
    return "\n".join([f"--- {path}", f"+++ {path}", f"@@ -{at},7 +{at},7 @@", *around[:3], *changed, *around[3:]])
