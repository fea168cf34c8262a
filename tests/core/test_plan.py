"""One compaction call: over the whole warm request where it has room, else over the region, and never more than the window holds."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import conversation as conversations
from proxy.core import plan, region, replay, rewrite, tokens, turn
from proxy.core.answer import UNREAD
from proxy.core.limits import INSTRUCTION_TOKENS, Limits
from proxy.core.model import Because, Recalled, Scope, Trigger, Usage
from proxy.core.openai import read as read_request
from proxy.core.plan import Plan, Planner, Shape, Warm
from proxy.core.region import Region
from tests.core.build import Policy, body_of, calls_and_results, checkpoint, limits, read, talk
from tests.strategies import Chat, chats

ANSWER = {"role": "assistant", "content": "Done."}


def _warm(
    body: bytes,
    *,
    k: int = 0,
    from_: int = 0,
    answer: str | None = None,
    prompt: int | None = None,
    factor: float = 1.0,
    tokens: int = 50,
    text: str = "What happened so far.",
) -> Warm:
    """The warm request of a turn with this body; k > 0: a checkpoint over [from_, k) was applied."""
    conversation = read(body)
    made = replace(checkpoint(conversation, k, from_=from_, text=text), checkpoint_tokens=tokens) if k else None
    routed = rewrite.route(conversation.request, conversation.preamble_length, made)
    assert routed.applied is made
    done = turn.forwarded(conversation, routed, replace(UNREAD, text=answer, usage=Usage(prompt)), 1)
    return turn.warm_after(conversations.lineage(conversation, None).id, conversation, routed, None, done, factor)


def _plan(
    warm: Warm,
    sizes: Limits,
    trigger: Trigger = Trigger.SOFT,
    span: tuple[int, int] | None = None,
    *,
    shape: Shape = Shape.ANSWER,
    output_key: str = "",
    **settings: Any,
) -> Plan | Because:
    return Planner(warm, sizes, Policy(**settings), shape, output_key).plan(trigger, span)


def _made(found: Plan | Because) -> Plan:
    assert isinstance(found, Plan), found
    return found


def _sent(found: Plan) -> tuple[bytes, ...]:
    request = read_request(found.replay.body)
    assert request is not None
    return request.messages


# About 200 tokens a message; window 4,096, so the tail may have 1,024 and the call needs 180 and 512 beside its prompt.
TALK = "u*200 a*200 u*200 a*200 u*200 a*200 u*200 a*200 u*200"


@pytest.mark.parametrize(
    ("warm", "settings", "expected"),
    [
        pytest.param({}, {}, (Scope.WARM, 9), id="the whole warm request"),
        pytest.param({}, {"replay_scope": "region"}, (Scope.REGION, 4), id="the region where it is asked for"),
        pytest.param({"prompt": 3404}, {}, (Scope.WARM, 9), id="it just has room, as the provider counted"),
        pytest.param({"prompt": 3405}, {}, (Scope.REGION, 4), id="it has none, as the provider counted"),
        pytest.param(
            {"prompt": 3400, "answer": "word " * 100}, {}, (Scope.REGION, 4), id="it has none with its answer"
        ),
        pytest.param({"factor": 1.8}, {}, (Scope.WARM, 9), id="it has room, as we estimate"),
        pytest.param({"factor": 1.9}, {}, (Scope.REGION, 8), id="it has none, as we estimate"),
    ],
)
def test_the_scope(warm: dict[str, Any], settings: dict[str, Any], expected: tuple[Scope, int]) -> None:
    found = _made(_plan(_warm(body_of(TALK), **warm), limits(4096), Trigger.FORCE, **settings))
    assert (found.scope, found.read_to) == expected
    assert len(_sent(found)) == found.read_to + 1 + ("answer" in warm and found.scope is Scope.WARM)


def test_a_warm_call_reads_everything_and_then_the_answer() -> None:
    warm = _warm(body_of(f"s {TALK}", max_tokens=7, tools=[{"type": "function"}]), answer="Done.")
    found = _made(_plan(warm, limits(4096), Trigger.FORCE))
    assert found.region == Region(0, 4, 4 * 204, 5 * 204)
    assert _sent(found)[:10] == read(body_of(f"s {TALK}")).request.messages
    assert [json.loads(m) for m in _sent(found)[10:]] == [ANSWER, {"role": "user", "content": found.replay.instruction}]
    body = json.loads(found.replay.body)
    assert (body["max_tokens"], body["tools"], list(body)) == (
        512,
        [{"type": "function"}],
        ["model", "max_tokens", "tools", "messages"],
    )
    assert 'before the user message that starts "word word' in found.replay.instruction


BRIDGE = {"role": "assistant", "content": "Noted."}


@pytest.mark.parametrize(
    ("notation", "answer", "scope", "expected"),
    [
        pytest.param(TALK, "Done.", "warm", (ANSWER, None, BRIDGE), id="behind a question that was answered"),
        pytest.param(TALK, None, "warm", (None, None, BRIDGE), id="behind a question whose answer is not rebuilt"),
        pytest.param(
            "u*200 a*200 u*200 a:x t:x*200", "Done.", "warm", (ANSWER, None, BRIDGE), id="behind a result of a tool"
        ),
        pytest.param("u*200 a*200 u*200 a*200", None, "warm", (None, None, BRIDGE), id="in front of a prefill"),
        pytest.param(TALK, "Done.", "region", (None, None, None), id="a region that ends on an answer"),
        pytest.param(
            "u*200 u*200 u*200 u*200", "Done.", "region", (None, None, BRIDGE), id="one that ends on a question"
        ),
        pytest.param(
            "u*200 a:x t:x*200 u*200", "Done.", "region", (None, None, BRIDGE), id="one that ends on a result"
        ),
    ],
)
def test_what_stands_before_the_instruction_in_each_shape(
    notation: str, answer: str | None, scope: str, expected: tuple[dict[str, str] | None, ...]
) -> None:
    """The bridge only where the last message is no assistant's: else two of them would meet, which strict templates refuse as well."""
    warm = _warm(body_of(notation), answer=answer)
    plain = None
    for shape, between in zip(
        (Shape.PLAIN, Shape.ANSWER, Shape.BRIDGED), (expected[1], expected[0], expected[2]), strict=True
    ):
        found = _made(
            _plan(
                warm,
                limits(4096, keep_recent_turns=1, keep_recent_tokens=200),
                Trigger.FORCE,
                shape=shape,
                replay_scope=scope,
            )
        )
        replayed = _sent(found)[: found.read_to]
        assert replayed == read(body_of(notation)).request.messages[: found.read_to]
        assert [json.loads(m) for m in _sent(found)[found.read_to : -1]] == ([between] if between else [])
        assert json.loads(_sent(found)[-1]) == {"role": "user", "content": found.replay.instruction}
        plain = plain or found
        assert (found.region, found.scope, found.read_to) == (plain.region, plain.scope, plain.read_to)


