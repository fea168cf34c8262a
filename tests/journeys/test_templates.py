"""Chat templates of the strict kind: what we make of a request renders wherever the request itself did, and a replay keeps its beginning.

The templates in `tests/templates` behave as those of well-known families do. They are rendered as transformers and llama.cpp render: in a
sandbox, with call arguments parsed, and `raise_exception` for what a template does not take.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from proxy.core import conversation as conversations
from proxy.core import region, rewrite, turn
from proxy.core.answer import UNREAD
from proxy.core.conversation import Conversation
from proxy.core.model import Checkpoint, Scope, Trigger, Usage
from proxy.core.plan import Plan, Planner, Shape, Warm
from proxy.core.replay import OPENING
from tests import recorded
from tests.core.build import Policy, checkpoint, limits, read
from tests.journeys.talks import TALKS, Talk

FOLDER = Path(__file__).parents[1] / "templates"
PLAIN = ("chatml_tools", "llama3_tools", "mistral", "gemma", "chatml_alternating")
THOUGHTFUL = ("qwen3", "deepseek")
"""They show thoughts only behind the last user message."""

TOOLS_LAST = "mistral_tools_last"
"""It declares the tools in front of the last user message."""

NAMES = (*PLAIN, *THOUGHTFUL, TOOLS_LAST)
AT_LEAST, AT_MOST = 10, 26
"""Messages of a conversation that is cut in every place."""

Request = Mapping[str, Any]


class Raised(Exception):
    """A template did not take a request."""


def _raise(message: str) -> NoReturn:
    raise Raised(message)


def _tojson(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


@cache
def _template(name: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    return environment.from_string((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))


def rendered(name: str, request: Request, *, generation: bool = True) -> str:
    """The prompt that a server makes of a request. Raises Raised."""
    text = _template(name).render(
        messages=[_with_arguments(message) for message in request["messages"]],
        tools=request.get("tools"),
        add_generation_prompt=generation,
        bos_token="<s>",
        eos_token="</s>",
    )
    return str(text)


def _with_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Call arguments as an object, where they are one: servers parse them before they render."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    parsed = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in calls
    ]
    return {**message, "tool_calls": parsed}


def _refusal(name: str, request: Request) -> str:
    """Why a template does not take a request; "" where it does."""
    try:
        rendered(name, request)
    except Raised as error:
        return str(error)
    return ""


def _requests(talk: Talk) -> Iterator[dict[str, Any]]:
    """Requests of middle length that end on different roles."""
    found = [step.request for step in talk.steps() if AT_LEAST <= len(step.request["messages"]) <= AT_MOST]
    ends = {json.dumps([m["role"] for m in request["messages"][-2:]]): request for request in found}
    yield from ends.values()


def _body(request: Request) -> bytes:
    return json.dumps(request, ensure_ascii=False).encode()


def _rewritten(conversation: Conversation, made: Checkpoint) -> dict[str, Any]:
    routed = rewrite.route(conversation.request, conversation.preamble_length, made)
    assert routed.applied is made, "a legal cut takes a checkpoint"
    found: dict[str, Any] = json.loads(routed.body)
    return found


def _warm(conversation: Conversation, answer: str | None, made: Checkpoint | None = None) -> Warm:
    """The warm request of a turn."""
    routed = rewrite.route(conversation.request, conversation.preamble_length, made)
    done = turn.forwarded(conversation, routed, replace(UNREAD, text=answer, usage=Usage()), 1)
    return turn.warm_after(conversations.lineage(conversation, None).id, conversation, routed, None, done, 1.0)


def test_the_templates_take_what_they_are_known_to_take() -> None:
    """Without this the tests below might hold because nothing renders at all."""
    agents = {"tools", "parallel calls", "repeated ids", "300 calls in one user turn", "names", "thought signatures"}
    chats = {"chat", "no system", "annotations", "cache marks", "thoughts in chat", "prefill", "refusals"}
    orders = {"users in a row", "answers in a row", "system in the middle", "developer"}
    takes = {
        name: {talk for talk in TALKS if all(_refusal(name, request) == "" for request in _requests(TALKS[talk]))}
        for name in NAMES
    }
    assert takes["chatml_tools"] == set(TALKS)
    assert takes["qwen3"] == set(TALKS)
    assert takes["deepseek"] >= agents | (chats - {"refusals"}) | orders
    assert takes["llama3_tools"] >= {"tools", "names"} | chats | orders
    assert not takes["llama3_tools"] & {"parallel calls", "repeated ids"}
    assert takes["mistral"] >= agents | (chats - {"refusals"})
    assert takes[TOOLS_LAST] >= agents | (chats - {"refusals"})
    assert takes["gemma"] >= chats - {"refusals"}
    assert takes["chatml_alternating"] >= chats
    for name in ("mistral", "gemma", "chatml_alternating", TOOLS_LAST):
        assert not takes[name] & orders
    assert not (takes["gemma"] | takes["chatml_alternating"]) & agents


# A request with a checkpoint


@pytest.mark.parametrize("talk", TALKS)
def test_a_request_with_a_checkpoint_at_any_legal_cut_renders_where_the_request_itself_does(talk: str) -> None:
    for request in _requests(TALKS[talk]):
        taking = [name for name in NAMES if not _refusal(name, request)]
        conversation = read(_body(request))
        cuts = region.legal_cuts(conversation.facts)
        assert cuts
        for k in cuts:
            routed = _rewritten(conversation, checkpoint(conversation, k))
            for name in taking:
                assert _refusal(name, routed) == "", f"{name}: cut before message {k}"


@pytest.mark.parametrize("talk", TALKS)
def test_so_does_one_with_a_kept_head_or_a_middle_region(talk: str) -> None:
    for request in _requests(TALKS[talk]):
        short = {**request, "messages": request["messages"][:AT_MOST]}
        taking = [name for name in NAMES if not _refusal(name, short)]
        conversation = read(_body(short))
        for from_, k in _regions(conversation):
            routed = _rewritten(conversation, checkpoint(conversation, k, from_=from_))
            for name in taking:
                assert _refusal(name, routed) == "", f"{name}: messages {from_} to {k} covered"


def _regions(conversation: Conversation) -> Iterator[tuple[int, int]]:
    """Heads that may be kept, and regions that an operator may ask for; behind each start the next cut, one further on and the last."""
    planner = Planner(_warm(conversation, None), limits(10**6), Policy())
    cuts = region.legal_cuts(conversation.facts)
    heads = {region.keep_head(conversation.facts, wanted) for wanted in range(1, 7)} - {0}
    for from_ in sorted(heads.union(cuts)):
        later = [k for k in cuts if k > from_]
        for k in {*later[:2], *later[-1:]}:
            if from_ in heads or isinstance(planner.plan(Trigger.MANUAL, (from_, k)), Plan):
                yield from_, k


# The request that asks for a checkpoint


def _shaped(warm: Warm, name: str, scope: Scope, span: tuple[int, int]) -> tuple[dict[str, Any], Shape]:
    """The compaction request in the first shape that a template takes, in the order in which a compaction tries them."""
    refusals = []
    for shape in (Shape.ANSWER, Shape.PLAIN, Shape.BRIDGED):
        found = Planner(warm, limits(10**6), Policy(replay_scope=scope), shape).plan(Trigger.MANUAL, span)
        assert isinstance(found, Plan)
        request = json.loads(found.replay.body)
        refusals.append(_refusal(name, request))
        if not refusals[-1]:
            return request, shape
    raise AssertionError(f"{name} takes no shape: {refusals}")


@pytest.mark.parametrize(
    ("name", "talk", "answer", "needed"),
    [
        ("chatml_tools", "tools", None, {Shape.ANSWER}),
        ("llama3_tools", "tools", None, {Shape.ANSWER}),
        ("deepseek", "thoughts", None, {Shape.ANSWER}),
        ("mistral", "tools", "Done.", {Shape.ANSWER}),
        ("mistral", "tools", None, {Shape.BRIDGED}),
        ("gemma", "chat", "Done.", {Shape.ANSWER}),
        ("gemma", "chat", None, {Shape.BRIDGED}),
        ("gemma", "prefill", None, {Shape.BRIDGED}),
    ],
)
def test_which_shape_is_needed(name: str, talk: str, answer: str | None, needed: set[Shape]) -> None:
    """A plain instruction is refused by strict templates behind a result or a user message: there the bridge is of use."""
    found = set()
    for request in _requests(TALKS[talk]):
        conversation = read(_body(request))
        warm = _warm(conversation, answer)
        found.add(_shaped(warm, name, Scope.WARM, (0, region.legal_cuts(conversation.facts)[-1]))[1])
    assert found == needed


def _cut_short(request: Request, messages: int) -> dict[str, Any]:
    return {**request, "messages": request["messages"][:messages]}


def _lasting(request: Request) -> dict[str, Any]:
    """The request without a prefill at its end, in whose place the next request has the whole answer."""
    messages = request["messages"]
    return _cut_short(request, len(messages) - (messages[-1]["role"] == "assistant"))


@pytest.mark.parametrize("talk", TALKS)
def test_a_replay_renders_in_one_shape_and_begins_with_what_the_server_has_cached(talk: str) -> None:
    """The whole warm request, but for a prefill, with the answer where it was text; on templates whose prompt only grows."""
    for request in _requests(TALKS[talk]):
        conversation = read(_body(request))
        k = region.legal_cuts(conversation.facts)[-1]
        lasting = _lasting(request)
        for answer in ("Done, all of it.", None):
            warm = _warm(conversation, answer)
            for name in PLAIN:
                if _refusal(name, request):
                    continue
                asked, _ = _shaped(warm, name, Scope.WARM, (0, k))
                assert asked["messages"][: len(lasting["messages"])] == lasting["messages"]
                assert asked["messages"][-1]["content"].startswith(OPENING)
                assert rendered(name, asked).startswith(rendered(name, lasting, generation=False))


@pytest.mark.parametrize("talk", TALKS)
def test_a_replay_of_the_region_alone_does_so_too(talk: str) -> None:
    """Cut at any message, so it may end on a call's result or on a user message."""
    request = list(_requests(TALKS[talk]))[-1]
    conversation = read(_body(request))
    warm = _warm(conversation, "Done.")
    for k in region.legal_cuts(conversation.facts):
        before = _cut_short(request, conversation.preamble_length + k)
        for name in PLAIN:
            if not _refusal(name, request):
                asked, _ = _shaped(warm, name, Scope.REGION, (0, k))
                assert rendered(name, asked).startswith(rendered(name, before, generation=False))


