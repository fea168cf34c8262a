"""docs/providers.md against the code: each row of its tables is carried out, and every provider that there are facts of is in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from proxy.core import discovery, fingerprint, overflow, quota
from proxy.core.answer import Tap, with_headers
from proxy.core.discovery import Server
from proxy.core.model import Usage, Window
from proxy.core.overflow import Overflow
from proxy.core.refused import is_shape
from proxy.core.thoughts import without_thoughts
from tests import samples
from tests.journeys.test_overflow import Stub, history, in_front_of

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "providers.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
SEEN = {"recorded", "documented", "real server"}
GATEWAY = " through a gateway"
Row = Mapping[str, str]


def _tables() -> Iterator[list[Row]]:
    for block in re.findall(r"(?:^\|.*\|\n)+", TEXT, re.MULTILINE):
        head, _, *lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
        assert all(len(line) == len(head) for line in lines), head
        yield [dict(zip(head, line, strict=True)) for line in lines]


def _table(*head: str) -> list[Row]:
    (found,) = [rows for rows in _tables() if tuple(rows[0]) == head]
    return found


OVERVIEW = _table("provider", "window", "cached", "`stream_options`", "overflow", "seen")
WINDOWS = _table("provider", "asked", "field", "of", "seen")
SERVERS = _table("server", "recognised by")
USAGE = _table("provider", "prompt", "cached", "stream", "seen")
OVERFLOWS = _table("provider", "status", "says", "limit", "prompt", "seen")
NO_OVERFLOWS = _table("what", "status", "says", "seen")
REASONING = _table("where", "names")
RATES = _table("provider", "header", "counts", "seen")
QUESTIONS, SHAPES = [rows for rows in _tables() if tuple(rows[0]) == ("provider", "status", "says", "seen")]


def each(rows: list[Row]) -> list[Any]:
    return [pytest.param(row, id=f"{at}-{next(iter(row.values()))}") for at, row in enumerate(rows)]


def codes(cell: str) -> list[str]:
    """What stands in a cell as code."""
    return re.findall(r"`([^`]+)`", cell)


def names(row: Row) -> list[str]:
    return row["provider"].split(", ")


def naming(rows: list[Row], provider: str) -> list[Row]:
    """The rows of a provider; where there are none those of gateways in front of it."""
    return [row for row in rows if provider in names(row)] or [
        row for row in rows if row["provider"] == provider + GATEWAY
    ]


# Windows

LENGTH = 12_345
Read = Callable[[bytes], Window | None]


def _listed(body: bytes) -> Window | None:
    found = discovery.listing(body)
    return found.said.of("m") if found is not None else None


READERS: dict[str, tuple[str, Read]] = {
    "GET /v1/models": ("data[].", _listed),
    "GET /props": ("", discovery.window_of_props),
    "GET /info": ("", discovery.window_of_tgi),
    "GET /api/ps": ("", lambda body: discovery.windows_of_ollama_ps(body).get("m")),
    "POST /api/show": ("", discovery.window_of_ollama_show),
    "GET /api/v0/models": ("", lambda body: discovery.windows_of_lm_studio(body).get("m")),
    "GET /api/extra/true_max_context_length": ("", discovery.window_of_kobold),
}


def _holding(path: str, value: object) -> dict[str, Any]:
    """The object with the value at a path; where the path goes through a list, that is of one object, which is called m."""
    key, _, rest = path.partition(".")
    name = key.removesuffix("[]")
    inner = _holding(rest, value) if rest else value
    return {name: [{"id": "m", **inner}] if key.endswith("[]") and isinstance(inner, dict) else inner}


@pytest.mark.parametrize("row", each(WINDOWS))
def test_a_window_is_read_where_the_row_says(row: Row) -> None:
    (asked,), (field,) = codes(row["asked"]), codes(row["field"])
    outer, read = READERS[asked]
    if asked == "POST /api/show":
        where, key = field.split(": ")
        told: dict[str, Any] = {where: f"stop x\n{key}   {LENGTH}"}
    else:
        told = _holding(outer + field, LENGTH)
    if row["provider"] == "llama.cpp" and asked == "GET /v1/models":
        told["data"][0]["owned_by"] = "llamacpp"
    assert read(json.dumps(told).encode()) == Window(LENGTH, "upstream", input_only=row["of"] == "prompt")
    assert row["of"] in ("prompt", "whole")


def test_every_field_that_is_read_has_a_row() -> None:
    fields = [codes(row["field"])[0] for row in WINDOWS if "/v1/models" in row["asked"]]
    keys = {part.removesuffix("[]") for field in fields for part in field.split(".")}
    assert {*discovery.TOTAL_KEYS, *discovery.INPUT_KEYS, *discovery.INSIDE_KEYS} <= keys


def test_every_server_with_an_api_of_its_own_has_a_row_and_is_recognised_by_it() -> None:
    owners = {}
    for row in SERVERS:
        key, _, owner = codes(row["recognised by"])[0].partition(": ")
        body = json.dumps({"data": [{"id": "m", key: owner or "m"}]}).encode()
        found = discovery.listing(body)
        assert found is not None
        owners[row["server"]] = found.server
    assert owners == {
        "llama.cpp": Server.LLAMA_CPP,
        "Ollama": Server.OLLAMA,
        "LM Studio": Server.LM_STUDIO,
        "KoboldCpp": Server.KOBOLD_CPP,
        "TGI": Server.TGI,
    }
    assert set(owners.values()) == set(Server)
    by_header, by_tag = discovery.listing(b'{"data":[{"id":"m"}]}', "llama.cpp"), discovery.listing(b'[{"id":"m:1b"}]')
    assert by_header is not None
    assert by_tag is not None
    assert (by_header.server, by_tag.server) == (Server.LLAMA_CPP, Server.OLLAMA)


# Usage

CACHED, OTHER = 640, 60


def _counts(row: Row) -> tuple[dict[str, Any], list[tuple[str, str]], Usage]:
    """An answer's members and headers with the row's counts in their places, and what they say."""
    prompt, cached = codes(row["prompt"]), codes(row["cached"])
    counts = {path: CACHED if path in cached else 1000 if len(prompt) == 1 else OTHER for path in (*prompt, *cached)}
    members: dict[str, Any] = {}
    headers = []
    for path, count in counts.items():
        if path.startswith("header "):
            headers.append((path.removeprefix("header "), str(count)))
            continue
        *outer, key = path.split(".")
        place = members
        for part in outer:
            place = place.setdefault(part, {})
        place[key] = count
    return members, headers, Usage(sum(counts[path] for path in prompt), cached=CACHED if cached else None)


@pytest.mark.parametrize("row", each(USAGE))
def test_usage_is_read_where_the_row_says(row: Row) -> None:
    members, headers, expected = _counts(row)
    choice: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": "stop"}
    ways = {
        "own chunk": [{"choices": [choice], "usage": None}, {"choices": [], **members}],
        "last chunk": [{"choices": [choice], **members}],
        "last choice": [{"choices": [{**choice, **members}]}],
    }
    chunks = [{"choices": [{"index": 0, "delta": {"content": "x"}}]}, *ways[row["stream"]]]
    stream = b"".join(b"data: %s\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n"
    whole = json.dumps({"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], **members}).encode()
    for kind, body in (("text/event-stream", stream), ("application/json", whole)):
        tap = Tap(kind, "")
        tap.feed(body)
        assert with_headers(tap.answer(want_text=False), headers).usage == expected, kind


@pytest.mark.parametrize("row", each(QUESTIONS))
async def test_a_refused_question_for_usage_is_noticed_and_not_repeated(row: Row, tmp_path: Path) -> None:
    (said,) = codes(row["says"])

    def refuses(body: Mapping[str, Any]) -> web.StreamResponse | None:
        error = web.json_response({"error": {"message": said}}, status=int(row["status"]))
        return error if "stream_options" in body else None

    stub = Stub(refuses)
    async with in_front_of(stub, tmp_path, upstream__stream_usage="always") as player:
        for turns in (3, 4):
            assert (await player.post({"model": "m", "stream": True, "messages": history(turns)})).status == 200
            await player.settled()
    assert ["stream_options" in body for body in stub.turns] == [True, False, False]


# Errors


def _bodies(said: str) -> Iterator[bytes]:
    inner = {"message": said, "type": "invalid_request_error", "param": None, "code": None}
    yield json.dumps({"error": inner}).encode()
    yield json.dumps({"error": said}).encode()
    yield json.dumps({"object": "error", **inner}).encode()
    yield json.dumps([{"error": inner}]).encode()
    yield json.dumps(
        {"error": {"message": "Provider error", "metadata": {"raw": json.dumps({"error": inner})}}}
    ).encode()
    yield said.encode()


@pytest.mark.parametrize("row", each(OVERFLOWS))
def test_an_overflow_is_recognised_with_the_numbers_of_the_row(row: Row) -> None:
    (said,), limit = codes(row["says"]), re.findall(r"\d+", row["limit"])
    expected = Overflow(
        int(limit[0]) if limit else None,
        int(row["prompt"]) if row["prompt"] else None,
        input_only=row["limit"].endswith("prompt"),
    )
    for body in _bodies(said):
        assert overflow.of_error(int(row["status"]), "application/json", body) == expected, body
        assert overflow.of_error(429, "application/json", body) is None
    event = json.dumps({"error": {"message": said}}).encode()
    assert overflow.of_event(event) == expected, "and as the first event of a stream"


def test_an_overflow_is_recognised_by_each_code_that_is_named() -> None:
    named = codes(next(line for line in TEXT.split("\n\n") if line.startswith("By a code alone")).split("A 200")[0])
    assert len(named) > 5
    for code in named:
        body = json.dumps({"error": {"message": "No.", "code": code}}).encode()
        assert overflow.of_error(400, "application/json", body) is not None, code


@pytest.mark.parametrize("row", each(NO_OVERFLOWS))
def test_what_only_sounds_like_an_overflow_is_none(row: Row) -> None:
    (said,) = codes(row["says"])
    for body in _bodies(said):
        assert overflow.of_error(int(row["status"]), "application/json", body) is None, body


@pytest.mark.parametrize("row", each(SHAPES))
def test_a_refused_shape_is_recognised(row: Row) -> None:
    (said,) = codes(row["says"])
    for body in _bodies(said):
        assert is_shape(int(row["status"]), body), body


# Reasoning, rates


def test_thoughts_are_known_by_every_name_in_the_table() -> None:
    keys, parts, tags = (codes(row["names"]) for row in REASONING)
    for key in keys:
        message = {"role": "assistant", "content": "So.", key: [{"text": "x"}] if key.endswith("details") else "x"}
        assert fingerprint.facts(json.dumps(message).encode()).reasoning, key
    for kind in parts:
        message = {"role": "assistant", "content": [{"type": kind, kind: "x"}, {"type": "text", "text": "So."}]}
        assert fingerprint.facts(json.dumps(message).encode()).reasoning, kind
    for tag in tags:
        assert without_thoughts(f"{tag}Well.{tag[0]}/{tag[1:]}\nSo.") == "So.", tag
    assert not fingerprint.facts(b'{"role":"assistant","content":"So."}').reasoning


@pytest.mark.parametrize("row", each(RATES))
def test_what_is_left_is_read_from_the_header(row: Row) -> None:
    (header,) = codes(row["header"])
    left = quota.remaining([(header, "4711")])
    found = {"tokens": left.tokens, "output tokens": left.output_tokens, "requests": left.requests}
    assert {kind: count for kind, count in found.items() if count is not None} == {row["counts"]: 4711}


# The whole


@pytest.mark.parametrize("row", each(OVERVIEW))
def test_the_overview_says_what_the_tables_say(row: Row) -> None:
    provider = row["provider"]
    assert row["window"] == ("asked" if naming(WINDOWS, provider) else "not said")
    is_read = any(found["cached"] for found in naming(USAGE, provider))
    assert row["cached"] == ("read" if is_read else "unknown")
    is_refused = bool(naming(QUESTIONS, provider))
    assert (row["`stream_options`"] == "refused") is is_refused
    assert row["`stream_options`"] in ("taken", "refused", "not known")
    errors = naming(OVERFLOWS, provider)
    known = "limit" if any(found["limit"] for found in errors) else "no number" if errors else "not known"
    assert row["overflow"].removesuffix(", silent") == known


def test_every_provider_of_a_table_is_in_the_overview() -> None:
    listed = {row["provider"] for row in OVERVIEW}
    named = {
        name.removesuffix(GATEWAY)
        for rows in (WINDOWS, USAGE, OVERFLOWS, SHAPES, RATES)
        for row in rows
        for name in names(row)
    }
    assert named - listed == {"Responses", "in Chinese"}
    assert {row["seen"] for rows in _tables() for row in rows if "seen" in row} == SEEN


RECORDED_AS = {
    "Azure OpenAI": "azure",
    "Alibaba Qwen": "alibaba",
    "Z.AI": "zai",
    "Hugging Face": "hf-router",
    "llama.cpp": "quoted-llamacpp",
}
"""Where the recordings of a provider are not called as it is."""


def _recordings(provider: str) -> list[samples.Sample]:
    name = RECORDED_AS.get(provider, provider.lower())
    return [
        s
        for s in samples.all_of()
        if s.name.removeprefix("quoted-").startswith((f"{name}-", f"{name.removeprefix('quoted-')}-"))
    ]


@pytest.mark.skipif(not any(samples.all_of()), reason=f"no recorded answers in {samples.WIRE} (WARMFOLD_WIRE)")
def test_what_is_called_recorded_is() -> None:
    """Of each provider there is a recording, and where the row is about a count or an error one that has it."""
    for row in OVERVIEW:
        assert bool(_recordings(row["provider"])) is (row["seen"] != "documented"), row["provider"]
    for row in filter(lambda row: row["seen"] == "recorded", USAGE):
        for provider in names(row):
            counted = [s.usage for s in _recordings(provider) if s.status == 200]
            assert any(usage.prompt is not None for usage in counted), provider
            assert not row["cached"] or any(usage.cached is not None for usage in counted), provider
    for row in filter(lambda row: row["seen"] == "recorded", OVERFLOWS):
        # "DeepSeek, vLLM": either has said so.
        assert any(s.is_overflow for provider in names(row) for s in _recordings(provider)), row["provider"]
    for row in filter(lambda row: row["seen"] == "recorded", RATES):
        sent = [key.lower() for provider in names(row) for s in _recordings(provider) for key, _ in s.headers]
        assert codes(row["header"])[0] in sent, row["header"]


CALLED = {
    "azure": "Azure OpenAI",
    "azure_openai": "Azure OpenAI",
    "bedrock converse": "Bedrock",
    "dashscope_qwen": "Alibaba Qwen",
    "github_copilot": "GitHub Copilot",
    "lmstudio": "LM Studio",
    "openrouter_poolside": "OpenRouter",
    "together_legacy_tgi": "Together",
    "volcengine_ark": "Volcengine",
    "zai_glm": "Z.AI",
}
OF_NOBODY = {"any", "generic", "generic_zh", "unknown_gateway", "ds4", "mlx-serve"}
"""Sentences of programs that few run; they are recognised as well (tests/core/test_overflow.py)."""


@pytest.mark.parametrize("table", ["usage_fields", "window_discovery", "overflow_patterns"])
def test_every_provider_that_there_are_facts_of_is_in_the_overview(table: str) -> None:
    if not samples.FACTS.exists():
        pytest.skip(f"no facts of providers in {samples.FACTS.parent} (WARMFOLD_PROVIDERS)")
    listed = {row["provider"].lower() for row in OVERVIEW}
    for param in samples.facts(table):
        for provider in param.values[0]["provider"].split(","):
            name = CALLED.get(provider, provider).lower().removesuffix(" native").removesuffix(" openai-compat")
            assert name in listed or name in OF_NOBODY, provider
