"""What cost other software the provider's cache: each test stands for a fault that was seen there, and the link names it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.core.replay import OPENING
from proxy.demo.answers import Answer
from proxy.demo.calls import Call, Forced
from proxy.demo.provider import SimulatedProvider
from proxy.demo.template import GENERATION, Request, render
from proxy.demo.tokenizer import Tokens, tokenize
from tests.faults.writer import FRAME, ROOMY, Writer, compact, exchanges, said
from tests.journeys.player import Player, elements, is_extension, playing
from tests.journeys.talks import TOOLS, calling, prose, result

WINDOW = 6000
AFTER = {"compaction__max_context_tokens": WINDOW, "compaction__when": "after_turn"}
BESIDE = {"compaction__max_context_tokens": WINDOW, "compaction__when": "next_turn"}
MOMENTS = pytest.mark.parametrize("flags", [AFTER, BESIDE], ids=["after the turn", "beside the next"])
SYSTEM = b'{"role":"system","content":"You are careful."}'

Message = dict[str, Any]


def _done(request: Request, tokens: Tokens) -> Answer:
    return Answer(text="Done.")


class _Chat:
    """A client whose requests are made anew on each turn by `preamble` and `members`, from the number of the turn."""

    def __init__(
        self,
        player: Player,
        preamble: Callable[[int], list[Message]] = lambda turn: [{"role": "system", "content": "You are careful."}],
        members: Callable[[int], Message] = lambda turn: {},
    ) -> None:
        self.player = player
        self.preamble = preamble
        self.members = members
        self.messages: list[Message] = []
        self.turn = 0
        self.sent: list[bytes] = []
        self.seen: list[Any] = []

    async def say(self, words: int = 170) -> bytes:
        """One turn: the request, as the client sent it."""
        self.messages.append({"role": "user", "content": prose(("user", self.turn), words)})
        messages = [*self.preamble(self.turn), *self.messages]
        body = compact({"model": "demo-model", **self.members(self.turn), "messages": messages})
        self.turn += 1
        got = await self.player.post(body)
        await self.player.settled()
        assert got.status == 200, got.body
        self.messages.append({"role": "assistant", "content": got.json["choices"][0]["message"]["content"]})
        self.sent.append(body)
        self.seen.append(got.headers)
        return body

    @property
    def sessions(self) -> set[str]:
        return {name for headers in self.seen for name in headers.getall("x-warmfold-session", [])}

    @property
    def applied(self) -> list[bool]:
        """Of each turn, whether it carried a checkpoint."""
        return ["x-warmfold-checkpoint" in headers for headers in self.seen]


def _expected_new(call: Call, provider: SimulatedProvider) -> int:
    """What a replay may have to process: its instruction, the answer in front of it, and two blocks of 16 tokens."""
    assert call.request is not None
    answers = [turn.answer for turn in provider.turns if turn.arrived < call.arrived and turn.answer is not None]
    longest = max(len(answer.tokens()) for answer in answers)
    return len(tokenize(call.request["messages"][-1]["content"])) + longest + 32


def _replayed(call: Call, provider: SimulatedProvider) -> Call:
    """The turn that a compaction call replays: the newest whose messages it begins with."""
    replay = elements(call.raw)
    before = [turn for turn in provider.turns if turn.arrived < call.arrived]
    return next(turn for turn in reversed(before) if elements(turn.raw) == replay[: len(elements(turn.raw))])


async def _metric(player: Player, name: str) -> dict[tuple[str, ...], float]:
    async with player.http.get(f"{player.running.admin_url}/metrics") as reply:
        text = await reply.text()
    return {
        tuple(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


# What changes in front


CLOCKS: dict[str, Callable[[int], list[Message]]] = {
    "system": lambda turn: [{"role": "system", "content": f"You are careful. Now: 12:00:{turn:02d}"}],
    "developer": lambda turn: [{"role": "developer", "content": f"Now: 12:00:{turn:02d}. You are careful."}],
    "parts with a mark": lambda turn: [
        {
            "role": "system",
            "content": [
                {"type": "text", "text": "You are careful.", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": f"Now: 12:00:{turn:02d}"},
            ],
        }
    ],
    "a message of its own": lambda turn: [
        {"role": "system", "content": "You are careful."},
        {"role": "developer", "content": f"Now: 12:00:{turn:02d}"},
    ],
    "now and then": lambda turn: [
        {"role": "system", "content": "You are careful."},
        *([{"role": "system", "content": f"Now: 12:00:{turn:02d}"}] if turn % 2 else []),
    ],
}


@MOMENTS
@pytest.mark.parametrize("clock", CLOCKS)
async def test_a_clock_in_the_preamble_is_replayed_as_it_stood_and_sent_as_it_stands(
    clock: str, flags: dict[str, Any], tmp_path: Path
) -> None:
    """earendil-works/pi#1873"""
    async with SimulatedProvider(window_tokens=10 * WINDOW) as provider, playing(tmp_path, provider, **flags) as player:
        chat = _Chat(player, CLOCKS[clock])
        for turn in range(30):
            await chat.say()
            assert elements(provider.turns[-1].raw)[0] == compact(CLOCKS[clock](turn)[0])
            assert compact(CLOCKS[clock](turn)[-1]) in elements(provider.turns[-1].raw)
        assert len(chat.sessions) == 1
        first = chat.applied.index(True)
        assert all(chat.applied[first:]), "no clock takes the checkpoint away"
        assert 1 <= len(provider.compactions) <= 3
        for call in provider.compactions:
            turns = [turn for turn in provider.turns if turn.arrived < call.arrived]
            replayed = _replayed(call, provider)
            assert replayed is turns[-1 if flags is AFTER else -2]
            assert call.new <= _expected_new(call, provider), "the older clock's prefix is the one that is cached"


