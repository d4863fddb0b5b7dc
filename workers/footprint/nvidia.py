"""Reads the memory of NVIDIA's GPUs from the driver's management library. Import it only where that can be loaded."""

from __future__ import annotations

import logging

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
