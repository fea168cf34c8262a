"""A chat completion as a conversation: its preamble, its messages' facts, its chain; and which session it continues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core import fingerprint, tokens
from proxy.core.model import (
    ENTRY_BYTES,
    ByteHash,
    Checkpoint,
    Counters,
    Digest,
    Entries,
    Facts,
    Query,
    Recalled,
    Session,
    SessionId,
)
from proxy.core.openai import PREAMBLE_ROLES, ChatRequest


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one request tells. `facts` and `chain` describe the conversation's messages, `preamble_facts` the leading system ones."""

    request: ChatRequest
    preamble_facts: tuple[Facts, ...]
    facts: tuple[Facts, ...]
    chain: tuple[Digest, ...]
    entries: Entries
    preamble: Digest
    query: Query
    head_hash: ByteHash
    tail_hash: ByteHash
    start: Digest

    @property
    def preamble_length(self) -> int:
        """How many messages stand before position 0."""
        return len(self.preamble_facts)

    @property
    def messages(self) -> tuple[bytes, ...]:
        """The conversation's messages as slices; position 0 is the first after the preamble."""
        return self.request.messages[self.preamble_length :]

    @property
    def reasons(self) -> bool:
        """Whether thoughts travel in it."""
        return any(f.reasoning for f in self.facts)


def read(
    request: ChatRequest, facts: Sequence[Facts], tenant: str, explicit: str, known: Conversation | None = None
) -> Conversation | None:
    """The conversation, or None where there is only a preamble. `explicit`: an id the client gave, already hashed, or "".

    `facts` are those of all messages. `known`: an earlier conversation that may begin with the same bytes: what was worked out for it
    is taken over as far as its messages are the same objects.
    """
    length = 0
    while length < len(facts) and facts[length].role in PREAMBLE_ROLES:
        length += 1
    if length == len(facts):
        return None
    spoken = tuple(facts[length:])
    start = fingerprint.start(tenant, request.text("cache_salt"))
    chain: tuple[Digest, ...] = ()
    entries = b""
    if known is not None and known.start == start and known.preamble_length == length:
        same = _same_facts(known.facts, spoken)
        chain, entries = known.chain[:same], known.entries[:same].packed
    chain += fingerprint.chain(chain[-1] if chain else start, (f.digest for f in spoken[len(chain) :]))
    fresh = len(entries) // ENTRY_BYTES
    entries += b"".join(c + f.byte_hash for c, f in zip(chain[fresh:], spoken[fresh:], strict=True))
    return Conversation(
        request=request,
        preamble_facts=tuple(facts[:length]),
        facts=spoken,
        chain=chain,
        entries=Entries(entries),
        preamble=fingerprint.preamble(facts[:length]),
        query=Query(tenant, fingerprint.root(chain[0]), explicit, chain),
        head_hash=known.head_hash
        if known and known.request.head == request.head
        else fingerprint.byte_hash(request.head),
        tail_hash=known.tail_hash
        if known and known.request.tail == request.tail
        else fingerprint.byte_hash(request.tail),
        start=start,
    )


def _same_facts(old: Sequence[Facts], new: Sequence[Facts]) -> int:
    """How many facts are the same objects, from the start. The reader takes them over in one piece, so this is a search for the end of it."""
    limit = min(len(old), len(new))
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        if old[middle - 1] is new[middle - 1]:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class Lineage:
    """The session a request belongs to. `known`: its record, None if it is new; `counters`: its own, or those a fork inherits."""

    id: SessionId
    known: Session | None
    counters: Counters


def lineage(conversation: Conversation, recalled: Recalled | None) -> Lineage:
    """The session that this request continues, or a new one: it continues one whose end it has, else it is a fork.

    The same explicit id (or none) is needed to continue: an id separates the counters of equal prefixes.
    """
    query = conversation.query
    found = recalled.session if recalled else None
    if (
        found is not None
        and recalled is not None
        and found.length == recalled.matched
        and found.explicit == query.explicit
    ):
        return Lineage(found.id, found, found.counters)
    # Named by all of the request, not by where it diverges: two unknown conversations may share their first messages. A request that
    # ends inside a known conversation (a rewind) may have given that one its name: the parent's name keeps them apart.
    parent = found.id.lineage if found is not None else ""
    name = fingerprint.lineage(query.root, query.explicit, parent, query.chain[-1])
    inherited = found.counters if found is not None else Counters()
    return Lineage(SessionId(query.tenant, query.root, name), None, inherited)


def weight(conversation: Conversation, applied: Checkpoint | None) -> int:
    """Estimated tokens of the routed request, uncorrected: tools, preamble, checkpoint and messages.

    A quarter of the tools' bytes: JSON schemas are about 3.8 characters a token (measured on an airline agent's 14 tools).
    """
    total = conversation.request.schema_bytes // 4 + sum(f.weight for f in conversation.preamble_facts)
    if applied is None:
        return total + sum(f.weight for f in conversation.facts)
    kept = sum(f.weight for f in conversation.facts[: applied.from_])
    tail = sum(f.weight for f in conversation.facts[applied.k :])
    return total + kept + checkpoint_weight(applied) + tail


def checkpoint_weight(checkpoint: Checkpoint) -> int:
    """Estimated tokens of a checkpoint as a message, uncorrected."""
    return tokens.of_text(checkpoint.frame) + tokens.MESSAGE_OVERHEAD


def factor(known: Session | None) -> float:
    """How to correct estimates for this session: what the provider counted for its last turn, over what we estimated for it."""
    if known is None or known.turn is None:
        return 1.0
    return tokens.calibrate(known.turn.usage.prompt, known.turn.weight)