async def test_a_clock_does_not_make_a_conversation_above_the_watermark_compact_on_every_turn(tmp_path: Path) -> None:
    """earendil-works/pi#1873"""
    flags = {**AFTER, "compaction__budget_tokens": 1500}
    async with SimulatedProvider(window_tokens=10 * WINDOW) as provider, playing(tmp_path, provider, **flags) as player:
        chat = _Chat(player, CLOCKS["system"])
        while not provider.turns or provider.turns[-1].prompt_tokens < 1500:
            await chat.say()
        made = len(provider.compactions)
        for _ in range(10):
            await chat.say(words=700)
        assert all(turn.prompt_tokens > 1500 for turn in provider.turns[-10:])
        assert len(provider.compactions) - made <= 4, "the debounce holds: one in three turns at most"
        assert len(chat.sessions) == 1


ORDERS = (compact(TOOLS), compact(TOOLS[::-1]))


@MOMENTS
async def test_tools_in_another_order_are_the_same_conversation_and_a_replay_has_the_order_that_is_warm(
    flags: dict[str, Any], tmp_path: Path
) -> None:
    """pydantic/logfire#1930"""
    async with SimulatedProvider(window_tokens=10 * WINDOW) as provider, playing(tmp_path, provider, **flags) as player:
        chat = _Chat(player, members=lambda turn: {"tools": [TOOLS, TOOLS[::-1]][turn % 2]})
        for turn in range(26):
            await chat.say()
            assert provider.turns[-1].raw.startswith(b'{"model":"demo-model","tools":' + ORDERS[turn % 2])
        assert len(chat.sessions) == 1
        assert all(chat.applied[chat.applied.index(True) :])
        assert provider.compactions
        for call in provider.compactions:
            turns = [turn for turn in provider.turns if turn.arrived < call.arrived]
            warm = turns[-1 if flags is AFTER else -2]
            order = ORDERS[(len(turns) - (1 if flags is AFTER else 2)) % 2]
            assert _replayed(call, provider) is warm
            assert call.raw.startswith(b'{"model":"demo-model","tools":' + order)
            assert call.new <= _expected_new(call, provider)


# What goes through the store

