"""The few values that do more than hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.model import SessionId, Usage, Window


@pytest.mark.parametrize(
    ("usage", "used"),
    [
        pytest.param(Usage(), None, id="nothing known"),
        pytest.param(Usage(completion=5), None, id="only the answer"),
        pytest.param(Usage(prompt=100), 100, id="only the prompt"),
        pytest.param(Usage(prompt=100, completion=20), 120, id="both"),
        pytest.param(Usage(prompt=100, completion=20, cached=90), 120, id="cached tokens count"),
        pytest.param(Usage(prompt=100, completion=20, reasoning=15), 105, id="hidden thoughts do not stay"),
        pytest.param(Usage(prompt=100, completion=20, reasoning=30), 100, id="more thoughts than answer"),
        pytest.param(Usage(prompt=0, completion=0), 0, id="zero is known"),
    ],
)
def test_used(usage: Usage, used: int | None) -> None:
    assert usage.used == used


def test_only_an_assumed_window_is_assumed() -> None:
    assert [o for o in ("config", "upstream", "learned", "pricelist", "assumed") if Window(1, o).assumed] == ["assumed"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a-b",
        "a-b-c-d",
        "a--c",
        "-b-c",
        "a-b-",
        "a b-c-d",
        "a-b-ü",
        "a-b-c\n",
        "../x-b-c",
        "a-b-" + "c" * 33,
        "a*-b-c",
    ],
)
def test_what_has_not_the_form_of_an_id_is_none(text: str) -> None:
    assert SessionId.parse(text) is None


@given(*[st.text("abcdefghijklmnopqrstuvwxyz234567", min_size=1, max_size=16)] * 3)
def test_an_id_reads_back_what_it_shows(tenant: str, root: str, lineage: str) -> None:
    assert SessionId.parse(str(SessionId(tenant, root, lineage))) == SessionId(tenant, root, lineage)


@given(st.text())
def test_whatever_a_person_types_is_an_id_or_none(text: str) -> None:
    found = SessionId.parse(text)
    assert found is None or str(found) == text
