"""`paddock bench` run as a whole against a server of known times."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.bench import command

KEY = "pk-secret-of-the-bench"
Bench = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def bench(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Exit code, the JSON, all that was printed."""

    def run(*flags: str, key: str = KEY) -> tuple[int, dict[str, Any], str]:
        monkeypatch.setenv("PADDOCK_API_KEY", key)
        file = tmp_path / "result.json"
        code = command.main(["--state-dir", str(tmp_path), "--model", "m", "--json", str(file), *flags])
        said = capfd.readouterr()
        document = json.loads(file.read_text()) if file.is_file() else {}
        return code, document, said.out + said.err

    return run
