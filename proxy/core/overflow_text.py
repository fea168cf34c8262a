"""What a provider's sentence says of a prompt that exceeded the context window: whether it did, and the numbers in it.

Every provider has its own sentence. A rate limit, an output limit and a limit in bytes are no overflow: no shorter prompt cures the first
two, and the third is no size of a window.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_MAX_TOKENS = 1_000_000_000
"""More than any window has: a number beyond it counts something else."""


@dataclass(frozen=True, slots=True)
class Overflow:
    """The prompt did not fit. `limit`, `requested`: tokens as stated, above 0; None where it does not say.

    `limit` is the whole window, prompt and output, unless `input_only`: then it is what the prompt alone may have, and the window may be
    larger. `requested` is the prompt alone: None where only its sum with the output was stated, or a lower bound ("at least").
    """

    limit: int | None
    requested: int | None
    input_only: bool


UNNUMBERED = Overflow(None, None, input_only=False)

# All patterns read lower case with single spaces. Every gap in them is bounded, so that the time is linear in the text.
_NUMBER = r"\d[\d,]{0,15}"


def _pattern(text: str) -> re.Pattern[str]:
    """`<name>` stands for a number that is kept under that name, `#` for one that is not."""
    return re.compile(re.sub(r"<(\w+)>", r"(?P<\1>#)", text).replace("#", _NUMBER))


# Sentences that weigh a prompt against a limit: nothing else is said in these words. "total" includes the output, "over" is by how much
# the limit was exceeded.
_OF_THE_WINDOW = (
    # OpenAI, Azure, DeepSeek, OpenRouter, vLLM, SGLang
    r"maximum context length is <limit> tokens\b.{0,40}?\bresulted in <prompt> tokens",
    r"maximum context length (?:is|of) <limit> tokens\b.{0,60}?\brequested (?:about |a total of )?<total> tokens",
    r"maximum context length is <limit> tokens\b.{0,80}?\b(?:prompt|request) (?:contains|has|resolved to) <prompt> (?:input )?tokens",
    r"maximum context length is <limit> tokens\b.{0,80}?\bprompt contains (?:at least )?# (?:input tokens|characters)",
    r"resulted in <prompt> tokens,? (?:but )?(?:the )?(?:maximum|limit) (?:is |of )?<limit>",
    # vLLM, SGLang, Together, llama.cpp
    r"(?:input|prompt|request)(?: length)? \(?(?:length )?<prompt>(?: tokens)?\)? "
    r"(?:plus the number of requested output tokens .{0,20})?(?:exceeds|is (?:longer|larger) than) (?:the )?"
    r"(?:(?:model'?s|available|max|maximum) ){0,3}(?:context (?:length|size|window)|model length|max_model_len)(?: of)? \(?<limit>",
    r"max_tokens must be at least 1, got -(?!1\b)#",  # vLLM: what the prompt left of the window. -1 is a client's "no limit"
    r"prompt is too long: <prompt> tokens > <limit> maximum",  # Anthropic, Bedrock
    r"exceed context limit: <prompt> \+ <output> > <limit>",
    r"prompt is too long: <prompt>, model maximum context length: <limit>",  # Fireworks
    r"prompt contains <prompt> tokens\b.{0,60}?\btoo large for model with <limit> maximum context length",  # Mistral
    r"current length is <prompt> while limit is <limit>",  # Cerebras
    r"prompt_tokens \(<prompt>\) must be less than max_seq_len \(<limit>\)",  # SiliconFlow
    r"\bn_keep: <prompt> ?>= ?n_ctx: <limit>",  # LM Studio
    r"keep the first <prompt> tokens\b.{0,80}?\bcontext length of only <limit> tokens",
    r"prompt has <prompt> tokens?, but the configured context size is <limit>",
    r"exceeded model token limit: <limit> \(requested: <total>\)",  # Moonshot
    r"inputs\W? tokens \+ \W?max_new_tokens\W? must be <= <limit>\. given: <prompt> \W?inputs\W? tokens and <output>",  # TGI
    r"size limit exceeded by <over> tokens\b.{0,80}?\blimit for this model is <limit>",  # Cohere
    r"maximum context length of \S{1,100} is <limit>\b.{0,60}?\bwill take <total> tokens",  # SambaNova
)
_OF_THE_INPUT = (
    # Gemini, SGLang's memory, OpenRouter's Poolside, Copilot
    r"(?:input|prompt)(?: length| token count)?(?: of)? \(?<prompt>(?: tokens)?\)? exceeds (?:the )?"
    r"(?:maximum number of tokens allowed|maximum allowed (?:input )?length|limit)(?: of)? \(?<limit>",
    r"maximum prompt length is <limit> but the request contains <prompt> tokens",  # xAI
    r"message \(<prompt> tokens\) exceeds budget \(<limit> tokens\)",
    r"input tokens exceed the configured limit of <limit> tokens\b.{0,40}?\bresulted in <prompt> tokens",  # OpenAI
    r"cannot truncate to <limit>, required <prompt>",  # Google AI Studio
    r"max input tokens: <limit>, request input token count: <prompt>",  # Bedrock
    r"sum of prompt length \(<prompt>(?:\.0)?\).{0,60}?\bnot exceed max_num_tokens \(<limit>\)",  # TensorRT-LLM
    r"inputs\W? must have less than <limit> tokens\. given: <prompt>",  # TGI
    r"input too long: <prompt> input tokens, limit is <limit>",
)
_SENTENCES = (
    *((_pattern(text), False) for text in _OF_THE_WINDOW),
    *((_pattern(text), True) for text in _OF_THE_INPUT),
)
"""Each with whether its limit is the input's alone."""

