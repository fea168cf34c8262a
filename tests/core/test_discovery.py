"""What upstreams' answers say about windows: one table per kind of answer, then: no answer whatever raises or gives an absurd window."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import discovery
from proxy.core.discovery import Listing, Said, Server
from proxy.core.model import Window
from tests import recorded

SAMPLES = recorded.FOLDER.parent / "llama" / "samples"


def total(tokens: int) -> Window:
    return Window(tokens, "upstream")


def of_prompt(tokens: int) -> Window:
    return Window(tokens, "upstream", input_only=True)


def listed(*models: Any, server_header: str = "", **more: Any) -> Listing:
    found = discovery.listing(json.dumps({"object": "list", "data": models, **more}).encode(), server_header)
    assert found is not None
    return found


def model(**more: Any) -> dict[str, Any]:
    return {"id": "m", "object": "model", "created": 1_767_225_600, "owned_by": "somebody", **more}


@pytest.mark.parametrize(
    ("entry", "window"),
    [
        pytest.param(model(owned_by="vllm", root="org/m", max_model_len=40_960), total(40_960), id="vLLM"),
        pytest.param(model(owned_by="sglang", max_model_len=131_072), total(131_072), id="SGLang"),
        pytest.param(
            model(context_length=1_048_576, top_provider={"context_length": 262_000, "max_completion_tokens": 8192}),
            total(262_000),
            id="OpenRouter: its provider gives less",
        ),
        pytest.param(
            model(context_length=200_000, top_provider={"context_length": None, "max_completion_tokens": None}),
            total(200_000),
            id="OpenRouter: the provider says nothing",
        ),
        pytest.param(model(max_context_length=131_072, capabilities={"vision": True}), total(131_072), id="Mistral"),
        pytest.param(model(context_window=131_072, max_completion_tokens=65_536), total(131_072), id="Groq"),
        pytest.param(model(context_length=262_144), total(262_144), id="Moonshot"),
        pytest.param(model(contextLength="131072"), total(131_072), id="Together, as text"),
        pytest.param(model(context_size=65_536), total(65_536), id="Novita"),
        pytest.param(model(limits={"max_context_length": 131_072}), total(131_072), id="Cerebras"),
        pytest.param(model(metadata={"context_length": 32_768}), total(32_768), id="DeepInfra"),
        pytest.param(
            model(providers=[{"context_length": 131_072}, {"context_length": 65_536}, {"provider": "x"}]),
            total(65_536),
            id="Hugging Face: any of its providers",
        ),
        pytest.param(model(max_input_tokens=200_000, max_tokens=64_000), of_prompt(200_000), id="Anthropic"),
        pytest.param(model(inputTokenLimit=1_048_576), of_prompt(1_048_576), id="Gemini"),
        pytest.param(
            model(capabilities={"limits": {"max_context_window_tokens": 400_000, "max_prompt_tokens": 272_000}}),
            of_prompt(272_000),
            id="GitHub Copilot: a limit of the prompt below the window",
        ),
        pytest.param(
            model(context_length=128_000, max_input_tokens=128_000), total(128_000), id="both the same: shared"
        ),
        pytest.param(
            model(owned_by="llamacpp", meta={"n_ctx": 16_384, "n_ctx_train": 32_768}), total(16_384), id="llama.cpp"
        ),
        pytest.param(model(owned_by="llamacpp", meta={"n_ctx_train": 32_768}), None, id="llama.cpp: trained on"),
        pytest.param(model(owned_by="llamacpp", meta=None), None, id="llama.cpp: still loading"),
        pytest.param(
            model(owned_by="organization_owner", max_context_length=131_072), None, id="LM Studio: could have"
        ),
        pytest.param(model(owned_by="openai"), None, id="OpenAI says nothing"),
        pytest.param(model(max_tokens=4096, max_completion_tokens=4096), None, id="a limit of answers is no window"),
    ],
)
def test_what_a_listing_says(entry: dict[str, Any], window: Window | None) -> None:
    assert listed(entry).said.of("m") == window


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        (1, 1),
        (100_000_000, 100_000_000),
        (8192.0, 8192),
        ("8192", 8192),
        (0, None),
        (-1, None),
        (100_000_001, None),
        (10**30, None),
        (True, None),
        (8192.5, None),
        (None, None),
        ("", None),
        ("8k", None),
        ("-8192", None),
        ("1e5", None),
        ("٨١٩٢", None),  # digits, but no number that anybody writes there
        ("9" * 5000, None),
        ([8192], None),
        ({"value": 8192}, None),
    ],
)
def test_an_absurd_figure_is_unknown(value: object, tokens: int | None) -> None:
    assert listed(model(max_model_len=value)).said.of("m") == (None if tokens is None else total(tokens))


def test_a_listing_may_be_a_bare_list_or_stand_under_models() -> None:
    bare = discovery.listing(b'[{"id":"a","context_length":4096},{"id":"b"}]')
    gemini = discovery.listing(b'{"models":[{"name":"models/gemini-x","inputTokenLimit":1000}]}')
    assert bare is not None
    assert gemini is not None
    assert bare.said.windows == {"a": total(4096)}
    assert gemini.said.of("gemini-x") == gemini.said.of("models/gemini-x") == of_prompt(1000)


@pytest.mark.parametrize("body", [b"", b"null", b"{", b'{"error":"no"}', b'{"data":null}', b"<html>", b"[" * 100_000])
def test_what_is_no_list_of_models_is_none(body: bytes) -> None:
    assert discovery.listing(body) is None


def test_an_unknown_model_is_unknown() -> None:
    assert listed(model(max_model_len=8192)).said.of("other") is None


def test_a_model_goes_by_its_aliases_too_but_not_by_another_models_name() -> None:
    said = listed(
        model(id="a-2411", aliases=["a-latest", "b", 7], max_context_length=1000),
        model(id="b", max_context_length=2000),
    ).said
    assert (said.of("a-2411"), said.of("a-latest"), said.of("b")) == (total(1000), total(1000), total(2000))


def test_an_adapter_has_the_window_of_its_base_model() -> None:
    said = listed(
        model(id="lora", parent="base", max_model_len=None), model(id="base", max_model_len=8192, parent=None)
    ).said
    assert said.of("lora") == total(8192)


def test_a_server_with_one_model_that_does_not_look_at_names_says_it_for_any_name() -> None:
    llama = model(owned_by="llamacpp", meta={"n_ctx": 4096})
    assert listed(llama).said.of("gpt-4o") == total(4096)
    assert listed(llama, model(id="n", owned_by="llamacpp", meta={"n_ctx": 2048})).said.of("gpt-4o") is None
    assert listed(model(owned_by="vllm", max_model_len=4096)).said.of("gpt-4o") is None, "vLLM refuses other names"


@pytest.mark.parametrize(
    ("models", "header", "server"),
    [
        ([model(owned_by="llamacpp")], "", Server.LLAMA_CPP),
        ([model(owned_by="me")], "llama.cpp", Server.LLAMA_CPP),
        ([model(id="llama3.2:latest", owned_by="library")], "", Server.OLLAMA),
        ([model(id="hf.co/x/y:Q4", owned_by="x"), model(id="z:1b", owned_by="somebody")], "", Server.OLLAMA),
        ([model(id="z:1b", context_length=None)], "", None),
        ([model(owned_by="organization_owner")], "", Server.LM_STUDIO),
        ([model(owned_by="koboldcpp")], "", Server.KOBOLD_CPP),
        ([model(owned_by="vllm")], "uvicorn", None),
        ([], "", None),
    ],
)
def test_whose_own_api_may_know_more(models: list[dict[str, Any]], header: str, server: Server | None) -> None:
    assert listed(*models, server_header=header).server is server


def test_props_tell_the_length_of_a_slot() -> None:
    body = b'{"default_generation_settings":{"n_ctx":2048,"params":{"n_ctx":1}},"total_slots":2,"n_ctx":4096}'
    assert discovery.window_of_props(body) == total(2048)


@pytest.mark.parametrize(
    ("told", "window"),
    [
        pytest.param({"max_input_tokens": 4095, "max_total_tokens": 4096}, total(4096), id="both"),
        pytest.param({"max_total_tokens": 4096}, total(4096), id="the total"),
        pytest.param({"max_input_tokens": 4095, "max_total_tokens": None}, of_prompt(4095), id="the prompt's"),
        pytest.param({"model_id": "m", "max_batch_total_tokens": 4096}, None, id="neither"),
    ],
)
def test_tgi_tells_the_total(told: dict[str, Any], window: Window | None) -> None:
    assert discovery.window_of_tgi(json.dumps(told).encode()) == window
    assert discovery.window_of_tgi(b"Not Found") is None


def test_ollama_tells_what_is_loaded_and_not_what_was_trained() -> None:
    loaded = b'{"models":[{"name":"a:latest","model":"a:latest","context_length":8192},{"name":"b:7b","size":1}]}'
    assert discovery.windows_of_ollama_ps(loaded) == {"a:latest": total(8192), "a": total(8192)}


@pytest.mark.parametrize(
    ("shown", "window"),
    [
        ({"parameters": 'stop    "<end>"\nnum_ctx                        8192'}, total(8192)),
        ({"parameters": "num_ctx 65536", "model_info": {"llama.context_length": 32_768}}, total(32_768)),
        ({"parameters": "stop x", "model_info": {"llama.context_length": 131_072}}, None),
        ({"model_info": {"llama.context_length": 131_072}}, None),
        ({"parameters": "num_ctx many"}, None),
        ({"parameters": ["num_ctx 8192"], "model_info": 7}, None),
    ],
)
def test_ollama_shows_what_the_model_file_sets(shown: dict[str, Any], window: Window | None) -> None:
    assert discovery.window_of_ollama_show(json.dumps(shown).encode()) == window


def test_lm_studio_tells_what_is_loaded() -> None:
    models = [
        {"id": "a", "state": "loaded", "max_context_length": 131_072, "loaded_context_length": 4096},
        {"id": "b", "state": "not-loaded", "max_context_length": 32_768},
    ]
    assert discovery.windows_of_lm_studio(json.dumps({"data": models}).encode()) == {"a": total(4096)}


def test_kobold_tells_one_value() -> None:
    assert discovery.window_of_kobold(b'{"value": 12288}') == total(12_288)


def test_what_was_said_later_counts_and_what_is_not_mentioned_stays() -> None:
    first = Said({"a": total(1), "b": total(2)}, any_model=total(3))
    assert first.then(Said({"a": total(9)})) == Said({"a": total(9), "b": total(2)})
    assert first.then(Said()) == first
    assert first.then(Said(any_model=total(4))).of("c") == total(4)


def test_no_more_than_so_many_models_and_no_longer_names_are_kept() -> None:
    many = [model(id=f"m{i}", max_model_len=i + 1) for i in range(discovery.MAX_MODELS + 10)]
    said = listed(*many).said
    assert len(said.windows) == discovery.MAX_MODELS
    aliases = [f"a{i}" for i in range(2 * discovery.MAX_MODELS)]
    assert len(listed(model(aliases=aliases, max_model_len=1)).said.windows) == discovery.MAX_MODELS
    assert listed(model(id="n" * 300, max_model_len=1)).said == Said()
    more = Said({f"other{i}": total(1) for i in range(discovery.MAX_MODELS)})
    assert said.then(more) == more


READERS = (
    discovery.listing,
    discovery.window_of_props,
    discovery.window_of_kobold,
    discovery.windows_of_lm_studio,
    discovery.windows_of_ollama_ps,
    discovery.window_of_ollama_show,
)
KEYS = st.sampled_from(
    [
        "data",
        "models",
        "id",
        "name",
        "model",
        "aliases",
        "parent",
        "owned_by",
        "meta",
        "n_ctx",
        "max_model_len",
        "context_length",
        "top_provider",
        "providers",
        "limits",
        "max_input_tokens",
        "default_generation_settings",
        "parameters",
        "model_info",
        "x.context_length",
        "loaded_context_length",
        "value",
    ]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from(["m", "llamacpp", "library", "num_ctx 12"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(), inner, max_size=6),
    max_leaves=30,
)


def _windows(found: object) -> list[Window]:
    if isinstance(found, Listing):
        return [*found.said.windows.values(), *([found.said.any_model] if found.said.any_model else [])]
    if isinstance(found, dict):
        return list(found.values())
    return [found] if isinstance(found, Window) else []


@given(st.binary() | VALUES.map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass")))
def test_no_answer_whatever_raises_or_gives_an_absurd_window(body: bytes) -> None:
    for read in READERS:
        for window in _windows(read(body)):
            assert type(window.tokens) is int
            assert 0 < window.tokens <= discovery.MAX_TOKENS
            assert window.origin == "upstream"


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="no recorded answers of a llama.cpp server")
def test_recorded_answers_of_llama_cpp() -> None:
    models, props = ((SAMPLES / f"qwen_{name}.txt").read_bytes().partition(b"\n{") for name in ("models", "props"))
    found = discovery.listing(b"{" + models[2])
    assert found is not None
    assert found.said.of("qwen") == discovery.window_of_props(b"{" + props[2]) == total(16_384)
    assert found.server is Server.LLAMA_CPP
