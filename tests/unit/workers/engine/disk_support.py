"""A disk tier on a real folder, for tests."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from workers.engine.cache.prompt import BlockName, Scope, block_names
from workers.engine.disk.conversation_file import SaveBounds
from workers.engine.disk.folder import LEFT, CacheFolder
from workers.engine.disk.sealed import CacheKeys
from workers.engine.disk.tier import DiskTier, Identify

SECRET = "a secret of sixteen bytes or more"
FINGERPRINT = bytes(range(32))
KEYS = CacheKeys(SECRET)
TEAM = Scope("blue", "", b"")
STATE_BYTES = 4096
SAVE_BOUNDS = SaveBounds(max_files_per_team=99, max_bytes_per_team=1 << 30, max_bytes=1 << 30)


@contextmanager
def tier(
    path: Path,
    *,
    max_bytes: int = 1 << 30,
    secret: str = SECRET,
    fingerprint: bytes = FINGERPRINT,
    identify: Identify | None = None,
    **bounds: int,
) -> Iterator[DiskTier]:
    """Ready, and closed without a flush afterwards."""
    one = DiskTier(
        CacheFolder(path),
        CacheKeys(secret),
        max_bytes=max_bytes,
        identify=identify or (lambda stop: fingerprint),
        **bounds,
    )
    try:
        if identify is None:
            until(lambda: one.ready)
        yield one
    finally:
        one.close()


def until(true: object, seconds: float = 10.0) -> None:
    """Wait for a condition (a callable); fails after so long."""
    assert callable(true)
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.001)


def names(num_blocks: int, scope: Scope = TEAM, seed: int = 0) -> list[BlockName]:
    tokens = np.random.default_rng(seed).integers(0, 32_000, num_blocks * 64, dtype=np.int32)
    return block_names(tokens, scope)


def states(num_blocks: int, size: int = STATE_BYTES) -> list[bytes]:
    return [os.urandom(size) for _ in range(num_blocks)]


def fetched(one: DiskTier, wanted: Sequence[BlockName]) -> list[bytes]:
    """Waits for the answer."""
    got: list[list[bytes]] = []
    came = threading.Event()

    def on_done(blocks: list[bytes]) -> None:
        got.append(blocks)
        came.set()

    assert one.fetch(wanted, on_done)
    assert came.wait(10)
    assert len(got) == 1
    return got[0]


def store(one: DiskTier, wanted: Sequence[BlockName], contents: Sequence[bytes]) -> None:
    for name, state in zip(wanted, contents, strict=True):
        assert one.put(name, state)
    assert one.flush(10)


def files(path: Path) -> list[Path]:
    """Every file of the folder but the mark of those that left, the oldest name first."""
    found = (file for file in path.rglob("*") if not file.is_dir() or file.is_symlink())
    return sorted(file for file in found if file.name != LEFT)
