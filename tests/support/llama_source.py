"""The C++ sources that the llama-cpp-python sdist carries: templates and vocabularies of well-known models.

`make bench` unpacks them in its folder; a copy elsewhere may be named by LLAMA_CPP_SOURCE. Tests that need them skip
where there are none.
"""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest


def llama_cpp_source() -> Path | None:
    """The folder `llama.cpp`."""
    if named := os.environ.get("LLAMA_CPP_SOURCE"):
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    version = importlib.metadata.version("llama-cpp-python")
    source = cache / "paddock" / "bench" / "src" / f"llama_cpp_python-{version}" / "vendor" / "llama.cpp"
    return source if source.is_dir() else None


def files_of(folder: str, pattern: str) -> list[Path]:
    """For parameters of a test; empty where the sources are not there."""
    source = llama_cpp_source()
    return sorted((source / folder).glob(pattern)) if source is not None else []


def skip_without_sources() -> None:
    if llama_cpp_source() is None:
        pytest.skip("the sources in the llama-cpp-python sdist are not unpacked here (`make bench` does it)")
