"""What the product promises, one scenario each: whole journeys over a real listener, a real store and the simulated provider."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.demo.calls import Call, Forced
from proxy.demo.provider import SimulatedProvider
from proxy.demo.summariser import CallsTool, Dead, Echo, Empty, Says, Truncated
from proxy.demo.tokenizer import tokenize
from tests.journeys.player import Player, elements, is_extension, playing

pytestmark = pytest.mark.filterwarnings("error")

FILLER = "The service reads its queue, writes a line to the log and goes on with the next order in the list. "


def system(text: str = "You are a careful assistant.") -> dict[str, Any]:
    return {"role": "system", "content": text}


def long_text(seed: int, words: int) -> str:
    """Prose that no two turns share."""
    chance = random.Random(seed)
    vocabulary = FILLER.split()
    return " ".join(chance.choice(vocabulary) for _ in range(words))


class Chat:
    """A client that sends its whole history each time."""

    def __init__(
        self, player: Player, *, preamble: str = "You are a careful assistant.", stream: bool = False, **extra: Any
    ) -> None:
        self.player = player
        self.messages: list[dict[str, Any]] = [system(preamble)]
        self.extra: dict[str, Any] = {"model": "demo-model", **extra}
        self.stream = stream

    async def say(self, text: str, *, settle: bool = True, **headers: str) -> tuple[str, Any]:
        """The answer's text and its headers; the answer is added to the history."""
        self.messages.append({"role": "user", "content": text})
        body = {**self.extra, "messages": self.messages}
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        got = await self.player.post(body, **headers)
        assert got.status == 200, got.body
        answer = _streamed(got.body) if self.stream else got.json["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": answer})
        if settle:
            await self.player.settled()
        return answer, got.headers


def _streamed(body: bytes) -> str:
    text = ""
    for line in body.decode().splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                text += choice["delta"].get("content") or ""
    return text


