"""Checkpoint upon checkpoint of one conversation that grows, is edited, goes back and undoes: each covers more than the last, and reaches only its own.

The core decides, and a few lines here stand for the store: the session with its version, its generations and its tombstones.
"""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from proxy.core import conversation as conversations_of
from proxy.core import last_resort, pressure, rewrite, turn
from proxy.core.answer import UNREAD
from proxy.core.checkpoint import Summary
from proxy.core.compose import compose
from proxy.core.conversation import Conversation
from proxy.core.limits import Limits
from proxy.core.model import Because, Checkpoint, Counters, Recalled, Scope, SessionId, Trigger, Usage
from proxy.core.openai import read as read_request
from proxy.core.plan import Plan, Planner, Warm
from proxy.core.region import Region
from proxy.core.rewrite import Routed
from tests.core.build import Policy, calls_and_results, is_whole, limits, read
from tests.strategies import MEMBERS, PREAMBLES, Spelling, conversations

SESSION = SessionId("tenant", "root", "lineage")
MEMBER_KEYS = ("tools", "temperature", "max_tokens", "metadata", "stop", "tool_choice")
NEW = conversations(min_steps=1, max_steps=4)
WORDS = st.sampled_from((0, 60, 200))
HOUR_MS = 3_600_000


def _spelled(members: dict[str, Any], messages: list[Any], spelling: int) -> bytes:
    """The request; a message is written the same way each time, as clients do."""
    elements = [Spelling(spelling + at if spelling else 0).value(message) for at, message in enumerate(messages)]
    envelope = Spelling(spelling)
    spelled = [(key, envelope.value(value)) for key, value in members.items()]
    return envelope.members([*spelled, ("messages", envelope.elements(elements))]).encode()


def _meaning(message: Any) -> str:
    """A message in a form that is equal where it means the same."""
    found = {key: value for key, value in message.items() if key != "cache_control"}
    content = found.get("content")
    if isinstance(content, str):
        found["content"] = [{"type": "text", "text": content}]
    elif isinstance(content, list):
        found["content"] = [{k: v for k, v in part.items() if k != "cache_control"} for part in content]
    return json.dumps(found, sort_keys=True)


