"""A finished turn: what of it is kept, and how the warm request is made again from what was kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from proxy.core import conversation as conversations
from proxy.core import echo, fingerprint, openai, replay, tokens, truncated
from proxy.core.answer import Answer
from proxy.core.conversation import Conversation, Lineage
from proxy.core.model import (
    ByteHash,
    Checkpoint,
    Entries,
    Facts,
    Pending,
    Saved,
    Session,
    SessionId,
    Turn,
    Usage,
    Window,
)
from proxy.core.plan import Warm
from proxy.core.rewrite import Routed
from proxy.core.truncated import Truncated

__all__ = [
    "Forwarded",
    "Saved",
    "forwarded",
    "needed",
    "saved",
    "warm_after",
    "warm_from_live",
    "warm_from_store",
    "with_answer",
]


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What came of a turn. `used`: tokens in the window after it, the provider's count or the estimate. `weight`: the uncorrected estimate
    of the prompt. `answer`: the assistant message to add in a replay, None where it may not be rebuilt. `truncated`: the provider counted
    far less than was sent; `usage` is then without its count of the prompt, so that nothing is measured by it.
    """

    usage: Usage
    used: int
    weight: int
    answer: bytes | None
    truncated: Truncated | None = None


def forwarded(conversation: Conversation, routed: Routed, answer: Answer, estimate: int) -> Forwarded:
    """The turn's figures. `estimate`: the corrected estimate of the routed prompt, used where the provider did not count."""
    usage = answer.usage
    weight = conversations.weight(conversation, routed.applied)
    cut = truncated.truncated(conversation, routed.applied, usage.prompt, weight)
    if cut is not None:
        # An earlier count of this session, from which the estimate goes on, may have been such a one that was not noticed yet.
        usage, estimate = replace(usage, prompt=None, cached=None), max(estimate, weight)
    said = _said(usage, answer)
    used = said + (estimate if usage.prompt is None else usage.prompt)
    return Forwarded(usage, used, weight, _answer(conversation, answer), cut)


def _said(usage: Usage, answer: Answer) -> int:
    """Tokens of the visible answer: counted, else estimated where the text is known."""
    if usage.completion is None:
        return tokens.of_text(answer.text) if answer.text else 0
    return max(0, usage.completion - (usage.reasoning or 0))


def _answer(conversation: Conversation, answer: Answer) -> bytes | None:
    """The answer as a message, where it was one plain text. Not for a prefill: there the answer continues the client's last message."""
    if not answer.text or conversation.request.choices != 1 or conversation.facts[-1].role == "assistant":
        return None
    echoes_thoughts = any(f.role == "assistant" and f.reasoning for f in conversation.facts)
    return replay.rebuilt_answer(answer.text, answer.reasoning if echoes_thoughts else None)


def saved(
    lineage: Lineage,
    conversation: Conversation,
    routed: Routed,
    done: Forwarded,
    *,
    upstream: str,
    window: Window,
    started_ms: int,
    now_ms: int,
    renew_after_ms: int,
    pending: Pending | None,
) -> Saved:
    """The turn for the store: only the bytes that it does not have yet.

    Bytes in front of an applied checkpoint's end are not kept: no warm request needs them. They are sent again should an undo bring
    them back, since everything outside the stored range counts as new.
    """
    covered = routed.applied.k if routed.applied else 0
    kept = routed.applied.from_ if routed.applied else 0
    known = lineage.known
    same = known.entries.common(conversation.entries) if known is not None else 0
    renew = known is not None and now_ms - known.touched_ms > renew_after_ms
    bodies = _new_bodies(known, conversation, same, covered, kept)
    touch = _live_names(conversation, covered, kept) if renew else ()
    return Saved(
        session=lineage.id,
        explicit=conversation.query.explicit,
        turn=Turn(
            model=conversation.request.model,
            preamble=tuple(f.byte_hash for f in conversation.preamble_facts),
            head=conversation.head_hash,
            tail=conversation.tail_hash,
            applied=routed.applied.id if routed.applied else None,
            routed=_routed_hash(
                (conversation.head_hash, conversation.tail_hash, *(f.byte_hash for f in conversation.preamble_facts)),
                conversation.entries,
                routed.applied,
            ),
            answer=done.answer,
            usage=done.usage,
            window=window,
            upstream=upstream,
            started_ms=started_ms,
            finished_ms=now_ms,
            weight=done.weight,
        ),
        length=len(conversation.entries),
        end=conversation.chain[-1],
        entries_from=same,
        entries=conversation.entries[same:],
        bodies=bodies,
        touch=tuple(name for name in touch if name not in bodies),
        bodies_from=covered,
        inherit=lineage.counters,
        pending=pending,
        applied=routed.applied.id if routed.applied else None,
        base=conversation.chain[same - 1] if same else b"",
    )


