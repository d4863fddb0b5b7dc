"""The memory of the devices that a worker computes on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One device's memory in bytes, of all processes together."""

    device: str
    """llama.cpp's name of the device: `CPU`, `CUDA0`."""
    total: int
    free: int
