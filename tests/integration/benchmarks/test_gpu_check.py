"""The GPU's benchmark on a machine without one: what it says, and that every measurement runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_check
from tests.support.stack import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu_check.py"


def run(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As a script, from elsewhere."""
    command = [sys.executable, str(SCRIPT), *flags]
    return subprocess.run(command, cwd="/", env={**os.environ, **environment}, capture_output=True, text=True)


def driver(folder: Path, script: str) -> str:
    """A PATH with the driver's program alone."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(folder)


@pytest.mark.parametrize("script", ["exit 9", "true"])
def test_a_machine_without_a_gpu_is_told_so(tmp_path: Path, script: str) -> None:
    for path in (str(tmp_path / "empty"), driver(tmp_path, script)):
        done = run(PATH=path)
        assert (done.returncode, done.stdout, done.stderr) == (0, "no NVIDIA GPU here: nothing to measure\n", "")


def test_a_gpu_without_the_toolkit_is_told_what_to_install(tmp_path: Path) -> None:
    path = driver(tmp_path, "echo 'Some GPU, 24564 MiB, 550.1'")
    assert gpu_check.gpus({"PATH": path}) == ["Some GPU, 24564 MiB, 550.1"]
    if gpu_check.compiler({"PATH": path}):
        pytest.skip("the CUDA toolkit is installed here")
    done = run(PATH=path)
    assert done.returncode == 1
    assert "install the CUDA toolkit" in done.stdout


def test_the_toolkit_is_found_where_it_is_said_to_be(tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(mode=0o755)
    assert gpu_check.compiler({"PATH": "/nowhere", "CUDA_HOME": str(tmp_path)}) == str(nvcc)
    assert gpu_check.compiler({"PATH": str(nvcc.parent)}) == str(nvcc)


def test_every_measurement_runs_on_the_cpu() -> None:
    done = run("--device", "cpu")
    assert done.returncode == 0, done.stderr
    for what in ("prefill of 256 tokens", "decode, 4 slots", "save 128 cells", "bring back 128 cells"):
        assert re.search(rf"\| {what}[^|]*\| [0-9.,]+ (tokens/s|ms) \|", done.stdout), done.stdout
    for what in ("512 idle cells, flash attention off", "sampling by the host", "sampling by the device"):
        assert re.search(rf"\| [^|]*{what}[^|]*\| [0-9.,]+ ms", done.stdout), done.stdout
    assert re.search(r"\| changing it before each step \| [0-9.]+ ms \| [0-9.]+ ms a change \|", done.stdout)
    assert re.search(r"llama.cpp [0-9,]+ us, Python [0-9,]+ us of [0-9,]+ us a step", done.stdout)
