"""What of a prompt need not be computed again: vLLM's automatic prefix caching, without the tensors.

Tokens are cached in full blocks. A block's key hashes its tokens and the key of the block before it, so a block is found only
where everything in front of it is the same. Source: vLLM, docs/design/prefix_caching.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import xxhash

BLOCK_TOKENS = 16


class Chain:
    """The block keys of a growing sequence of tokens. `scope` is whose sequence it is: under another scope no key is the same."""

    def __init__(self, scope: bytes, tokens: Sequence[str] = (), block_tokens: int = BLOCK_TOKENS) -> None:
        self.keys: list[bytes] = []
        self.block_tokens = block_tokens
        self._last = xxhash.xxh3_128_digest(scope)
        self._rest: list[str] = []
        self.extend(tokens)

    def __len__(self) -> int:
        """Tokens so far."""
        return len(self.keys) * self.block_tokens + len(self._rest)

    def extend(self, tokens: Sequence[str]) -> None:
        """More tokens, in any portions."""
        tokens = [*self._rest, *tokens]
        size = self.block_tokens
        full = len(tokens) - len(tokens) % size
        for start in range(0, full, size):
            # A lone surrogate is a legal JSON escape: it must not end the request.
            block = "\x00".join(tokens[start : start + size]).encode("utf-8", "surrogatepass")
            self._last = xxhash.xxh3_128_digest(self._last + block)
            self.keys.append(self._last)
        self._rest = tokens[full:]


class PrefixCache:
    """A bounded cache of blocks; the least recently used go first, of one prompt the last ones first."""

    def __init__(self, max_blocks: int = 200_000) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def cached(self, prompt: Chain) -> int:
        """How many leading tokens are known: whole blocks, and never all of them, as the last token must be computed to go on."""
        known = 0
        for key in prompt.keys[: (len(prompt) - 1) // prompt.block_tokens]:
            if key not in self._blocks:
                break
            known += 1
        return known * prompt.block_tokens

    def store(self, computed: Chain) -> None:
        """Remember the full blocks of a sequence."""
        # Backwards, so that the first blocks, which other prompts share, are the youngest.
        for key in reversed(computed.keys):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget everything, as a restarted server has."""
        self._blocks.clear()
