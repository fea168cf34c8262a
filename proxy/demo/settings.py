"""How the simulated provider behaves: its limits, its rules and who speaks for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from proxy.demo.answers import Answerer, FactAnswerer
from proxy.demo.prefix_cache import BLOCK_TOKENS
from proxy.demo.summariser import IdealSummariser, Summariser
from proxy.demo.validation import Strictness
from proxy.demo.wire import UsageReport


@dataclass(frozen=True, slots=True)
class Settings:
    """How the provider behaves.

    `record`: keep the calls; a benchmark turns it off. `headers` are added to every answer. `reasoning_stripped`: the template
    drops thoughts before the last user message. `known_only`: refuse parameters that OpenAI's reference does not name.
    """

    window_tokens: int = 32_000
    max_output_tokens: int = 16_384
    block_tokens: int = BLOCK_TOKENS
    cache_blocks: int = 200_000
    strictness: Strictness = Strictness.OPENAI
    known_only: bool = False
    reasoning_stripped: bool = False
    stream_options_accepted: bool = True
    usage: UsageReport = UsageReport.FULL
    usage_always_streamed: bool = False
    chunk_tokens: int = 4
    chunk_delay_s: float = 0.0
    require_key: str = ""
    models: tuple[str, ...] = ("demo-model",)
    window_listed: bool = False
    headers: tuple[tuple[str, str], ...] = ()
    answerer: Answerer = field(default_factory=FactAnswerer)
    summariser: Summariser = field(default_factory=IdealSummariser)
    record: bool = True
