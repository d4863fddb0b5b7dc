"""Predictions for models that calls load: what fails is told, ends nobody, and is tried again while it is wanted."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.small_models import write_wide_model
from tests.support.stack import DEMO_MODEL
from workers.footprint.devices import HOST, DeviceState
from workers.footprint.learned import Learned
from workers.footprint.predict import Bounds
from workers.models.spec import LlamaSettings, ModelSpec
from workers.supervisor import needs as predictions
from workers.supervisor.loading.history import without_folders
from workers.supervisor.needs import Needs

HOST_MEMORY = DeviceState(HOST, "cpu", 8 << 30, 8 << 30)


def needs_of(folder: Path) -> Needs:
    return Needs(Learned(folder / "learned.json"), Bounds(), (HOST_MEMORY,), cores=1)


def model(path: Path) -> ModelSpec:
    return ModelSpec(name="m", path=str(path), slots=1, ctx=64, llama=LlamaSettings(n_threads=1))


async def until(happened: Callable[[], bool], needs: Needs) -> None:
    """Wait as a supervisor does, which says ten times a second what is wanted."""
    async with asyncio.timeout(120):
        while not happened():
            needs.want(["m"])
            await asyncio.sleep(0.05)


async def test_what_could_not_be_predicted_is_predicted_again_while_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a file that was half copied when the supervisor came to it."""
    monkeypatch.setattr(predictions, "AGAIN_S", 0.1)
    file, needs = tmp_path / "m.gguf", needs_of(tmp_path)
    file.write_bytes(DEMO_MODEL.read_bytes()[:4096])
    needs.serve([model(file)])
    running = asyncio.create_task(needs.run(asyncio.Event()))
    try:
        await until(lambda: "m" in needs.refused, needs)
        told = needs.refused["m"].whole
        assert told.startswith("its memory can't be predicted: m.gguf: truncated"), "callers are told names, no paths"
        shutil.copyfile(DEMO_MODEL, file)
        await until(lambda: "m" in needs.found, needs)
        assert not needs.refused
    finally:
        running.cancel()


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("[Errno 2] No such file or directory: '/srv/models/m.gguf'", "[Errno 2] No such file or directory: 'm.gguf'"),
        (
            "exit code 65: /m/x/y.gguf: damaged; see https://host/a/b",
            "exit code 65: y.gguf: damaged; see https://host/a/b",
        ),
        ("it takes 3 of 4 GiB/s and/or more", "it takes 3 of 4 GiB/s and/or more"),
    ],
)
def test_callers_are_told_names_and_no_folders(why: str, told: str) -> None:
    assert without_folders(why) == told


async def test_a_file_that_was_replaced_is_predicted_anew_before_it_is_loaded(tmp_path: Path) -> None:
    """A larger one was loaded into the memory that the first one took, and the kernel ended somebody for it."""
    file, needs = tmp_path / "m.gguf", needs_of(tmp_path)
    shutil.copyfile(DEMO_MODEL, file)
    needs.serve([model(file)])
    running = asyncio.create_task(needs.run(asyncio.Event()))
    try:
        await until(lambda: "m" in needs.found, needs)
        assert needs.holds("m")
        before = needs.found["m"].need.cpu_bytes
        write_wide_model(file, 50_000)
        assert not needs.holds("m")
        assert "m" not in needs.found
        await until(lambda: "m" in needs.found, needs)
        assert needs.holds("m")
        assert needs.found["m"].need.cpu_bytes > before
        file.unlink()
        assert not needs.holds("m")
        await until(lambda: "m" in needs.refused, needs)
    finally:
        running.cancel()


async def test_without_a_thread_or_memory_the_supervisor_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictions, "AGAIN_S", 0.1)
    needs, threads, shortages = needs_of(tmp_path), asyncio.to_thread, [RuntimeError("no thread"), MemoryError()]

    async def short(*call: object) -> object:
        if shortages:
            raise shortages.pop(0)
        return await threads(*call)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "to_thread", short)
    needs.serve([model(DEMO_MODEL)])
    running = asyncio.create_task(needs.run(asyncio.Event()))
    try:
        await until(lambda: "m" in needs.found or running.done(), needs)
        assert not running.done()
        assert not shortages
    finally:
        running.cancel()