# These are said of too long a prompt and of too large an output: they count where the output is not what it is about.
_LIMITS = (
    (_pattern(r"maximum context (?:length|limit)(?: is| of)?:? \(?<limit>"), False),
    (_pattern(r"exceeded model token limit: <limit>"), False),
    (_pattern(r"range of input length should be \[1, ?<limit>\]"), True),  # Qwen
    (_pattern(r"input token count exceeds the maximum number of tokens allowed \(?<limit>"), True),
    (_pattern(r"input tokens exceed the configured limit of <limit>"), True),
    (_pattern(r"maximum (?:input|prompt) length is <limit> tokens"), True),
)

CODE = (
    r"context_length_exceeded|context_?window_?exceeded(?:error)?|model_context_window_exceeded|exceed_context_size_error"
    r"|too_many_prompt_tokens|too_many_tokens|input_too_large|prompt_too_long"
)
"""Codes and types that mean nothing else. Of OpenAI, LiteLLM, Z.AI and Anthropic, llama.cpp, Perplexity, Cohere, xAI."""

_PHRASE = re.compile(
    r"\b(?:prompt|input|conversation|context|messages)(?: [a-z]{1,20}){0,2} too long\b"
    r"|(?:\bexceed(?:s|ed|ing)?|(?:longer|larger|greater) than)\b[^.]{0,60}?\bcontext (?:length|window|size|limit)"
    r"|\bcontext (?:length|window|size)\b[^.]{0,20}?\bexceed"
    r"|\b(?:prompt|tokens)\b[^.]{0,40}?\bexceeds? (?:the )?(?:max|maximum|model)(?: [a-z]{1,20}){0,2} (?:length|tokens|limit)\b"
    r"|\btokens in request more than max tokens\b"
    r"|\btoo many (?:input |prompt )?tokens\b"
    r"|\breduce the length of the (?:messages|prompt|input)\b"
    r"|\binputtext: expected maxlength\b"
    r"|\[input_too_large\]|\bcontextwindowexceedederror\b"
    r"|(?:超过|超出|大于).{0,12}?(?:上下文|最大长度|最大输入|token)|上下文.{0,8}?(?:超|过长)|输入.{0,6}?(?:过长|太长|超长)"
    # The code in an error that somebody has printed, or all that is said. Elsewhere the mere word may be quoted from a message.
    rf"|[\"'](?:code|type|error_type)\\{{0,7}}[\"'] ?: ?\\{{0,7}}[\"'](?:{CODE})\b"
    rf"|\A\W?(?:[a-z]{{0,20}}error:? )?(?:{CODE})\b"
)

_RATE = re.compile(
    r"rate.?limit|too many requests|\bper (?:min|minute|second|hour|day)\b|\b[rt]p[smhd]\b|throttl|please wait"
    r"|\bquota\b|\bcredits?\b|\bbilling\b|每分钟|限流|频率|速率|配额|余额"
)
_OUTPUT = _pattern(
    # Not in a sum: "prompt + max_tokens exceeds ..."
    r"(?<!\+ )(?<!\+ .)(?<!plus )(?<!plus .)(?<!and )(?<!and .)\bmax_(?:completion_|output_|new_)?tokens\W{0,2}"
    r"(?: or \W?max_completion_tokens\W?)?[ =:]{0,2}(?:of |value )?\(?\d{0,12}\)? ?(?:is |are )?"
    r"(?:too (?:large|high|big|long)|cannot|can't|must|should|exceeds?|above|greater)"
    r"|\bmax_(?:completion_)?tokens.{0,12}?(?:超过|超出|大于)"
    r"|\b(?:output|completion) tokens\b[^.]{0,30}?\bexceed"
    r"|\bmaximum tokens you requested\b|\bat most # (?:output|completion) tokens\b|\bmaximum output tokens\b"
)
# About one field of the request, which such an error quotes. Sources: OpenAI, Anthropic, the two ways in which pydantic prints its errors.
_FIELD = re.compile(
    r"\A(?:error:? )?(?:\W{0,2}(?:invalid|unsupported|missing|unknown)\b[^.]{0,40}?)?\bmessages?(?:\[|\.)\d"
    r"|\A\d+ validation errors? for |\A\[\{'type': "
)
_OUTPUT_ASKED = _pattern(r"requested (#) output tokens|too large: (#)")
_PART = _pattern(r"(#) (?:tokens )?(?:in|of|from|for) (?:the |your )?(?:input )?([a-z]{1,20})")
_PROMPT_PARTS = frozenset(
    {"messages", "functions", "prompt", "text", "tool", "tools", "image", "audio", "file", "video"}
)
_OUTPUT_PARTS = frozenset({"completion", "output"})
_PARTS_CHARS = 200
_READ_CHARS = 8_192

