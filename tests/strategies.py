"""Conversations of every shape that clients send, in JSON spelled in every way that is allowed.

Hypothesis chooses which messages there are, so that a failure shrinks to few of them. How they are filled and spelled comes from a
seed: drawing each blank from hypothesis would cost more than the test. Seed 0 spells as `json.dumps` does, without blanks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from hypothesis import strategies as st

Message = dict[str, Any]


class Literal(str):
    """A value that is written as it stands: a number in a form of its own, or JSON that `dict` cannot hold (a key twice)."""

    __slots__ = ()


class Twice(dict[str, Any]):
    """An object in which one key stands twice: with `first` in front, and as the dict has it behind that, where most parsers take it from."""

    def __init__(self, value: dict[str, Any], first: tuple[str, Any]) -> None:
        super().__init__(value)
        self.first = first


NUMBERS = tuple(
    Literal(n) for n in ("1", "1.0", "1e0", "-0", "0.1", "18446744073709551616", "9007199254740993", "7" * 400, "1e400")
)

TEXTS = (
    "",
    "ok",
    "Fix the failing test in src/app.py, please. It fails since commit 3f2504e.",
    "再看一遍这个文件，然后告诉我哪里错了。",
    "😀🚀 👩‍👩‍👧 é ß",
    'say "no\\yes"\n\ttabbed / slashed\r\n',
    "</checkpoint_summary> <think> </think>",
    "<|endoftext|><|im_start|>system",
    ']}, {"role":"user","content":[',
    "\u2028\u0000\x7f\x1f",
    "word " * 120,
)

GIANTS = ("All of the log: " + "line 7 of 9, 12 ms\n" * 800, "日志" * 5_000, "iVBORw0KGgoAAAANSUhEUg" * 500 + '"\\/')
"""Texts that take a large part of a small window."""

_SHOWN_BYTES = 20_000

_EDGE_CHARS = 400
"""Of a long text only its two ends are spelled oddly: each character drawn costs more than the rest of a test."""

_SURROGATE = re.compile("[\ud800-\udfff]")
LONE_SURROGATES = ("half \ud83d of a pair", "\udc00\ud800")


class Spelling:
    """Writes JSON: blanks, escapes and the order of keys as the seed has it."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed) if seed else None
        self._escapes = self._random.choice((0.0, 0.0, 0.05, 0.5)) if self._random else 0.0
        self._airy = self._random.random() < 0.7 if self._random else False

    def blank(self) -> str:
        """White space, often none."""
        if self._random is None or not self._airy:
            return ""
        return self._random.choice(("", "", "", " ", "\n  ", "\t", "\r\n"))

    def value(self, value: object) -> str:
        """Any value as JSON, without blanks around it."""
        if isinstance(value, Literal):
            return str(value)
        if isinstance(value, str):
            return self._string(value)
        if isinstance(value, dict):
            items = self._ordered(value)
            if isinstance(value, Twice):
                items = [value.first, *items]
            return self.members([(key, self.value(inner)) for key, inner in items])
        if isinstance(value, list):
            return self.elements([self.value(inner) for inner in value])
        return json.dumps(value)

    def members(self, members: Sequence[tuple[str, str]]) -> str:
        """An object of members whose values are spelled already."""
        spelled = (
            f"{self.blank()}{self._string(key)}{self.blank()}:{self.blank()}{raw}{self.blank()}" for key, raw in members
        )
        return "{" + (",".join(spelled) or self.blank()) + "}"

    def elements(self, elements: Sequence[str]) -> str:
        """A list of elements that are spelled already."""
        return "[" + (",".join(f"{self.blank()}{raw}{self.blank()}" for raw in elements) or self.blank()) + "]"

    def _ordered(self, value: dict[str, Any]) -> list[tuple[str, Any]]:
        items = list(value.items())
        if self._random is not None:
            self._random.shuffle(items)
        return items

    def _string(self, text: str) -> str:
        if self._random is None and not _SURROGATE.search(text):
            return json.dumps(text, ensure_ascii=False)
        if len(text) > 2 * _EDGE_CHARS:
            inner = text[_EDGE_CHARS:-_EDGE_CHARS]
            start, end = ("".join(map(self._character, part)) for part in (text[:_EDGE_CHARS], text[-_EDGE_CHARS:]))
            return f'"{start}{json.dumps(inner, ensure_ascii=False)[1:-1]}{end}"'
        return '"' + "".join(self._character(c) for c in text) + '"'

    def _character(self, char: str) -> str:
        chance = self._random.random() if self._random and self._escapes else 1.0
        if char == "/" and chance < 0.5:
            return "\\/"
        if "\ud800" <= char <= "\udfff" or chance < self._escapes:
            units = char.encode("utf-16-be", "surrogatepass")
            return "".join(f"\\u{int.from_bytes(units[i : i + 2], 'big'):04x}" for i in range(0, len(units), 2))
        return json.dumps(char, ensure_ascii=False)[1:-1]


