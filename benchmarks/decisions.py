"""When a conversation is compacted, and what that costs and saves, by what its provider charges.

`python -m benchmarks.decisions [--markdown] [--max-payback-turns N]`

A simulation without a provider: conversations of several lengths grow turn by turn, and the product's own code decides (`proxy/core`: pressure,
region, plan, payback), with the default configuration. Only the provider is made up: it finds in its cache what the request before had sent, as
far as it is the same, and charges what the table of profiles says. Takes some seconds. The figures do not depend on the machine.

"Alone": the same turns without warmfold, if the window had no end. The second table sets `budget_tokens`, as one does to cap what a turn costs:
so early it does not pay for everybody.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks import printed
from proxy.config import Compaction
from proxy.core import payback, pressure
from proxy.core.limits import Limits, limits
from proxy.core.model import Because, Checkpoint, CheckpointRef, Counters, Facts, SessionId, Trigger, Window
from proxy.core.payback import Payback, Prices
from proxy.core.plan import Plan, Planner, Warm

FIXED: Final = 5000
"""Tokens of system prompt and tools."""
SAID: Final = 700
ANSWERED: Final = 300
"""Tokens of a user's message, with what it quotes, and of an answer: a turn adds 1,000."""

LENGTHS: Final = (60, 300, 1500)
"""Turns."""

BUDGET: Final = 32_000
"""Tokens, for the second table."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A provider's model: its window and its prices, None where warmfold does not know them.

    Input prices and shares: the price list of litellm 1.110.2; prices of answers: genai-prices 0.2.3, which agrees on the others.
    """

    name: str
    window: Window
    prices: Prices | None


PROFILES: Final = (
    Profile("local, 32k", Window(32_768, "config"), None),
    Profile("OpenAI gpt-5", Window(272_000, "config", input_only=True), Prices(1.25, 0.125, 1.25, 10.0)),
    Profile("DeepSeek v4-flash", Window(1_000_000, "config"), Prices(0.3, 0.006, 0.3, 1.2)),
    Profile("Anthropic claude-sonnet-4-5", Window(200_000, "config"), Prices(3.0, 0.3, 3.75, 15.0)),
    Profile("Groq gpt-oss-120b", Window(131_072, "config"), Prices(0.15, 0.075, 0.15, 0.6)),
    Profile("prices unknown, 128k", Window(128_000, "config"), None),
)

_USER = b'{"role":"user","content":"Go on."}'
_ASSISTANT = b'{"role":"assistant","content":"Done."}'
_ANSWER = b'{"role":"assistant","content":"%s"}' % (b"word " * (ANSWERED - 4))
_SESSION = SessionId("tenant", "root", "lineage")


def _facts(role: str, weight: int) -> Facts:
    return Facts(role, b"", b"", (), (), "Go on.", weight, reasoning=False, spliceable=True)


_MESSAGES: Final = ((_USER, _facts("user", SAID)), (_ASSISTANT, _facts("assistant", ANSWERED)))


@dataclass(slots=True)
class Bill:
    """Tokens of prompts, those of them that were in no cache, tokens of answers; US dollars for all of it."""

    prompt: int = 0
    new: int = 0
    answers: int = 0
    usd: float = 0.0

    def add(self, prompt: int, cached: int, answer: int, prices: Prices | None) -> None:
        """One call."""
        self.prompt += prompt
        self.new += prompt - cached
        self.answers += answer
        if prices is not None:
            usd = cached * prices.cached + (prompt - cached) * prices.write + answer * prices.output
            self.usd += usd / 1_000_000


@dataclass(slots=True)
class Made:
    """One compaction: after which turn, what asked for it, what it was expected to pay."""

    turn: int
    trigger: Trigger
    payback: Payback | None


@dataclass(slots=True)
class Played:
    """A conversation with warmfold and without. `due`: the first turn after which a soft compaction was due; `refused`: turns after which one
    did not pay.
    """

    profile: Profile
    turns: int
    largest: int = 0
    due: int | None = None
    refused: int = 0
    made: list[Made] = field(default_factory=list)
    alone: Bill = field(default_factory=Bill)
    compacted: Bill = field(default_factory=Bill)