def test_a_region_call_reads_the_region_alone() -> None:
    found = _made(
        _plan(_warm(body_of(f"s {TALK}"), answer="Done."), limits(4096), Trigger.FORCE, replay_scope="region")
    )
    assert _sent(found)[:-1] == read(body_of(f"s {TALK}")).request.messages[:5]
    assert "all messages above" in found.replay.instruction
    assert json.loads(_sent(found)[-1]) == {"role": "user", "content": found.replay.instruction}


def test_the_operators_own_prompt_replaces_the_instruction() -> None:
    found = _made(_plan(_warm(body_of(TALK)), limits(4096), Trigger.FORCE, summary_prompt='Sum "it" up'))
    assert json.loads(_sent(found)[-1]) == {"role": "user", "content": 'Sum "it" up'}
    assert found.replay.instruction == 'Sum "it" up'


@pytest.mark.parametrize(
    ("members", "output_key", "expected"),
    [
        pytest.param({}, "", {}, id="none from the client, no dialect known"),
        pytest.param({}, "max_completion_tokens", {"max_completion_tokens": 512}, id="the dialect's key"),
        pytest.param({"max_tokens": 5}, "max_completion_tokens", {"max_tokens": 512}, id="a tiny cap of the client's"),
        pytest.param(
            {"max_completion_tokens": 200_000}, "", {"max_completion_tokens": 512}, id="a huge cap of the client's"
        ),
    ],
)
def test_the_output_limit(members: dict[str, int], output_key: str, expected: dict[str, int]) -> None:
    found = _made(_plan(_warm(body_of(TALK, **members)), limits(4096), Trigger.FORCE, output_key=output_key))
    body = json.loads(found.replay.body)
    assert {key: body[key] for key in replay.OUTPUT_KEYS if key in body} == expected


def test_thoughts_get_room_in_the_output() -> None:
    found = _made(_plan(_warm(body_of(TALK, max_tokens=5)), limits(4096, reasons=True), Trigger.FORCE))
    assert json.loads(found.replay.body)["max_tokens"] == 1024