def as_stored(saved: Saved, conversation: Conversation, known: Session | None) -> Session:
    """The session as the store will have it once a turn is written: for the next request, should it come before."""
    return Session(
        id=saved.session,
        explicit=saved.explicit,
        turn=saved.turn,
        entries=conversation.entries,
        bodies_from=saved.bodies_from,
        counters=replace(saved.inherit, turns=saved.inherit.turns + 1),
        version=known.version if known else 0,
        generation=known.generation if known else 0,
        checkpoints=known.checkpoints if known else (),
        pending=saved.pending,
        touched_ms=saved.turn.finished_ms,
        created_ms=known.created_ms if known else saved.turn.started_ms,
    )


def _new_bodies(
    known: Session | None, conversation: Conversation, same: int, covered: int, kept: int
) -> dict[ByteHash, bytes]:
    """The bytes of the warm request that the store has not for certain. It has those that the session's last warm request needed."""
    request = conversation.request
    around = {conversation.head_hash: request.head, conversation.tail_hash: request.tail}
    around.update(zip((f.byte_hash for f in conversation.preamble_facts), request.messages, strict=False))
    stored: set[ByteHash] = set()
    start = covered
    if known is not None and known.turn is not None:
        stored.update((known.turn.head, known.turn.tail, *known.turn.preamble))
        # A head that stands in front of the checkpoint; of another session's checkpoint we do not know how long it is.
        head = next((ref.from_ for ref in known.checkpoints if ref.id == known.turn.applied), 0)
        stored.update(known.entries[:head].byte_hashes())
        if same == known.length and known.bodies_from <= covered:
            # The common case: all from bodies_from up to here is stored, and was found equal in one comparison.
            start = max(covered, same)
            stored.update(known.entries[known.bodies_from : kept].byte_hashes())
        else:
            stored.update(known.entries[known.bodies_from :].byte_hashes())
    bodies = {name: data for name, data in around.items() if name not in stored}
    messages = conversation.messages
    for at in (*range(kept), *range(start, len(messages))):
        name = conversation.facts[at].byte_hash
        if name not in stored:
            bodies[name] = messages[at]
    return bodies


def _live_names(conversation: Conversation, covered: int, kept: int) -> tuple[ByteHash, ...]:
    """All bytes that the warm request is made of."""
    preamble = (f.byte_hash for f in conversation.preamble_facts)
    names = (*conversation.entries[:kept].byte_hashes(), *conversation.entries[covered:].byte_hashes())
    return (conversation.head_hash, conversation.tail_hash, *preamble, *names)


_RENDERING = b"1"
"""Which way of putting a checkpoint into a request made the routed bytes: another one must not verify them."""


def _routed_hash(around: Iterable[ByteHash], entries: Entries, applied: Checkpoint | None) -> ByteHash:
    """Names a routed request by the names of all that it is made of: hashing a body of a megabyte again would cost more than the turn."""
    parts = [_RENDERING, *around]
    if applied is None:
        parts.append(entries.packed)
    else:
        parts += [
            fingerprint.byte_hash(applied.frame.encode("utf-8", "replace")),
            b"%d:%d:" % (applied.from_, applied.k),
        ]
        parts += [entries[: applied.from_].packed, entries[applied.k :].packed]
    return fingerprint.byte_hash(b"".join(parts))


def warm_after(
    session: SessionId,
    conversation: Conversation,
    routed: Routed,
    known: Session | None,
    done: Forwarded,
    factor: float,
) -> Warm:
    """The request that the provider has just answered, for a replay. `known`: the session before it.

    Without a prefill at its end: the client will send the whole answer in its place, so nothing may depend on it.
    """
    answer = done.answer if echo.may_be_read(known, conversation.messages) else None
    end, prompt = _before_a_prefill(conversation.facts, len(conversation.facts), done.usage.prompt)
    return _live(session, conversation, routed, factor, end=end, answer=answer, prompt=prompt)


def _before_a_prefill(facts: Sequence[Facts], length: int, prompt: int | None) -> tuple[int, int | None]:
    """Where a replay of a request ends, and the provider's count for it where that end is the request's."""
    if length > 1 and facts and facts[-1].role == "assistant":
        return length - 1, None
    return length, prompt


