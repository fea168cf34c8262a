"""Who said what: texts, names of what is no text, and calls, of whatever a client sends as a message."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import said, tokens
from tests.strategies import LONE_SURROGATES, TEXTS, conversations, spelled

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param("Hello", "Hello", id="a string"),
        pytest.param("", "", id="an empty one"),
        pytest.param(None, "", id="null"),
        pytest.param([], "", id="no parts"),
        pytest.param(7, "", id="a number"),
        pytest.param({"text": "x"}, "", id="an object"),
        pytest.param([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb", id="parts"),
        pytest.param([{"type": "output_text", "text": "a"}], "a", id="a part of another type that holds text"),
        pytest.param(["x", None, 7, {"type": "text", "text": "a"}], "a", id="parts that are none"),
        pytest.param([IMAGE], "[image]", id="an image"),
        pytest.param([{"type": "input_image", "image_url": "https://x/y.png"}], "[image]", id="an image, another way"),
        pytest.param([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}], "[audio]", id="audio"),
        pytest.param([{"type": "video_url", "video_url": {"url": "x"}}], "[video]", id="a film"),
        pytest.param([{"type": "file", "file": {"filename": "plan.pdf"}}], "[file: plan.pdf]", id="a file with a name"),
        pytest.param([{"type": "file", "file": {"file_id": "file-1"}}], "[file]", id="a file without"),
        pytest.param([{"type": "file", "file": {"filename": 7}}], "[file]", id="a file whose name is none"),
        pytest.param([{"type": "file"}], "[file]", id="a file that is none"),
        pytest.param([{"type": {"a": 1}}], "[{'a': 1}]", id="a type that is none"),
        pytest.param([{}], "[part]", id="a part without a type"),
        pytest.param([{"type": "text", "text": None}], "[text]", id="a text that is none"),
        pytest.param([{"type": "text", "text": "see"}, IMAGE, IMAGE], "see\n[image]\n[image]", id="text and images"),
    ],
)
def test_text(content: object, expected: str) -> None:
    assert said.text({"role": "user", "content": content}) == expected


def test_no_content_is_no_text() -> None:
    assert said.text({"role": "user"}) == said.text({}) == ""


@pytest.mark.parametrize(("role", "expected"), [("user", "user"), ("", ""), (None, ""), (7, ""), (["user"], "")])
def test_role(role: object, expected: str) -> None:
    assert said.role({"role": role}) == expected


def _call(**function: object) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": function}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        pytest.param({}, [], id="none"),
        pytest.param({"tool_calls": None, "function_call": None}, [], id="null"),
        pytest.param({"tool_calls": {}}, [], id="no list"),
        pytest.param({"tool_calls": [None, "x", {}, {"function": None}, {"function": "x"}]}, [], id="no calls"),
        pytest.param({"tool_calls": [_call(name="read", arguments='{"a":1}')]}, [("read", '{"a":1}')], id="one"),
        pytest.param(
            {"tool_calls": [_call(name="a", arguments="1"), _call(name="b", arguments="2")]},
            [("a", "1"), ("b", "2")],
            id="two at once",
        ),
        pytest.param({"tool_calls": [_call(name="read")]}, [("read", "")], id="without arguments"),
        pytest.param({"tool_calls": [_call(arguments="{}")]}, [("", "{}")], id="without a name"),
        pytest.param({"tool_calls": [_call(name="r", arguments={"a": 1})]}, [("r", "{'a': 1}")], id="an object"),
        pytest.param(
            {"tool_calls": [{"type": "custom", "custom": {"name": "shell", "input": "ls -l"}}]},
            [("shell", "ls -l")],
            id="a custom one",
        ),
        pytest.param({"function_call": {"name": "f", "arguments": "x"}}, [("f", "x")], id="a legacy one"),
    ],
)
def test_calls(message: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert list(said.calls(message)) == expected


@pytest.mark.parametrize("element", [b"", b"{", b"7", b"null", b"[]", b'"x"', b"\xff", b"[" * 100_000, b'{"a":' * 9999])
def test_what_is_no_message(element: bytes) -> None:
    assert said.parsed(element) is None


@given(conversations(surrogates=True))
def test_whatever_a_client_sends_can_be_stored(messages: list[Any]) -> None:
    for message in messages:
        read = said.parsed(spelled(message))
        assert read is not None
        for text in (said.role(read), said.text(read), *(part for call in said.calls(read) for part in call)):
            assert text.encode().decode() == text


@pytest.mark.parametrize("half", LONE_SURROGATES)
def test_half_a_pair_leaves_a_mark(half: str) -> None:
    mark = half.encode("utf-8", "replace").decode()
    read = said.parsed(spelled({"role": half, "content": half, "function_call": {"name": half, "arguments": half}}))
    assert read is not None
    assert (said.role(read), said.text(read), list(said.calls(read))) == (mark, mark, [(mark, mark)])


@given(st.sampled_from(TEXTS) | st.text(), st.integers(1, 40), st.integers(-5, 200))
def test_start_and_end_of_a_text_within_its_room(text: str, times: int, room: int) -> None:
    text *= times
    if tokens.of_text(text) <= room:
        return
    start, end = said.ends(text, room)
    assert tokens.of_text(start) + tokens.of_text(end) <= max(0, room)
    assert text.startswith(start)
    assert text.endswith(end)
    assert len(start) + len(end) < len(text) or not text
    if room >= 20 and text.strip() and len(text) > 100 and text.isascii() and text.isprintable():
        assert start


def test_neither_ends_inside_a_word() -> None:
    """A reader would take half a value for the whole of it."""
    text = "".join(f"KEY_{n} = value-{n}/{n * 7919}.{n}; " for n in range(900))
    words = set(text.split())
    for room in range(20, 400, 3):
        start, end = said.ends(text, room)
        assert start
        assert {*start.split(), *end.split()} <= words
        start, end = said.ends("值" + text.replace(" ", "是"), room)
        assert all(word in words for word in (start + "是" + end).removeprefix("值").split("是") if word)
    assert said.ends("x" * 9000, 200)[0]  # no word


def test_most_of_the_room_is_used() -> None:
    text = "".join(f"word {n} of it, " for n in range(9000))
    for room in (20, 100, 1000, 9000):
        start, end = said.ends(text, room)
        assert 0.7 * room <= tokens.of_text(start) + tokens.of_text(end) <= room
        assert len(start) > len(end) > 0
