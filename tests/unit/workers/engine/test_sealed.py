from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workers.engine.disk.sealed import HEADER, SEAL_BYTES, FileRefused, Kind, Label, SealedReader, write_sealed

KEY = b"k" * 32
LABEL = Label(Kind.BLOCK, b"f" * 32, b"d" * 32, 64, 128)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def read(folder: int, name: str = "file", key: bytes = KEY, max_bytes: int = 1 << 20) -> tuple[Label, bytes]:
    with SealedReader(folder, name, key, max_bytes=max_bytes) as file:
        label, length = file.label()
        contents = file.take(length)
        file.verify()
    return label, contents


def refusal(folder: int, name: str = "file", key: bytes = KEY, max_bytes: int = 1 << 20) -> str:
    with pytest.raises(FileRefused) as caught:
        read(folder, name, key, max_bytes)
    return str(caught.value)


def test_what_was_written_is_read(folder: int, tmp_path: Path) -> None:
    parts = [b"", b"one", os.urandom(100_000), b"", b"two"]
    written = write_sealed(folder, "file", KEY, LABEL, parts)
    assert written == (tmp_path / "file").stat().st_size
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert read(folder) == (LABEL, b"".join(parts))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_more_parts_than_one_call_of_the_system_takes(folder: int) -> None:
    parts = [bytes([number % 256]) * 3 for number in range(3_000)]
    write_sealed(folder, "file", KEY, LABEL, parts)
    assert read(folder)[1] == b"".join(parts)


@pytest.mark.parametrize("after", range(5))
def test_writing_can_be_stopped_anywhere(folder: int, tmp_path: Path, after: int) -> None:
    write_sealed(folder, "file", KEY, LABEL, [b"old"])
    asked = iter(range(100))
    with pytest.raises(OSError, match="anceled"):
        write_sealed(folder, "file", KEY, LABEL, [bytes(9 << 20)] * 2, stop=lambda: next(asked) >= after)
    assert read(folder)[1] == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_is_replaced_whole(folder: int) -> None:
    write_sealed(folder, "file", KEY, LABEL, [b"long" * 1000])
    write_sealed(folder, "file", KEY, LABEL, [b"short"])
    assert read(folder)[1] == b"short"


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_change_of_a_byte_goes_unnoticed(folder: int, tmp_path: Path, data: st.DataObject) -> None:
    write_sealed(folder, "file", KEY, LABEL, [b"some contents" * 20])
    path = tmp_path / "file"
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1), label="at")
    whole[at] ^= data.draw(st.integers(1, 255), label="bits")
    path.write_bytes(whole)
    refusal(folder)


@pytest.mark.parametrize("keep", [0, 1, HEADER.size - 1, HEADER.size, HEADER.size + SEAL_BYTES, -SEAL_BYTES, -1])
def test_every_cut_is_noticed(folder: int, tmp_path: Path, keep: int) -> None:
    write_sealed(folder, "file", KEY, LABEL, [b"some contents" * 20])
    path = tmp_path / "file"
    path.write_bytes(path.read_bytes()[:keep])
    assert "truncated" in refusal(folder)


def test_what_is_added_is_noticed(folder: int, tmp_path: Path) -> None:
    write_sealed(folder, "file", KEY, LABEL, [b"some contents"])
    with (tmp_path / "file").open("ab") as file:
        file.write(b"more")
    assert "damaged" in refusal(folder)


def test_another_secret_another_format_and_other_files_are_refused(folder: int, tmp_path: Path) -> None:
    write_sealed(folder, "file", KEY, LABEL, [b"some contents"])
    assert "another secret" in refusal(folder, key=b"o" * 32)
    assert "more than the 64 allowed" in refusal(folder, max_bytes=64)
    path = tmp_path / "file"
    whole = path.read_bytes()
    path.write_bytes(whole[:8] + b"\x07" + whole[9:])
    assert "format 7" in refusal(folder)
    path.write_bytes(b"GGUF" + whole[4:])
    assert "not a file of Paddock" in refusal(folder)


def test_links_pipes_and_folders_are_refused(folder: int, tmp_path: Path) -> None:
    write_sealed(folder, "file", KEY, LABEL, [b"some contents"])
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    assert refusal(folder, "link") == "it is a link"
    assert refusal(folder, "pipe") == "it is not a plain file"
    assert refusal(folder, "folder") == "it is not a plain file"
    with pytest.raises(FileNotFoundError):
        read(folder, "missing")


def test_a_write_that_fails_leaves_nothing(folder: int, tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError):
        write_sealed(folder, "file", KEY, LABEL, [b"some contents"])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_no_descriptor_is_left_open(folder: int, tmp_path: Path) -> None:
    write_sealed(folder, "file", KEY, LABEL, [b"some contents"])
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    for key in (KEY, b"o" * 32):
        for name in ("file", "missing"):
            try:
                read(folder, name, key)
            except (FileRefused, FileNotFoundError):
                continue
    assert (len(os.listdir("/proc/self/fd")) if before else 0) == before
