"""What upstreams say about the length of their models' contexts: the answer to /v1/models, and those of servers' own APIs.

Nothing here raises, whatever an upstream answers: what cannot be read is unknown. Only what is in force counts. The length a model was
trained on, or could be loaded with, is what a local server advertises and not what it gives: Ollama cuts prompts at the loaded length and
says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from proxy.core.model import Window

MAX_TOKENS = 100_000_000
"""More than any window has: a number beyond it counts something else."""
MAX_MODELS = 4096
MAX_NAME_LENGTH = 256

_MAX_PROVIDERS = 16
"""Of one model, in a list of many: it is read on the event loop."""

TOTAL_KEYS = (
    "max_model_len",  # vLLM, SGLang
    "context_length",  # OpenRouter, Moonshot, Together, Fireworks, Cerebras, Xinference
    "contextLength",  # Together, Fireworks
    "context_window",  # Groq, Vercel
    "max_context_length",  # Mistral
    "context_size",  # Novita
    "max_context_window_tokens",  # GitHub Copilot
)
INPUT_KEYS = (
    "max_input_tokens",  # Anthropic, GitHub Models
    "inputTokenLimit",  # Gemini
    "max_prompt_tokens",  # GitHub Copilot
)
"""Limits of the prompt alone: the answer does not count."""
INSIDE_KEYS = ("top_provider", "limits", "capabilities", "metadata")
"""Objects in which some keep those: OpenRouter, Cerebras, GitHub Copilot (limits within capabilities), DeepInfra."""

_OLLAMA_KEYS = frozenset({"id", "object", "created", "owned_by"})


class Server(StrEnum):
    """Servers whose own API knows more than their /v1/models."""

    LLAMA_CPP = "llamacpp"
    OLLAMA = "library"
    LM_STUDIO = "organization_owner"
    KOBOLD_CPP = "koboldcpp"
    TGI = "text-generation-inference"
    # The values are what they put into `owned_by`; Ollama does for models of its own library, TGI puts the model's own name there.


@dataclass(frozen=True, slots=True)
class Said:
    """Windows by model name. `any_model`: of whatever name is asked for, where a server has one model and does not look at the name."""

    windows: Mapping[str, Window] = field(default_factory=dict)
    any_model: Window | None = None

    def of(self, model: str) -> Window | None:
        """The window of a model; None: not said."""
        return self.windows.get(model) or self.any_model

    def then(self, later: Said) -> Said:
        """Both; where they differ, what was said later. A model that is not mentioned any more keeps its window: it may only be unloaded.

        No more than MAX_MODELS: where it would be more, only the later.
        """
        if not later.windows and later.any_model is None:
            return self
        both = {**self.windows, **later.windows}
        return Said(both if len(both) <= MAX_MODELS else later.windows, later.any_model)


@dataclass(frozen=True, slots=True)
class Listing:
    """An answer to /v1/models: what it says, and whose own API to ask for the rest. `single`: the server has one model."""

    said: Said
    server: Server | None
    single: bool


def listing(body: bytes, server_header: str = "") -> Listing | None:
    """What /v1/models says; None where it is no list of models. `server_header`: the answer's Server header."""
    told = _decoded(body)
    entries = next((told[key] for key in ("data", "models") if key in told), None) if isinstance(told, dict) else told
    if not isinstance(entries, list):
        return None
    models = [entry for entry in entries[:MAX_MODELS] if isinstance(entry, dict)]
    found: dict[str, Window] = {}
    for names in (_ids, _aliases):  # an alias never stands in for a model of that very name
        for entry in models:
            _add(found, names(entry), _window(entry))
    for entry in models:  # an adapter is listed without a length (vLLM): it has its base model's
        _add(found, _ids(entry), found.get(str(entry.get("parent"))))
    server, single = _server(models, server_header), len(models) == 1
    sole = _window(models[0]) if single and server is Server.LLAMA_CPP else None
    return Listing(Said(found, sole), server, single)


def window_of_props(body: bytes) -> Window | None:
    """llama.cpp's /props: the length of one slot, which is what a request has."""
    settings = _object(_object(_decoded(body)).get("default_generation_settings"))
    return _said(_tokens(settings.get("n_ctx")))


def window_of_kobold(body: bytes) -> Window | None:
    """KoboldCpp's /api/extra/true_max_context_length."""
    return _said(_tokens(_object(_decoded(body)).get("value")))


def window_of_tgi(body: bytes) -> Window | None:
    """TGI's /info. What a prompt alone may have stands beside the total, and is mostly one token less."""
    told = _object(_decoded(body))
    total, prompt = _tokens(told.get("max_total_tokens")), _tokens(told.get("max_input_tokens"))
    return _said(total) or _said(prompt, input_only=True)


