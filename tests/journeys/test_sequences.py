"""Clients that go on, fork, edit, ask again and are compacted in any order, through the whole proxy: what a provider and an operator see of it.

Each message bears a mark that no other one bears. So it shows whose words a request carries, whether they stand in it or in a summary.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from proxy.demo.calls import Call
from proxy.demo.provider import SimulatedProvider
from proxy.demo.summariser import CallsTool, Dead, IdealSummariser
from tests.journeys.played import FRAME, Lenient
from tests.journeys.player import Answered, Player, elements, is_extension, playing
from tests.journeys.talks import SYSTEM, Message, calling, prose

T = TypeVar("T")

WINDOW, DEBOUNCE, MAX_PASSES = 3000, 2, 4
MARK = re.compile(rb"MARK_\d+\b")
MARKS = count(1)
CLIENTS = count(1)


def _marked(words: int) -> str:
    number = next(MARKS)
    return f"MARK_{number} = {number} in the list. {prose(number, words)}"


@dataclass
class Talking:
    """One branch of a conversation: its messages, and the session that its last answer named."""

    credential: str
    messages: list[Message]
    session: str = ""
    covered: int = 0


@dataclass
class Seen:
    """What the admin listener showed of a session when it was last looked at."""

    turns: int
    last_turn: int | None
    failures: int
    journal: int
    generations: set[int] = field(default_factory=set)


class Sequences(RuleBasedStateMachine):
    """Some clients of one tenant, and one of another that says the same."""

    def __init__(self, runner: asyncio.Runner, player: Player) -> None:
        super().__init__()
        self._runner = runner
        self._player = player
        self._provider = player.provider
        number = next(CLIENTS)
        self.credentials = (f"Bearer sk-{number}-a", f"Bearer sk-{number}-b")
        self.talks = [Talking(self.credentials[0], [SYSTEM, {"role": "user", "content": _marked(60)}])]
        self.seen: dict[str, Seen] = {}
        self.bodies: dict[str, list[bytes]] = {credential: [] for credential in self.credentials}
        self.calls: dict[str, list[Call]] = {credential: [] for credential in self.credentials}
        self.answers: dict[str, set[bytes]] = {}

    def _run(self, call: Awaitable[T]) -> T:
        async def waited() -> T:
            return await call

        return self._runner.run(waited())

    # What clients do

    @rule(pick=st.integers(0, 9), words=st.sampled_from((20, 150, 400)), tools=st.integers(0, 3), stream=st.booleans())
    def goes_on(self, pick: int, words: int, tools: int, stream: bool) -> None:
        talk = self.talks[pick % len(self.talks)]
        talk.messages.append({"role": "user", "content": _marked(words)})
        for at in range(tools):
            ids = [f"call_{at}", f"call_{at + 1}"]
            talk.messages.append(calling(*ids))
            talk.messages += [{"role": "tool", "tool_call_id": i, "content": _marked(words // 4)} for i in ids]
        self._sends(talk, stream=stream)

    @rule(pick=st.integers(0, 9), times=st.integers(2, 5))
    def goes_on_for_long(self, pick: int, times: int) -> None:
        for _ in range(times):
            self.goes_on(pick, 150, 0, False)

    @rule(pick=st.integers(0, 9))
    def asks_again(self, pick: int) -> None:
        talk = self.talks[pick % len(self.talks)]
        if talk.messages[-1]["role"] == "assistant" and len(talk.messages) > 2:
            talk.messages.pop()
        self._sends(talk)
        talk.covered = 0  # what had read the old answer may have served once more, and is no good from now on

    @rule(pick=st.integers(0, 9), at=st.integers(1, 1000))
    def edits_and_goes_on(self, pick: int, at: int) -> None:
        talk = self.talks[pick % len(self.talks)]
        at = 1 + at % (len(talk.messages) - 1)
        talk.messages[at] = {**talk.messages[at], "content": _marked(30)}
        talk.covered = 0
        self.goes_on(pick, 20, 0, False)

    @precondition(lambda self: len(self.talks) < 4)
    @rule(pick=st.integers(0, 9), at=st.integers(1, 1000), stranger=st.booleans())
    def forks(self, pick: int, at: int, stranger: bool) -> None:
        """Another one goes on from somewhere in a conversation: another answer, a sub-agent, another tenant with the same opening."""
        old = self.talks[pick % len(self.talks)]
        users = [i for i, message in enumerate(old.messages) if message["role"] == "user"]
        messages = [*old.messages[: users[at % len(users)] + 1]]
        self.talks.append(Talking(self.credentials[1] if stranger else old.credential, messages))
        self._sends(self.talks[-1])

    @rule(pick=st.integers(0, 9))
    def asks_for_a_compaction(self, pick: int) -> None:
        talk = self.talks[pick % len(self.talks)]
        talk.messages.append({"role": "user", "content": _marked(20)})
        self._sends(talk, mode="force")

    # What others do

    @rule(pick=st.integers(0, 9))
    def an_operator_undoes(self, pick: int) -> None:
        talk = self.talks[pick % len(self.talks)]
        if talk.session in self.seen:
            self._run(self._player.admin(f"/sessions/{talk.session}/undo", "POST"))
            for other in self.talks:
                other.covered = 0
            self._looks(talk.session, sent=0)

    @rule(how=st.sampled_from((IdealSummariser(), IdealSummariser(), Dead(500), CallsTool())))
    def the_summariser_changes(self, how: Any) -> None:
        self._provider.change(summariser=how)

    def teardown(self) -> None:
        self._provider.change(summariser=IdealSummariser())

    # Judges

    def _sends(self, talk: Talking, *, stream: bool = False, mode: str = "on") -> None:
        members = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        body = json.dumps({"model": "demo-model", **members, "messages": talk.messages}).encode()
        before = len(self._provider.calls)
        reply = {"role": "assistant", "content": _marked(15)}
        self._provider.next_reply = reply
        got = self._run(self._turn(body, talk.credential, mode))
        self._provider.next_reply = None
        calls = self._provider.calls[before:]
        asked = talk.credential + json.dumps(talk.messages)
        talk.messages.append(reply)
        self.bodies[talk.credential].append(body)
        assert got.status == 200, got.body
        served = [call for call in calls if not call.is_compaction and call.status == 200]
        assert len(served) == 1, "one answer is paid for"
        self._judge_marks(talk, calls, self.answers.setdefault(asked, set()))
        self.answers[asked] |= set(MARK.findall(json.dumps(reply).encode()))
        self._judge_sent(talk, body, got, served[0])
        self._judge_compactions(talk, [call for call in calls if call.is_compaction])
        self.calls[talk.credential] += calls
        talk.session = got.headers.get("x-warmfold-session", talk.session)
        if talk.session:
            self._looks(talk.session, sent=1, served=served[0])

    async def _turn(self, body: bytes, credential: str, mode: str) -> Answered:
        got = await self._player.post(body, Authorization=credential, x_warmfold_mode=mode)
        await self._player.settled()
        return got

    def _judge_marks(self, talk: Talking, calls: list[Call], before: set[bytes]) -> None:
        """Nobody is told what is not of this very conversation. `before`: what this same request was answered when it was sent before."""
        *asked, answer = talk.messages
        own = set(MARK.findall(json.dumps(asked).encode())) | before
        for call in calls:
            told = own | set(MARK.findall(json.dumps(answer).encode())) if call.is_compaction else own
            assert set(MARK.findall(call.raw)) <= told, "words of another conversation"

    def _judge_sent(self, talk: Talking, body: bytes, got: Answered, call: Call) -> None:
        if "x-warmfold-checkpoint" not in got.headers:
            assert call.raw == body
            return
        covered = int(got.headers["x-warmfold-covered"])
        assert covered >= talk.covered, "what is covered grows"
        talk.covered = covered
        client, sent = elements(body), elements(call.raw)
        assert sent[0] == client[0]
        first = client[1 + covered]
        own = json.loads(first)["role"] != "user"
        assert sent[2:] == client[1 + covered + (0 if own else 1) :]
        assert json.loads(sent[1])["role"] == "user"
        assert FRAME in sent[1]
        assert own or sent[1].endswith(first[first.index(b"MARK_") :])
        messages = talk.messages[1:-1]
        called = {i: at for at, message in enumerate(messages[:covered]) for i in _ids(message)}
        results = [message.get("tool_call_id") for message in messages[covered:]]
        behind = {i for message in messages[covered:] for i in _ids(message)}
        assert not [i for i in results if i in called and i not in behind], "a result without its call"

    def _judge_compactions(self, talk: Talking, calls: list[Call]) -> None:
        # Each pass once, and once more where the answer was none.
        assert len(calls) <= 2 * MAX_PASSES
        routed = [call.raw for call in self.calls[talk.credential] if not call.is_compaction]
        for call in calls:
            routed += [other.raw for other in self._provider.calls[-12:] if not other.is_compaction]
            assert is_extension(call.raw, routed[::-1], self.bodies[talk.credential][::-1])

    def _looks(self, session: str, *, sent: int, served: Call | None = None) -> None:
        """Generations, turns and the distance of soft compactions, as the admin listener shows them."""
        shown = self._run(self._player.admin(f"/sessions/{session}"))
        old, journal = self.seen.get(session), shown["journal"]
        generations = [one["generation"] for one in shown["checkpoints"]]
        assert len(set(generations)) == len(generations)
        assert max(generations, default=0) <= shown["generation"]
        new = journal[: len(journal) - (old.journal if old else 0)]
        if old is not None:
            assert shown["turns"] == old.turns + sent, "a compaction is no turn"
            made = [line["generation"] for line in new if line["outcome"] == "committed"]
            assert not set(made) & old.generations, "a generation is used once"
            soft = [line for line in new if line["trigger"] == "soft"]
            assert len(soft) <= 1
            if soft:
                assert old.failures == 0, "failures back off for longer than this takes"
                assert old.last_turn is None or shown["turns"] - old.last_turn >= DEBOUNCE
        if served is not None and served.answer is not None:
            assert shown["usage"]["prompt"] == served.prompt_tokens
            assert shown["used"] >= served.prompt_tokens
        counters = shown["counters"]
        known = {*(old.generations if old else ()), *generations}
        self.seen[session] = Seen(shown["turns"], counters["last_turn"], counters["failures"], len(journal), known)


def _ids(message: Message) -> list[str]:
    return [call["id"] for call in message.get("tool_calls") or ()]


def test_any_sequence_of_turns(tmp_path: Path) -> None:
    flags = {
        "compaction__max_context_tokens": WINDOW,
        "compaction__when": "after_turn",
        "compaction__trigger_ratio": 0.5,
        "compaction__debounce_turns": DEBOUNCE,
        "compaction__max_passes": MAX_PASSES,
    }
    few = settings(stateful_step_count=12, max_examples=max(16, settings().max_examples // 6))
    with asyncio.Runner() as runner:

        async def opened() -> tuple[Any, Any, Player]:
            provider: SimulatedProvider = Lenient(window_tokens=WINDOW)
            await provider.start()
            around = playing(tmp_path, provider, **flags)
            return provider, around, await around.__aenter__()

        provider, around, player = runner.run(opened())
        try:
            run_state_machine_as_test(lambda: Sequences(runner, player), settings=few)
        finally:
            runner.run(around.__aexit__(None, None, None))
            runner.run(provider.stop())
