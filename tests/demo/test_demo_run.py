"""`warmfold demo` as a user runs it: the real proxy, its embedded store and the simulated provider."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytest.importorskip("proxy.server", reason="the proxy's server is not there yet")


def test_the_demo_shows_what_it_claims() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "proxy", "demo"], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "\x1b" not in ran.stdout
    rows = {
        cells[0]: cells[1:]
        for line in ran.stdout.splitlines()
        if (cells := [cell.strip() for cell in re.split("[│|]", line)[1:-1]])
    }
    served, _, compactions, _, cached, known = rows["warmfold"]
    assert served == "44 of 44"
    assert int(compactions) >= 2
    assert float(cached.rstrip("%")) > 90
    assert known == "12 of 12"
    assert rows["direct"][0] != "44 of 44"
