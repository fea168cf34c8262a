"""Conversations that other software took for one another, or lost: each test stands for a fault that was seen there, and the link names it."""

from __future__ import annotations

import asyncio
import itertools
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDict

from proxy.config import load
from proxy.core import fingerprint
from proxy.demo.answers import Answer
from proxy.demo.calls import Call
from proxy.demo.provider import SimulatedProvider
from proxy.demo.summariser import Slow
from proxy.server import start
from tests.faults.writer import FRAME, compact
from tests.journeys.player import Answered, Player, playing
from tests.journeys.talks import PIXEL, TOOLS, Message, prose
from tests.journeys.test_identity import (
    WINDOW,
    WORDS,
    Line,
    Scene,
    assistant,
    canaries,
    covered,
    gossip,
    pairs,
    scene,
    shown,
    user,
)
from tests.journeys.test_main_job import long_text, system

MOMENTS = pytest.mark.parametrize("when", ["after_turn", "next_turn"])


# All of a message counts


_RULES = "Rules of the house, and all open files. " * 270


def _part(text: str) -> Message:
    return {"type": "text", "text": text}


LAST: dict[str, tuple[Message, Message]] = {
    "its last character": (user(_RULES + "a"), user(_RULES + "b")),
    "its last line": (user(f"{_RULES}\nFix the parser."), user(f"{_RULES}\nWrite the letter.")),
    "its last part": (
        {"role": "user", "content": [_part(_RULES), _part("Fix it.")]},
        {"role": "user", "content": [_part(_RULES), _part("Drop it.")]},
    ),
    "the end of an image": (
        {
            "role": "user",
            "content": [_part(_RULES), {"type": "image_url", "image_url": {"url": "data:," + PIXEL * 90}}],
        },
        {
            "role": "user",
            "content": [_part(_RULES), {"type": "image_url", "image_url": {"url": "data:," + PIXEL * 90 + "="}}],
        },
    ),
    "a field behind it": ({**user(_RULES), "name": "ann"}, {**user(_RULES), "name": "bob"}),
    "the middle of it": (user(_RULES + "a" + _RULES), user(_RULES + "b" + _RULES)),
    "a blank at its end": (user(_RULES), user(_RULES.rstrip())),
}


def _told(got: Answered, name: str) -> set[str]:
    return {value for key, value in got.headers.items() if key.lower() == name}


@pytest.mark.parametrize("where", LAST)
async def test_conversations_that_differ_far_behind_in_their_first_message_are_two(where: str, tmp_path: Path) -> None:
    """ranxianglei/billion-context#61"""
    settings = {"compaction__max_context_tokens": 16_000, "compaction__when": "after_turn"}
    async with (
        SimulatedProvider(window_tokens=160_000, answerer=lambda request, tokens: Answer(text="Yes?")) as provider,
        playing(tmp_path, provider, **settings) as player,
    ):
        told: list[set[str]] = []
        checkpoints: list[set[str]] = []
        for first in LAST[where]:
            messages = [system(), first]
            told.append(set())
            checkpoints.append(set())
            for turn in range(6):
                force = {"x_warmfold_mode": "force"} if turn == 3 else {}
                got = await player.post({"model": "demo-model", "messages": messages}, **force)
                await player.settled()
                assert got.status == 200
                told[-1].update(_told(got, "x-warmfold-session"))
                checkpoints[-1].update(_told(got, "x-warmfold-checkpoint"))
                messages += [assistant(got), user("continue" if turn < 2 else f"continue {prose(turn, 60)}")]
        assert [len(names) for names in told] == [1, 1]
        assert told[0] != told[1]
        assert all(checkpoints)
        assert not checkpoints[0] & checkpoints[1]
        digests = {fingerprint.facts(compact(first)).digest for first in LAST[where]}
        assert len(digests) == 2


# Ids name nothing that is not one's own


IDS = ("x_session_id", "x_conversation_id", "session_id", "x_warmfold_session", "prompt_cache_key")


def _under(line: Line, kind: str, id_: str) -> Line:
    if kind == "prompt_cache_key":
        line.extra[kind] = id_
    else:
        line.headers[kind] = id_
    return line


