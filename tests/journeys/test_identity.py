"""No conversation ever gets anything of another one, whatever clients do with their histories, ids and headers.

Every text that a client, a model or a summariser writes carries a canary of its own. Each request has a number in a header that the proxy
hands on, so whatever reaches the provider can be held against what that client had sent: nothing else may be in it. Scenes check this at
their end; the tests add what the client sees, and what it costs.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import zlib
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.config import Config
from proxy.config.compaction import ModelRule
from proxy.config.sections import NamedUpstream
from proxy.demo.answers import Answer
from proxy.demo.calls import Call
from proxy.demo.provider import SimulatedProvider
from proxy.demo.summariser import Slow, Summary
from proxy.demo.template import Request, compact
from proxy.demo.tokenizer import Tokens
from proxy.economy import LIMIT
from proxy.server import start
from tests.journeys.player import Answered, Player, config, elements, is_extension, same_parameters
from tests.journeys.test_main_job import long_text, system

pytestmark = pytest.mark.filterwarnings("error")

WINDOW = 4096
WORDS = 170
"""A turn of the usual size: the soft watermark comes after some 14 of them."""

_CANARY = re.compile(rb"cnry-[a-z]+-\d{4}")
_CARRIED = 24
_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("look", "read", "write")
]


def canaries(raw: bytes) -> frozenset[bytes]:
    return frozenset(_CANARY.findall(raw))


def gossip(request: Request) -> Summary:
    """A summary that passes on whatever its author has read, preamble and newest messages included."""
    read = sorted(canaries(compact(request["messages"][:-1]).encode()))
    carried = b" ".join((*read[:_CARRIED], *read[-_CARRIED:])).decode()
    return Summary(Answer(text=f"## Task and intent\nGo on.\n\n## State of the work\n{carried}"))


class Talker:
    """A model that marks each answer."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def __call__(self, request: Request, tokens: Tokens) -> Answer:
        return Answer(text=f"Part {(number := next(self._numbers))} is done cnry-answer-{number:04d}.")


@dataclass
class Sent:
    """A client's request, and what the client was told."""

    line: str
    body: bytes
    answer: str = ""


@dataclass
class Scene:
    """The proxy between its clients and the provider."""

    player: Player
    provider: SimulatedProvider
    window: int
    sent: list[Sent] = field(default_factory=list)

    async def post(self, line: str, body: dict[str, Any] | bytes, **headers: str) -> Answered:
        """One request; `line` says whose it is."""
        sent = Sent(line, body if isinstance(body, bytes) else json.dumps(body).encode())
        self.sent.append(sent)
        got = await self.player.post(sent.body, x_told=str(len(self.sent) - 1), **headers)
        assert got.status == 200, got.body
        sent.answer = str(got.json["choices"][0]["message"]["content"])
        return got

    def told(self, call: Call) -> Sent:
        """The client's request that made us send this."""
        return self.sent[int(call.headers["x-told"])]

    def of(self, line: str, calls: Iterable[Call] | None = None) -> list[Call]:
        """The calls that were made for a line, by default the compactions."""
        return [
            call for call in (self.provider.compactions if calls is None else calls) if self.told(call).line == line
        ]

    def last(self) -> bytes:
        """The turn that the provider got last."""
        return self.provider.turns[-1].raw

    async def session(self, id_: str) -> dict[str, Any]:
        """What the admin listener shows of a session."""
        found: dict[str, Any] = await self.player.admin(f"/sessions/{id_}")
        assert "error" not in found, found
        return found

    async def sessions(self) -> list[dict[str, Any]]:
        """All of them."""
        found: list[dict[str, Any]] = (await self.player.admin("/sessions?limit=100"))["sessions"]
        return found

    def check(self) -> None:
        """Nothing reached the provider that is not this line's own, and nothing that does not fit; each compaction is one of the line's turns and one
        more message. Own is what this request says, and what the line was answered: answers are never compared (docs/reliability.md).
        """
        for call in self.provider.calls:
            sent = self.told(call)
            own = canaries(sent.body) | canaries("".join(s.answer for s in self.sent if s.line == sent.line).encode())
            assert canaries(call.raw) <= own, f"foreign to {sent.line}: {canaries(call.raw) - own}"
            assert call.prompt_tokens <= self.window, f"{call.prompt_tokens} tokens for {sent.line}"
            if call.is_compaction:
                turns = [t.raw for t in self.of(sent.line, self.provider.turns) if same_parameters(call.raw, t.raw)]
                live = [s.body for s in self.sent if s.line == sent.line and same_parameters(call.raw, s.body)]
                assert is_extension(call.raw, turns, live)


@asynccontextmanager
async def scene(
    tmp: Path,
    *,
    window: int = WINDOW,
    rules: Sequence[ModelRule] = (),
    upstreams: Sequence[NamedUpstream] = (),
    provider: dict[str, Any] | None = None,
    **flags: object,
) -> AsyncIterator[Scene]:
    """A proxy in front of a provider of this window."""
    flags = {"compaction__max_context_tokens": window, "compaction__when": "after_turn", **flags}
    settings = {"window_tokens": 10 * window, "summariser": gossip, "answerer": Talker(), **(provider or {})}
    async with SimulatedProvider(**settings) as simulated, aiohttp.ClientSession() as http:
        chosen = dict(config(tmp, simulated.base_url, **flags)) | {
            "models": tuple(rules),
            "upstreams": tuple(upstreams),
        }
        running = await start(Config(**chosen))
        try:
            played = Scene(Player(running, simulated, http), simulated, window)
            yield played
            await played.player.settled()
            played.check()
        finally:
            await running.stop()


