"""Bodies that other proxies changed, judged or refused: each test stands for a fault that was seen in other software, and the link names it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.core import fingerprint, openai, region
from proxy.demo.answers import Answer
from proxy.demo.calls import Call, Forced
from proxy.demo.provider import SimulatedProvider
from proxy.demo.summariser import Dead, GenericProse, Summariser
from proxy.demo.template import Request
from proxy.demo.tokenizer import Tokens
from tests.faults.writer import FRAME, ROOMY, Writer, compact, exchanges, said
from tests.journeys.played import Lenient
from tests.journeys.player import elements, playing
from tests.journeys.talks import TOOLS, prose

SYSTEM = b'{"role":"system","content":"You are careful."}'


def quiet(request: Request, tokens: Tokens) -> Answer:
    """The same answer to everything."""
    return Answer(text="Done.")


def _call(*ids: str, **more: Any) -> bytes:
    calls = [{"id": i, "type": "function", "function": {"name": "read_file", "arguments": '{"n": 1.0}'}} for i in ids]
    return compact({"role": "assistant", "content": None, "tool_calls": calls, **more})


def _result(id_: str, about: object, words: int = 60, **more: Any) -> bytes:
    return compact({"role": "tool", "tool_call_id": id_, "content": prose(("result", about), words), **more})


# Bytes

ODD = (
    b' {\r\n\t"temperature" : 1.0 ,"seed":1,"top_p":1e0,  "\\u006dodel":"d\\u0065mo-model" ,"x":[1e2,-0,0.10,{"b":1,"a":2}],'
    b'\n"messages":[ '
)
ODD_MESSAGES = (
    b'{"content":"\\u0048ello \\/ caf\\u00e9 \\ud83d\\ude00 \xf0\x9f\x98\x80","role" :\t"user"}',
    b'\n {"role":"assistant","content":"\\u004f\\u004b"} ',
    b'\t{ "role":"user","content":[ {"type":"text" , "text":"' + b"go on " * 300 + b'"} ] }\r\n',
)
ODD_END = b' ] ,"metadata":{"z":"\\/","a":"\\u0061"} }\n\n'


@pytest.mark.parametrize(
    ("flags", "headers", "end"),
    [
        pytest.param({}, {}, ODD_END, id="below the threshold"),
        pytest.param({}, {}, b' ],"stream":true }\n', id="a stream"),
        pytest.param({"compaction__mode": "observe"}, {}, ODD_END, id="watched only"),
        pytest.param({"compaction__mode": "off"}, {}, ODD_END, id="off"),
        pytest.param({}, {"x_warmfold_mode": "off"}, ODD_END, id="off by header"),
        pytest.param({"compaction__max_context_tokens": 2048}, {"x_warmfold_mode": "observe"}, ODD_END, id="pressed"),
    ],
)
async def test_what_is_not_rewritten_has_the_clients_bytes(
    flags: dict[str, Any], headers: dict[str, str], end: bytes, tmp_path: Path
) -> None:
    """headroomlabs-ai/headroom#1042"""
    async with SimulatedProvider() as provider, playing(tmp_path, provider, **{**ROOMY, **flags}) as player:
        writer = Writer(player, ODD, end, headers=headers)
        for turn in range(4):
            await writer.send(*ODD_MESSAGES[turn and 1 :])
            assert hashlib.sha256(writer.sent).digest() == hashlib.sha256(writer.body).digest()
        assert not provider.compactions
        assert len(provider.calls) == 4


async def test_the_client_gets_the_providers_bytes_as_well(tmp_path: Path) -> None:
    """headroomlabs-ai/headroom#1042"""
    answer = b' {"choices":[{"message":{"content":"\\u004f\\/k" ,"role":"assistant"},"finish_reason":"stop","index":0}],"n":1.0}\n\n'
    async with SimulatedProvider() as provider, playing(tmp_path, provider, **ROOMY) as player:
        provider.on_call = lambda call: Forced(body=answer, headers={"X-Odd": "yes"})
        got = await Writer(player, ODD, ODD_END).send(*ODD_MESSAGES)
        assert got.body == answer
        assert got.headers["X-Odd"] == "yes"