class Conversation:
    """What a client sends, turn by turn, and what of it a checkpoint stands for."""

    def __init__(self, sizes: Limits, policy: Compaction) -> None:
        self.sizes = sizes
        self.policy = policy
        self.turn = 0
        self.applied: Checkpoint | None = None

    @property
    def length(self) -> int:
        """Messages of the newest request."""
        return 2 * self.turn - 1

    @property
    def whole(self) -> int:
        """Tokens of the newest request as the client sent it."""
        return FIXED + self.turn * (SAID + ANSWERED) - ANSWERED

    @property
    def prompt(self) -> int:
        """Tokens of the newest request as the provider gets it."""
        return self._in_front + sum(_MESSAGES[at % 2][1].weight for at in range(self._offset, self.length))

    @property
    def _offset(self) -> int:
        return self.applied.k if self.applied else 0

    @property
    def _in_front(self) -> int:
        return FIXED + (self.applied.checkpoint_tokens if self.applied else 0)

    def plan(self, trigger: Trigger, *, answered: bool) -> Plan | Because:
        """The compaction of the newest request; `answered`: with the answer it got."""
        rest = [_MESSAGES[at % 2] for at in range(self._offset, self.length)]
        warm = Warm(
            session=_SESSION,
            model="model",
            head=b'{"model":"model","messages":[',
            tail=b"]}",
            preamble=(b'{"role":"system","content":"Be careful."}',),
            preamble_digest=b"",
            kept=(),
            messages=tuple(message for message, _ in rest),
            facts=tuple(facts for _, facts in rest),
            chain=(b"",) * self.length,
            offset=self._offset,
            applied=self.applied,
            end=self.length if answered else self.length - 2,
            answer=_ANSWER if answered else None,
            base=self._in_front,
            factor=1.0,
            prompt=self.prompt if answered else self.prompt - SAID - ANSWERED,
        )
        return Planner(warm, self.sizes, self.policy).plan(trigger)

    def apply(self, plan: Plan) -> None:
        """From now on a checkpoint of the usual size stands for the plan's region."""
        region = plan.region
        generation = self.applied.ref.generation + 1 if self.applied else 1
        self.applied = Checkpoint(
            ref=CheckpointRef(str(generation), generation, region.from_, region.k, b"", plan.read_to, b"", b""),
            session=str(_SESSION),
            text="",
            ledger=(),
            anchors=(),
            frame="checkpoint",
            region_tokens=region.tokens,
            checkpoint_tokens=payback.sizes(plan, self.sizes).checkpoint,
            model="model",
            scope=plan.scope,
            strategy="replay",
            made_at_ms=0,
        )


def play(profile: Profile, turns: int, policy: Compaction) -> Played:
    """A conversation of so many turns with this provider."""
    sizes = limits(policy, profile.window, reasons=False)
    talk = Conversation(sizes, policy)
    played = Played(profile, turns)
    counters = Counters()
    sent, sent_alone, carried = FIXED, FIXED, 0
    for talk.turn in range(1, turns + 1):
        if pressure.must_compact(talk.prompt, 0, sizes):
            counters = _compacted(played, talk, Trigger.GUARD, talk.plan(Trigger.GUARD, answered=False), counters)
        generation = talk.applied.ref.generation if talk.applied else 0
        cached = sent if generation == carried else FIXED
        played.compacted.add(talk.prompt, cached, ANSWERED, profile.prices)
        played.alone.add(talk.whole, sent_alone, ANSWERED, profile.prices)
        played.largest = max(played.largest, talk.prompt)
        sent, sent_alone, carried = talk.prompt, talk.whole, generation
        counters = Counters(counters.turns + 1, counters.last_turn, 0, 0, 0)
        used = talk.prompt + ANSWERED
        if pressure.due(used, sizes, counters, 0, applied=generation > 0) is None:
            played.due = played.due or talk.turn
            counters = _soft(played, talk, counters, policy, last_chance=pressure.is_last_chance(used, 0, sizes))
    return played