SCHEMA = (
    b'[ {"type":"function", "function":{"parameters":{"type":"object","properties":{"z":{"type":"string","enum":["b","a"]},"a":'
    b'{"m":{"z":1,"a":2,"m":3},"type":"object"},"m":{"maximum":1E2,"\\u0074ype":"number"}},"required":["z","a","m"]},"name":"look",'
    b'"description":"\\u4f60\\/ok"}}\n]'
)


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_replay_from_the_store_is_the_warm_request_byte_for_byte(restarts: bool, tmp_path: Path) -> None:
    """sgl-project/sglang#34553"""
    head = b'{ "z":1, "tools" : ' + SCHEMA + b',"model":"demo-model" ,"a":{"z":[],"a":{}},"messages" : [ '
    tail = b'\t] ,"metadata":{"z":"1","a":"2"},"max_completion_tokens" : 99 , "m":0.10}\n'
    odd = [message.replace(b'":', b'" : ').replace(b". ", b".\\u0020") for message in exchanges(4)]
    async with SimulatedProvider() as provider:
        async with playing(tmp_path, provider, **ROOMY) as player:
            writer = Writer(player, head, tail, [SYSTEM], preamble=1)
            await writer.send(*odd, said("user", "last"))
            assert writer.sent == writer.body
            if not restarts:
                call = await writer.compact(4)
        if restarts:
            async with playing(tmp_path, provider, **ROOMY) as player:
                writer.player = player
                call = await writer.compact(4)
        behind = writer.replayed(call)
        assert call.raw.startswith(head + b",".join(writer.messages))
        assert behind.endswith(
            tail.lstrip().replace(b"99", str(json.loads(call.raw)["max_completion_tokens"]).encode())
        )
        assert json.loads(elements(call.raw)[-1])["content"].startswith(OPENING)
        assert call.prompt_tokens - call.cached <= _expected_new(call, provider)


# Cache marks

EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}


def _marked(role: str, about: object, mark: Message | None = None) -> bytes:
    part = {"type": "text", "text": prose((role, about), 200), **({"cache_control": mark} if mark else {})}
    return compact({"role": role, "content": [part]})


@pytest.mark.parametrize("covered", [2, 4], ids=["none of them covered", "one of them covered"])
async def test_cache_marks_stay_where_the_client_put_them_and_go_with_what_is_covered(
    covered: int, tmp_path: Path
) -> None:
    """headroomlabs-ai/headroom#2375"""
    tools = compact([TOOLS[0], {**TOOLS[1], "cache_control": EPHEMERAL}])
    head = b'{"model":"demo-model","tools":' + tools + b',"messages":['
    async with SimulatedProvider(answerer=_done) as provider, playing(tmp_path, provider, **ROOMY) as player:
        writer = Writer(player, head, messages=[_marked("system", "rules", EPHEMERAL)], preamble=1)
        await writer.send(
            *(_marked("user", 0), said("assistant", 0), _marked("user", 1, EPHEMERAL), said("assistant", 1)),
            *(_marked("user", 2), said("assistant", 2), _marked("user", 3, EPHEMERAL)),
        )
        assert writer.sent == writer.body
        call = await writer.compact(covered)
        assert writer.replayed(call).count(b"cache_control") == 0, "the instruction has no mark of its own"
        assert call.raw.count(b'"cache_control":' + compact(EPHEMERAL)) == 4
        await writer.send(said("assistant", 3), _marked("user", 4))
        first = writer.replaced(covered)
        assert first.endswith(writer.messages[1 + covered].removeprefix(b'{"role":"user","content":['))
        assert first.count(b"cache_control") == (1 if covered == 2 else 0)
        assert writer.sent.count(b'"cache_control":' + compact(EPHEMERAL)) == (4 if covered == 2 else 3)
        assert writer.sent.count(b"cache_control") <= 4