@pytest.mark.parametrize("kind", IDS)
async def test_somebody_elses_session_id_opens_nothing(kind: str, tmp_path: Path) -> None:
    """ding113/claude-code-hub#793. Not with the victim's history either: what it was condensed to stays the victim's."""
    async with scene(tmp_path) as at:
        anna = _under(Line(at, "anna", headers={"Authorization": "Bearer sk-anna"}), kind, "agent-7")
        await anna.until_compacted()
        await anna.say()
        state = await at.session(anna.names[0])
        secret = (await at.player.admin(f"/sessions/{anna.names[0]}/summary"))["text"].encode()

        seen = len(at.provider.calls)
        for id_ in ("agent-7", anna.names[0], anna.seen[-1]["x-warmfold-checkpoint"]):
            for history in (
                [system(), user(long_text(1, WORDS))],
                anna.messages[:2],
                anna.messages[:-1],
                anna.messages,
            ):
                bert = _under(Line(at, "bert", history=history, headers={"Authorization": "Bearer sk-bert"}), kind, id_)
                for words in (30, 40):
                    await bert.say(words=words)
                assert bert.names
                assert anna.names[0].split("-")[0] not in {name.split("-")[0] for name in bert.names}
                assert anna.seen[-1]["x-warmfold-checkpoint"] not in {h.get("x-warmfold-checkpoint") for h in bert.seen}
        theirs = [call for call in at.provider.calls[seen:] if not call.is_compaction]
        assert not any(secret in call.raw for call in theirs)
        assert await at.session(anna.names[0]) == state, "nothing of it was touched"
        await anna.say()
        assert covered(anna.seen[-1])
        assert len(anna.names) == 1
        at.provider.calls.clear()  # bert has the victim's history here, which the scene would take for a leak


async def test_with_one_key_for_all_a_header_tells_organisations_apart_and_without_it_nothing_is_kept(
    tmp_path: Path,
) -> None:
    """openonion/connectonion#696"""
    environ = {"UPSTREAM_KEY": "sk-ours", "CLIENT_TOKEN": "token"}
    flags: dict[str, object] = {
        "server.port": 0,
        "admin.port": 0,
        "server.client_token_env": "CLIENT_TOKEN",
        "upstream.api_key_env": "UPSTREAM_KEY",
        "session.tenant_header": "X-Org",
        "store.data_dir": str(tmp_path / "store"),
        "store.timeout_ms": 2000,
        "compaction.max_context_tokens": WINDOW,
        "compaction.when": "after_turn",
    }

    def whose(call: Call) -> None:
        if call.is_compaction and call.request is not None:
            call.request["messages"][0] = system(f"cnry-{call.headers['X-Org'][-4:]}-0000")

    said: dict[str, Any] = {"answerer": lambda request, tokens: Answer(text="Done."), "summariser": gossip}
    async with (
        SimulatedProvider(window_tokens=10 * WINDOW, require_key="sk-ours", **said) as provider,
        aiohttp.ClientSession() as http,
    ):
        provider.on_call = whose
        running = await start(load(None, environ, {"upstream.base_url": provider.base_url, **flags}))
        try:
            at = Scene(Player(running, provider, http, {"Authorization": "Bearer token"}), provider, WINDOW)
            orgs = [Line(at, "same", headers={"x_session_id": "agent-7", "X_Org": name}) for name in ("anna", "bert")]
            nobody = [
                Line(at, "same", headers={"x_session_id": "agent-7"}),
                Line(at, "same", headers={"x_session_id": "agent-7", "X_Org": ""}),
            ]
            for _ in range(18):
                for line in (*orgs, *nobody):
                    await line.say()
                    if line in nobody:
                        assert not [name for name in line.seen[-1] if name.lower().startswith("x-warmfold")]
                        assert at.last() == at.sent[-1].body
            assert {call.headers["Authorization"] for call in provider.calls} == {"Bearer sk-ours"}
            for name, line in zip(("anna", "bert"), orgs, strict=True):
                assert covered(line.seen[-1])
                assert (await at.session(line.names[0]))["generation"] == 1
                summary = await at.player.admin(f"/sessions/{line.names[0]}/summary")
                assert f"cnry-{name}-0000" in summary["text"]
            for call in provider.calls:
                mine = f"cnry-{call.headers.get('X-Org', 'nobody')}-0000".encode()
                assert {c for c in canaries(call.raw) if c.endswith(b"-0000") and b"same" not in c} <= {mine}
            assert len(await at.sessions()) == 2
        finally:
            await running.stop()


