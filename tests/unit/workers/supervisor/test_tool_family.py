"""The family of a model's tool calls, on its way from a catalog or a setting to a worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.workers.supervisor.test_chat_template import worker_of
from workers.models.catalog import CatalogError
from workers.models.library import wanted
from workers.settings import SupervisorSettings


def catalog(tmp_path: Path, family: str) -> SupervisorSettings:
    file = tmp_path / "catalog.yaml"
    file.write_text(f"models:\n  - name: m\n    path: model.gguf\n    tool_family: {family}\n")
    return SupervisorSettings(catalog=file)


def test_the_catalogs_reaches_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_of(catalog(tmp_path, "deepseek-v3.1"), monkeypatch).tool_family == "deepseek-v3.1"


def test_that_of_the_settings_reaches_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_of(SupervisorSettings(tool_family="mistral"), monkeypatch).tool_family == "mistral"


def test_a_name_that_can_be_none(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="tool_family"):
        wanted(catalog(tmp_path, "<tool_call>"))