class Line:
    """A client that sends its whole history each time. `seen`: the headers of its answers."""

    def __init__(
        self,
        scene: Scene,
        name: str,
        *,
        preamble: str = "You are a careful assistant.",
        history: Sequence[dict[str, Any]] | None = None,
        headers: dict[str, str] | None = None,
        **extra: Any,
    ) -> None:
        self.scene = scene
        self.name = name
        self.messages = [system(preamble)] if history is None else [dict(m) for m in history]
        self.headers = headers or {}
        self.extra: dict[str, Any] = {"model": "demo-model", **extra}
        self.seen: list[Any] = []
        self._numbers = itertools.count()

    def text(self, words: int = WORDS) -> str:
        """Something new of this line's own."""
        number = next(self._numbers)
        canary = f"cnry-{self.name}-{number:04d}"
        return f"{canary} {long_text(zlib.crc32(canary.encode()), words)}"

    def body(self, *more: dict[str, Any]) -> dict[str, Any]:
        """The history with more behind it."""
        return {**self.extra, "messages": [*self.messages, *more]}

    async def send(self, *, settle: bool = True) -> Answered:
        """The history as it stands."""
        got = await self.scene.post(self.name, self.body(), **self.headers)
        self.seen.append(got.headers)
        if settle:
            await self.scene.player.settled()
        return got

    async def say(self, text: str | None = None, *, words: int = WORDS, settle: bool = True) -> Answered:
        """A user turn: the answer is added to the history."""
        self.messages.append(user(self.text(words) if text is None else text))
        got = await self.send(settle=settle)
        self.messages.append(assistant(got))
        return got

    async def work(self, words: int = WORDS) -> Answered:
        """A step of an agent: a tool call and its result are added, and the answer."""
        id_ = f"call_{len(self.messages)}"
        call = {"id": id_, "type": "function", "function": {"name": "look", "arguments": "{}"}}
        self.messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        self.messages.append({"role": "tool", "tool_call_id": id_, "content": self.text(words)})
        got = await self.send()
        self.messages.append(assistant(got))
        return got

    async def until_compacted(self, **how: Any) -> None:
        """Talk until a checkpoint stands."""
        before = len(self.scene.of(self.name))
        for _ in range(60):
            await self.say(**how)
            if len(self.scene.of(self.name)) > before:
                return
        raise AssertionError("never compacted")

    def fork(self, name: str, at: int | None = None) -> Line:
        """Another line with the same first messages."""
        made = Line(self.scene, name, history=self.messages[:at], headers=dict(self.headers))
        made.extra = dict(self.extra)
        return made

    @property
    def names(self) -> list[str]:
        """The sessions it was told, in order, each once in a row."""
        told = [h["x-warmfold-session"] for h in self.seen if "x-warmfold-session" in h]
        return [name for name, _ in itertools.groupby(told)]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(got: Answered) -> dict[str, Any]:
    return {"role": "assistant", "content": got.json["choices"][0]["message"]["content"]}


def shown(calls: Iterable[Call], canary: frozenset[bytes]) -> list[bytes]:
    """Which of these canaries the calls show."""
    return sorted(canary & canaries(b"".join(call.raw for call in calls)))


def pairs(line: Line, number: int, words: int = WORDS) -> list[dict[str, Any]]:
    """User messages of a line, each with an answer that we have never seen."""
    return [m for _ in range(number) for m in (user(line.text(words)), {"role": "assistant", "content": "Done."})]


def covered(headers: Any) -> int:
    """How many messages a checkpoint stood for; 0: there was none."""
    return int(headers.get("x-warmfold-covered", 0))


# Several conversations under one key


@pytest.mark.parametrize("when", ["after_turn", "next_turn"])
async def test_two_conversations_and_a_sub_agent_under_one_key_have_three_states(tmp_path: Path, when: str) -> None:
    async with scene(tmp_path, compaction__when=when) as at:
        lines = [
            Line(at, "alpha", headers={"x_affinity": "alpha"}, user="alpha"),
            Line(at, "beta", headers={"x_affinity": "beta"}, user="beta"),
            Line(at, "sub", preamble="You only search cnry-prompt-0001.", tools=_TOOLS, user="sub"),
        ]
        for _ in range(20):
            for line in lines:
                await (line.work() if line.name == "sub" and len(line.messages) > 2 else line.say())
        assert len({name for line in lines for name in line.names}) == 3
        for line in lines:
            made = at.of(line.name)
            assert made
            assert all(json.loads(call.raw)["user"] == line.name for call in made)
            assert all(call.headers.get("x-affinity") == line.headers.get("x_affinity") for call in made)
            (name,) = line.names
            state = await at.session(name)
            assert state["turns"] == 19  # the first request is too small to be looked up
            assert state["generation"] == len(made) == len([a for a in state["journal"] if a["outcome"] == "committed"])
            assert {h["x-warmfold-checkpoint"] for h in line.seen if "x-warmfold-checkpoint" in h} <= {
                ref["id"] for ref in state["checkpoints"]
            }


