"""Tokens are counted with what is installed: a container without a network neither hangs nor fails."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import requires

WITHOUT_NETWORK = """
import json, socket, sys

def refused(*_):
    raise OSError("no network")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refused

import proxy.server
from proxy.core import fingerprint, tokens

texts = ["A question.", "缓存的前缀", "<|endoftext|>", "QUJD" * 5000]
weights = [fingerprint.facts(json.dumps({"role": "user", "content": text}).encode()).weight for text in texts]
print(json.dumps([weights, sorted(name for name in ("tiktoken", "transformers", "tokenizers") if name in sys.modules)]))
"""


def test_tokens_are_counted_without_a_network_and_without_a_tokenizer() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_NETWORK], capture_output=True, text=True, timeout=120, check=True
    )
    weights, loaded = json.loads(ran.stdout)
    assert all(weight > 5 for weight in weights)
    assert loaded == []


def test_no_tokenizer_is_installed_with_the_product() -> None:
    needed = [line for line in requires("warmfold") or [] if "extra ==" not in line]
    assert needed
    assert not [line for line in needed if line.startswith(("tiktoken", "transformers", "tokenizers"))]
