"""Exact identifiers that a summary lost come back; what is none, or stands in the summary, does not; and no input holds the loop up."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import anchors, last_resort, ledger, tokens
from tests.core.build import elements
from tests.strategies import LONE_SURROGATES, TEXTS, conversations, spelled


def user(text: object) -> dict[str, Any]:
    return {"role": "user", "content": text}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "a", "content": text}


def call(**arguments: object) -> dict[str, Any]:
    function = {"name": "read", "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": function}]}


def _anchors(
    messages: Sequence[Any], present: str = "", earlier: Sequence[str] = (), budget: int = 500
) -> tuple[str, ...]:
    return anchors.anchors(elements(messages), present, earlier, budget)


IDENTIFIERS = [
    "src/app/main.py",
    "/var/log/nginx/error.log",
    "./scripts/build.sh",
    "~/.config/app.toml".removeprefix("~"),
    r"C:\Users\ana\plan.xlsx",
    "https://example.com/a/b?c=d#e",
    "ana@example.com",
    "README.md",
    "3f2504e0-4f89-11d3-9a0c-0305e82c3301",
    "3f2504e",
    "MAX_RETRIES",
    "ABC-1234",
    "user_7557",
    "WUNA5K",
    "HAT228",
    "2026-11-30",
    "2026-11-30T12:30:05",
    "192.168.0.17:8080",
    "v1.22.3-rc.1",
    "$1,250.50",
    "€99",
    "48213",
    "3.5 GB",
    "250 ms",
    "42%",
    "8 tokens",
]


@pytest.mark.parametrize("identifier", IDENTIFIERS)
def test_what_the_user_stated_comes_back(identifier: str) -> None:
    for text in (
        identifier,
        f"Look at {identifier}, please.",
        f"({identifier})",
        f"看{identifier}文件",
        f"it is {identifier}.",
    ):
        assert _anchors([user(text)]) == (identifier,), text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("call it `my thing` from now on", ("my thing",), id="in backticks"),
        pytest.param('the button says "Send it now"', ("Send it now",), id="in quotes"),
        pytest.param("the button says “Send it now”", ("Send it now",), id="in typographic quotes"),
        pytest.param("书名是「红楼梦的故事」。", ("红楼梦的故事",), id="in corner brackets"),
        pytest.param("书名是『红楼梦的故事』。", ("红楼梦的故事",), id="in double corner brackets"),
        pytest.param("预算是 300元，", ("300元",), id="yuan"),
        pytest.param("会议有25人参加", ("25人",), id="people"),
        pytest.param("予算は30万円です", ("30万円",), id="yen"),
        pytest.param("全部で12ページ。", ("12ページ",), id="pages"),
        pytest.param("请修改src/app.py和docs/plan.md，谢谢", ("src/app.py", "docs/plan.md"), id="among Chinese"),
        pytest.param("とても長い文章" * 40 + "src/app.py" + "とても長い文章" * 40, ("src/app.py",), id="deep in Japanese"),
        pytest.param("it is 7 o'clock, 12 of us, and all is well-known", (), id="plain words"),
        pytest.param("", (), id="nothing"),
    ],
)  # fmt: skip
def test_exact_values_in_any_script(text: str, expected: tuple[str, ...]) -> None:
    assert _anchors([user(text)]) == expected


def test_what_others_said_comes_back_where_it_recurs() -> None:
    once = [call(path="src/once.py"), result("3f2504e0aa and WUNA5K are new")]
    assert _anchors(once) == ()
    again = [*once, result("see src/once.py"), {"role": "assistant", "content": "WUNA5K it is."}]
    assert set(_anchors(again)) == {"src/once.py", "WUNA5K"}


def test_keys_of_json_are_no_values() -> None:
    rows = json.dumps([{"status": "on hold", "id": n, "user_name": "Silva"} for n in range(9)])
    assert set(_anchors([call(path="a/b.py", encoding="utf-8"), result(rows), call(path="a/b.py"), result(rows)])) == {
        "a/b.py",
        "on hold",
        "Silva",
    }


def test_the_users_come_first_then_what_recurs_most_and_latest_and_bare_numbers_last() -> None:
    messages = [
        user("Start with plan/a.md on port 8080."),
        *[result("10001 10002")] * 9,
        *[result("twice/b.py")] * 2,
        *[result("often/c.py often/c.py")] * 3,
        *[result("late/d.py")] * 2,
        result("once/f.py once/f.py once/f.py"),
        user("Then plan/e.md."),
    ]
    assert _anchors(messages) == (
        *("plan/e.md", "plan/a.md", "8080"),
        *("often/c.py", "late/d.py", "twice/b.py"),
        *("10001", "10002"),
    )


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        pytest.param("nothing of it", ("src/a.py", "48213"), id="the summary lacks both"),
        pytest.param("It changed src/a.py.", ("48213",), id="it has one"),
        pytest.param("src/a.py, 48213", (), id="it has both"),
        pytest.param("src/a.py and 148213", ("48213",), id="a longer number is another one"),
        pytest.param("xsrc/a.py and src/a.pyc", ("src/a.py", "48213"), id="a longer name is another one"),
        pytest.param("xsrc/a.py, then src/a.py", ("48213",), id="every place counts"),
        pytest.param("修改src/a.py，48213元", (), id="among Chinese"),
    ],
)
def test_only_what_the_summary_lacks(present: str, expected: tuple[str, ...]) -> None:
    assert _anchors([user("See src/a.py and 48213.")], present) == expected


def test_what_an_anchor_before_it_holds_is_not_said_twice() -> None:
    messages = [user("See a.py and ab.py."), user("I mean src/ab.py.")]
    assert _anchors(messages) == ("src/ab.py", "a.py")


def test_anchors_are_carried_forward_over_generations() -> None:
    found = _anchors([user("The order is WUNA5K, the file src/a.py.")])
    assert found == ("WUNA5K", "src/a.py")
    for generation in range(5):
        talk = [user(f"And how is the weather on day {generation}?"), {"role": "assistant", "content": "Fine."}]
        found = _anchors(talk, "The weather was fine.", found)
    assert found == ("WUNA5K", "src/a.py")
    assert _anchors([], "The order WUNA5K was paid.", found) == ("src/a.py",)  # the summary has it by now
    assert _anchors([user("Now src/new.py.")], "", found)[0] == "src/new.py"
    assert _anchors([], "", found) == found


@pytest.mark.parametrize("budget", [0, -1, 1, 2, 5, 20, 100, 500])
def test_they_stay_within_their_budget(budget: int) -> None:
    messages = [user(" ".join(f"src/module{n}/file{n}.py" for n in range(400)))]
    found = _anchors(messages, budget=budget)
    assert sum(tokens.of_text(anchor) + 1 for anchor in found) <= max(0, budget)
    assert (found == ()) is (budget < 10)
    if budget >= 20:
        assert sum(tokens.of_text(anchor) + 1 for anchor in found) > budget - 15


def test_a_short_one_takes_the_room_that_a_long_one_has_not() -> None:
    long = "https://example.com/" + "/".join(f"part{n}" for n in range(12))
    assert _anchors([user(f"{long} or WUNA5K")], budget=12) == ("WUNA5K",)


@given(
    conversations(max_steps=8, surrogates=True),
    st.sampled_from(TEXTS) | st.text(),
    st.lists(st.sampled_from(IDENTIFIERS), max_size=4),
    st.integers(0, 60),
)
def test_any_conversation(messages: list[Any], present: str, earlier: list[str], budget: int) -> None:
    found = _anchors(messages, present, earlier, budget)
    assert len(set(found)) == len(found)
    assert sum(tokens.of_text(anchor) + 1 for anchor in found) <= budget
    source = json.dumps(messages, ensure_ascii=False) + " ".join(earlier)
    for anchor in found:
        assert anchor.encode().decode() == anchor
        assert len(anchor) > 2
        assert not re.search(rf"(?<![A-Za-z0-9]){re.escape(anchor)}(?![A-Za-z0-9])", present)
        assert anchor in source or "\\" in source or "?" in anchor


def test_what_cannot_be_read_is_passed_over() -> None:
    assert anchors.anchors((b"{", b"7", b"[" * 100_000, spelled(user("src/a.py"))), "", (), 100) == ("src/a.py",)
    for text in LONE_SURROGATES:
        (quoted,) = anchors.anchors((spelled(call(what=f'say "so {text}"')),) * 2, "", (), 100)
        assert quoted == "so " + text.encode("utf-8", "replace").decode()
        assert anchors.anchors((spelled(user(f"src/{text}/a.py src/b.py")),), "", (), 100)[-1].encode()


# A megabyte of anything.

UNITS = (
    *("a", "a.b", "1,", "1.", "/", "a/", "@", "a@", "-", "a-1", "_A", "A_", "A1", "0a", "v1.", "#1-", "$1,", "0.0.0.0", "12:", "a:"),
    *(" ", "\n", "\t\n", '"', '"a ', '"a":', "`", "`a", "“", "「", "「a", "\\", "C:\\", "https://", "https://a", "[", "{", "<", "< /"),
    *("never .", "never x", "leave ", "leave x", "ne ", "ne x", "write a ", "i would ", "use\n", "。", "不要", "こと", "é", "\u200b", "😀"),
    *("1 ", "1 %", "1元", "<checkpoint_", "a\u2028"),
)  # fmt: skip
MEGABYTE = 1_000_000
SAFETY_S = 20


@contextmanager
def _safety_net() -> Iterator[None]:
    """Ends what would take for ever. No time is asserted: a tenth of a second is usual."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"still at it after {SAFETY_S} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SAFETY_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("unit", UNITS)