@pytest.mark.parametrize(
    ("notation", "tools", "window", "trigger", "expected"),
    [
        pytest.param("u*9000", 0, 4096, Trigger.OVERFLOW, Because.NO_BOUNDARY, id="one message"),
        pytest.param(
            "u*9000 a*5 u*5", 0, 4096, Trigger.OVERFLOW, Because.NO_ROOM, id="the first message alone is too large"
        ),
        pytest.param(TALK, 40_000, 4096, Trigger.OVERFLOW, Because.UNSHRINKABLE, id="the tools alone are too large"),
        pytest.param(TALK, 20_000, 4096, Trigger.OVERFLOW, Because.NO_ROOM, id="the tools leave no room for a call"),
        pytest.param(
            "u*9 a*9 u*9000", 0, 4096, Trigger.GUARD, Because.UNSHRINKABLE, id="the newest message is too large"
        ),
        pytest.param(
            "u*9 a*9 u*9000", 0, 4096, Trigger.SOFT, Because.REGION_TOO_SMALL, id="and is none of ours after a turn"
        ),
        pytest.param(TALK, 0, 32_000, Trigger.SOFT, Because.REGION_TOO_SMALL, id="nothing worth it"),
        pytest.param(
            "u*1500 a*1500 u*9 a:x t:x*30000",
            0,
            32_000,
            Trigger.SOFT,
            Because.INSUFFICIENT_GAIN,
            id="the tail is the large part",
        ),
        pytest.param(TALK, 12_000, 4096, Trigger.SOFT, Because.INSUFFICIENT_GAIN, id="the tools are the large part"),
    ],
)
def test_no_call(notation: str, tools: int, window: int, trigger: Trigger, expected: Because) -> None:
    warm = _warm(body_of(notation, tools="x" * tools))
    assert _plan(warm, limits(window), trigger) == expected


def test_where_the_region_has_no_room_a_shorter_one_is_taken() -> None:
    notation = "u*900 a*900 u*900 a*900 u*900 a*900 u*9 a*9 u*9"
    found = _made(_plan(_warm(body_of(notation)), limits(4096), Trigger.OVERFLOW))
    assert (found.scope, found.region.k, found.read_to) == (Scope.REGION, 3, 3)
    assert found.region.tokens == sum(f.weight for f in read(body_of(notation)).facts[:3])
    assert found.region.tokens + found.region.tail_tokens == sum(f.weight for f in read(body_of(notation)).facts)


@pytest.mark.parametrize("trigger", list(Trigger))
def test_only_a_soft_compaction_minds_the_minimum(trigger: Trigger) -> None:
    found = _plan(_warm(body_of(TALK)), limits(32_000), trigger)
    assert (found == Because.REGION_TOO_SMALL) is (trigger is Trigger.SOFT)


@pytest.mark.parametrize(
    ("notation", "span", "expected"),
    [
        pytest.param("u a u a u", (0, 2), True, id="from the start"),
        pytest.param("u a u a u", (0, 4), True, id="to the last message"),
        pytest.param("u a u a u", (2, 4), True, id="a middle region"),
        pytest.param("u a u a u", (0, 5), False, id="nothing would be left"),
        pytest.param("u a u a u", (0, 9), False, id="beyond the end"),
        pytest.param("u a u a u", (0, 0), False, id="nothing is covered"),
        pytest.param("u a u a u", (4, 2), False, id="ends before it starts"),
        pytest.param("u a u a u", (2, 2), False, id="empty in the middle"),
        pytest.param("u a u a u", (-1, 2), False, id="before the start"),
        pytest.param("u a u a u", (1, 4), False, id="starts behind a question: two user messages would meet"),
        pytest.param("u a:x,y t:x t:y a u", (0, 3), False, id="ends inside a pair"),
        pytest.param("u a:x,y t:x t:y a u", (2, 5), False, id="starts inside a pair"),
        pytest.param("u a:x t:x a:y t:y a u", (3, 6), False, id="starts behind a result: no user message stood there"),
        pytest.param("u a:x t:x u a u a u", (3, 7), True, id="starts behind a result where a user message stood"),
        pytest.param("u a s u a u", (3, 5), True, id="starts behind a system message where a user message stood"),
        pytest.param("u a s a u a u", (3, 6), False, id="starts behind a system message where an answer stood"),
        pytest.param("u a a u a u", (2, 5), True, id="starts between two answers"),
        pytest.param("u a 0 a u", (0, 2), False, id="ends before null content"),
        pytest.param("u u u a u", (1, 4), False, id="starts between two questions"),
    ],
)
def test_a_region_that_was_asked_for(notation: str, span: tuple[int, int], expected: bool) -> None:
    found = _plan(_warm(body_of(notation)), limits(4096), Trigger.MANUAL, span)
    assert isinstance(found, Plan) is expected
    if isinstance(found, Plan):
        assert (found.region.from_, found.region.k) == span
        sizes = [f.weight for f in read(body_of(notation)).facts]
        assert (found.region.tokens, found.region.tail_tokens) == (sum(sizes[slice(*span)]), sum(sizes[span[1] :]))
    else:
        assert found is Because.NO_BOUNDARY