# Numbers

HUGE = b"7" * 400
NUMBERS = (
    b'{"seed":9007199254740993,"model":"demo-model","metadata":{"id":123456789012345678901234567890,"x":-0,"y":1.0,"z":1E+2},'
    b'"tools":[{"type":"function","function":{"name":"read_file","parameters":{"type":"object","properties":{"n":{"type":"integer",'
    b'"maximum":18446744073709551616,"minimum":-9223372036854775809,"multipleOf":1e-400}}}}}],"x_huge":'
    + HUGE
    + b',"messages":['
)


async def test_every_digit_arrives_in_a_rewritten_request_and_in_a_replay(tmp_path: Path) -> None:
    """ijl/orjson#116"""
    number = b',"x_id":18446744073709551617,"x_float":0.1000000000000000055511151231257827,"x_exp":1e400}'
    async with SimulatedProvider() as provider, playing(tmp_path, provider, **ROOMY) as player:
        numbered = [message[:-1] + number for message in exchanges(4)]
        writer = Writer(player, NUMBERS, b'],"max_tokens":50 }', [SYSTEM], preamble=1)
        await writer.send(*numbered, said("user", "last"))
        call = await writer.compact(4)
        assert call.raw.startswith(NUMBERS)
        writer.replayed(call)
        got = await writer.send(said("assistant", "last"), said("user", "more"))
        assert got.headers["x-warmfold-covered"] == "4"
        spliced = writer.replaced(4)
        assert spliced.endswith(number)
        assert HUGE in writer.sent


# Bodies that we cannot read


def _in_utf16(body: bytes) -> bytes:
    return body.decode().encode("utf-16")


UNREADABLE: dict[str, Callable[[bytes], bytes]] = {
    "NaN": lambda body: body[:-1] + b',"top_p":NaN}',
    "Infinity": lambda body: body[:-1] + b',"x":[Infinity]}',
    "minus Infinity": lambda body: body[:-1] + b',"x":-Infinity}',
    "NaN in a message": lambda body: body[:-2] + b',{"role":"user","content":"x","score":NaN}]}',
    "a byte order mark": lambda body: b"\xef\xbb\xbf" + body,
    "UTF-16": _in_utf16,
    "UTF-16 without a mark": lambda body: body.decode().encode("utf-16-le"),
    "UTF-32": lambda body: body.decode().encode("utf-32-be"),
    "no UTF-8": lambda body: body[:-2] + b',{"role":"user","content":"l\xe4st"}]}',
    "a comma too many": lambda body: body[:-1] + b",}",
    "a comment": lambda body: b"/* hi */" + body,
    "something behind it": lambda body: body + b"{}",
    "cut off": lambda body: body[:-1],
    "a control character in a text": lambda body: body.replace(b"careful", b"care\nful"),
    "a number that starts with 0": lambda body: body[:-1] + b',"seed":007}',
    "half a surrogate pair for a model": lambda body: body.replace(b"demo-model", b"\\ud800"),
    "a count that no number holds": lambda body: body[:-1] + b',"n":1e999}',
    "deep": lambda body: body[:-1] + b',"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a list": lambda body: b"[" + body + b"]",
    "messages that are an object": lambda body: body.replace(b'"messages":[', b'"messages":{"a":[').replace(
        b"]}", b"]}}"
    ),
    "nothing": lambda body: b"",
}