@pytest.mark.parametrize("talk", ["chat", "tools", "parallel calls", "thoughts in chat", "thoughts", "users in a row"])
def test_a_replay_of_a_request_with_a_checkpoint_begins_with_that_request(talk: str) -> None:
    """Rolling forward: the old checkpoint is part of what is replayed."""
    for request in _requests(TALKS[talk]):
        conversation = read(_body(request))
        cuts = region.legal_cuts(conversation.facts)
        made = checkpoint(conversation, cuts[len(cuts) // 2])
        routed = _rewritten(conversation, made)
        for name in PLAIN:
            if not _refusal(name, request):
                asked, _ = _shaped(_warm(conversation, "Done.", made), name, Scope.WARM, (0, cuts[-1]))
                assert rendered(name, asked).startswith(rendered(name, routed, generation=False))


def _shared(longer: str, shorter: str) -> int:
    """Characters that both begin with."""
    pairs = enumerate(zip(longer, shorter, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(longer), len(shorter)))


@pytest.mark.parametrize("name", THOUGHTFUL)
@pytest.mark.parametrize("talk", ["thoughts", "thoughts in chat", "tools", "chat", "reasoning details", "repeated ids"])
def test_where_thoughts_are_dropped_the_prefix_ends_at_the_first_thought_behind_the_last_user_message(
    name: str, talk: str
) -> None:
    broken = 0
    for request in _requests(TALKS[talk]):
        conversation = read(_body(request))
        k = region.legal_cuts(conversation.facts)[-1]
        asked, _ = _shaped(_warm(conversation, "Done."), name, Scope.WARM, (0, k))
        cached, prompt = rendered(name, request, generation=False), rendered(name, asked)
        messages: Sequence[Any] = request["messages"]
        last_user = max(at for at, message in enumerate(messages) if message["role"] == "user")
        thoughts = [at for at in range(last_user, len(messages)) if messages[at].get("reasoning_content")]
        if not thoughts:
            assert prompt.startswith(cached)
            continue
        broken += 1
        # It ends inside the first message that loses its thought ...
        at = _shared(prompt, cached)
        up_to = rendered(name, _cut_short(request, thoughts[0]), generation=False)
        assert len(up_to) <= at < cached.index(messages[thoughts[0]]["reasoning_content"])
        # ... and nothing but those thoughts is different.
        stripped = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages[last_user:]]
        without = {**request, "messages": [*messages[:last_user], *stripped]}
        assert prompt.startswith(rendered(name, without, generation=False))
    assert broken == (talk == "thoughts") * broken
    assert broken or talk != "thoughts"


@pytest.mark.parametrize("talk", ["tools", "parallel calls", "chat"])
def test_where_the_tools_stand_before_the_last_user_message_the_prefix_ends_there(talk: str) -> None:
    for request in _requests(TALKS[talk]):
        conversation = read(_body(request))
        k = region.legal_cuts(conversation.facts)[-1]
        asked, _ = _shaped(_warm(conversation, "Done."), TOOLS_LAST, Scope.WARM, (0, k))
        cached, prompt = rendered(TOOLS_LAST, request, generation=False), rendered(TOOLS_LAST, asked)
        at = _shared(prompt, cached)
        if "tools" in request:
            assert cached.index("[AVAILABLE_TOOLS]") <= at <= cached.index("[AVAILABLE_TOOLS]") + 1
        else:
            assert at == len(cached)


# Recorded conversations


@pytest.mark.skipif(not recorded.names(), reason=f"no recorded conversations in {recorded.FOLDER}")
@pytest.mark.parametrize("name", NAMES)
def test_recorded_conversations(name: str) -> None:
    """The last request of each that a template takes: a few cuts, and the replay."""
    taken = 0
    for file in recorded.names():
        steps = list(recorded.steps(recorded.load(file)))
        request = next((s.request for s in reversed(steps) if len(s.request["messages"]) <= 60), steps[0].request)
        try:
            if _refusal(name, request):
                continue
        except (jinja2.TemplateError, ValueError, TypeError, KeyError):
            continue  # a shape that no server renders this way
        conversation = read(json.dumps(request).encode())
        cuts = region.legal_cuts(conversation.facts)
        if not cuts:
            continue
        taken += 1
        for k in {cuts[0], cuts[len(cuts) // 2], cuts[-1]}:
            assert _refusal(name, _rewritten(conversation, checkpoint(conversation, k))) == "", f"{file}: {k}"
        asked, _ = _shaped(_warm(conversation, "Done."), name, Scope.WARM, (0, cuts[-1]))
        if name in PLAIN:
            assert rendered(name, asked).startswith(rendered(name, request, generation=False)), file
    assert taken > 5
