"""What a model costs: as a rule says, else as the price list does, and only for upstreams that the list can speak of."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from genai_prices.types import (
    ClauseEquals,
    ClauseStartsWith,
    ConditionalPrice,
    ModelInfo,
    ModelPrice,
    Provider,
    StartDateConstraint,
    Tier,
    TieredPrices,
)

from proxy import pricelist
from proxy.config import Config, load
from proxy.core.payback import Prices
from proxy.pricelist import PriceBook, Priced

OPENAI = "https://api.openai.com/v1"


def _usd(**prices: str | TieredPrices) -> ModelPrice:
    return ModelPrice(**{key: Decimal(value) if isinstance(value, str) else value for key, value in prices.items()})


def _model(name: str, prices: Any, **more: Any) -> ModelInfo:
    return ModelInfo(id=name, match=more.pop("match", ClauseEquals(equals=name)), prices=prices, **more)


CHEAP, DEAR = _usd(input_mtok="1", output_mtok="2"), _usd(input_mtok="3", output_mtok="4")
PROVIDERS = [
    Provider(
        id="vendor",
        name="Vendor",
        api_pattern=r"https://api\.vendor\.com",
        models=[
            _model("all", _usd(input_mtok="2.5", cache_read_mtok="1.25", cache_write_mtok="3", output_mtok="10")),
            _model("some", CHEAP),
            _model("family", CHEAP, match=ClauseStartsWith(starts_with="family")),
            _model("free", _usd(input_mtok="0", output_mtok="0")),
            _model("by the minute", _usd(input_audio_mtok="5")),
            _model(
                "long",
                _usd(
                    input_mtok=TieredPrices(base=Decimal(1), tiers=[Tier(start=200_000, price=Decimal(2))]),
                    output_mtok="8",
                ),
            ),
            _model(
                "risen",
                [
                    ConditionalPrice(prices=CHEAP),
                    ConditionalPrice(constraint=StartDateConstraint(start_date=date(2026, 1, 1)), prices=DEAR),
                    ConditionalPrice(constraint=StartDateConstraint(start_date=date(2999, 1, 1)), prices=CHEAP),
                ],
            ),
            _model("disputed", CHEAP),
        ],
    ),
    Provider(
        id="seller",
        name="Seller",
        api_pattern=r"https://seller\.example",
        models=[_model("disputed", DEAR), _model("some", CHEAP), _model("by the minute", CHEAP)],
    ),
]
VENDOR, GATEWAY = "https://api.vendor.com/v1", "https://gateway.example/v1"


@pytest.mark.parametrize(
    ("base_url", "model", "expected"),
    [
        pytest.param(VENDOR, "all", Priced(2.5, 1.25, 3.0, 10.0), id="all four"),
        pytest.param(VENDOR, "some", Priced(1.0, None, None, 2.0), id="no price of a cache"),
        pytest.param(VENDOR, "family-7b", Priced(1.0, None, None, 2.0), id="a family, at home"),
        pytest.param(VENDOR, "free", Priced(0.0, None, None, 0.0), id="nothing is a price"),
        pytest.param(VENDOR, "by the minute", None, id="no price of a token"),
        pytest.param(VENDOR, "long", Priced(1.0, None, None, 8.0), id="the lowest of several"),
        pytest.param(VENDOR, "risen", Priced(3.0, None, None, 4.0), id="the one of today"),
        pytest.param(VENDOR, "disputed", Priced(1.0, None, None, 2.0), id="its own of several sellers"),
        pytest.param(VENDOR, "unknown", None, id="not listed"),
        pytest.param(GATEWAY, "some", Priced(1.0, None, None, 2.0), id="elsewhere, all agree"),
        pytest.param(GATEWAY, "disputed", None, id="elsewhere, they do not"),
        pytest.param(GATEWAY, "by the minute", Priced(1.0, None, None, 2.0), id="elsewhere, one alone says something"),
        pytest.param(VENDOR, "family-" + "7" * 300, None, id="longer than any name"),
        pytest.param(GATEWAY, "family-7b", None, id="elsewhere, by a part of the name"),
    ],
)
def test_what_the_list_says(base_url: str, model: str, expected: Priced | None) -> None:
    assert pricelist.price_on(base_url, PROVIDERS)(model) == expected


def _config(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return load(path, {}, {})


RULES = """
[[models]]
match = "mine*"
input_usd_per_mtok = 4
cached_usd_per_mtok = 0.4
cache_write_usd_per_mtok = 5
output_usd_per_mtok = 20
[[models]]
match = "half*"
cached_usd_per_mtok = 0
[[models]]
match = "other*"
debounce_turns = 5
"""


@pytest.mark.parametrize(
    ("model", "listed", "expected"),
    [
        pytest.param("mine", None, Prices(4, 0.4, 5, 20), id="a rule's"),
        pytest.param("mine", Priced(1, 1, 1, 1), Prices(4, 0.4, 5, 20), id="a rule's before the list's"),
        pytest.param("half", Priced(2, 1, None, 8), Prices(2, 0, 2, 8), id="each for itself"),
        pytest.param("half", None, None, id="one alone is not enough"),
        pytest.param("other", Priced(2, 1, None, 8), Prices(2, 1, 2, 8), id="a rule without prices"),
        pytest.param("plain", Priced(2, None, None, 8), Prices(2, 2, 2, 8), id="the list's"),
        pytest.param("plain", None, None, id="nobody's"),
    ],
)
def test_whose_price_counts(tmp_path: Path, model: str, listed: Priced | None, expected: Prices | None) -> None:
    assert PriceBook(_config(tmp_path, RULES), lambda *_: listed).of("default", model) == expected


async def test_the_list_that_comes_with_the_product_has_prices_for_public_upstreams_alone(tmp_path: Path) -> None:
    config = _config(
        tmp_path,
        f'[upstream]\nbase_url = "{OPENAI}"\n'
        '[[upstreams]]\nname = "near"\nmatch = "x*"\nbase_url = "http://10.0.0.7:8000/v1"\n',
    )
    book = PriceBook(config, await pricelist.priced(config))
    assert book.of("default", "gpt-4o") == Prices(2.5, 1.25, 2.5, 10.0)
    assert book.of("near", "gpt-4o") is None
    assert book.of("nobody", "gpt-4o") is None


@pytest.mark.parametrize(
    ("text", "known"),
    [
        pytest.param("", True, id="by default"),
        pytest.param("[compaction]\nmax_context_tokens = 9000\n", True, id="where the window is set"),
        pytest.param("[compaction]\nmax_payback_turns = 0\n", False, id="where nobody asks"),
        pytest.param(
            '[compaction]\nmax_payback_turns = 0\n[[models]]\nmatch = "gpt*"\nmax_payback_turns = 4\n',
            True,
            id="where a rule asks",
        ),
    ],
)
async def test_the_list_is_read_where_somebody_asks_whether_it_pays(tmp_path: Path, text: str, known: bool) -> None:
    listed = await pricelist.priced(_config(tmp_path, f'[upstream]\nbase_url = "{OPENAI}"\n{text}'))
    assert (listed("default", "gpt-4o") is not None) is known
