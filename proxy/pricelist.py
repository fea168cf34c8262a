"""Windows and prices from a price list: genai-prices, as it came with its wheel. Its updater, which would ask the network, is never started.

Used for upstreams in public networks alone. A server of one's own calls its models what it likes, loads them with the context it has memory
for, and costs what nobody else knows: docs/decisions/0024-windows-from-a-price-list.md.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import urlsplit

from proxy import clock
from proxy.config import Config
from proxy.core import payback
from proxy.core.discovery import MAX_NAME_LENGTH
from proxy.core.model import Window
from proxy.core.payback import Prices
from proxy.locality import is_local
from proxy.windows import Listed, not_listed

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, Provider

log = logging.getLogger("warmfold.pricelist")

T = TypeVar("T")


class Priced(NamedTuple):
    """US dollars per million tokens as a list or a rule has them; None: it does not say."""

    input: float | None = None
    cached: float | None = None
    write: float | None = None
    output: float | None = None


PriceList = Callable[[str, str], Priced | None]
"""The prices of a model on an upstream (both by name), now."""

_CACHED = 4096

_OPENAI = ("openai", "azure")
_OPENAI_LONG = 400_000
_OPENAI_ANSWER = 128_000
"""OpenAI's 400,000 tokens (GPT-5) are 272,000 for the prompt and 128,000 for the answer. Its refusal states the former ("configured limit of
272000 tokens"), price lists the sum. Models of 1,050,000 are cut the same way; for GPT-4.1, which is not, this is a little early."""


async def listed(config: Config) -> Listed:
    """The windows of the list for the configured upstreams; read only where it can matter (0.05 s and 6 MB, measured on 2026-11-30)."""
    if config.compaction.max_context_tokens is not None:
        return not_listed
    by_name = await _on_public_upstreams(config, window_on)
    return lambda upstream, model: by_name[upstream](model) if upstream in by_name else None


async def priced(config: Config) -> PriceList:
    """The prices of the list for the configured upstreams; read only where somebody asks whether a compaction pays."""
    policies = (config.compaction, *(rule.over(config.compaction) for rule in config.models))
    asked = any(policy.max_payback_turns for policy in policies)
    by_name = await _on_public_upstreams(config, price_on) if asked else {}
    return lambda upstream, model: by_name[upstream](model) if upstream in by_name else None


class PriceBook:
    """What models cost: each price as a rule sets it, else as the list has it."""

    def __init__(self, config: Config, listed: PriceList) -> None:
        self._config = config
        self._listed = listed

    def of(self, upstream: str, model: str) -> Prices | None:
        """The prices of a model on an upstream (both by name), now; None: not known."""
        rule, listed = self._config.rule_for(model), self._listed(upstream, model) or Priced()
        if rule is None:
            return payback.prices(*listed)
        own = (
            rule.input_usd_per_mtok,
            rule.cached_usd_per_mtok,
            rule.cache_write_usd_per_mtok,
            rule.output_usd_per_mtok,
        )
        return payback.prices(*(said if said is not None else other for said, other in zip(own, listed, strict=True)))


On = Callable[[str, "list[Provider]"], Callable[[str], T | None]]


async def _on_public_upstreams(config: Config, on: On[T]) -> Mapping[str, Callable[[str], T | None]]:
    """What the list says, by the names of those upstreams that it can speak of. {} where it cannot be read."""
    public = {
        upstream.name: upstream.base_url
        for upstream in (config.upstream, *config.upstreams)
        if not is_local(upstream.base_url)
    }
    if not public:
        return {}
    try:
        return await asyncio.to_thread(_read, public, on)
    except Exception as error:  # a list is no reason not to serve
        log.error("the price list cannot be read error=%s", type(error).__name__)
        return {}


def _read(public: Mapping[str, str], on: On[T]) -> dict[str, Callable[[str], T | None]]:
    from genai_prices.data import providers  # noqa: PLC0415 - takes a while, and who configures all of it does not need it

    return {name: on(base_url, providers) for name, base_url in public.items()}


def window_on(base_url: str, providers: list[Provider]) -> Callable[[str], Window | None]:
    """The window of a model, by name, on the upstream at a public `base_url`."""
    return _agreed(base_url, providers, _window)


def price_on(base_url: str, providers: list[Provider]) -> Callable[[str], Priced | None]:
    """The prices of a model, by name, on the upstream at a public `base_url`."""
    return _agreed(base_url, providers, _price)


def _agreed(
    base_url: str, providers: list[Provider], told: Callable[[Provider, ModelInfo], T | None]
) -> Callable[[str], T | None]:
    """What the list tells of a model, by name; None where it does not know it, or its entries differ.

    A provider that the list knows by its address names its own models, and the list's own rules find them. Behind any other address
    there may be anything, a gateway most likely: there a name must stand in the list letter for letter, and mean the same wherever it does.
    """
    at_home = [provider for provider in providers if _is_at(provider, base_url)]
    by_name = {} if at_home else _by_exact_name(providers)

    @lru_cache(maxsize=_CACHED)
    def entries(model: str) -> tuple[tuple[Provider, ModelInfo], ...]:
        found = ((provider, provider.find_model(model, all_providers=providers)) for provider in at_home)
        return tuple((p, m) for p, m in found if m is not None) or tuple(by_name.get(model.lower(), ()))

    def of(model: str) -> T | None:
        if not 0 < len(model) <= MAX_NAME_LENGTH:
            return None
        said = {told(provider, known) for provider, known in entries(model)} - {None}
        return said.pop() if len(said) == 1 else None

    return of


def _by_exact_name(providers: list[Provider]) -> dict[str, list[tuple[Provider, ModelInfo]]]:
    found: dict[str, list[tuple[Provider, ModelInfo]]] = {}
    for provider in providers:
        for model in provider.models:
            for name in _exact_names(model.match):
                found.setdefault(name.lower(), []).append((provider, model))
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


def _price(_: Provider, model: ModelInfo) -> Priced | None:
    """What holds now: some prices have a first day, or hours. Of prices that rise with the prompt's length the lowest."""
    prices = model.get_prices(datetime.fromtimestamp(clock.now_ms() / 1000, UTC))
    found = Priced(*map(_usd, (prices.input_mtok, prices.cache_read_mtok, prices.cache_write_mtok, prices.output_mtok)))
    return None if found.input is None else found


def _usd(price: object) -> float | None:
    """A price, or the lowest of several. By attribute, as above."""
    value = getattr(price, "base", price)
    return None if value is None else float(str(value))


def _is_at(provider: Provider, base_url: str) -> bool:
    """Whether the provider lives there. The list's pattern must end where the host does, or behind it: not at api.openai.com.example."""
    url = urlsplit(base_url)
    address = f"{url.scheme}://{url.hostname or ''}{url.path.rstrip('/')}/"
    found = re.match(provider.api_pattern, address)
    return found is not None and (address[found.end() - 1] == "/" or address[found.end()] == "/")
