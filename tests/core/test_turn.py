"""What is kept of a turn makes the routed request again byte for byte, or nothing; and only new bytes travel."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import conversation as conversations
from proxy.core import fingerprint, region, replay, rewrite, tokens, turn
from proxy.core.answer import UNREAD, Answer
from proxy.core.conversation import Conversation, Lineage
from proxy.core.model import (
    ByteHash,
    Checkpoint,
    CheckpointRef,
    Counters,
    Entries,
    Entry,
    Pending,
    Recalled,
    Saved,
    Session,
    Trigger,
    Usage,
    Window,
)
from proxy.core.rewrite import Routed
from proxy.core.turn import Forwarded
from tests.core.build import CONVERSATIONS, body_of, checkpoint, read, recorded, talk
from tests.strategies import Chat, chats, spelled

DONE = Answer(Usage(100, 20, 64), complete=True, finish="stop", text="Done.", reasoning=None, failed=False)
WINDOW = Window(32_000, "config")


class Shelf:
    """What a store keeps of one session: the bytes by their hashes, and the session as the next request finds it."""

    def __init__(self) -> None:
        self.bodies: dict[ByteHash, bytes] = {}
        self.session: Session | None = None
        self.checkpoint: Checkpoint | None = None

    def lineage(self, conversation: Conversation) -> Lineage:
        matched = 0
        for at, (entry, digest) in enumerate(
            zip(self.session.entries if self.session else (), conversation.chain, strict=False)
        ):
            matched = at + 1 if entry.chain == digest else matched
        return conversations.lineage(conversation, Recalled(self.session, matched))

    def route(self, conversation: Conversation) -> Routed:
        found = rewrite.applicable(Recalled(None, 0, own=self.checkpoint), conversation)
        return rewrite.route(conversation.request, conversation.preamble_length, found)

    def put(self, saved: Saved, refs: tuple[CheckpointRef, ...] = ()) -> Session:
        old = self.session if self.session and self.session.id == saved.session else None
        entries = Entries.of((*(old.entries[: saved.entries_from] if old else ()), *saved.entries))
        assert saved.base == (old.entries[saved.entries_from - 1].chain if old and saved.entries_from else b"")
        assert (len(entries), entries[-1].chain) == (saved.length, saved.end)
        assert all(fingerprint.byte_hash(data) == name for name, data in saved.bodies.items())
        assert not set(saved.touch) & set(saved.bodies)
        self.bodies |= saved.bodies
        self.session = Session(
            id=saved.session,
            explicit=saved.explicit,
            turn=saved.turn,
            entries=entries,
            bodies_from=saved.bodies_from,
            counters=replace(saved.inherit, turns=saved.inherit.turns + 1),
            version=0,
            generation=0,
            checkpoints=refs,
            pending=saved.pending,
            touched_ms=saved.turn.finished_ms,
            created_ms=0,
        )
        return self.session

    def turn(self, body: bytes, answer: Answer = DONE, *, now_ms: int = 1000) -> tuple[Saved, Routed]:
        conversation = read(body)
        routed = self.route(conversation)
        done = turn.forwarded(conversation, routed, answer, 90)
        saved = _saved(self.lineage(conversation), conversation, routed, done, now_ms=now_ms)
        self.put(saved, (self.checkpoint.ref,) if self.checkpoint else ())
        return saved, routed

    def warm(self) -> Any:
        assert self.session is not None
        wanted = turn.needed(self.session, self.checkpoint)
        return turn.warm_from_store(self.session, self.checkpoint, {name: self.bodies[name] for name in wanted})


def _saved(
    lineage: Lineage, conversation: Conversation, routed: Routed, done: Forwarded, *, now_ms: int = 1000, **keys: Any
) -> Saved:
    given: dict[str, Any] = {"upstream": "default", "window": WINDOW, "started_ms": now_ms - 500, "now_ms": now_ms}
    return turn.saved(
        lineage, conversation, routed, done, **{**given, "renew_after_ms": 3600_000, "pending": None, **keys}
    )


@given(chats(min_steps=2, max_steps=8), st.integers(0, 1000), st.integers(0, 3), st.booleans())
def test_the_store_gives_the_routed_request_back_byte_for_byte(
    chat: Chat, pick: int, head: int, compacted: bool
) -> None:
    shelf = Shelf()
    conversation = read(chat.body)
    from_ = region.keep_head(conversation.facts, head)
    cuts = [c for c in region.legal_cuts(conversation.facts) if c > from_]
    if compacted and cuts:
        shelf.checkpoint = checkpoint(conversation, cuts[pick % len(cuts)], from_=from_)
    _, routed = shelf.turn(chat.body)
    assert (routed.applied is None) is (shelf.checkpoint is None)
    warm = shelf.warm()
    assert warm is not None
    assert warm.body() == routed.body
    # The same request, as the worker that has just sent it knows it.
    done = turn.forwarded(conversation, routed, DONE, 90)
    live = turn.warm_after(warm.session, conversation, routed, None, done, warm.factor)
    # Whether the answer still is the conversation's, only the client's next request can tell.
    assert warm == replace(live, answer=None)


@given(
    chats(min_steps=3, max_steps=8),
    st.lists(st.integers(0, 1000), min_size=1, max_size=4),
    st.integers(0, 1000),
    st.booleans(),
)
def test_turn_after_turn_only_new_bytes_travel(chat: Chat, lengths: list[int], pick: int, marked: bool) -> None:
    """A conversation grows; on the way a checkpoint is applied and the client moves its cache marks."""
    shelf = Shelf()
    total = len(chat.conversation)
    for number, length in enumerate(sorted({1 + n % total for n in lengths} | {total})):
        messages = [*chat.messages[: chat.preamble_length + length]]
        if marked and isinstance(messages[-1], dict):
            messages[-1] = {**messages[-1], "cache_control": {"type": "ephemeral"}}
        body = body_of(messages)
        conversation = read(body)
        cuts = region.legal_cuts(conversation.facts)
        if number and shelf.checkpoint is None and cuts:
            shelf.checkpoint = checkpoint(conversation, cuts[pick % len(cuts)])
        before = shelf.session
        applied = shelf.route(conversation).applied
        saved, routed = shelf.turn(body)
        assert before is None or saved.session == before.id  # a growing history continues its session
        if before is not None:
            # Words that are said once more come once more, under the name they had.
            repeated = {entry.byte_hash for entry in saved.entries}
            assert not (set(saved.bodies) - repeated) & set(turn.needed(before, _applied_in(before, shelf)))
            assert all(saved.entries[0] != old for old in before.entries[saved.entries_from : saved.entries_from + 1])
        assert saved.bodies_from == (applied.k if applied else 0)
        warm = turn.warm_from_store(shelf.session, applied, shelf.bodies) if shelf.session else None
        assert warm is not None
        assert warm.body() == routed.body


def _applied_in(session: Session, shelf: Shelf) -> Checkpoint | None:
    return shelf.checkpoint if session.turn and session.turn.applied else None


@pytest.mark.skipif(not CONVERSATIONS.is_dir(), reason=f"no recorded conversations in {CONVERSATIONS}")
def test_recorded_conversations_come_back_from_the_store() -> None:
    for name, messages in recorded():
        if messages[0]["role"] == "system" and len(messages) < 3:
            continue
        shelf = Shelf()
        for length in sorted({max(2, len(messages) // 2), len(messages)}):
            body = json.dumps({"model": "m", "messages": messages[:length], "tools": []}, indent=1).encode()
            conversation = read(body)
            cuts = region.legal_cuts(conversation.facts)
            if shelf.session and cuts:
                shelf.checkpoint = checkpoint(conversation, cuts[len(cuts) // 2])
            _, routed = shelf.turn(body)
            warm = shelf.warm()
            assert warm is not None, name
            assert warm.body() == routed.body, name


def test_what_is_saved_of_a_first_turn() -> None:
    body = body_of("s u a u", temperature=1)
    conversation = read(body)
    saved, routed = Shelf().turn(body)
    request = conversation.request
    assert set(saved.bodies.values()) == {request.head, request.tail, *request.messages}
    assert (saved.entries_from, saved.base, saved.bodies_from, saved.touch) == (0, b"", 0, ())
    assert tuple(saved.entries) == tuple(
        Entry(c, f.byte_hash) for c, f in zip(conversation.chain, conversation.facts, strict=True)
    )
    assert (saved.length, saved.end, saved.applied, saved.explicit) == (3, conversation.chain[-1], None, "")
    kept = saved.turn
    assert (kept.model, kept.applied, kept.upstream, kept.window) == ("m", None, "default", WINDOW)
    assert (kept.usage, kept.answer) == (DONE.usage, b'{"role":"assistant","content":"Done."}')
    assert routed.body == body
    assert (kept.started_ms, kept.finished_ms, kept.weight) == (500, 1000, conversations.weight(conversation, None))


def test_the_next_turn_sends_its_new_messages_alone() -> None:
    shelf = Shelf()
    shelf.turn(body_of("s u*2 a*3 u*4"))
    saved, _ = shelf.turn(body_of("s u*2 a*3 u*4 a*5 u*6"))
    assert set(saved.bodies.values()) == set(read(body_of("u*2 a*3 u*4 a*5 u*6")).messages[3:])
    assert (saved.entries_from, len(saved.entries), saved.length) == (3, 2, 5)


def test_a_retry_sends_nothing() -> None:
    shelf = Shelf()
    body = body_of("s u a u")
    shelf.turn(body)
    saved, _ = shelf.turn(body)
    assert (saved.bodies, len(saved.entries), saved.entries_from, saved.length) == ({}, 0, 3, 3)


def test_another_preamble_or_parameter_sends_just_that() -> None:
    shelf = Shelf()
    messages = talk("s u a u")
    shelf.turn(body_of(messages, x=1))
    messages[0]["content"] = "12:00:02"
    body = body_of(messages, x=2)
    saved, _ = shelf.turn(body)
    assert set(saved.bodies.values()) == {spelled(messages[0]), read(body).request.head}
    assert (len(saved.entries), saved.session) == (0, shelf.session.id if shelf.session else None)


def test_a_moved_cache_mark_sends_the_message_it_was_moved_to() -> None:
    shelf = Shelf()
    messages = talk("u a u")
    messages[2]["cache_control"] = {"type": "ephemeral"}
    shelf.turn(body_of(messages))
    plain = talk("u a u*7 a u*9")
    plain[2] = talk("u")[0]
    saved, _ = shelf.turn(body_of(plain))
    # Its meaning is the same, so the session goes on; its bytes are new, so its entry is.
    assert saved.entries_from == 2
    assert shelf.session is not None
    assert shelf.session.length == 5


def test_with_a_kept_head_only_new_bytes_travel() -> None:
    shelf = Shelf()
    notation = "s u*1 a*2 u*3 a*4 u*5"
    shelf.turn(body_of(notation))
    shelf.checkpoint = checkpoint(read(body_of(notation)), 4, from_=2)
    first, _ = shelf.turn(body_of(f"{notation} a*6 u*7"))
    assert [json.loads(data)["content"].count("word") for data in first.bodies.values()] == [6, 7]
    second, _ = shelf.turn(body_of(f"{notation} a*6 u*7 a*8 u*9"))
    assert [json.loads(data)["content"].count("word") for data in second.bodies.values()] == [8, 9]
    assert (second.applied, second.bodies_from, second.turn.applied) == ("ckpt", 4, "ckpt")


def test_an_undone_checkpoint_brings_the_covered_bytes_back() -> None:
    shelf = Shelf()
    notation = "s u*1 a*2 u*3 a*4 u*5"
    shelf.checkpoint = checkpoint(read(body_of(notation)), 4)
    first, _ = shelf.turn(body_of(notation))
    assert len(first.bodies) == 4  # head, tail, preamble and the one message behind the checkpoint
    shelf.bodies = dict(first.bodies)
    shelf.checkpoint = None
    second, routed = shelf.turn(body_of(f"{notation} a*6"))
    assert len(second.bodies) == 5
    assert shelf.warm().body() == routed.body


@pytest.mark.parametrize(
    ("now_ms", "renewed"),
    [pytest.param(1000 + 3600_000, False, id="lately"), pytest.param(1001 + 3600_000, True, id="long ago")],
)
def test_bytes_that_the_store_has_are_renewed_now_and_then(now_ms: int, renewed: bool) -> None:
    shelf = Shelf()
    shelf.turn(body_of("s u a u*3"), now_ms=1000)
    before = shelf.session
    assert before is not None
    saved, _ = shelf.turn(body_of("s u a u*3 a*4 u*5"), now_ms=now_ms)
    assert set(saved.touch) == (set(turn.needed(before, None)) if renewed else set())


def test_a_pending_compaction_and_a_forks_counters_are_handed_on() -> None:
    conversation = read(body_of("u a u"))
    routed = rewrite.as_sent(conversation.request)
    counters = Counters(turns=9, last_turn=8, failures=1)
    lineage = replace(conversations.lineage(conversation, None), counters=counters)
    pending = Pending(Trigger.SOFT, 77)
    saved = _saved(lineage, conversation, routed, turn.forwarded(conversation, routed, DONE, 1), pending=pending)
    assert (saved.inherit, saved.pending, saved.session) == (counters, pending, lineage.id)


def _shelved() -> Shelf:
    shelf = Shelf()
    notation = "s u*1 a*2 u*3 a*4 u*5 a*6 u*7"
    shelf.checkpoint = checkpoint(read(body_of(notation)), 4, from_=2)
    shelf.turn(body_of(notation, x=1))
    return shelf


def test_no_byte_may_be_missing_or_changed() -> None:
    shelf = _shelved()
    session, made = shelf.session, shelf.checkpoint
    assert session is not None
    assert made is not None
    names = turn.needed(session, made)
    assert len(names) == len(set(names)) == 8
    bodies = {name: shelf.bodies[name] for name in names}
    assert turn.warm_from_store(session, made, bodies) is not None
    for name in names:
        assert turn.warm_from_store(session, made, {k: v for k, v in bodies.items() if k != name}) is None
        for changed in (b"", bodies[name] + b" ", bodies[name].replace(b"word", b"wort", 1) + b"\n", b"null"):
            assert turn.warm_from_store(session, made, {**bodies, name: changed}) is None


def test_the_checkpoint_must_be_the_one_that_was_applied() -> None:
    shelf = _shelved()
    session, made = shelf.session, shelf.checkpoint
    assert session is not None
    assert made is not None
    wrong = [
        None,
        replace(made, ref=replace(made.ref, id="other")),
        replace(made, frame=made.frame + " "),
        replace(made, ref=replace(made.ref, k=5)),
        replace(made, ref=replace(made.ref, k=99)),
        replace(made, ref=replace(made.ref, from_=0)),
    ]
    assert [turn.warm_from_store(session, other, shelf.bodies) for other in wrong] == [None] * len(wrong)
    plain = Shelf()
    plain.turn(body_of("u a u"))
    assert plain.session is not None
    assert turn.warm_from_store(plain.session, made, plain.bodies) is None


def test_a_session_without_a_turn_has_no_warm_request() -> None:
    shelf = _shelved()
    assert shelf.session is not None
    empty = replace(shelf.session, turn=None)
    assert turn.needed(empty, None) == ()
    assert turn.warm_from_store(empty, None, shelf.bodies) is None


@given(chats(min_steps=2, max_steps=6), st.integers(0, 10_000), st.integers(0, 10_000))
def test_no_damage_in_the_store_makes_another_request(chat: Chat, which: int, at: int) -> None:
    shelf = Shelf()
    shelf.turn(chat.body)
    assert shelf.session is not None
    names = turn.needed(shelf.session, None)
    name = names[which % len(names)]
    old = shelf.bodies[name]
    at %= len(old)
    changed = {**shelf.bodies, name: old[:at] + bytes([old[at] ^ 1]) + old[at + 1 :]}
    assert turn.warm_from_store(shelf.session, None, changed) is None


THINKING = {"role": "assistant", "content": "a", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("messages", "members", "answer", "expected"),
    [
        pytest.param("u", {}, {}, {"role": "assistant", "content": "Done."}, id="plain text"),
        pytest.param("u", {}, {"text": None}, None, id="no plain text: a tool call, a refusal"),
        pytest.param("u", {}, {"text": ""}, None, id="empty"),
        pytest.param("u", {"n": 2}, {}, None, id="several answers"),
        pytest.param("u", {"n": 1}, {}, {"role": "assistant", "content": "Done."}, id="one answer, said aloud"),
        pytest.param("u a", {}, {}, None, id="a prefill"),
        pytest.param("u a:x t:x", {}, {}, {"role": "assistant", "content": "Done."}, id="behind a tool result"),
        pytest.param("u", {}, {"reasoning": "hm"}, {"role": "assistant", "content": "Done."}, id="thoughts that the client does not send back"),
        pytest.param([THINKING, *talk("u")], {}, {"reasoning": "so"}, {"role": "assistant", "content": "Done.", "reasoning_content": "so"}, id="that it does"),
        pytest.param([THINKING, *talk("u")], {}, {}, {"role": "assistant", "content": "Done."}, id="no thoughts this time"),
    ],
)  # fmt: skip
def test_the_answer_is_rebuilt_where_it_may_be(
    messages: Any, members: dict[str, Any], answer: dict[str, Any], expected: Any
) -> None:
    conversation = read(body_of(messages, **members))
    done = turn.forwarded(conversation, rewrite.as_sent(conversation.request), replace(DONE, **answer), 1)
    assert (None if done.answer is None else json.loads(done.answer)) == expected


TEXT = "one two three"


@pytest.mark.parametrize(
    ("usage", "text", "used"),
    [
        pytest.param(Usage(100, 20, 64), TEXT, 120, id="counted"),
        pytest.param(Usage(100, 20, 64, 15), TEXT, 105, id="hidden thoughts do not stay"),
        pytest.param(Usage(100), TEXT, 103, id="the answer estimated"),
        pytest.param(Usage(100), None, 100, id="no text to estimate"),
        pytest.param(Usage(None, 20), TEXT, 520, id="the prompt estimated"),
        pytest.param(Usage(), TEXT, 503, id="all of it estimated"),
        pytest.param(Usage(), None, 500, id="only the prompt, estimated"),
        pytest.param(Usage(0, 0), None, 0, id="zero is a count"),
    ],
)
def test_used_is_the_providers_count_where_there_is_one(usage: Usage, text: str | None, used: int) -> None:
    assert tokens.of_text(TEXT) == 3
    conversation = read(body_of("u a u"))
    done = turn.forwarded(
        conversation, rewrite.as_sent(conversation.request), replace(UNREAD, usage=usage, text=text), 500
    )
    assert (done.usage, done.used, done.weight) == (usage, used, conversations.weight(conversation, None))


def test_a_request_not_yet_sent_is_warm_up_to_the_last_turns_end() -> None:
    shelf = Shelf()
    shelf.turn(body_of("s u a u"))
    known = shelf.session
    assert known is not None
    longer = read(body_of("s u a u a u"))
    warm = turn.warm_from_live(known.id, longer, rewrite.as_sent(longer.request), known, 1.0)
    assert (warm.end, warm.prompt, warm.answer, warm.offset) == (3, 100, None, 0)
    assert warm.body() == longer.request.body
    made = checkpoint(longer, 2)
    routed = rewrite.route(longer.request, 1, made)
    cold = turn.warm_from_live(known.id, longer, routed, known, 1.0)
    # Routed otherwise than the last turn was: the provider has seen nothing of it that we know of.
    assert (cold.end, cold.prompt, cold.offset, cold.body()) == (5, None, 2, routed.body)
    new = turn.warm_from_live(known.id, longer, rewrite.as_sent(longer.request), None, 1.0)
    assert (new.end, new.prompt) == (5, None)


@given(chats(min_steps=2, max_steps=8), st.integers(0, 1000), st.integers(0, 1000))
def test_a_warm_request_may_be_cut_at_any_message(chat: Chat, pick: int, to: int) -> None:
    conversation = read(chat.body)
    cuts = region.legal_cuts(conversation.facts)
    made = checkpoint(conversation, cuts[pick % len(cuts)]) if cuts and pick % 2 else None
    routed = rewrite.route(conversation.request, conversation.preamble_length, made)
    warm = turn.warm_after(
        conversations.lineage(conversation, None).id,
        conversation,
        routed,
        None,
        turn.forwarded(conversation, routed, DONE, 1),
        1.0,
    )
    end = warm.offset + len(warm.messages)
    to = warm.offset + to % (len(warm.messages) + 1)
    found = warm.routed(to)
    if made is not None and to == warm.offset:
        assert found is None
        return
    assert found is not None
    assert found == routed.messages[: len(found)]
    assert len(routed.messages) - len(found) == end - to


def test_a_rebuilt_answer_is_what_the_replay_sends() -> None:
    assert turn.forwarded(
        read(body_of("u")), rewrite.as_sent(read(body_of("u")).request), DONE, 1
    ).answer == replay.rebuilt_answer("Done.", None)
