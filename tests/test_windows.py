"""How long a model's context is taken to be, and on whose word: the order of those who say so, and what each of them is trusted with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from genai_prices.types import ClauseEquals, ClauseOr, ClauseStartsWith, ModelInfo, Provider

from proxy import pricelist
from proxy.config import Compaction, load
from proxy.core import pressure
from proxy.core.discovery import Said
from proxy.core.limits import limits
from proxy.core.model import Window
from proxy.windows import Windows

OPEN = Compaction()
SET = Compaction(max_context_tokens=5000)
LISTED = Window(64_000, "pricelist")


def of(windows: Windows, model: str = "m", upstream: str = "u", policy: Compaction = OPEN) -> Window:
    return windows.of(upstream, model, policy, tenant="t")


def said(tokens: int, model: str = "m", *, input_only: bool = False) -> Said:
    return Said({model: Window(tokens, "upstream", input_only)})


def test_each_is_believed_before_the_next() -> None:
    windows = Windows(lambda upstream, model: LISTED if (upstream, model) == ("u", "m") else None)
    assert of(windows) == LISTED
    windows.learned("u", "m", 9000, input_only=False, tenant="t")
    assert of(windows) == Window(9000, "learned")
    windows.said("u", said(7000))
    assert of(windows) == Window(7000, "upstream")
    assert of(windows, policy=SET) == Window(5000, "config")
    for elsewhere in (of(windows, upstream="v"), of(windows, model="n")):
        assert elsewhere == Window(32_000, "assumed")


def test_a_limit_of_the_prompt_that_an_error_taught_holds_beside_the_upstreams_total() -> None:
    windows = Windows()
    windows.said("u", said(400_000))
    windows.learned("u", "m", 272_000, input_only=True, tenant="t")
    assert of(windows) == Window(272_000, "learned", input_only=True)
    windows.learned("u", "m", 300_000, input_only=False, tenant="t")
    assert of(windows) == Window(400_000, "upstream"), "two totals: the upstream's own word counts"
    windows.learned("u", "m", 500_000, input_only=True, tenant="t")
    assert of(windows) == Window(400_000, "upstream"), "the smaller limit is the one that is met first"
    windows.said("u", said(200_000, input_only=True))
    windows.learned("u", "m", 100_000, input_only=True, tenant="t")
    assert of(windows) == Window(200_000, "upstream", input_only=True)


@pytest.mark.parametrize("limit", [0, -1, 100_000_001])
def test_an_absurd_lesson_is_none(limit: int) -> None:
    windows = Windows()
    windows.learned("u", "m", limit, input_only=False, tenant="t")
    assert of(windows).origin == "assumed"


def test_a_lesson_is_forgotten_in_the_end() -> None:
    windows = Windows(lesson_s=0.0)
    windows.learned("u", "m", 9000, input_only=False, tenant="t")
    assert of(windows).origin == "assumed"


def test_an_assumed_window_rises_above_what_succeeded_and_no_other_does() -> None:
    windows = Windows()
    windows.proved("u", "m", of(windows), 31_000)
    assert of(windows) == Window(32_000, "assumed")
    windows.proved("u", "m", of(windows), 50_000)
    assert of(windows) == Window(100_000, "assumed")
    windows.proved("u", "m", of(windows), None)
    windows.said("u", said(7000))
    windows.proved("u", "m", of(windows), 50_000)
    assert of(windows) == Window(7000, "upstream")


def test_a_lesson_that_a_longer_prompt_refutes_is_forgotten_and_an_absurd_one_not_learned() -> None:
    windows = Windows()
    windows.learned("u", "m", 1, input_only=False, tenant="t")
    assert of(windows) == Window(32_000, "assumed")
    windows.learned("u", "m", 6000, input_only=False, tenant="t")
    for prompt in (None, 6000):
        windows.refuted("u", "m", of(windows), prompt, tenant="t")
    assert of(windows) == Window(6000, "learned")
    windows.refuted("u", "m", of(windows), 6001, tenant="t")
    assert of(windows) == Window(32_000, "assumed")
    windows.said("u", said(7000))
    windows.refuted("u", "m", of(windows), 50_000, tenant="t")
    assert of(windows) == Window(7000, "upstream")


def test_what_clients_name_is_remembered_within_bounds() -> None:
    windows = Windows()
    for number in range(5000):
        windows.learned("u", f"m{number}", 9000, input_only=False, tenant="t")
        windows.proved("u", f"m{number}", Window(32_000, "assumed"), 50_000)
    assert of(windows, "m4999").origin == "learned"
    assert of(windows, "m0") == Window(32_000, "assumed")
    windows.learned("u", "m" * 1000, 9000, input_only=False, tenant="t")
    assert of(windows, "m" * 1000).origin == "assumed"


def test_an_answer_takes_no_room_from_a_limit_of_the_prompt() -> None:
    shared, prompt_alone = (
        limits(OPEN, Window(200_000, "upstream", input_only), reasons=False) for input_only in (False, True)
    )
    assert pressure.must_compact(160_000, 64_000, shared)
    assert not pressure.must_compact(160_000, 64_000, prompt_alone)
    assert pressure.must_compact(prompt_alone.hard, 0, prompt_alone)


@pytest.mark.parametrize("origin", ["upstream", "learned", "pricelist"])
def test_whoever_says_it_the_hard_watermark_holds(origin: str) -> None:
    assert pressure.must_compact(31_000, 0, limits(OPEN, Window(32_000, origin), reasons=False))


def provider(name: str, pattern: str, *models: ModelInfo, fallback: list[str] | None = None) -> Provider:
    return Provider(name, name, pattern, fallback_model_providers=fallback, models=list(models))


def priced(match: ClauseEquals | ClauseOr | ClauseStartsWith, window: int | None) -> ModelInfo:
    return ModelInfo("any", match, context_window=window)


PROVIDERS = [
    provider(
        "openai", r"https://api\.openai\.com", priced(ClauseEquals("big"), 400_000), priced(ClauseEquals("o"), 128_000)
    ),
    provider("azure", r"(https?://)?([^.]*\.)?(?:openai\.azure\.com)", fallback=["openai"]),
    provider(
        "vendor",
        r"https://api\.vendor\.com",
        priced(ClauseOr([ClauseEquals("exact"), ClauseEquals("also-exact")]), 200_000),
        priced(ClauseStartsWith("family-"), 100_000),
        priced(ClauseEquals("agreed"), 8000),
        priced(ClauseEquals("disputed"), 8000),
        priced(ClauseEquals("unknown"), None),
    ),
    provider(
        "reseller",
        r"https://[^/]+\.resell\.com/v1(?:/|$)",
        priced(ClauseEquals("agreed"), 8000),
        priced(ClauseEquals("disputed"), 4000),
    ),
    provider("twin", r"https://api\.vendor\.com", priced(ClauseEquals("exact"), 150_000)),
]


@pytest.mark.parametrize(
    ("base_url", "model", "tokens"),
    [
        pytest.param("https://api.openai.com/v1", "o", 128_000, id="at home"),
        pytest.param("https://api.openai.com", "O", 128_000, id="without a path, in capitals"),
        pytest.param(
            "https://name.openai.azure.com/openai/v1", "o", 128_000, id="another's models, by the list's rule"
        ),
        pytest.param("https://api.vendor.com/v1", "family-7", 100_000, id="a family, at home"),
        pytest.param("https://api.vendor.com/v1", "exact", None, id="two at one address who disagree"),
        pytest.param("https://api.vendor.com/v1", "unknown", None, id="no window listed"),
        pytest.param("https://api.vendor.com/v1", "o", None, id="not of this provider"),
        pytest.param("https://a.resell.com/v1", "disputed", 4000, id="an address with a path"),
        pytest.param("https://gateway.example/v1", "also-exact", 200_000, id="elsewhere, exactly"),
        pytest.param("https://gateway.example/v1", "agreed", 8000, id="elsewhere, all agree"),
        pytest.param("https://gateway.example/v1", "disputed", None, id="elsewhere, they do not"),
        pytest.param("https://gateway.example/v1", "family-7", None, id="elsewhere, by a part of the name"),
        pytest.param("https://api.vendor.com.example/v1", "family-7", None, id="an address that only begins alike"),
        pytest.param(
            "https://gateway.example/?x=https://api.vendor.com", "family-7", None, id="an address in the query"
        ),
        pytest.param("https://api.openai.com/v1", "", None, id="no name"),
        pytest.param("https://api.openai.com/v1", "o" * 300, None, id="no name of a model"),
    ],
)
def test_what_a_price_list_is_trusted_with(base_url: str, model: str, tokens: int | None) -> None:
    window = pricelist.window_on(base_url, PROVIDERS)(model)
    assert window == (None if tokens is None else Window(tokens, "pricelist"))


@pytest.mark.parametrize(
    "base_url", ["https://api.openai.com/v1", "https://x.openai.azure.com/v1", "https://gateway.example/v1"]
)
def test_of_openais_long_windows_the_prompt_has_what_the_answer_leaves(base_url: str) -> None:
    """The price list says 400,000 of GPT-5; OpenAI refuses a prompt beyond 272,000, whatever was asked for as its answer."""
    assert pricelist.window_on(base_url, PROVIDERS)("big") == Window(272_000, "pricelist", input_only=True)


@pytest.mark.parametrize(
    "base_url",
    [
        "http://127.0.0.1:8000/v1",
        "http://localhost:11434/v1",
        "http://10.1.2.3/v1",
        "http://vllm:8000/v1",
        "http://[fd00::1]/v1",
    ],
)
async def test_a_server_in_a_private_network_is_no_business_of_the_price_list(base_url: str) -> None:
    listed = await pricelist.listed(load(None, {}, {"upstream.base_url": base_url}))
    assert listed("default", "gpt-4o") is None
    assert of(Windows(listed), "gpt-4o", "default") == Window(32_000, "assumed")


async def test_each_upstream_has_a_list_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        '[upstream]\nbase_url = "https://api.openai.com/v1"\n'
        '[[upstreams]]\nname = "near"\nmatch = "x*"\nbase_url = "http://127.0.0.1:1/v1"\n'
    )
    listed = await pricelist.listed(load(file, {}, {}))
    assert listed("default", "gpt-4o") == Window(128_000, "pricelist")
    assert listed("near", "gpt-4o") is None


READS_THE_LIST = """
import asyncio, json, sys, threading
seen = []
sys.addaudithook(lambda event, args: seen.append(event) if event.startswith("socket.") and args and event != "socket.__new__" else None)
from proxy import pricelist
from proxy.config import load
config = load(None, {}, {"upstream.base_url": "https://api.openai.com/v1", **json.loads(sys.argv[1])})
before = set(seen)
listed = asyncio.run(pricelist.listed(config))
found = listed("default", "gpt-4o")
assert not {"socket.connect", "socket.getaddrinfo", "socket.sendto"} & set(seen), seen
assert [thread.name for thread in threading.enumerate()] == ["MainThread"], threading.enumerate()
print(found, "genai_prices" in sys.modules)
"""


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({}, "Window(tokens=128000, origin='pricelist', input_only=False) True"),
        ({"compaction.max_context_tokens": 9000}, "None False"),
        ({"upstream.base_url": "http://127.0.0.1:1/v1"}, "None False"),
    ],
)
def test_the_list_is_read_where_it_can_matter_and_asks_nobody(flags: dict[str, object], told: str) -> None:
    """In a process of its own: what has been imported stays, and an audit hook too."""
    ran = subprocess.run(
        [sys.executable, "-c", READS_THE_LIST, json.dumps(flags)], capture_output=True, text=True, check=False
    )
    assert (ran.stdout.strip(), ran.stderr) == (told, "")


def test_what_one_tenant_was_told_shortens_nobody_elses_window() -> None:
    """An error may quote what a client wrote: its words are not the provider's to all others."""
    windows, policy = Windows(), Compaction()
    windows.learned("u", "m", 3000, input_only=False, tenant="evil")
    assert windows.of("u", "m", policy, tenant="evil") == Window(3000, "learned")
    assert windows.of("u", "m", policy, tenant="other") == Window(32_000, "assumed")
    windows.refuted("u", "m", Window(3000, "learned"), 50_000, tenant="other")
    assert windows.of("u", "m", policy, tenant="evil") == Window(3000, "learned")