@pytest.mark.parametrize("kind", UNREADABLE)
async def test_what_we_cannot_read_the_provider_judges(kind: str, tmp_path: Path) -> None:
    """ijl/orjson#118"""
    async with SimulatedProvider(answerer=quiet) as provider, playing(tmp_path, provider, **ROOMY) as player:
        writer = Writer(player, messages=[SYSTEM], preamble=1)
        await writer.send(*exchanges(4), said("user", "last"))
        await writer.compact(4)
        readable = await writer.send(said("assistant", "last"), said("user", "more"))
        assert "x-warmfold-checkpoint" in readable.headers

        body = UNREADABLE[kind](writer.body)
        answer = b'{"judged":"by the provider"}'
        provider.on_call = lambda call: Forced(status=418, body=answer)
        before = len(provider.calls)
        for headers in ({}, {"x_warmfold_mode": "force"}):
            got = await player.post(body, **headers)
            await player.settled()
            assert (got.status, got.body) == (418, answer)
            assert not [name for name in got.headers if name.lower().startswith("x-warmfold")]
        assert [call.raw for call in provider.calls[before:]] == [body, body]

        provider.on_call = None
        after = await writer.send(said("assistant", "more"), said("user", "and now"))
        assert after.headers["x-warmfold-checkpoint"] == readable.headers["x-warmfold-checkpoint"]


async def test_a_number_of_400_digits_is_no_reason_to_judge(tmp_path: Path) -> None:
    """ijl/orjson#118"""
    async with SimulatedProvider() as provider, playing(tmp_path, provider, **ROOMY) as player:
        writer = Writer(player, tail=b'],"x_huge":' + HUGE + b"}")
        await writer.send(*exchanges(4), said("user", "last"))
        assert writer.sent == writer.body
        await writer.compact(4)
        await writer.send(said("assistant", "last"), said("user", "more"))
        assert writer.sent.endswith(writer.tail)
        assert FRAME in writer.sent


HALVES = (
    rb"\ud83d",
    rb"half \uD83D of a pair",
    rb"\ude00\ud83d",
    rb"\ud83d\ud83d\ude00\ude00",
    rb"\ud83d\n\ude00",
    rb"\\ud83d \ud83d",
)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("form", [b'{"role":"user","content":"%s"}', b'{"role":"user","%s":1}'], ids=["text", "key"])
def test_half_a_surrogate_pair_keeps_no_request_from_being_read(half: bytes, form: bytes) -> None:
    """Clients that count in UTF-16 write one wherever they cut an emoji: such a conversation has to be compacted like any other."""
    message = form % half
    for body in (b'{"messages":[' + message + b"]}", b'{"x":"' + half + b'","messages":[ ' + message + b" ]}"):
        found = openai.read(body)
        assert found is not None
        assert [element.strip() for element in found.messages] == [message]
        assert found.head + found.messages[0] + found.tail == body
    assert fingerprint.facts(message).role == "user"


@pytest.mark.parametrize("where", ["covered", "tail", "both"])
async def test_half_a_surrogate_pair_travels_as_it_was_written(where: str, tmp_path: Path) -> None:
    half = rb'{"role":"user","content":"half \ud83d of a pair, and the other \ude00","\udc00":"\ud800"}'
    plain = said("user", "plain")
    async with SimulatedProvider(summariser=GenericProse()) as provider, playing(tmp_path, provider, **ROOMY) as player:
        writer = Writer(player, messages=[SYSTEM], preamble=1)
        await writer.send(
            *(half if where != "tail" else plain, said("assistant", 0), *exchanges(3)),
            *(half if where != "covered" else plain, said("assistant", "last"), said("user", "last")),
        )
        assert writer.sent == writer.body
        call = await writer.compact(8)
        writer.replayed(call)
        got = await writer.send(said("assistant", "more"), said("user", "more"))
        assert got.headers["x-warmfold-covered"] == "8"
        first = writer.replaced(8)
        assert first.endswith((half if where != "covered" else plain).split(b'"content":"')[1])


