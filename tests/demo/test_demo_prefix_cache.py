"""The prefix cache: blocks of 16, chained, bounded, and never all of a prompt."""

from __future__ import annotations

import pytest

from proxy.demo.prefix_cache import Chain, PrefixCache


def numbered(n: int, start: int = 0) -> list[str]:
    return [f"t{i}" for i in range(start, start + n)]


@pytest.mark.parametrize(
    ("stored", "asked", "cached"),
    [
        pytest.param(numbered(15), numbered(40), 0, id="less than a block"),
        pytest.param(numbered(16), numbered(40), 16, id="one block"),
        pytest.param(numbered(40), numbered(60), 32, id="only full blocks"),
        pytest.param(numbered(32), numbered(32), 16, id="the last token is computed"),
        pytest.param(numbered(33), numbered(33), 32, id="unless it lies behind the last block"),
        pytest.param(numbered(64), numbered(20), 16, id="a shorter prompt"),
        pytest.param(numbered(64), [*numbered(20), *numbered(40, 100)], 16, id="they part in the second block"),
        pytest.param(numbered(64), ["x", *numbered(63, 1)], 0, id="the first token differs"),
        pytest.param(numbered(64), numbered(48, 16), 0, id="known blocks at another place"),
        pytest.param([], numbered(16), 0, id="nothing stored"),
    ],
)
def test_cached_tokens(stored: list[str], asked: list[str], cached: int) -> None:
    cache = PrefixCache()
    cache.store(Chain(b"me", stored))
    assert cache.cached(Chain(b"me", asked)) == cached


def test_a_chain_does_not_depend_on_the_portions_it_grew_by() -> None:
    grown = Chain(b"me")
    for start, end in ((0, 5), (5, 5), (5, 37), (37, 38), (38, 100)):
        grown.extend(numbered(end - start, start))
    assert grown.keys == Chain(b"me", numbered(100)).keys
    assert len(grown) == 100


def test_nothing_is_shared_between_scopes() -> None:
    cache = PrefixCache()
    cache.store(Chain(b"me", numbered(64)))
    assert cache.cached(Chain(b"you", numbered(64))) == 0


def test_tokens_are_told_apart_although_their_text_joins_alike() -> None:
    cache = PrefixCache()
    cache.store(Chain(b"me", ["ab", "c"] * 16))
    assert cache.cached(Chain(b"me", ["a", "bc"] * 16)) == 0


def test_the_oldest_prompt_goes_first_and_its_beginning_last() -> None:
    cache = PrefixCache(max_blocks=4)
    cache.store(Chain(b"me", numbered(48)))
    cache.store(Chain(b"me", numbered(32, 100)))
    assert len(cache) == 4
    assert cache.cached(Chain(b"me", numbered(49))) == 32
    assert cache.cached(Chain(b"me", numbered(33, 100))) == 32


def test_a_restart_forgets() -> None:
    cache = PrefixCache()
    cache.store(Chain(b"me", numbered(64)))
    cache.clear()
    assert cache.cached(Chain(b"me", numbered(64))) == 0


def test_a_lone_surrogate_is_a_token_like_any_other() -> None:
    cache = PrefixCache()
    cache.store(Chain(b"me", ["\ud800"] * 32))
    assert cache.cached(Chain(b"me", ["\ud800"] * 33)) == 32