@pytest.mark.parametrize(
    ("from_", "span", "expected"),
    [
        pytest.param(0, (0, 6), True, id="absorbs the earlier one"),
        pytest.param(2, (2, 6), True, id="absorbs the earlier one behind a head"),
        pytest.param(0, (0, 4), False, id="ends where the earlier one ends"),
        pytest.param(0, (0, 2), False, id="ends inside the earlier one"),
        pytest.param(0, (4, 6), False, id="starts behind the earlier one"),
    ],
)
def test_a_region_that_was_asked_for_behind_a_checkpoint(from_: int, span: tuple[int, int], expected: bool) -> None:
    warm = _warm(body_of("u a u a u a u"), k=4, from_=from_, tokens=33)
    found = _plan(warm, limits(4096), Trigger.MANUAL, span)
    assert isinstance(found, Plan) is expected
    if isinstance(found, Plan):
        assert found.region == Region(
            span[0], 6, 33 + sum(f.weight for f in warm.facts[:2]), sum(f.weight for f in warm.facts[2:])
        )


def test_the_next_compaction_rolls_the_last_one_forward() -> None:
    warm = _warm(body_of(f"s {TALK} a*200 u*200 a*200 u*200"), k=4, from_=2, tokens=77)
    found = _made(_plan(warm, limits(4096, keep_head_messages=2), Trigger.SOFT))
    assert (found.region.from_, found.region.k) == (2, 8)
    assert found.region.tokens == 77 + sum(f.weight for f in warm.facts[:4])
    sent = _sent(found)
    assert sent[:3] == read(warm.body() or b"").request.messages[:3]  # preamble and kept head
    assert json.loads(sent[3])["content"].startswith("<checkpoint_summary")
    assert len(sent) == 1 + 2 + 9 + 1


def test_a_later_head_region_absorbs_a_middle_one() -> None:
    warm = _warm(body_of(f"s {TALK} a*200 u*200 a*200 u*200"), k=4, from_=2, tokens=77)
    found = _made(_plan(warm, limits(4096), Trigger.SOFT))
    assert (found.region.from_, found.region.k) == (0, 8)
    in_front, behind = warm.covered(found.region)
    assert (len(in_front), len(behind)) == (2, 4)
    assert found.region.tokens > 77 + sum(f.weight for f in warm.facts[:4])


def test_an_earlier_checkpoint_is_nothing_that_stays() -> None:
    """It is replaced, however large it is: the tail may be as large as behind a small one."""
    sizes = limits(4096, keep_recent_turns=0, keep_recent_tokens=800)
    for words in (100, 1500):
        warm = _warm(body_of(TALK), k=2, tokens=words + 100, text="word " * words)
        assert _made(_plan(warm, sizes, Trigger.FORCE)).region == Region(0, 4, words + 100 + 2 * 204, 5 * 204)


def test_where_nothing_behind_a_kept_head_fits_there_is_no_room() -> None:
    """A region that ended in the head would cover nothing."""
    warm = _warm(body_of("u*300 a*300 u*300 a*300 u*4000 a*300 u*9 a*9"))
    sizes = limits(4096, keep_head_messages=4, keep_recent_turns=1, keep_recent_tokens=0)
    assert _plan(warm, sizes, Trigger.OVERFLOW) == Because.NO_ROOM
    made = _made(_plan(warm, limits(4096, keep_recent_turns=1, keep_recent_tokens=0), Trigger.OVERFLOW))
    assert (made.region.from_, made.region.k) == (0, 4)


