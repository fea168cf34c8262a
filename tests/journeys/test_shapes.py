"""Conversations of every shape, through the whole proxy: the client gets what a provider without a limit would give, and the provider what it takes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from proxy.demo.provider import SimulatedProvider
from proxy.demo.summariser import Dead, GenericProse, IdealSummariser, Summariser
from proxy.demo.template import render
from proxy.demo.validation import Strictness
from tests.core.build import limits
from tests.journeys.played import FRAME, Lenient, LlamaCpp, Played, play, small_window
from tests.journeys.player import Answered, Player, elements, playing
from tests.journeys.talks import SYSTEM, TALKS, Message, Talk, assistant, calling, giants, prose, result, user
from tests.recorded import Step
from tests.strategies import spelled

LEAST_WINDOW = 2048
CONSTRAINT = "never touch prod.db"
TASK = f"Rebuild the order import. While you do, {CONSTRAINT}; deliver the report as CSV."


def _good(played: Played) -> None:
    """Nothing of what must not be; compacted, and of use to the turns that followed."""
    assert played.faults == []
    assert played.compactions > 0
    assert played.applied > 0
    # The last may come too late for a turn to carry it, and a first request may take two passes.
    assert played.compactions <= len(played.checkpoints) + 2, "each is paid for turns that carry its checkpoint"
    assert played.compactions <= played.turns // 3 + 2


def _server(talk: Talk) -> type[SimulatedProvider]:
    return SimulatedProvider if talk.accepted else Lenient


STREAMED = ("chat", "tools", "legacy functions", "thoughts", "prefill", "results without calls", "unknown fields")
"""Streams differ in how an answer is read, and each kind of answer is here."""


@pytest.mark.parametrize(
    ("name", "stream"),
    [*((name, False) for name in TALKS), *((name, True) for name in STREAMED)],
)
async def test_a_conversation_of_any_shape_outlives_its_window(name: str, stream: bool, tmp_path: Path) -> None:
    talk = TALKS[name]
    steps = talk.steps(stream=stream)
    played = await play(
        steps,
        max(LEAST_WINDOW, small_window(steps, 1 / 3)),
        tmp_path,
        server=_server(talk),
        compaction__when="next_turn" if stream else "after_turn",
    )
    _good(played)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("tools", {"compaction__replay_scope": "region"}),
        ("results without calls", {"compaction__replay_scope": "region"}),
        ("parallel calls", {"compaction__keep_head_messages": 5}),
        ("users in a row", {"compaction__keep_head_messages": 5}),
    ],
)
async def test_so_it_does_with_other_settings(name: str, flags: dict[str, Any], tmp_path: Path) -> None:
    """A summariser that reads its region alone; few-shot examples in front of the checkpoint."""
    talk = TALKS[name]
    steps = talk.steps()
    window = max(LEAST_WINDOW, small_window(steps, 1 / 3))
    _good(await play(steps, window, tmp_path, server=_server(talk), **flags))


async def test_a_client_that_writes_the_start_of_each_answer_pays_for_no_more_compactions_than_another(
    tmp_path: Path,
) -> None:
    """What it wrote there is replaced by the whole answer in its next request: a summariser must not have read it."""
    messages = [SYSTEM, *(message for at in range(45) for message in (user(at, 120), assistant(at, 60)))]
    made = {}
    for prefilled in (False, True):
        steps = Talk(messages, prefilled=prefilled).steps()
        played = await play(steps, 6000, tmp_path / str(prefilled))
        assert played.faults == []
        made[prefilled] = played.compactions
    assert made[True] <= made[False] + 1


async def test_requests_that_a_provider_refuses_are_refused_in_its_own_words_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    """Results without a call among them: OpenAI does not take those, whoever sends them."""
    talk = TALKS["results without calls"]
    steps = talk.steps()
    played = await play(steps, max(LEAST_WINDOW, small_window(steps, 1 / 3)), tmp_path)
    assert played.faults == []
    assert played.turns == len(steps)


def _indented(request: Mapping[str, Any]) -> bytes:
    return json.dumps(request, indent=1).encode()


def _escaped(request: Mapping[str, Any]) -> bytes:
    r"""As \u escapes throughout, the letters of ASCII too."""
    return _all_escaped(json.dumps(request)).encode()


def _all_escaped(text: str) -> str:
    parts = text.split('"')
    return '"'.join(
        part if at % 2 == 0 or "\\" in part or len(part) < 40 else "".join(f"\\u{ord(c):04X}" for c in part)
        for at, part in enumerate(parts)
    )


def _oddly(request: Mapping[str, Any]) -> bytes:
    """Blanks, line breaks and escapes anywhere, the same for the same message each time."""
    members = {key: value for key, value in request.items() if key != "messages"}
    messages = b" ,\n\t".join(spelled(message, 7) for message in request["messages"])
    return b' \n{"messages" :\t[ ' + messages + b" ]\r\n, " + spelled(members).strip()[1:] + b"\n"


@pytest.mark.parametrize(
    ("name", "spell"),
    [("chat", _indented), ("unknown fields", _indented), ("cache marks", _escaped), ("unknown fields", _oddly)],
)
async def test_a_client_that_writes_its_json_in_its_own_way(name: str, spell: Any, tmp_path: Path) -> None:
    steps = TALKS[name].steps()
    window = max(LEAST_WINDOW, small_window(steps, 1 / 3))
    _good(await play(steps, window, tmp_path, spell=spell))


@pytest.mark.parametrize("window", [3000, 6000])
async def test_single_messages_of_two_fifths_of_the_window(window: int, tmp_path: Path) -> None:
    talk = giants(int(window * 0.36))
    steps = talk.steps()
    played = await play(steps, window, tmp_path)
    assert max(call for call in _sizes(steps)) > 0.4 * window
    assert played.faults == []
    assert played.applied > 0


def _sizes(steps: Sequence[Any]) -> list[int]:
    return [len(message["content"].split()) * 6 // 5 for message in steps[-1].request["messages"]]


@pytest.mark.parametrize(
    ("strictness", "name", "scope"),
    [
        (Strictness.MISTRAL, "tools", "warm"),
        (Strictness.MISTRAL, "thoughts", "region"),
        (Strictness.ALTERNATING, "chat", "warm"),
        (Strictness.ALTERNATING, "no system", "region"),
    ],
)
@pytest.mark.parametrize("server", [SimulatedProvider, LlamaCpp])
async def test_a_strict_template_is_given_what_it_takes(
    strictness: Strictness, name: str, scope: str, server: type[SimulatedProvider], tmp_path: Path
) -> None:
    """What it does not take in one shape it is given in another, and from then on in that one."""
    steps = TALKS[name].steps()
    window = max(LEAST_WINDOW, small_window(steps, 1 / 3))
    played = await play(steps, window, tmp_path, strictness=strictness, server=server, compaction__replay_scope=scope)
    assert [fault for fault in played.faults if "a compaction request" not in fault] == []
    assert len(played.refused) <= 2
    assert played.applied > 0
    assert played.compactions > len(played.refused)


# A long conversation in a small window

SMALL = {"compaction__max_context_tokens": 4096, "compaction__when": "after_turn"}


class Client:
    """Grows a conversation turn by turn, with answers of its own choosing."""

    def __init__(self, player: Player, *, stream: bool = False) -> None:
        self.player = player
        self.messages: list[Message] = [SYSTEM]
        self.members: dict[str, Any] = {"model": "demo-model"}
        if stream:
            self.members |= {"stream": True, "stream_options": {"include_usage": True}}
        self.session = ""

    async def say(self, text: str, answer: str = "", **headers: str) -> Answered:
        """One turn: all that was said before, and this."""
        self.messages.append({"role": "user", "content": text})
        return await self.send(assistant(len(self.messages), 30, **({"content": answer} if answer else {})), **headers)

    async def send(self, reply: Message, **headers: str) -> Answered:
        """The conversation as it is; `reply` is what comes back."""
        self.player.provider.next_reply = reply
        got = await self.player.post({**self.members, "messages": self.messages}, **headers)
        await self.player.settled()
        assert got.status == 200, got.body
        self.session = got.headers.get("x-warmfold-session", self.session)
        self.messages.append(reply)
        return got

    async def shown(self) -> Any:
        """The session as the admin listener shows it."""
        return await self.player.admin(f"/sessions/{self.session}")


@pytest.mark.parametrize(
    ("window", "summariser"),
    [(2048, IdealSummariser()), (3000, GenericProse()), (4096, IdealSummariser())],
    ids=["2048", "3000", "4096"],
)
async def test_200_turns_in_a_small_window(window: int, summariser: Summariser, tmp_path: Path) -> None:
    """And after each compaction the next prompt is below the soft watermark, or the journal says why it is not."""
    soft = limits(window).soft
    async with (
        SimulatedProvider(window_tokens=window, summariser=summariser) as provider,
        playing(tmp_path, provider, compaction__max_context_tokens=window, compaction__when="after_turn") as player,
    ):
        client = Client(player, stream=window == 3000)
        made = 0
        for turn in range(100):
            await client.say(prose(("user", turn), 50))
            if turn % 4 == 3:
                client.messages.append({"role": "user", "content": prose(("more", turn), 20)})
                await client.send(calling(f"call_{turn:09d}"))
                client.messages.append(result(f"call_{turn:09d}", turn, 30))
                await client.send(assistant(turn, 20))
            else:
                await client.say(prose(("next", turn), 20))
            if len(provider.compactions) > made:
                made = len(provider.compactions)
                if (await client.shown())["journal"][0]["outcome"] == "committed":
                    await client.say("go on")
                    assert provider.turns[-1].prompt_tokens < soft
        assert all(call.status == 200 for call in provider.calls)
        assert made >= 8


async def test_a_summariser_that_is_dead_for_good_costs_the_client_nothing(tmp_path: Path) -> None:
    async with (
        SimulatedProvider(window_tokens=4096, summariser=Dead(500)) as provider,
        playing(tmp_path, provider, **SMALL) as player,
    ):
        client = Client(player)
        await client.say(f"{TASK} {prose('task', 60)}")
        for turn in range(199):
            got = await client.say(prose(("user", turn), 50))
        assert "x-warmfold-checkpoint" in got.headers
        assert all(call.status == 200 for call in provider.turns)
        assert TASK in _last_routed(provider)
        assert len(provider.compactions) < 20


def _last_routed(provider: SimulatedProvider) -> str:
    """All that the provider was last told in messages."""
    request = provider.turns[-1].request
    assert request is not None
    return "\n".join(str(message["content"]) for message in request["messages"])


async def test_a_rule_that_was_stated_once_is_still_there_after_five_checkpoints_of_prose(tmp_path: Path) -> None:
    async with (
        SimulatedProvider(window_tokens=4096, summariser=GenericProse()) as provider,
        playing(tmp_path, provider, **SMALL) as player,
    ):
        client = Client(player)
        await client.say("Please look at the import job. " + prose("start", 40))
        await client.say(f"One more thing: {CONSTRAINT}. " + prose("rule", 40))
        turn = 0
        while len(provider.compactions) < 5:
            turn += 1
            await client.say(prose(("user", turn), 70))
            assert turn < 200
        got = await client.say("go on")
        assert int(got.headers["x-warmfold-covered"]) > 4
        assert CONSTRAINT in _last_routed(provider)
        assert CONSTRAINT not in str(provider.compactions[-1].answer)


@pytest.mark.parametrize(
    ("windows", "scope"),
    [(4, "warm"), (4, "region"), (12, "warm")],
    ids=["4 windows", "4 windows, region", "12 windows, more than the passes can take in"],
)
async def test_first_contact_with_a_long_history(windows: int, scope: str, tmp_path: Path) -> None:
    """An agent with a history of its own comes by for the first time: tool calls, and the task far back."""
    async with (
        SimulatedProvider(window_tokens=4096) as provider,
        playing(tmp_path, provider, **SMALL, compaction__replay_scope=scope) as player,
    ):
        client = Client(player)
        client.messages.append({"role": "user", "content": TASK})
        at = 0
        while len(render({**client.members, "messages": client.messages})) < windows * 4096:
            at += 1
            client.messages += [calling(f"call_{at:09d}"), result(f"call_{at:09d}", at, 60)]
            client.messages += [assistant(at, 30), user(at, 40)] if at % 5 == 0 else []
        got = await client.send(assistant("first"))
        assert got.headers["x-warmfold-compaction"] == "inline"
        passes = len(provider.compactions)
        assert passes > 1
        assert all(call.status == 200 for call in provider.calls)
        assert TASK in _last_routed(provider)
        again = await client.say("go on")
        assert again.headers["x-warmfold-checkpoint"] == got.headers["x-warmfold-checkpoint"]
        assert len(provider.compactions) == passes


# What an operator does


async def test_after_an_undo_the_earlier_checkpoint_applies_again_and_soft_compaction_rests(tmp_path: Path) -> None:
    async with (
        SimulatedProvider(window_tokens=4096) as provider,
        playing(tmp_path, provider, **SMALL, compaction__debounce_turns=4) as player,
    ):
        client = Client(player)
        turn = 0
        seen: list[str] = []
        while len(provider.compactions) < 2:
            turn += 1
            got = await client.say(prose(("user", turn), 70))
            if (name := got.headers.get("x-warmfold-checkpoint", "")) and name not in seen:
                seen.append(name)
            assert turn < 100
        newest = (await client.shown())["checkpoints"]
        undone = await player.admin(f"/sessions/{client.session}/undo", "POST")
        assert undone["id"] == client.session
        shown = await client.shown()
        assert undone["soft_compaction_resumes_at_turn"] == shown["turns"] + 4
        assert len(newest) == 2

        got = await client.say("and now")
        assert got.headers["x-warmfold-checkpoint"] == seen[0]
        made = len(provider.compactions)
        while (await client.shown())["turns"] < undone["soft_compaction_resumes_at_turn"] - 1:
            await client.say("a little more")
            assert len(provider.compactions) == made, "it rests"
        while len(provider.compactions) == made:
            await client.say(prose(("late", len(client.messages)), 20))
            assert len(client.messages) < 200
        got = await client.say("after that")
        assert got.headers["x-warmfold-checkpoint"] not in (seen[0], undone["undone"][0])
        generations = [one["generation"] for one in (await client.shown())["checkpoints"]]
        assert sorted(generations) == [1, 2, 3], "no generation is used twice"


async def test_a_middle_region_by_hand(tmp_path: Path) -> None:
    async with (
        SimulatedProvider(window_tokens=32_000) as provider,
        playing(tmp_path, provider, compaction__max_context_tokens=32_000, compaction__when="after_turn") as player,
    ):
        client = Client(player)
        for turn in range(8):
            await client.say(prose(("user", turn), 80))
        credential = {"x-upstream-authorization": player.headers["Authorization"]}
        url = f"/sessions/{client.session}/compact"
        done = await player.admin(url, "POST", json={"from": 2, "to": 10}, headers=credential)
        assert done["outcome"] == "committed", done
        got = await client.say("go on")
        assert got.headers["x-warmfold-covered"] == "10"
        sent, told = elements(provider.turns[-1].raw), [json.dumps(m).encode() for m in client.messages[:-1]]
        assert sent[:3] == tuple(told[:3]), "the preamble, and what stands in front of the region"
        assert sent[3].startswith(b'{"role": "user", "content": "' + FRAME)
        assert sent[4:] == tuple(told[12:])

        # A later region from the start absorbs it.
        done = await player.admin(url, "POST", json={"from": 0, "to": 14}, headers=credential)
        assert done["outcome"] == "committed", done
        got = await client.say("and on")
        assert got.headers["x-warmfold-covered"] == "14"
        sent = elements(provider.turns[-1].raw)
        assert sum(FRAME in element for element in sent) == 1
        assert FRAME in sent[1]


async def test_eight_clients_at_once(tmp_path: Path) -> None:
    """Each sends its next request the moment it has its answer: what follows a turn runs beside the next one. None gets another's words."""
    async with (
        SimulatedProvider(window_tokens=4096) as provider,
        playing(tmp_path, provider, **SMALL) as player,
    ):

        async def client(mark: str) -> None:
            messages = [SYSTEM]
            for turn in range(30):
                messages.append(
                    {"role": "user", "content": f"My word is {mark}: never tell. " + prose((mark, turn), 90)}
                )
                got = await player.post({"model": "demo-model", "messages": messages})
                assert got.status == 200, (mark, turn, got.body)
                messages.append({"role": "assistant", "content": got.json["choices"][0]["message"]["content"]})

        await asyncio.gather(*(client(f"mark-{at}") for at in range(8)))
        await player.settled()
        for call in provider.calls:
            assert call.status == 200
            assert sum(f"mark-{at}:".encode() in call.raw for at in range(8)) == 1
        assert len(provider.compactions) >= 8


@pytest.mark.parametrize(("name", "window"), [("chat", 2048), ("tools", 2048), ("chat", 4096), ("thoughts", 3000)])
async def test_a_client_that_rewrites_each_answer_it_got(name: str, window: int, tmp_path: Path) -> None:
    """What comes back as the answer is other text than the provider's own: shortened, translated, its thoughts cut out."""
    steps = [
        Step(step.request, {**step.reply, "content": f"Well: {step.reply['content']}"} if step.reply else None)
        for step in TALKS[name].steps()
    ]
    played = await play(steps, window, tmp_path)
    assert played.faults == []
    assert played.applied > 0
