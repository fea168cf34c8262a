"""Values <-> bytes. What cannot be read raises Unreadable with the word under which it is counted; nobody repairs anything."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from proxy.core.model import (
    Attempt,
    ByteHash,
    Checkpoint,
    CheckpointRef,
    Counters,
    Entries,
    Pending,
    Session,
    SessionId,
    Trigger,
    Turn,
)
from proxy.store.keys import SCHEMA, encoded
from proxy.store.scripts import FIELDS
from proxy.store.trouble import Trouble

T = TypeVar("T")

_REF = struct.Struct(">IIII16s16s16sBB")
_DIGEST_BYTES = 16


class Unreadable(Exception):
    """A stored value that is not what it should be."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble)
        self.trouble = trouble


def verified(byte_hash: ByteHash, data: bytes) -> bytes:
    """The bytes, if they are those that the hash names."""
    if hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest() != byte_hash:
        raise Unreadable(Trouble.HASH)
    return data


def packed_turn(turn: Turn) -> bytes:
    """A turn as MessagePack."""
    return msgspec.msgpack.encode(turn)


def packed_ref(ref: CheckpointRef, lineage: str) -> bytes:
    """A reference as the scripts read it (common.lua: REF): numbers, digests, whether it is dead, then id and lineage with their lengths."""
    id_, line = encoded(ref.id), encoded(lineage)
    numbers = (ref.generation, ref.from_, ref.k, ref.seen_len)
    head = _REF.pack(*numbers, ref.digest_k, ref.seen, ref.preamble, ref.dead, len(id_))
    return head + id_ + bytes([len(line)]) + line


def _refs(packed: bytes) -> tuple[CheckpointRef, ...]:
    found, at = [], 0
    while at < len(packed):
        generation, from_, k, seen_len, digest_k, seen, preamble, dead, length = _REF.unpack_from(packed, at)
        at += _REF.size
        id_ = packed[at : at + length].decode()
        at += length
        at += 1 + packed[at]  # whose it is: only the scripts ask
        found.append(CheckpointRef(id_, generation, from_, k, digest_k, seen_len, seen, preamble, bool(dead)))
    if at != len(packed):
        raise Unreadable(Trouble.FORMAT)
    return tuple(found)


def session(id: SessionId, values: Sequence[bytes | None], entries: bytes) -> Session:
    """The session of a record (fields in the order of scripts.FIELDS) and its entries, which the script has checked against each other."""
    field = dict(zip(FIELDS, values, strict=True))

    def number(name: str) -> int:
        return int(field[name] or b"0")

    try:
        last, trigger, turn = field["last"], field["pending"], field["turn"]
        return Session(
            id=id,
            explicit=(field["explicit"] or b"").decode("utf-8", "surrogatepass"),
            turn=msgspec.msgpack.decode(turn or b"", type=Turn),
            entries=Entries(entries),
            bodies_from=number("bodies_from"),
            counters=Counters(
                turns=number("turns"),
                last_turn=int(last) if last else None,
                failures=number("fails"),
                not_before_ms=number("until"),
                unapplied=number("idle"),
            ),
            version=number("version"),
            generation=number("generation"),
            checkpoints=_refs(field["refs"] or b""),
            pending=Pending(Trigger(trigger.decode()), number("since")) if trigger else None,
            touched_ms=number("touched"),
            created_ms=number("created"),
        )
    except (ValueError, IndexError, struct.error, msgspec.MsgspecError) as error:
        raise Unreadable(Trouble.FORMAT) from error


def sealed(owner: str, name: str) -> bytes:
    """What a value begins with that must not be taken for another's: schema, tenant and root, lineage or id."""
    return encoded(f"{SCHEMA}|{owner}|{name}|")


def checkpoint_value(owner: str, checkpoint: Checkpoint) -> bytes:
    """A checkpoint: seal, digest at k, one byte that says whether it is dead, MessagePack."""
    ref = checkpoint.ref
    return sealed(owner, ref.id) + ref.digest_k + bytes([ref.dead]) + msgspec.msgpack.encode(checkpoint)


def checkpoint(owner: str, value: bytes, id: str | None = None) -> Checkpoint:
    """The checkpoint of a value; its id must be `id` where one is given, and in any case the one of its seal."""
    schema, _, rest = value.partition(b"|")
    if schema != SCHEMA.encode():
        raise Unreadable(Trouble.SCHEMA)
    name = rest.split(b"|", 2)[1] if rest.count(b"|") > 1 else b""
    # Replaced bytes make another name, and so no seal of this value.
    seal = sealed(owner, id if id is not None else name.decode("utf-8", "replace"))
    if not value.startswith(seal):
        raise Unreadable(Trouble.IDENTITY)
    at = len(seal) + _DIGEST_BYTES
    read = _decoded(value[at + 1 :], Checkpoint)
    if sealed(owner, read.id) != seal or read.ref.digest_k != value[len(seal) : at]:
        raise Unreadable(Trouble.IDENTITY)
    return replace(read, ref=replace(read.ref, dead=True)) if value[at] else read


def attempt_value(owner: str, lineage: str, attempt: Attempt) -> bytes:
    """A line of a journal."""
    return sealed(owner, lineage) + msgspec.msgpack.encode(attempt)


def attempt(owner: str, lineage: str, value: bytes) -> Attempt:
    """The attempt of a line."""
    seal = sealed(owner, lineage)
    if not value.startswith(seal):
        raise Unreadable(Trouble.IDENTITY if value.startswith(SCHEMA.encode() + b"|") else Trouble.SCHEMA)
    return _decoded(value[len(seal) :], Attempt)


def _decoded(data: bytes, as_: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(data, type=as_)
    except (ValueError, msgspec.MsgspecError) as error:
        raise Unreadable(Trouble.FORMAT) from error
