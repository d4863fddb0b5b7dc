"""The devices that a worker computes on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes, of all processes together."""

    device: str
    """As llama.cpp names it: `CPU`, `CUDA0`."""
    total: int
    free: int