def test_a_kept_head_stays_in_front() -> None:
    warm = _warm(body_of(TALK))
    found = _made(_plan(warm, limits(4096, keep_head_messages=3), Trigger.SOFT))
    assert (found.region.from_, found.region.k) == (2, 4)
    assert found.region.tokens == sum(f.weight for f in warm.facts[2:4])


def test_what_was_never_sent_is_not_read_in_a_warm_call() -> None:
    conversation = read(body_of(TALK))
    warm = replace(_warm(body_of(TALK)), end=7, prompt=1500)
    found = _made(_plan(warm, limits(4096), Trigger.GUARD))
    assert (found.scope, found.read_to, found.region.k) == (Scope.WARM, 7, 4)
    assert _sent(found)[:-1] == conversation.request.messages[:7]


@pytest.mark.parametrize(
    ("end", "k", "scope"), [(9, 8, Scope.WARM), (6, 6, Scope.WARM), (2, 2, Scope.WARM), (0, 8, Scope.REGION)]
)
def test_what_was_never_sent_is_not_covered_where_the_rest_is_enough(end: int, k: int, scope: Scope) -> None:
    """It is in no cache: a region that ends in it would be read anew. Only where nothing was sent is there no choice."""
    warm = replace(_warm(body_of(TALK)), end=end)
    sizes = limits(4096, keep_recent_turns=0, keep_recent_tokens=0)
    found = _made(_plan(warm, sizes, Trigger.GUARD))
    assert (found.region.k, found.scope, found.read_to) == (k, scope, end if scope is Scope.WARM else k)


@pytest.mark.parametrize(
    ("warm", "settings", "new"),
    [
        pytest.param({}, {}, 0, id="the whole warm request: nothing but the instruction"),
        pytest.param(
            {"answer": "word " * 100},
            {},
            tokens.of_text(replay.rebuilt_answer("word " * 100, None).decode()),
            id="and the answer",
        ),
        pytest.param({}, {"replay_scope": "region"}, 0, id="the region: a prefix of what was sent"),
    ],
)
def test_what_is_expected_to_be_new_to_the_provider(warm: dict[str, Any], settings: dict[str, Any], new: int) -> None:
    found = _made(_plan(_warm(body_of(TALK), **warm), limits(4096), Trigger.FORCE, **settings))
    own = tokens.of_text(found.replay.instruction) + tokens.MESSAGE_OVERHEAD
    assert found.expected_new == own + plan.BLOCK_TOKENS + new


def test_what_lies_behind_the_last_turn_is_new_to_the_provider() -> None:
    warm = replace(_warm(body_of("u*200 a*200 u*200 a*200")), end=1)
    found = _made(_plan(warm, limits(4096), Trigger.MANUAL, (0, 2)))
    own = tokens.of_text(found.replay.instruction) + tokens.MESSAGE_OVERHEAD
    assert (found.scope, found.expected_new) == (Scope.REGION, own + plan.BLOCK_TOKENS + warm.facts[1].weight)


PICK = st.integers(0, 1000)
WINDOWS = st.sampled_from((256, 512, 1024, 2048, 4096, 32_000))
KEPT = {"max_tokens", "max_completion_tokens"}


def _warm_of(chat: Chat, pick: int, factor: float, answer: str | None) -> Warm:
    conversation = read(chat.body)
    cuts = region.legal_cuts(conversation.facts)
    k = cuts[pick % len(cuts)] if cuts and pick % 2 else 0
    return _warm(chat.body, k=k, answer=answer, factor=factor)