@MOMENTS
@pytest.mark.parametrize("spelled", ["parts", "the message"])
async def test_marks_on_the_last_two_user_messages_are_on_the_same_two_after_a_rewrite(
    spelled: str, flags: dict[str, Any], tmp_path: Path
) -> None:
    """headroomlabs-ai/headroom#2919"""

    def marked(message: Message) -> Message:
        mark = {"cache_control": {"type": "ephemeral"}}
        if spelled == "the message":
            return {**message, **mark}
        return {**message, "content": [{"type": "text", "text": message["content"], **mark}]}

    async with SimulatedProvider(window_tokens=10 * WINDOW) as provider, playing(tmp_path, provider, **flags) as player:
        history: list[Message] = [{"role": "system", "content": "You are careful."}]
        covered = []
        for turn in range(26):
            history.append({"role": "user", "content": prose(("user", turn), 170)})
            users = [at for at, message in enumerate(history) if message["role"] == "user"]
            sent = [marked(message) if at in users[-2:] else message for at, message in enumerate(history)]
            got = await player.post({"model": "demo-model", "messages": sent})
            await player.settled()
            assert got.status == 200, got.body
            history.append({"role": "assistant", "content": got.json["choices"][0]["message"]["content"]})
            covered.append(int(got.headers.get("x-warmfold-covered", 0)))
            arrived = json.loads(provider.turns[-1].raw)["messages"]
            marks = [at for at, message in enumerate(arrived) if "cache_control" in compact(message).decode()]
            shift = len(sent) - len(arrived)
            assert marks == [at - shift for at in users[-2:]]
            assert arrived[-3:] == sent[-3:]
        assert covered[-1]
        assert all(covered[covered.index(next(filter(None, covered))) :]), "marks that move change no meaning"
        turns = [turn.raw for turn in provider.turns]
        assert all(is_extension(call.raw, turns) for call in provider.compactions)


# Tools


@MOMENTS
@pytest.mark.parametrize("tools", [compact(TOOLS), SCHEMA, None], ids=["two tools", "odd spelling", "no tools"])
async def test_no_tool_comes_or_goes_in_30_turns(tools: bytes | None, flags: dict[str, Any], tmp_path: Path) -> None:
    """headroomlabs-ai/headroom#2671"""
    member = b"" if tools is None else b'"tools":' + tools + b","
    async with SimulatedProvider(window_tokens=10 * WINDOW) as provider, playing(tmp_path, provider, **flags) as player:
        writer = Writer(player, b'{"model":"demo-model",' + member + b'"messages":[', messages=[SYSTEM], preamble=1)
        for turn in range(30):
            got = await writer.send(said("user", turn, 170))
            writer.messages.append(compact(got.json["choices"][0]["message"]))
        assert len(provider.compactions) >= 1
        assert len(provider.turns) == 30
        assert any(FRAME in turn.raw for turn in provider.turns)
        for call in provider.calls:
            assert call.raw.startswith(writer.head)
            assert call.raw.count(b'"tools"') == (tools is not None)


# Parameters


@MOMENTS
async def test_how_much_a_model_shall_think_is_the_same_in_a_replay(flags: dict[str, Any], tmp_path: Path) -> None:
    """MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark#144"""
    shaping = {
        "reasoning_effort": "high",
        "chat_template_kwargs": {"thinking": True, "budget": 1024, "a": None},
        "verbosity": "low",
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "reasoning": {"effort": "high", "exclude": True},
        "enable_thinking": True,
    }
    async with SimulatedProvider(window_tokens=10 * WINDOW) as provider, playing(tmp_path, provider, **flags) as player:
        chat = _Chat(player, members=lambda turn: shaping)
        for _ in range(26):
            await chat.say()
        assert provider.compactions
        for call in provider.calls:
            assert call.raw.startswith(compact({"model": "demo-model", **shaping})[:-1])
        assert all(call.new <= _expected_new(call, provider) for call in provider.compactions)


OPTIONS: dict[str, Message] = {
    "nothing": {},
    "the older limit": {"max_tokens": 200},
    "the newer limit": {"max_completion_tokens": 200},
    "a temperature": {"temperature": 1, "top_p": 1.0},
    "a stop": {"stop": ["\n\n\n\n"], "max_tokens": 200},
    "stored": {"store": True, "metadata": {"a": "b"}, "seed": 7},
    "a stream": {"stream": True, "stream_options": {"include_usage": True}},
    "effort": {"reasoning_effort": "low", "max_completion_tokens": 200},
}


