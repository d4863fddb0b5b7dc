"""Tells the memories of this machine, total and free: its GPUs', as their driver reports them, and main memory.

Main memory is what the machine and the control group of this process leave. CUDA is never loaded: what is asked is the
driver's management library (NVML), which takes no memory on the devices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal, Protocol

GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")

NVML = "libnvidia-ml.so.1"
"""The driver's management library; it comes with the driver."""

HOST = "cpu"
"""Id of main memory among the devices."""


@dataclass(frozen=True, slots=True)
class DeviceState:
    """One memory of this machine as it is now."""

    id: str
    """`cpu`, or the GPU's UUID, which `CUDA_VISIBLE_DEVICES` takes."""
    kind: Literal["gpu", "cpu"]
    total: int
    free: int
    is_trusted: bool = True
    """Whether `free` is a reading; False: it is not known, and `free` is what would be there if nothing ran."""
    name: str = ""


class DeviceProvider(Protocol):
    """Something that knows memories of this machine. Each call reads them anew."""

    def devices(self) -> tuple[DeviceState, ...]:
        """Return the memories as they are now."""
        ...

    def taken(self, pids: Collection[int]) -> Mapping[str, int]:
        """Return GPU -> the bytes that these processes take of it. GPUs of which it is not known are left out."""
        ...


class HostMemory:
    """Main memory, as far as this process's control group lets it be used."""

    def taken(self, pids: Collection[int]) -> Mapping[str, int]:
        """Return nothing: `workers.footprint.taken` reads main memory, which takes longer."""
        return {}

    def devices(self) -> tuple[DeviceState, ...]:
        """Return main memory alone; nothing where the system tells no size."""
        totals = [value for value in (_meminfo("MemTotal"), _group_limit()) if value is not None]
        free = free_bytes()
        if not totals:
            return ()
        total = min(totals)
        return (DeviceState(HOST, "cpu", total, total if free is None else min(free, total), free is not None),)


def providers() -> tuple[DeviceProvider, ...]:
    """Return the providers of this machine, main memory last. NVIDIA's is loaded only where its library can be."""
    host = HostMemory()
    try:
        ctypes.CDLL(NVML)
        nvidia = import_module("workers.footprint.nvidia")
    except (OSError, ModuleNotFoundError):
        return (host,)
    return (nvidia.NvidiaMemory(), host)


def free_bytes() -> int | None:
    """Return the bytes that the machine and its control group still let this process allocate; None: unknown."""
    found = [value for value in (_meminfo("MemAvailable"), _group_free()) if value is not None]
    return min(found) if found else None


def _meminfo(name: str) -> int | None:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _group_limit() -> int | None:
    """Return the control group's limit; None: it has none."""
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return int(limit) if limit.isdigit() else None


def _group_free() -> int | None:
    """Return the control group's free bytes, inactive file cache included; None: it has no limit.
    Source: "Control Group v2" of the Linux kernel's documentation."""
    limit, used = _group_limit(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit is None or not used.isdigit():
        return None
    cache = dict(line.split(maxsplit=1) for line in _read("/sys/fs/cgroup/memory.stat").splitlines())
    return max(0, limit - int(used) + int(cache.get("inactive_file", 0)))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""
