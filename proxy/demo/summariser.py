"""What the simulated model answers when it is asked to condense a conversation: well, badly, late or not at all.

Each summariser is a plain function of the request: the same request, the same summary.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from proxy.core.replay import HEADINGS
from proxy.core.replay import OPENING as REPLAY_OPENING
from proxy.demo.answers import FACT, Answer, plain
from proxy.demo.template import Request, message_text

TRANSCRIPT_OPENING = "You summarise conversations"
"""How the system prompt of the demo's transcript summariser starts."""
_ENTRY = '<entry sequence="'

_SPEAKER = re.compile(r"^(System|User|Assistant|Tool Result|Tool Error)\b[^:\n]*: ?", re.MULTILINE)
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_CONSTRAINT = re.compile(r"\b(never|always|must|do not|don't|only)\b", re.IGNORECASE)
_ABOUT_ITSELF = "do not acknowledge this note"
"""In every checkpoint message; a model that took it for the user's wish would pass it on for ever."""
_TASK = re.compile(rf"## {HEADINGS[0]}\n(.*?)\n+## ", re.DOTALL)
_PATH = re.compile(r"(?<![\w/])(?:[\w.-]+/)+[\w-]+\.\w+")
_MAX_CONSTRAINTS, _MAX_PATHS, _MAX_ERRORS = 24, 30, 5


@dataclass(frozen=True, slots=True)
class Summary:
    """The outcome of a compaction request: an answer after `delay_s` seconds, or an error status."""

    answer: Answer = field(default_factory=Answer)
    status: int = 200
    delay_s: float = 0.0


Summariser = Callable[[Request], Summary]


def is_compaction(request: Request) -> bool:
    """Whether a request asks for a summary: by replay, by the product's transcript or by that of the demo."""
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        return False
    last = messages[-1]
    text = message_text(last)
    if last.get("role") == "user" and (text.startswith(REPLAY_OPENING) or _ENTRY in text):
        return True
    return message_text(messages[0]).startswith(TRANSCRIPT_OPENING)


@dataclass(frozen=True, slots=True)
class IdealSummariser:
    """Loses nothing that it was shown: all facts, the user's constraints and what an earlier checkpoint held, under the fixed headings."""

    def __call__(self, request: Request) -> Summary:
        return Summary(Answer(text=_checkpoint(request, facts(request))))


