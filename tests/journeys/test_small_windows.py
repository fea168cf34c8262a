"""Windows in which a checkpoint and a large newest message have no room side by side, and clients whose checkpoints nobody uses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.demo.provider import SimulatedProvider
from proxy.demo.settings import Settings
from proxy.demo.summariser import Dead
from proxy.demo.template import render
from proxy.economy import LIMIT
from tests.journeys.player import Answered, Player, playing
from tests.journeys.talks import PIXEL, assistant, prose, user

WINDOW = 2048
TASK = "Port the importer of project Zebra-77 to Rust."
RULE = "Never touch prod.db."
FRAME = "<checkpoint_summary"


@asynccontextmanager
async def in_front_of(
    tmp: Path, window: int = WINDOW, **flags: object
) -> AsyncIterator[tuple[SimulatedProvider, Player]]:
    keys: dict[str, object] = {"compaction__max_context_tokens": window, "compaction__when": "after_turn", **flags}
    async with SimulatedProvider(window_tokens=window) as provider, playing(tmp, provider, **keys) as player:
        yield provider, player


class Line:
    """A client that sends its whole history."""

    def __init__(self, player: Player, name: str = "line", **members: Any) -> None:
        self.player = player
        self.name = name
        self.members: dict[str, Any] = {"model": "demo-model", **members}
        self.messages: list[dict[str, Any]] = []

    async def say(self, text: str, *, settle: bool = True, **headers: str) -> Answered:
        self.messages.append({"role": "user", "content": text})
        got = await self.player.post({**self.members, "messages": self.messages}, **headers)
        if settle:
            await self.player.settled()
        if got.status == 200:
            self.messages.append({"role": "assistant", "content": got.json["choices"][0]["message"]["content"]})
        return got

    async def until_covered(self, words: int = 60) -> Answered:
        """Task, rule, and turns until a request carries a checkpoint."""
        await self.say(TASK)
        await self.say(RULE)
        for at in range(40):
            got = await self.say(f"Step {at}: {prose((self.name, at), words)}")
            assert got.status == 200
            if "x-warmfold-checkpoint" in got.headers:
                return got
        raise AssertionError("never covered")

    async def summary(self, got: Answered) -> Any:
        return await self.player.admin(f"/sessions/{got.headers['x-warmfold-session']}/summary")


def size(text: str) -> int:
    """Tokens of a request of one message, as the provider counts."""
    return len(render({"messages": [{"role": "user", "content": text}]}))


def large(name: str, tokens: int) -> str:
    """Prose of so many tokens at most, and hardly fewer."""
    words = prose((name, "large"), tokens).split()
    while size(" ".join(words)) > tokens:
        words = words[: len(words) - max(1, (size(" ".join(words)) - tokens) // 2)]
    return " ".join(words)


def first_text(raw: bytes) -> str:
    return str(json.loads(raw)["messages"][0]["content"])


def frame(raw: bytes) -> str:
    """The checkpoint in a request."""
    text = first_text(raw)
    assert text.startswith(FRAME)
    return text[: text.index("do not acknowledge this note.")]


# A checkpoint that has no room beside the newest message is cut, for that request.


@pytest.mark.parametrize("room", [180, 220, 260, 300])
async def test_a_message_that_leaves_no_room_for_the_whole_checkpoint_is_answered_all_the_same(
    tmp_path: Path, room: int
) -> None:
    async with in_front_of(tmp_path) as (provider, player):
        line = Line(player)
        await line.until_covered()
        got = await line.say(large("much", WINDOW - room))
        assert got.status == 200
        sent = provider.turns[-1]
        assert sent.prompt_tokens <= WINDOW
        assert "Zebra-77" in frame(sent.raw)
        assert first_text(sent.raw).endswith(line.messages[-2]["content"])


async def test_what_was_cut_for_one_request_is_whole_in_the_store_and_in_the_next_request(tmp_path: Path) -> None:
    async with in_front_of(tmp_path) as (provider, player):
        line = Line(player)
        await line.until_covered()
        got = await line.say(large("much", WINDOW - 220))
        cut, stored = frame(provider.turns[-1].raw), await line.summary(got)
        assert got.headers["x-warmfold-checkpoint"] == stored["id"]
        assert "## Decisions" in stored["text"]
        assert "## Decisions" not in cut
        del line.messages[-2:]  # sent by mistake
        later = await line.say("Never mind.")
        assert later.headers["x-warmfold-checkpoint"] == stored["id"]
        whole = frame(provider.turns[-1].raw)
        assert "## Decisions" in whole
        assert all(entry["text"] in whole for entry in stored["ledger"])
        assert {TASK, RULE} <= {entry["text"] for entry in stored["ledger"]}
        await line.say("Go on.")
        assert frame(provider.turns[-1].raw) == whole


async def test_no_summariser_reads_what_was_cut(tmp_path: Path) -> None:
    """Nor where the client asks for a compaction right then."""
    async with in_front_of(tmp_path) as (provider, player):
        line = Line(player)
        await line.until_covered()
        await line.say(large("much", WINDOW - 220), x_warmfold_mode="force")
        cut = frame(provider.turns[-1].raw)
        await line.say("Go on.")
        await line.say(f"And on. {prose('on', 100)}")
        for call in provider.compactions:
            assert cut not in json.loads(call.raw)["messages"][0]["content"]
        assert provider.turns[-1].status == 200
        assert RULE in first_text(provider.turns[-1].raw)


async def test_a_provider_with_a_smaller_window_than_it_was_thought_to_have_gets_the_checkpoint_cut(
    tmp_path: Path,
) -> None:
    async with in_front_of(tmp_path, compaction__trigger_ratio=0.6) as (provider, player):
        line = Line(player)
        await line.until_covered()
        provider.change(window_tokens=1500)
        got = await line.say(large("much", 1500 - 220))
        assert got.status == 200
        assert got.headers["x-warmfold-compaction"] == "recovered"
        assert provider.turns[-2].status == 400
        assert provider.turns[-1].prompt_tokens <= 1500
        assert "Zebra-77" in frame(provider.turns[-1].raw)


async def test_nor_need_anything_have_been_covered_before(tmp_path: Path) -> None:
    """The newest message alone is above the hard watermark of the window that the error teaches, and below its end."""
    async with in_front_of(tmp_path, 2 * WINDOW) as (provider, player):
        line = Line(player)
        for text in (TASK, RULE, prose("more", 150), prose("and more", 150)):
            await line.say(text)
        provider.change(window_tokens=1500)
        got = await line.say(large("much", 1500 - 220))
        assert got.status == 200
        assert got.headers["x-warmfold-compaction"] == "recovered"
        assert TASK in frame(provider.turns[-1].raw)


async def test_a_provider_that_refuses_nothing_gets_no_more_than_the_window_holds(tmp_path: Path) -> None:
    """It would drop the beginning of the prompt, which is the checkpoint, without a word."""
    async with in_front_of(tmp_path) as (provider, player):
        line = Line(player)
        await line.until_covered()
        provider.change(window_tokens=4 * WINDOW)
        await line.say(large("much", WINDOW - 200))
        assert provider.turns[-1].prompt_tokens <= WINDOW
        assert TASK in frame(provider.turns[-1].raw)


async def test_where_an_image_makes_the_size_doubtful_the_checkpoint_goes_out_whole(tmp_path: Path) -> None:
    async with in_front_of(tmp_path) as (provider, player):
        line = Line(player)
        await line.until_covered()
        provider.change(window_tokens=4 * WINDOW)
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
        line.messages.append({"role": "user", "content": [{"type": "text", "text": large("less", 680)}, image]})
        got = await player.post({"model": "demo-model", "messages": line.messages})
        stored = await line.summary(got)
        assert "## Next steps" in stored["text"]
        assert b"## Next steps" in provider.turns[-1].raw
        assert b"## Decisions" in provider.turns[-1].raw


@pytest.mark.parametrize("room", [300, 330, 360])
async def test_a_checkpoint_of_an_earlier_turn_is_cut_as_well(tmp_path: Path, room: int) -> None:
    """Nothing more can be covered: the guard has said so before the provider refused the request."""
    async with in_front_of(tmp_path) as (provider, player):
        line = Line(player)
        await line.until_covered()
        await line.say(large("much", WINDOW - 220))
        compactions = len(provider.compactions)
        del line.messages[-2:]
        got = await line.say(large("as much", WINDOW - room))
        assert got.status == 200
        assert TASK in frame(provider.turns[-1].raw)
        assert len(provider.compactions) == compactions


# Compactions for nothing.


def opened(name: object, tokens: int) -> list[dict[str, Any]]:
    """A conversation of so many tokens that nobody has seen yet; its first message is its own."""
    messages = [user(("first", name), 40)]
    while len(render({"messages": messages})) < tokens or len(messages) % 2 == 0:
        at = len(messages)
        messages.append(assistant((name, at), 60) if at % 2 else user((name, at), 60))
    return messages


async def sent(player: Player, messages: list[dict[str, Any]], **members: Any) -> Answered:
    """One turn; its answer is added."""
    got = await player.post({"model": "demo-model", "messages": messages, **members})
    await player.settled()
    assert got.status == 200
    messages.append({"role": "assistant", "content": got.json["choices"][0]["message"]["content"]})
    return got


async def aged(player: Player) -> list[dict[str, Any]]:
    """A conversation that has gone on for some turns."""
    messages = opened("old", 1000)
    for at in range(5):
        await sent(player, messages)
        messages.append(user(("old", at), 20))
    return messages


async def test_many_agents_that_begin_side_by_side_are_no_client_that_writes_its_history_anew(tmp_path: Path) -> None:
    """All of them are compacted, or would be, before the first of them goes on."""
    window = 6000
    async with in_front_of(tmp_path, window, compaction__trigger_ratio=0.5) as (provider, player):
        agents = [opened(f"agent {n}", window * 6 // 10) for n in range(LIMIT + 4)]
        await asyncio.gather(*(sent(player, agent) for agent in agents[:LIMIT]))
        assert len(provider.compactions) == LIMIT
        await sent(player, agents[LIMIT])
        assert len(provider.compactions) == LIMIT, "so far it looks like one"
        agents[0].append(user("go on"))
        assert "x-warmfold-checkpoint" in (await sent(player, agents[0])).headers
        await sent(player, agents[LIMIT + 1])
        assert len(provider.compactions) == LIMIT + 1


async def test_a_conversation_that_has_gone_on_is_compacted_whatever_new_ones_come_to(tmp_path: Path) -> None:
    window = 6000
    async with in_front_of(tmp_path, window, compaction__trigger_ratio=0.5) as (provider, player):
        old = await aged(player)
        for at in range(LIMIT + 2):
            await sent(player, opened(at, window * 6 // 10))
        assert len(provider.compactions) == LIMIT
        while len(render({"messages": old})) < window // 2:
            old += [assistant(("more", len(old)), 60), user(("more", len(old)), 60)]
        await sent(player, old)
        assert len(provider.compactions) == LIMIT + 1
        old.append(user("go on"))
        assert "x-warmfold-checkpoint" in (await sent(player, old)).headers


async def test_conversations_that_use_their_checkpoints_do_not_pay_for_a_client_that_uses_none(tmp_path: Path) -> None:
    """Nor does that client go on because they do."""
    window = 6000
    async with in_front_of(tmp_path, window, compaction__trigger_ratio=0.5) as (provider, player):
        old = await aged(player)
        while len(render({"messages": old})) < window // 2:
            old += [assistant(("more", len(old)), 60), user(("more", len(old)), 60)]
        for at in range(LIMIT + 6):
            await sent(player, old)
            old.append(user(("then", at), 5))
            await sent(player, opened(at, window * 6 // 10))
        assert len(provider.compactions) == LIMIT + 1


@pytest.mark.parametrize("share", [0.88, 0.93])
async def test_of_a_client_that_writes_its_history_anew_what_still_fits_goes_out_as_it_came(
    tmp_path: Path, share: float
) -> None:
    """Above the hard watermark, where a checkpoint would have to be made in front of each request, for that request alone."""
    window = 4000
    async with in_front_of(tmp_path, window) as (provider, player):
        for at in range(LIMIT):
            await sent(player, opened(at, int(window * share)))
        assert len(provider.compactions) == LIMIT
        messages = opened("as it came", int(window * share))
        got = await sent(player, messages)
        assert got.headers["x-warmfold-compaction"] == "none"
        assert json.loads(provider.turns[-1].raw)["messages"] == messages[:-1]
        assert len(provider.compactions) == LIMIT


@pytest.mark.parametrize(
    ("share", "output"),
    [
        pytest.param(1.1, None, id="it does not fit"),
        pytest.param(0.99, None, id="by our count it hardly fits"),
        pytest.param(0.88, 900, id="it does not with the answer"),
    ],
)
async def test_and_what_does_not_is_compacted(tmp_path: Path, share: float, output: int | None) -> None:
    window = 4000
    async with in_front_of(tmp_path, window) as (provider, player):
        for at in range(LIMIT):
            await sent(player, opened(at, int(window * 0.93)))
        members = {} if output is None else {"max_tokens": output}
        got = await sent(player, opened("more", int(window * share)), **members)
        assert got.headers["x-warmfold-compaction"] == "inline"
        assert len(provider.compactions) > LIMIT


async def test_what_no_model_wrote_was_for_nothing_but_cost_nothing(tmp_path: Path) -> None:
    window = 4000
    async with in_front_of(tmp_path, window, compaction__trigger_ratio=0.5) as (provider, player):
        provider.change(summariser=Dead())
        for at in range(LIMIT):
            got = await sent(player, opened(at, int(window * 0.93)))
            assert got.headers["x-warmfold-compaction"] == "inline"
        tried = len(provider.compactions)
        provider.change(summariser=Settings().summariser)
        await sent(player, opened("more", int(window * 0.6)))
        assert len(provider.compactions) == tried + 1
