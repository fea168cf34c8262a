"""What other software took for a summary although it was none, and what its summaries lost; each test a fault that somebody shipped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.core import checkpoint
from proxy.core.checkpoint import Rejected, Summary
from proxy.core.model import Because
from proxy.core.replay import HEADINGS
from proxy.demo.calls import Call, Forced
from proxy.demo.provider import SimulatedProvider
from proxy.demo.summariser import GenericProse, Says
from tests.faults.summaries import SUMMARY, WINDOW, Summaries, completion, flags, history, work
from tests.journeys.played import FRAME
from tests.journeys.player import playing
from tests.journeys.talks import SYSTEM, Message, assistant, prose, user
from tests.journeys.test_shapes import Client

pytestmark = pytest.mark.filterwarnings("error")

THOUGHT = "First I list what the user wants: canary-thought. Then the files. "


async def attempted(
    tmp_path: Path, *answers: Forced | None, stream: bool = False, members: Mapping[str, Any] | None = None
) -> tuple[list[Call], dict[str, Any]]:
    """Turns above the watermark while compaction calls are answered like this: those calls, and the session as it is shown then.

    What never changes: the client is answered, and no thought gets into a request.
    """
    async with SimulatedProvider(window_tokens=WINDOW) as provider, playing(tmp_path, provider, **flags()) as player:
        provider.on_call = Summaries(*answers)
        client = Client(player, stream=stream)
        client.members |= members or {}
        client.messages = history(5900)[:-1]
        for turn in range(5):
            await client.say(prose(("user", turn), 30))
        shown = await client.shown()
        summary = await player.admin(f"/sessions/{client.session}/summary")
        assert ("text" in summary) is bool(shown["checkpoints"])
        assert not any(b"canary-thought" in call.raw for call in provider.calls)
        assert "canary-thought" not in json.dumps([shown, summary])
        if not shown["checkpoints"]:
            assert not any(FRAME in call.raw for call in provider.calls)
        return provider.compactions, {**shown, "summary": summary.get("text")}


# Unfinished


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("finish", "because", "calls"),
    [
        pytest.param("length", "truncated", 2, id="length"),
        pytest.param("max_tokens", "truncated", 2, id="max_tokens"),
        pytest.param("content_filter", "filtered", 1, id="content_filter"),
        pytest.param("error", "unfinished", 2, id="error"),
        pytest.param("tool_calls", "tool_call", 2, id="tool_calls"),
    ],
)
async def test_a_summary_that_did_not_come_to_its_end_is_none(
    finish: str, because: str, calls: int, stream: bool, tmp_path: Path
) -> None:
    """earendil-works/pi#7048: a 200 with text."""
    asked, shown = await attempted(tmp_path, completion(SUMMARY, finish), stream=stream)
    assert [(line["outcome"], line["because"]) for line in shown["journal"]] == [("failed", because)]
    assert shown["checkpoints"] == []
    assert len(asked) == calls


@pytest.mark.parametrize("finish", [None, ..., "", "some_new_word"], ids=["null", "missing", "empty", "unknown"])
@pytest.mark.parametrize("whole", [True, False])
async def test_without_a_finish_reason_the_form_decides(finish: object, whole: bool, tmp_path: Path) -> None:
    """earendil-works/pi#7048: a text under the headings that were asked for is taken, any other is not."""
    text = SUMMARY if whole else "The user wants the order import rebuilt, and so far the reader is do" * 4
    asked, shown = await attempted(tmp_path, completion(text, finish))
    if whole:
        assert shown["summary"] == SUMMARY
        assert len(asked) == 1
    else:
        assert [line["because"] for line in shown["journal"]] == ["unfinished"]
        assert len(asked) == 2


# Thoughts

