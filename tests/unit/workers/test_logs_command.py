"""`paddock logs` for a reader that has enough, such as `head`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_reader_that_leaves_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "gateway.log").write_text("a line of a log\n" * 20_000)
    command = [sys.executable, "-m", "gateway.cli", "logs", "--state-dir", str(tmp_path), "-n", "20000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as logs:
        assert logs.stdout is not None
        assert logs.stderr is not None
        assert logs.stdout.read(5)
        logs.stdout.close()
        assert logs.stderr.read() == b""
