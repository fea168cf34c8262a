"""The tokenizer: nothing is lost, nothing is unbounded, sizes are like those of real tokenizers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.demo.tokenizer import tokenize

ENGLISH = (
    "The history of a long conversation is sent again with every request, so the part that has not changed is worth keeping. "
    "What the provider has computed once it need not compute again, as long as each character before it is the same."
)


@given(st.text())
def test_the_tokens_joined_are_the_text(text: str) -> None:
    assert "".join(tokenize(text)) == text


@given(st.text(min_size=1), st.integers(1, 400))
def test_a_token_is_never_empty_and_never_long(text: str, times: int) -> None:
    assert all(1 <= len(token) <= 20 for token in tokenize(text * times))


def test_a_text_too_long_to_be_remembered_is_cut_the_same_way() -> None:
    assert tokenize(ENGLISH * 2000) == tokenize(ENGLISH * 2000)
    assert tokenize(ENGLISH * 2000)[:20] == tokenize(ENGLISH)[:20]


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        pytest.param(ENGLISH, 3.5, 5.5, id="english"),
        pytest.param("缓存的前缀不需要再计算一次" * 10, 0.9, 1.1, id="chinese"),
        pytest.param("会話の履歴は毎回すべて送られる" * 10, 0.9, 1.1, id="japanese"),
        pytest.param("История разговора отправляется снова и снова " * 5, 2.0, 4.0, id="russian"),
        pytest.param("    def cached(self, tokens):\n        return 0\n" * 10, 2.5, 5.0, id="code"),
        pytest.param("x" * 1000, 4.0, 9.0, id="a run of letters"),
        pytest.param("0123456789" * 100, 2.0, 3.5, id="digits"),
    ],
)
def test_characters_per_token_are_like_those_of_real_tokenizers(text: str, least: float, most: float) -> None:
    assert least <= len(text) / len(tokenize(text)) <= most