REASONING = [
    pytest.param({"content": None, "reasoning_content": THOUGHT * 40}, "length", "truncated", id="no content, cut by length"),
    pytest.param({"content": "", "reasoning_content": THOUGHT * 40}, "stop", "empty", id="empty content"),
    pytest.param({"content": None, "reasoning_content": THOUGHT}, "stop", "empty", id="no content"),
    pytest.param({"content": " \n", "reasoning": THOUGHT}, "stop", "empty", id="blanks, and thoughts in another field"),
    pytest.param({"content": "", "reasoning_details": [{"type": "reasoning.text", "text": THOUGHT}]}, "stop", "empty", id="thoughts as details"),
    pytest.param({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": THOUGHT}]}]}, "stop", "empty", id="thoughts as a part"),
    pytest.param({"reasoning_content": THOUGHT}, "stop", "empty", id="content missing"),
    pytest.param({"content": f"<think>{THOUGHT}"}, "stop", "empty", id="a block that does not end"),
    pytest.param({"content": f"<think>{THOUGHT}</think>\n"}, "stop", "empty", id="only a block"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("message", "finish", "because"), REASONING)
async def test_thoughts_are_no_summary(
    message: dict[str, Any], finish: str, because: str, stream: bool, tmp_path: Path
) -> None:
    """Martian-Engineering/lossless-claw#877 and open-webui/open-webui#27604."""
    asked, shown = await attempted(tmp_path, completion(message, finish), stream=stream)
    assert [line["because"] for line in shown["journal"]] == [because]
    assert shown["checkpoints"] == []
    assert len(asked) == 2
    assert not any(call.streamed for call in asked)


async def test_a_stream_that_nobody_asked_for_is_no_summary(tmp_path: Path) -> None:
    """open-webui/open-webui#27604: only thoughts, then the end; some gateways stream whatever was asked."""
    chunk = {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"reasoning_content": THOUGHT}}]}
    body = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for _ in range(9)) + b"data: [DONE]\n\n"
    streamed = Forced(headers={"Content-Type": "text/event-stream"}, body=body)
    asked, shown = await attempted(tmp_path, streamed, stream=True)
    assert shown["checkpoints"] == []
    assert len(asked) == 1


@pytest.mark.parametrize("key", ["max_tokens", "max_completion_tokens"])
async def test_who_was_cut_off_gets_more_room_the_second_time(key: str, tmp_path: Path) -> None:
    """Martian-Engineering/lossless-claw#877: within the window, and once."""
    thoughts_only = completion({"content": None, "reasoning_content": THOUGHT * 40}, "length")
    asked, shown = await attempted(tmp_path, thoughts_only, completion(), members={key: 50})
    first, second = (json.loads(call.raw)[key] for call in asked)
    assert first == WINDOW // 8
    assert second > first * 4 // 3
    assert asked[1].prompt_tokens + second <= WINDOW
    assert json.loads(asked[0].raw) == {**json.loads(asked[1].raw), key: first}
    assert shown["summary"] == SUMMARY


