"""Whether objects of a schema may have other keys, on its way from a catalog or a setting to a worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.workers.supervisor.test_chat_template import worker_of
from workers.settings import SupervisorSettings


@pytest.mark.parametrize(("said", "is_open"), [("", False), ("    open_objects: true\n", True)])
def test_the_catalogs_word_reaches_the_worker(
    said: str, is_open: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "catalog.yaml"
    file.write_text(f"models:\n  - name: m\n    path: model.gguf\n{said}")
    assert worker_of(SupervisorSettings(catalog=file), monkeypatch).open_objects is is_open


def test_that_of_the_settings_reaches_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_of(SupervisorSettings(open_objects=True), monkeypatch).open_objects