def _soft(played: Played, talk: Conversation, counters: Counters, policy: Compaction, *, last_chance: bool) -> Counters:
    """A soft compaction is due: it is made, or waits."""
    plan = talk.plan(Trigger.SOFT, answered=True)
    found = _payback(played.profile, plan, talk)
    if not last_chance and pressure.waits(found, policy.max_payback_turns, thinks=False) is not None:
        played.refused += 1
        return counters
    return _compacted(played, talk, Trigger.SOFT, plan, counters)


def _payback(profile: Profile, plan: Plan | Because, talk: Conversation) -> Payback | None:
    if profile.prices is None or isinstance(plan, Because):
        return None
    return payback.payback(payback.sizes(plan, talk.sizes), profile.prices)


def _compacted(
    played: Played, talk: Conversation, trigger: Trigger, plan: Plan | Because, counters: Counters
) -> Counters:
    """The compaction's call, and the checkpoint that came of it."""
    if isinstance(plan, Because):
        return Counters(counters.turns, counters.turns, 0, 0, 0)
    found, sizes = _payback(played.profile, plan, talk), payback.sizes(plan, talk.sizes)
    played.compacted.add(plan.prompt, plan.prompt - sizes.new, sizes.answer, played.profile.prices)
    played.made.append(Made(talk.turn, trigger, found))
    applied = talk.applied is not None
    talk.apply(plan)
    return pressure.after_success(counters, 0, applied=applied)


HEADINGS: Final = (
    "provider", "window", "turns", "fits", "due", "waits", "made", "first", "payback", "prompt alone", "prompt", "new alone", "new", "USD alone", "USD",
)  # fmt: skip


def cells(of: Played) -> tuple[str, ...]:
    """The row as it is printed."""
    fits = sum(FIXED + turn * (SAID + ANSWERED) <= of.profile.window.tokens for turn in range(1, of.turns + 1))
    first = of.made[0] if of.made else None
    back = [made.payback.turns for made in of.made if made.payback is not None]
    usd = of.profile.prices is not None
    return (
        of.profile.name,
        f"{of.profile.window.tokens:,}",
        f"{of.turns:,}",
        f"{fits:,}",
        f"{of.due:,}" if of.due else "",
        f"{of.refused:,}",
        f"{len(of.made):,}",
        f"{first.turn:,} {first.trigger}" if first else "",
        f"{min(back):.1f}..{max(back):.1f}" if back else "",
        f"{of.alone.prompt / 1000:,.0f}",
        f"{of.compacted.prompt / 1000:,.0f}",
        f"{of.alone.new / 1000:,.0f}",
        f"{of.compacted.new / 1000:,.0f}",
        f"{of.alone.usd:.2f}" if usd else "",
        f"{of.compacted.usd:.2f}" if usd else "",
    )


def rows(policy: Compaction) -> Iterator[Played]:
    """All conversations with all providers."""
    for profile in PROFILES:
        for turns in LENGTHS:
            yield play(profile, turns, policy)


def policies(max_payback_turns: int) -> dict[str, Compaction]:
    """What is played, by its title."""
    default = Compaction(max_payback_turns=max_payback_turns)
    return {
        "By the window": default,
        f"With budget_tokens = {BUDGET:,}": default.model_copy(update={"budget_tokens": BUDGET}),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decisions",
        description="When conversations are compacted, and what it costs and saves.",
    )
    parser.add_argument(
        "--max-payback-turns", type=int, default=Compaction().max_payback_turns, metavar="N", help="0: do not ask"
    )
    parser.add_argument("--markdown", action="store_true", help="print Markdown, with date and machine")
    given = parser.parse_args(argv)
    for title, policy in policies(given.max_payback_turns).items():
        printed.table(title, HEADINGS, [cells(played) for played in rows(policy)], markdown=given.markdown)
    if given.markdown:
        printed.note(printed.where("genai-prices"))


if __name__ == "__main__":
    main()
