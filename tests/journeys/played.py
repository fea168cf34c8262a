"""What comes of a conversation that is played through the whole proxy to a strict provider with a window too small for it.

Nothing is asserted here: the figures are for tests and for `benchmarks.windows` to judge. The direct client that they are compared with sends the
same requests to a provider without a limit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from proxy.core import region
from proxy.core.fingerprint import facts
from proxy.core.model import Facts
from proxy.core.openai import PREAMBLE_ROLES
from proxy.demo.calls import Call
from proxy.demo.prefix_cache import Chain, PrefixCache
from proxy.demo.provider import SimulatedProvider
from proxy.demo.refusal import Refusal
from proxy.demo.settings import Settings
from proxy.demo.template import body_tokens, render
from proxy.demo.validation import Strictness, fault
from tests.journeys.player import Answered, elements, is_extension, playing
from tests.recorded import Step

Spelled = Callable[[Mapping[str, Any]], bytes]
"""How a client writes its requests."""

FRAME = b"<checkpoint_summary"


@dataclass(slots=True)
class Played:
    """One conversation in one window.

    `applied`: turns that carried a checkpoint, and `checkpoints` which ones. `errors`: what a client got that a provider without a limit
    would not have answered. `refused`: requests of ours that the provider did not take, rewritten ones for their shape, compactions for whatever
    reason. `orphaned`: calls or results that a rewrite parted. `altered`: messages of a tail or a preamble that did not arrive as they were
    sent. `extended`: of the compaction calls those that are a routed request and one more message. `processed`: prompt tokens that
    the provider had not cached, compactions included.
    """

    window: int
    turns: int = 0
    applied: int = 0
    checkpoints: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    orphaned: list[str] = field(default_factory=list)
    altered: list[str] = field(default_factory=list)
    compactions: int = 0
    extended: int = 0
    processed: int = 0

    @property
    def faults(self) -> list[str]:
        """All that must not be, in words."""
        missing = self.compactions - self.extended
        not_extended = [f"{missing} compaction requests extend no routed one"] if missing else []
        return [*self.errors, *self.refused, *self.orphaned, *self.altered, *not_extended]


_facts = lru_cache(maxsize=1 << 16)(facts)
"""Histories are sent again and again: each message is read once."""


def small_window(steps: Sequence[Step], share: float) -> int:
    """A window of that share of the conversation, but never below 1.5 times what cannot be shrunk + 1024."""
    return window_of(*measured(steps), share)


def window_of(whole: int, fixed: int, share: float) -> int:
    """The same from sizes that are known."""
    return max(int(whole * share), int(fixed * 1.5) + 1024)


def measured(steps: Sequence[Step]) -> tuple[int, int]:
    """Tokens by the provider's own count: of the largest request, and the most that no compaction can shrink (preamble, tools, newest group).

    The same as `player.sizes` of each step: here a message is read once, not with every request that holds it.
    """
    whole = fixed = 0
    read: dict[int, Facts] = {}
    for step in steps:
        messages = step.request["messages"]
        for message in messages:
            if id(message) not in read:
                read[id(message)] = facts(json.dumps(message).encode("utf-8", "surrogatepass"))
        told = [read[id(message)] for message in messages]
        preamble = next((i for i, fact in enumerate(told) if fact.role not in PREAMBLE_ROLES), len(told))
        cuts = region.legal_cuts(told[preamble:])
        newest = preamble + (cuts[-1] if cuts else 0)
        whole = max(whole, len(render(step.request)))
        fixed = max(fixed, len(render({**step.request, "messages": [*messages[:preamble], *messages[newest:]]})))
    return whole, fixed


class Lenient(SimulatedProvider):
    """Takes any order of roles and any parts, as servers do whose chat template never raises."""

    def _refusal(self, call: Call) -> Refusal | None:
        return None if call.request is not None else super()._refusal(call)


class LlamaCpp(SimulatedProvider):
    """Answers 500 where a chat template raises. Source: xllamacpp 2026.10, and ggml-org/llama.cpp issue 19851."""

    def _refusal(self, call: Call) -> Refusal | None:
        found = super()._refusal(call)
        if found is None or found.type == "invalid_request_error":
            return found
        where = "\n------------\nWhile executing CallExpression at line 4, column 9 in source:\n"
        return Refusal(f"{where}Error: Jinja Exception: {found.message}", None, 500, 500, "server_error")


async def play(
    steps: Sequence[Step],
    window: int,
    tmp: Path,
    *,
    spell: Spelled | None = None,
    strictness: Strictness = Strictness.OPENAI,
    server: type[SimulatedProvider] = SimulatedProvider,
    **flags: object,
) -> Played:
    """Each step's request in turn, each when all is quiet."""
    settings = {"compaction__max_context_tokens": window, "compaction__when": "after_turn", **flags}
    played = Played(window)
    async with (
        server(Settings(window_tokens=window, strictness=strictness)) as provider,
        playing(tmp, provider, **settings) as player,
    ):
        sent: list[bytes] = []
        for step in steps:
            body = step.body() if spell is None else spell(step.request)
            sent.append(body)
            before = len(provider.calls)
            provider.next_reply = step.reply
            got = await player.post(body)
            await player.settled()
            provider.next_reply = None
            calls = provider.calls[before:]
            _judge(played, body, got, calls, None if server is Lenient else fault(json.loads(body), strictness))
            played.processed += sum(call.new for call in calls if call.status == 200)
        _judge_compactions(played, provider.calls, sent)
    return played