@pytest.mark.parametrize("kind", OPTIONS)
async def test_a_compaction_call_has_no_parameter_that_the_client_did_not_use(kind: str, tmp_path: Path) -> None:
    """earendil-works/pi#1794"""
    used = {"model", "messages", *OPTIONS[kind]}

    def picky(call: Call) -> Forced | None:
        unknown = sorted(set(call.request or {}) - used)
        error = {"message": f"Unsupported parameter: {unknown}", "code": "unsupported_parameter"}
        return Forced(status=400, body=compact({"error": error})) if unknown else None

    async with SimulatedProvider(known_only=True) as provider, playing(tmp_path, provider, **ROOMY) as player:
        provider.on_call = picky
        writer = Writer(player, compact({"model": "demo-model", **OPTIONS[kind]})[:-1] + b',"messages":[', b"]}")
        await writer.send(*exchanges(4), said("user", "last"))
        call = await writer.compact(4)
        assert call.request is not None
        assert call.request.keys() <= used
        limits = {"max_tokens", "max_completion_tokens"}
        assert call.request.keys() & limits == OPTIONS[kind].keys() & limits, "in the client's own dialect"
        for key in ("temperature", "top_p", "seed", "reasoning_effort"):
            assert call.request.get(key, "none") == OPTIONS[kind].get(key, "none")


@pytest.mark.parametrize("works", [False, True], ids=["a chat", "an agent"])
async def test_a_compaction_that_is_refused_is_not_asked_for_twice_in_the_same_words(
    works: bool, tmp_path: Path
) -> None:
    """earendil-works/pi#1794. The answer of an agent's turn is no text, so there is one shape less to try."""
    error = compact(
        {"error": {"message": "Unsupported parameter: 'x'.", "code": "unsupported_parameter", "param": "x"}}
    )

    def hook(call: Call) -> Forced | None:
        return Forced(status=400, body=error) if call.is_compaction else None

    async with SimulatedProvider(window_tokens=10 * WINDOW) as provider, playing(tmp_path, provider, **AFTER) as player:
        provider.on_call = hook
        writer = Writer(
            player, b'{"model":"demo-model","tools":' + ORDERS[0] + b',"messages":[', messages=[SYSTEM], preamble=1
        )
        writer.messages.append(said("user", "task"))

        async def turn(at: int, words: int) -> Any:
            reply = calling(f"call_{at}") if works else {"role": "assistant", "content": prose(("answer", at), 20)}
            provider.next_reply = reply
            got = await writer.send()
            follows = (
                result(f"call_{at}", at, words) if works else {"role": "user", "content": prose(("user", at), words)}
            )
            writer.messages += [compact(reply), compact(follows)]
            return got.headers

        at = 0
        while not provider.compactions:
            at += 1
            await turn(at, 170)
        bodies = [call.raw for call in provider.compactions]
        assert len(set(bodies)) == len(bodies) <= 3
        for _ in range(2):
            at += 1
            assert "x-warmfold-checkpoint" not in await turn(at, 20)
        assert len(provider.compactions) == len(bodies), "the failure backs off"


# Templates that drop thoughts


def _agent(turns: int) -> list[Message]:
    """One user message, and then work with thoughts: all of it behind the last user message."""
    messages: list[Message] = [{"role": "user", "content": "Fix the parser. " + prose("task", 60)}]
    for at in range(turns):
        messages += [
            calling(f"call_{at}", reasoning_content=prose(("thought", at), 50)),
            result(f"call_{at}", at, 60),
        ]
    return messages


