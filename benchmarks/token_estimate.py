"""What it takes to estimate the tokens of very long texts: `python -m benchmarks.token_estimate [--megabytes 2] [--markdown]`.

A request is read on the event loop, so nobody else's stream moves while one message of it is estimated. Shown are the estimate alone, and all that
is done to a new message (parsed, hashed, weighed); both grow with the length, the estimate hardly, since a sample speaks for what is long.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Final

from benchmarks import printed
from proxy.core import fingerprint, tokens

TEXTS: Final = {
    "one letter": "a",
    "Chinese": "汉",
    "base64": "QUJDREVGR0hJSktM",
    "emoji": "😀",
    "names of special tokens": "<|im_start|><|endoftext|>",
    "one mark": "=",
    "blanks": " ",
    "line breaks": "\n",
    "accents": "é",
    "words": "The service reads its queue and writes a line to the log. ",
}
ROUNDS: Final = 5


def measured(text: str) -> printed.Row:
    """Estimated tokens, and milliseconds at best."""
    message = json.dumps({"role": "user", "content": text}, ensure_ascii=False).encode()
    alone, whole = _best(lambda: tokens.of_text(text)), _best(lambda: fingerprint.facts(message))
    return str(tokens.of_text(text)), f"{alone:.1f}", f"{whole:.1f}"


def _best(run: Callable[[], object]) -> float:
    took = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        run()
        took.append(time.perf_counter() - begin)
    return min(took) * 1000


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.token_estimate", description="Time of an estimate.")
    parser.add_argument("--megabytes", type=float, default=2.0, help="length of each text (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print Markdown, with date and machine")
    given = parser.parse_args(argv)
    size = int(given.megabytes * 1024 * 1024)
    rows = [(name, *measured(unit * (size // len(unit.encode())))) for name, unit in TEXTS.items()]
    headings = ("text", "tokens", "estimate ms", "whole message ms")
    printed.table(f"{given.megabytes:g} MB in one message", headings, rows, markdown=given.markdown)


if __name__ == "__main__":
    main()
