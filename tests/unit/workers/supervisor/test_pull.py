"""Under which names `paddock models pull` leaves a model, whatever lay there before."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway import cli
from workers.models.files import first_part
from workers.protocol.exits import Exit

GGUF = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The models folder, in which another model has a link."""
    path = tmp_path / "models"
    path.mkdir()
    (path / "m-tiny.gguf").symlink_to("of another model")
    return path


def model_of(folder: Path, num_parts: int) -> Path:
    """A model's only file or its first part."""
    suffixes = [f"-0000{number}-of-0000{num_parts}" for number in range(1, num_parts + 1)] if num_parts > 1 else [""]
    folder.mkdir(exist_ok=True)
    for suffix in suffixes:
        (folder / f"x{suffix}.gguf").write_bytes(GGUF + suffix.encode())
    return folder / f"x{suffixes[0]}.gguf"


def fetched(folder: Path, model: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        flags = ["--model", str(model), "--alias", "m", "--models-dir", str(folder)]
        patch.setattr("sys.argv", ["paddock", "models", "pull", *flags])
        return cli.main()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"m-tiny.gguf"}


def test_of_an_older_choice_nothing_is_left(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However many parts it had: a worker is told `m.gguf`, and finds what was fetched last."""
    for num_parts, expected in (
        (1, {"m.gguf"}),
        (2, {"m-00001-of-00002.gguf", "m-00002-of-00002.gguf"}),
        (3, {"m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"}),
        (1, {"m.gguf"}),
    ):
        model = model_of(tmp_path / f"of-{num_parts}", num_parts)
        assert fetched(folder, model) == Exit.OK
        assert names(folder) == expected
        found = first_part(folder / "m.gguf")
        assert found.resolve() == model
        assert capsys.readouterr().out == f"m\t{found}\n"
        assert (folder / "m-tiny.gguf").is_symlink()


@pytest.mark.parametrize(("num_parts", "taken"), [(1, "m.gguf"), (2, "m.gguf"), (2, "m-00001-of-00009.gguf")])
def test_a_file_that_is_no_link_is_left_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], num_parts: int, taken: str
) -> None:
    """Where it would be replaced, or be found by who is told `m.gguf`."""
    own = folder / taken
    own.write_bytes(b"own")
    assert fetched(folder, model_of(tmp_path / "x", num_parts)) == Exit.BAD_MODEL
    said = capsys.readouterr().err
    assert f"model m: {own} is a file that `paddock models pull` has not made" in said
    assert "move it away, or give the model another name" in said
    assert names(folder) == {taken}
    assert own.read_bytes() == b"own"


def test_a_model_may_lie_where_it_is_to_be_found(folder: Path, tmp_path: Path) -> None:
    own, way = folder / "m.gguf", tmp_path / "way"
    own.write_bytes(GGUF)
    way.symlink_to(folder)
    for path in (own, way / "m.gguf"):
        assert fetched(folder, path) == Exit.OK
        assert not own.is_symlink()
        assert own.read_bytes() == GGUF