@dataclass(frozen=True, slots=True)
class RandomThird:
    """A forgetful model: a third of the facts, which ones decided by `seed`."""

    seed: int = 0

    def __call__(self, request: Request) -> Summary:
        known = facts(request)
        kept = set(random.Random(self.seed).sample(sorted(known), len(known) // 3))
        return Summary(Answer(text=_checkpoint(request, {key: value for key, value in known.items() if key in kept})))


@dataclass(frozen=True, slots=True)
class GenericProse:
    """A small model's summary: fluent, and without a single fact."""

    def __call__(self, request: Request) -> Summary:
        text = (
            f"## {HEADINGS[0]}\nThe user asked for help with a task and the assistant worked on it step by step, reading several "
            f"files and running the tests where that was useful.\n\n## {HEADINGS[3]}\nGood progress was made over "
            f"{len(request['messages'])} messages.\n\n## {HEADINGS[7]}\nGo on with the task as the user described it."
        )
        return Summary(Answer(text=text))


@dataclass(frozen=True, slots=True)
class Says:
    """Always the same text: a refusal, an error in prose, something far too long."""

    text: str

    def __call__(self, request: Request) -> Summary:
        return Summary(Answer(text=self.text))


@dataclass(frozen=True, slots=True)
class Empty:
    """Finishes without a word."""

    def __call__(self, request: Request) -> Summary:
        return Summary(Answer(text=""))


@dataclass(frozen=True, slots=True)
class Echo:
    """Repeats the instruction instead of following it."""

    def __call__(self, request: Request) -> Summary:
        return Summary(Answer(text=message_text(request["messages"][-1])))


@dataclass(frozen=True, slots=True)
class CallsTool:
    """Goes on with the work instead of condensing it: calls the first tool of the request."""

    def __call__(self, request: Request) -> Summary:
        tools = request.get("tools") or [{"function": {"name": "none"}}]
        call = {
            "id": "call_0",
            "type": "function",
            "function": {"name": tools[0]["function"]["name"], "arguments": "{}"},
        }
        return Summary(Answer(tool_calls=(call,), finish_reason="tool_calls"))


@dataclass(frozen=True, slots=True)
class Truncated:
    """Cut off by the token limit in the middle of the ideal summary."""

    def __call__(self, request: Request) -> Summary:
        text = _checkpoint(request, facts(request))
        return Summary(Answer(text=text[: len(text) // 2], finish_reason="length"))


@dataclass(frozen=True, slots=True)
class Dead:
    """Answers with an error status."""

    status: int = 500

    def __call__(self, request: Request) -> Summary:
        return Summary(status=self.status)


@dataclass(frozen=True, slots=True)
class Slow:
    """Does what `then` does, `seconds` later."""

    seconds: float
    then: Summariser = field(default_factory=IdealSummariser)

    def __call__(self, request: Request) -> Summary:
        return replace(self.then(request), delay_s=self.seconds)


def facts(request: Request) -> dict[str, str]:
    """Every KEY = value in the conversation that a compaction request shows; of two statements the later one."""
    found: dict[str, str] = {}
    for _, text in _shown(request):
        for key, value in FACT.findall(text):
            found[key] = plain(value)
    return found


def _shown(request: Request) -> Iterator[tuple[str, str]]:
    """What there is to condense: role and text of each message, instruction and system prompt left out."""
    messages = request["messages"]
    last = message_text(messages[-1])
    if last.startswith(REPLAY_OPENING) and _ENTRY not in last:
        for message in messages[:-1]:
            if message["role"] not in {"system", "developer"}:
                calls = [call.get("function", {}).get("arguments", "") for call in message.get("tool_calls") or ()]
                yield message["role"], "\n".join([message_text(message), *calls])
        return
    pieces = _SPEAKER.split(last)
    yield "transcript", pieces[0]
    for speaker, text in zip(pieces[1::2], pieces[2::2], strict=True):
        yield speaker.partition(" ")[0].lower(), text


def _checkpoint(request: Request, known: dict[str, str]) -> str:
    shown = list(_shown(request))
    said = [text for role, text in shown if role in {"user", "transcript"}]
    everything = [text for _, text in shown]
    results = [text for role, text in shown if role == "tool"]
    sections = (
        [_task(said)],
        _bullets(_constraints(said))[:_MAX_CONSTRAINTS],
        ["None beyond the constraints."],
        [f"{len(shown)} messages so far, {len(results)} of them results of tools."],
        [*_bullets(f"{key} = {value}" for key, value in known.items()), *_bullets(_paths(everything))],
        _bullets(_errors(results)),
        ["None."],
        ["Go on with the newest request of the user."],
    )
    parts = [f"## {title}\n" + ("\n".join(lines) or "None.") for title, lines in zip(HEADINGS, sections, strict=True)]
    return "\n\n".join(parts)


def _task(said: list[str]) -> str:
    earlier = next((match[1] for text in said if (match := _TASK.search(text))), None)
    first = next((text for text in said if text.strip()), "")
    return earlier or " ".join(_SENTENCE.split(first)[:2])


def _constraints(said: list[str]) -> Iterator[str]:
    for text in said:
        for sentence in _SENTENCE.split(text):
            if _CONSTRAINT.search(sentence) and len(sentence) <= 240 and _ABOUT_ITSELF not in sentence:
                yield sentence.strip().removeprefix("- ")


def _paths(texts: list[str]) -> list[str]:
    return list(dict.fromkeys(path for text in texts for path in _PATH.findall(text)))[-_MAX_PATHS:]


def _errors(results: list[str]) -> list[str]:
    lines = [line.strip()[:160] for text in results for line in text.splitlines() if "Error: " in line]
    return list(dict.fromkeys(lines))[-_MAX_ERRORS:]


def _bullets(lines: Iterable[str]) -> list[str]:
    return [f"- {line}" for line in dict.fromkeys(lines)]
