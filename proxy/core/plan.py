"""What a compaction would do: which region, what the summariser reads of it, and the request itself: a replay, or a transcript."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from typing import Protocol

from proxy.core import fingerprint, region, replay, rewrite, tokens, transcript
from proxy.core.limits import INSTRUCTION_TOKENS, Limits
from proxy.core.model import Because, Checkpoint, CheckpointRef, Digest, Facts, Scope, SessionId, Trigger, Window
from proxy.core.region import Region
from proxy.core.replay import Replay
from proxy.core.transcript import Previous, Transcript, Transcription


@dataclass(frozen=True, slots=True)
class Warm:
    """A routed request that can be replayed. `messages` and `facts` start at position `offset` (the end of what `applied` covers, else 0);
    `kept` are those in front of the checkpoint.

    `end`: position up to which the provider has seen these very bytes: a replay that is cut there finds them cached. `answer`: the
    assistant message to add behind `end`. `base` estimates the tokens of all that is not in `messages`, `factor` corrects estimates.
    `prompt`: the provider's own count for the whole request up to `end`, where it is known.
    """

    session: SessionId
    model: str
    head: bytes
    tail: bytes
    preamble: tuple[bytes, ...]
    preamble_digest: Digest
    kept: tuple[bytes, ...]
    messages: tuple[bytes, ...]
    facts: tuple[Facts, ...]
    chain: tuple[Digest, ...]
    offset: int
    applied: Checkpoint | None
    end: int
    answer: bytes | None
    base: int
    factor: float
    prompt: int | None

    def covered(self, region: Region) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """The messages that a region covers: those in front of the checkpoint that stands now, and those behind it."""
        in_front = self.kept[region.from_ :] if self.applied is not None else ()
        return in_front, self.messages[max(0, region.from_ - self.offset) : region.k - self.offset]

    def routed(self, to: int) -> tuple[bytes, ...] | None:
        """All messages as the provider got them, up to position `to`; None where the checkpoint finds no place."""
        tail: Sequence[bytes] | None = self.messages[: to - self.offset]
        if self.applied is not None and tail is not None:
            tail = rewrite.with_checkpoint(tail, self.applied.frame)
        return None if tail is None else (*self.preamble, *self.kept, *tail)

    def body(self) -> bytes | None:
        """The warm request, byte for byte."""
        messages = self.routed(self.offset + len(self.messages))
        return None if messages is None else self.head + b",".join(messages) + self.tail


class Settings(Protocol):
    """The keys of [compaction] that this needs."""

    @property
    def replay_scope(self) -> str: ...
    @property
    def summary_prompt(self) -> str: ...
    @property
    def keep_response_format(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """One compaction call. `read_to`: end of what the summariser reads of the request; behind it `answer`, where the replay holds the one
    it got. `replay`: the request, also where it is a transcript. `prompt` and `expected_new` are estimates in tokens.
    """

    region: Region
    scope: Scope
    read_to: int
    answer: bytes | None
    replay: Replay
    prompt: int
    expected_new: int
    limits: Limits


BLOCK_TOKENS = 32
"""Providers cache whole blocks (16 tokens on vLLM): the last part of a prompt, and the template's closing, are processed again."""


class Shape(StrEnum):
    """What stands between the replayed messages and the instruction. The last resort of strict templates is a short answer of ours."""

    ANSWER = "answer"
    PLAIN = "plain"
    BRIDGED = "bridged"


_DOUBT = 32
"""One of so many tokens of a window is left free by a transcript: no provider has counted it yet, as it has a replay."""