@pytest.mark.parametrize("stream", [False, True])
async def test_facts_of_early_turns_are_answerable_after_24_turns_of_two_conversations(
    tmp_path: Path, stream: bool
) -> None:
    async with (
        SimulatedProvider(window_tokens=4096) as provider,
        playing(tmp_path, provider, compaction__max_context_tokens=4096, compaction__when="after_turn") as player,
    ):
        chats = [Chat(player, stream=stream), Chat(player, stream=stream)]
        for turn in range(24):
            which = turn % 2
            fact = f"NOTE: KEY_{which}_{turn} = value-{which}-{turn}. " if turn < 8 else ""
            await chats[which].say(f"{fact}Step {turn}: {long_text(turn, 260)}")
        assert len(provider.compactions) >= 2
        for turn in range(8):
            which = turn % 2
            answer, headers = await chats[which].say(f"What is the value of KEY_{which}_{turn}?")
            assert answer == f"KEY_{which}_{turn} = value-{which}-{turn}"
            assert headers["x-warmfold-checkpoint"]
        for which in (0, 1):
            foreign, _ = await chats[which].say(f"What is the value of KEY_{1 - which}_{1 - which}?")
            assert "Nothing in this conversation" in foreign
        assert all(call.status == 200 for call in provider.calls)
        assert all(is_extension(c.raw, [t.raw for t in provider.turns]) for c in provider.compactions)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_compaction_call_is_new_to_the_provider_only_in_its_last_message(tmp_path: Path, stream: bool) -> None:
    """16-token blocks: at most the instruction, the rebuilt answer and 32 tokens are processed; at 16k at least 98 % comes from the cache."""
    async with (
        SimulatedProvider(window_tokens=24_000) as provider,
        playing(tmp_path, provider, compaction__max_context_tokens=24_000, compaction__when="after_turn") as player,
    ):
        chat = Chat(
            player,
            stream=stream,
            tools=[{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
        )
        turn = 0
        while not provider.compactions:
            turn += 1
            await chat.say(f"Step {turn}: {long_text(turn, 700)}")
            assert turn < 60
        call = provider.compactions[0]
        last = provider.turns[-1]
        assert call.request is not None
        instruction = len(tokenize(call.request["messages"][-1]["content"]))
        assert last.answer is not None
        assert call.request["messages"][-2]["content"] == last.answer.text
        assert call.new <= instruction + len(last.answer.tokens()) + 32
        assert call.prompt_tokens >= 16_000
        assert call.cached / call.prompt_tokens >= 0.98
        journal = (await player.admin(f"/sessions/{(await _only_session(player))}"))["journal"]
        assert journal[0]["outcome"] == "committed"
        assert journal[0]["cached"] == call.cached
        assert journal[0]["prompt"] == call.prompt_tokens


async def _only_session(player: Player) -> str:
    found = (await player.admin("/sessions"))["sessions"]
    assert len(found) == 1
    return str(found[0]["id"])


async def test_with_nothing_to_compact_both_sides_see_the_same_bytes(tmp_path: Path) -> None:
    """Odd spacing, escapes, numbers and key order: what arrives is what was sent."""
    body = (
        b' {"temperature":1.0,  "model" : "demo-model","seed": 123456789012345678901234567890,\n"messages":[ {"role":"user","content":"caf\\u00e9 \\/ ok"} ,'
        b'\t{"content":"fine","role":"assistant"},{"role":"user","content":[{"type":"text","text":"'
        + b"go on " * 400
        + b'"}]} ], "x_unknown":[1e2, {"b":1,"a":2}] }\n'
    )
    async with SimulatedProvider() as provider, playing(tmp_path, provider) as player:
        through = await player.post(body)
        assert provider.calls[-1].raw == body
        async with player.http.post(
            f"{provider.base_url}/chat/completions",
            data=body,
            headers={"Content-Type": "application/json", **player.headers},
        ) as direct:
            expected = await direct.read()
        ours = {k.lower(): v for k, v in through.headers.items() if not k.lower().startswith("x-warmfold-")}
        theirs = {k.lower(): v for k, v in direct.headers.items()}
        for changing in ("date", "x-request-id"):
            ours.pop(changing, None)
            theirs.pop(changing, None)
        assert ours.keys() == theirs.keys()
        fresh, known = json.loads(through.body), json.loads(expected)
        for answer in (fresh, known):
            answer.pop("id")
            answer.pop("created")
            answer["usage"].pop("prompt_tokens_details")
        assert fresh == known


FAILURES: dict[str, Any] = {
    "error status": Dead(500),
    "rate limited": Dead(429),
    "empty": Empty(),
    "tool call": CallsTool(),
    "cut by length": Truncated(),
    "echo": Echo(),
    "refusal": Says("I'm sorry, but I can't help with that."),
    "error as text": Says("Error: upstream timeout while generating"),
    "inflated": Says("Task and intent: " + "word " * 30_000),
}


def _forced(reply: Forced) -> Callable[[Call], Awaitable[Forced | None]]:
    async def hook(call: Call) -> Forced | None:
        return reply if call.is_compaction else None

    return hook


BROKEN: dict[str, Forced] = {
    "error JSON with 200": Forced(
        body=b'{"error":{"message":"boom canary-error"}}', headers={"Content-Type": "application/json"}
    ),
    "truncated JSON": Forced(
        body=b'{"choices":[{"message":{"content":"canary-error', headers={"Content-Type": "application/json"}
    ),
    "HTML": Forced(status=502, body=b"<html>canary-error</html>", headers={"Content-Type": "text/html"}),
    "no body": Forced(body=b""),
    "204": Forced(status=204),
    "reset": Forced(body=b'{"choices":[', break_off=True),
}


@pytest.mark.parametrize("kind", [*FAILURES, *BROKEN])
async def test_whatever_the_summariser_does_the_clients_turns_succeed(kind: str, tmp_path: Path) -> None:
    async with (
        SimulatedProvider(window_tokens=8192, max_output_tokens=60_000) as provider,
        playing(
            tmp_path,
            provider,
            compaction__max_context_tokens=8192,
            compaction__when="after_turn",
            compaction__trigger_ratio=0.3,
        ) as player,
    ):
        if kind in FAILURES:
            provider.change(summariser=FAILURES[kind])
        else:
            provider.on_call = _forced(BROKEN[kind])
        chat = Chat(player)
        for turn in range(9):
            _, headers = await chat.say(f"Step {turn}: {long_text(turn, 330)}")
            assert "x-warmfold-checkpoint" not in headers
        # Back-off and debounce: a broken summariser is not asked on every turn.
        assert 1 <= len(provider.compactions) <= 4
        assert not any(b"canary-error" in call.raw for call in provider.calls)
        journal = (await player.admin(f"/sessions/{await _only_session(player)}"))["journal"]
        assert journal[0]["outcome"] == "failed"


async def _pressed(player: Player, provider: SimulatedProvider, chat: Chat, turns: int = 40) -> None:
    """Talk until a checkpoint stands."""
    before = len(provider.compactions)
    for turn in range(turns):
        await chat.say(f"Step {turn}: {long_text(turn + 1000, 300)}")
        if len(provider.compactions) > before:
            return
    raise AssertionError("never compacted")


SMALL = {"compaction__max_context_tokens": 6000, "compaction__when": "after_turn"}


async def test_an_edited_history_never_gets_the_checkpoint_of_the_other_one(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=6000) as provider, playing(tmp_path, provider, **SMALL) as player:
        chat = Chat(player)
        await chat.say("NOTE: SECRET = canary-covered. " + long_text(1, 300))
        await _pressed(player, provider, chat)
        _, headers = await chat.say("go on")
        covered = int(headers["x-warmfold-covered"])
        assert covered >= 2
        edited = [dict(m) for m in chat.messages[:6]]
        edited[1]["content"] = "Something else. " + long_text(1, 300)
        got = await player.post({"model": "demo-model", "messages": [*edited, {"role": "user", "content": "go on"}]})
        assert got.status == 200
        assert "x-warmfold-checkpoint" not in got.headers
        assert b"canary-covered" not in provider.calls[-1].raw


async def test_a_branch_that_left_before_the_end_of_what_was_seen_gets_no_text_of_it(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=6000) as provider, playing(tmp_path, provider, **SMALL) as player:
        chat = Chat(player)
        await _pressed(player, provider, chat)
        shared = len(chat.messages)
        branch = [*chat.messages[: shared - 3], {"role": "user", "content": "Another way: " + long_text(77, 20)}]
        got = await player.post({"model": "demo-model", "messages": branch})
        assert "x-warmfold-checkpoint" not in got.headers
        _, headers = await chat.say("and the old way goes on")
        assert "x-warmfold-checkpoint" in headers
        assert got.headers["x-warmfold-session"] != headers["x-warmfold-session"]


async def test_equal_conversations_of_two_tenants_share_nothing(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=6000) as provider, playing(tmp_path, provider, **SMALL) as player:
        chat = Chat(player)
        await _pressed(player, provider, chat)
        body = {"model": "demo-model", "messages": [*chat.messages, {"role": "user", "content": "next"}]}
        mine = await player.post(body)
        assert "x-warmfold-checkpoint" in mine.headers
        provider.change(window_tokens=60_000)
        calls = len(provider.calls)
        theirs = await player.post(body, Authorization="Bearer sk-somebody-else", x_session_id="same")
        await player.settled()
        assert theirs.status == 200
        assert theirs.headers["x-warmfold-session"] != mine.headers["x-warmfold-session"]
        assert b"checkpoint_summary" not in next(
            c.raw for c in provider.calls[calls:] if not c.is_compaction and c.status == 200
        ) or (theirs.headers["x-warmfold-compaction"] == "inline")


async def test_sessions_survive_a_restart(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=6000) as provider:
        async with playing(tmp_path, provider, **SMALL) as player:
            chat = Chat(player)
            await _pressed(player, provider, chat)
            _, before = await chat.say("before the restart")
        async with playing(tmp_path, provider, **SMALL) as player:
            chat.player = player
            _, after = await chat.say("after the restart")
            assert after["x-warmfold-session"] == before["x-warmfold-session"]
            assert after["x-warmfold-checkpoint"] == before["x-warmfold-checkpoint"]


async def test_later_requests_carry_the_very_same_checkpoint_bytes(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=6000) as provider, playing(tmp_path, provider, **SMALL) as player:
        chat = Chat(player)
        await _pressed(player, provider, chat)
        frames = set()
        for turn in range(3):
            await chat.say(f"short {turn}")
            frames.add(elements(provider.turns[-1].raw)[1])
        assert len(frames) == 1
        # Idempotence: the same request again and again is the same routed request, and no further call.
        calls = len(provider.compactions)
        body = {"model": "demo-model", "messages": [*chat.messages, {"role": "user", "content": "again"}]}
        for _ in range(5):
            await player.post(body)
            await player.settled()
        assert len({call.raw for call in provider.turns[-5:]}) == 1
        assert len(provider.compactions) == calls


async def test_the_users_words_keep_their_places_over_generations(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=6000) as provider, playing(tmp_path, provider, **SMALL) as player:
        chat = Chat(player)
        covered: list[int] = []
        while len(covered) < 3:
            assert len(chat.messages) < 300
            _, headers = await chat.say(f"Step {len(chat.messages)}: always {long_text(len(chat.messages), 60)}")
            if (k := int(headers.get("x-warmfold-covered", 0))) not in (0, *covered):
                covered.append(k)
        frame = json.loads(elements(provider.turns[-1].raw)[1])["content"]
        said = re.findall(r'<checkpoint_said role="user" message="(\d+)">(Step \d+: )', frame)
        assert any(int(at) < covered[0] for at, _ in said)
        assert any(int(at) >= covered[0] for at, _ in said), "and of what came to it later"
        for at, words in said:
            assert chat.messages[1 + int(at)]["content"].startswith(words)


async def test_the_mode_header_lowers_and_forces(tmp_path: Path) -> None:
    async with (
        SimulatedProvider(window_tokens=32_000) as provider,
        playing(tmp_path, provider, compaction__max_context_tokens=32_000, compaction__when="after_turn") as player,
    ):
        chat = Chat(player)
        for turn in range(6):
            await chat.say(f"Step {turn}: {long_text(turn, 300)}")
        assert not provider.compactions
        await chat.say("force it", x_warmfold_mode="force")
        assert len(provider.compactions) == 1
        assert not any(name.lower().startswith("x-warmfold") for name in provider.turns[-1].headers)
        _, off = await chat.say("without", x_warmfold_mode="off")
        assert "x-warmfold-session" not in off
        assert b"checkpoint_summary" not in provider.turns[-1].raw
        _, observed = await chat.say("watched", x_warmfold_mode="observe")
        assert "x-warmfold-session" in observed
        assert b"checkpoint_summary" not in provider.turns[-1].raw
        _, on = await chat.say("with")
        assert "x-warmfold-checkpoint" in on


async def test_ten_equal_requests_at_once_make_one_compaction_call(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=6000) as provider, playing(tmp_path, provider, **SMALL) as player:
        chat = Chat(player)
        for turn in range(40):
            await chat.say(f"Step {turn}: {long_text(turn, 150)}")
            if provider.turns[-1].prompt_tokens > 4100:
                break
        assert not provider.compactions
        body = {"model": "demo-model", "messages": [*chat.messages, {"role": "user", "content": long_text(5, 330)}]}
        answers = await asyncio.gather(*(player.post(body) for _ in range(10)))
        await player.settled()
        assert [a.status for a in answers] == [200] * 10
        assert len(provider.compactions) == 1


async def test_compaction_by_hand_needs_the_tenants_credential(tmp_path: Path) -> None:
    async with (
        SimulatedProvider(window_tokens=32_000) as provider,
        playing(tmp_path, provider, compaction__max_context_tokens=32_000, compaction__when="after_turn") as player,
    ):
        chat = Chat(player)
        for turn in range(6):
            await chat.say(f"Step {turn}: {long_text(turn, 300)}")
        session = await _only_session(player)
        url = f"{player.running.admin_url}/sessions/{session}/compact"
        async with player.http.post(url, headers={"x-upstream-authorization": "Bearer sk-somebody-else"}) as refused:
            assert refused.status == 403
        assert not provider.compactions
        async with player.http.post(url, headers={"x-upstream-authorization": player.headers["Authorization"]}) as done:
            assert done.status == 200, await done.text()
        assert len(provider.compactions) == 1
        assert provider.compactions[0].headers["Authorization"] == player.headers["Authorization"]
        assert is_extension(provider.compactions[0].raw, [t.raw for t in provider.turns])
        _, headers = await chat.say("next")
        assert "x-warmfold-checkpoint" in headers
        summary = await player.admin(f"/sessions/{session}/summary")
        assert summary["generation"] == 1


async def test_both_ways_of_answering_leave_the_same_state(tmp_path: Path) -> None:
    """I9: the same conversation, once streamed, once whole."""
    seen = []
    for stream in (False, True):
        async with (
            SimulatedProvider(window_tokens=6000) as provider,
            playing(tmp_path / str(stream), provider, **SMALL, session__tenant_secret_env="") as player,
        ):
            chat = Chat(player, stream=stream)
            for turn in range(14):
                await chat.say(f"Step {turn}: {long_text(turn, 300)}")
            session = await player.admin(f"/sessions/{await _only_session(player)}")
            kept = {key: session[key] for key in ("turns", "messages", "used", "usage", "generation", "version")}
            seen.append(
                (kept, [c.prompt_tokens for c in provider.compactions], [c.cached for c in provider.compactions])
            )
    assert seen[0] == seen[1]


async def test_no_part_of_a_request_reaches_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with SimulatedProvider(window_tokens=6000) as provider, playing(tmp_path, provider, **SMALL) as player:
        chat = Chat(player)
        chat.player.headers = {"Authorization": "Bearer canary-credential"}
        await chat.say("canary-prompt " + long_text(3, 300))
        await _pressed(player, provider, chat)
        await chat.say("go on")
        async with player.http.get(f"{player.running.admin_url}/metrics") as reply:
            metrics = await reply.text()
    assert "canary" not in metrics
    assert "canary" not in caplog.text
    assert 'warmfold_compactions_total{because="none",outcome="committed",trigger="soft"} 1.0' in metrics


async def test_a_client_with_a_clock_in_its_system_prompt_keeps_its_session(tmp_path: Path) -> None:
    async with SimulatedProvider(window_tokens=6000) as provider, playing(tmp_path, provider, **SMALL) as player:
        chat = Chat(player)
        names = set()
        for turn in range(16):
            chat.messages[0] = system(f"You are careful. Now: 12:00:{turn:02d}")
            _, headers = await chat.say(f"Step {turn}: {long_text(turn, 300)}")
            names.update(headers.getall("x-warmfold-session", []))  # the first turn is too small to look up
            assert json.loads(provider.turns[-1].raw)["messages"][0]["content"].endswith(f"12:00:{turn:02d}")
        assert len(names) == 1
        assert 1 <= len(provider.compactions) <= 4
        for call in provider.compactions:
            assert is_extension(call.raw, [t.raw for t in provider.turns])


async def test_the_official_client_hangs_up_and_nothing_is_left_over(tmp_path: Path) -> None:
    """A client that leaves in the middle of a stream: no turn is recorded, the next one is as if it had not been."""
    async with (
        SimulatedProvider(window_tokens=6000, chunk_delay_s=0.05) as provider,
        playing(tmp_path, provider, **SMALL) as player,
    ):
        body = {
            "model": "demo-model",
            "stream": True,
            "messages": [
                system(),
                {"role": "user", "content": long_text(1, 300)},
                {"role": "assistant", "content": "ok"},
                {"role": "user", "content": "more"},
            ],
        }
        async with aiohttp.ClientSession() as http:
            reply = await http.post(f"{player.running.base_url}/chat/completions", json=body, headers=player.headers)
            await reply.content.readany()
            reply.close()
        async with asyncio.timeout(5):
            while not provider.aborted:
                await asyncio.sleep(0.01)
        await player.settled()
        assert (await player.admin("/sessions"))["sessions"] == []


async def test_a_huge_history_at_first_contact_is_compacted_in_passes_and_once(tmp_path: Path) -> None:
    """Four windows long and never seen before: served, and the next request finds the checkpoint."""
    async with SimulatedProvider(window_tokens=6000) as provider, playing(tmp_path, provider, **SMALL) as player:
        messages: list[dict[str, Any]] = [
            system(),
            {"role": "user", "content": "NOTE: EARLY = first-fact. " + long_text(0, 200)},
        ]
        for turn in range(1, 80):
            messages += [
                {"role": "assistant", "content": f"Done {turn}."},
                {"role": "user", "content": f"Next {turn}: {long_text(turn, 240)}"},
            ]
        first = await player.post({"model": "demo-model", "messages": messages})
        assert first.status == 200
        assert first.headers["x-warmfold-compaction"] == "inline"
        passes = len(provider.compactions)
        assert passes > 1
        await player.settled()
        messages += [
            {"role": "assistant", "content": first.json["choices"][0]["message"]["content"]},
            {"role": "user", "content": "What is the value of EARLY?"},
        ]
        second = await player.post({"model": "demo-model", "messages": messages})
        assert second.headers["x-warmfold-checkpoint"] == first.headers["x-warmfold-checkpoint"]
        assert second.json["choices"][0]["message"]["content"] == "EARLY = first-fact"
        assert len(provider.compactions) == passes


async def test_a_dead_summariser_at_the_hard_watermark_leaves_a_mechanical_checkpoint(tmp_path: Path) -> None:
    async with (
        SimulatedProvider(window_tokens=4096, summariser=Dead(500)) as provider,
        playing(tmp_path, provider, compaction__max_context_tokens=4096, compaction__when="after_turn") as player,
    ):
        chat = Chat(player)
        await chat.say("The task: never touch prod.db. " + long_text(0, 150))
        for turn in range(40):
            _, headers = await chat.say(f"Step {turn}: {long_text(turn, 160)}")
        assert "x-warmfold-checkpoint" in headers
        assert all(call.status == 200 for call in provider.turns)


async def test_observe_says_what_it_would_do_and_does_nothing(tmp_path: Path) -> None:
    async with (
        SimulatedProvider(window_tokens=60_000) as provider,
        playing(tmp_path, provider, **SMALL, compaction__mode="observe") as player,
    ):
        chat = Chat(player)
        for turn in range(20):
            body = {
                "model": "demo-model",
                "messages": [*chat.messages, {"role": "user", "content": long_text(turn, 300)}],
            }
            await chat.say(long_text(turn, 300))
            assert json.loads(provider.calls[-1].raw) == body
        assert not provider.compactions
        session = await player.admin(f"/sessions/{await _only_session(player)}")
        observed = [line for line in session["journal"] if line["because"] == "observe"]
        assert 1 <= len(observed) <= 4
        assert observed[0]["outcome"] == "skipped"
        assert observed[0]["to"] > 0
