"""The values that travel through the proxy. Words are those of the documentation: docs/words.md.

Positions count messages of the conversation (the preamble is not counted) in the CLIENT's request; ranges are half-open.
A digest is 16 bytes. A token count is an int; where a provider did not say, it is None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import overload

Digest = bytes
"""16 bytes: the chain digest of a prefix, or the meaning of one message."""

ByteHash = bytes
"""16 bytes: names exact bytes. Equal meaning may have different byte hashes (a moved cache mark, another spacing)."""


class Because(StrEnum):
    """The closed vocabulary of reasons: journal, metrics, headers and logs use these words and no others."""

    # why no compaction was made or wanted
    OFF = "off"
    OBSERVE = "observe"
    BELOW_WATERMARK = "below_watermark"
    DEBOUNCE = "debounce"
    BACKOFF = "backoff"
    REGION_TOO_SMALL = "region_too_small"
    INSUFFICIENT_GAIN = "insufficient_gain"
    NO_BOUNDARY = "no_boundary"
    NO_ROOM = "no_room"
    UNSHRINKABLE = "unshrinkable"
    UNAPPLIED = "unapplied"
    IN_FLIGHT = "in_flight"
    COLD = "cold"
    QUOTA = "quota"
    PAYBACK = "payback"
    REASONING = "reasoning"
    UNKNOWN_USAGE = "unknown_usage"
    NO_MODEL = "no_model"
    WARM_MISSING = "warm_missing"
    CONFLICT = "conflict"
    SUPERSEDED = "superseded"
    STOPPED = "stopped"
    STORE = "store"
    # why a summary was not taken
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    STATUS = "status"
    RATE_LIMITED = "rate_limited"
    OVERFLOW = "overflow"
    MALFORMED = "malformed"
    EMPTY = "empty"
    TRUNCATED = "truncated"
    FILTERED = "filtered"
    UNFINISHED = "unfinished"
    TOOL_CALL = "tool_call"
    OVERSIZED = "oversized"
    INFLATED = "inflated"
    REFUSAL = "refusal"
    ERROR_TEXT = "error_text"
    ECHO = "echo"
    TOO_SHORT = "too_short"
    INTERNAL = "internal"


class Trigger(StrEnum):
    """What asked for a compaction."""

    SOFT = "soft"
    GUARD = "guard"
    OVERFLOW = "overflow"
    FORCE = "force"
    MANUAL = "manual"


class Scope(StrEnum):
    """How much of the warm request the summariser reads: all of it, or only the region."""

    WARM = "warm"
    REGION = "region"


@dataclass(frozen=True, slots=True)
class Facts:
    """What one message says about its place in the conversation; read once per distinct bytes.

    `calls` are the ids of the tool calls it makes (a legacy function_call counts under its function's name), `answers` the ids of
    the calls it is a result of. `opening` is the start of its text, at most 60 characters. `weight` estimates its tokens when
    nothing better is known: see core/tokens.py. `spliceable`: its content can take text in front (a string or a list of parts).
    """

    role: str
    digest: Digest
    byte_hash: ByteHash
    calls: tuple[str, ...]
    answers: tuple[str, ...]
    opening: str
    weight: int
    reasoning: bool
    spliceable: bool


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """What decides whether a checkpoint applies, without its text.

    Covers [from_, k). `digest_k` is the chain digest of length k. `seen_len` and `seen` are length and chain digest of all
    that its summariser read. `preamble` is the digest of the preamble it was made under. `dead`: undone, never applied again.
    """

    id: str
    generation: int
    from_: int
    k: int
    digest_k: Digest
    seen_len: int
    seen: Digest
    preamble: Digest
    dead: bool = False


@dataclass(frozen=True, slots=True)
class Said:
    """Words of a covered message, kept verbatim: by whom, at which position, and why (a word of core/ledger.py)."""

    role: str
    position: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What stands for a region. `frame` is the text of the checkpoint message exactly as it is sent, the same bytes on every turn.

    `answer` names the answer behind `ref.seen` that the summariser read as well (core/echo.py); empty: it read none.
    """

    ref: CheckpointRef
    session: str
    text: str
    ledger: tuple[Said, ...]
    anchors: tuple[str, ...]
    frame: str
    region_tokens: int
    checkpoint_tokens: int
    model: str
    scope: Scope
    strategy: str
    made_at_ms: int
    answer: Digest = b""

    @property
    def id(self) -> str:
        """The checkpoint's public name."""
        return self.ref.id

    @property
    def k(self) -> int:
        """End of what it covers."""
        return self.ref.k

    @property
    def from_(self) -> int:
        """Start of what it covers."""
        return self.ref.from_


@dataclass(frozen=True, slots=True)
class Usage:
    """What the provider counted. None is unknown, never zero. `prompt` includes what came from the cache."""

    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None
    reasoning: int | None = None

    @property
    def used(self) -> int | None:
        """Tokens that the next request will find in the window: the prompt and the visible answer."""
        if self.prompt is None:
            return None
        return self.prompt + max(0, (self.completion or 0) - (self.reasoning or 0))


NOT_COUNTED = Usage()
"""No call was made, or nobody counted."""


@dataclass(frozen=True, slots=True)
class Window:
    """A model's context length in tokens and where we have it from: config, upstream, learned, pricelist, assumed.

    `input_only`: it limits the prompt alone, and the answer has room of its own; else prompt and answer share it.
    """

    tokens: int
    origin: str
    input_only: bool = False

    @property
    def assumed(self) -> bool:
        """Nobody told us: such a window never triggers the guard or the last resort."""
        return self.origin == "assumed"


@dataclass(frozen=True, slots=True)
class Pending:
    """A compaction that waits for the next turn (`when = "next_turn"`)."""

    trigger: Trigger
    since_ms: int


@dataclass(frozen=True, slots=True)
class Counters:
    """What limits soft compactions; a fork inherits them.

    `turns` counts turns of the session, `last_turn` is `turns` at the last compaction (attempted or made), `failures` counts
    consecutive failures, before `not_before_ms` there is no soft attempt. `unapplied`: checkpoints in a row that no request used.
    """

    turns: int = 0
    last_turn: int | None = None
    failures: int = 0
    not_before_ms: int = 0
    unapplied: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """One chat completion that the provider answered completely with 200: what the request header remembers of it.

    With `entries` (chain digest and byte hash of each conversation message) and the bytes by hash this rebuilds the routed
    request byte for byte: envelope head, preamble, [0, from_) of the messages, the checkpoint `applied`, [k, n), envelope tail.
    `routed` is the byte hash of that whole body, so a rebuilt one can be verified. `answer` is the assistant message to append in a
    replay (its JSON), or None where it may not be rebuilt.
    """

    model: str
    preamble: tuple[ByteHash, ...]
    head: ByteHash
    tail: ByteHash
    applied: str | None
    routed: ByteHash
    answer: bytes | None
    usage: Usage
    window: Window
    upstream: str
    started_ms: int
    finished_ms: int
    weight: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One message of a stored conversation: the chain digest up to and including it, and the hash of its bytes."""

    chain: Digest
    byte_hash: ByteHash


ENTRY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Entries(Sequence[Entry]):
    """The entries of a conversation as they are stored: 32 bytes each, the chain digest first. Hundreds of objects a turn would cost more
    than all the rest of it, so they are made only where somebody looks at one.
    """

    packed: bytes = b""

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Entries:
        """The same entries, packed."""
        return cls(b"".join(entry.chain + entry.byte_hash for entry in entries))

    def __len__(self) -> int:
        return len(self.packed) // ENTRY_BYTES

    @overload
    def __getitem__(self, at: int) -> Entry: ...
    @overload
    def __getitem__(self, at: slice) -> Entries: ...
    def __getitem__(self, at: int | slice) -> Entry | Entries:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            if step != 1:
                return Entries.of(self[i] for i in range(start, stop, step))
            return Entries(self.packed[start * ENTRY_BYTES : max(start, stop) * ENTRY_BYTES])
        index = range(len(self))[at] * ENTRY_BYTES
        return Entry(self.packed[index : index + 16], self.packed[index + 16 : index + ENTRY_BYTES])

    def common(self, other: Entries) -> int:
        """How many entries both begin with."""
        limit = min(len(self), len(other))
        if other.packed.startswith(self.packed[: limit * ENTRY_BYTES]):
            return limit
        low, high = 0, limit  # equal up to low, different before high
        while high - low > 1:
            middle = (low + high) // 2
            if self.packed[: middle * ENTRY_BYTES] == other.packed[: middle * ENTRY_BYTES]:
                low = middle
            else:
                high = middle
        return low

    def byte_hashes(self) -> tuple[ByteHash, ...]:
        """The names of the messages' bytes, in order."""
        return tuple(self.packed[at + 16 : at + ENTRY_BYTES] for at in range(0, len(self.packed), ENTRY_BYTES))

    def chains(self) -> tuple[Digest, ...]:
        """The chain digests, in order."""
        return tuple(self.packed[at : at + 16] for at in range(0, len(self.packed), ENTRY_BYTES))


@dataclass(frozen=True, slots=True)
class SessionId:
    """`root` (16 base32 characters under a tenant) and `lineage` (16): together the public id `root-lineage`."""

    tenant: str
    root: str
    lineage: str

    def __str__(self) -> str:
        return f"{self.tenant}-{self.root}-{self.lineage}"

    @classmethod
    def parse(cls, text: str) -> SessionId | None:
        """The id a person typed, or None where it has not the form of one."""
        parts = text.split("-")
        if len(parts) != 3 or not all(p.isalnum() and p.isascii() and len(p) <= 32 for p in parts):
            return None
        return cls(*parts)


@dataclass(frozen=True, slots=True)
class Session:
    """What the store keeps of one lineage of a conversation.

    `version` moves with every commit or undo, never with a turn. `entries` holds one entry per conversation message of the
    last turn; bytes before `bodies_from` may be gone (they are covered). `checkpoints`: the eight newest, oldest first, tombstones among them.
    `touched_ms`: when the bytes' time to live was last renewed; 0: unknown, so renew them with the next turn.
    """

    id: SessionId
    explicit: str
    turn: Turn | None
    entries: Entries
    bodies_from: int
    counters: Counters
    version: int
    generation: int
    checkpoints: tuple[CheckpointRef, ...]
    pending: Pending | None
    touched_ms: int
    created_ms: int

    @property
    def length(self) -> int:
        """Messages in the last turn's request."""
        return len(self.entries)


@dataclass(frozen=True, slots=True)
class Query:
    """Whose conversation is this: the chain of a request, oldest first (chain[i] is the digest of the prefix of length i + 1)."""

    tenant: str
    root: str
    explicit: str
    chain: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class Recalled:
    """What one round trip to the store brought.

    `session`: the one found at the longest known prefix, or None; `matched`: length of that prefix. Checkpoints are here only if what
    they cover and what their summariser saw lie on the request's chain. `own`: the session's newest, where the request continues the
    session (same explicit id, same end). `foreign`: where there is no `own`, those of the root's sessions, longest first, newest
    first among equals, at most four and no two with the same preamble; whether it is the request's is for the caller to judge.
    `root_unapplied`: checkpoints made lately for any session of the root since a request last carried one.
    """

    session: Session | None
    matched: int
    own: Checkpoint | None = None
    foreign: tuple[Checkpoint, ...] = ()
    root_unapplied: int = 0


@dataclass(frozen=True, slots=True)
class Saved:
    """A turn on its way into the store. `bodies` are only the bytes that the store does not have yet.

    `entries` replace those from `entries_from` on; `base` is the chain digest they are put behind (of the prefix of length
    `entries_from`; empty for 0): a store whose session has another one there refuses. `touch` are the hashes whose time to live is to be
    renewed. `inherit` counts where the session is new (a fork: its parent's counters). `pending` replaces what was pending.
    `applied`: the checkpoint that the turn carried; its time to live is renewed and `unapplied` starts again at 0.
    """

    session: SessionId
    explicit: str
    turn: Turn
    length: int
    end: Digest
    entries_from: int
    entries: Entries
    bodies: dict[ByteHash, bytes]
    touch: tuple[ByteHash, ...]
    bodies_from: int
    inherit: Counters
    pending: Pending | None
    applied: str | None
    base: Digest = b""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a decision went by; None: it played no part, or is not known.

    `payback_turns`, `cost_usd`, `saving_usd` (of each later turn): core/payback.py. `idle_s`: since the warm request. `needed_tokens`: what the
    call takes of the provider's quota; `remaining_tokens`, `remaining_requests`: what the provider says is left of it.
    """

    payback_turns: float | None = None
    cost_usd: float | None = None
    saving_usd: float | None = None
    idle_s: float | None = None
    needed_tokens: int | None = None
    remaining_tokens: int | None = None
    remaining_requests: int | None = None


NO_FIGURES = Figures()


@dataclass(frozen=True, slots=True)
class Attempt:
    """One line of a session's journal: a compaction that was made, failed, waits or was not worth it."""

    at_ms: int
    trigger: Trigger
    outcome: str
    because: str
    pressure: float | None
    from_: int
    k: int
    strategy: str
    scope: str
    prompt: int | None = None
    cached: int | None = None
    new: int | None = None
    expected_new: int | None = None
    completion: int | None = None
    miss: str = ""
    duration_ms: int = 0
    generation: int = 0
    saved_tokens: int | None = None
    figures: Figures = NO_FIGURES


@dataclass(frozen=True, slots=True)
class Commit:
    """A checkpoint that wants to become the newest of its session, based on `version`."""

    session: SessionId
    version: int
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class Listed:
    """One page of sessions, as the admin listener shows them."""

    sessions: tuple[Session, ...] = field(default=())
    cursor: str = ""
