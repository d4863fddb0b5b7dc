"""A true file system of a few MiB, which can be filled, made read-only, and fail. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

FILLER = "filler"

needs_disks = pytest.mark.skipif(
    sys.platform != "linux"
    or os.geteuid() != 0
    or subprocess.run(("unshare", "-m", "true"), check=False).returncode != 0,
    reason="needs root, to mount file systems",
)

needs_loop_disks = pytest.mark.skipif(
    needs_disks.args[0] or shutil.which("mkfs.ext4") is None or not Path("/dev/loop-control").exists(),
    reason="needs root, ext4 and loop devices, for a disk that fails",
)


def _do(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True)


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    """Mount a file system of `mib` MiB at a new folder, meanwhile."""
    folder.mkdir()
    _do("mount", "-t", "tmpfs", "-o", f"size={mib}m", "none", folder)
    try:
        yield folder
    finally:
        _do("umount", "-l", folder)


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Leave no room on a file system, meanwhile."""
    fill(disk)
    try:
        yield
    finally:
        (disk / FILLER).unlink()


def fill(disk: Path) -> None:
    """Leave no room on a file system: inside `filled`, take what has become free since."""
    with suppress(OSError), (disk / FILLER).open("ab", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass


@contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """Let nobody open a file for writing, make one or remove one on a file system, meanwhile. Files that are open
    already take what is written."""
    _do("mount", "--bind", disk, disk)
    try:
        _do("mount", "-o", "remount,bind,ro", disk)
        yield
    finally:
        _do("umount", "-l", disk)


@contextmanager
def failing_disk(folder: Path, mib: int) -> Iterator[Path]:
    """Mount an ext4 of `mib` MiB at a new folder, meanwhile, which `fail` ends. It finds the place of each page when
    that is first written to, as many file systems do that copy what they write."""
    folder.mkdir()
    image = folder.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(mib << 20)
    _do("mkfs.ext4", "-q", image)
    _do("mount", "-o", "loop,nodelalloc", image, folder)
    try:
        yield folder
    finally:
        _do("umount", "-l", folder)
        image.unlink()


def fail(disk: Path) -> None:
    """Have a `failing_disk` find an error, for which the kernel makes it read-only, for open files too."""
    _do("mount", "-o", "remount,abort", disk)
