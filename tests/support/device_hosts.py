"""Machines with any GPUs, as a provider of devices tells them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from workers.footprint.devices import HOST, DeviceState

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class FixedDevices:
    """A provider of the devices that it is made with."""

    states: tuple[DeviceState, ...]

    def devices(self) -> tuple[DeviceState, ...]:
        return self.states

    def taken(self, pids: Collection[int]) -> Mapping[str, int]:
        return {}


def gpu_host(
    num_gpus: int = 8, *, gpu_gib: float = 80, free_gib: float | None = None, host_gib: float = 512
) -> FixedDevices:
    """Return a host of equal GPUs and main memory. `free_gib`: what is free of each GPU; None: all."""
    total = int(gpu_gib * GIB)
    free = total if free_gib is None else int(free_gib * GIB)
    gpus = [DeviceState(f"GPU-{number}", "gpu", total, free) for number in range(num_gpus)]
    return FixedDevices((*gpus, DeviceState(HOST, "cpu", int(host_gib * GIB), int(host_gib * GIB))))
