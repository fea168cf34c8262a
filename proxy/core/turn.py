"""A finished turn: what of it is kept, and how the warm request is made again from what was kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from proxy.core import conversation as conversations
from proxy.core import fingerprint, openai, replay, tokens
from proxy.core.answer import Answer
from proxy.core.conversation import Conversation, Lineage
from proxy.core.model import (
    ByteHash,
    Checkpoint,
    Entry,
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

__all__ = ["Forwarded", "Saved", "forwarded", "needed", "saved", "warm_after", "warm_from_live", "warm_from_store"]


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What came of a turn. `used`: tokens in the window after it, the provider's count or the estimate. `weight`: the uncorrected estimate
    of the prompt. `answer`: the assistant message to add in a replay, None where it may not be rebuilt.
    """

    usage: Usage
    used: int
    weight: int
    answer: bytes | None


def forwarded(conversation: Conversation, routed: Routed, answer: Answer, estimate: int) -> Forwarded:
    """The turn's figures. `estimate`: the corrected estimate of the routed prompt, used where the provider did not count."""
    usage = answer.usage
    visible = tokens.of_text(answer.text) if answer.text else 0
    if usage.prompt is None:
        used = estimate + (visible if usage.completion is None else usage.completion)
    else:
        used = (usage.used or usage.prompt) + (visible if usage.completion is None else 0)
    weight = conversations.weight(conversation, routed.applied)
    return Forwarded(usage, used, weight, _answer(conversation, answer))


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
    head, tail = fingerprint.byte_hash(conversation.request.head), fingerprint.byte_hash(conversation.request.tail)
    covered = routed.applied.k if routed.applied else 0
    kept = routed.applied.from_ if routed.applied else 0
    known = lineage.known
    stored = _stored(known)
    bodies: dict[ByteHash, bytes] = {}
    live: list[ByteHash] = []

    def keep(name: ByteHash, data: bytes) -> None:
        live.append(name)
        if name not in stored:
            bodies[name] = data

    keep(head, conversation.request.head)
    keep(tail, conversation.request.tail)
    for fact, element in zip(conversation.preamble_facts, conversation.request.messages, strict=False):
        keep(fact.byte_hash, element)
    for at, (fact, element) in enumerate(zip(conversation.facts, conversation.messages, strict=True)):
        if at < kept or at >= covered:
            keep(fact.byte_hash, element)
    entries = tuple(Entry(c, f.byte_hash) for c, f in zip(conversation.chain, conversation.facts, strict=True))
    same = _same_entries(known, entries)
    renew = known is not None and now_ms - known.touched_ms > renew_after_ms
    return Saved(
        session=lineage.id,
        explicit=conversation.query.explicit,
        turn=Turn(
            model=conversation.request.model,
            preamble=tuple(f.byte_hash for f in conversation.preamble_facts),
            head=head,
            tail=tail,
            applied=routed.applied.id if routed.applied else None,
            routed=fingerprint.byte_hash(routed.body),
            answer=done.answer,
            usage=done.usage,
            window=window,
            upstream=upstream,
            started_ms=started_ms,
            finished_ms=now_ms,
            weight=done.weight,
        ),
        length=len(entries),
        end=conversation.chain[-1],
        entries_from=same,
        entries=entries[same:],
        bodies=bodies,
        touch=tuple(name for name in live if name not in bodies) if renew else (),
        bodies_from=covered,
        inherit=lineage.counters,
        pending=pending,
        applied=routed.applied.id if routed.applied else None,
        base=entries[same - 1].chain if same else b"",
    )


def _stored(known: Session | None) -> frozenset[ByteHash]:
    """The bytes that the store has for certain: those of the session's last turn that its warm request needs."""
    if known is None or known.turn is None:
        return frozenset()
    names = {known.turn.head, known.turn.tail, *known.turn.preamble}
    names.update(entry.byte_hash for entry in known.entries[known.bodies_from :])
    # A head that stands in front of the checkpoint; of another session's checkpoint we do not know how long it is.
    kept = next((ref.from_ for ref in known.checkpoints if ref.id == known.turn.applied), 0)
    names.update(entry.byte_hash for entry in known.entries[:kept])
    return frozenset(names)


def _same_entries(known: Session | None, entries: tuple[Entry, ...]) -> int:
    """How many entries are stored already as they are."""
    if known is None:
        return 0
    for at, (old, new) in enumerate(zip(known.entries, entries, strict=False)):
        if old != new:
            return at
    return min(len(known.entries), len(entries))


def warm_after(session: SessionId, conversation: Conversation, routed: Routed, done: Forwarded, factor: float) -> Warm:
    """The request that the provider has just answered, for a replay."""
    return _live(
        session, conversation, routed, factor, end=len(conversation.facts), answer=done.answer, prompt=done.usage.prompt
    )


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


def needed(session: Session, applied: Checkpoint | None) -> tuple[ByteHash, ...]:
    """The bytes that the session's warm request is made of."""
    if session.turn is None:
        return ()
    covered = (applied.from_, applied.k) if applied else (0, 0)
    messages = [e.byte_hash for at, e in enumerate(session.entries) if not covered[0] <= at < covered[1]]
    return (session.turn.head, session.turn.tail, *session.turn.preamble, *messages)


def warm_from_store(session: Session, applied: Checkpoint | None, bodies: Mapping[ByteHash, bytes]) -> Warm | None:
    """The warm request again from what the store kept; None unless it is, byte for byte, the one that was sent."""
    turn = session.turn
    if turn is None or (applied.id if applied else None) != turn.applied:
        return None
    try:
        head, tail = bodies[turn.head], bodies[turn.tail]
        preamble = tuple(bodies[name] for name in turn.preamble)
        offset, from_ = (applied.k, applied.from_) if applied else (0, 0)
        kept = tuple(bodies[e.byte_hash] for e in session.entries[:from_])
        messages = tuple(bodies[e.byte_hash] for e in session.entries[offset:])
    except KeyError:
        return None
    facts = tuple(fingerprint.facts(element) for element in messages)
    before = tuple(fingerprint.facts(element) for element in (*preamble, *kept))
    base = openai.schema_bytes(head, tail) // 4 + sum(f.weight for f in before)
    if applied:
        base += conversations.checkpoint_weight(applied)
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
        chain=tuple(e.chain for e in session.entries),
        offset=offset,
        applied=applied,
        end=len(session.entries),
        answer=turn.answer,
        base=base,
        factor=tokens.calibrate(turn.usage.prompt, turn.weight),
        prompt=turn.usage.prompt,
    )
    body = warm.body()
    return warm if body is not None and fingerprint.byte_hash(body) == turn.routed else None
