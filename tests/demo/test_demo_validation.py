"""What the provider accepts and what it refuses, by table."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.demo.validation import Strictness, fault

SYSTEM = {"role": "system", "content": "s"}
USER = {"role": "user", "content": "u"}
ASSISTANT = {"role": "assistant", "content": "a"}
TOOL = {"type": "function", "function": {"name": "read_file", "parameters": {"type": "object"}}}
URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}


def call(id: str, **more: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "read_file", "arguments": "{}"}, **more}


def calls(*ids: str) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call(id) for id in ids]}


def result(id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": "r"}


def body(*messages: object, **parameters: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **parameters}


ACCEPTED = {
    "plain": body(SYSTEM, USER),
    "no system": body(USER),
    "developer and a late system message": body({"role": "developer", "content": "d"}, USER, SYSTEM, USER),
    "the same role twice": body(USER, USER, ASSISTANT, ASSISTANT),
    "ends on an assistant message": body(USER, ASSISTANT),
    "parts": body({"role": "user", "content": [{"type": "text", "text": "look"}, URL]}),
    "audio and file": body(
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}}]},
        {"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]},
    ),
    "one call": body(USER, calls("a"), result("a"), USER),
    "parallel calls answered in another order": body(USER, calls("a", "b"), result("b"), result("a")),
    "ids used again in a later turn": body(USER, calls("a"), result("a"), calls("a"), result("a")),
    "calls with a text": body(USER, calls("a") | {"content": "let me see"}, result("a")),
    "calls without content": body(USER, {"role": "assistant", "tool_calls": [call("a")]}, result("a")),
    "a call without its type": body(
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": call("a")["function"]}]},
        result("a"),
    ),
    "a custom tool": body(
        USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "n", "input": "i"}}],
        },
        result("a"),
    ),
    "legacy function call": body(
        USER,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "r"},
    ),
    "tool result as parts": body(USER, calls("a"), result("a") | {"content": [{"type": "text", "text": "r"}]}),
    "refused": body(USER, {"role": "assistant", "content": None, "refusal": "no"}, USER),
    "tools": body(USER, tools=[TOOL], tool_choice="auto", parallel_tool_calls=False),
    "limits": body(USER, max_tokens=1, n=2, stream=True, stream_options={"include_usage": True}),
    "null parameters": body(USER, max_tokens=None, tools=None, tool_choice=None, n=None, stream_options=None),
    "unheard-of fields": body(USER | {"cache_control": {"type": "ephemeral"}}, top_k=5),
    "reasoning sent back": body(USER, ASSISTANT | {"reasoning_content": "hm"}, USER),
    "empty text": body({"role": "user", "content": ""}),
}

# name: (request, a piece of the message, param, code)
REFUSED: dict[str, tuple[object, str, str | None, str | int | None]] = {
    "no object": ([], "JSON object", None, None),
    "no model": ({"messages": [USER]}, "must provide a model", None, None),
    "no messages": ({"model": "m"}, "Missing required parameter: 'messages'", "messages", "missing_required_parameter"),
    "messages a string": (
        {"model": "m", "messages": "hi"},
        "Invalid type for 'messages': expected an array of objects, but got a string instead.",
        "messages",
        "invalid_type",
    ),
    "messages empty": (body(), "empty array", "messages", "empty_array"),
    "message a string": (body("hi"), "expected an object", "messages[0]", "invalid_type"),
    "no role": (body({"content": "u"}), "Missing required parameter", "messages[0].role", "missing_required_parameter"),
    "unknown role": (
        body({"role": "bot", "content": "u"}),
        "Supported values are: 'system'",
        "messages[0].role",
        "invalid_value",
    ),
    "user without content": (
        body({"role": "user", "content": None}),
        "expected a string, got null",
        "messages.[0].content",
        None,
    ),
    "assistant without anything": (body(USER, {"role": "assistant"}), "got null", "messages.[1].content", None),
    "tool result null": (
        body(USER, calls("a"), result("a") | {"content": None}),
        "got null",
        "messages.[2].content",
        None,
    ),
    "content a number": (
        body({"role": "user", "content": 5}),
        "string or array",
        "messages[0].content",
        "invalid_type",
    ),
    "content empty": (body({"role": "user", "content": []}), "empty array", "messages[0].content", "empty_array"),
    "part without type": (
        body({"role": "user", "content": [{"text": "u"}]}),
        "Missing",
        "messages[0].content[0].type",
        "missing_required_parameter",
    ),
    "part of an unknown type": (
        body({"role": "user", "content": [{"type": "hologram"}]}),
        "Supported values are: 'text'",
        "messages[0].content[0].type",
        "invalid_value",
    ),
    "text part without text": (
        body({"role": "user", "content": [{"type": "text"}]}),
        "Missing",
        "messages[0].content[0].text",
        "missing_required_parameter",
    ),
    "image from the assistant": (
        body(USER, {"role": "assistant", "content": [URL]}),
        "Image URLs are only allowed for messages with role 'user'",
        "messages[1]",
        "invalid_value",
    ),
    "result of no call": (
        body(USER, result("a")),
        "must be a response to a preceeding message",
        "messages.[1].role",
        None,
    ),
    "result of another call": (
        body(USER, calls("a"), result("b")),
        "not found in 'tool_calls'",
        "messages.[2].tool_call_id",
        None,
    ),
    "result twice": (
        body(USER, calls("a"), result("a"), result("a")),
        "Duplicate value",
        "messages.[3].tool_call_id",
        None,
    ),
    "result too late": (
        body(USER, calls("a", "b"), result("a"), USER, result("b")),
        "did not have response messages: b",
        "messages.[1].role",
        None,
    ),
    "call unanswered at the end": (
        body(USER, calls("a", "b"), result("b")),
        "response messages: a",
        "messages.[1].role",
        None,
    ),
    "call unanswered by the user": (body(USER, calls("a"), USER), "response messages: a", "messages.[1].role", None),
    "result without an id": (
        body(USER, calls("a"), {"role": "tool", "content": "r"}),
        "Missing",
        "messages[2].tool_call_id",
        "missing_required_parameter",
    ),
    "no calls": (
        body(USER, {"role": "assistant", "content": "a", "tool_calls": []}),
        "empty array",
        "messages[1].tool_calls",
        "empty_array",
    ),
    "call without an id": (
        body(USER, {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {}}]}),
        "Missing",
        "messages[1].tool_calls[0].id",
        "missing_required_parameter",
    ),
    "arguments an object": (
        body(
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call("a", function={"name": "f", "arguments": {}})]},
        ),
        "expected a string, but got an object",
        "messages[1].tool_calls[0].function.arguments",
        "invalid_type",
    ),
    "function result without a name": (
        body(USER, {"role": "function", "content": "r"}),
        "Missing",
        "messages[1].name",
        "missing_required_parameter",
    ),
    "max_tokens zero": (body(USER, max_tokens=0), "Expected a value >= 1", "max_tokens", "integer_below_min_value"),
    "max_tokens true": (body(USER, max_tokens=True), "expected an integer", "max_tokens", "invalid_type"),
    "max_completion_tokens a string": (
        body(USER, max_completion_tokens="9"),
        "got a string",
        "max_completion_tokens",
        "invalid_type",
    ),
    "both limits": (
        body(USER, max_tokens=5, max_completion_tokens=5),
        "same time",
        "max_completion_tokens",
        "invalid_parameter_combination",
    ),
    "n zero": (body(USER, n=0), "Expected a value >= 1", "n", "integer_below_min_value"),
    "n large": (body(USER, n=129), "Expected a value <= 128", "n", "integer_above_max_value"),
    "stream a string": (body(USER, stream="yes"), "expected a boolean", "stream", "invalid_type"),
    "stream_options without stream": (
        body(USER, stream_options={}),
        "only allowed when 'stream'",
        "stream_options",
        None,
    ),
    "no tools": (body(USER, tools=[]), "empty array", "tools", "empty_array"),
    "tools an object": (body(USER, tools={}), "expected an array", "tools", "invalid_type"),
    "tool without type": (body(USER, tools=[{}]), "Missing", "tools[0].type", "missing_required_parameter"),
    "tool without function": (
        body(USER, tools=[{"type": "function"}]),
        "Missing",
        "tools[0].function",
        "missing_required_parameter",
    ),
    "tool with a bad name": (
        body(USER, tools=[{"type": "function", "function": {"name": "read file"}}]),
        "does not match pattern",
        "tools[0].function.name",
        "invalid_value",
    ),
    "tool_choice without tools": (body(USER, tool_choice="auto"), "only allowed when 'tools'", "tool_choice", None),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    assert fault(ACCEPTED[name]) is None


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    request, message, param, code = REFUSED[name]
    found = fault(request)
    assert found is not None
    assert message in found.message
    assert (found.param, found.code, found.status, found.type) == (param, code, 400, "invalid_request_error")


@pytest.mark.parametrize(
    ("messages", "accepted"),
    [
        ([USER], True),
        ([SYSTEM, USER, ASSISTANT, USER], True),
        ([USER, USER], False),
        ([SYSTEM, ASSISTANT], False),
        ([SYSTEM, SYSTEM, USER], False),
        ([USER, ASSISTANT, SYSTEM], False),
        ([USER, calls("a"), result("a")], False),
    ],
)
def test_alternating_templates(messages: list[dict[str, Any]], accepted: bool) -> None:
    found = fault(body(*messages), Strictness.ALTERNATING)
    assert (found is None) is accepted
    if found is not None:
        assert "conversation roles must alternate" in found.message


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([USER, calls("a"), result("a")], None),
        ([USER, calls("a"), result("a"), ASSISTANT, USER], None),
        ([USER, USER], None),
        ([USER, calls("a"), result("a"), USER], "Unexpected role 'user' after role 'tool'"),
        ([USER, ASSISTANT], "Expected last role User or Tool"),
    ],
)
def test_mistral_templates(messages: list[dict[str, Any]], message: str | None) -> None:
    found = fault(body(*messages), Strictness.MISTRAL)
    assert (found.message[: len(message)] if found and message else found) == message


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (body(USER, top_k=5), "top_k"),
        (
            body(USER, {"role": "assistant", "content": None, "tool_calls": [call("a", index=0)]}, result("a")),
            "messages[1].tool_calls[0].index",
        ),
    ],
)
def test_what_the_reference_does_not_name_is_refused_only_where_asked(request_: dict[str, Any], param: str) -> None:
    assert fault(request_) is None
    found = fault(request_, known_only=True)
    assert found is not None
    assert (found.param, found.code) == (param, "unknown_parameter")
