"""Does a provider's error say that it does not take the shape of a request?"""

from __future__ import annotations

import re

from proxy.core import overflow

SHAPE_STATUSES = frozenset({400, 422})
"""How hosted providers refuse a shape or a parameter."""

# llama.cpp and vLLM answer 500 where a chat template raises. Sources: ggml-org/llama.cpp#19851, vllm-project/vllm#17119.
_TEMPLATE = re.compile(rb"jinja|chat.?template|roles? must alternate|raise_exception|TemplateError", re.IGNORECASE)


def is_shape(status: int, body: bytes) -> bool:
    """Whether another shape of the same request may be taken. `body`: the error's, or its start."""
    if status not in SHAPE_STATUSES and not (status == 500 and _TEMPLATE.search(body)):
        return False
    return not is_overflow(status, body)


def is_overflow(status: int, body: bytes) -> bool:
    """Whether the request was too long: no other shape of it will fit."""
    return overflow.of_error(status, "", body) is not None
