"""Whose conversation is this, and is this prefix the one we know?

Each message has a digest over its meaning; the chain digest h_i = H(h_{i-1}, digest_i) names the prefix of length i. The chain starts
from the tenant (and a vLLM/SGLang cache_salt), so equal conversations of two tenants share no digest at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence

import xxhash

from proxy.core import tokens
from proxy.core.model import ByteHash, Digest, Facts

_OPENING_CHARS = 60
_MARKS = frozenset({"cache_control"})
"""Where providers are told to cache. Clients move these marks to the newest message on every turn: no change of meaning."""

_MAX_DEPTH = 350
"""A message nested deeper means its bytes: what it is must not hang on how deep our own stack is when it is read."""

_REASONING_KEYS = ("reasoning_content", "reasoning", "reasoning_details", "thinking")


class _Number(str):
    """A number as it was written: 1, 1.0 and 1e0 differ, 400 digits stay 400 digits."""

    __slots__ = ()


class _DuplicateKey(ValueError):
    pass


def byte_hash(data: bytes) -> ByteHash:
    """The name of exact bytes."""
    return hashlib.blake2b(data, digest_size=16).digest()


def facts(element: bytes) -> Facts:
    """What one message (a slice of the request, white space included) says. Never raises: what cannot be read is its bytes."""
    try:
        message = json.loads(
            element, object_pairs_hook=_no_duplicates, parse_int=_Number, parse_float=_Number, parse_constant=_Number
        )
        if not isinstance(message, dict):
            return _opaque(element)
        meaning = {key: value for key, value in message.items() if key not in _MARKS}
        meaning["content"] = _content(message["content"]) if "content" in message else None
        if "content" not in message:
            del meaning["content"]
        packed: list[bytes] = []
        _pack(meaning, packed, _MAX_DEPTH)
        weight = tokens.of_message(message)
    except (ValueError, RecursionError):
        return _opaque(element)
    role = message.get("role")
    content = message.get("content")
    return Facts(
        role=role if isinstance(role, str) else "",
        digest=hashlib.blake2b(b"".join(packed), digest_size=16).digest(),
        byte_hash=byte_hash(element),
        calls=_calls(message),
        answers=_answers(message),
        opening=_opening(message),
        weight=weight,
        reasoning=_reasons(message),
        spliceable=isinstance(content, (str, list)) and not isinstance(content, _Number),
    )


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _DuplicateKey
    return found


def _opaque(element: bytes) -> Facts:
    """A message we cannot read means its bytes, and no cut falls in front of it (a role that nobody has).

    Where a key stands twice one parser takes the first value and another the last: it calls and answers what either of them finds.
    """
    same = byte_hash(element)
    readings = [read for keep in (dict, _keep_first) if isinstance(read := _parsed(element, keep), dict)]
    return Facts(
        role="",
        digest=same,
        byte_hash=same,
        calls=tuple(dict.fromkeys(name for read in readings for name in _calls(read))),
        answers=tuple(dict.fromkeys(name for read in readings for name in _answers(read))),
        opening="",
        weight=tokens.MESSAGE_OVERHEAD + len(element) // 3,
        reasoning=False,
        spliceable=False,
    )


def _parsed(element: bytes, keep: Callable[[list[tuple[str, object]]], dict[str, object]]) -> object:
    """The JSON value, with of equal keys the one that is kept; None where it is none, or too deep."""
    try:
        return json.loads(element, object_pairs_hook=keep)
    except (ValueError, RecursionError):
        return None


def _keep_first(pairs: list[tuple[str, object]]) -> dict[str, object]:
    return dict(reversed(pairs))


def _content(content: object) -> object:
    """A text means the same as one text part; marks on parts mean nothing."""
    if isinstance(content, str) and not isinstance(content, _Number):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        return [
            {k: v for k, v in part.items() if k not in _MARKS} if isinstance(part, dict) else part for part in content
        ]
    return content


def _pack(value: object, out: list[bytes], room: int) -> None:
    """Append an unambiguous form of a JSON value: type, length, content; keys sorted. RecursionError beyond `room` levels."""
    if not room:
        raise RecursionError
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        out.append(b"%c%d:" % (b"n" if isinstance(value, _Number) else b"s", len(text)))
        out.append(text)
    elif isinstance(value, dict):
        out.append(b"{%d:" % len(value))
        for key in sorted(value):
            _pack(key, out, room)
            _pack(value[key], out, room - 1)
    elif isinstance(value, list):
        out.append(b"[%d:" % len(value))
        for inner in value:
            _pack(inner, out, room - 1)
    else:
        out.append({None: b"0", True: b"t", False: b"f"}[value])  # type: ignore[index]  # json yields nothing else


def _calls(message: Mapping[str, object]) -> tuple[str, ...]:
    ids: list[str] = []
    for call in _dicts(message.get("tool_calls")):
        ids.append(str(call.get("id") or ""))
    legacy = message.get("function_call")
    if isinstance(legacy, Mapping):
        ids.append(_legacy(legacy.get("name")))
    ids.extend(str(part.get("id") or "") for part in _dicts(message.get("content")) if part.get("type") == "tool_use")
    return tuple(ids)


def _answers(message: Mapping[str, object]) -> tuple[str, ...]:
    role = message.get("role")
    if role == "tool":
        return (str(message.get("tool_call_id") or ""),)
    if role == "function":
        return (_legacy(message.get("name")),)
    return tuple(
        str(part.get("tool_use_id") or "")
        for part in _dicts(message.get("content"))
        if part.get("type") == "tool_result"
    )


def _legacy(name: object) -> str:
    """A legacy function call has no id: its name pairs it with its result. The prefix keeps it apart from real ids."""
    return f"function:{name}"


def _dicts(value: object) -> Iterable[Mapping[str, object]]:
    return (item for item in value if isinstance(item, Mapping)) if isinstance(value, list) else ()


def _opening(message: Mapping[str, object]) -> str:
    """How the message starts, for naming it in the instruction: its text, else the call it makes."""
    content = message.get("content")
    text = content if isinstance(content, str) else ""
    for part in _dicts(content):
        if isinstance(part.get("text"), str):
            text = str(part["text"])
            break
    if not text.strip():
        for call in _dicts(message.get("tool_calls")):
            function = call.get("function")
            if isinstance(function, Mapping):
                text = f"{function.get('name')}({function.get('arguments')}"
                break
    return " ".join(text[: _OPENING_CHARS * 4].split())[:_OPENING_CHARS]


def _reasons(message: Mapping[str, object]) -> bool:
    if any(message.get(key) for key in _REASONING_KEYS):
        return True
    return any(part.get("type") in ("thinking", "reasoning") for part in _dicts(message.get("content")))


class FactsCache:
    """Facts of the messages seen lately. A client sends its whole history each turn: only new messages are read.

    Keyed by a fast hash and verified by comparing the bytes, so a collision costs time and nothing else. Two generations bound
    the memory: when the young one is full it becomes the old one, and what is used moves back.
    """

    def __init__(self, max_bytes: int = 64 * 1024 * 1024) -> None:
        self._half = max_bytes // 2
        self._young: dict[int, tuple[bytes, Facts]] = {}
        self._old: dict[int, tuple[bytes, Facts]] = {}
        self._bytes = 0

    def of(self, element: bytes) -> Facts:
        """The facts of a message, read or remembered."""
        key = xxhash.xxh3_64_intdigest(element)
        found = self._young.get(key)
        if found is not None and found[0] == element:
            return found[1]
        found = self._old.get(key)
        known = found[1] if found is not None and found[0] == element else facts(element)
        if len(element) < self._half // 16:
            self._young[key] = (element, known)
            self._bytes += len(element) + 400
            if self._bytes > self._half:
                self._old, self._young, self._bytes = self._young, {}, 0
        return known


def chain(start: Digest, digests: Iterable[Digest]) -> tuple[Digest, ...]:
    """chain[i] names the prefix of length i + 1."""
    found = []
    last = start
    for digest in digests:
        last = hashlib.blake2b(last + digest, digest_size=16).digest()
        found.append(last)
    return tuple(found)


def start(tenant: str, cache_salt: str) -> Digest:
    """Where a tenant's chains start."""
    return hashlib.blake2b(f"{tenant}\x00{cache_salt}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


def preamble(facts_of_preamble: Sequence[Facts]) -> Digest:
    """The digest of the leading system and developer messages."""
    return hashlib.blake2b(b"".join(f.digest for f in facts_of_preamble), digest_size=16).digest()


def tenant(secret: bytes, credential: str) -> str:
    """The tenant's name in keys, ids and metrics: 16 characters that tell nothing about the credential without the secret."""
    return _name(hashlib.blake2b(credential.encode("utf-8", "surrogatepass"), key=secret[:64], digest_size=10).digest())


def root(first: Digest) -> str:
    """The root's name: a tenant's conversations with the same first message share it, and so a slot of the store."""
    return _name(first[:10])


def lineage(root_name: str, explicit: str, parent: str, prefix: Digest) -> str:
    """The name of a new session, from the first request that was seen of it (`prefix`: its chain digest) and the session it left.

    Not random: two workers that see the same new conversation at the same time give it the same name.
    """
    seed = f"{root_name}\x00{explicit}\x00{parent}\x00".encode() + prefix
    return _name(hashlib.blake2b(seed, digest_size=10).digest())


def explicit(value: str) -> str:
    """An explicit session id as it stands in keys: hashed, since clients put personal data into ids. Empty stays empty."""
    return _name(hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=10).digest()) if value else ""


def checkpoint_id(session: str, generation: int, text: str) -> str:
    """A checkpoint's name: the same for the same text in the same place."""
    seed = f"{session}\x00{generation}\x00{text}".encode("utf-8", "replace")
    return _name(hashlib.blake2b(seed, digest_size=10).digest())


def _name(digest: bytes) -> str:
    return base64.b32encode(digest).decode("ascii").lower().rstrip("=")
