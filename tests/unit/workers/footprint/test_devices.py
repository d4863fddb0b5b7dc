"""The memories of this machine, and those of NVIDIA's driver by a library that answers as it does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.device_hosts import GIB, gpu_host
from tests.support.stack import ROOT
from workers.footprint.devices import HOST, DeviceProvider, HostMemory, free_bytes, providers

DRIVER = """
#include <stdio.h>
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory;
int nvmlInit_v2(void) { return %(start)d; }
int nvmlInitWithFlags(unsigned flags) { return %(start)d; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "a fault of the driver"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned number, void **device) { *device = (void *)(long)(number + 1); return 0; }
int nvmlDeviceGetMemoryInfo(void *device, memory *out) {
    if ((long)device == 2) return 3;
    out->total = 100ull << 30; out->free = (unsigned long long)(long)device << 30; return 0;
}
int nvmlDeviceGetUUID(void *device, char *out, unsigned size) {
    snprintf(out, size, "GPU-%%ld", (long)device); return 0;
}
typedef struct { unsigned pid; unsigned long long used; unsigned instance, part; } process;
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process *out) {
    if ((long)device == 2) { *count = 0; return 0; }
    if (*count < 3) { *count = 3; return 7; }
    *count = 3;
    for (unsigned n = 0; n < 3; n++) { out[n].pid = 10 + n; out[n].used = (unsigned long long)(n + 1) << 30; }
    if ((long)device == 3) out[0].used = ~0ull;
    return 0;
}
int nvmlDeviceGetName(void *device, char *out, unsigned size) { snprintf(out, size, "H200"); return 0; }
"""

ASK = """
import json
from dataclasses import asdict
from workers.footprint.devices import providers
print(json.dumps([asdict(state) for one in providers() for state in one.devices()]))
"""
ASK_TAKEN = """
import json
from workers.footprint.devices import providers
print(json.dumps([providers()[0].taken(pids) for pids in ([10, 12], [11], [99])]))
"""


def test_main_memory_is_known() -> None:
    (host,) = HostMemory().devices()
    assert (host.id, host.kind, host.is_trusted) == (HOST, "cpu", True)
    assert 1 << 28 < host.free <= host.total < 1 << 50


def test_this_machine_has_free_memory() -> None:
    free = free_bytes()
    assert free is None or 1 << 20 < free < 1 << 50


def test_main_memory_comes_last() -> None:
    assert [state.kind for state in providers()[-1].devices()] == ["cpu"]


def test_a_host_for_tests_is_a_provider() -> None:
    host: DeviceProvider = gpu_host(8, gpu_gib=80, free_gib=10)
    states = host.devices()
    assert [state.kind for state in states] == ["gpu"] * 8 + ["cpu"]
    assert states[0].free == 10 * GIB


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize(("start", "found"), [(0, ["GPU-1", "GPU-3", HOST]), (9, [HOST])])
def test_nvidias_driver_is_asked(tmp_path: Path, start: int, found: list[str]) -> None:
    """Its second GPU does not tell its memory; or the driver does not answer at all."""
    pytest.importorskip("pynvml")
    (source := tmp_path / "driver.c").write_text(DRIVER % {"start": start})
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libnvidia-ml.so.1", source], check=True)
    variables = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    told = subprocess.run([sys.executable, "-c", ASK], env=variables, cwd=ROOT, capture_output=True, check=True)
    states = json.loads(told.stdout)
    assert [state["id"] for state in states] == found
    if start == 0:
        assert [state["free"] for state in states[:2]] == [1 << 30, 3 << 30]
        assert (states[0]["total"], states[0]["kind"], states[0]["name"]) == (100 << 30, "gpu", "H200")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_what_processes_take_of_nvidias_gpus(tmp_path: Path) -> None:
    """The second GPU has no processes; the third does not tell what process 10 takes."""
    pytest.importorskip("pynvml")
    (source := tmp_path / "driver.c").write_text(DRIVER % {"start": 0})
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libnvidia-ml.so.1", source], check=True)
    variables = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    told = subprocess.run([sys.executable, "-c", ASK_TAKEN], env=variables, cwd=ROOT, capture_output=True, check=True)
    assert json.loads(told.stdout) == [{"GPU-1": 4 * GIB}, {"GPU-1": 2 * GIB, "GPU-3": 2 * GIB}, {}]


def test_main_memory_is_not_told_by_process() -> None:
    assert HostMemory().taken([os.getpid()]) == {}