@pytest.mark.parametrize("summariser", [GenericProse(), Dead(500)], ids=["a summary", "mechanical"])
async def test_a_conversation_full_of_half_surrogate_pairs_outlives_its_window(
    summariser: Summariser, tmp_path: Path
) -> None:
    settings = {"compaction__max_context_tokens": 4096, "compaction__when": "after_turn"}
    async with (
        SimulatedProvider(window_tokens=4096, summariser=summariser) as provider,
        playing(tmp_path, provider, **settings) as player,
    ):
        writer = Writer(
            player, b'{"model":"demo-model","tools":' + compact(TOOLS) + b',"messages":[', messages=[SYSTEM]
        )
        for at in range(20):
            arguments = {"name": "read_file", "arguments": json.dumps({"path": "\udc00"})}
            call = {"id": f"call_{at}", "type": "function", "function": arguments}
            writer.messages += [
                compact({"role": "user", "content": f"Never touch \ud83d{at}. {prose(('user', at), 90)}"}),
                compact({"role": "assistant", "content": "\ud83d", "tool_calls": [call]}),
                compact(
                    {"role": "tool", "tool_call_id": f"call_{at}", "content": f"\ude00 {prose(('result', at), 60)}"}
                ),
            ]
            got = await writer.send()
            writer.messages.append(said("assistant", at, 40, x="\ud83d"))
        assert "x-warmfold-checkpoint" in got.headers
        assert all(call.status == 200 for call in provider.turns)


# Null, empty, absent


_NULLS = {"refusal": None, "audio": None}


async def test_null_empty_and_absent_stay_what_they_are(tmp_path: Path) -> None:
    """BerriAI/litellm#37711"""

    def steps(at: int) -> list[bytes]:
        a, b, c = (f"call_{letter}{at}" for letter in "abc")
        absent = json.loads(_call(b))
        del absent["content"]
        return [
            said("user", at, 60),
            _call(a, **_NULLS),
            _result(a, at),
            compact(absent),
            compact({"role": "tool", "tool_call_id": b, "content": ""}),
            compact({**json.loads(_call(c)), "content": "", "refusal": None}),
            compact({"role": "tool", "tool_call_id": c, "content": prose(at, 40), "name": None}),
            compact({"role": "assistant", "content": "", "tool_calls": None, "function_call": None, **_NULLS}),
            compact({"role": "user", "content": "", "name": None}),
            compact({"role": "assistant", "content": prose(("answer", at), 30), "annotations": [], "tool_calls": None}),
        ]

    async with Lenient() as provider, playing(tmp_path, provider, **ROOMY) as player:
        members = (
            b'{"model":"demo-model","stop":null,"user":null,"tools":'
            + compact(TOOLS)
            + b',"tool_choice":null,"messages":['
        )
        writer = Writer(player, members, b'],"metadata":{},"x_null":null,"x_empty":""}', [SYSTEM], preamble=1)
        await writer.send(*steps(0), *steps(1), *steps(2), said("user", "last"))
        assert writer.sent == writer.body
        call = await writer.compact(11)
        assert call.raw.startswith(members.replace(b'"stop":null,', b""))
        assert call.raw.endswith(writer.tail)
        writer.replayed(call)
        await writer.send(said("assistant", "last"), said("user", "more"))
        alone = writer.replaced(11)
        assert alone.endswith(b"}," + writer.messages[12]), "the checkpoint in front, and the message as it was"
        assert elements(writer.sent)[2] == writer.messages[12]


@pytest.mark.parametrize("content", [b',"content":null', b""], ids=["null", "absent"])
async def test_a_user_message_without_content_is_given_none(content: bytes, tmp_path: Path) -> None:
    """A checkpoint in front of it would make two user messages of one, one inside of it would change what the client said."""
    empty = b'{"role":"user"' + content + b',"name":"ada"}'
    async with Lenient() as provider, playing(tmp_path, provider, **ROOMY) as player:
        writer = Writer(player)
        await writer.send(*exchanges(3), empty, said("assistant", "then"), said("user", "last"))
        assert (await writer.ask_to_compact(6))["because"] == "no_boundary"
        await writer.compact(4)
        await writer.send(said("assistant", "last"), said("user", "more"))
        assert empty in elements(writer.sent)


# What we do not know

