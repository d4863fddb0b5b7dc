"""`make soak`, two minutes of it: nothing is left behind, and every deed of callers was answered at least once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak.crowd import MIX, name_of
from benchmarks.soak.faults import ALL
from tests.support.stack import ROOT

MINUTES = 2
CACHES_FILL = {"rss: what grows", "uss: what grows", "children_rss: what grows", "each process at the last rest"}
"""Two minutes are too short to tell a cache that fills from a leak."""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_minutes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", str(MINUTES), "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout)
    assert (tmp_path / "soak.json").exists(), done.stderr[-3000:]
    document = json.loads((tmp_path / "soak.json").read_text())
    failed = {one["what"]: one["told"] for one in document["findings"] if not one["good"]}
    assert {what: told for what, told in failed.items() if what not in CACHES_FILL} == {}
    assert done.returncode == (1 if failed else 0)
    record = document["record"]
    assert [name_of(deed) for deed in MIX if not record["endings"].get(name_of(deed), {}).get("ok")] == []
    assert {struck["fault"] for struck in record["faults"]} <= {fault.__name__ for fault in ALL}
    assert len(record["faults"]) >= 8
    assert (tmp_path / "soak.html").stat().st_size > 10_000
