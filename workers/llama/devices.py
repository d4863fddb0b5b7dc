"""The memory of the devices that llama.cpp computes on. Source: ggml-backend.h.

ggml knows only the total of the main memory and reports all of it as free (ggml-cpu.cpp), so the caller tells what is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from llama_cpp import llama_cpp as c

from workers.llama.native import native_log
from workers.protocol.devices import DeviceMemory

_CPU = 0  # ggml_backend_dev_type in ggml-backend.h


class Devices:
    """Asks the devices at each call: some microseconds on a CPU, a call of the driver on a GPU. For any thread."""

    def __init__(self, main_memory: Callable[[], int | None]) -> None:
        """`main_memory` returns the free bytes of main memory; None: not known."""
        self._main_memory = main_memory
        native_log()  # starts the backend
        self._count = _bound("ggml_backend_dev_count", ctypes.c_size_t)
        self._get = _bound("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
        self._name = _bound("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
        self._type = _bound("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
        sizes = (ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t))
        self._memory = _bound("ggml_backend_dev_memory", None, ctypes.c_void_p, *sizes)

    def memory(self) -> tuple[DeviceMemory, ...]:
        """Return the memory of each device, without devices that have none, such as some accelerators of the CPU."""
        found = (self._memory_of(self._get(number)) for number in range(self._count()))
        return tuple(one for one in found if one.total)

    def _memory_of(self, device: int) -> DeviceMemory:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._memory(device, ctypes.byref(free), ctypes.byref(total))
        num_free = free.value
        if self._type(device) == _CPU:
            num_free = min(num_free, self._main_memory() or num_free)
        return DeviceMemory(self._name(device).decode("utf-8", "replace"), total.value, num_free)


def _bound(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of ggml that the bindings have no name for."""
    function = getattr(c._lib, name)
    function.restype, function.argtypes = result, list(arguments)
    return function