UNKNOWN: dict[str, Any] = {
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "chat_template_kwargs": {"enable_thinking": False, "z": 1, "a": 2},
    "top_k": 20,
    "min_p": 0.05,
    "repetition_detection": None,
    "provider": {"order": ["b", "a"], "allow_fallbacks": False},
    "transforms": [],
    "route": "fallback",
    "safety_settings": [{"category": "x", "threshold": "y"}],
    "extra_body": {"google": {"thinking_config": {"include_thoughts": True}}},
    "x-dashed.key": {"": {}},
    "": "a key without a name",
    "ключ/é": ["\u2028", "\u0000"],
}
DECODED: dict[str, Any] = {
    "guided_json": {"type": "object"},
    "guided_choice": ["a"],
    "structured_outputs": {"json": {}},
}


async def test_keys_that_we_do_not_know_arrive_at_every_level(tmp_path: Path) -> None:
    """BerriAI/litellm#18039"""
    tools = compact(
        [
            {**TOOLS[0], "custom": {"x": 1}, "cache_control": {"type": "ephemeral"}},
            {"type": "function", "x": [], "function": {**TOOLS[1]["function"], "x_hint": {"b": 1, "a": None}}},
        ]
    )
    head = compact({"model": "demo-model", **UNKNOWN, **DECODED})[:-1] + b',"tools":' + tools + b',"messages":['
    part = {"type": "text", "x_part": {"deep": [None]}, "cache_control": {"type": "ephemeral"}}

    def spoken(at: int) -> list[bytes]:
        return [
            compact({"x_a": at, "role": "user", "content": [{**part, "text": prose(("u", at), 90)}], "x_b": {"c": []}}),
            said("assistant", at, 40, x_answer={"z": 1, "a": [1.5]}, reasoning_details=[{"type": "x", "data": "y"}]),
        ]

    async with SimulatedProvider() as provider, playing(tmp_path, provider, **ROOMY) as player:
        writer = Writer(player, head, b'],"x_last":[1,{"b":2,"a":1}]}', [SYSTEM], preamble=1)
        await writer.send(*(message for at in range(4) for message in spoken(at)), said("user", "last"))
        assert writer.sent == writer.body
        call = await writer.compact(4)
        writer.replayed(call)
        assert call.raw.startswith(compact({"model": "demo-model", **UNKNOWN})[:-1] + b',"tools":' + tools), "in order"
        assert call.raw.endswith(b',"x_last":[1,{"b":2,"a":1}]}')
        assert not DECODED.keys() & json.loads(call.raw).keys(), "what constrains an answer would spoil the summary"
        got = await writer.send(said("assistant", "last"), said("user", "more"))
        assert got.headers["x-warmfold-covered"] == "4"
        first = json.loads(writer.replaced(4))
        original = json.loads(writer.messages[5])
        assert first["content"][1:] == original["content"]
        assert {**first, "content": 0} == {**original, "content": 0}


SCHEMA = (
    b'[{"type":"function","function":{"strict":true,"name":"edit","parameters":{"type":"object","$defs":{"z":{"const":null},'
    b'"a":{"const":1.0}},"properties":{"z":{"$ref":"#/$defs/z"},"a":{"anyOf":[{"$ref":"#/$defs/a"},{"type":"null"}]}},'
    b'"required":["z","a"],"additionalProperties":false},"description":"Edits."}}, {"type":"custom","custom":{"name":"run"}}]'
)


