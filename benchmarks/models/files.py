"""The GGUF files that all systems serve: six models of different architectures, and three more for single points."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.reference import bench_dir
from tests.support.small_models import write_small_model, write_stories_model, write_wide_model
from tests.support.stack import DEMO_MODEL

SLOW, SLOWER = "wide", "wider"
"""Models that take milliseconds for a token, so that a stream lasts while others load."""
SMALL = ("demo", "stories", "window", "hybrid")
SIX = (SLOW, SLOWER, *SMALL)
MANUAL = "manual"
"""Loaded by an admin alone, where a system can be told so in its configuration."""
LATE = "late"
"""A model that comes into the configuration while the system runs."""
NUM_WIDE, NUM_WIDER = 100_000, 120_000
"""Tokens of the vocabularies of the slow models."""


def files() -> dict[str, Path]:
    """Return name -> file of all models but `LATE`, written on first use."""
    folder = bench_dir() / "models"
    folder.mkdir(exist_ok=True)
    return {
        SLOW: _written(folder / "wide.gguf", lambda path: write_wide_model(path, NUM_WIDE)),
        SLOWER: _written(folder / "wider.gguf", lambda path: write_wide_model(path, NUM_WIDER)),
        "demo": DEMO_MODEL,
        "stories": _written(folder / "stories.gguf", write_stories_model),
        "window": _written(folder / "window.gguf", _write_small),
        "hybrid": _written(folder / "hybrid.gguf", _write_small),
        MANUAL: DEMO_MODEL,
    }


def _write_small(path: Path) -> None:
    write_small_model(path.parent, path.stem)


def _written(path: Path, write: Callable[[Path], None]) -> Path:
    """Return the path once the file is there whole."""
    if not path.exists():
        partial = path.parent / "partial" / path.name
        partial.parent.mkdir(exist_ok=True)
        write(partial)
        partial.rename(path)
    return path