_LARGE = re.compile(r"\b(?:request|prompt|input|messages?|context)(?: is| are)? too (?:large|long|big)\b")
_BYTES = re.compile(
    r"\bbytes?\b|\b\d{1,9} ?[kmg]i?b\b|\bsize\b|\bentity\b|\bpayload\b|request_too_large|\bimages?\b|\bfiles?\b"
)


def of_text(text: str) -> Overflow | None:
    """What a provider's sentence says of an overflow; None where it is about something else."""
    text = _plain(text)
    if _FIELD.search(text):
        return None
    for pattern, input_only in _SENTENCES:
        if said := pattern.search(text):
            overflow, output = _numbers(said, text, input_only)
            return None if _is_alone(output, overflow.limit) else overflow
    if _RATE.search(text) or _OUTPUT.search(text):
        return None
    for pattern, input_only in _LIMITS:
        if said := pattern.search(text):
            return _numbers(said, text, input_only)[0]
    return UNNUMBERED if _PHRASE.search(text) else None


def is_output_alone(text: str) -> bool:
    """Whether the output that was asked for would not even fit without a prompt: then no shorter one cures it."""
    text = _plain(text)
    found = ((pattern.search(text), input_only) for pattern, input_only in _SENTENCES)
    numbers = (_numbers(said, text, input_only) for said, input_only in found if said)
    return any(_is_alone(output, overflow.limit) for overflow, output in numbers)


def is_too_large(text: str) -> bool:
    """Whether the body of a 413 can mean the prompt: it is empty (Cerebras, Mistral), or says "too large" and of neither bytes nor a rate."""
    text = _plain(text)
    return not text or bool(_LARGE.search(text) and not _BYTES.search(text) and not _RATE.search(text))


def tokens(stated: object) -> int | None:
    """A number of tokens, from JSON or as written in a sentence; None where it cannot be one."""
    if isinstance(stated, str):
        digits = stated.replace(",", "")
        return tokens(int(digits)) if len(digits) <= 16 and digits.isascii() and digits.isdigit() else None
    if isinstance(stated, bool) or not isinstance(stated, int):
        return None
    return stated if 0 < stated <= _MAX_TOKENS else None


def _plain(text: str) -> str:
    """In lower case with single spaces: the start and the end of it, where a printed stack of exceptions names the last one."""
    text = " ".join(text.lower().split())
    return text if len(text) <= 2 * _READ_CHARS else f"{text[:_READ_CHARS]} ... {text[-_READ_CHARS:]}"


def _is_alone(output: int | None, limit: int | None) -> bool:
    return output is not None and limit is not None and output >= limit


def _numbers(said: re.Match[str], text: str, input_only: bool) -> tuple[Overflow, int | None]:
    """The numbers of a sentence, and the output that was asked for, where it says."""
    stated = {name: tokens(number) for name, number in said.groupdict().items() if number}
    limit, prompt, output = stated.get("limit"), stated.get("prompt"), stated.get("output")
    if "total" in stated:
        prompt, output = _parts(text[said.end() : said.end() + _PARTS_CHARS])
    if limit and (over := stated.get("over")):
        prompt = limit + over
    if output is None and (asked := _OUTPUT_ASKED.search(text)):
        output = tokens(asked[1] or asked[2])
    return Overflow(limit, prompt, input_only and limit is not None), output


def _parts(text: str) -> tuple[int | None, int | None]:
    """Prompt and output of a sum that is broken down: "(100 in the messages, 20 in the functions, and 30 in the completion)"."""
    prompt = output = 0
    for part in _PART.finditer(text):
        if part[2] in _PROMPT_PARTS:
            prompt += tokens(part[1]) or 0
        elif part[2] in _OUTPUT_PARTS:
            output += tokens(part[1]) or 0
    return prompt or None, output or None