def windows_of_lm_studio(body: bytes) -> Mapping[str, Window]:
    """LM Studio's /api/v0/models: models that are loaded. `max_context_length` is what they could be loaded with."""
    return _by_name(_object(_decoded(body)).get("data"), "loaded_context_length")


def windows_of_ollama_ps(body: bytes) -> Mapping[str, Window]:
    """Ollama's /api/ps: models that are loaded, each as `name:tag`, and without its tag where that is `latest`."""
    return _by_name(_object(_decoded(body)).get("models"), "context_length")


def window_of_ollama_show(body: bytes) -> Window | None:
    """Ollama's /api/show: what the model file sets, which holds whenever the model is loaded; at most what it was trained on.

    None where it sets nothing: then the server's default holds, which only a loaded model tells.
    """
    told = _object(_decoded(body))
    parameters = told.get("parameters")
    lines = parameters.splitlines() if isinstance(parameters, str) else ()
    set_to = next(
        (_tokens(words[1]) for line in lines if len(words := line.split()) == 2 and words[0] == "num_ctx"), None
    )
    if set_to is None:
        return None
    info = _object(told.get("model_info"))
    trained = (_tokens(value) for key, value in info.items() if key.endswith(".context_length"))
    return _said(min([set_to, *(length for length in trained if length is not None)]))


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _ids(entry: Mapping[str, Any]) -> list[str]:
    """What a model is called. Gemini lists `models/x` and takes `x` as well."""
    names = [entry["id"]] if "id" in entry else [entry.get("name"), entry.get("model")]
    named = _texts(names)
    return named + [name.removeprefix("models/") for name in named if name.startswith("models/")]


def _aliases(entry: Mapping[str, Any]) -> list[str]:
    aliases = entry.get("aliases")
    return _texts(aliases) if isinstance(aliases, list) else []


def _texts(names: Sequence[Any]) -> list[str]:
    return [name for name in names if isinstance(name, str) and 0 < len(name) <= MAX_NAME_LENGTH]


def _add(found: dict[str, Window], names: Iterable[str], window: Window | None) -> None:
    if window is not None:
        for name in names:
            if len(found) < MAX_MODELS:
                found.setdefault(name, window)


def _window(entry: Mapping[str, Any]) -> Window | None:
    owner = entry.get("owned_by")
    if owner == Server.LM_STUDIO:
        return _said(_tokens(entry.get("loaded_context_length")))
    if owner == Server.LLAMA_CPP:
        return _said(_tokens(_object(entry.get("meta")).get("n_ctx")))  # n_ctx_train beside it is what it could have
    total, prompt = _least(entry, TOTAL_KEYS), _least(entry, INPUT_KEYS)
    if prompt is not None and (total is None or prompt < total):
        return _said(prompt, input_only=True)
    return _said(total)


def _least(entry: Mapping[str, Any], keys: Sequence[str], depth: int = 2) -> int | None:
    """The smallest of several figures: a router's and its provider's may differ, and which provider gets a request is the router's choice."""
    found = [_tokens(entry.get(key)) for key in keys]
    providers = entry.get("providers")  # Hugging Face
    if depth:
        inside = [entry.get(key) for key in INSIDE_KEYS]
        inside += providers[:_MAX_PROVIDERS] if isinstance(providers, list) else []
        found += [_least(one, keys, depth - 1) for one in inside if isinstance(one, dict)]
    return min((tokens for tokens in found if tokens is not None), default=None)


def _server(models: Sequence[Mapping[str, Any]], server_header: str) -> Server | None:
    if server_header.lower().startswith("llama.cpp"):
        return Server.LLAMA_CPP
    owners = {owner for entry in models if isinstance(owner := entry.get("owned_by"), str)}
    named = next((server for server in Server if server in owners), None)
    # Models from elsewhere have another owner, but Ollama lists every name with its tag, and nothing beside it.
    if named is None and len(models) == 1 and {models[0].get("id")} == owners:
        return Server.TGI
    tagged = models and all(":" in str(entry.get("id")) and _OLLAMA_KEYS.issuperset(entry) for entry in models)
    return named or (Server.OLLAMA if tagged else None)


def _by_name(models: Any, key: str) -> Mapping[str, Window]:
    found: dict[str, Window] = {}
    for entry in models[:MAX_MODELS] if isinstance(models, list) else ():
        if isinstance(entry, dict):
            window = _said(_tokens(entry.get(key)))
            _add(found, _ids(entry), window)
            _add(found, [name.removesuffix(":latest") for name in _ids(entry)], window)
    return found


def _said(tokens: int | None, *, input_only: bool = False) -> Window | None:
    return None if tokens is None else Window(tokens, "upstream", input_only)


def _tokens(value: Any) -> int | None:
    """A count of tokens; also one written as text or with a fraction of zero. None: no count, or absurd."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= len(str(MAX_TOKENS)):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 < value <= MAX_TOKENS else None