@pytest.mark.parametrize("trigger", ["force", "manual"])
async def test_what_a_template_drops_in_a_replay_shows_in_the_journal_and_hurts_nobody(
    trigger: str, tmp_path: Path
) -> None:
    """raullenchai/Rapid-MLX#214"""
    async with (
        SimulatedProvider(reasoning_stripped=True, answerer=_done) as provider,
        playing(tmp_path, provider, **{**ROOMY, "compaction__max_context_tokens": 8000}) as player,
    ):
        writer = Writer(player, b'{"model":"demo-model","tools":' + ORDERS[0] + b',"messages":[', b"]}", [SYSTEM], 1)
        work = [compact(message) for message in _agent(30)]
        await writer.send(*work[:-2])
        if trigger == "force":
            await writer.send(*work[-2:], x_warmfold_mode="force")
        else:
            await writer.compact(21)
        (call,) = provider.compactions
        assert call.new > _expected_new(call, provider), (
            "the thoughts are gone from the prompt, and the cache ends there"
        )
        (line,) = (await player.admin(f"/sessions/{writer.session}"))["journal"]
        assert (line["outcome"], line["prompt"], line["cached"]) == ("committed", call.prompt_tokens, call.cached)
        assert line["new"] > line["expected_new"]
        assert line["miss"], "a likely reason is named"
        assert sum((await _metric(player, "warmfold_compaction_cache_misses_total")).values()) == 1
        got = await writer.send(said("assistant", "done"), said("user", "more"))
        assert "x-warmfold-checkpoint" in got.headers


# One slot


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@MOMENTS
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
async def test_with_a_single_slot_a_compaction_finds_the_turn_and_leaves_the_opening_to_the_next(
    tools: list[Message] | None, flags: dict[str, Any], tmp_path: Path
) -> None:
    """PrimeIntellect-ai/prime-agent#2411. A server that keeps one prompt keeps the last one, whoever sent it."""
    members: Message = {"tools": tools} if tools else {}
    async with SimulatedProvider(window_tokens=10 * WINDOW) as provider, playing(tmp_path, provider, **flags) as player:
        chat = _Chat(player, members=lambda turn: members)
        for _ in range(30):
            await chat.say()
        opening = len(render({"messages": chat.preamble(0), **members})) - len(GENERATION)
        assert opening > 0
        slots = list(zip(provider.calls, provider.calls[1:], strict=False))
        assert provider.compactions
        for before, after in slots:
            common = _common(before.tokens, after.tokens)
            assert common >= opening, "never from nothing"
            if after.is_compaction and flags is AFTER:
                assert common >= len(before.tokens) - len(GENERATION), "all of the turn"


# Whose cache it is


@MOMENTS
@pytest.mark.parametrize("salt", ["tenant-A", ["tenant-A", "user-1"]], ids=["a text", "a list"])
async def test_a_cache_salt_goes_along_and_is_part_of_whose_conversation_it_is(
    salt: object, flags: dict[str, Any], tmp_path: Path
) -> None:
    """LMCache/LMCache#2878. A list is how SGLang takes several."""
    other = "tenant-B" if isinstance(salt, str) else ["tenant-B", "user-1"]
    shared = {"prompt_cache_retention": "24h", "prompt_cache_key": "the same"}
    async with SimulatedProvider(window_tokens=10 * WINDOW) as provider, playing(tmp_path, provider, **flags) as player:
        chat = _Chat(player, members=lambda turn: {"cache_salt": salt, **shared})
        while not any(chat.applied):
            await chat.say()
        for call in provider.calls:
            assert call.raw.startswith(compact({"model": "demo-model", "cache_salt": salt, **shared})[:-1])
        (name,) = chat.sessions
        salted = {headers["x-warmfold-checkpoint"] for headers in chat.seen if "x-warmfold-checkpoint" in headers}
        for members in ({"cache_salt": other, **shared}, shared, {"cache_salt": None, **shared}):
            body = compact({"model": "demo-model", **members, "messages": [*chat.preamble(0), *chat.messages]})
            for headers in ({"x_warmfold_mode": "observe"}, {}):
                got = await player.post(body, **headers)
                await player.settled()
                assert got.headers["x-warmfold-session"] != name
                assert got.headers.get("x-warmfold-checkpoint") not in salted
        await chat.say()
        assert chat.seen[-1]["x-warmfold-checkpoint"] in salted
        assert chat.sessions == {name}
