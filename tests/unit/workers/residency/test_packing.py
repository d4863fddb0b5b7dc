"""Which devices of a machine a worker gets."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.workers.residency.pictures import GIB, machine
from workers.residency.packing import estimate, pack
from workers.residency.picture import CPU, Need


def room(*gpus: float, host: float = 64) -> dict[str, int]:
    return {**{f"gpu{number}": int(size * GIB) for number, size in enumerate(gpus)}, CPU: int(host * GIB)}


@pytest.mark.parametrize(
    ("need", "free", "expected"),
    [
        (Need(10 * GIB), (24, 12, 80), {"gpu1": 10.0}),
        (Need(10 * GIB, bytes_per_gpu=3 * GIB), (24, 12, 80), {"gpu0": 13.0}),
        (Need(10 * GIB, host_bytes=GIB), (24,), {"gpu0": 10.0, CPU: 1.0}),
        (Need(30 * GIB), (24, 12), {"gpu1": 10.0, "gpu0": 20.0}),
        (Need(30 * GIB), (24, 12, 24), {"gpu0": 15.0, "gpu2": 15.0}),
        (Need(30 * GIB, can_split=False), (24, 12, 24), None),
        (Need(31 * GIB, bytes_per_gpu=4 * GIB), (24, 14, 14), {"gpu1": 11.75, "gpu2": 11.75, "gpu0": 19.5}),
        (Need(12 * GIB, num_gpus=2), (24, 12, 12), {"gpu1": 6.0, "gpu2": 6.0}),
        (Need(12 * GIB, num_gpus=4), (24, 12, 12), None),
        (Need(12 * GIB, num_gpus=2, split=(3, 1)), (24, 12), {"gpu0": 9.0, "gpu1": 3.0}),
        (Need(12 * GIB, num_gpus=2, split=(1, 3)), (24, 12), {"gpu1": 3.0, "gpu0": 9.0}),
        (Need(cpu_bytes=20 * GIB), (24,), {CPU: 20.0}),
        (Need(10 * GIB, cpu_bytes=20 * GIB), (), {CPU: 20.0}),
        (Need(10 * GIB), (), None),
        (Need(10 * GIB, host_bytes=65 * GIB), (24,), None),
    ],
)
def test_the_devices_of_a_worker(need: Need, free: tuple[float, ...], expected: dict[str, float] | None) -> None:
    shares = pack(need, machine(gpus=(80,) * len(free)), room(*free))
    found = None if shares is None else {share.device: share.bytes / GIB for share in shares}
    assert found == (expected if expected is None else pytest.approx(expected))
    assert found is None or list(found) == list(expected or {}), "in the order of the split"


def test_a_second_worker_goes_to_another_gpu() -> None:
    host, need = machine(gpus=(24, 48)), Need(10 * GIB)
    for avoided, device in ((set[str](), "gpu0"), ({"gpu0"}, "gpu1"), ({"gpu0", "gpu1"}, "gpu0")):
        shares = pack(need, host, room(24, 48), avoided)
        assert shares is not None
        assert [share.device for share in shares] == [device]


@example([6, 6, 6, 6], Need(5, bytes_per_gpu=4))
@given(
    st.lists(st.integers(0, 40), max_size=8),
    st.builds(
        Need,
        st.integers(0, 90),
        bytes_per_gpu=st.integers(0, 4),
        host_bytes=st.integers(0, 4),
        cpu_bytes=st.integers(0, 70),
        num_gpus=st.integers(1, 4),
        can_split=st.booleans(),
    ),
)
def test_what_is_packed_fits_and_is_whole(free: list[int], need: Need) -> None:
    host = machine(gpus=(90,) * len(free))
    left = {**{f"gpu{number}": size for number, size in enumerate(free)}, CPU: 64}
    shares = pack(need, host, left)
    quick = estimate(need, left, sorted(free))
    assert shares is None or quick is not None
    if shares is None:
        return
    assert all(0 <= share.bytes <= left[share.device] for share in shares)
    on_gpus = [share for share in shares if share.device != CPU]
    if on_gpus:
        assert sum(share.bytes for share in on_gpus) == need.gpu_bytes + len(on_gpus) * need.bytes_per_gpu
        assert quick is not None
        assert quick[0] == len(on_gpus)
    assert len({share.device for share in shares}) == len(shares)