# What a client puts into a history


@MOMENTS
@pytest.mark.parametrize("role", ["system", "developer"])
async def test_a_reminder_behind_a_checkpoint_leaves_session_and_checkpoint_as_they_were(
    role: str, when: str, tmp_path: Path
) -> None:
    """headroomlabs-ai/headroom#2193"""
    async with scene(tmp_path, compaction__when=when) as at:
        line = Line(at, "main")
        while not line.seen or not covered(line.seen[-1]):
            await line.say()
        checkpoint = line.seen[-1]["x-warmfold-checkpoint"]
        for turn in range(7):
            if turn % 2:
                line.messages.append({"role": role, "content": f"<system-reminder> file {turn} was truncated"})
            await line.say(words=30)
            assert line.seen[-1]["x-warmfold-checkpoint"] == checkpoint
        assert at.last().count(b"<system-reminder>") == 3
        assert len(line.names) == 1


@pytest.mark.parametrize("front", [0, 1])
async def test_a_reminder_that_is_put_in_front_of_everything_is_part_of_the_preamble(
    front: int, tmp_path: Path
) -> None:
    """headroomlabs-ai/headroom#2193"""
    async with scene(tmp_path) as at:
        line = Line(at, "main")
        await line.until_compacted()
        await line.say()
        checkpoint = line.seen[-1]["x-warmfold-checkpoint"]
        line.messages.insert(front, system("<system-reminder> answer briefly"))
        for _ in range(2):
            await line.say(words=30)
            assert line.seen[-1]["x-warmfold-checkpoint"] == checkpoint
            assert json.loads(at.last())["messages"][:2] == line.messages[:2]
        assert len(line.names) == 1


@pytest.mark.parametrize(("place", "keeps"), [("covered", False), ("read", False), ("unread", True)])
async def test_a_reminder_between_old_messages_is_another_history_from_there_on(
    place: str, keeps: bool, tmp_path: Path
) -> None:
    """headroomlabs-ai/headroom#2193. The checkpoint tells of messages that no longer stand there in that order."""
    async with scene(tmp_path) as at:
        line = Line(at, "main")
        await line.until_compacted()
        for _ in range(3):
            await line.say(words=60)
        (ref,) = (await at.session(line.names[0]))["checkpoints"]
        assert ref["to"] < ref["seen"] - 1
        inserted = {"covered": ref["to"] - 2, "read": ref["seen"] - 1, "unread": ref["seen"] + 1}[place]
        line.messages.insert(1 + inserted, system("<system-reminder> the file was truncated"))
        await line.say(words=30)
        assert (line.seen[-1].get("x-warmfold-checkpoint") == ref["id"]) is keeps
        assert b"<system-reminder>" in at.last()