def direct(steps: Sequence[Step]) -> list[tuple[int, int]]:
    """What a provider without a limit counts when it gets the same requests, each: tokens of the prompt, and those of them not cached.

    A request that it refuses whatever its length counts (0, 0).
    """
    cache = PrefixCache()
    counted = []
    for step in steps:
        if fault(step.request) is not None:
            counted.append((0, 0))
            continue
        tokens = render(step.request)
        chain = Chain(b"", tokens)
        counted.append((len(tokens), len(tokens) - cache.cached(chain)))
        if step.reply is not None:
            chain.extend(body_tokens(step.reply))
        cache.store(chain)
    return counted


def _judge(played: Played, body: bytes, got: Answered, calls: Sequence[Call], refusal: Refusal | None) -> None:
    """`refusal`: what a provider without a limit says to the client's own request."""
    played.turns += 1
    at = f"turn {played.turns}"
    if got.status != 200:
        if refusal is None:
            played.errors.append(f"{at}: {got.status} {got.body[:200]!r}")
        return
    for call in calls:
        if call.status != 200 and (call.is_compaction or (call.raw != body and not _was_too_long(call))):
            what = "a compaction request" if call.is_compaction else "a rewritten request"
            played.refused.append(f"{at}: {what} of {call.prompt_tokens} tokens was refused")
    turn = next(call for call in calls if not call.is_compaction and call.status == 200)
    if "x-warmfold-checkpoint" in got.headers:
        played.applied += 1
        played.checkpoints.add(got.headers["x-warmfold-checkpoint"])
        _judge_rewrite(played, at, body, turn.raw, int(got.headers["x-warmfold-covered"]))
    elif turn.raw != body:
        played.altered.append(f"{at}: no checkpoint, but other bytes")


def _was_too_long(call: Call) -> bool:
    """Shapes are judged before the prompt is counted."""
    return call.prompt_tokens > 0


def _judge_rewrite(played: Played, at: str, body: bytes, sent: bytes, covered: int) -> None:
    """Preamble and kept head verbatim, one checkpoint, the rest of the tail verbatim, and no call parted from its result."""
    client, provider = elements(body), elements(sent)
    told = [_facts(element) for element in client]
    preamble = next((i for i, fact in enumerate(told) if fact.role not in PREAMBLE_ROLES), len(told))
    place = next((i for i, element in enumerate(provider) if FRAME in element), -1)
    tail, rest = client[preamble + covered :], provider[place:]
    if place < preamble or sum(FRAME in element for element in provider) != 1 or provider[:place] != client[:place]:
        played.altered.append(f"{at}: not one checkpoint behind what stays in front")
        return
    spliced = _facts(tail[0]).role == "user"
    if rest[1:] != (tail[1:] if spliced else tail) or not _is_checkpoint(rest[0], tail[0] if spliced else None):
        played.altered.append(f"{at}: the tail is not what the client sent")
    if spliced and _facts(tail[0]).answers:
        played.orphaned.append(f"{at}: text in front of a result, which has to come first")
    spoken = told[preamble:]
    for cut in {place - preamble, covered} - {0}:
        if cut not in region.legal_cuts(spoken):
            played.orphaned.append(f"{at}: message {cut} is no place for a cut")
    for call, result in pairs(told):
        if (place <= call < preamble + covered) != (place <= result < preamble + covered):
            played.orphaned.append(f"{at}: the call in message {call} is parted from its result in {result}")


def _is_checkpoint(element: bytes, original: bytes | None) -> bool:
    """A user message with the checkpoint in front of all that `original` held: its bytes with one insertion."""
    message = json.loads(element)
    content = message["content"]
    if message["role"] != "user":
        return False
    first = content if isinstance(content, str) else content[0]["text"]
    if not first.startswith(FRAME.decode()):
        return False
    if original is None:
        return set(message) == {"role", "content"}
    before = json.loads(original)
    told = before["content"]
    kept = first.endswith(f"\n\n{told}") if isinstance(content, str) else content[1:] == told
    return kept and message.keys() == before.keys() and _is_insertion(element, original)


def _is_insertion(longer: bytes, original: bytes) -> bool:
    same = next((at for at, (a, b) in enumerate(zip(longer, original, strict=False)) if a != b), len(original))
    return any(longer.endswith(original[at:]) for at in range(same, -1, -1))


def pairs(told: Sequence[Facts]) -> list[tuple[int, int]]:
    """Which call each result belongs to, as positions: the newest call of its id that has no result yet, else the newest of its id."""
    waiting: dict[str, list[int]] = {}
    newest: dict[str, int] = {}
    found = []
    for at, message in enumerate(told):
        for answer in message.answers:
            call = waiting[answer].pop() if waiting.get(answer) else newest.get(answer)
            if call is not None:
                found.append((call, at))
        for name in message.calls:
            waiting.setdefault(name, []).append(at)
            newest[name] = at
    return found


def _judge_compactions(played: Played, calls: Sequence[Call], sent: Sequence[bytes]) -> None:
    for at, call in enumerate(calls):
        if not call.is_compaction:
            continue
        played.compactions += 1
        # The likely ones first: a compaction replays the turn before it, or one that is about to be sent.
        turns = [c.raw for c in reversed(calls[:at]) if not c.is_compaction]
        played.extended += is_extension(call.raw, turns, sent[::-1])
