"""Records on disk: read in order, deleted once they are not needed, whole whatever a write came to."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway.usage.segments import SEGMENT_BYTES, JournalFull, Segments, encode_frame, frames

NO_LIMIT = 1 << 40


def filled(folder: Path, count: int, num_bytes: int = 100) -> Segments:
    segments = Segments(folder, "p", NO_LIMIT)
    for number in range(1, count + 1):
        segments.append(number, 1000 + number, record(number, num_bytes))
    return segments


def record(number: int, num_bytes: int = 100) -> bytes:
    return str(number).encode().ljust(num_bytes)


def numbers(records: Sequence[bytes]) -> list[int]:
    return [int(one) for one in records]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_records_are_read_on_from_any_number(tmp_path: Path) -> None:
    segments = filled(tmp_path, 50)
    assert numbers(segments.read(0, 10, NO_LIMIT)) == list(range(1, 11))
    assert numbers(segments.read(10, 10, NO_LIMIT)) == list(range(11, 21))
    assert numbers(segments.read(3, 2, NO_LIMIT)) == [4, 5]
    assert numbers(segments.read(0, 100, 250)) == [1, 2]
    assert numbers(segments.read(0, 100, 1)) == [1], "one at least"
    assert segments.read(50, 10, NO_LIMIT) == []


def test_files_are_deleted_once_all_their_records_are_known(tmp_path: Path) -> None:
    count = 5 * SEGMENT_BYTES // 2000
    segments = filled(tmp_path, count, 1000)
    assert len(files(tmp_path)) == 3
    first_of_second = sorted(int(name.split("-")[1].split(".")[0]) for name in files(tmp_path))[1]
    segments.forget(first_of_second - 2)
    assert len(files(tmp_path)) == 3
    segments.forget(first_of_second - 1)
    assert len(files(tmp_path)) == 2
    assert numbers(segments.read(first_of_second - 1, 1, NO_LIMIT)) == [first_of_second]
    segments.forget(count)
    assert files(tmp_path) == []
    assert segments.num_bytes == 0
    segments.append(count + 1, 1, b"more")
    assert segments.read(count, 10, NO_LIMIT) == [b"more"]


def test_another_process_finds_all_that_was_written(tmp_path: Path) -> None:
    filled(tmp_path, 2 * SEGMENT_BYTES // 1000, 1000)
    found = Segments(tmp_path, "p", NO_LIMIT)
    assert found.load() == {1000 + number for number in range(1, 2 * SEGMENT_BYTES // 1000 + 1)}
    assert found.last == 2 * SEGMENT_BYTES // 1000
    assert numbers(found.read(0, 3, NO_LIMIT)) == [1, 2, 3]
    assert Segments(tmp_path, "q", NO_LIMIT).load() == set()


@pytest.mark.parametrize("cut", [1, 8, 17, 60])
def test_a_frame_that_was_written_in_part_is_left_out(tmp_path: Path, cut: int) -> None:
    filled(tmp_path, 3)
    (file,) = tmp_path.iterdir()
    os.truncate(file, file.stat().st_size - cut)
    found = Segments(tmp_path, "p", NO_LIMIT)
    assert found.load() == {1001, 1002}
    found.append(3, 1003, record(3))
    assert numbers(found.read(0, 10, NO_LIMIT)) == [1, 2]
    assert numbers(found.read(2, 10, NO_LIMIT)) == [3], "it has a file of its own"


def test_a_changed_frame_is_left_out() -> None:
    body = encode_frame(1, b"one") + encode_frame(2, b"two").replace(b"two", b"twO") + encode_frame(3, b"three")
    assert [serial for serial, _, _ in frames(body)] == [1]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes a part of a record, then none, then all again."""
    segments, write = filled(tmp_path, 2), os.write
    monkeypatch.setattr(os, "write", lambda fd, body: write(fd, body[:5]))
    with pytest.raises(OSError, match="in part"):
        segments.append(3, 1003, record(3))

    def refuse(fd: int, body: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(OSError, match="No space"):
        segments.append(3, 1003, record(3))
    monkeypatch.setattr(os, "write", write)
    segments.append(3, 1003, record(3))
    segments.append(4, 1004, record(4))
    assert numbers(segments.read(0, 10, NO_LIMIT)) == [1, 2]
    assert numbers(segments.read(2, 10, NO_LIMIT)) == [3, 4]
    assert Segments(tmp_path, "p", NO_LIMIT).load() == {1001, 1002, 1003, 1004}


def test_there_are_no_more_bytes_than_may_be(tmp_path: Path) -> None:
    segments = Segments(tmp_path, "p", 1000)
    while not segments.is_full:
        segments.append(segments.last + 1, 1, record(1))
    with pytest.raises(JournalFull):
        segments.append(segments.last + 1, 1, record(1))
    assert 1000 <= segments.num_bytes < 1200
    segments.forget(segments.last)
    segments.append(1, 1, b"again")
