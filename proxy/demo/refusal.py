"""Error answers, worded as OpenAI words them: clients and proxies match on the text and on the code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# The kinds of JSON values as OpenAI's messages call them.
_KINDS = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a decimal number",
    type(None): "null",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error answer: the fields of OpenAI's error object, and the status."""

    message: str
    param: str | None = None
    code: str | int | None = None
    status: int = 400
    type: str = "invalid_request_error"

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def missing(param: str) -> Refusal:
    """A required parameter is not there."""
    return Refusal(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")


def wrong_type(param: str, expected: str, found: object) -> Refusal:
    """A value of another kind than `expected` ("a string", "an array of objects")."""
    kind = _KINDS.get(type(found), type(found).__name__)
    noun = f"{kind} instead" if found is not None else "null instead"
    return Refusal(f"Invalid type for '{param}': expected {expected}, but got {noun}.", param, "invalid_type")


def empty_array(param: str) -> Refusal:
    """An array that needs at least one element."""
    text = "empty array. Expected an array with minimum length 1, but got an empty array instead."
    return Refusal(f"Invalid '{param}': {text}", param, "empty_array")


def unsupported(param: str, found: object, supported: Iterable[str]) -> Refusal:
    """A word outside a closed vocabulary."""
    *most, last = (f"'{word}'" for word in supported)
    choices = f"{', '.join(most)}, and {last}" if most else last
    return Refusal(f"Invalid value: '{found}'. Supported values are: {choices}.", param, "invalid_value")


def below(param: str, limit: int, found: int) -> Refusal:
    """An integer under its minimum."""
    text = f"integer below minimum value. Expected a value >= {limit}, but got {found} instead."
    return Refusal(f"Invalid '{param}': {text}", param, "integer_below_min_value")


def above(param: str, limit: int, found: int) -> Refusal:
    """An integer over its maximum."""
    text = f"integer above maximum value. Expected a value <= {limit}, but got {found} instead."
    return Refusal(f"Invalid '{param}': {text}", param, "integer_above_max_value")


def unknown(param: str) -> Refusal:
    """A parameter nobody has heard of."""
    return Refusal(f"Unknown parameter: '{param}'.", param, "unknown_parameter")


def unauthorized(given: bool) -> Refusal:
    """No key, or another one than required. The key given is not repeated: it is a credential."""
    if given:
        return Refusal("Incorrect API key provided.", None, "invalid_api_key", 401)
    text = (
        "You didn't provide an API key. You need to provide your API key in an Authorization header using Bearer auth."
    )
    return Refusal(text, None, None, 401)


def prompt_too_long(window: int, prompt: int, functions: int) -> Refusal:
    """The prompt alone fills the window. `functions`: the tokens of `prompt` that declare tools."""
    detail, what = "", "messages"
    if functions:
        detail, what = f" ({prompt - functions} in the messages, {functions} in the functions)", "messages or functions"
    text = (
        f"This model's maximum context length is {window} tokens. However, your messages resulted in {prompt} tokens"
        f"{detail}. Please reduce the length of the {what}."
    )
    return Refusal(text, "messages", "context_length_exceeded")


def request_too_long(window: int, prompt: int, functions: int, output: int) -> Refusal:
    """The prompt fits, but not together with the output that was asked for."""
    parts, what = f"{prompt} in the messages, {output} in the completion", "messages or completion"
    if functions:
        parts = f"{prompt - functions} in the messages, {functions} in the functions, and {output} in the completion"
        what = "messages, functions, or completion"
    text = (
        f"This model's maximum context length is {window} tokens. However, you requested {prompt + output} tokens "
        f"({parts}). Please reduce the length of the {what}."
    )
    return Refusal(text, "messages", "context_length_exceeded")


def output_too_long(param: str, limit: int, asked: int) -> Refusal:
    """More output than the model ever gives."""
    text = (
        f"{param} is too large: {asked}. This model supports at most {limit} completion tokens, "
        f"whereas you provided {asked}."
    )
    return Refusal(text, param, "invalid_value")
