"""What a real worker takes corrects a prediction that was wrong."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.stack import DEMO_MODEL, Process, Stack
from tests.support.waiting import until
from workers.footprint.devices import HostMemory
from workers.footprint.footprint import Footprint, Share
from workers.footprint.learned import FILE, Learned
from workers.footprint.predict import Bounds
from workers.footprint.taken import taken_bytes
from workers.models.spec import ModelSpec
from workers.supervisor.loading.readings import READ_AT_S, READ_EVERY_S, Readings, due_at
from workers.supervisor.needs import Needs, Prediction, need_of
from workers.supervisor.plan import PlannedWorker

MIB = 1 << 20
SPEC = msgspec.convert(
    {"name": "m", "path": str(DEMO_MODEL), "slots": 1, "ctx": 64, "llama": {"n_threads": 1}}, ModelSpec
)
PLANNED = PlannedWorker("worker-0", "host-0", SPEC, SPEC, device=None, neighbours=1)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    spec = tmp_path_factory.mktemp("spec") / "m.json"
    spec.write_bytes(msgspec.json.encode(SPEC))
    with Stack(measured=True) as stack:
        gateway = stack.gateway(wait=False)
        running = stack.worker(DEMO_MODEL, "m", model_spec=spec, cache_ram_mib=0)
        stack.wait_until_ready(gateway)
        yield running


def predicted(footprint: Footprint, folder: Path) -> Needs:
    needs = Needs(Learned(folder / FILE), Bounds(), HostMemory().devices(), cores=1)
    needs.found["m"] = Prediction(SPEC, SPEC, need_of(footprint, SPEC), footprint, "key")
    return needs


@contextlib.asynccontextmanager
async def reading(
    needs: Needs, worker: Process, *, has_served: bool, ready_s: float = READ_AT_S[0]
) -> AsyncIterator[Readings]:
    readings = Readings(needs, [HostMemory()])
    task = asyncio.create_task(readings.run())
    readings.note(PLANNED, worker.pid, ready_s, has_served=has_served)
    yield readings
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_prediction_that_is_too_low_is_corrected_for_the_next_load(worker: Process, tmp_path: Path) -> None:
    wrong = Footprint(host=Share(other=60 * MIB), growth=16 * MIB)
    needs = predicted(wrong, tmp_path)
    taken = taken_bytes(worker.pid, [DEMO_MODEL])
    assert taken is not None
    assert taken > 70 * MIB
    async with reading(needs, worker, has_served=False):
        await until(lambda: needs.found["m"].need.cpu_bytes > 80 * MIB, 30, "it is corrected")
    corrected = needs.found["m"].need.cpu_bytes - 16 * MIB
    assert corrected == pytest.approx(taken, rel=0.1)
    # A supervisor that starts later knows it as well.
    assert Learned(tmp_path / FILE).corrected("key", wrong).host.total == corrected


async def test_a_prediction_that_is_too_high_falls_only_when_the_worker_has_served(
    worker: Process, tmp_path: Path
) -> None:
    needs = predicted(Footprint(host=Share(other=400 * MIB)), tmp_path)
    async with reading(needs, worker, has_served=False):
        await asyncio.sleep(3)
    assert needs.found["m"].need.cpu_bytes == 400 * MIB
    async with reading(needs, worker, has_served=True):
        await until(lambda: needs.found["m"].need.cpu_bytes == 380 * MIB, 30, "it is corrected a little")


async def test_a_worker_that_is_gone_or_has_changed_teaches_nothing(worker: Process, tmp_path: Path) -> None:
    needs = predicted(Footprint(host=Share(other=80 * MIB)), tmp_path)
    needs.found["m"] = Prediction(
        SPEC, msgspec.structs.replace(SPEC, slots=2), needs.found["m"].need, needs.found["m"].footprint, "key"
    )
    async with reading(needs, worker, has_served=True):
        await asyncio.sleep(3)
    assert not (tmp_path / FILE).exists()


def test_readings_become_rare() -> None:
    readings = Readings(predicted(Footprint(host=Share(other=80 * MIB)), Path()), [])
    due: list[int] = []
    for ready_s in range(0, 24 * 3600, 10):
        before = len(readings._due)
        readings.note(PLANNED, os.getpid(), float(ready_s), has_served=True)
        due += [ready_s] * (len(readings._due) - before)
    assert due[:5] == [10, 30, 120, 600, 4200]
    assert len(due) == 27
    assert due_at(len(READ_AT_S)) - due_at(len(READ_AT_S) - 1) == READ_EVERY_S
    readings.keep([])
    assert not readings._counts
