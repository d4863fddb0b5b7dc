"""What every part of the benchmark is given: the models, the rounds, and a voice for figures as they come."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine.servers import LOAD_CORE
from benchmarks.reference import bench_dir
from benchmarks.synthetic_model import synthetic_model, write
from tests.support.stack import ROOT, Stack

TOY_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Model:
    path: Path
    name: str


@dataclass(frozen=True, slots=True)
class Bench:
    stack: Stack
    big: Model
    """0.5 B parameters, Q8_0, random weights."""
    toy: Model
    """The same with 2 layers, where everything but arithmetic is felt."""
    quick: bool
    patient: bool
    """The 16k prompt on the big model too."""
    asked_rounds: int
    """0: what each part thinks right."""

    def rounds(self, whole: int, quick: int = 1) -> int:
        return self.asked_rounds or (quick if self.quick else whole)

    def say(self, text: str) -> None:
        """Progress, beside the table."""
        print(f"  [{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def big_model() -> Model:
    return Model(synthetic_model(), "0.5 B Q8_0")


def toy_model() -> Model:
    """Written on first use."""
    path = bench_dir() / f"synthetic-{TOY_LAYERS}-layers-q8_0.gguf"
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}.partial")
        write(partial, n_layer=TOY_LAYERS)
        partial.rename(path)
    return Model(path, "2-layer toy")


@contextmanager
def on_load_core() -> Iterator[None]:
    """This process makes the load: it leaves the computing core to the server."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {int(LOAD_CORE)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def compared() -> str:
    """One line: which Paddock against which llama.cpp, on what."""
    commit = git("rev-parse", "--short", "HEAD") or "not a checkout"
    changed = " with uncommitted changes" if git("status", "--porcelain", "--", "workers") else ""
    version = importlib.metadata.version("llama-cpp-python")
    processor = next(
        (line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), "unknown"
    )
    return (
        f"Paddock {commit}{changed} against the llama.cpp that llama-cpp-python {version} carries; {processor}, "
        f"one core for the server, one thread, another core for the load; load average before: {os.getloadavg()[0]:.1f}"
    )


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
