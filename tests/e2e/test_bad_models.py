"""A model file that is missing, truncated or not GGUF: one clear line and a non-zero exit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stack import DEMO_MODEL, Stack
from workers.protocol.exits import Exit


@pytest.fixture
def bad_model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    whole = DEMO_MODEL.read_bytes()
    match request.param:
        case "missing":
            pass
        case "truncated":
            path.write_bytes(whole[: len(whole) // 2])
        case "header only":
            path.write_bytes(whole[:100])
        case "not GGUF":
            path.write_bytes(b"<html>this is not a model</html>" * 100)
        case "empty":
            path.write_bytes(b"")
        case "a folder":
            path.mkdir()
    return path


@pytest.mark.parametrize(
    "bad_model", ["missing", "truncated", "header only", "not GGUF", "empty", "a folder"], indirect=True
)
def test_the_worker_says_so_and_exits(bad_model: Path) -> None:
    with Stack() as stack:
        worker = stack.worker(bad_model, "bad", wait=False)
        assert worker.popen.wait(30) == Exit.BAD_MODEL
        lines = [line for line in worker.text().splitlines() if line.strip()]
    assert len(lines) == 1, lines
    assert "model.gguf" in lines[0]
    assert "Traceback" not in lines[0]
