"""A coding agent's conversation, generated: the same number gives the same conversation, another number one that shares no beginning with it."""

from __future__ import annotations

import json
import random
from typing import Any, Final

Message = dict[str, Any]

_PARTS: Final = (
    "parser",
    "lexer",
    "cache",
    "router",
    "session",
    "ledger",
    "importer",
    "scheduler",
    "report",
    "billing",
)
_VERBS: Final = ("read", "write", "merge", "split", "check", "load", "close", "count", "sort", "trim")
_THINGS: Final = ("rows", "tokens", "lines", "orders", "pages", "blocks", "keys", "dates", "users", "totals")
_WISHES: Final = (
    "{file} returns one item too many when the input is empty. Please find out why.",
    "Please rename {name} to {other} everywhere in {file}; the old name must keep working until version {version}.",
    "The test for {name} fails on Tuesdays only. Look at {file} and tell me what depends on the date.",
    "{file} got slow since build {build}. It must stay under {limit} ms for 10,000 {things}. What do you suggest?",
    "Add a check to {name} in {file}: never accept more than {limit} {things} at once, and say so in the error.",
)
_REPLIES: Final = (
    "In {file} the loop of {name} runs to the end of the list, one step too far. I changed the bound and added a case for empty input.",
    "{name} is called from three places. I moved the check into {file}, so that all of them get it; build {build} passes.",
    "The cause is in {file}: {name} sorts its {things} on every call. Sorting once saves about {limit} ms. Nothing else had to change.",
    "Done. {other} is the new name, and {name} still works with a warning until version {version}. I left the tests of {file} as they were.",
)
_LINES: Final = (
    "def {name}({things}: list[str], limit: int = {limit}) -> int:",
    "    if not {things}:\n        return 0",
    "    for index, item in enumerate({things}):",
    '        log.debug("{name}: %s of %d", item, limit)',
    "        total += {other}(item) if index < limit else 0  # see issue {build}",
    '    raise ValueError(f"too many {things}: {{len({things})}}, at most {limit}")',
    "    return total",
    'assert {name}(["a", "b"]) == {limit}, "{file} line {build}"',
)


def tools() -> list[Message]:
    """Three tools, as an agent declares them."""
    path = {"type": "string", "description": "Path below the project's root."}
    words = {"type": "string", "description": "Words to look for, literally."}
    return [
        _tool("read_file", "Return the text of a file with line numbers.", {"path": path}),
        _tool("search", "Return the lines below a path that contain the words.", {"path": path, "words": words}),
        _tool("run_tests", "Run the tests of one file and return what failed.", {"path": path}),
    ]


def _tool(name: str, description: str, properties: Message) -> Message:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class Conversation:
    """Messages without end. `result_lines`: length of the longest tool result; the shortest has three."""

    def __init__(self, number: int, result_lines: int = 14) -> None:
        self._random = random.Random(number)
        self._number = number
        self._result_lines = result_lines
        self._calls = 0

    def system(self) -> Message:
        """The system message. It starts with the conversation's number: nothing of another one is cached."""
        rules = "Answer in a few words. Never edit a file that you have not read. Keep version 3.11 working."
        return {"role": "system", "content": f"Session {self._number}. You are a careful programmer. {rules}"}

    def user(self) -> Message:
        """What the user asks for."""
        return {"role": "user", "content": self._filled(self._random.choice(_WISHES))}

    def work(self) -> list[Message]:
        """The agent's way to an answer: one or two tool calls with their results, then a reply."""
        messages: list[Message] = []
        for _ in range(self._random.randint(1, 2)):
            messages += self._call()
        return [*messages, self.reply()]

    def reply(self) -> Message:
        """The agent's answer to the user."""
        return {"role": "assistant", "content": self._filled(self._random.choice(_REPLIES))}

    def _call(self) -> list[Message]:
        self._calls += 1
        id_ = f"call_{self._number}_{self._calls}"
        asked = self._random.choice(tools())["function"]
        arguments = {
            name: self._filled("{file}" if name == "path" else "{name}") for name in asked["parameters"]["properties"]
        }
        call = {"id": id_, "type": "function", "function": {"name": asked["name"], "arguments": json.dumps(arguments)}}
        lines = [self._filled(self._random.choice(_LINES)) for _ in range(self._random.randint(3, self._result_lines))]
        return [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": id_, "content": "\n".join(lines)},
        ]

    def _filled(self, template: str) -> str:
        choice = self._random.choice
        part, verb, thing = choice(_PARTS), choice(_VERBS), choice(_THINGS)
        return template.format(
            file=f"src/{part}/{verb}_{thing}.py",
            name=f"{verb}_{thing}",
            other=f"{choice(_VERBS)}_{choice(_THINGS)}",
            things=thing,
            version=f"{self._random.randint(2, 9)}.{self._random.randint(0, 20)}",
            build=self._random.randint(1000, 9999),
            limit=self._random.randint(2, 500),
        )
