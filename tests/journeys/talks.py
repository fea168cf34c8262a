"""Conversations of every shape that clients send, long enough to be compacted in a small window. The same name gives the same conversation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests import recorded
from tests.recorded import Step

Message = dict[str, Any]

TURNS = 20
_WORDS = [
    "the",
    "service",
    "reads",
    "its",
    "queue",
    "writes",
    "a",
    "line",
    "to",
    "the",
    "log",
    "and",
    "goes",
    "on",
    "with",
    "the",
    "next",
    "order",
    "in",
    "list",
    "while",
    "every",
    "worker",
    "checks",
    "what",
    "it",
    "has",
    "taken",
    "so",
    "that",
    "no",
    "order",
    "is",
    "lost",
    "when",
    "a",
    "worker",
    "stops",
    "in",
    "the",
    "middle",
    "of",
    "its",
    "work",
]

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
_TOOL = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS: list[Message] = [
    {"type": "function", "function": {"name": "read_file", "description": "Return a file.", "parameters": _TOOL}},
    {"type": "function", "function": {"name": "list_dir", "description": "Return what is in it.", "parameters": _TOOL}},
]


@dataclass(frozen=True)
class Talk:
    """A whole conversation as its client would write it down at the end, and what goes along with each request.

    `accepted`: whether OpenAI's rules allow it; a server whose template never raises takes them all. `prefilled`: each request ends with the start of
    its answer.
    """

    messages: Sequence[Message]
    members: Mapping[str, Any] = field(default_factory=dict)
    accepted: bool = True
    prefilled: bool = False

    def steps(self, *, stream: bool = False) -> list[Step]:
        """The requests, each with the answer it got."""
        found = list(recorded.steps({"messages": self.messages, "model": "demo-model"}, stream=stream))
        return [Step({**step.request, **self.members, "messages": self._sent(step)}, step.reply) for step in found]

    def _sent(self, step: Step) -> list[Message]:
        messages = list(step.request["messages"])
        if self.prefilled and step.reply is not None:
            messages.append({"role": "assistant", "content": step.reply["content"][:12]})
        return messages


def prose(seed: object, words: int) -> str:
    """Text that no two seeds share."""
    chance = random.Random(str(seed))
    told = [chance.choice(_WORDS) + "." * (at % 12 == 11) for at in range(words)]
    return f"({seed}) " + " ".join(told)


def user(at: object, words: int = 120, **more: Any) -> Message:
    """A user message."""
    return {"role": "user", "content": prose(f"user {at}", words), **more}


def assistant(at: object, words: int = 60, **more: Any) -> Message:
    """An answer in text."""
    return {"role": "assistant", "content": prose(f"answer {at}", words), **more}


def calling(*ids: str, name: str = "read_file", **more: Any) -> Message:
    """An answer that calls tools."""
    function = {"name": name, "arguments": '{"path": "src/parser.py"}'}
    calls = [{"id": id_, "type": "function", "function": dict(function)} for id_ in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


def result(id_: str, at: object, words: int = 90, **more: Any) -> Message:
    """What a tool gave back."""
    return {"role": "tool", "tool_call_id": id_, "content": prose(f"result {at}", words), **more}


SYSTEM: Message = {"role": "system", "content": "You are a careful assistant. Keep version 3.11 working."}


def _spoken(turn: Callable[[int], Iterator[Message]], first: Sequence[Message] = (SYSTEM,)) -> list[Message]:
    return [*first, *(message for at in range(TURNS) for message in turn(at))]


def _chat(at: int) -> Iterator[Message]:
    yield user(at)
    yield assistant(at)


def _tools(at: int) -> Iterator[Message]:
    yield user(at, 60)
    yield calling(f"call_{at:09d}")
    yield result(f"call_{at:09d}", at)
    yield assistant(at)


def _parallel(at: int) -> Iterator[Message]:
    """Three calls at once, their results in another order, then two more before the answer."""
    a, b, c, d, e = (f"call_{letter}_{at:07d}" for letter in "abcde")
    yield user(at, 40)
    yield calling(a, b, c)
    for id_ in (c, a, b):
        yield result(id_, (at, id_), 40)
    yield calling(d, e, content="Two more.")
    for id_ in (d, e):
        yield result(id_, (at, id_), 40)
    yield assistant(at, 30)


def _repeated(at: int) -> Iterator[Message]:
    """The same ids in every turn, in one turn several times."""
    yield user(at, 40)
    for step in range(3):
        yield calling("call_000000000", "call_000000001")
        yield result("call_000000001", (at, step, 1), 40)
        yield result("call_000000000", (at, step, 0), 40)
    yield assistant(at, 30)


def _legacy(at: int) -> Iterator[Message]:
    yield user(at, 40)
    for step in range(2):
        call = {"name": "read_file", "arguments": '{"path": "a"}'}
        yield {"role": "assistant", "content": None, "function_call": call}
        yield {"role": "function", "name": "read_file", "content": prose(("function", at, step), 60)}
    yield assistant(at, 30)


def _orphans(at: int) -> Iterator[Message]:
    """Results without a call (their client has cut its history), one of them twice, and a call that got none."""
    yield user(at, 60)
    yield result(f"gone_{at:09d}", at, 60)
    if at % 3 == 0:
        yield result(f"gone_{at:09d}", (at, "again"), 20)
    yield assistant(at, 40)
    if at % 4 == 0:
        yield user((at, "b"), 20)
        yield calling(f"lost_{at:09d}")


def _abandoned(at: int) -> Iterator[Message]:
    """Every call has the same id, and every second one is given up by its user before there is a result."""
    yield user(at, 50)
    yield calling("call_000000000")
    yield user((at, "stop"), 20)
    yield calling("call_000000000")
    yield result("call_000000000", at, 60)
    yield assistant(at, 40)


def _late(at: int) -> Iterator[Message]:
    """Tools that run for long: user and assistant talk on before the results are there."""
    a, b = f"call_a{at:08d}", f"call_b{at:08d}"
    yield user(at, 40)
    yield calling(a, b)
    yield result(a, (at, a), 30)
    yield user((at, "meanwhile"), 30)
    yield assistant((at, "meanwhile"), 20)
    yield user((at, "and"), 10)
    yield assistant((at, "and"), 10)
    yield result(b, (at, b), 30)
    yield assistant(at, 30)


def _without_ids(at: int) -> Iterator[Message]:
    """Calls and results that no id connects, as some servers give them."""
    yield user(at, 50)
    yield calling("", "")
    for step in range(2):
        yield {"role": "tool", "content": prose(("result", at, step), 50)}
    yield assistant(at, 30)


def _tool_parts(at: int) -> Iterator[Message]:
    """Calls and results as parts of messages, as Anthropic's API has them."""
    yield user(at, 60)
    call = {"type": "tool_use", "id": f"toolu_{at}", "name": "read_file", "input": {"path": "a"}}
    yield {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]}
    found = {"type": "tool_result", "tool_use_id": f"toolu_{at}", "content": prose(("result", at), 90)}
    yield {"role": "user", "content": [found]}
    if at % 2:
        yield assistant(at, 40)
        yield {"role": "user", "content": [{**found, "tool_use_id": f"gone_{at}"}, {"type": "text", "text": "Go on."}]}
    yield assistant(at, 40)