@pytest.mark.parametrize("same_task", [False, True])
async def test_a_sub_agent_with_the_main_agents_session_id_never_gets_its_checkpoint(
    tmp_path: Path, same_task: bool
) -> None:
    async with scene(tmp_path) as at:
        same = {"x_session_id": "agent-7"}
        main = Line(at, "main", preamble="You plan cnry-prompt-0001.", headers=same, tools=_TOOLS)
        sub = Line(at, "sub", preamble="You search cnry-prompt-0002.", headers=same, tools=_TOOLS[:1])
        task = f"Find the leak. {long_text(3, WORDS)}"
        await main.say(task)
        await sub.say(task if same_task else None)
        for _ in range(18):
            await main.work()
            await sub.say()
        assert len(main.names) == len(sub.names) == 1
        assert main.names != sub.names
        for line in (main, sub):
            state = await at.session(line.names[0])
            assert state["turns"] == 18
            assert 1 <= state["generation"] == len(at.of(line.name)) <= 3
            first = next(i for i, h in enumerate(line.seen) if covered(h))
            assert all(covered(h) for h in line.seen[first:]), "its own checkpoint stays with it"


@pytest.mark.parametrize("kind", ["own prompt", "one message", "two messages", "whole history"])
async def test_a_title_request_between_turns_leaves_the_main_line_its_session(tmp_path: Path, kind: str) -> None:
    async with scene(tmp_path) as at:
        main = Line(at, "main", tools=_TOOLS, headers={"x_session_id": "chat-1"})
        await main.say()
        wish = user(f"Write a title for this conversation. {long_text(5, 90)}")
        for turn in range(18):
            await main.say()
            if turn % 3:
                continue
            first = main.messages[1]
            asked = {
                "own prompt": [system("You write titles."), first, wish],
                "one message": [user(f"{wish['content']}\n{first['content']}"), user("Title:")],
                "two messages": [*main.messages[:1], first, wish],
                "whole history": [*main.messages, wish],
            }[kind]
            await at.post("main", {"model": "demo-model", "messages": asked}, **main.headers)
            await at.player.settled()
        state = await at.session(main.names[-1])
        if kind == "whole history":
            # It goes on from the session's end like the next turn does, and comes first: the main line goes on as its fork.
            assert state["turns"] == 18 + 6
        else:
            assert len(main.names) == 1
            assert state["turns"] == 18
            assert state["generation"] == len(at.provider.compactions)
        assert 1 <= len(at.provider.compactions) <= 3
        first_at = next(i for i, h in enumerate(main.seen) if covered(h))
        assert all(covered(h) for h in main.seen[first_at:])


# Branches


@pytest.mark.parametrize("at_once", [False, True])
async def test_branches_of_one_conversation_each_get_a_checkpoint_of_their_own(tmp_path: Path, at_once: bool) -> None:
    async with scene(tmp_path, provider={"summariser": Slow(0.05, gossip)}) as at:
        trunk = Line(at, "trunk")
        for _ in range(10):
            await trunk.say()
        assert not at.provider.compactions
        branches = [trunk.fork("left"), trunk.fork("right")]
        for _ in range(10):
            if at_once:
                await asyncio.gather(*(branch.say(settle=False) for branch in branches))
                await at.player.settled()
            else:
                for branch in branches:
                    await branch.say()
        for branch in branches:
            made = at.of(branch.name)
            assert len(made) == 1, f"{branch.name}: one watermark passed, {len(made)} calls"
            first = next(i for i, h in enumerate(branch.seen) if covered(h))
            assert first < 6
            assert len({h["x-warmfold-checkpoint"] for h in branch.seen[first:]}) == 1
        ids = [{h.get("x-warmfold-checkpoint") for h in branch.seen} - {None} for branch in branches]
        assert not ids[0] & ids[1]
        assert branches[0].names[-1] != branches[1].names[-1]
        for branch in branches:
            assert (await at.session(branch.names[-1]))["generation"] == 1