class Generations(RuleBasedStateMachine):
    """One session. `made`: its checkpoints in the order they were made, each with what its summariser had read."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Checkpoint, list[str]]] = []
        self.dead: set[str] = set()
        self.generation = 0
        self.said = 0
        self.counters = Counters()
        self.now_ms = 0
        self.soft_turns: list[int] = []
        self.warm: Warm | None = None
        self.routed: Routed | None = None

    @initialize(
        preamble=PREAMBLES,
        messages=NEW,
        spelling=st.just(0) | st.integers(1, 10_000),
        keys=st.sets(st.sampled_from(MEMBER_KEYS)),
        window=st.sampled_from((512, 1024, 2048)),
        policy=st.fixed_dictionaries(
            {
                "keep_head_messages": st.sampled_from((0, 0, 3)),
                "debounce_turns": st.integers(0, 4),
                "min_region_tokens": st.sampled_from((0, 64)),
                "keep_recent_turns": st.integers(0, 2),
                "keep_recent_tokens": st.sampled_from((0, 8000)),
            }
        ),
        scope=st.sampled_from(("warm", "region")),
        factor=st.sampled_from((1.0, 1.4)),
    )
    def starts(
        self,
        preamble: list[Any],
        messages: list[Any],
        spelling: int,
        keys: set[str],
        window: int,
        policy: dict[str, Any],
        scope: str,
        factor: float,
    ) -> None:
        self.preamble = preamble
        self.messages: list[Any] = [{"role": "user", "content": "Hello"}, *messages]
        self.spelling = spelling
        self.members = {"model": "m", **{key: MEMBERS[key][0] for key in sorted(keys)}}
        self.limits: Limits = limits(window, **policy)
        self.policy = Policy(replay_scope=scope, **policy)
        self.factor = factor
        self._sends(None)

    # What a client does

    @rule(messages=NEW, words=WORDS, answered=st.booleans())
    def goes_on(self, messages: list[Any], words: int, answered: bool) -> None:
        self._says(messages, words)
        self._sends("Done." if answered else None)

    @rule()
    def sends_it_again(self) -> None:
        self._sends(None)

    @rule(messages=NEW, words=WORDS)
    def goes_on_at_length(self, messages: list[Any], words: int) -> None:
        for _ in range(3):
            self._says(messages, words)
        self._sends(None)

    @rule(at=st.integers(0, 1000), messages=NEW, words=WORDS)
    def goes_back_and_another_way(self, at: int, messages: list[Any], words: int) -> None:
        self.messages = [*self.messages[: 1 + at % len(self.messages)]]
        self._says(messages, words)
        self._sends(None)

    @rule(at=st.integers(0, 1000))
    def edits_a_message(self, at: int) -> None:
        at %= len(self.messages)
        self.messages[at] = {**self.messages[at], "x_edited": self.messages[at].get("x_edited", 0) + 1}
        self._sends(None)

    @rule(seed=st.integers(0, 10_000))
    def writes_its_history_another_way(self, seed: int) -> None:
        random = Random(seed)
        self.messages = [{k: v for k, v in message.items() if k != "cache_control"} for message in self.messages]
        marked = random.randrange(len(self.messages))
        self.messages[marked] = {**self.messages[marked], "cache_control": {"type": "ephemeral"}}
        self.spelling = seed
        self._sends(None)

    @rule(minute=st.integers(0, 59))
    def tells_the_time_in_its_system_prompt(self, minute: int) -> None:
        self.preamble = [{"role": "system", "content": f"It is 12:{minute:02}."}]
        self._sends(None)

    def _says(self, messages: list[Any], words: int) -> None:
        self.said += 1
        self.messages += [*messages, {"role": "user", "content": f"No. {self.said}. " + "word " * words}]

    # What is done about it

    @rule(trigger=st.sampled_from((Trigger.FORCE, Trigger.GUARD, Trigger.MANUAL)), words=st.integers(1, 40))
    def is_compacted(self, trigger: Trigger, words: int) -> None:
        assert self.warm is not None
        assert self.routed is not None
        self._compacts(self.warm, self.routed, trigger, words)

    @rule()
    def is_compacted_without_a_model(self) -> None:
        warm = self.warm
        assert warm is not None
        region = Planner(warm, self.limits, self.policy).without_call()
        if isinstance(region, Because):
            return
        covered = (*warm.covered(region)[0], *warm.covered(region)[1])
        text = last_resort.summary(covered, warm.applied.text if warm.applied else "", 100)
        self._commits(warm, region, region.k, text, Scope.REGION, anyway=True)

    @rule(words=st.integers(1, 20))
    def is_compacted_in_passes(self, words: int) -> None:
        """Before a request that does not fit: each pass covers more than the one before it, so they come to an end."""
        request = self._read()
        routed = rewrite.route(request.request, request.preamble_length, self._gate(request))
        for _ in range(len(self.messages) + 1):
            warm = turn.warm_from_live(SESSION, request, routed, None, self.factor)
            made = self._compacts(warm, routed, Trigger.GUARD, words)
            if made is None:
                return
            assert made.k > (routed.applied.k if routed.applied else 0)
            routed = rewrite.route(request.request, request.preamble_length, made)
            assert routed.applied is made
        raise AssertionError("passes without end")

    @precondition(lambda self: any(made.id not in self.dead for made, _ in self.made))
    @rule()
    def is_undone(self) -> None:
        newest = max((made for made, _ in self.made if made.id not in self.dead), key=lambda made: made.ref.generation)
        self.dead.add(newest.id)
        self._sends(None)

    @invariant()
    def each_generation_is_used_once(self) -> None:
        generations = [made.ref.generation for made, _ in self.made]
        assert generations == list(range(1, len(generations) + 1))

    # Judges

    def _read(self) -> Conversation:
        return read(_spelled(self.members, [*self.preamble, *self.messages], self.spelling))

    def _sends(self, answer: str | None) -> None:
        """One turn: the newest checkpoint that is this request's is applied, and a soft compaction follows where it is due."""
        request = self._read()
        applied = self._gate(request)
        routed = rewrite.route(request.request, request.preamble_length, applied)
        assert routed.applied is applied
        self._judge_routed(request, routed)
        weight = round(conversations_of.weight(request, applied) * self.factor)
        usage = Usage(prompt=weight, completion=None if answer is None else 3)
        done = turn.forwarded(request, routed, replace(UNREAD, text=answer, usage=usage), weight)
        assert done.used >= weight
        self.routed = routed
        self.warm = turn.warm_after(SESSION, request, routed, None, done, self.factor)
        if answer is not None and done.answer is not None:
            self.messages.append({"role": "assistant", "content": answer})
        self._turn(done.used, applied)

    def _gate(self, request: Conversation) -> Checkpoint | None:
        """The newest checkpoint that is for this request, and each is judged: does it reach just what it is for?"""
        applied = None
        stranger = read(request.request.body, tenant="stranger")
        for made, seen in reversed(self.made):
            held = replace(made, ref=replace(made.ref, dead=made.id in self.dead))
            found = rewrite.applicable(Recalled(None, 0, own=held), request)
            assert (found is held) is self._is_for(made, seen), made.ref
            assert rewrite.applicable(Recalled(None, 0, own=held, foreign=(held,)), stranger) is None
            applied = applied or (made if found is held else None)
        return applied

    def _turn(self, used: int, applied: Checkpoint | None) -> None:
        assert self.warm is not None
        assert self.routed is not None
        self.now_ms += HOUR_MS  # no pause lasts that long: only turns are counted here
        self.counters = replace(self.counters, turns=self.counters.turns + 1)
        due = pressure.due(used, self.limits, self.counters, self.now_ms, applied=applied is not None)
        assert (due is None) <= (used >= self.limits.soft)
        if due is not None:
            return
        turns = self.counters.turns
        assert not self.soft_turns or turns - self.soft_turns[-1] >= self.limits.debounce_turns
        self.soft_turns.append(turns)
        made = self._compacts(self.warm, self.routed, Trigger.SOFT, 10)
        self.counters = (
            replace(self.counters, last_turn=turns)
            if made is None
            else pressure.after_success(self.counters, self.now_ms, applied=applied is not None)
        )

    def _is_for(self, made: Checkpoint, seen: list[str]) -> bool:
        """By what its summariser read: this request begins with it, and goes on behind what is covered."""
        told = [_meaning(message) for message in self.messages]
        if made.id in self.dead or told[: len(seen)] != seen or made.k >= len(told):
            return False
        # A result may come long after its call was given up, and its call after it was covered.
        return is_whole(self.messages, made.k) and is_whole(self.messages, made.from_)

    def _judge_routed(self, request: Conversation, routed: Routed) -> None:
        """Preamble and head, the checkpoint, and the tail, with no call parted from its result and no user message behind a user message."""
        body = json.loads(routed.body)
        sent = [*body["messages"]]
        original = json.loads(request.request.body)
        assert list(body) == list(original)
        if routed.applied is None:
            assert routed.body == request.request.body
            return
        place, k = request.preamble_length + routed.applied.from_, request.preamble_length + routed.applied.k
        told = original["messages"]
        assert sent[:place] == told[:place]
        assert routed.messages[:place] == request.request.messages[:place]
        own = told[k]["role"] != "user"  # a fork may go on with a system message there
        assert routed.messages[place + 1 :] == request.request.messages[k + (0 if own else 1) :]
        assert sent[place]["role"] == "user"
        assert str(sent[place]["content"]).count("<checkpoint_summary note=") == 1
        assert not place or sent[place - 1]["role"] != "user"
        pairs = calls_and_results(self.messages)
        covered = range(routed.applied.from_, routed.applied.k)
        assert all((call in covered) == (result in covered) for call, result in pairs)

    def _compacts(self, warm: Warm, routed: Routed, trigger: Trigger, words: int) -> Checkpoint | None:
        plan = Planner(warm, self.limits, self.policy).plan(trigger)
        if not isinstance(plan, Plan):
            return None
        request = read_request(plan.replay.body)
        assert request is not None
        behind = len(warm.chain) - plan.read_to
        whole = routed.messages[: len(routed.messages) - behind]
        assert request.messages[: len(whole)] == whole
        *between, asked = request.messages[len(whole) :]
        assert between == ([warm.answer] if warm.answer and plan.scope is Scope.WARM else [])
        assert json.loads(asked)["role"] == "user"
        assert plan.region.k > warm.offset
        text = Summary("## Decisions\n" + "fact " * words + "\n## Next steps\nGo on.")
        anyway = trigger is not Trigger.SOFT
        return self._commits(warm, plan.region, plan.read_to, text, plan.scope, anyway=anyway, answer=plan.answer)

    def _commits(
        self,
        warm: Warm,
        region: Region,
        read_to: int,
        text: Summary,
        scope: Scope,
        *,
        anyway: bool,
        answer: bytes | None = None,
    ) -> Checkpoint | None:
        made = compose(
            text,
            region,
            read_to,
            warm,
            self.limits,
            generation=self.generation + 1,
            scope=scope,
            strategy="replay",
            model="m",
            made_at_ms=1,
            anyway=anyway,
            answer=answer,
        )
        if not isinstance(made, Checkpoint):
            return None
        living = [old for old, seen in self.made if self._is_for(old, seen)]
        assert warm.applied is None or made.k > warm.applied.k
        if any(old.k > warm.offset for old in living):
            return None  # somebody was faster: the store refuses one that is made of a request from before that
        assert made.checkpoint_tokens <= made.region_tokens * (1.0 if anyway else 0.6)
        assert all(made.k > old.k for old in living)
        self.generation += 1
        assert made.ref.generation == self.generation
        self.made.append((made, [_meaning(message) for message in self.messages[:read_to]]))
        return made


def test_any_sequence_of_turns_and_compactions() -> None:
    few = settings(stateful_step_count=20, max_examples=max(12, settings().max_examples // 3))
    run_state_machine_as_test(Generations, settings=few)