def warm_from_live(
    session: SessionId, conversation: Conversation, routed: Routed, known: Session | None, factor: float
) -> Warm:
    """A request that has not been sent yet, for a compaction before it: the provider is warm for what the session's last turn sent.

    `end` is where that turn ended, if it was routed like this one; else the provider has seen nothing of it that we know of.
    """
    applied = routed.applied.id if routed.applied else None
    seen = (
        known is not None
        and known.turn is not None
        and known.turn.applied == applied
        and known.length <= len(conversation.facts)
    )
    end = known.length if known is not None and seen else len(conversation.facts)
    prompt = known.turn.usage.prompt if known is not None and seen and known.turn is not None else None
    return _live(session, conversation, routed, factor, end=end, answer=None, prompt=prompt)


def _live(
    session: SessionId,
    conversation: Conversation,
    routed: Routed,
    factor: float,
    *,
    end: int,
    answer: bytes | None,
    prompt: int | None,
) -> Warm:
    applied = routed.applied
    offset = applied.k if applied else 0
    kept = conversation.messages[: applied.from_ if applied else 0]
    facts = conversation.facts[offset:]
    return Warm(
        session=session,
        model=conversation.request.model,
        head=conversation.request.head,
        tail=conversation.request.tail,
        preamble=conversation.request.messages[: conversation.preamble_length],
        preamble_digest=conversation.preamble,
        kept=kept,
        messages=conversation.messages[offset:],
        facts=facts,
        chain=conversation.chain,
        offset=offset,
        applied=applied,
        end=max(end, offset),
        answer=answer,
        base=conversations.weight(conversation, applied) - sum(f.weight for f in facts),
        factor=factor,
        prompt=prompt,
    )


def with_answer(warm: Warm, known: Session, next_request: Conversation) -> Warm:
    """The stored warm request and the answer it got, if that is what the next request goes on from."""
    answer = known.turn.answer if known.turn is not None else None
    return replace(warm, answer=answer) if answer and echo.may_be_read(known, next_request.messages) else warm


def needed(session: Session, applied: Checkpoint | None) -> tuple[ByteHash, ...]:
    """The bytes that the session's warm request is made of."""
    if session.turn is None:
        return ()
    covered = (applied.from_, applied.k) if applied else (0, 0)
    messages = (session.entries[: covered[0]].byte_hashes(), session.entries[covered[1] :].byte_hashes())
    return (session.turn.head, session.turn.tail, *session.turn.preamble, *messages[0], *messages[1])


def warm_from_store(session: Session, applied: Checkpoint | None, bodies: Mapping[ByteHash, bytes]) -> Warm | None:
    """The warm request again from what the store kept; None unless it is, byte for byte, the one that was sent.

    Without the answer it got: only the client's next request tells whether that is still the conversation's (`with_answer`).

    Each part is verified by its own hash, and that these parts make that request by the hash over their names.
    """
    turn = session.turn
    if turn is None or (applied.id if applied else None) != turn.applied:
        return None
    try:
        head, tail = bodies[turn.head], bodies[turn.tail]
        preamble = tuple(bodies[name] for name in turn.preamble)
        offset, from_ = (applied.k, applied.from_) if applied else (0, 0)
        kept = tuple(bodies[name] for name in session.entries[:from_].byte_hashes())
        messages = tuple(bodies[name] for name in session.entries[offset:].byte_hashes())
    except KeyError:
        return None
    facts = tuple(fingerprint.facts(element) for element in messages)
    before = tuple(fingerprint.facts(element) for element in (*preamble, *kept))
    base = openai.schema_bytes(head, tail) // 4 + sum(f.weight for f in before)
    if applied:
        base += conversations.checkpoint_weight(applied)
    end, prompt = _before_a_prefill(facts, len(session.entries), turn.usage.prompt)
    warm = Warm(
        session=session.id,
        model=turn.model,
        head=head,
        tail=tail,
        preamble=preamble,
        preamble_digest=fingerprint.preamble(before[: len(preamble)]),
        kept=kept,
        messages=messages,
        facts=facts,
        chain=session.entries.chains(),
        offset=offset,
        applied=applied,
        end=end,
        answer=None,
        base=base,
        factor=tokens.calibrate(turn.usage.prompt, turn.weight),
        prompt=prompt,
    )
    if any(fingerprint.byte_hash(bodies[name]) != name for name in needed(session, applied)):
        return None
    expected = _routed_hash((turn.head, turn.tail, *turn.preamble), session.entries, applied)
    return warm if warm.body() is not None and expected == turn.routed else None
