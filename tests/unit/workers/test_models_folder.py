"""Which models a folder of GGUF files has, under which names, and which files are none: by names and kinds alone."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from workers.models.catalog import CatalogError
from workers.models.files import clean_name
from workers.models.folder.contents import Contents, HeaderFacts, Kind, contents_of
from workers.models.folder.folder import ModelsFolder, catalog_of, folder_of
from workers.settings import SupervisorSettings

FOLDER = Path("/models")


def found(*names: str, **faults: str) -> Contents:
    """What a folder of such files has; those with `mmproj` in their names are projectors."""
    facts = {
        FOLDER / name: HeaderFacts(kind="projector" if "mmproj" in name else "model", fault=faults.get(name, ""))
        for name in names
    }
    return contents_of(FOLDER, facts)


def names(contents: Contents) -> list[str]:
    return [model.name for model in contents.models]


def projectors(contents: Contents) -> dict[str, str]:
    return {model.name: model.projector.name if model.projector else "" for model in contents.models}


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("Qwen3-8B-Q4_K_M", "Qwen3-8B-Q4_K_M"),
        ("My Model (v2).Q8_0", "My-Model-v2.Q8_0"),
        ("größe 3", "gr-e-3"),
        ("---", "model"),
    ],
)
def test_a_model_has_the_name_of_its_file(stem: str, name: str) -> None:
    assert clean_name(stem) == name


def test_a_split_model_is_one() -> None:
    assert names(found("big-Q4_K_M-00001-of-00003.gguf")) == ["big-Q4_K_M"]


def test_files_of_one_name_are_told_apart_by_their_folders() -> None:
    contents = found("a b/small.gguf", "b/small.gguf", "small.gguf", "b/other.gguf")
    assert names(contents) == ["small", "a-b/small", "other", "b/small"]
    assert dict(zip(names(contents), (model.path for model in contents.models), strict=True))["small"].parent == FOLDER


def test_a_projector_goes_with_the_model_of_its_name() -> None:
    told = projectors(found("gemma-4b-Q4_K_M.gguf", "qwen-Q8_0.gguf", "mmproj-gemma-4b-F16.gguf"))
    assert told == {"gemma-4b-Q4_K_M": "mmproj-gemma-4b-F16.gguf", "qwen-Q8_0": ""}


def test_of_several_projectors_the_precision_that_the_hub_prefers_is_taken() -> None:
    contents = found("g.gguf", "mmproj-g-BF16.gguf", "mmproj-g-F32.gguf", "mmproj-g-f16.gguf")
    assert projectors(contents) == {"g": "mmproj-g-f16.gguf"}
    assert {one.why for one in contents.left_out} == {"a projector, and mmproj-g-f16.gguf is taken in its place"}


def test_a_projector_without_a_name_goes_with_the_only_model() -> None:
    assert projectors(found("g-Q4_0.gguf", "g-Q8_0.gguf", "mmproj-F16.gguf")) == {
        "g-Q4_0": "mmproj-F16.gguf",
        "g-Q8_0": "mmproj-F16.gguf",
    }
    contents = found("g.gguf", "q.gguf", "mmproj-F16.gguf")
    assert projectors(contents) == {"g": "", "q": ""}
    assert "call it mmproj-g.gguf" in contents.left_out[0].why


def test_in_a_folder_of_its_own_any_projector_is_the_models() -> None:
    assert projectors(found("vl/text.gguf", "vl/mmproj-vision.gguf", "else.gguf")) == {
        "text": "mmproj-vision.gguf",
        "else": "",
    }


def test_what_is_no_model_is_left_out_with_its_reason() -> None:
    kinds: dict[str, Kind] = {
        "lora.gguf": "adapter",
        "cv.gguf": "control vector",
        "im.gguf": "importance matrix",
        "v.gguf": "vocabulary",
    }
    facts = {FOLDER / name: HeaderFacts(kind=kind) for name, kind in kinds.items()}
    facts[FOLDER / "cut.gguf"] = HeaderFacts(fault="truncated")
    contents = contents_of(FOLDER, facts)
    assert contents.models == ()
    told = {one.path.name: one.why for one in contents.left_out}
    assert told.keys() == {*kinds, "cut.gguf"}
    assert told["cut.gguf"] == "truncated"
    assert "adapters" in told["lora.gguf"]
    with pytest.raises(CatalogError, match=r"/models has no model \(5 other GGUF files\); put GGUF files there"):
        catalog_of(contents, FOLDER, SupervisorSettings())


def test_settings_of_models_hold_for_all_of_them() -> None:
    contents = found("a.gguf", "b.gguf")
    catalog = catalog_of(contents, FOLDER, SupervisorSettings(slots=3, ctx=512))
    assert [(one.name, one.slots, one.ctx, one.workers, one.hf) for one in catalog.models] == [
        ("a", 3, 512, 1, None),
        ("b", 3, 512, 1, None),
    ]
    assert all(one.residency is not None and one.residency.min == 0 for one in catalog.models)
    assert catalog_of(contents, FOLDER, SupervisorSettings(workers=2)).models[1].workers == 2
    with pytest.raises(CatalogError) as refused:
        catalog_of(contents, FOLDER, SupervisorSettings(llama='{"n_btch": 3}'))
    assert str(refused.value).count("n_btch") == 1, "told once, however many models there are"


def test_when_the_folder_is_what_is_served(tmp_path: Path) -> None:
    assert folder_of(SupervisorSettings()) is None
    assert folder_of(SupervisorSettings(models_dir=tmp_path)) == tmp_path
    for other in ({"hf": "a/b"}, {"model": Path("x.gguf")}, {"catalog": Path("c.yaml")}):
        assert folder_of(SupervisorSettings(models_dir=tmp_path, **other)) is None
    with pytest.raises(CatalogError, match="leave --alias out"):
        folder_of(SupervisorSettings(models_dir=tmp_path, alias="one"))


class Reads:
    """Counts which files are read."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def __call__(self, paths: Sequence[Path]) -> dict[Path, HeaderFacts]:
        self.asked.append(sorted(path.name for path in paths))
        return {path: HeaderFacts() for path in paths}


