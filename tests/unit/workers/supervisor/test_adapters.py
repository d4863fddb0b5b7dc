"""LoRA adapters on their way from a catalog to a worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.workers.supervisor.test_chat_template import worker_of
from workers.models.catalog import CatalogError
from workers.models.library import Library, ModelUnusable, wanted
from workers.models.spec import AdapterSpec, ControlVectorSpec
from workers.settings import SupervisorSettings, WorkerSettings
from workers.supervisor.plan import plan
from workers.supervisor.supervisor import recipe

GGUF = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)


def written(folder: Path, adapters: str) -> Path:
    (folder / "model.gguf").write_bytes(GGUF)
    (folder / "adapters").mkdir()
    (folder / "adapters" / "pirate.gguf").write_bytes(GGUF)
    file = folder / "catalog.yaml"
    file.write_text(f"models: [{{name: m, path: model.gguf, adapters: {adapters}}}]\n")
    return file


def test_a_worker_gets_paths_that_hold_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, "[{name: pirate, path: adapters/pirate.gguf, pinned: true}, {name: two, path: /a.gguf}]")
    settings = SupervisorSettings(catalog=file, adapters_dir=tmp_path / "more", max_adapters=3, adapters_mib=64)
    assert worker_of(settings, monkeypatch).adapters == (
        AdapterSpec(name="pirate", path=str(tmp_path / "adapters" / "pirate.gguf"), pinned=True),
        AdapterSpec(name="two", path="/a.gguf"),
    )
    worker = WorkerSettings()
    assert (worker.adapters_dir, worker.max_adapters, worker.adapters_mib) == (tmp_path / "more", 3, 64)


def test_control_vectors_are_found_from_the_catalog_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(GGUF)
    file = tmp_path / "catalog.yaml"
    file.write_text("models: [{name: m, path: model.gguf, llama: {control_vectors: [{path: calm.gguf, scale: 0.5}]}}]")
    [vector] = worker_of(SupervisorSettings(catalog=file), monkeypatch).llama.control_vectors
    assert vector == ControlVectorSpec(path=str(tmp_path / "calm.gguf"), scale=0.5)
    with pytest.raises(ModelUnusable, match="model m, control vector: no file"):
        Library(tmp_path / "state").locate_all(wanted(SupervisorSettings(catalog=file)))


def test_without_any_nothing_can_be_loaded() -> None:
    worker = plan(wanted(SupervisorSettings()).models, 4, (), "h")[0]
    assert worker.model.adapters == ()
    environment = recipe(worker, SupervisorSettings(), {}).environment
    assert not environment.get("PADDOCK_ADAPTERS_DIR")


def test_a_setting_names_them_where_there_is_no_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wish = wanted(SupervisorSettings(adapters='[{"name": "a", "path": "a.gguf"}]'))
    assert [adapter.path for adapter in wish.models[0].adapters] == [str(tmp_path / "a.gguf")]


def test_a_file_that_is_missing_is_told_before_anything_starts(tmp_path: Path) -> None:
    wish = wanted(SupervisorSettings(catalog=written(tmp_path, "[{name: gone, path: gone.gguf}]")))
    with pytest.raises(ModelUnusable, match="model m, adapter gone: no file"):
        Library(tmp_path / "state").locate_all(wish)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"adapters": "{}"}, "--adapters: must be a JSON list"),
        ({"adapters": "["}, "--adapters: not valid JSON"),
        ({"adapters": '[{"name": "a"}]'}, "give exactly one source: `path`"),
        ({"adapters": '[{"name": "a", "path": "x"}, {"name": "a", "path": "y"}]'}, "'a' is named twice"),
        ({"adapters": '[{"name": "a", "path": "x", "slot": 2}]'}, "unknown field `slot`"),
        ({"adapters": "[]", "catalog": "c.yaml"}, "adapters: with a catalog, say this per model"),
    ],
)
def test_adapters_that_can_not_be_meant(values: dict[str, object], said: str) -> None:
    with pytest.raises(CatalogError) as caught:
        wanted(SupervisorSettings.model_validate(values))
    assert said in str(caught.value)
