"""The state folder: closed when it is made here, left as it is when it was there, an odd one said with its remedy."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.process_limits import full_disk
from workers.supervisor.state_folder import StateFolder, holds


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_is_its_users_alone(tmp_path: Path) -> None:
    with StateFolder(tmp_path / "new") as folder:
        assert folder.exposure() == ""
        assert [mode(path) for path in (folder.path, folder.logs, folder.run)] == [0o700, 0o700, 0o700]


def test_a_folder_of_the_users_own_keeps_its_mode_and_is_warned_of(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    own.chmod(0o755)
    with StateFolder(own) as folder:
        assert f"other users may enter the state folder {own} (mode 755)" in folder.exposure()
        assert (mode(own), mode(folder.run)) == (0o755, 0o700)
    own.chmod(0o700)
    with StateFolder(own) as folder:
        assert folder.exposure() == ""


def test_what_somebody_removes_is_there_again(tmp_path: Path) -> None:
    with StateFolder(tmp_path / "new") as folder:
        kept, removed = folder.run / "kept", folder.run / "removed"
        for file in (kept, removed):
            folder.keep(file, b"content")
        folder.remove(removed)
        assert folder.is_whole()
        shutil.rmtree(folder.path)
        assert not folder.is_whole()
        folder.restore()
        assert folder.is_whole()
        assert kept.read_bytes() == b"content"
        assert not removed.exists()
        assert [mode(path) for path in (folder.path, folder.logs, folder.run)] == [0o700, 0o700, 0o700]


def test_what_was_written_in_part_is_mended(tmp_path: Path) -> None:
    """A catalog that a full disk had taken a part of was there, and so kept the gateway from starting for ever."""
    with StateFolder(tmp_path / "new") as folder:
        kept = folder.run / "kept"
        folder.keep(kept, b"content")
        kept.write_bytes(b"cont")
        assert not folder.is_whole()
        folder.restore()
        assert folder.is_whole()
        assert kept.read_bytes() == b"content"
        assert sorted(path.name for path in folder.run.iterdir()) == ["kept", "lock"]


def test_a_disk_that_takes_a_part_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    with StateFolder(tmp_path / "new") as folder:
        kept = folder.run / "kept"
        folder.keep(kept, b"old")
        with full_disk(room=4):
            with pytest.raises(OSError, match="File too large"):
                folder.keep(kept, b"content")
            folder.restore()
        assert folder.is_whole()
        assert kept.read_bytes() == b"old"
        assert sorted(path.name for path in folder.run.iterdir()) == ["kept", "lock"]


@pytest.mark.parametrize("odd", ["link to a device", "pipe", "folder"])
def test_what_is_no_file_is_never_read(tmp_path: Path, odd: str) -> None:
    place = tmp_path / "place"
    if odd == "pipe":
        os.mkfifo(place)
    elif odd == "folder":
        place.mkdir()
    else:
        place.symlink_to("/dev/full")
    assert not holds(place, b"")


def test_a_path_that_is_no_folder_names_the_flag(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with (
            pytest.raises(OSError, match=r"state_dir: can't use .*; name a folder .* with --state-dir"),
            StateFolder(path),
        ):
            pass


def test_a_disk_that_takes_nothing_is_said_with_the_folder(tmp_path: Path) -> None:
    program = (
        "import resource, sys; from pathlib import Path; from workers.supervisor.state_folder import StateFolder\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "try:\n    StateFolder(Path(sys.argv[1])).__enter__()\nexcept OSError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == (
        f"state_dir: can't use {tmp_path}: File too large; name a folder that you may write to with --state-dir"
    ), done.stderr
