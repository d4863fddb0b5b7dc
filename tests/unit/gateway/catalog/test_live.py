"""The catalog that a gateway uses, while somebody writes its file anew."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.catalog import live
from gateway.catalog.live import LiveCatalog
from workers.models import catalog_file

GOOD = "models: [{name: small, path: small.gguf}]"


@pytest.mark.parametrize(
    "contents",
    [
        "models: 2026-13-45",
        "models: " + "9" * 5000,
        "models: " + "[" * 500,
        "models: &models [*models]",
        "models: [{name: small, path: small.gguf, chat_template_kwargs: {a: " + "[" * 90 + "]" * 90 + "}}]",
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
    async with asyncio.timeout(60):
        while not (told or watch.done()):
            await asyncio.sleep(0.01)
    assert not watch.done()
    assert told == ["refused"]
    assert str(path) in catalog.fault
    assert catalog.names.models == {"small"}
    path.write_text(GOOD.replace("small", "large"))
    async with asyncio.timeout(60):
        while catalog.names.models != {"large"}:
            await asyncio.sleep(0.01)
    watch.cancel()
