"""Does a provider's error say that it does not take the shape of a request?"""

from __future__ import annotations

import re

SHAPE_STATUSES = frozenset({400, 422})
"""How hosted providers refuse a shape or a parameter."""

# llama.cpp and vLLM answer 500 where a chat template raises. Sources: ggml-org/llama.cpp#19851, vllm-project/vllm#17119.
_TEMPLATE = re.compile(rb"jinja|chat.?template|roles? must alternate|raise_exception|TemplateError", re.IGNORECASE)
_OVERFLOW = re.compile(
    rb"context_length_exceeded|maximum context length|exceed_context_size|prompt is too long|context window|too many tokens",
    re.IGNORECASE,
)


def is_shape(status: int, body: bytes) -> bool:
    """Whether another shape of the same request may be taken. `body`: the error's, or its start."""
    if status == 500:
        return _TEMPLATE.search(body) is not None
    return status in SHAPE_STATUSES and not is_overflow(status, body)


def is_overflow(status: int, body: bytes) -> bool:
    """Whether the request was too long: no other shape of it will fit."""
    return status in (400, 413, 422) and _OVERFLOW.search(body) is not None
