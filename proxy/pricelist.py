"""Windows from a price list: genai-prices, as it came with its wheel. Its updater, which would ask the network, is never started.

Used for upstreams in public networks alone. A server of one's own calls its models what it likes, and loads them with the context it has
memory for: docs/decisions/0024-windows-from-a-price-list.md.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from proxy.config import Config
from proxy.core.discovery import MAX_NAME_LENGTH
from proxy.core.model import Window
from proxy.locality import is_local
from proxy.windows import Listed, not_listed

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, Provider

log = logging.getLogger("warmfold.pricelist")

_CACHED = 4096

_OPENAI = ("openai", "azure")
_OPENAI_LONG = 400_000
_OPENAI_ANSWER = 128_000
"""OpenAI's 400,000 tokens (GPT-5) are 272,000 for the prompt and 128,000 for the answer. Its refusal states the former ("configured limit of
272000 tokens"), price lists the sum. Models of 1,050,000 are cut the same way; for GPT-4.1, which is not, this is a little early."""


async def listed(config: Config) -> Listed:
    """The list for the configured upstreams; read only where it can matter (0.05 s and 6 MB, measured on 2026-11-30)."""
    public = {
        upstream.name: upstream.base_url
        for upstream in (config.upstream, *config.upstreams)
        if not is_local(upstream.base_url)
    }
    if not public or config.compaction.max_context_tokens is not None:
        return not_listed
    try:
        by_name = await asyncio.to_thread(_read, public)
    except Exception as error:  # a list is no reason not to serve
        log.error("the price list cannot be read error=%s", type(error).__name__)
        return not_listed
    return lambda upstream, model: by_name[upstream](model) if upstream in by_name else None


def _read(public: Mapping[str, str]) -> dict[str, Callable[[str], Window | None]]:
    from genai_prices.data import providers  # noqa: PLC0415 - takes a while, and who configures windows does not need it

    return {name: window_on(base_url, providers) for name, base_url in public.items()}


def window_on(base_url: str, providers: list[Provider]) -> Callable[[str], Window | None]:
    """The window of a model, by name, on the upstream at a public `base_url`.

    A provider that the list knows by its address names its own models, and the list's own rules find them. Behind any other address
    there may be anything, a gateway most likely: there a name must stand in the list letter for letter, with the same window wherever it
    does.
    """
    at_home = [provider for provider in providers if _is_at(provider, base_url)]
    by_name = {} if at_home else _by_exact_name(providers)

    @lru_cache(maxsize=_CACHED)
    def window(model: str) -> Window | None:
        windows = {_at(provider, model, providers) for provider in at_home} or by_name.get(model.lower(), set())
        windows = windows - {None}
        return windows.pop() if len(windows) == 1 else None

    return lambda model: window(model) if 0 < len(model) <= MAX_NAME_LENGTH else None


def _at(provider: Provider, model: str, providers: list[Provider]) -> Window | None:
    known = provider.find_model(model, all_providers=providers)
    return _window(provider, known) if known is not None else None


def _by_exact_name(providers: list[Provider]) -> dict[str, set[Window | None]]:
    found: dict[str, set[Window | None]] = {}
    for provider in providers:
        for model in provider.models:
            for name in _exact_names(model.match):
                found.setdefault(name.lower(), set()).add(_window(provider, model))
    return found


def _exact_names(match: object) -> Iterator[str]:
    """Names that a rule takes as they are; not those that it takes by a part of them. By attribute: the classes come with the import."""
    if isinstance(name := getattr(match, "equals", None), str):
        yield name
    for clause in getattr(match, "or_", ()):
        yield from _exact_names(clause)


def _window(provider: Provider, model: ModelInfo) -> Window | None:
    tokens = model.context_window
    if not tokens:
        return None
    if provider.id in _OPENAI and tokens >= _OPENAI_LONG:
        return Window(tokens - _OPENAI_ANSWER, "pricelist", input_only=True)
    return Window(tokens, "pricelist")


def _is_at(provider: Provider, base_url: str) -> bool:
    """Whether the provider lives there. The list's pattern must end where the host does, or behind it: not at api.openai.com.example."""
    url = urlsplit(base_url)
    address = f"{url.scheme}://{url.hostname or ''}{url.path.rstrip('/')}/"
    found = re.match(provider.api_pattern, address)
    return found is not None and (address[found.end() - 1] == "/" or address[found.end()] == "/")