def _attachments(at: int) -> Iterator[Message]:
    kinds: list[Message] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}", "detail": "low"}},
        {"type": "input_audio", "input_audio": {"data": "UklGRiQAAABXQVZF" * 40, "format": "wav"}},
        {"type": "file", "file": {"filename": f"order-{at}.pdf", "file_data": "data:application/pdf;base64,JVBERi0x"}},
    ]
    parts = [{"type": "text", "text": prose(("look", at), 60)}, kinds[at % 3]]
    yield {"role": "user", "content": parts if at % 2 else parts[::-1]}
    yield assistant(at)


def _developer(at: int) -> Iterator[Message]:
    if at % 5 == 3:
        yield {"role": "developer", "content": f"From now on: never touch table {at}."}
    yield from _chat(at)


def _late_system(at: int) -> Iterator[Message]:
    yield user(at)
    if at % 3 == 1:
        yield {"role": "system", "content": f"Reminder {at}: answer in one sentence."}
    yield assistant(at)
    if at % 3 == 2:
        yield {"role": "system", "content": f"Notice {at}: build {at}00 is out."}


def _users_in_a_row(at: int) -> Iterator[Message]:
    for step in range(1 + at % 4):
        yield user((at, step), 60)
    yield assistant(at)


def _answers_in_a_row(at: int) -> Iterator[Message]:
    yield user(at, 80)
    for step in range(1 + at % 3):
        yield assistant((at, step), 50)