async def test_branches_from_behind_a_checkpoint_share_it_and_then_part(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        trunk = Line(at, "trunk")
        await trunk.until_compacted()
        await trunk.say()
        shared = trunk.seen[-1]["x-warmfold-checkpoint"]
        branches = [trunk.fork("left"), trunk.fork("right")]
        for turn in range(14):
            for branch in branches:
                await branch.say()
                if turn == 0:
                    assert branch.seen[-1]["x-warmfold-checkpoint"] == shared
        assert len(at.of("trunk")) == 1
        assert [1 <= len(at.of(branch.name)) <= 2 for branch in branches] == [True, True]
        later = [{h["x-warmfold-checkpoint"] for h in branch.seen} - {shared} for branch in branches]
        assert all(later)
        assert not later[0] & later[1]


async def test_a_branch_with_another_system_prompt_is_not_given_the_checkpoint(tmp_path: Path) -> None:
    """Sub-agents that inherit a history: a summariser that read one agent's instructions may quote them."""
    async with scene(tmp_path) as at:
        trunk = Line(at, "trunk", preamble="You plan cnry-prompt-0001.")
        await trunk.until_compacted()
        await trunk.say()
        shared = trunk.seen[-1]["x-warmfold-checkpoint"]
        behind = len(trunk.messages)
        await trunk.say()
        same, other = trunk.fork("same", behind), trunk.fork("other", behind)
        other.messages[0] = system("You search cnry-prompt-0002.")
        for line in (same, other):
            await line.say(words=40)
        assert same.seen[-1]["x-warmfold-checkpoint"] == shared
        assert other.seen[-1].get("x-warmfold-checkpoint") != shared
        assert not shown(at.provider.turns[-1:], frozenset({b"cnry-prompt-0001"}))


@pytest.mark.parametrize("case", ["soft", "hard", "hard, on their own messages", "hard, behind a checkpoint"])
async def test_requests_at_once_that_go_on_from_the_same_turn_never_share_a_summary(tmp_path: Path, case: str) -> None:
    """Parallel sub-agents that inherit a history: none may be given what another one's summariser has read of that one."""
    async with scene(tmp_path, provider={"summariser": Slow(0.1, gossip)}) as at:
        trunk = Line(at, "trunk")
        if case == "hard, behind a checkpoint":
            await trunk.until_compacted()
        elif case == "hard, on their own messages":
            await trunk.say(words=60)
            await trunk.say(words=60)
        else:
            while not at.provider.turns or at.provider.turns[-1].prompt_tokens < 0.6 * WINDOW:
                await trunk.say()
        branches = [trunk.fork(name) for name in ("left", "right", "middle")]
        if "," in case:
            for branch in branches:
                branch.messages += pairs(branch, 12, 260)
        words = {"soft": 600, "hard": 1200}.get(case, WORDS)
        await asyncio.gather(*(branch.say(words=words, settle=False) for branch in branches))
        await at.player.settled()
        for _ in range(8):
            for branch in branches:
                await branch.say()
        assert len({branch.names[-1] for branch in branches}) == 3
        for branch in branches:
            assert covered(branch.seen[-1]), f"{branch.name} can be compacted like any other"
            assert len(at.of(branch.name)) <= 4


async def test_a_first_contact_at_once_by_two_conversations_with_one_opening(tmp_path: Path) -> None:
    """Both are far too long, and agree in all but their last message."""
    async with scene(tmp_path, provider={"summariser": Slow(0.1, gossip)}) as at:
        opening = Line(at, "trunk")
        opening.messages += pairs(opening, 30)
        branches = [opening.fork("left"), opening.fork("right")]
        await asyncio.gather(*(branch.say(words=400, settle=False) for branch in branches))
        await at.player.settled()
        assert all(covered(branch.seen[0]) for branch in branches)
        assert branches[0].names != branches[1].names
        for branch in branches:
            await branch.say()
            assert covered(branch.seen[-1])


# Histories that change


@pytest.mark.parametrize("kind", ["user message", "tool result"])
async def test_an_edit_of_a_covered_message_sends_the_history_as_it_is_now(tmp_path: Path, kind: str) -> None:
    """Edit and resend: what followed is gone. Or an old tool result is cleared and all the rest stays."""
    async with scene(tmp_path) as at:
        line = Line(at, "main", tools=_TOOLS)
        resends = kind == "user message"
        await line.say(words=40)
        while covered(line.seen[-1]) < 40:
            await (line.say(words=40) if resends else line.work(words=40))
        place = next(i for i in range(12, 20) if line.messages[i]["role"] == ("user" if resends else "tool"))
        before = canaries(json.dumps(line.messages[place]).encode())
        assert before
        calls, turns = len(at.provider.compactions), len(at.provider.turns)
        line.messages[place] = {**line.messages[place], "content": "Do something else." if resends else "[cleared]"}
        if resends:
            del line.messages[place + 1 :]
        line.messages.append(assistant(await line.send()))
        for _ in range(6):
            await line.say(words=40)
        assert not shown(at.provider.turns[turns:], before)
        assert len(line.names) == 2
        # Only with the cleared result the history is past the watermark, and is compacted anew.
        assert len(at.provider.compactions) - calls == (0 if resends else 1)
        assert bool(covered(line.seen[-1])) is not resends


async def test_an_edit_behind_the_covered_part_keeps_the_checkpoint_only_if_its_author_had_not_read_it(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as at:
        line = Line(at, "main")
        await line.until_compacted()
        await line.say()
        state = await at.session(line.names[-1])
        (ref,) = state["checkpoints"]
        assert ref["to"] < ref["seen"]
        read, unread = line.fork("read", ref["seen"] - 1), line.fork("unread", ref["seen"] + 2)
        await read.say()
        await unread.say()
        assert not covered(read.seen[-1])
        assert covered(unread.seen[-1]) == ref["to"]


async def test_the_same_request_again_is_the_same_turn(tmp_path: Path) -> None:
    """Retries, one after the other and all at once, below and above the watermark."""
    always = {"summariser": Slow(0.05, gossip), "answerer": lambda request, tokens: Answer(text="Done.")}
    async with scene(tmp_path, provider=always) as at:
        line = Line(at, "main")
        while not at.provider.turns or at.provider.turns[-1].prompt_tokens < 0.7 * WINDOW:
            await line.say()
        line.messages.append(user(line.text(300)))
        await asyncio.gather(*(line.send(settle=False) for _ in range(8)))
        await at.player.settled()
        for _ in range(6):
            got = await line.send()
        line.messages.append(assistant(got))
        for _ in range(4):
            await line.say()
        assert len(line.names) == 1
        assert 1 <= len(at.provider.compactions) <= 2
        assert covered(line.seen[-1])
        state = await at.session(line.names[0])
        assert state["messages"] == len(line.messages) - 2
        assert state["generation"] == len(at.provider.compactions)


@pytest.mark.parametrize("when", ["after_turn", "next_turn"])
@pytest.mark.parametrize("change", ["regenerated", "edited"])
async def test_once_an_answer_was_changed_no_checkpoint_tells_of_the_old_one(
    tmp_path: Path, change: str, when: str
) -> None:
    """The summariser passes on all it has read, the last answer included."""
    async with scene(tmp_path, compaction__when=when) as at:
        line = Line(at, "main")
        await line.until_compacted()
        if when == "next_turn":
            await line.say()  # what ran beside the turn before read the answer before
        discarded = canaries(json.dumps(line.messages.pop()).encode())
        assert discarded
        if change == "regenerated":
            line.messages.append(assistant(await line.send()))
        else:
            line.messages.append({"role": "assistant", "content": "What the user put in its place."})
        before = len(at.provider.turns)
        for _ in range(12):
            await line.say()
        assert not shown(at.provider.turns[before:], discarded)
        assert covered(line.seen[-1])
        assert len(line.names) == 1
        assert len(at.provider.compactions) <= 3


@pytest.mark.parametrize("when", ["after_turn", "next_turn"])
async def test_a_request_asked_again_carries_its_checkpoint_and_costs_no_other_compaction(
    tmp_path: Path, when: str
) -> None:
    async with scene(tmp_path, compaction__when=when) as at:
        line = Line(at, "main")
        await line.until_compacted()
        paid = len(at.provider.compactions)
        del line.messages[-1]
        for _ in range(5):
            await line.send()
        assert len({call.raw for call in at.provider.turns[-5:]}) == 1
        assert all(covered(headers) for headers in line.seen[-5:])
        assert len(at.provider.compactions) == paid


async def test_a_client_that_rewords_every_answer_keeps_its_checkpoints(tmp_path: Path) -> None:
    """The first checkpoint may be lost, the next one is made without the answer."""
    async with scene(tmp_path) as at:
        line = Line(at, "main")
        for _ in range(40):
            await line.say()
            line.messages[-1]["content"] = f"I said: {line.messages[-1]['content']}"
        assert sum(map(bool, map(covered, line.seen[20:]))) == 20
        for call in at.provider.compactions[1:]:
            assert [m["role"] for m in call.request["messages"][-2:]] == ["user", "user"]
        assert 2 <= len(at.provider.compactions) <= 7


async def test_an_answer_is_the_same_whatever_an_sdk_sends_back_with_it(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        line = Line(at, "main")
        while not any(map(covered, line.seen)):
            await line.say()
            text = line.messages[-1]["content"]
            parts = [{"type": "text", "text": f"{text}\n", "annotations": []}]
            line.messages[-1] |= {"content": parts, "refusal": None, "name": "helper"}
            assert len(line.messages) < 60
        assert len(at.provider.compactions) == 1
        assert at.provider.compactions[0].request["messages"][-2]["role"] == "assistant"


async def test_a_history_cut_back_to_an_early_turn_goes_on_without_what_came_later(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        line = Line(at, "main")
        await line.until_compacted()
        await line.say()
        turns = (await at.session(line.names[0]))["turns"]
        rewound = line.fork("main", 1 + 9)  # the request of turn 5
        rewound._numbers = itertools.count(500)
        later = canaries(json.dumps(line.messages[10:]).encode())
        got = await rewound.send()
        rewound.messages.append(assistant(got))
        for _ in range(5):
            await rewound.say()
        assert not any(covered(h) for h in rewound.seen)
        assert len(rewound.names) == 1
        assert rewound.names != line.names
        assert not shown(at.provider.turns[-6:], later)
        await line.say()
        assert len(line.names) == 1, "the line that was left is still there"
        assert covered(line.seen[-1])
        assert (await at.session(line.names[0]))["turns"] == turns + 1


@pytest.mark.parametrize("keeps_first", [False, True])
async def test_a_client_that_trims_its_oldest_messages_never_gets_them_back(tmp_path: Path, keeps_first: bool) -> None:
    async with scene(tmp_path, compaction__trigger_ratio=0.5) as at:
        line = Line(at, "main")
        for _ in range(40):
            await line.say()
            kept = 2 if keeps_first else 1
            if len(line.messages) > 20:
                del line.messages[kept : kept + 2]
        assert not any(covered(h) for h in line.seen)
        # Before it trims for the first time the conversation is one like any other.
        assert 1 <= len(at.provider.compactions) <= LIMIT + 1, "compacting for nothing ends"


async def test_a_client_that_compacts_its_own_history_starts_anew(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        line = Line(at, "main")
        await line.until_compacted()
        await line.say()
        assert covered(line.seen[-1])
        old = canaries(json.dumps(line.messages).encode())
        line.messages = [line.messages[0], user(f"Summary of what was said: {long_text(9, 200)}"), *line.messages[-2:]]
        kept = canaries(json.dumps(line.messages).encode())
        for _ in range(3):
            await line.say()
            assert not covered(line.seen[-1])
            assert not shown(at.provider.turns[-1:], old - kept)
        await line.until_compacted()
        await line.say()
        assert covered(line.seen[-1])
        assert len(line.names) == 2


@pytest.mark.parametrize("place", [1, 2])
async def test_an_early_message_that_changes_each_turn_never_lies_under_a_checkpoint(
    tmp_path: Path, place: int
) -> None:
    async with scene(tmp_path) as at:
        line = Line(at, "main")
        line.messages += pairs(line, 2)
        line.messages.insert(place, user("volatile"))
        for turn in range(24):
            line.messages[place] = user(f"Open files and time at turn {turn}: cnry-volatile-{turn:04d}")
            await line.say()
            # A request that does not fit is compacted for itself alone: what it holds now may be covered, and nothing older shown.
            assert not covered(line.seen[-1]) or line.seen[-1]["x-warmfold-compaction"] == "inline"
            assert {c for c in canaries(at.last()) if b"volatile" in c} == {f"cnry-volatile-{turn:04d}".encode()}
        assert covered(line.seen[-1])


# What stands around the messages


@pytest.mark.parametrize("when", ["after_turn", "next_turn"])
async def test_preamble_tools_and_parameters_that_change_each_turn_do_not_lose_the_session(
    tmp_path: Path, when: str
) -> None:
    """A clock in the system prompt, tools in another order or fewer of them, another temperature."""
    async with scene(tmp_path, compaction__when=when) as at:
        line = Line(at, "main")
        for turn in range(24):
            line.messages[0] = system(f"You are careful. Now: 12:00:{turn:02d}")
            line.extra["tools"] = [_TOOLS, _TOOLS[::-1], _TOOLS[:2]][turn % 3]
            line.extra["temperature"] = turn / 100
            await line.say()
            sent = json.loads(at.last())
            assert sent["messages"][0] == line.messages[0]
            assert sent["tools"] == line.extra["tools"]
        assert len(line.names) == 1
        state = await at.session(line.names[0])
        assert state["turns"] == 23
        assert 1 <= state["generation"] == len(at.provider.compactions) <= 3
        first = next(i for i, h in enumerate(line.seen) if covered(h))
        assert all(covered(h) for h in line.seen[first:])


@pytest.mark.parametrize("when", ["after_turn", "next_turn"])
async def test_another_model_in_mid_conversation_goes_on_with_the_session(tmp_path: Path, when: str) -> None:
    """A large one, a small one whose window is long past, and the large one again."""
    rules = [ModelRule(match="small", max_context_tokens=2048)]
    async with scene(tmp_path, rules=rules, compaction__when=when) as at:
        line = Line(at, "main", model="large")
        for turn in range(30):
            line.extra["model"] = "small" if 11 <= turn < 22 else "large"
            got = await line.say(words=140)
            state = await at.session(got.headers["x-warmfold-session"]) if turn else {}
            if turn:
                assert state["model"] == line.extra["model"]
                assert state["window"] == (2048 if line.extra["model"] == "small" else WINDOW)
                assert at.provider.turns[-1].prompt_tokens < state["window"]
        assert len(line.names) == 1
        for call in at.provider.compactions:
            assert call.prompt_tokens < (2048 if json.loads(call.raw)["model"] == "small" else WINDOW)
        assert covered(line.seen[-1])


async def test_a_compaction_that_waits_goes_to_the_provider_of_the_turn_that_it_replays(tmp_path: Path) -> None:
    """The next turn asks for a model that another upstream serves: that one has never seen the conversation's model, nor its cache."""
    async with SimulatedProvider(window_tokens=10 * WINDOW) as other:
        upstreams = [NamedUpstream(name="other", match="other-*", base_url=other.base_url)]
        async with scene(tmp_path, upstreams=upstreams, compaction__when="next_turn") as at:
            line = Line(at, "main")
            waits: dict[str, Any] = {}
            while not waits.get("pending"):
                got = await line.say()
                waits = (
                    await at.session(got.headers["x-warmfold-session"]) if "x-warmfold-session" in got.headers else {}
                )
            line.extra["model"] = "other-model"
            await line.say()
            assert json.loads(other.turns[-1].raw)["model"] == "other-model"
            assert not other.compactions
            line.extra["model"] = "demo-model"
            for _ in range(4):
                await line.say()
            assert len(line.names) == 1
            assert covered(line.seen[-1])


async def test_cache_marks_that_move_and_texts_as_parts_are_the_same_conversation(tmp_path: Path) -> None:
    """As clients of Anthropic's kind do: the newest message is a list of parts with a mark, and turns back into a string a turn later."""
    async with scene(tmp_path) as at:
        line = Line(at, "main")
        for turn in range(20):
            line.messages.append(user(""))
            text = line.text()
            mark = {"type": "ephemeral", "ttl": "1h"}
            line.messages[-1]["content"] = [{"type": "text", "text": text, "cache_control": mark}]
            got = await line.send()
            newest = elements(at.last())[-1]
            assert newest == json.dumps(line.messages[-1]).encode()
            assert at.last().count(b"cache_control") == 1
            line.messages[-1]["content"] = text if turn % 2 else [{"text": text, "type": "text"}]
            line.messages.append(assistant(got))
        assert len(line.names) == 1
        assert (await at.session(line.names[0]))["turns"] == 19
        assert covered(line.seen[-1])
        assert len(at.provider.compactions) <= 2


async def test_a_reminder_in_the_middle_grows_the_history_and_changes_nothing_else(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        line = Line(at, "main")
        for turn in range(20):
            if turn == 7:
                line.messages.append(system("<system-reminder> the file was truncated"))
            await line.say()
        assert len(line.names) == 1
        assert (await at.session(line.names[0]))["turns"] == 19
        assert covered(line.seen[-1])
        assert b"<system-reminder>" in at.last(), "what the system said stays, in the checkpoint's ledger"


@pytest.mark.parametrize("stays", [True, False])
async def test_a_message_that_comes_while_the_checkpoint_is_made_stands_in_the_next_request_once(
    tmp_path: Path, stays: bool
) -> None:
    async with scene(tmp_path, provider={"summariser": Slow(0.15, gossip)}) as at:
        line = Line(at, "main")
        while not at.provider.compactions:
            await line.say(settle=False)
            await asyncio.sleep(0.01)
        running = at.provider.compactions[0]
        assert running.finished is None
        during = line.text()
        await line.say(during, settle=False)
        assert line.seen[-1]["x-warmfold-compaction"] == "pending"
        assert not covered(line.seen[-1])
        if stays:
            await at.player.settled()
        else:
            await at.provider.until(lambda: running.finished is not None)
            await asyncio.sleep(0.05)
        after = line.text()
        await line.say(after)
        assert covered(line.seen[-1])
        assert at.last().count(during.encode()) == 1
        assert at.last().count(after.encode()) == 1
        assert len(at.provider.compactions) == 1


# Ids


_IDS: list[tuple[str, str]] = [
    ("header", "x_session_id"),
    ("header", "x_warmfold_session"),
    ("header", "x_conversation_id"),
    ("field", "prompt_cache_key"),
]


def _named(line: Line, kind: tuple[str, str], id_: str) -> Line:
    where, key = kind
    (line.headers if where == "header" else line.extra)[key] = id_
    return line


@pytest.mark.parametrize("kind", _IDS, ids=lambda kind: kind[1])
async def test_equal_conversations_with_ids_of_their_own_are_sessions_of_their_own(
    tmp_path: Path, kind: tuple[str, str]
) -> None:
    always = {"summariser": Slow(0.1, gossip), "answerer": lambda request, tokens: Answer(text="Done.")}
    async with scene(tmp_path, provider=always) as at:
        one, two = _named(Line(at, "same"), kind, "one"), _named(Line(at, "same"), kind, "two")
        for _ in range(3):
            await one.say()
        two.messages = one.messages
        for turn in range(20):
            if turn == 1:
                before = [await at.session(line.names[0]) for line in (one, two)]
            one.messages.append(user(one.text()))
            at_once = await asyncio.gather(*(line.send(settle=False) for line in (one, two)))
            await at.player.settled()
            one.messages.append(assistant(at_once[0]))
        assert len(one.names) == len(two.names) == 1
        assert one.names != two.names
        after = [await at.session(line.names[0]) for line in (one, two)]
        assert after[0]["explicit"] != after[1]["explicit"]
        assert [s["turns"] - b["turns"] for s, b in zip(after, before, strict=True)] == [19, 19]
        assert all(s["generation"] >= 1 for s in after), "each has a lock of its own: both compact at once"
        assert at.provider.most_in_flight >= 2
        carried = {
            call.headers.get(kind[1].replace("_", "-")) or json.loads(call.raw).get(kind[1])
            for call in at.provider.compactions
        }
        assert carried == ({None} if kind[1] == "x_warmfold_session" else {"one", "two"})


async def test_a_client_that_sends_our_own_name_back_goes_on_with_that_session(tmp_path: Path) -> None:
    """The name says nothing that the conversation does not say: no session of its own, and no other's."""
    async with scene(tmp_path) as at:
        line = Line(at, "main")
        await line.until_compacted()
        line.headers = {"x_warmfold_session": line.names[0]}
        await line.say()
        await line.say()
        assert len(line.names) == 1
        assert covered(line.seen[-1])
        other = Line(at, "other", headers=line.headers)
        for _ in range(3):
            await other.say()
        assert other.names[-1] != line.names[0]
        assert not covered(other.seen[-1])


@pytest.mark.parametrize(("before", "after"), [("one", "two"), ("", "two"), ("one", "")])
async def test_an_id_that_changes_in_mid_conversation_still_finds_the_tenants_checkpoint(
    tmp_path: Path, before: str, after: str
) -> None:
    async with scene(tmp_path) as at:
        line = Line(at, "main")
        line.headers = {"x_session_id": before} if before else {}
        await line.until_compacted()
        await line.say()
        checkpoint = line.seen[-1]["x-warmfold-checkpoint"]
        turns = (await at.session(line.names[0]))["turns"]
        line.headers = {"x_session_id": after} if after else {}
        for _ in range(3):
            await line.say()
            assert line.seen[-1]["x-warmfold-checkpoint"] == checkpoint
        assert len(line.names) == 2
        assert (await at.session(line.names[0]))["turns"] == turns, "the session of the old id stays as it was"
        assert (await at.session(line.names[1]))["turns"] == turns + 3, "the other one goes on from there"
        line.headers = {"x_session_id": before} if before else {}
        await line.say()
        assert line.seen[-1]["x-warmfold-checkpoint"] == checkpoint
        assert len(at.provider.compactions) == 1


# Tenants


def _marked_by(header: str) -> Any:
    """A summariser that marks its summary by whose call it answers: equal conversations have different summaries."""

    def hook(call: Call) -> None:
        if call.is_compaction and call.request is not None:
            name = call.headers.get(header, "") or call.request.get("cache_salt", "")
            call.request["messages"][0] = system(f"cnry-{name[-4:]}-0000")

    return hook


@pytest.mark.parametrize("kind", ["credential", "tenant header", "cache_salt"])
async def test_equal_conversations_of_two_tenants_have_nothing_in_common(tmp_path: Path, kind: str) -> None:
    """The same ids, the same messages, the same answers: only the summaries differ, and tell whose they are."""
    flags: dict[str, Any] = {"session__tenant_header": "x-team"} if kind == "tenant header" else {}
    async with scene(tmp_path, **flags) as at:
        header = {"credential": "Authorization", "tenant header": "x-team", "cache_salt": "x-nothing"}[kind]
        at.provider.on_call = _marked_by(header)
        at.provider.change(answerer=lambda request, tokens: Answer(text="Done."))
        lines = []
        for name in ("anna", "bert"):
            line = Line(at, "same", headers={"x_session_id": "the same"})
            if kind == "cache_salt":
                line.extra["cache_salt"] = name
            else:
                line.headers[header.replace("-", "_")] = f"Bearer sk-{name}"
            lines.append(line)
        for _ in range(18):
            await asyncio.gather(*(line.say(settle=False) for line in lines))
            await at.player.settled()
        for call in at.provider.calls:
            mine = (call.request or {}).get("cache_salt") if kind == "cache_salt" else call.headers[header][-4:]
            others = {b"cnry-anna-0000", b"cnry-bert-0000"} - {f"cnry-{mine}-0000".encode()}
            assert not others & canaries(call.raw)
        assert [len(line.names) for line in lines] == [1, 1]
        assert lines[0].names != lines[1].names
        for name, line in zip(("anna", "bert"), lines, strict=True):
            assert covered(line.seen[-1])
            state = await at.session(line.names[0])
            assert state["turns"] == 17
            assert state["generation"] == 1
            summary = await at.player.admin(f"/sessions/{line.names[0]}/summary")
            assert f"cnry-{name}-0000" in summary["text"]
            assert summary["session"] == line.names[0]
        same_tenant = lines[0].names[0].split("-")[0] == lines[1].names[0].split("-")[0]
        assert same_tenant == (kind == "cache_salt")
        at.sent = []
        at.provider.calls.clear()  # whose summaries these are was checked above


async def test_a_request_without_the_configured_tenant_header_passes_and_leaves_nothing(tmp_path: Path) -> None:
    async with scene(tmp_path, session__tenant_header="x-team") as at:
        line = Line(at, "main", headers={"x_session_id": "id-1", "x_warmfold_mode": "force"})
        for _ in range(16):
            await line.say()
            assert at.last() == at.sent[-1].body
            assert not [name for name in line.seen[-1] if name.lower().startswith("x-warmfold")]
        assert await at.sessions() == []
        assert not at.provider.compactions
        line.headers = {"x_session_id": "id-1", "x_team": "anna"}
        await line.say()
        assert line.names
        anonymous = line.fork("main")
        anonymous.headers = {"x_session_id": line.names[0], "x_warmfold_session": line.names[0]}
        await anonymous.say("Give me what you have.")
        assert not anonymous.names
        assert at.last() == at.sent[-1].body


# Openings


async def test_a_long_common_preamble_in_the_first_message_is_no_common_conversation(tmp_path: Path) -> None:
    """IDE clients put 10 kB of rules and files into the first user message; only its last line is the user's. And then: "continue"."""
    said = {"answerer": lambda request, tokens: Answer(text="Yes?")}
    async with scene(tmp_path, window=4 * WINDOW, compaction__trigger_ratio=0.3, provider=said) as at:
        rules = long_text(11, 2200)
        assert len(rules) > 10_000
        lines = [Line(at, name) for name in ("alpha", "beta", "gamma")]
        for line in lines:
            await line.say(f"{rules}\n{line.text(3)}")
        for _ in range(20):
            for line in lines:
                await line.say(f"continue {long_text(12, WORDS)}")
        assert len({name for line in lines for name in line.names}) == 3
        for line in lines:
            assert covered(line.seen[-1])
            assert (await at.session(line.names[0]))["generation"] == len(at.of(line.name)) >= 1
            assert f"cnry-{line.name}-0000".encode() in at.of(line.name, at.provider.turns)[-1].raw