def spelled(value: object, seed: int = 0) -> bytes:
    """A value as JSON bytes."""
    return Spelling(seed).value(value).encode()


class _Talk:
    """A conversation in the making: each step adds messages, filled from the random source."""

    def __init__(self, random: Random, texts: Sequence[str]) -> None:
        self.random = random
        self.texts = texts
        self.messages: list[Any] = []
        self.waiting: list[tuple[str, str]] = []
        self.answered: list[tuple[str, str]] = []

    def text(self) -> str:
        return self.random.choice(self.texts)

    def add(self, message: Message) -> None:
        """Put the message down, now and then with fields that nobody asked for."""
        extra = self.random.random()
        if extra < 0.1:
            message["x_unknown"] = {"n": self.random.choice(NUMBERS), "deep": [[{"": None}]]}
        elif extra < 0.2:
            message["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
        elif extra < 0.3 and message["role"] == "assistant":
            message["reasoning_content"] = self.text()
        elif extra < 0.4:
            message["name"] = self.text()
        self.messages.append(message)

    def identify(self) -> str:
        """A call's id: real logs use the same one again."""
        return self.random.choice(("call_0", "a1", "a2", "b1", f"call_{len(self.messages)}", ""))

    def parts(self) -> list[Any]:
        """Content as parts, not all of them text."""
        choices: list[Any] = [
            {"type": "text", "text": self.text()},
            {"type": "text", "text": self.text(), "cache_control": {"type": "ephemeral"}},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo=", "detail": "low"}},
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png?x=1&y=[2]"}},
            {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
            {"type": "file", "file": {"file_id": "file-1"}},
            {"type": "file", "file": {"filename": "order 7.pdf", "file_data": "data:application/pdf;base64,JVBERi0x"}},
            {"type": "text", "text": self.text(), "annotations": []},
        ]
        return [self.random.choice(choices) for _ in range(self.random.randint(0, 3))]

    def call(self, ids: Sequence[str]) -> None:
        message: Message = {
            "role": "assistant",
            "content": self.random.choice((None, "", self.text())),
            "tool_calls": [
                {"id": i, "type": "function", "function": {"name": "read", "arguments": '{"path": "a.py", "n": 1.0}'}}
                for i in ids
            ],
        }
        if self.random.random() < 0.3:
            del message["content"]
        if self.random.random() < 0.3:
            message |= {"refusal": None, "audio": None}
        self.add(message)
        self.waiting += [("tool", i) for i in ids]

    def result(self, kind: str, name: str) -> None:
        content = self.random.choice((self.text(), [{"type": "text", "text": self.text()}]))
        if kind == "tool":
            self.add({"role": "tool", "tool_call_id": name, "content": content})
        elif kind == "function":
            self.add({"role": "function", "name": name, "content": self.text()})
            self.messages[-1]["name"] = name
        else:
            part = {"type": "tool_result", "tool_use_id": name, "content": content}
            self.add({"role": "user", "content": [part]})

    def answer(self) -> None:
        """A result of some call that waits, not always of the newest; where none waits, one that nobody asked for."""
        if not self.waiting:
            self.result("tool", self.identify())
            return
        found = self.waiting.pop(self.random.choice((0, -1)))
        self.answered.append(found)
        self.result(*found)


def _user(talk: _Talk) -> None:
    talk.add({"role": "user", "content": talk.text()})


def _user_parts(talk: _Talk) -> None:
    talk.add({"role": "user", "content": talk.parts()})


def _user_odd(talk: _Talk) -> None:
    talk.add({"role": "user", "content": talk.random.choice((None, "", []))})
    if talk.random.random() < 0.3:
        del talk.messages[-1]["content"]


def _assistant(talk: _Talk) -> None:
    talk.add({"role": "assistant", "content": talk.random.choice((talk.text(), talk.text(), talk.parts()))})


def _call(talk: _Talk) -> None:
    talk.call([talk.identify()])


def _batch(talk: _Talk) -> None:
    talk.call([talk.identify() for _ in range(talk.random.randint(2, 3))])


def _result(talk: _Talk) -> None:
    talk.answer()


def _results(talk: _Talk) -> None:
    while talk.waiting:
        talk.answer()


def _again(talk: _Talk) -> None:
    talk.result(*(talk.random.choice(talk.answered) if talk.answered else ("tool", "a1")))


def _legacy_call(talk: _Talk) -> None:
    name = talk.random.choice(("look", "read"))
    talk.add({"role": "assistant", "content": None, "function_call": {"name": name, "arguments": "{}"}})
    talk.waiting.append(("function", name))


def _tool_use(talk: _Talk) -> None:
    name = talk.identify()
    part = {"type": "tool_use", "id": name, "name": "read", "input": {"path": "a.py"}}
    talk.add({"role": "assistant", "content": [{"type": "text", "text": talk.text()}, part]})
    talk.waiting.append(("anthropic", name))


def _system(talk: _Talk) -> None:
    content = talk.random.choice((talk.text(), [{"type": "text", "text": talk.text()}]))
    talk.add({"role": talk.random.choice(("system", "developer")), "content": content})


def _exchange(talk: _Talk) -> None:
    _user(talk)
    _assistant(talk)


def _work(talk: _Talk) -> None:
    talk.random.choice((_call, _batch))(talk)
    _results(talk)


def _agent(talk: _Talk) -> None:
    """One user message and a row of calls behind it."""
    _user(talk)
    for _ in range(talk.random.randint(3, 6)):
        _work(talk)


def _giant(talk: _Talk) -> None:
    """A single message as large as a file, from anybody."""
    text = talk.random.choice(GIANTS)
    kind = talk.random.choice(("user", "parts", "assistant", "result"))
    if kind == "result":
        talk.call([talk.identify()])
        talk.answer()
        talk.messages[-1]["content"] = text
    elif kind == "parts":
        talk.add({"role": "user", "content": [*talk.parts(), {"type": "text", "text": text}]})
    else:
        talk.add({"role": kind, "content": text})


def _refusal(talk: _Talk) -> None:
    no = talk.text()
    if talk.random.random() < 0.5:
        talk.add({"role": "assistant", "content": None, "refusal": no})
    else:
        talk.add({"role": "assistant", "content": [{"type": "refusal", "refusal": no}]})


def _cited(talk: _Talk) -> None:
    """An answer with what a provider puts beside its text: sources, a sound of it."""
    source = {"start_index": 0, "end_index": 4, "url": "https://example.org/", "title": talk.text()}
    beside = {"annotations": [{"type": "url_citation", "url_citation": source}], "audio": {"id": "audio_1"}}
    talk.add({"role": "assistant", "content": talk.text(), "refusal": None, **beside})


def _thoughts(talk: _Talk) -> None:
    """Thoughts in each place where providers put them, with a call as often as with an answer."""
    details = [
        {"type": "reasoning.text", "text": talk.text(), "signature": "c2ln", "index": 0},
        {"type": "reasoning.encrypted", "data": "gAAAAABo" * 3, "id": "rs_1", "format": "openai-responses-v1"},
    ]
    beside: Message = talk.random.choice(
        (
            {"reasoning_content": talk.text()},
            {"reasoning": talk.text(), "reasoning_details": details},
            {"reasoning_details": details[1:]},
            {"extra_content": {"google": {"thought_signature": "CpwBAXLI2nw" * 3}}},
        )
    )
    parts = [{"type": "thinking", "thinking": talk.text(), "signature": "ErUB"}, {"type": "text", "text": talk.text()}]
    if talk.random.random() < 0.5:
        talk.call([talk.identify()])
        talk.messages[-1]["tool_calls"][0]["extra_content"] = {"google": {"thought_signature": "CpwB"}}
        talk.messages[-1] |= beside
        _results(talk)
    else:
        talk.add({"role": "assistant", "content": talk.random.choice((talk.text(), parts)), **beside})


def _custom(talk: _Talk) -> None:
    """A call of a tool that takes a text instead of JSON."""
    name = talk.identify()
    custom = {"name": "patch", "input": '*** Begin "Patch"\n+\\x\n'}
    talk.add({"role": "assistant", "content": None, "tool_calls": [{"id": name, "type": "custom", "custom": custom}]})
    talk.waiting.append(("tool", name))
    talk.answer()


def _started(talk: _Talk) -> None:
    """The start of an answer that the model is to go on with; most clients put it last."""
    talk.add({"role": "assistant", "content": "Well, ", "prefix": True})


STEPS: tuple[Callable[[_Talk], None], ...] = (
    *(_user, _exchange, _work, _work, _exchange, _assistant, _user_parts, _user_odd, _call, _batch, _result, _results),
    *(_again, _legacy_call, _tool_use, _system),
    *(_agent, _giant, _refusal, _cited, _thoughts, _thoughts, _custom, _started),
)


def _doubled(talk: _Talk, message: Message) -> Message:
    """The message with a key twice: one of its own, or one inside of it."""
    calls, content = message.get("tool_calls"), message.get("content")
    if calls and talk.random.random() < 0.4:
        return {**message, "tool_calls": [Twice(calls[0], ("id", talk.identify())), *calls[1:]]}
    if isinstance(content, list) and content and talk.random.random() < 0.4:
        return {**message, "content": [Twice(content[0], ("type", "text")), *content[1:]]}
    key = talk.random.choice([key for key in message if key != "role"] or ["role"])
    other = {"tool_calls": [], "tool_call_id": talk.identify(), "name": "look", "content": talk.text()}
    return Twice(message, (key, other.get(key)))


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat completion request. `elements` are its messages as spelled in `body`, without the blanks around them; `messages` the same
    as values. `members` are the request's members in order: key and spelled value.
    """

    body: bytes
    preamble_length: int
    messages: tuple[Any, ...]
    elements: tuple[bytes, ...]
    members: tuple[tuple[str, bytes], ...]

    @property
    def conversation(self) -> tuple[Any, ...]:
        """The messages behind the preamble."""
        return self.messages[self.preamble_length :]

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What hypothesis shows of a failure: the body, which tells all the rest, and of a long one its start."""
        more = f" ... {len(self.body)} bytes" if len(self.body) > _SHOWN_BYTES else ""
        printer.text(f"Chat({self.body[:_SHOWN_BYTES]!r}{more}, preamble_length={self.preamble_length})")


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Reads a file / 读取文件",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"z": {"const": None}, "a": {"anyOf": [{"$ref": "#/$defs/m"}], "maximum": NUMBERS[5]}},
                "additionalProperties": False,
            },
        },
    }
]

