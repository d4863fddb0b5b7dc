"""Reads the memory of NVIDIA's GPUs from the driver's management library. Import it only where that can be loaded."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import pynvml

from workers.footprint.devices import DeviceState

logger = logging.getLogger(__name__)


class NvidiaMemory:
    """The GPUs that the driver shows, in the order of their PCI buses. Any thread may use it."""

    def devices(self) -> tuple[DeviceState, ...]:
        """Return the GPUs; none where the driver can't be asked now. A GPU whose memory the driver does not tell, such
        as one that shares main memory, is left out."""
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            logger.warning("NVIDIA's driver tells nothing of its GPUs: %s", error)
            return ()
        try:
            found = [_state(number) for number in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            logger.warning("NVIDIA's driver does not list its GPUs: %s", error)
            return ()
        finally:
            pynvml.nvmlShutdown()
        return tuple(one for one in found if one is not None)

    def taken(self, pids: Collection[int]) -> Mapping[str, int]:
        """Return GPU -> the bytes that these processes take of it; only GPUs on which the driver knows one of them, and
        tells its memory. In a container it may know them by other ids."""
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return {}
        try:
            devices = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
            found = {str(pynvml.nvmlDeviceGetUUID(device)): _taken(device, pids) for device in devices}
        except pynvml.NVMLError as error:
            logger.warning("NVIDIA's driver does not tell what processes take: %s", error)
            return {}
        finally:
            pynvml.nvmlShutdown()
        return {id_: size for id_, size in found.items() if size}


def _taken(device: Any, pids: Collection[int]) -> int:
    """Return the bytes that processes take of a GPU; 0: none is known to, or the driver does not tell."""
    running = [one for one in pynvml.nvmlDeviceGetComputeRunningProcesses(device) if one.pid in pids]
    return 0 if any(one.usedGpuMemory is None for one in running) else sum(one.usedGpuMemory for one in running)


def _state(number: int) -> DeviceState | None:
    try:
        device = pynvml.nvmlDeviceGetHandleByIndex(number)
        memory = pynvml.nvmlDeviceGetMemoryInfo(device)
        return DeviceState(
            str(pynvml.nvmlDeviceGetUUID(device)),
            "gpu",
            int(memory.total),
            int(memory.free),
            name=str(pynvml.nvmlDeviceGetName(device)),
        )
    except pynvml.NVMLError as error:
        logger.warning("NVIDIA's driver does not tell the memory of GPU %d: %s", number, error)
        return None
