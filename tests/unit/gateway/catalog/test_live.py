"""The catalog that a gateway uses, while somebody writes its file anew."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.catalog import live
from gateway.catalog.live import LiveCatalog
from tests.support.waiting import until
from workers.models import catalog_file

PATIENCE_S = 60.0
GOOD = "models: [{name: small, path: small.gguf}]"


@pytest.mark.parametrize(
    "contents",
    [
        "models: 2026-13-45",
        "models: " + "9" * 5000,
        "models: " + "[" * 500,
        "models: &models [*models]",
        "models: {? [1] : 2}",
        "? {a: b}\n: 1",
        "\0",
    ],
)
async def test_no_contents_end_the_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contents: str) -> None:
    for module in (live, catalog_file):
        monkeypatch.setattr(module, "POLL_S", 0.01)
    path = tmp_path / "catalog.yaml"
    path.write_text(GOOD)
    told: list[str] = []
    catalog = LiveCatalog(path, told.append)
    watch = asyncio.create_task(catalog.run())
    path.write_text(contents)
    await until(lambda: bool(told) or watch.done(), PATIENCE_S, "the file is looked at")
    assert not watch.done()
    assert told == ["refused"]
    assert str(path) in catalog.fault
    assert catalog.names.models == {"small"}
    path.write_text(GOOD.replace("small", "large"))
    await until(lambda: catalog.names.models == {"large"}, PATIENCE_S, "the next good one is taken")
    watch.cancel()
