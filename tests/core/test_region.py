"""A cut never parts a call from its result, never stands where a checkpoint cannot, and leaves a tail of the right size."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import region
from proxy.core.model import Because, Facts
from proxy.core.region import Region
from tests.core.build import CONVERSATIONS, calls_and_results, elements, facts_of, is_whole, limits, recorded
from tests.strategies import conversations


@pytest.mark.parametrize(
    ("notation", "expected"),
    [
        pytest.param("", (), id="nothing"),
        pytest.param("u", (), id="one message"),
        pytest.param("u a u a", (1, 2, 3), id="plain talk"),
        pytest.param("u u u", (1, 2), id="users in a row"),
        pytest.param("a u a", (1, 2), id="an assistant first"),
        pytest.param("u a:x t:x a u", (1, 3, 4), id="a call and its result"),
        pytest.param("u a:x,y t:x t:y u", (1, 4), id="parallel calls"),
        pytest.param("u a:x,y t:y t:x u", (1, 4), id="results in another order"),
        pytest.param("u a:x,y t:x u t:y a", (1, 5), id="a user message between results"),
        pytest.param("u a:a1,a2 t:a1 u a:b1 t:a2 t:b1", (1,), id="late results up to the end"),
        pytest.param("u a:a1,a2 t:a1 u a:b1 t:a2 t:b1 a", (1, 7), id="late results"),
        pytest.param("u a:x t:x a:x t:x a:x t:x", (1, 3, 5), id="the same id again and again"),
        pytest.param("u a:x a:x t:x t:x u", (1, 5), id="the same id, results behind both"),
        pytest.param("u a:x,x t:x t:x u", (1, 4), id="the same id twice in one message"),
        pytest.param("u a:x u a u a", (1, 2, 3, 4, 5), id="a call that nobody answered"),
        pytest.param("u a:x u a:x t:x u", (1, 2, 3, 5), id="an unanswered call, its id used again"),
        pytest.param("u a:x t:x u t:x a", (1, 5), id="a result sent twice"),
        pytest.param("u t:x u a", (2, 3), id="a result without a call"),
        pytest.param("u l:f f:f u", (1, 3), id="legacy call"),
        pytest.param("u l:f a:f t:f f:f u", (1, 5), id="a legacy call named like an id"),
        pytest.param("u A:x U:x a u", (1, 3, 4), id="calls as parts"),
        pytest.param("u U:x a", (2,), id="a result as a part is no place, even without a call"),
        pytest.param("u a 0 a u", (1, 3, 4), id="null content takes no text"),
        pytest.param("u a s u d a", (1, 3, 5), id="system messages in the middle"),
        pytest.param("u a:x t:x a:y t:y a:z t:z", (1, 3, 5), id="one long user turn"),
    ],
)
def test_legal_cuts(notation: str, expected: tuple[int, ...]) -> None:
    assert region.legal_cuts(facts_of(notation)) == expected
    assert region.legal_cuts(facts_of(notation), 100) == tuple(100 + cut for cut in expected)


def test_no_cut_beside_what_cannot_be_read() -> None:
    readable = facts_of("u a u a u")
    assert region.legal_cuts([*readable[:2], *facts_of([7]), *readable[3:]]) == (1, 3, 4)


@given(conversations(max_steps=10))
def test_a_legal_cut_leaves_every_pair_in_one_half(messages: list[Any]) -> None:
    for cut in region.legal_cuts(facts_of(messages)):
        assert is_whole(messages, cut)
        together = calls_and_results(messages)
        left = [pair for pair in together if pair[0] < cut]
        right = [(call - cut, result - cut) for call, result in together if call >= cut]
        assert calls_and_results(messages[:cut]) == left
        assert calls_and_results(messages[cut:]) == right


@given(conversations(max_steps=10))
def test_every_cut_that_parts_nothing_and_has_a_place_is_legal(messages: list[Any]) -> None:
    def has_place(message: Any) -> bool:
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        return message["role"] == "assistant" or (
            message["role"] == "user"
            and isinstance(content, (str, list))
            and not any(part["type"] == "tool_result" for part in parts)
        )

    expected = tuple(c for c in range(1, len(messages)) if is_whole(messages, c) and has_place(messages[c]))
    assert region.legal_cuts(facts_of(messages)) == expected


@pytest.mark.skipif(not CONVERSATIONS.is_dir(), reason=f"no recorded conversations in {CONVERSATIONS}")
def test_recorded_conversations_are_cut_between_pairs() -> None:
    for name, messages in recorded():
        start = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages))
        cuts = region.legal_cuts(facts_of(messages[start:]))
        pairs = calls_and_results(messages[start:])
        assert not [cut for cut in cuts if any(call < cut <= result for call, result in pairs)], name
        assert cuts or len(messages) - start < 4, name


# Tables of choose(): window 4,096 unless said; so the watermark is 3,072, the tail at most 1,024, the minimum 128.


def _choose(
    notation: str,
    sizes: list[int] | int,
    *,
    window: int = 4096,
    offset: int = 0,
    from_: int = 0,
    replaced: int = 0,
    fixed: int = 0,
    latest: int = 1_000_000,
    anyway: bool = False,
    **keys: Any,
) -> Region | Because:
    facts = facts_of(notation)
    each = [sizes] * len(facts) if isinstance(sizes, int) else sizes
    assert len(each) == len(facts)
    return region.choose(
        facts,
        each,
        limits(window, **keys),
        offset=offset,
        from_=from_,
        replaced_tokens=replaced,
        latest=latest,
        anyway=anyway,
        fixed=fixed,
    )


@pytest.mark.parametrize(
    ("notation", "sizes", "keys", "expected"),
    [
        pytest.param("u a u a u a u a", 200, {}, Region(0, 4, 800, 800), id="two user turns stay"),
        pytest.param("u a u a u a u a", 200, {"keep_recent_turns": 1, "keep_recent_tokens": 0}, Region(0, 6, 1200, 400), id="one user turn stays"),
        pytest.param("u a u a u a u a", 200, {"keep_recent_turns": 2, "keep_recent_tokens": 0}, Region(0, 4, 800, 800), id="two stay for their own sake"),
        pytest.param("u a u a u a u a", 200, {"keep_recent_turns": 0, "keep_recent_tokens": 0}, Region(0, 6, 1200, 400), id="a good place"),
        pytest.param("u a u a u a u a", 200, {"keep_recent_turns": 1, "keep_recent_tokens": 700}, Region(0, 4, 800, 800), id="tokens ask for more than turns"),
        pytest.param("u a u a u a u a", 500, {}, Region(0, 6, 3000, 1000), id="turns ask for more than a quarter of the window"),
        pytest.param("u a u a u a u a", 300, {}, Region(0, 6, 1800, 600), id="then not ending on a user message either"),
        pytest.param("u a:x t:x a:y t:y a:z t:z", 300, {}, Region(0, 5, 1500, 600), id="inside one long user turn"),
        pytest.param("u a:x t:x a:y t:y a:z t:z a", 200, {"keep_recent_turns": 0, "keep_recent_tokens": 500}, Region(0, 5, 1000, 600), id="grown"),
        pytest.param("u a:x t:x u a:y t:y", [200, 200, 200, 100, 100, 2000], {}, Region(0, 3, 600, 2200), id="with its question"),
        pytest.param("u a:x t:x a:y t:y", [200, 200, 200, 100, 2000], {}, Region(0, 3, 600, 2100), id="a newest group that is larger alone"),
        pytest.param("u a u u u a", 200, {"keep_recent_turns": 1, "keep_recent_tokens": 0}, Region(0, 2, 400, 800), id="not between two user messages"),
        pytest.param("u a u u u a", [300] * 5 + [200], {"keep_recent_turns": 1, "keep_recent_tokens": 0}, Region(0, 4, 1200, 500), id="but no tail too large"),
        pytest.param("u u u", 300, {}, Region(0, 1, 300, 600), id="ends on a user message where nothing else is"),
        pytest.param("u u a", 300, {}, Region(0, 1, 300, 600), id="ends on a user message before an answer where nothing else is"),
        pytest.param("u a:x u a u a u a u a", 200, {}, Region(0, 6, 1200, 800), id="an old call that nobody answered"),
        pytest.param("u a:a1,a2 t:a1 u a:b1 t:a2 t:b1 a u a", 200, {}, Region(0, 7, 1400, 600), id="late results"),
        pytest.param("a u a u a", 300, {}, Region(0, 3, 900, 600), id="an assistant first"),
        pytest.param("u a s u a u a", 250, {}, Region(0, 3, 750, 1000), id="a system message in the middle is covered"),
    ],
)  # fmt: skip
def test_choose(notation: str, sizes: list[int] | int, keys: dict[str, Any], expected: Region) -> None:
    assert _choose(notation, sizes, **keys) == expected


@pytest.mark.parametrize(
    ("notation", "sizes", "keys", "expected"),
    [
        pytest.param("u", 5000, {}, Because.NO_BOUNDARY, id="one message"),
        pytest.param("u 0", 5000, {"anyway": True}, Because.NO_BOUNDARY, id="no place even at the hard watermark"),
        pytest.param("u:x a:x t:x", 900, {"from_": 1}, Because.NO_BOUNDARY, id="nothing behind the kept head"),
        pytest.param("u a u a u a", [10, 10, 10, 400, 400, 200], {}, Because.REGION_TOO_SMALL, id="under the minimum"),
        pytest.param("u a u a u a", [10, 10, 10, 400, 400, 200], {"anyway": True}, Region(0, 2, 20, 1010), id="but at the hard watermark no minimum counts"),
        pytest.param("u a u a:x t:x", [200, 200, 100, 100, 4000], {}, Because.INSUFFICIENT_GAIN, id="the tail is the large part"),
        pytest.param("u a u a:x t:x", [200, 200, 100, 100, 4000], {"anyway": True}, Region(0, 2, 400, 4200), id="but at the hard watermark"),
        pytest.param("u a u a u a u a", 200, {"fixed": 2700}, Because.INSUFFICIENT_GAIN, id="tools and preamble are the large part"),
        pytest.param("u a u a u a u a", 200, {"fixed": 2700, "anyway": True}, Region(0, 6, 1200, 400), id="but at the hard watermark too"),
        pytest.param("u a u a u a u a", 200, {"fixed": 2672}, Region(0, 6, 1200, 400), id="an empty checkpoint would just do"),
        pytest.param("u a u a u a u a", 200, {"fixed": 2673}, Because.INSUFFICIENT_GAIN, id="and just not"),
        pytest.param("u a u a u a u a", 200, {"budget_tokens": 399}, Because.INSUFFICIENT_GAIN, id="a budget below the newest question and answer"),
        pytest.param("u a u a u a u a", 200, {"budget_tokens": 400}, Region(0, 6, 1200, 400), id="a budget that just holds them"),
    ],
)  # fmt: skip
def test_not_worth_it(notation: str, sizes: list[int] | int, keys: dict[str, Any], expected: Region | Because) -> None:
    assert _choose(notation, sizes, **keys) == expected


# The newest group is `u a:x t:x`, so what stays at least is its call and result; 1.5 windows are 6,144.
@pytest.mark.parametrize(
    ("newest", "keys", "expected"),
    [
        pytest.param(6044, {"anyway": True}, Region(0, 2, 400, 6244), id="a count of ours may be wrong by a third"),
        pytest.param(6045, {"anyway": True}, Because.UNSHRINKABLE, id="but not by more"),
        pytest.param(
            44, {"anyway": True, "fixed": 6000}, Region(0, 2, 400, 244), id="tools that may just not be too large"
        ),
        pytest.param(
            45, {"anyway": True, "fixed": 6000}, Because.UNSHRINKABLE, id="tools and the newest group together"
        ),
        pytest.param(0, {"anyway": True, "fixed": 50_000}, Because.UNSHRINKABLE, id="tools alone"),
        pytest.param(50_000, {}, Because.INSUFFICIENT_GAIN, id="a soft compaction has its own word for it"),
        pytest.param(50_000, {"anyway": True, "from_": 3}, Because.NO_BOUNDARY, id="nothing behind the kept head"),
    ],
)
def test_what_nothing_can_shrink(newest: int, keys: dict[str, Any], expected: Region | Because) -> None:
    assert _choose("u a u a:x t:x", [200, 200, 100, 100, newest], **keys) == expected


# Soft watermark 3,072; 256 stay free for half a summary and 256 for the ledger: the tail may have 2,560 less what is fixed, and 1,024.
@pytest.mark.parametrize(
    ("notation", "sizes", "keys", "k"),
    [
        pytest.param("u a u a u a u a", 200, {"fixed": 1536}, 4, id="a quarter of the window fits below the watermark"),
        pytest.param("u a u a u a u a", 200, {"fixed": 1760}, 4, id="two user turns just fit"),
        pytest.param("u a u a u a u a", 200, {"fixed": 1761}, 6, id="two user turns would press again"),
        pytest.param("u a u a u a u a", 200, {"fixed": 2160}, 6, id="one just fits"),
        pytest.param("u a u a u a u a", 200, {"fixed": 2161}, 6, id="rather press again than part it"),
        pytest.param("u a u a u a u a", 200, {"fixed": 9000, "anyway": True, "window": 8000}, 6, id="no room at all"),
        pytest.param("u a u a u a u a", 200, {"budget_tokens": 1311}, 6, id="a budget counts as a watermark"),
        pytest.param("u a u a u a u a", 200, {"budget_tokens": 1312}, 4, id="and may just do"),
        pytest.param("u a:x t:x a:y t:y a:z t:z", 200, {"fixed": 2359}, 5, id="inside one user turn"),
        pytest.param("u a u u u a", [200, 200, 200, 200, 200, 300], {"fixed": 2160}, 2, id="a larger tail rather than a parted question"),
        pytest.param("u a u u u a", [200, 200, 900, 900, 200, 300], {"fixed": 2160, "anyway": True}, 5, id="unless that is more than a quarter"),
    ],
)  # fmt: skip
def test_the_tail_leaves_room_below_the_soft_watermark(
    notation: str, sizes: list[int] | int, keys: dict[str, Any], k: int
) -> None:
    found = _choose(notation, sizes, **keys)
    assert isinstance(found, Region)
    assert found.k == k


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        pytest.param({"offset": 10}, Region(0, 14, 800, 800), id="positions count from the conversation's start"),
        pytest.param(
            {"offset": 10, "replaced": 300}, Region(0, 14, 1100, 800), id="an earlier checkpoint is replaced as well"
        ),
        pytest.param(
            {"offset": 10, "from_": 2, "replaced": 300}, Region(2, 14, 1100, 800), id="a head that stays in front of it"
        ),
        pytest.param({"from_": 2}, Region(2, 4, 400, 800), id="a kept head is not covered"),
        pytest.param({"from_": 4}, Region(4, 6, 400, 400), id="a kept head beyond the best cut"),
    ],
)
def test_choose_behind_a_head_or_a_checkpoint(keys: dict[str, Any], expected: Region) -> None:
    assert _choose("u a u a u a u a", 200, **keys) == expected


@pytest.mark.parametrize(("latest", "k"), [(8, 4), (4, 4), (3, 3), (2, 2), (1, 1), (0, 4)])
def test_what_was_never_sent_is_covered_last(latest: int, k: int) -> None:
    found = _choose("u a u a u a u a", 200, latest=latest)
    assert isinstance(found, Region)
    assert found.k == k


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        pytest.param(128, 1, id="what was sent is just enough"),
        pytest.param(127, 4, id="what was sent is too little: what never was is covered too"),
    ],
)
def test_what_was_never_sent_is_covered_where_the_rest_is_too_little(first: int, expected: int) -> None:
    found = _choose("u a u a u a u a", [first, *[200] * 7], latest=1)
    assert isinstance(found, Region)
    assert found.k == expected


def test_the_minimum_counts_only_what_is_newly_covered() -> None:
    assert _choose("u a u a u a", [20, 20, 400, 100, 400, 100], offset=9, replaced=900) == Because.REGION_TOO_SMALL


@st.composite
def _sized(draw: st.DrawFn) -> tuple[list[Any], list[int]]:
    messages = draw(conversations(min_steps=2, max_steps=10))
    most = draw(st.sampled_from((10, 300, 2000)))
    return messages, draw(st.lists(st.integers(0, most), min_size=len(messages), max_size=len(messages)))


POLICIES = st.fixed_dictionaries(
    {
        "tokens": st.sampled_from((256, 2_000, 4_096, 32_000)),
        "keep_recent_turns": st.integers(0, 4),
        "keep_recent_tokens": st.integers(0, 4_000),
        "min_region_tokens": st.sampled_from((0, 64, 1024)),
    }
)


def _ends_on_user(facts: tuple[Facts, ...], cut: int) -> bool:
    return facts[cut - 1].role == "user"


def _start_of_newest_turns(facts: tuple[Facts, ...], turns: int) -> int:
    users = [at for at, message in enumerate(facts) if message.role == "user"]
    if not turns:
        return len(facts)
    return users[-turns] if turns <= len(users) else 0


@given(_sized(), POLICIES, st.booleans(), st.integers(0, 50), st.integers(0, 500), st.sampled_from((0, 100, 3_000)))
def test_a_chosen_region_is_legal_and_keeps_the_documented_sizes(
    talk: tuple[list[Any], list[int]], policy: dict[str, Any], anyway: bool, offset: int, replaced: int, fixed: int
) -> None:
    messages, sizes = talk
    facts, found_limits = facts_of(messages), limits(**policy)
    found = region.choose(
        facts,
        sizes,
        found_limits,
        offset=offset,
        from_=0,
        replaced_tokens=replaced,
        latest=offset + len(facts),
        anyway=anyway,
        fixed=fixed,
    )
    cuts = region.legal_cuts(facts)
    tails = {c: sum(sizes[c:]) for c in cuts}
    if isinstance(found, Because):
        assert found in (
            Because.NO_BOUNDARY,
            Because.UNSHRINKABLE,
            Because.REGION_TOO_SMALL,
            Because.INSUFFICIENT_GAIN,
        )
        assert (found is Because.NO_BOUNDARY) == (not cuts)
        if found is Because.UNSHRINKABLE:
            assert fixed + tails[cuts[-1]] > 1.5 * found_limits.window.tokens
        assert found in (Because.NO_BOUNDARY, Because.UNSHRINKABLE) or not anyway
        return
    cut = found.k - offset
    assert cut in cuts
    assert (found.from_, found.tokens, found.tail_tokens) == (0, replaced + sum(sizes[:cut]), tails[cut])
    assert not anyway or fixed + tails[cuts[-1]] <= 1.5 * found_limits.window.tokens
    quarter = found_limits.tail_cap
    cap = min(quarter, max(0, found_limits.soft - fixed - found_limits.summary // 2 - found_limits.ledger))
    recent = sum(sizes[_start_of_newest_turns(facts, policy["keep_recent_turns"]) :])
    wanted = min(cap, max(found_limits.keep_recent, recent))
    # In the documented range; else the next smaller tail; else, or rather than to end on a question, one up to a quarter; else the newest group.
    proper = [c for c in cuts if wanted <= tails[c] <= cap]
    smaller = [c for c in cuts if tails[c] < wanted]
    larger = [c for c in cuts if cap < tails[c] <= quarter and not _ends_on_user(facts, c)]
    if found.tail_tokens > quarter:
        assert not proper
        assert not smaller
        assert all(tail > quarter or _ends_on_user(facts, c) for c, tail in tails.items())
    elif proper:
        assert cut in proper
        assert not _ends_on_user(facts, cut) or all(_ends_on_user(facts, c) for c in proper)
    elif found.tail_tokens > cap and not _ends_on_user(facts, cut):
        assert all(_ends_on_user(facts, c) for c in smaller)
        assert cut == max(larger)
    elif _ends_on_user(facts, cut):
        assert not larger
        assert all(_ends_on_user(facts, c) for c in smaller or cuts)
    else:
        assert cut == min(c for c in smaller if not _ends_on_user(facts, c))
    if not anyway:
        assert sum(sizes[:cut]) >= found_limits.min_region
        assert fixed + found.tail_tokens <= found_limits.soft


RUNS = st.lists(st.sampled_from(("u", "a", "u a", "u a", "a:x t:x", "a:x,y t:y t:x")), min_size=4, max_size=12).map(
    " ".join
)


@given(RUNS, st.lists(st.integers(50, 300), min_size=50, max_size=50), st.integers(0, 800))
def test_where_sizes_allow_it_the_tail_starts_with_a_user_message(notation: str, sizes: list[int], recent: int) -> None:
    facts = facts_of(notation)
    sizes = sizes[: len(facts)]
    found = _choose(notation, sizes, keep_recent_turns=0, keep_recent_tokens=recent, anyway=True)
    best = [
        c
        for c in region.legal_cuts(facts)
        if facts[c].role == "user" and not _ends_on_user(facts, c) and recent <= sum(sizes[c:]) <= 1024
    ]
    if best:
        assert isinstance(found, Region)
        assert found.k == max(best)


@given(RUNS, st.integers(100, 600).filter(lambda size: 1024 % size))
def test_a_question_is_not_parted_from_its_answer_where_the_run_has_another_boundary(notation: str, size: int) -> None:
    facts = facts_of(notation)
    found = _choose(notation, size, anyway=True)
    if isinstance(found, Region) and _ends_on_user(facts, found.k):
        smaller = [c for c in region.legal_cuts(facts) if size * (len(facts) - c) <= max(1024, found.tail_tokens)]
        assert all(_ends_on_user(facts, c) for c in smaller)


@given(conversations(min_steps=3, max_steps=10), st.integers(0, 30))
def test_what_was_never_sent_is_covered_only_where_nothing_else_can_be(messages: list[Any], latest: int) -> None:
    facts = facts_of(messages)
    found = region.choose(
        facts, [100] * len(facts), limits(2_000), offset=0, from_=0, replaced_tokens=0, latest=latest, anyway=True
    )
    cuts = region.legal_cuts(facts)
    if isinstance(found, Region) and any(c <= latest for c in cuts):
        assert found.k <= latest


@pytest.mark.parametrize(
    ("notation", "wanted", "expected"),
    [
        pytest.param("u a u a u a", 0, 0, id="none wanted"),
        pytest.param("u a u a u a", 2, 2, id="one example"),
        pytest.param("u a u a u a", 3, 2, id="ends on an answer"),
        pytest.param("u a u a u a", 99, 4, id="something has to be left"),
        pytest.param("u u u", 2, 0, id="no answer to end on"),
        pytest.param("u a:x t:x a u", 3, 0, id="not on a result"),
        pytest.param("u a:x t:x a u", 2, 0, id="not inside a pair"),
        pytest.param("u a:x t:x a u", 4, 4, id="behind the pair"),
        pytest.param("u a 0 a u", 2, 0, id="not before null content"),
        pytest.param("u", 5, 0, id="one message"),
        pytest.param("", 5, 0, id="nothing"),
    ],
)
def test_keep_head(notation: str, wanted: int, expected: int) -> None:
    assert region.keep_head(facts_of(notation), wanted) == expected


@pytest.mark.parametrize(
    ("room", "expected"), [(99, None), (100, None), (149, None), (150, 12), (249, 12), (250, 14), (10_000, 15)]
)
def test_largest_fitting(room: int, expected: int | None) -> None:
    before = [100, 120, 150, 200, 250, 300]
    assert region.largest_fitting((12, 14, 15), before, room, 10) == expected


@given(conversations(max_steps=6))
def test_cuts_ascend_and_leave_something_on_both_sides(messages: list[Any]) -> None:
    cuts = region.legal_cuts(tuple(facts_of(messages)))
    assert all(a < b for a, b in pairwise(cuts))
    assert not cuts or (cuts[0] > 0 and cuts[-1] < len(elements(messages)))
