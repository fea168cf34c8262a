"""The documents against the code: what they link to is there, and what the code offers they name."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

import pytest

from proxy.config.translate import TABLES, fields
from proxy.metrics import Metrics

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DECISIONS = ROOT / "docs" / "decisions"
DOCUMENTS = (README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def _prose(document: Path) -> str:
    return _FENCE.sub("", document.read_text(encoding="utf-8"))


def _anchors(document: Path) -> set[str]:
    """The names under which headings can be linked to, as code forges make them."""
    headings = re.findall(r"^#+ (.+)$", _prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _records() -> list[Path]:
    return sorted(path for path in DECISIONS.glob("*.md") if path.name != "README.md")


def test_the_readme_has_two_set_up_commands_of_one_line_each() -> None:
    blocks = [text for language, text in _FENCE.findall(README.read_text(encoding="utf-8")) if language == "sh"]
    assert [block.count("\n") for block in blocks] == [1, 1]
    demo, tests = (block.strip() for block in blocks)
    assert demo.startswith("python3 -m venv ")
    assert demo.endswith("/warmfold demo")
    assert tests.startswith("python3 -m venv ")
    assert tests.endswith("/pytest -n auto")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_resolves(document: Path) -> None:
    broken = []
    for link in _LINK.findall(_prose(document)):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.is_relative_to(ROOT) or not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert broken == []


def test_no_document_names_a_file_of_the_package_that_is_not_there() -> None:
    named = {
        (document.name, path)
        for document in DOCUMENTS
        for path in re.findall(
            r"`((?:proxy|tests|benchmarks|docs)/[\w/.-]+\.\w+)`", document.read_text(encoding="utf-8")
        )
    }
    assert {(document, path) for document, path in named if not (ROOT / path).exists()} == set()


def test_a_decision_has_a_number_of_its_own_and_a_line_in_the_index() -> None:
    names = [path.name for path in _records()]
    assert [name for name in names if not re.fullmatch(r"\d{4}-[a-z0-9]+(-[a-z0-9]+)*\.md", name)] == []
    assert [number for number, times in Counter(name[:4] for name in names).items() if times > 1] == []
    indexed = [link for link in _LINK.findall((DECISIONS / "README.md").read_text(encoding="utf-8")) if link in names]
    assert sorted(indexed) == names


@pytest.mark.parametrize("record", _records(), ids=lambda path: path.stem)
def test_a_decision_says_what_else_there_was_and_what_would_reopen_it(record: Path) -> None:
    text = record.read_text(encoding="utf-8")
    assert text.startswith(f"# {record.name[:4]} ")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE)[:4] == ["Context", "Options", "Choice", "Consequences"]
    assert re.search(r"^Revisit (if|when) ", text, re.MULTILINE)


def test_every_configuration_key_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    missing = {f"{section}.{key}" for section in TABLES for key in fields(section) if f"`{key}`" not in text}
    assert missing == set()


def test_every_metric_is_documented_and_no_other() -> None:
    exposed = set(re.findall(r"^# TYPE (\S+)", Metrics().render().decode(), re.MULTILINE))
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(exposed) > 10
    assert sorted(rows) == sorted(exposed)
