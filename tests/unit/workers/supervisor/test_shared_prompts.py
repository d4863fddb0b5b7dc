"""Shareable system prompts on their way from a catalog to a worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.workers.supervisor.test_chat_template import worker_of
from workers.models.catalog import CatalogError
from workers.models.library import wanted
from workers.models.spec import MAX_SHARED_BYTES
from workers.settings import SupervisorSettings

EXAMPLE = """
models:
  - name: m
    path: model.gguf
    shared_prompts:
      - Grüße. Be "kind".
      - |-
        Two
        lines.
"""


def test_a_catalogs_texts_reach_the_worker_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "catalog.yaml"
    file.write_text(EXAMPLE)
    worker = worker_of(SupervisorSettings(catalog=file), monkeypatch)
    assert list(worker.shared_prompts) == ['Grüße. Be "kind".', "Two\nlines."]


def test_texts_of_the_settings_reach_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = worker_of(SupervisorSettings(shared_prompts='["Be brief."]'), monkeypatch)
    assert list(worker.shared_prompts) == ["Be brief."]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ('[""]', "length >= 1"),
        ("{}", "--shared-prompts: must be a JSON list"),
        (json.dumps(["x"] * 65), "length <= 64"),
        (json.dumps(["x" * MAX_SHARED_BYTES]), "take 98,308 bytes as JSON and may take 98,304"),
        (json.dumps(["\n" * (MAX_SHARED_BYTES // 2)]), "bytes as JSON"),
    ],
)
def test_texts_that_are_refused(value: str, said: str) -> None:
    with pytest.raises(CatalogError, match=said):
        wanted(SupervisorSettings(shared_prompts=value))


def test_with_a_catalog_they_are_said_there(tmp_path: Path) -> None:
    file = tmp_path / "catalog.yaml"
    file.write_text(EXAMPLE)
    with pytest.raises(CatalogError, match="say this per model"):
        wanted(SupervisorSettings(catalog=file, shared_prompts='["x"]'))
