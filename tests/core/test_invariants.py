"""What holds of any conversation that clients send: cuts part no pair, a rewrite adds nothing but the checkpoint, a replay is what was sent.

The shapes are those of `tests/strategies.py`: among them hundreds of calls on one user message, single messages that fill a window, and
objects in which a key stands twice, so that two parsers read two messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from proxy.core import conversation as conversations_of
from proxy.core import fingerprint, region, rewrite, turn
from proxy.core.answer import UNREAD
from proxy.core.conversation import Conversation
from proxy.core.model import Because, Checkpoint, Recalled, Scope, Trigger
from proxy.core.openai import read as read_request
from proxy.core.plan import Plan, Planner, Shape, Warm
from tests.core.build import Policy, calls_and_results, checkpoint, is_whole, limits, read
from tests.strategies import SEEDS, Chat, Twice, chat, chats, conversations, marathons, spelled

FEW = settings(max_examples=max(6, settings().max_examples // 8))
"""For conversations of a thousand messages."""

PICK = st.integers(0, 10_000)
FRAME = 'Before: "x"\\ 再 😀'


def _read_first(value: Any) -> Any:
    """The value as a parser has it that takes the first of two equal keys."""
    if isinstance(value, dict):
        items = {key: _read_first(inner) for key, inner in value.items()}
        return {**items, value.first[0]: value.first[1]} if isinstance(value, Twice) else items
    return [_read_first(inner) for inner in value] if isinstance(value, list) else value


def _holds_twice(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, Twice) or any(map(_holds_twice, inner))


# A cut parts no call from a result.


def _judge_cuts(messages: Sequence[Any], cuts: Sequence[int]) -> None:
    for reading in (messages, [_read_first(message) for message in messages]):
        for call, result in calls_and_results(reading):
            assert not [cut for cut in cuts if call < cut <= result]
    for cut in cuts:
        assert messages[cut]["role"] in ("user", "assistant")
        assert not _holds_twice(messages[cut]), "nobody can say what a checkpoint in front of it would do"


@given(conversations(min_steps=2, max_steps=8, doubled=True), SEEDS)
def test_no_parser_finds_a_call_parted_from_its_result(messages: list[Any], seed: int) -> None:
    _judge_cuts(messages, region.legal_cuts([fingerprint.facts(spelled(message, seed)) for message in messages]))


@FEW
@given(marathons())
def test_a_turn_of_hundreds_of_calls_can_be_cut_between_any_two_rounds(marathon: Chat) -> None:
    messages = marathon.conversation
    cuts = region.legal_cuts(read(marathon.body).facts)
    _judge_cuts(messages, cuts)
    inside = set()
    for call, result in calls_and_results(messages):
        inside.update(range(call + 1, result + 1))
    rounds = [at for at, message in enumerate(messages) if at and message["role"] == "assistant" and at not in inside]
    assert len(rounds) >= 99
    assert set(rounds) <= set(cuts)


# A rewrite: preamble and kept head, one checkpoint, tail.


def _judge_rewrite(request: Conversation, made: Checkpoint, sent: Sequence[bytes]) -> None:
    """Each message that is not covered once, in its own bytes and order; a user message in front, and no two roles side by side for its sake."""
    messages, start = request.request.messages, request.preamble_length
    place, k = start + made.from_, start + made.k
    assert tuple(sent[:place]) == messages[:place]
    before = json.loads(messages[place - 1])["role"] if place else ""
    first = json.loads(messages[k])
    text = rewrite.encode(made.frame)
    assert before != "user"
    if first["role"] == "assistant":
        assert tuple(sent[place:]) == (b'{"role":"user","content":%s}' % text, *messages[k:])
        return
    assert first["role"] == "user"
    assert len(sent) == place + len(messages) - k
    assert tuple(sent[place + 1 :]) == messages[k + 1 :]
    parts = b'{"type":"text","text":%s}' % text
    inserted = text[1:-1] + rb"\n\n" if isinstance(first["content"], str) else parts + b"," * bool(first["content"])
    assert messages[k] in _without(sent[place], inserted)
    told = json.loads(sent[place])
    kept = told.pop("content")
    before_it = first.pop("content")
    assert told == first
    expected: Any = f"{made.frame}\n\n{before_it}"
    if isinstance(before_it, list):
        expected = [{"type": "text", "text": made.frame}, *before_it]
    assert kept == expected


def _without(element: bytes, inserted: bytes) -> list[bytes]:
    """The element with each occurrence of the inserted bytes taken out in turn."""
    found = []
    at = element.find(inserted)
    while at >= 0:
        found.append(element[:at] + element[at + len(inserted) :])
        at = element.find(inserted, at + 1)
    return found


def _routed(request: Conversation, head: int, pick: int) -> tuple[Checkpoint, rewrite.Routed] | None:
    from_ = region.keep_head(request.facts, head)
    cuts = [cut for cut in region.legal_cuts(request.facts) if cut > from_]
    if not cuts:
        return None
    made = checkpoint(request, cuts[pick % len(cuts)], from_=from_, text=FRAME)
    return made, rewrite.route(request.request, request.preamble_length, made)


@given(chats(min_steps=3, max_steps=9, doubled=True) | chats(min_steps=3, max_steps=9), PICK, st.integers(0, 5))
def test_a_rewrite_puts_one_checkpoint_in_and_touches_nothing_else(talk: Chat, pick: int, head: int) -> None:
    request = read(talk.body)
    found = _routed(request, head, pick)
    if found is None:
        return
    made, routed = found
    assert routed.applied is made
    assert routed.body == request.request.head + b",".join(routed.messages) + request.request.tail
    _judge_rewrite(request, made, routed.messages)


@FEW
@given(marathons(), st.lists(PICK, min_size=3, max_size=3), st.integers(0, 5))
def test_so_it_does_inside_a_turn_of_hundreds_of_calls(marathon: Chat, picks: list[int], head: int) -> None:
    request = read(marathon.body)
    for pick in picks:
        found = _routed(request, head, pick)
        assert found is not None
        _judge_rewrite(request, found[0], found[1].messages)


# A replay is what was sent, whole or cut, and at most two messages more.


def _warm(talk: Chat, *, k: int, from_: int, answer: str | None, factor: float, end: int | None) -> Warm | None:
    """The warm request of this chat with a checkpoint over [from_, k); k = 0: with none. `end`: how far it was sent, where not whole."""
    request = read(talk.body)
    made = replace(checkpoint(request, k, from_=from_), checkpoint_tokens=50) if k else None
    routed = rewrite.route(request.request, request.preamble_length, made)
    if routed.applied is not made:
        return None
    done = turn.forwarded(request, routed, replace(UNREAD, text=answer), 1)
    session = conversations_of.lineage(request, None).id
    if end is None:
        return turn.warm_after(session, request, routed, None, done, factor)
    warm = turn.warm_from_live(session, request, routed, None, factor)
    return replace(warm, end=min(max(warm.offset, end), len(request.facts)))


def _judge_plan(talk: Chat, warm: Warm, found: Plan, window: int) -> None:
    request = read_request(found.replay.body)
    assert request is not None
    routed = read_request(warm.body() or b"")
    assert routed is not None
    behind = len(warm.chain) - found.read_to  # messages of the request that the summariser does not read
    whole = routed.messages[: len(routed.messages) - behind]
    *between, last = request.messages[len(whole) :]
    assert request.messages[: len(whole)] == whole
    assert json.loads(last) == {"role": "user", "content": found.replay.instruction}
    assert len(between) <= 1
    assert not between or json.loads(between[0])["role"] == "assistant"
    assert found.read_to in ((warm.end,) if found.scope is Scope.WARM else (found.region.k,))
    assert found.region.k <= found.read_to
    cuts = region.legal_cuts(warm.facts, warm.offset)
    assert found.region.k in cuts
    _judge_cuts(talk.conversation[warm.offset :], [found.region.k - warm.offset])
    output = [value for key, value in json.loads(found.replay.body).items() if key.startswith("max_")]
    assert found.prompt + max(output) <= window


@given(
    chats(min_steps=3, max_steps=9, doubled=True) | chats(min_steps=3, max_steps=9),
    *(PICK, st.integers(0, 4), st.sampled_from((512, 2048, 4096, 32_000)), st.sampled_from(list(Trigger))),
    *(st.sampled_from(("warm", "region")), st.sampled_from(list(Shape)), st.sampled_from((None, "Done."))),
    *(st.none() | st.integers(0, 30), st.sampled_from((1.0, 1.7))),
)
def test_any_call_extends_what_was_sent(
    talk: Chat,
    pick: int,
    head: int,
    window: int,
    trigger: Trigger,
    scope: str,
    shape: Shape,
    answer: str | None,
    end: int | None,
    factor: float,
) -> None:
    """Behind a kept head, with a checkpoint and without, after a turn and before one, in each shape that providers take."""
    facts = read(talk.body).facts
    from_ = region.keep_head(facts, head)
    cuts = [cut for cut in region.legal_cuts(facts) if cut > from_]
    k = cuts[pick % len(cuts)] if cuts and pick % 3 else 0
    warm = _warm(talk, k=k, from_=from_ if k else 0, answer=answer, factor=factor, end=end)
    assert warm is not None
    sizes = limits(window, min_region_tokens=0, keep_recent_tokens=pick, keep_head_messages=head)
    found = Planner(warm, sizes, Policy(replay_scope=scope), shape, "max_tokens").plan(trigger)
    if isinstance(found, Plan):
        assert found.region.from_ == (from_ if k else region.keep_head(facts, head))
        _judge_plan(talk, warm, found, window)


@FEW
@given(marathons(), PICK, st.sampled_from((4096, 16_000)), st.sampled_from(("warm", "region")), st.booleans())
def test_a_region_lies_inside_a_turn_of_hundreds_of_calls(
    marathon: Chat, pick: int, window: int, scope: str, inline: bool
) -> None:
    cuts = region.legal_cuts(read(marathon.body).facts)
    k = cuts[pick % len(cuts)] if pick % 2 else 0
    warm = _warm(marathon, k=k, from_=0, answer=None, factor=1.0, end=None)
    assert warm is not None
    sizes = limits(window)
    trigger = Trigger.GUARD if inline else Trigger.FORCE
    found = Planner(warm, sizes, Policy(replay_scope=scope), output_key="max_tokens").plan(trigger)
    weights = [fact.weight for fact in warm.facts]
    left = region.legal_cuts(warm.facts)
    if isinstance(found, Because):
        # Nearly all is covered already, or what comes first is too large for any call.
        assert not left if found is Because.NO_BOUNDARY else not sizes.fits(warm.base + sum(weights[: left[0]]))
        return
    _judge_plan(marathon, warm, found, window)
    # A question is not parted from its answer for the size of the tail.
    whole = [cut for cut in left if warm.facts[cut - 1].role != "user"] or left
    newest = sum(weights[whole[-1] :])
    if found.scope is Scope.WARM:
        assert found.region.tail_tokens <= max(window // 4, newest)


# A checkpoint reaches only what its summariser has read.


def _other_text(message: Any, random: Random) -> Any:
    changed = deepcopy(message)
    content = changed.get("content")
    if isinstance(content, str):
        return {**changed, "content": content + random.choice((" ", ".", "x"))}
    texts = [key for key, value in changed.items() if isinstance(value, str) and key != "role"]
    key = random.choice(["x_new", *texts])
    return {**changed, key: "another"}


def _edited(messages: list[Any], at: int, random: Random) -> list[Any]:
    return [*messages[:at], _other_text(messages[at], random), *messages[at + 1 :]]


def _dropped(messages: list[Any], at: int, random: Random) -> list[Any]:
    return [*messages[:at], *messages[at + 1 :]]


def _added(messages: list[Any], at: int, random: Random) -> list[Any]:
    return [*messages[:at], {"role": random.choice(("user", "assistant")), "content": "one more"}, *messages[at:]]


def _swapped(messages: list[Any], at: int, random: Random) -> list[Any]:
    return [*messages[:at], *messages[at : at + 2][::-1], *messages[at + 2 :]]


def _same_meaning(messages: Sequence[Any], random: Random) -> list[Any]:
    """Cache marks elsewhere, texts as parts or parts as texts."""
    found = []
    for message in messages:
        other = deepcopy(message)
        other.pop("cache_control", None)
        content = other.get("content")
        if isinstance(content, str) and random.random() < 0.5:
            other["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, list):
            for part in content:
                part.pop("cache_control", None)
            if len(content) == 1 and content[0].keys() == {"type", "text"} and content[0]["type"] == "text":
                other["content"] = content[0]["text"]
        if random.random() < 0.3:
            other["cache_control"] = {"type": "ephemeral"}
        found.append(other)
    return found


def _meaning(messages: Sequence[Any]) -> list[Any]:
    """Messages in a form in which equal ones mean the same: JSON with sorted keys, a text as parts, without marks."""

    def plain(message: dict[str, Any]) -> dict[str, Any]:
        found = {key: value for key, value in message.items() if key != "cache_control"}
        if isinstance(found.get("content"), str):
            found["content"] = [{"type": "text", "text": found["content"]}]
        elif isinstance(found.get("content"), list):
            found["content"] = [{k: v for k, v in part.items() if k != "cache_control"} for part in found["content"]]
        return found

    return [json.dumps([plain(message)], sort_keys=True) for message in messages]


Change = Callable[[list[Any], int, Random], list[Any]]


@pytest.mark.parametrize("change", [_edited, _dropped, _added, _swapped])
@given(conversations(min_steps=3, max_steps=8), PICK, PICK, st.integers(0, 2**32 - 1), SEEDS, st.booleans())
def test_a_checkpoint_reaches_what_begins_as_its_summariser_read_it_and_nothing_else(
    change: Change, messages: list[Any], pick: int, where: int, seed: int, spelling: int, own: bool
) -> None:
    assume(len(messages) > 2 and messages[0]["role"] not in ("system", "developer"))
    request = read(chat(messages, 0, 0).body)
    cuts = region.legal_cuts(request.facts)
    assume(cuts)
    k = cuts[pick % len(cuts)]
    seen = k + pick % (len(messages) - k)
    made = checkpoint(request, k, seen_len=seen)
    random = Random(seed)
    other = change([*messages], where % len(messages), random)
    if not other or other[0]["role"] in ("system", "developer"):
        return
    sent = read(chat(_same_meaning(other, random), 0, spelling).body)
    salted = sent.request.text("cache_salt")
    same = len(other) > k and not salted and _meaning(other[:seen]) == _meaning(messages[:seen])
    reaches = same and is_whole(other, k)  # a result of a covered call may have come in behind it
    recalled = Recalled(None, 0, own=made) if own else Recalled(None, 0, foreign=(made,))
    assert (rewrite.applicable(recalled, sent) is made) is reaches
    stranger = read(sent.request.body, tenant="stranger")
    assert rewrite.applicable(recalled, stranger) is None


@given(chats(min_steps=3, max_steps=8), PICK, st.booleans())
def test_another_preamble_parts_only_sessions(talk: Chat, pick: int, own: bool) -> None:
    """A clock in the system prompt does not lose a session its checkpoint; another session with another prompt gets none."""
    request = read(talk.body)
    cuts = region.legal_cuts(request.facts)
    if not cuts:
        return
    made = checkpoint(request, cuts[pick % len(cuts)])
    preamble = [{"role": "system", "content": "It is 12:00:02."}, *talk.messages[: talk.preamble_length]]
    body = chat([*preamble, *talk.conversation], len(preamble), 0).body
    assume(not request.request.text("cache_salt"))
    recalled = Recalled(None, 0, own=made) if own else Recalled(None, 0, foreign=(made,))
    assert (rewrite.applicable(recalled, read(body)) is made) is own
