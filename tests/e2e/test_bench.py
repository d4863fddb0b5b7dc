"""`paddock bench` against a true Paddock with the demo model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.stack import DEMO_MODEL, ROOT, Stack


def test_a_real_gateway_as_people_ask(tmp_path: Path) -> None:
    with Stack() as stack:
        stack.worker(DEMO_MODEL, "toy", slots=2, ctx=2048)
        gateway = stack.gateway()
        file = tmp_path / "out.json"
        command = [sys.executable, "-m", "gateway.cli", "bench", "--url", gateway.url, "--json", str(file)]
        command += ["--concurrency", "4", "--count", "12", "--scale", "0.08", "--max-context", "200"]
        command += ["--assert", "error_share<=0%,finished>=12"]
        environment = {**stack.environment(), "PADDOCK_API_KEY": stack.key}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert stack.key not in done.stdout + done.stderr + file.read_text()
    found = json.loads(file.read_text())
    assert found["settings"]["model"] == "toy"
    assert found["tokens"]["generated"] > 12 * 2
    assert 0 < found["ttft_s"]["p50"] < found["e2e_s"]["p50"]
    # Two slots and four callers: half of them wait, and conversations find their beginnings cached.
    assert found["queue"]["told"] == 12
    assert found["queue"]["waited"] > 2
    assert 0.1 < found["tokens"]["cached_share"] < 1
    assert "calls waited for a slot" in done.stdout