def test_a_megabyte_of_anything_is_read_in_one_go(unit: str) -> None:
    text = (unit * (MEGABYTE // len(unit) + 1))[:MEGABYTE]
    covered = (spelled(user(text)), spelled(call(text=text)), spelled(result(text)), spelled(user(text + "!")))
    with _safety_net():
        assert sum(tokens.of_text(a) + 1 for a in anchors.anchors(covered, text, (), 500)) <= 500
        assert sum(tokens.of_text(e.text) for e in ledger.ledger(covered, 0, (), 2000)) <= 2000
        assert tokens.of_text(last_resort.summary(covered, text, 2000).text) <= 2000
        assert "<checkpoint_" not in ledger.broken(text) or unit == "<checkpoint_"


class _Spy:
    """A pattern that remembers how long the texts were that it was tried on."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self.lengths: list[int] = []

    def finditer(self, text: str) -> Iterator[re.Match[str]]:
        self.lengths.append(len(text))
        return self._pattern.finditer(text)


def test_words_are_scanned_one_by_one_and_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps are bounded whatever comes: so many characters of a message, in words of at most 120, and so many of a region."""
    word, phrase = _Spy(anchors._WORD), _Spy(anchors._PHRASE)
    monkeypatch.setattr(anchors, "_WORD", word)
    monkeypatch.setattr(anchors, "_PHRASE", phrase)
    text = "a-1/" * 200_000 + " " + "b-2/c " * 100_000
    assert _anchors([user(text), user("c-3 " + "-1" * 70 + " " + "d4" * 60)]) == ("c-3",)
    assert max(phrase.lengths) == anchors._SCAN_CHARS
    assert max(word.lengths) == 120
    assert sum(word.lengths) <= 2 * anchors._SCAN_CHARS
    phrase.lengths.clear()
    last = user("WUNA5K")
    assert _anchors([*[user(text)] * 100, last]) == ("WUNA5K",)
    assert sum(phrase.lengths) <= anchors._REGION_CHARS + anchors._SCAN_CHARS
    assert len(phrase.lengths) < 100


def test_candidates_are_bounded() -> None:
    many = user(" ".join(f"id-{n}" for n in range(10_000, 20_000)))
    found = _anchors([many], " ".join(f"id-{n}" for n in range(10_000, 11_900)), budget=100_000)
    assert len(found) <= anchors._MAX_CANDIDATES