BRIDGE = b'{"role":"assistant","content":"Noted."}'


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans the compaction of one warm request: by replay, or by `transcription`, where there is one.

    `output_key`: the output limit's name in a replay where the client sent none; "" sends none.
    """

    warm: Warm
    limits: Limits
    settings: Settings
    shape: Shape = Shape.ANSWER
    output_key: str = ""
    transcription: Transcription | None = None

    @property
    def window(self) -> Window:
        """The window of the model that is asked."""
        return self.transcription.window if self.transcription else self.limits.window

    def others(self) -> tuple[Planner, ...]:
        """The same compaction in other shapes, for a provider that refuses the usual one, in the order to try them.

        A replay: without the rebuilt answer, then with an answer of ours in between, since templates of the Mistral and Gemma families refuse a
        user message behind another one, or behind a tool result. A transcript: its limit under the other name; reasoning models take but one.
        """
        if self.transcription is None:
            return tuple(replace(self, shape=shape) for shape in (Shape.PLAIN, Shape.BRIDGED))
        other = transcript.other_key(self.transcription.output_key)
        return (replace(self, transcription=replace(self.transcription, output_key=other)),)

    def plan(self, trigger: Trigger, span: tuple[int, int] | None = None) -> Plan | Because:
        """The compaction, or why there is none. `span`: a region an operator asked for instead of the chosen one."""
        warm = self.warm
        sizes = [round(f.weight * warm.factor) for f in warm.facts]
        base = round(warm.base * warm.factor)
        # What was never sent is in no cache; a transcript is in none anyway.
        latest = warm.end if self.transcription is None else len(warm.chain)
        chosen = self._choose(sizes, base, trigger, latest=latest) if span is None else self._asked_for(sizes, span)
        if isinstance(chosen, Because):
            return chosen
        before = [base, *(base + size for size in accumulate(sizes))]
        if self.transcription is None:
            return self._replayed(chosen, before)
        return self._transcribed(chosen, before, self.transcription)

    def without_call(self) -> Region | Because:
        """The region for a checkpoint that needs no call, so it need not fit one: all up to the newest messages."""
        warm = self.warm
        sizes = [round(f.weight * warm.factor) for f in warm.facts]
        return self._choose(sizes, round(warm.base * warm.factor), Trigger.GUARD, latest=len(warm.chain))

    def _choose(self, sizes: Sequence[int], base: int, trigger: Trigger, *, latest: int) -> Region | Because:
        warm = self.warm
        replaced = warm.applied.checkpoint_tokens if warm.applied else 0
        if warm.applied is None:
            from_ = region.keep_head(warm.facts, self.limits.keep_head_messages)
        elif warm.applied.from_ <= self.limits.keep_head_messages:
            from_ = warm.applied.from_
        else:
            # A middle region that somebody asked for: what stands in front of it is covered now as well.
            from_ = 0
            replaced += self._kept_tokens()
        return region.choose(
            warm.facts,
            sizes,
            self.limits,
            offset=warm.offset,
            from_=from_,
            replaced_tokens=replaced,
            latest=latest,
            anyway=trigger is not Trigger.SOFT,
            fixed=max(0, base - replaced),
        )

    def _kept_tokens(self) -> int:
        """What stands in front of the checkpoint."""
        return round(sum(fingerprint.facts(element).weight for element in self.warm.kept) * self.warm.factor)

    def _asked_for(self, sizes: Sequence[int], span: tuple[int, int]) -> Region | Because:
        """The operator's region if it is a legal one: it starts where a checkpoint may stand and absorbs an earlier one whole."""
        warm = self.warm
        from_, k = span
        cuts = region.legal_cuts(warm.facts, warm.offset)
        if k not in cuts:
            return Because.NO_BOUNDARY
        if warm.applied is not None:
            if from_ not in (0, warm.applied.from_):
                return Because.NO_BOUNDARY
        elif from_ and (from_ not in cuts or from_ >= k or not self._takes_checkpoint(from_)):
            return Because.NO_BOUNDARY
        replaced = warm.applied.checkpoint_tokens if warm.applied else 0
        if warm.applied is not None and from_ < warm.applied.from_:
            replaced += self._kept_tokens()
        start = max(from_, warm.offset) - warm.offset
        return Region(from_, k, replaced + sum(sizes[start : k - warm.offset]), sum(sizes[k - warm.offset :]))

    def _takes_checkpoint(self, at: int) -> bool:
        """Whether a user message may stand in place of message `at`: behind an answer, or where one stood behind something else than a user."""
        before = self.warm.facts[at - 1].role
        return before == "assistant" or (before != "user" and self.warm.facts[at].role == "user")

    @property
    def _longer(self) -> int:
        """Tokens of the operator's own instruction beyond the room that every call leaves for one."""
        own = tokens.of_text(self.settings.summary_prompt) + tokens.MESSAGE_OVERHEAD
        return max(0, round(own * self.warm.factor) - INSTRUCTION_TOKENS)

    def _replayed(self, chosen: Region, before: Sequence[int]) -> Plan | Because:
        """The replay for a region: over the whole warm request where that has room, else cut at the region's end, else at an earlier cut.

        `before[i]` estimates the routed prompt with messages [offset, offset + i).
        """
        warm, limits = self.warm, self.limits
        answer = round(tokens.of_text(warm.answer.decode("utf-8", "replace")) * warm.factor) if warm.answer else 0
        whole = (warm.prompt if warm.prompt is not None else before[warm.end - warm.offset]) + answer
        if self.settings.replay_scope == Scope.WARM and chosen.k <= warm.end and limits.fits(whole + self._longer):
            return self._planned(chosen, Scope.WARM, warm.end, whole, unseen=answer)
        if not limits.fits(before[chosen.k - warm.offset] + self._longer):
            cuts = [c for c in region.legal_cuts(warm.facts, warm.offset) if c > chosen.from_]
            room = limits.window.tokens - INSTRUCTION_TOKENS - self._longer - limits.output
            fitting = region.largest_fitting(cuts, before, room, warm.offset)
            if fitting is None:
                return Because.NO_ROOM
            chosen = self._shortened(chosen, fitting, before)
        prompt = before[chosen.k - warm.offset]
        seen = before[min(chosen.k, warm.end) - warm.offset]
        return self._planned(chosen, Scope.REGION, chosen.k, prompt, unseen=prompt - seen)

    def _planned(self, chosen: Region, scope: Scope, read_to: int, prompt: int, *, unseen: int) -> Plan | Because:
        """`unseen`: tokens of the replayed part that the provider has not processed before."""
        warm, limits = self.warm, self.limits
        messages = warm.routed(read_to)
        if messages is None:
            return Because.NO_BOUNDARY
        asked = prompt + INSTRUCTION_TOKENS + self._longer
        at = chosen.k - warm.offset
        text = self.settings.summary_prompt or replay.instruction(
            warm.facts[at] if at < len(warm.facts) else None, scope
        )
        between = self._between(scope, read_to)
        built = replay.build(
            warm.head,
            messages,
            warm.tail,
            answer=between,
            text=text,
            output_tokens=limits.output,  # there is room for it: no longer prompt comes here
            keep_response_format=self.settings.keep_response_format,
            output_key=self.output_key,
        )
        new = round(tokens.of_text(text) * warm.factor) + tokens.MESSAGE_OVERHEAD + unseen + BLOCK_TOKENS
        answer = between if between is warm.answer else None
        return Plan(chosen, scope, read_to, answer, built, asked, new, limits)

    def _shortened(self, chosen: Region, k: int, before: Sequence[int]) -> Region:
        """The region up to an earlier cut."""
        less = before[chosen.k - self.warm.offset] - before[k - self.warm.offset]
        return Region(chosen.from_, k, chosen.tokens - less, chosen.tail_tokens + less)

    def _between(self, scope: Scope, read_to: int) -> bytes | None:
        """The assistant message in front of the instruction, if any."""
        if scope is Scope.WARM and self.shape is Shape.ANSWER:
            return self.warm.answer
        last = self.warm.facts[read_to - 1 - self.warm.offset].role
        return BRIDGE if self.shape is Shape.BRIDGED and last != "assistant" else None

    def _transcribed(self, chosen: Region, before: Sequence[int], to: Transcription) -> Plan | Because:
        """The transcript for a region. Where the model that reads it has not so much room it ends at an earlier cut, from where the next goes on."""
        if not to.model:
            return Because.NO_MODEL
        whole = self._transcript(chosen, to)
        if not whole.entries:
            return Because.REGION_TOO_SMALL
        window = to.window.tokens - to.window.tokens // _DOUBT
        most = window - min(self.limits.output, window // 4)
        text = whole.rendered(to.max_transcript_chars)
        if self._size(text) > most:
            k = self._last_fitting(chosen, whole, to, most)
            chosen = self._shortened(chosen, k, before)
            text = self._narrowed(whole.up_to(k), to.max_transcript_chars, most)
        if not text:
            return Because.NO_ROOM
        size = self._size(text)
        asked = transcript.prompt(self.settings.summary_prompt, text)
        output = min(self.limits.output, window - size)
        made = Replay(transcript.request(to.model, asked, to.output_key, output), (), asked)
        return Plan(chosen, Scope.REGION, chosen.k, None, made, size, size, self.limits)

    def _transcript(self, chosen: Region, to: Transcription) -> Transcript:
        warm = self.warm
        previous = Previous(warm.applied.text, warm.applied.k - 1) if warm.applied else None
        starts = (chosen.from_, max(chosen.from_, warm.offset))
        return transcript.transcript(warm.covered(chosen), starts, previous, to.max_tool_result_chars)

    def _last_fitting(self, chosen: Region, whole: Transcript, to: Transcription, most: int) -> int:
        """The last cut up to which a transcript has at most `most` tokens, or the first of all, which has more."""
        begins = max(chosen.from_, whole.entries[0].sequence)
        cuts = [c for c in region.legal_cuts(self.warm.facts, self.warm.offset) if begins < c < chosen.k]

        def is_too_long(cut: int) -> bool:
            return self._size(whole.up_to(cut).rendered(to.max_transcript_chars)) > most

        # Sizes grow with the cut but where the front is lost: there one that fits may be passed over, and none that does not is taken.
        at = bisect_left(cuts, True, key=is_too_long)
        return (*cuts, chosen.k)[max(0, at - 1)]

    def _narrowed(self, whole: Transcript, chars: int, most: int) -> str:
        """The transcript, cut from the front to `most` tokens with its instruction; "" where nothing has room."""
        text = whole.rendered(chars)
        while text and (size := self._size(text)) > most:
            # Less each time, also where nearly all of it is the earlier summary, which is not cut.
            chars = min(chars * 15 // 16, len(text), len(text) * most // size)
            text = whole.rendered(chars)
        return text

    def _size(self, text: str) -> int:
        """Estimated tokens of the call with this transcript. Another model may cut a text into more tokens than the conversation's."""
        asked = tokens.of_text(transcript.prompt(self.settings.summary_prompt, text)) + tokens.MESSAGE_OVERHEAD
        return round(asked * max(1.0, self.warm.factor))


def ref(covered: Region, read_to: int, warm: Warm, checkpoint_id: str, generation: int) -> CheckpointRef:
    """The new checkpoint's claim: what it covers, and all that its summariser read."""
    return CheckpointRef(
        id=checkpoint_id,
        generation=generation,
        from_=covered.from_,
        k=covered.k,
        digest_k=warm.chain[covered.k - 1],
        seen_len=read_to,
        seen=warm.chain[read_to - 1],
        preamble=warm.preamble_digest,
    )