# What clients send beside the messages; the last ones are unknown to us.
MEMBERS: dict[str, tuple[Any, ...]] = {
    "model": ("gpt-4o-mini", "", "claude-3/opus"),
    "tools": (TOOLS, []),
    "tool_choice": ("auto", "none", "required", {"type": "function", "function": {"name": "read"}}),
    "parallel_tool_calls": (False,),
    "stream": (True, False),
    "stream_options": ({"include_usage": True}, {"include_usage": False}),
    "n": (1, 2),
    "temperature": (NUMBERS[1], NUMBERS[2]),
    "max_tokens": (16, 200000),
    "max_completion_tokens": (5,),
    "stop": (["\n\n"], "END"),
    "logprobs": (True,),
    "top_logprobs": (5,),
    "response_format": ({"type": "json_object"},),
    "presence_penalty": (Literal("0.5"),),
    "logit_bias": ({"50256": -100},),
    "store": (True,),
    "metadata": ({"id": Literal("123456789012345678901234567890")},),
    "seed": (NUMBERS[6],),
    "reasoning_effort": ("high",),
    "cache_salt": ("tenant-A",),
    "prompt_cache_key": ("conversation 7",),
    "guided_json": ({"type": "object"},),
    "chat_template_kwargs": ({"thinking": True},),
    "x_huge": (NUMBERS[7],),
    'an "odd" key/é': ([1, [2, {"": {}}]],),
    "thinking": ({"type": "enabled", "budget_tokens": 1024},),
}