def test_a_file_is_read_when_it_is_new_and_stays_as_it_is(tmp_path: Path) -> None:
    reads = Reads()
    folder = ModelsFolder(tmp_path, reads)
    (tmp_path / "a.gguf").write_bytes(b"1")
    (tmp_path / "text.txt").write_bytes(b"1")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "h.gguf").write_bytes(b"1")
    (tmp_path / "again.gguf").symlink_to("a.gguf")
    (tmp_path / "gone.gguf").symlink_to("nowhere.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    assert names(folder.load()) == ["a"]
    assert not folder.has_changed()
    (tmp_path / "b-00001-of-00002.gguf").write_bytes(b"1")
    assert not folder.has_changed(), "it may be being copied"
    assert folder.has_changed()
    assert names(folder.load()) == ["a", "b"]
    (tmp_path / "b-00002-of-00002.gguf").write_bytes(b"1")
    assert [folder.has_changed(), folder.has_changed()] == [False, True]
    folder.load()
    os.utime(tmp_path / "a.gguf", ns=(time.time_ns(), time.time_ns() + 1))
    assert names(folder.load()) == ["a", "b"]
    first = "b-00001-of-00002.gguf"
    assert reads.asked == [["a.gguf"], [first], [first], ["a.gguf"]]
    (tmp_path / "a.gguf").unlink()
    assert [folder.has_changed(), folder.has_changed()] == [False, True]
    assert names(folder.load()) == ["b"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="nowhere: No such file or directory; name a folder of GGUF files"):
        ModelsFolder(tmp_path / "nowhere").load()
