"""What memory llama.cpp's devices have."""

from __future__ import annotations

from workers.llama.devices import Devices


def test_main_memory_is_a_device() -> None:
    """ggml calls all of it free; how much is, the system says."""
    found = {one.device: one for one in Devices(lambda: 1 << 20).memory()}
    assert found["CPU"].total > 1 << 30
    assert found["CPU"].free == 1 << 20
    assert all(0 <= one.free <= one.total for one in found.values())
    unknown = {one.device: one for one in Devices(lambda: None).memory()}
    assert unknown["CPU"].free == unknown["CPU"].total