SEEDS = st.one_of(st.just(0), st.integers(1, 2**32 - 1))
"""A spelling; shrinks to the plain one."""


def conversations(
    *, min_steps: int = 1, max_steps: int = 8, surrogates: bool = False, doubled: bool = False
) -> st.SearchStrategy[list[Any]]:
    """Messages of a conversation without its preamble, as values. `doubled`: in some of them a key stands twice."""

    def build(steps: list[Callable[[_Talk], None]], seed: int, texts: list[str]) -> list[Any]:
        talk = _Talk(Random(seed), (*TEXTS, *texts, *(LONE_SURROGATES if surrogates else ())))
        for step in steps:
            step(talk)
        if doubled:
            return [_doubled(talk, message) if talk.random.random() < 0.3 else message for message in talk.messages]
        return talk.messages

    steps = st.lists(st.sampled_from(STEPS), min_size=min_steps, max_size=max_steps)
    return st.builds(build, steps, st.integers(0, 2**32 - 1), st.lists(st.text(max_size=12), max_size=2))


PREAMBLES: st.SearchStrategy[list[Message]] = st.sampled_from(
    (
        [],
        [{"role": "system", "content": "You write code. It is 12:00:01."}],
        [{"role": "system", "content": [{"type": "text", "text": "Rules", "cache_control": {"type": "ephemeral"}}]}],
        [{"role": "system", "content": "One"}, {"role": "developer", "content": "Two", "name": "dev"}],
        [{"role": "developer", "content": ""}, {"role": "system"}],
    )
)


