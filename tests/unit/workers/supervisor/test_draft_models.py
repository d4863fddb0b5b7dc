"""Draft models on their way from a catalog to a worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.workers.supervisor.test_chat_template import worker_of
from workers.llama.model import Model, ModelError
from workers.models.catalog import CatalogError
from workers.models.generation import DraftSpec
from workers.models.library import Library, ModelUnusable, wanted
from workers.settings import SupervisorSettings, WorkerSettings
from workers.worker import spec_of

GGUF = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)


def catalog(folder: Path, draft: str) -> SupervisorSettings:
    (folder / "model.gguf").write_bytes(GGUF)
    file = folder / "catalog.yaml"
    file.write_text(f"models: [{{name: m, path: model.gguf, speculation: {{draft: {draft}}}}}]")
    return SupervisorSettings(catalog=file)


def test_its_path_holds_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = catalog(tmp_path, "{path: small.gguf, n_max: 4}")
    expected = DraftSpec(path=str(tmp_path / "small.gguf"), n_max=4)
    assert worker_of(settings, monkeypatch).speculation.draft == expected
    with pytest.raises(ModelUnusable, match="model m, draft model: no file"):
        Library(tmp_path / "state").locate_all(wanted(settings))
    (tmp_path / "small-00001-of-00002.gguf").write_bytes(GGUF)
    (served,) = Library(tmp_path / "state").locate_all(wanted(settings))
    assert served.speculation.draft == DraftSpec(path=str(tmp_path / "small-00001-of-00002.gguf"), n_max=4)


@pytest.mark.parametrize("draft", ["{}", "{path: a.gguf, hf: o/r}"])
def test_it_has_one_source(tmp_path: Path, draft: str) -> None:
    with pytest.raises(CatalogError, match="give exactly one source"):
        wanted(catalog(tmp_path, draft))


@pytest.mark.parametrize(
    ("draft", "file"),
    [('{"path": "small.gguf"}', "small.gguf"), ('{"hf": "owner/small-GGUF:Q8_0"}', "models/m.draft.gguf")],
)
def test_a_worker_of_its_own_finds_it(draft: str, file: str) -> None:
    """One of the hub lies where `paddock models pull` has put it."""
    settings = WorkerSettings(
        model=Path("models/m.gguf"), redis_url="redis://r", worker_secret="s" * 32, speculation=f'{{"draft": {draft}}}'
    )
    assert spec_of(settings).speculation.draft == DraftSpec(path=file)


@pytest.mark.parametrize("model", [".", "/"])
def test_a_folder_in_place_of_a_model_is_told_by_whoever_loads_it(model: str) -> None:
    """It was a traceback: such a path has no name of which another file's could be made."""
    settings = WorkerSettings(model=Path(model), alias="m", redis_url="redis://r", worker_secret="s" * 32)
    spec = spec_of(settings)
    with pytest.raises(ModelError):
        Model.load(Path(spec.path or ""), spec.llama)