@pytest.mark.parametrize(
    "preamble",
    [
        (b'{"role":"developer","content":"Formatting re-enabled. Never touch prod.db."}',),
        (b'{"role":"developer","content":[{"type":"text","text":"Never touch prod.db."}],"name":"ops"}', SYSTEM),
        (SYSTEM, b'{"role":"developer","content":"Never touch prod.db."}'),
    ],
    ids=["developer", "developer and system", "system and developer"],
)
@pytest.mark.parametrize(
    ("choice", "stays"),
    [
        (b'{"type":"function","function":{"name":"edit"}}', False),
        (b'{"type":"allowed_tools","allowed_tools":{"mode":"auto","tools":[]}}', True),
        (b'"auto"', True),
    ],
    ids=["forces a call", "allows some", "auto"],
)
async def test_strict_schemas_choices_and_the_developer_arrive(
    preamble: tuple[bytes, ...], choice: bytes, stays: bool, tmp_path: Path
) -> None:
    """BerriAI/litellm#41913"""
    head = b'{"model":"demo-model","parallel_tool_calls":false,"tools":' + SCHEMA + b',"messages":['
    tail = b'],"tool_choice":' + choice + b',"reasoning_effort":"high"}'
    async with SimulatedProvider() as provider, playing(tmp_path, provider, **ROOMY) as player:
        writer = Writer(player, head, tail, list(preamble), preamble=len(preamble))
        await writer.send(*exchanges(4), said("user", "last"))
        assert writer.sent == writer.body
        call = await writer.compact(4)
        assert call.raw.startswith(head + b",".join(preamble))
        assert json.loads(call.raw).get("tool_choice") == (json.loads(choice) if stays else None)
        got = await writer.send(said("assistant", "last"), said("user", "more"))
        assert got.headers["x-warmfold-covered"] == "4", "the preamble does not count, and is never covered"
        writer.replaced(4)


# Ids of tool calls


def _rounds(*ids: str) -> list[bytes]:
    return [message for at, id_ in enumerate(ids) for message in (_call(id_), _result(id_, at))]


@pytest.mark.parametrize("id_", ["call_0", "", "0"])
async def test_a_cut_between_calls_of_the_same_id_keeps_each_with_its_result(id_: str, tmp_path: Path) -> None:
    """octos-org/octos#12"""
    head = b'{"model":"demo-model","tools":' + compact(TOOLS) + b',"messages":['
    async with SimulatedProvider() as provider, playing(tmp_path, provider, **ROOMY) as player:
        writer = Writer(player, head, messages=[SYSTEM], preamble=1)
        await writer.send(said("user", "task"), *_rounds(id_, id_, id_, id_))
        assert writer.sent == writer.body
        for inside in (2, 4, 6, 8):
            assert (await writer.ask_to_compact(inside))["because"] == "no_boundary"
        await writer.compact(5)
        got = await writer.send(said("assistant", "done"), said("user", "more"))
        assert got.headers["x-warmfold-covered"] == "5"
        alone = writer.replaced(5)
        assert alone.endswith(b"}," + writer.messages[6])
        assert provider.calls[-1].status == 200


@pytest.mark.parametrize(
    ("messages", "legal"),
    [
        pytest.param([*_rounds("call_0", "call_0", "call_0", "call_0")], {2, 4, 6}, id="one by one"),
        pytest.param(
            [_call("call_0", "call_0"), _result("call_0", 0), _result("call_0", 1), *_rounds("call_0")],
            {3},
            id="two at once",
        ),
        pytest.param(
            [_call("call_0"), _result("call_0", 0), _result("call_0", "again"), *_rounds("call_0", "call_0")],
            {3, 5},
            id="one result sent twice",
        ),
        pytest.param(
            [_call("call_0"), said("user", "stop"), *_rounds("call_0", "call_0")], {1, 2, 4}, id="one call given up"
        ),
        pytest.param(
            [_call("call_0", "call_1"), _result("call_1", 0), _result("call_0", 1), *_rounds("call_1", "call_0")],
            {3, 5},
            id="results in another order",
        ),
    ],
)
def test_calls_and_results_pair_by_position_where_ids_repeat(messages: list[bytes], legal: set[int]) -> None:
    """octos-org/octos#12"""
    facts = [fingerprint.facts(message) for message in messages]
    assert set(region.legal_cuts(facts)) == legal


# Keys that stand twice

_SHORT = b'"messages":[{"role":"user","content":"hi"}]'


def _twice(at: str, member: bytes) -> Callable[[bytes], bytes]:
    def made(body: bytes) -> bytes:
        return b"{" + member + b"," + body[1:] if at == "first" else body[:-1] + b"," + member + b"}"

    return made