def _changed(message: Message, how: str) -> Message:
    made = deepcopy(message)
    if how == "one part more":
        made["content"] = [_part(made["content"]), _part(" ")]
    elif how == "null":
        made["content"] = None
    elif how == "emptied":
        made["content"] = ""
    elif how == "another role":
        made["role"] = "user"
    elif how == "a name":
        made["name"] = "x"
    elif how == "arguments":
        made["tool_calls"][0]["function"]["arguments"] = '{"path": "b.py"}'
    elif how == "an id":
        made["tool_calls"][0]["id"] += "x"
    elif how == "thoughts taken out":
        del made["reasoning_content"]
    return made


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        *((how, "text") for how in ("one part more", "emptied", "another role", "a name")),
        *((how, "call") for how in ("arguments", "an id", "thoughts taken out")),
        *((how, "text") for how in ("gone", "twice", "swapped")),
    ],
)
async def test_whatever_changes_in_a_covered_message_the_history_goes_out_as_it_is_now(
    how: str, kind: str, tmp_path: Path
) -> None:
    """apache/maka#4845"""
    async with scene(tmp_path, compaction__trigger_ratio=0.6) as at:
        line = Line(at, "main", tools=TOOLS)
        await line.say(words=60)
        while not covered(line.seen[-1]):
            number = len(line.messages)
            call = {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": "read_file", "arguments": '{"path": "a.py"}'},
            }
            thought = {"reasoning_content": prose(("thought", number), 10)}
            line.messages.append({"role": "assistant", "content": None, "tool_calls": [call], **thought})
            line.messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": line.text(60)})
            line.messages.append(assistant(await line.send()))
            await line.say(words=40)
        assert covered(line.seen[-1]) > 8
        place = next(
            at
            for at, m in enumerate(line.messages[4:], 4)
            if (m.get("tool_calls") if kind == "call" else m["role"] == "assistant" and not m.get("tool_calls"))
        )
        old = line.messages[place]
        if how == "gone":
            del line.messages[place]
        elif how == "twice":
            line.messages.insert(place, dict(old))
        elif how == "swapped":
            line.messages[place], line.messages[place - 4] = line.messages[place - 4], old
            assert line.messages[place] != old
        else:
            line.messages[place] = _changed(old, how)
            if how == "an id":
                line.messages[place + 1] = {
                    **line.messages[place + 1],
                    "tool_call_id": line.messages[place]["tool_calls"][0]["id"],
                }
        got = await line.send()
        assert "x-warmfold-checkpoint" not in got.headers
        assert at.last() == at.sent[-1].body
        assert len(line.names) == 2


# Branches


@MOMENTS
async def test_branches_that_leave_above_the_watermark_and_alternate_do_not_compact_each_other_anew(
    when: str, tmp_path: Path
) -> None:
    """Nomadcxx/opencode-cursor#102. Both leave before the message that pressed, so neither may have what was made of it."""
    async with scene(tmp_path, compaction__when=when, provider={"summariser": Slow(0.02, gossip)}) as at:
        trunk = Line(at, "trunk")
        while not at.provider.turns or at.provider.turns[-1].prompt_tokens < 0.7 * WINDOW:
            await trunk.say()
        before = len(trunk.messages)
        await trunk.say(words=250)
        assert at.provider.turns[-1].prompt_tokens > 0.75 * WINDOW
        made = len(at.provider.compactions)
        branches = [trunk.fork("left", before), trunk.fork("right", before)]
        for turn in range(10):
            for branch in branches:
                await branch.say(words=250 if turn == 0 else 12)
        for branch in branches:
            assert len(at.of(branch.name)) <= 1
            assert covered(branch.seen[-1])
            applied = [h.get("x-warmfold-checkpoint") for h in branch.seen]
            first = next(i for i, name in enumerate(applied) if name)
            assert len(set(applied[first:])) == 1, "no ping-pong"
        assert len(at.provider.compactions) - made <= 2


@MOMENTS
async def test_branches_from_the_end_of_a_pressed_conversation_share_what_was_made_of_it(
    when: str, tmp_path: Path
) -> None:
    """Nomadcxx/opencode-cursor#102"""
    async with scene(tmp_path, compaction__when=when) as at:
        trunk = Line(at, "trunk")
        while not at.provider.turns or at.provider.turns[-1].prompt_tokens < 0.75 * WINDOW:
            await trunk.say()
        # Of the same name: what was made beside a branch's turn may replay the trunk's.
        branches = [trunk.fork("trunk"), trunk.fork("trunk")]
        for number, branch in enumerate(branches, 1):
            branch._numbers = itertools.count(number * 1000)
        for _ in range(10):
            for branch in branches:
                await branch.say(words=12)
        assert len(at.provider.compactions) <= 2
        for branch in branches:
            assert covered(branch.seen[-1])
            assert len({h["x-warmfold-checkpoint"] for h in branch.seen if covered(h)}) == 1
        assert branches[0].names[-1] != branches[1].names[-1]


async def test_trying_the_newest_message_again_and_again_does_not_pay_each_time(tmp_path: Path) -> None:
    """Edit and resend above the watermark: each attempt is a branch, and what is made for one helps none of the others."""
    async with scene(tmp_path) as at:
        trunk = Line(at, "trunk")
        while not at.provider.turns or at.provider.turns[-1].prompt_tokens < 0.7 * WINDOW:
            await trunk.say()
        for number in range(12):
            attempt = trunk.fork(f"try{'abcdefghijkl'[number]}")
            await attempt.say(words=250)
            assert not covered(attempt.seen[-1])
        assert len(at.provider.compactions) <= 7, "not once for each of them"
        await trunk.say()