QUOTING = "## Task and intent\nStrip the model's thoughts.\n## State of the work\nThe output is\n"
BLOCKS = [
    pytest.param(f"<think>{THOUGHT}</think>{SUMMARY}", SUMMARY, id="a block in front"),
    pytest.param(f"\n<Thinking>\n{THOUGHT}\n</Thinking>\n\n{SUMMARY}\n", SUMMARY, id="another tag"),
    pytest.param(f"[THINK]{THOUGHT}[/THINK]{SUMMARY}", SUMMARY, id="brackets"),
    pytest.param(f"<seed:think>{THOUGHT}</seed:think>{SUMMARY}", SUMMARY, id="a tag with a prefix"),
    pytest.param(f"\u25c1think\u25b7{THOUGHT}\u25c1/think\u25b7{SUMMARY}", SUMMARY, id="triangles"),
    pytest.param(f"{THOUGHT}</think>{SUMMARY}", SUMMARY, id="opened by the template"),
    pytest.param(f"{THOUGHT} Headings: {'; '.join(HEADINGS)}.</think>{SUMMARY}", SUMMARY, id="thoughts about the headings"),
    pytest.param(f"{THOUGHT} I look at `a.py`.\n</think>\n{SUMMARY}", SUMMARY, id="opened by the template, with code"),
    pytest.param(f"<think>{THOUGHT} I may not write `</think>` here.</think>{SUMMARY}", SUMMARY, id="a block that quotes its end"),
    pytest.param(f"<think>{THOUGHT}<think>deep</think>{THOUGHT}</think>{SUMMARY}", SUMMARY, id="a block in a block"),
    pytest.param(f"Here it is.\n<think>{THOUGHT}</think>\n{SUMMARY}", SUMMARY, id="a word before it"),
    *(
        pytest.param(f"{front}{QUOTING}{quoted}\n## Next steps\nTest it.", f"{QUOTING}{quoted}\n## Next steps\nTest it.", id=name + where)
        for where, front in (("", ""), (" behind a block", f"<think>{THOUGHT}</think>"), (" behind an end", f"{THOUGHT}</think>"))
        for name, quoted in (
            ("a fence with a block", "```\n<think>a</think>b\n```"),
            ("a fence with a start", "```\n<think>\n```"),
            ("a fence with an end", "```\n</think>\n```"),
            ("a fence of tildes", "~~~\n</think>\n~~~"),
            ("an end in the middle of a sentence", "where </think> stands alone."),
            ("a block in the middle of a sentence", "what <think>a</think> holds."),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "payload"), BLOCKS)
def test_thoughts_go_and_the_rest_stays_as_it_is(text: str, payload: str) -> None:
    """QwenLM/qwen-code#11988."""
    answer = json.loads(completion(text).body)
    assert checkpoint.summary_of(answer) == Summary(payload)


@pytest.mark.parametrize(
    "text",
    [
        f"<think>{THOUGHT}{SUMMARY}",
        f"<think>{THOUGHT}</think>",
        f"<think>{THOUGHT}</think>\n<think>{SUMMARY}",
        f"<reasoning>{SUMMARY}</think>",
        f"{THOUGHT}</think> \n",
    ],
)
def test_thoughts_alone_or_without_end_are_nothing(text: str) -> None:
    """QwenLM/qwen-code#11988."""
    answer = json.loads(completion(text).body)
    assert checkpoint.summary_of(answer) == Rejected(Because.EMPTY)


async def test_a_summary_behind_thoughts_is_in_force(tmp_path: Path) -> None:
    """QwenLM/qwen-code#11988."""
    asked, shown = await attempted(tmp_path, completion(f"<think>{THOUGHT}</think>\n\n{SUMMARY}"))
    assert shown["summary"] == SUMMARY
    assert len(asked) == 1


# Sizes


@pytest.mark.parametrize(("words", "taken"), [(9000, False), (4200, False), (2000, True)])
async def test_a_summary_that_does_not_shorten_is_not_used(words: int, taken: bool, tmp_path: Path) -> None:
    """google-gemini/gemini-cli#7047: about 6,000 tokens are covered; then nobody asks again for a while."""
    text = "## Task and intent\n" + "word " * words
    async with (
        SimulatedProvider(window_tokens=40_000, summariser=Says(text)) as provider,
        playing(tmp_path, provider, **flags(16_000, trigger_ratio=0.5, keep_recent_tokens=2000)) as player,
    ):
        client = Client(player)
        client.messages = history(7900)[:-1]
        for turn in range(8):
            got = await client.say(prose(("user", turn), 40))
            sent = json.loads(provider.turns[-1].raw)["messages"]
            assert (sent == client.messages[:-1]) is not ("x-warmfold-checkpoint" in got.headers)
        shown = await client.shown()
        (line,) = shown["journal"]
        assert (line["outcome"], line["because"]) == (("committed", "") if taken else ("failed", "inflated"))
        assert shown["counters"]["failures"] == (0 if taken else 1)
        assert ("x-warmfold-checkpoint" in got.headers) is taken
        assert len(provider.compactions) == 1


async def test_once_the_request_would_not_fit_one_that_shortens_it_at_all_is_asked_for(tmp_path: Path) -> None:
    """The pause after a summary that was too long is for the calls beside the conversation."""
    text = "## Task and intent\n" + "word " * 4200
    async with (
        SimulatedProvider(window_tokens=40_000, summariser=Says(text)) as provider,
        playing(tmp_path, provider, **flags(16_000, trigger_ratio=0.5, keep_recent_tokens=2000)) as player,
    ):
        client = Client(player)
        client.messages = history(7900)[:-1]
        note, turn = "none", 0
        while note == "none":
            turn += 1
            assert turn < 60
            note = (await client.say(prose(("user", turn), 400))).headers["x-warmfold-compaction"]
        assert note == "inline"
        assert len(provider.compactions) == 2
        taken, refused = (await client.shown())["journal"]
        assert (refused["trigger"], refused["because"]) == ("soft", "inflated")
        assert (taken["trigger"], taken["outcome"], taken["strategy"]) == ("guard", "committed", "replay")
        # One that would not even do that is paid for once.
        provider.settings = replace(provider.settings, summariser=Says(text * 4))
        for more in range(30):
            await client.say(prose(("more", more), 400))
        failed = [line["because"] for line in (await client.shown())["journal"] if line["outcome"] == "failed"]
        assert failed == ["truncated", "inflated"]
        assert len(provider.compactions) == 4


# What the user said


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


CONSTRAINT = "NEVER touch prod.db; deliver report as CSV"


@pytest.mark.parametrize(
    "place", ["the first message", "as parts", "behind the first", "a developer's", "in a long text"]
)
async def test_the_task_and_its_rules_are_still_there_after_200_calls(place: str, tmp_path: Path) -> None:
    """brcampidelli/chimera-agent#60: the summariser mentions none of it."""
    openings: dict[str, list[Message]] = {
        "the first message": [{"role": "user", "content": CONSTRAINT}],
        "as parts": [{"role": "user", "content": _parts(CONSTRAINT)}],
        "behind the first": [user("hello", 10), assistant("hello", 10), {"role": "user", "content": CONSTRAINT}],
        "a developer's": [user("hello", 10), {"role": "developer", "content": CONSTRAINT}],
        "in a long text": [{"role": "user", "content": f"{prose('a', 400)}\n{CONSTRAINT}.\n{prose('b', 400)}"}],
    }
    async with (
        SimulatedProvider(window_tokens=WINDOW, summariser=GenericProse()) as provider,
        playing(tmp_path, provider, **flags()) as player,
    ):
        messages = [SYSTEM, *openings[place]]
        seen = await work(player, messages, 200)
        checkpoints = {headers["x-warmfold-checkpoint"] for headers in seen if "x-warmfold-checkpoint" in headers}
        assert len(checkpoints) >= 3
        for call, headers in zip(provider.turns, seen, strict=True):
            if "x-warmfold-checkpoint" in headers:
                assert CONSTRAINT.encode() in call.raw
        assert all(CONSTRAINT not in str(call.answer) for call in provider.compactions)
        assert all(call.status == 200 for call in provider.calls)


REMINDER = f"<system-reminder>\nContents of RULES.md: {prose('rules', 1700)}\n</system-reminder>"
GOAL = "Fix bug #12"


@pytest.mark.parametrize(
    "opening",
    [
        pytest.param([REMINDER, GOAL], id="an injected message in front"),
        pytest.param([GOAL, REMINDER], id="an injected message behind"),
        pytest.param([REMINDER, REMINDER.replace("RULES", "STYLE"), GOAL], id="two in front"),
        pytest.param([[*_parts(REMINDER), *_parts(GOAL)]], id="an injected part in front"),
        pytest.param([[*_parts(GOAL), *_parts(REMINDER)]], id="an injected part behind"),
    ],
)
async def test_the_goal_and_what_a_client_put_before_it_both_stay(opening: list[Any], tmp_path: Path) -> None:
    """stacklok/mecatl#145."""
    assert len(REMINDER) > 8000
    async with (
        SimulatedProvider(window_tokens=WINDOW, summariser=GenericProse()) as provider,
        playing(tmp_path, provider, **flags()) as player,
    ):
        messages = [SYSTEM, *({"role": "user", "content": content} for content in opening)]
        while len(provider.compactions) < 3:
            await work(player, messages, 4)
            assert len(messages) < 500
        await work(player, messages, 1)
        sent = json.loads(provider.turns[-1].raw)["messages"]
        (framed,) = [str(message["content"]) for message in sent if FRAME.decode() in str(message)]
        assert GOAL in framed
        assert "RULES.md" in framed
        assert all(call.status == 200 for call in provider.calls)