TWICE: dict[str, Callable[[bytes], bytes]] = {
    "messages, the short ones first": _twice("first", _SHORT),
    "messages, the short ones last": _twice("last", _SHORT),
    "messages, escaped": _twice("first", _SHORT.replace(b"messages", b"m\\u0065ssages")),
    "messages, empty": _twice("last", b'"messages":[]'),
    "messages, the same": lambda body: body[:-1] + b"," + body[body.index(b'"messages"') :],
    "model": _twice("first", b'"model":"other"'),
    "model, behind": _twice("last", b'"model":"other"'),
    "stream": _twice("last", b'"stream":false,"stream":true'),
    "stream, escaped": _twice("last", b'"stream":false,"\\u0073tream":true'),
    "tools": _twice("last", b'"tools":[],"tools":null'),
    "a key that we do not know": _twice("last", b'"x":1,"y":2,"x":1'),
    "a key without a name": _twice("last", b'"":1,"":1'),
    "a key three times": _twice("last", b'"seed":1,"seed":2,"seed":1'),
}


@pytest.mark.parametrize("kind", TWICE)
async def test_a_request_with_a_key_twice_is_nobodys_but_the_providers(kind: str, tmp_path: Path) -> None:
    """tidwall/gjson#393"""
    async with SimulatedProvider() as provider, playing(tmp_path, provider, **ROOMY) as player:
        writer = Writer(player, messages=[SYSTEM], preamble=1)
        await writer.send(*exchanges(4), said("user", "last"))
        await writer.compact(4)
        known = await writer.send(said("assistant", "last"), said("user", "more"))
        assert "x-warmfold-checkpoint" in known.headers

        before = len(provider.calls)
        body = TWICE[kind](writer.body)
        got = await player.post(body, x_warmfold_mode="force")
        await player.settled()
        assert not [name for name in got.headers if name.lower().startswith("x-warmfold")]
        assert [call.raw for call in provider.calls[before:]] == [body]
        shown = await player.admin(f"/sessions/{writer.session}")
        assert shown["turns"] == 2, "it is no turn of the session"


_DEEP: dict[str, tuple[bytes, bytes]] = {
    "content": (b'{"role":"user","content":"%s"}', b'{"role":"user","content":"Other.","content":"%s"}'),
    "content, behind": (b'{"role":"user","content":"%s"}', b'{"role":"user","content":"%s","content":"Other."}'),
    "role": (b'{"role":"user","content":"%s"}', b'{"role":"system","role":"user","content":"%s"}'),
    "role, escaped": (b'{"role":"user","content":"%s"}', b'{"role":"user","content":"%s","\\u0072ole":"user"}'),
    "a part's text": (
        b'{"role":"user","content":[{"type":"text","text":"%s"}]}',
        b'{"role":"user","content":[{"type":"text","text":"Other.","text":"%s"}]}',
    ),
    "a mark": (
        b'{"role":"user","content":"%s"}',
        b'{"role":"user","content":"%s","cache_control":{"type":"ephemeral","type":"none"}}',
    ),
    "far inside": (
        b'{"role":"user","content":"%s","x":{"y":[{"z":{"a":1}}]}}',
        b'{"role":"user","content":"%s","x":{"y":[{"z":{"a":2,"a":1}}]}}',
    ),
}


@pytest.mark.parametrize("kind", _DEEP)
@pytest.mark.parametrize("doubled_first", [False, True])
async def test_a_message_with_a_key_twice_is_another_message(kind: str, doubled_first: bool, tmp_path: Path) -> None:
    """What the provider reads of it is for the provider to say: a checkpoint that was made over one is not for the other."""
    plain, doubled = (form % prose("early", 80).encode() for form in _DEEP[kind])
    mine, other = (doubled, plain) if doubled_first else (plain, doubled)
    async with SimulatedProvider() as provider, playing(tmp_path, provider, **ROOMY) as player:
        writer = Writer(player, messages=[SYSTEM, said("user", "task"), said("assistant", "task")], preamble=1)
        await writer.send(mine, said("assistant", 0), *exchanges(2), said("user", "last"))
        assert writer.sent == writer.body
        await writer.compact(6)
        got = await writer.send(said("assistant", "last"), said("user", "more"))
        assert got.headers["x-warmfold-covered"] == "6"
        writer.messages[3] = other
        got = await writer.send()
        assert "x-warmfold-checkpoint" not in got.headers
        assert writer.sent == writer.body