def _empty(at: int) -> Iterator[Message]:
    """Empty texts, empty parts, no content at all."""
    yield user(at, 80)
    if at % 3 == 0:
        yield assistant(at, content="")
        yield {"role": "user", "content": ""}
    call = calling(f"call_{at:09d}", content="" if at % 2 else None)
    if at % 4 == 1:
        del call["content"]
    yield call
    yield result(f"call_{at:09d}", at, content="" if at % 3 else prose(at, 60))
    yield {"role": "assistant", "content": [{"type": "text", "text": ""}]}
    yield {"role": "user", "content": [{"type": "text", "text": ""}]}
    yield assistant(at)


def _null(at: int) -> Iterator[Message]:
    """Null where OpenAI wants a text, and messages without any content."""
    yield user(at, 80)
    yield assistant(at, content=None)
    yield {"role": "user", "content": None} if at % 2 else {"role": "user"}
    yield assistant(at)


def _names(at: int) -> Iterator[Message]:
    yield user(at, 80, name=("ada", "grace", "user 3")[at % 3])
    yield calling(f"call_{at:09d}", name="list_dir")
    yield result(f"call_{at:09d}", at, 40, name="list_dir")
    yield assistant(at, name="coder")


def _refusals(at: int) -> Iterator[Message]:
    yield user(at)
    if at % 2:
        yield {"role": "assistant", "content": None, "refusal": prose(("no", at), 30)}
    else:
        yield {"role": "assistant", "content": [{"type": "refusal", "refusal": prose(("no", at), 30)}]}
    yield user((at, "then"), 40)
    yield assistant(at, refusal=None)


def _annotations(at: int) -> Iterator[Message]:
    yield user(at)
    cited = {"start_index": 0, "end_index": 9, "url": f"https://example.org/{at}", "title": "Orders"}
    yield assistant(at, annotations=[{"type": "url_citation", "url_citation": cited}], audio=None)


def _reasoning(at: int) -> Iterator[Message]:
    """Thoughts with each answer, and between the calls of one turn."""
    yield user(at, 60)
    yield calling(f"call_{at:09d}", reasoning_content=prose(("thought", at), 50))
    yield result(f"call_{at:09d}", at, 50)
    if at % 2:
        yield calling(f"call_b{at:08d}", reasoning_content=prose(("second thought", at), 30))
        yield result(f"call_b{at:08d}", (at, "b"), 30)
    yield assistant(at, 40, reasoning_content=prose(("last thought", at), 40))


def _thoughts_in_chat(at: int) -> Iterator[Message]:
    yield user(at)
    yield assistant(at, 40, reasoning_content=prose(("thought", at), 60))


def _details(at: int) -> Iterator[Message]:
    thought = [
        {"type": "reasoning.text", "text": prose(("thought", at), 20), "signature": "c2ln", "index": 0},
        {"type": "reasoning.encrypted", "data": "gAAAAABo" * 12, "id": f"rs_{at}", "format": "openai-responses-v1"},
    ]
    yield user(at, 80)
    yield calling(f"call_{at:09d}", reasoning=prose(("thought", at), 20), reasoning_details=thought)
    yield result(f"call_{at:09d}", at, 50)
    yield assistant(at, 40, reasoning_details=thought[:1])


def _signatures(at: int) -> Iterator[Message]:
    """Signed thoughts in parts and beside calls, as Gemini's compatible API gives them."""
    signed = {"google": {"thought_signature": "CpwBAXLI2nw" * 6}}
    yield user(at, 80)
    call = calling(f"call_{at:09d}")
    call["tool_calls"][0]["extra_content"] = signed
    yield call
    yield result(f"call_{at:09d}", at, 50)
    parts = [{"type": "text", "text": prose(("answer", at), 50), "thought_signature": "CpwBAXLI", "thought": False}]
    yield {"role": "assistant", "content": parts, "extra_content": signed}


