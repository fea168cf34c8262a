"""What a request is estimated at before it is sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.core import conversation as conversations
from proxy.core.model import Usage
from proxy.talk import Talk
from tests.core import build

UNKNOWN: Any = None


def _talk(upstream: str, model: str) -> Talk:
    """A request of `m` at `u`, whose last turn was one of `model` at `upstream` that counted three times what we had estimated."""
    conversation = build.read(build.body_of("u*2000 a*2000 u", model="m"))
    weight = conversations.weight(conversation, None)
    turn = SimpleNamespace(
        usage=Usage(prompt=3 * weight), weight=weight - 10, applied=None, model=model, upstream=upstream
    )
    known = cast(Any, SimpleNamespace(known=SimpleNamespace(turn=turn)))
    of = cast(Any, SimpleNamespace(name="u"))
    return Talk(UNKNOWN, of, UNKNOWN, UNKNOWN, conversation, UNKNOWN, UNKNOWN, UNKNOWN, known, 1.0, 0)


def test_an_estimate_goes_on_from_what_the_same_model_counted() -> None:
    talk = _talk("u", "m")
    assert talk.estimate(None) == 3 * conversations.weight(talk.conversation, None) + 10


@pytest.mark.parametrize(("upstream", "model"), [("u", "other"), ("other", "m")])
def test_what_another_model_counted_says_nothing_of_this_one(upstream: str, model: str) -> None:
    talk = _talk(upstream, model)
    assert talk.estimate(None) == conversations.weight(talk.conversation, None)
    assert talk.least < _talk("u", "m").least, "nor is our own count certain yet"