@st.composite
def marathons(draw: st.DrawFn, *, most: int = 300) -> Chat:
    """An agent at work: hundreds of calls, many of them parallel, on a single user message. There may be talk before it and behind it."""
    rounds = draw(st.integers(100, most))

    def build(before: list[Any], seed: int) -> list[Any]:
        random = Random(seed)
        talk = _Talk(random, TEXTS[:6])
        talk.messages += before
        _user(talk)
        unique = random.random() < 0.5
        for at in range(rounds):
            ids = [f"call_{at}_{i}" if unique else f"call_{i}" for i in range(random.choice((1, 1, 1, 2, 3)))]
            talk.call(ids)
            _results(talk)
        for step in random.choices((_assistant, _exchange, _call), k=random.randint(0, 2)):
            step(talk)
        return talk.messages

    before = conversations(min_steps=0, max_steps=3)
    messages = _behind_a_preamble(draw(st.builds(build, before, st.integers(0, 2**32 - 1))))
    preamble = draw(PREAMBLES)
    return chat([*preamble, *messages], len(preamble), draw(SEEDS))


def _behind_a_preamble(messages: list[Any]) -> list[Any]:
    while messages and messages[0]["role"] in ("system", "developer"):
        messages = messages[1:]
    return messages or [{"role": "user", "content": "Hello"}]


@st.composite
def chats(draw: st.DrawFn, *, min_steps: int = 1, max_steps: int = 8, doubled: bool = False) -> Chat:
    """Whole requests; the conversation has at least one message and none of the preamble's roles comes first in it."""
    messages = _behind_a_preamble(draw(conversations(min_steps=min_steps, max_steps=max_steps, doubled=doubled)))
    preamble = draw(PREAMBLES)
    return chat([*preamble, *messages], len(preamble), draw(SEEDS))


def chat(messages: Sequence[Any], preamble_length: int, seed: int) -> Chat:
    """The request with these messages; what stands around them comes from the seed as well."""
    random = Random(seed)
    spelling = Spelling(seed)
    elements = [spelling.value(m) for m in messages]
    keys = [key for key in MEMBERS if key == "model" or (seed and random.random() < 0.3)]
    if seed:
        random.shuffle(keys)
    keys.insert(random.randint(0, len(keys)) if seed else len(keys), "messages")
    members = [
        (key, spelling.elements(elements) if key == "messages" else spelling.value(random.choice(MEMBERS[key])))
        for key in keys
    ]
    body = spelling.blank() + spelling.members(members) + spelling.blank()
    return Chat(
        body.encode(),
        preamble_length,
        tuple(messages),
        tuple(e.encode() for e in elements),
        tuple((key, raw.encode()) for key, raw in members),
    )


@st.composite
def pieces(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """The bytes cut anywhere: whole, byte by byte, or at random places."""
    if not data:
        return [b""] * draw(st.integers(0, 2))
    how = draw(st.sampled_from(("random", "whole", "bytes")))
    if how == "whole":
        return [data]
    if how == "bytes":
        return [data[i : i + 1] for i in range(len(data))]
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def damaged(data: bytes, at: int, what: bytes) -> bytes:
    """The bytes with one of them replaced by others (none: removed)."""
    if not data:
        return what
    at %= len(data)
    return data[:at] + what + data[at + 1 :]


DAMAGE = st.tuples(
    st.integers(0, 10_000),
    st.one_of(st.binary(max_size=3), st.sampled_from((b'"', b"{", b"}", b"]", b",", b":", b"\\", b"\x00", b"\xff"))),
)
"""Where and by what `damaged` breaks something."""
