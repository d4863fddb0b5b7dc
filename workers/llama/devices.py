"""The devices that llama.cpp computes on: which there are, their memory, the ones that the settings choose, and their
types of buffer for weights.

Names are llama.cpp's own, as llama-server's `--list-devices` shows them. Sources: ggml-backend.h, and common/arg.cpp
for what may be chosen.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llama_cpp import llama_cpp as c

from workers.llama.native import ModelError, native_log
from workers.models.spec import NO_DEVICE
from workers.protocol.heartbeat import DeviceMemory

_CPU = 0  # ggml_backend_dev_type in ggml-backend.h


class _Ggml:
    """ggml's functions for devices, which the Python bindings do not offer. A device is a pointer."""

    def __init__(self) -> None:
        native_log()  # starts the backend
        self._count = _bound("ggml_backend_dev_count", ctypes.c_size_t)
        self._get = _bound("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
        self._name = _bound("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
        self._buffer_name = _bound("ggml_backend_buft_name", ctypes.c_char_p, ctypes.c_void_p)
        self.kind = _bound("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
        self.buffer_type = _bound("ggml_backend_dev_buffer_type", ctypes.c_void_p, ctypes.c_void_p)
        sizes = (ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t))
        self.memory = _bound("ggml_backend_dev_memory", None, ctypes.c_void_p, *sizes)

    def devices(self) -> Iterator[int]:
        return (self._get(number) for number in range(self._count()))

    def name(self, device: int) -> str:
        return str(self._name(device).decode("utf-8", "replace"))

    def buffer_name(self, buffer_type: int) -> str:
        return str(self._buffer_name(buffer_type).decode("utf-8", "replace"))


@functools.cache
def _ggml() -> _Ggml:
    return _Ggml()


def _bound(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(c._lib, name)
    function.restype, function.argtypes = result, list(arguments)
    return function


class Devices:
    """Asks the devices for their memory at each call: some microseconds on a CPU, a call of the driver on a GPU. Any
    thread may use it.

    ggml knows only the total of the main memory and reports all of it as free (ggml-cpu.cpp), so `main_memory` reports
    what is free."""

    def __init__(self, main_memory: Callable[[], int | None]) -> None:
        """`main_memory` returns the free bytes of main memory; None: not known."""
        self._main_memory = main_memory
        self._ggml = _ggml()

    def memory(self) -> tuple[DeviceMemory, ...]:
        """Return the memory of each device, without devices that have none, such as some accelerators of the CPU."""
        found = map(self._memory_of, self._ggml.devices())
        return tuple(one for one in found if one.total)

    def _memory_of(self, device: int) -> DeviceMemory:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._ggml.memory(device, ctypes.byref(free), ctypes.byref(total))
        num_free = free.value
        if self._ggml.kind(device) == _CPU:
            num_free = min(num_free, self._main_memory() or num_free)
        return DeviceMemory(self._ggml.name(device), total.value, num_free)


def chosen_devices(wanted: Sequence[str | int]) -> ctypes.Array[ctypes.c_void_p] | None:
    """Return the devices that the setting `devices` chooses, as llama.cpp takes them: a null pointer ends the list.

    None: the setting is empty, and llama.cpp chooses. Raises ModelError for a device that is not there."""
    if not wanted:
        return None
    ggml = _ggml()
    found = {ggml.name(device): device for device in ggml.devices() if ggml.kind(device) != _CPU}
    names = list(found)
    chosen: list[int] = []
    for word in wanted if tuple(wanted) != (NO_DEVICE,) else ():
        one = names[word] if isinstance(word, int) and word < len(names) else str(word)
        if one not in found:
            known = ", ".join(f"{number} ({name})" for number, name in enumerate(names))
            raise ModelError(
                f"llama.devices: there is no device {one} beside the processor; "
                + (f"choose among {known}" if known else f"there is none at all, so remove it, or write {NO_DEVICE}")
            )
        if found[one] in chosen:
            raise ModelError(f"llama.devices: {one} is named twice, once by its number; name each device once")
        chosen.append(found[one])
    return (ctypes.c_void_p * (len(chosen) + 1))(*chosen)


def buffer_types(devices: Sequence[str | int] = ()) -> Mapping[str, int]:
    """Return the types of buffer that weights can lie in, by name: those of the processor and of the devices that the
    setting `devices` chooses. llama.cpp aborts over weights on a device that it does not use. Raises ModelError."""
    ggml, chosen = _ggml(), chosen_devices(devices)
    used = None if chosen is None else frozenset(device for device in chosen if device)
    types = [
        ggml.buffer_type(device)
        for device in ggml.devices()
        if ggml.kind(device) == _CPU or used is None or device in used
    ]
    return {ggml.buffer_name(one): one for one in types if one}
