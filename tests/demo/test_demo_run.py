"""`warmfold demo` as a user runs it: the real proxy, its embedded store and the simulated provider."""

from __future__ import annotations

import re
import subprocess
import sys


def test_the_demo_shows_what_it_claims() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "proxy", "demo"], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "\x1b" not in ran.stdout
    lines = ran.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line != line.rstrip()] == []
    rows = {cells[0]: cells[1:] for line in lines if (cells := [cell.strip() for cell in re.split("[│|]", line)[1:-1]])}
    direct, transcript, warmfold = ({name: cells[at] for name, cells in rows.items()} for at in range(3))
    assert [one[""] for one in (direct, transcript, warmfold)] == ["direct", "transcript summary", "warmfold"]
    assert warmfold["turns served"] == transcript["turns served"] == "44 of 44"
    assert int(warmfold["compactions"]) >= 2
    assert float(warmfold["of their prompts cached"].rstrip("%")) > 90
    assert int(warmfold["tokens written"].replace(",", "")) > 0
    assert warmfold["facts known at the end"] == "12 of 12"
    assert direct["turns served"] != "44 of 44"
    assert direct["facts known at the end"] == "refused", "it could not even be asked"
    assert direct["tokens written"] == "-"
