"""`warmfold serve` in a child process, with a configuration and a data directory of its own."""

from __future__ import annotations

import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.child import Child, children, free_port

Section = Mapping[str, str | int | float]


class Warmfold(Child):
    """The proxy in front of `upstream` (what an SDK's base_url would be). `compaction`: keys of that section. Raises ChildFailed."""

    def __init__(self, upstream: str, compaction: Section) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warmfold-")
        self.port, admin_port = free_port(), free_port()
        self.base_url = f"http://127.0.0.1:{self.port}/v1"
        self.admin_url = f"http://127.0.0.1:{admin_port}"
        file = Path(self._folder.name, "config.toml")
        sections: dict[str, Section] = {
            "server": {"port": self.port},
            "upstream": {"base_url": upstream},
            "store": {"data_dir": f"{self._folder.name}/store"},
            "compaction": compaction,
            "admin": {"port": admin_port},
        }
        file.write_text("\n".join(f"[{name}]\n{_lines(keys)}" for name, keys in sections.items()))
        super().__init__("proxy", "serve", "--config", str(file), ready=f"{self.admin_url}/healthz")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._folder.cleanup()

    @property
    def store_pids(self) -> list[int]:
        """The embedded store's process."""
        return children(self.pid)

    def session(self, id_: str) -> dict[str, Any] | None:
        """A session with its journal, as the admin listener shows it; None where it is not stored (yet: that happens behind the answer)."""
        try:
            found: dict[str, Any] = json.loads(self._admin(f"/sessions/{id_}"))
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 404:
                raise
            return None
        return found

    def metrics(self) -> dict[str, float]:
        """The counters by name and labels, as Prometheus reads them."""
        lines = (line.rpartition(" ") for line in self._admin("/metrics").splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    def _admin(self, path: str) -> str:
        with urllib.request.urlopen(self.admin_url + path, timeout=10) as answer:
            text: str = answer.read().decode()
        return text


def _lines(keys: Section) -> str:
    """Keys and values as TOML: of texts and numbers JSON is a part of it."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