# Several under one id, one under several


@MOMENTS
@pytest.mark.parametrize("kind", ["x_session_id", "prompt_cache_key"])
async def test_an_id_that_is_new_on_each_request_costs_neither_checkpoint_nor_debounce(
    kind: str, when: str, tmp_path: Path
) -> None:
    """What is not found under an id is looked for under its tenant."""
    async with scene(tmp_path, compaction__when=when) as at:
        line = Line(at, "main")
        for turn in range(26):
            _under(line, kind, f"request-{turn}")
            await line.say()
        assert len(line.names) == 25, "each id has a session of its own"
        assert (await at.session(line.names[-1]))["turns"] == 25, "that goes on from where the last one was"
        assert covered(line.seen[-1])
        assert len(at.provider.compactions) <= 3
        assert all(covered(h) for h in line.seen[next(i for i, h in enumerate(line.seen) if covered(h)) :])


@pytest.mark.parametrize("kind", ["x_session_id", "prompt_cache_key"])
async def test_an_agent_its_sub_agents_and_its_titles_under_one_id_keep_what_is_theirs(
    kind: str, tmp_path: Path
) -> None:
    """stacklok/mecatl#543"""
    async with scene(tmp_path) as at:
        main = _under(Line(at, "main", preamble="You plan cnry-prompt-0001.", tools=TOOLS), kind, "agent-7")
        subs = [
            _under(Line(at, name, preamble="You search.", tools=TOOLS[:1]), kind, "agent-7")
            for name in ("suba", "subb")
        ]
        await main.say()
        for turn in range(18):
            await main.work()
            for sub in subs:
                await sub.say()
            if turn % 3 == 0:
                title = [system("You write titles."), *main.messages[1:3], user(f"Title? {long_text(7, 60)}")]
                await at.post("main", {**main.extra, "messages": title}, **main.headers)
                await at.player.settled()
        names = [line.names for line in (main, *subs)]
        assert [len(found) for found in names] == [1, 1, 1]
        assert len({found[0] for found in names}) == 3
        for line in (main, *subs):
            state = await at.session(line.names[0])
            assert state["turns"] == (18 if line is main else 17), "the first request is too small to be looked up"
            assert 1 <= state["generation"] == len(at.of(line.name)) <= 3, "one call for each checkpoint"
            assert covered(line.seen[-1])


@MOMENTS
async def test_two_models_in_alternation_go_on_with_one_conversation(when: str, tmp_path: Path) -> None:
    """A planner and a worker that share a history: each call is the replay of a turn of its own model."""
    async with scene(tmp_path, compaction__when=when) as at:
        line = Line(at, "main")
        for turn in range(26):
            line.extra["model"] = ("planner", "worker")[turn % 2]
            await line.say()
        assert len(line.names) == 1
        assert (await at.session(line.names[0]))["turns"] == 25
        if when == "after_turn":
            # Beside the next turn there is no provider that is warm for the one before.
            assert covered(line.seen[-1])
        assert len(at.provider.compactions) <= 3


# The same again


@pytest.mark.parametrize("how", ["in parts", "keys in another order", "other blanks", "a mark moved", "streamed"])
async def test_a_request_that_is_sent_again_in_other_words_is_the_same_turn(how: str, tmp_path: Path) -> None:
    always = {"answerer": lambda request, tokens: Answer(text="Done."), "summariser": gossip}
    async with scene(tmp_path, provider=always) as at:
        line = Line(at, "main")
        await line.until_compacted()
        await line.say()
        line.messages.append(user(line.text()))
        got = await line.send()
        body = line.body()
        spelled: dict[str, dict[str, Any] | bytes] = {
            "in parts": {**body, "messages": [{**m, "content": [_part(m["content"])]} for m in body["messages"]]},
            "keys in another order": {**body, "messages": [dict(reversed(m.items())) for m in body["messages"]]},
            "other blanks": json.dumps(body, indent=3).encode(),
            "a mark moved": {
                **body,
                "messages": [*body["messages"][:-1], {**body["messages"][-1], "cache_control": {"type": "ephemeral"}}],
            },
            "streamed": {**body, "stream": True},
        }
        again = spelled[how]
        raw = again if isinstance(again, bytes) else json.dumps(again).encode()
        retried = await at.player.post(raw, x_told=str(len(at.sent) - 1), **line.headers)
        await at.player.settled()
        assert retried.status == 200
        for header in ("x-warmfold-session", "x-warmfold-checkpoint", "x-warmfold-covered"):
            assert retried.headers[header] == got.headers[header]
        line.messages.append(assistant(got))
        await line.say()
        assert len(line.names) == 1
        assert covered(line.seen[-1])
        assert len(at.provider.compactions) == 1