@given(
    chats(min_steps=3, max_steps=9),
    *(PICK, WINDOWS, st.sampled_from(list(Trigger)), st.sampled_from(("warm", "region"))),
    *(
        st.sampled_from((0.5, 1.0, 3.0)),
        st.sampled_from((None, "Done.", "word " * 300)),
        st.sampled_from(("", "word " * 400)),
    ),
)
def test_any_plan_is_the_warm_request_and_fits_the_window(
    chat: Chat, pick: int, window: int, trigger: Trigger, scope: str, factor: float, answer: str | None, prompt: str
) -> None:
    warm = _warm_of(chat, pick, factor, answer)
    sizes = limits(window, min_region_tokens=0, keep_recent_tokens=pick)
    found = _plan(warm, sizes, trigger, replay_scope=scope, summary_prompt=prompt, output_key="max_tokens")
    if isinstance(found, Because):
        soft = (Because.REGION_TOO_SMALL, Because.INSUFFICIENT_GAIN)
        assert found in (
            Because.NO_BOUNDARY,
            Because.NO_ROOM,
            *(soft if trigger is Trigger.SOFT else (Because.UNSHRINKABLE,)),
        )
        return
    cuts = region.legal_cuts(warm.facts, warm.offset)
    assert found.region.k in cuts
    assert found.region.from_ == (warm.applied.from_ if warm.applied else 0)
    if found.scope is Scope.WARM:
        assert scope == "warm"
        assert found.region.k <= found.read_to == warm.end
    else:
        assert found.read_to == found.region.k
    # The warm request as the provider got it, whole or cut; at most the answer; one user message.
    sent = _sent(found)
    routed = read(warm.body() or b"").request.messages
    length = (
        len(warm.preamble)
        + len(warm.kept)
        + (warm.applied is not None and not _spliced(warm))
        + found.read_to
        - warm.offset
    )
    answered = (warm.answer,) if warm.answer and found.scope is Scope.WARM else ()
    assert sent[:length] == routed[:length]
    assert sent[length:-1] == answered
    assert json.loads(sent[-1]) == {"role": "user", "content": found.replay.instruction}
    output = max(value for key, value in json.loads(found.replay.body).items() if key in KEPT)
    own = round((tokens.of_text(found.replay.instruction) + 4) * factor) if prompt else 0
    assert 16 <= output <= sizes.output
    assert found.prompt >= max(INSTRUCTION_TOKENS, own)
    assert found.prompt + output <= window


def _spliced(warm: Warm) -> bool:
    return warm.facts[0].role == "user"


@given(chats(min_steps=3, max_steps=9), PICK, st.integers(-1, 12), st.integers(-1, 12))
def test_any_region_that_was_asked_for_and_is_taken_keeps_pairs_and_roles(
    chat: Chat, pick: int, from_: int, k: int
) -> None:
    found = _plan(_warm(chat.body), limits(10**6), Trigger.MANUAL, (from_, k))
    if not isinstance(found, Plan):
        return
    assert (found.region.from_, found.region.k) == (from_, k)
    pairs = calls_and_results(chat.conversation)
    assert not [1 for call, result in pairs for cut in (from_, k) if call < cut <= result]
    conversation = read(chat.body)
    routed = rewrite.route(conversation.request, chat.preamble_length, checkpoint(conversation, k, from_=from_))
    assert routed.applied is not None
    roles = [m["role"] for m in chat.conversation]
    now = [json.loads(m)["role"] for m in routed.messages[chat.preamble_length :]]
    new = set(pairwise(now)) - set(pairwise(roles))
    assert new <= {("assistant", "user"), ("user", "assistant")}


@given(chats(min_steps=3, max_steps=9), PICK, st.sampled_from(("warm", "region")))
def test_a_new_checkpoint_claims_what_it_covers_and_what_its_summariser_read(chat: Chat, pick: int, scope: str) -> None:
    warm = _warm_of(chat, pick, 1.0, None)
    found = _plan(warm, limits(10**6), Trigger.FORCE, replay_scope=scope)
    if not isinstance(found, Plan):
        return
    conversation = read(chat.body)
    claim = plan.ref(found.region, found.read_to, warm, "id", 7)
    assert (claim.id, claim.generation, claim.dead) == ("id", 7, False)
    assert (claim.from_, claim.k, claim.seen_len) == (found.region.from_, found.region.k, found.read_to)
    prefill = chat.conversation[-1].get("role") == "assistant" and len(chat.conversation) > 1
    assert claim.seen_len == (claim.k if scope == "region" else len(chat.conversation) - prefill)
    assert (claim.digest_k, claim.seen) == (conversation.chain[claim.k - 1], conversation.chain[claim.seen_len - 1])
    assert claim.preamble == conversation.preamble
    made = replace(checkpoint(conversation, claim.k), ref=claim)
    assert rewrite.applicable(Recalled(None, 0, own=made), conversation) is made
    longer = read(body_of([*chat.messages, *talk("a u")], **_salted(chat)))
    assert rewrite.applicable(Recalled(None, 0, foreign=(made,)), longer) is made
    branch = [*chat.messages]
    branch[chat.preamble_length + claim.seen_len - 1] = {"role": "user", "content": "another"}
    other = read(body_of(branch, **_salted(chat)))
    assert rewrite.applicable(Recalled(None, 0, own=made, foreign=(made,)), other) is None


def _salted(chat: Chat) -> dict[str, Any]:
    return {"cache_salt": json.loads(dict(chat.members).get("cache_salt", b'""'))}