def _unknown(at: int) -> Iterator[Message]:
    deep = {"x": [[{"": None}], 1.0, -0.0, 10**30, True], "y": {"z": "\u2028 \U0001f680"}}
    text = {"type": "text", "text": prose(("user", at), 80), "x_part": deep}
    yield {"x_first": deep, "role": "user", "x_mid": at, "content": [text], "x_last": None}
    call = calling(f"call_{at:09d}", x_call=deep)
    call["tool_calls"][0] |= {"x_unknown": deep}
    yield call
    yield result(f"call_{at:09d}", at, 40, x_result=deep, status="ok")
    yield assistant(at, 40, x_answer=deep)


def _marks(at: int) -> Iterator[Message]:
    yield {"role": "user", "content": [{"type": "text", "text": prose(("user", at), 100)}]}
    yield assistant(at)


def _one_turn(calls: int = 300) -> list[Message]:
    messages = [SYSTEM, {"role": "user", "content": "Fix the parser; never touch prod.db. " + prose("task", 40)}]
    for at in range(calls):
        messages += [calling(f"call_{at:09d}"), result(f"call_{at:09d}", at, 40)]
    return [*messages, assistant("end")]


def giants(words: int, turns: int = 10) -> Talk:
    """Every second user message, and every third answer, alone takes a large part of the window."""
    messages = [SYSTEM]
    for at in range(turns):
        messages += [user(at, words if at % 2 == 0 else 20), assistant(at, words if at % 3 == 1 else 20)]
    return Talk([*messages, user("end", 20)])


_AGENT = {"tools": TOOLS}

TALKS: Mapping[str, Talk] = {
    "chat": Talk(_spoken(_chat)),
    "no system": Talk(_spoken(_chat, ())),
    "tools": Talk(_spoken(_tools), {**_AGENT, "tool_choice": "auto", "parallel_tool_calls": False}),
    "parallel calls": Talk(_spoken(_parallel), _AGENT),
    "repeated ids": Talk(_spoken(_repeated), _AGENT),
    "legacy functions": Talk(_spoken(_legacy), {"functions": [tool["function"] for tool in TOOLS]}),
    "results without calls": Talk(_spoken(_orphans), _AGENT, accepted=False),
    "calls given up": Talk(_spoken(_abandoned), _AGENT, accepted=False),
    "late results": Talk(_spoken(_late), _AGENT, accepted=False),
    "calls without ids": Talk(_spoken(_without_ids), _AGENT, accepted=False),
    "calls as parts": Talk(_spoken(_tool_parts), _AGENT, accepted=False),
    "300 calls in one user turn": Talk(_one_turn(), _AGENT),
    "images, sounds, files": Talk(_spoken(_attachments)),
    "developer": Talk(_spoken(_developer, ({"role": "developer", "content": "Formatting re-enabled."}, SYSTEM))),
    "system in the middle": Talk(_spoken(_late_system)),
    "users in a row": Talk(_spoken(_users_in_a_row)),
    "answers in a row": Talk(_spoken(_answers_in_a_row)),
    "prefill": Talk(_spoken(_chat), prefilled=True),
    "empty contents": Talk(_spoken(_empty), _AGENT),
    "null contents": Talk(_spoken(_null), accepted=False),
    "names": Talk(_spoken(_names), _AGENT),
    "refusals": Talk(_spoken(_refusals)),
    "annotations": Talk(_spoken(_annotations)),
    "thoughts": Talk(_spoken(_reasoning), _AGENT),
    "thoughts in chat": Talk(_spoken(_thoughts_in_chat)),
    "reasoning details": Talk(_spoken(_details), _AGENT),
    "thought signatures": Talk(_spoken(_signatures), _AGENT),
    "unknown fields": Talk(
        _spoken(_unknown), {**_AGENT, "x_top": {"deep": [10**30, 0.5, None]}, "metadata": {"a": "b"}}
    ),
    "cache marks": Talk(_spoken(_marks)),
}