async def test_the_same_request_while_the_first_is_still_answered_is_the_same_turn(tmp_path: Path) -> None:
    always = {"answerer": lambda request, tokens: Answer(text="Done."), "summariser": gossip}
    async with scene(tmp_path, provider=always) as at:
        line = Line(at, "main")
        await line.until_compacted()
        line.messages.append(user(line.text()))
        gate = asyncio.Event()

        async def hold(call: Call) -> None:
            if not call.is_compaction:
                await gate.wait()

        at.provider.on_call = hold
        before = len(at.provider.turns)
        waiting = [asyncio.create_task(line.send(settle=False)) for _ in range(3)]
        await at.provider.until(lambda: len(at.provider.turns) == before + 3)
        gate.set()
        answers = await asyncio.gather(*waiting)
        await at.player.settled()
        assert len({call.raw for call in at.provider.turns[before:]}) == 1
        assert FRAME in at.last()
        assert len({got.headers["x-warmfold-session"] for got in answers}) == 1
        line.messages.append(assistant(answers[0]))
        await line.say()
        assert len(line.names) == 1
        assert len(at.provider.compactions) == 1


# Clients that keep house themselves


@pytest.mark.parametrize(
    "how", ["results cleared", "a summary of its own", "the middle cut out", "the beginning cut off"]
)
async def test_a_client_that_trims_behind_a_checkpoint_starts_anew_and_gets_nothing_back(
    how: str, tmp_path: Path
) -> None:
    """apache/maka#4845"""
    async with scene(tmp_path) as at:
        line = Line(at, "main", tools=TOOLS)
        line.messages += pairs(line, 1)
        while not line.seen or not covered(line.seen[-1]):
            await line.work()
        old = canaries(json.dumps(line.messages).encode())
        history = line.messages
        line.messages = {
            "results cleared": [{**m, "content": "[cleared]"} if m["role"] == "tool" else m for m in history],
            "a summary of its own": [history[0], user(f"Summary: {long_text(9, 200)}"), *history[-3:]],
            "the middle cut out": [*history[:3], *history[-3:]],
            "the beginning cut off": [history[0], user("Go on."), *history[-6:]],
        }[how]
        kept = canaries(json.dumps(line.messages).encode())
        assert old - kept
        for _ in range(3):
            await line.say(words=40)
            assert not covered(line.seen[-1])
            assert not shown(at.provider.turns[-1:], old - kept)
        assert len(line.names) == 2
        line._numbers = itertools.count(700)
        await line.until_compacted()
        await line.say()
        assert covered(line.seen[-1]), "and is compacted like any other"


async def test_a_client_cannot_choose_its_tenant_by_a_second_header_in_front_of_the_gateways(tmp_path: Path) -> None:
    """Two values are as good as none: what a request needs in order to be known is not there."""
    async with SimulatedProvider() as provider, playing(tmp_path, provider, session__tenant_header="X-Org") as player:
        data = json.dumps({"model": "demo-model", "messages": [user(long_text(n, 900)) for n in range(3)]}).encode()
        url = f"{player.running.base_url}/chat/completions"
        for orgs, known in ((("a",), True), (("a", "b"), False), (("b", "a"), False), (("", "a"), False)):
            headers = CIMultiDict([("Authorization", "Bearer sk"), *(("X-Org", org) for org in orgs)])
            async with player.http.post(url, data=data, headers=headers) as reply:
                assert ("x-warmfold-session" in reply.headers) is known, orgs