async def test_nothing_is_put_into_or_in_front_of_a_message_with_a_key_twice(tmp_path: Path) -> None:
    async with SimulatedProvider() as provider, playing(tmp_path, provider, **ROOMY) as player:
        doubled = b'{"role":"user","content":"one","content":"two"}'
        writer = Writer(player)
        await writer.send(*exchanges(3), doubled, said("assistant", "then"), said("user", "last"))
        assert (await writer.ask_to_compact(6))["because"] == "no_boundary"
        await writer.compact(4)
        await writer.send(said("assistant", "last"), said("user", "more"))
        writer.replaced(4)
        assert doubled in elements(writer.sent)


async def test_a_schema_with_a_key_twice_travels_as_it_is(tmp_path: Path) -> None:
    tools = b'[{"type":"function","function":{"name":"f","parameters":{"type":"object","type":"string","x":{"a":1,"a":2}}}}]'
    async with SimulatedProvider() as provider, playing(tmp_path, provider, **ROOMY) as player:
        writer = Writer(player, b'{"model":"demo-model","tools":' + tools + b',"messages":[')
        await writer.send(*exchanges(3), said("user", "last"))
        call = await writer.compact(4)
        assert call.raw.startswith(writer.head)
        await writer.send(said("assistant", "last"), said("user", "more"))
        writer.replaced(4)


# Errors that look like others

TOO_LONG = {
    "error": {
        "message": "Invalid 'messages[191].content[1].text': string too long. Expected a string with maximum length 10485760, "
        "but got a string with length 10520411 instead.",
        "type": "invalid_request_error",
        "param": "messages[191].content[1].text",
        "code": "string_above_max_length",
    }
}


@pytest.mark.parametrize("rewritten", [False, True])
async def test_a_text_that_is_too_long_for_the_provider_is_no_full_window(rewritten: bool, tmp_path: Path) -> None:
    """vellum-ai/vellum-assistant#40740"""
    error = b" " + json.dumps(TOO_LONG).encode() + b"\n"

    def hook(call: Call) -> Forced | None:
        return Forced(status=400, body=error) if b"too much" in call.raw else None

    async with SimulatedProvider() as provider, playing(tmp_path, provider, **ROOMY) as player:
        provider.on_call = hook
        writer = Writer(player, messages=[SYSTEM], preamble=1)
        await writer.send(*exchanges(4), said("user", "last"))
        if rewritten:
            await writer.compact(4)
        await writer.send(said("assistant", "last"), said("user", "more"))
        calls, compactions = len(provider.calls), len(provider.compactions)
        history = list(writer.messages)
        for _ in range(3):
            got = await writer.send(said("assistant", "more"), b'{"role":"user","content":"too much"}', status=400)
            assert got.body == error
            assert writer.sent == writer.body, "what came last was the client's own request"
            writer.messages = list(history)
        assert len(provider.compactions) == compactions, "no compaction mends it"
        assert len(provider.calls) - calls == (6 if rewritten else 3)
        await writer.send(said("assistant", "more"), said("user", "and now"))
        shown = await player.admin(f"/sessions/{writer.session}")
        assert shown["window"] == ROOMY["compaction__max_context_tokens"], "a length in characters taught nothing"
        assert (FRAME in writer.sent) is rewritten, "the conversation goes on as before"


async def test_bodies_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    async with SimulatedProvider() as provider, playing(tmp_path, provider, **ROOMY) as player:
        await player.post(b'{"a":NaN}')
        await player.post(b'{"a":1,"a":1}')
        await player.post(b'{"messages":[]}', Content_Encoding="gzip")
        text = player.running.metrics.render().decode()
    assert 'warmfold_unread_requests_total{because="coded"} 1.0' in text
    assert 'warmfold_unread_requests_total{because="unparsable"} 2.0' in text
