"""Predictions for models that calls load: what fails is told, ends nobody, and is tried again while it is wanted."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support import adapter_files
from tests.support.small_models import write_wide_model
from tests.support.stack import DEMO_MODEL
from workers.footprint.devices import HOST, DeviceState
from workers.footprint.learned import Learned
from workers.footprint.predict import Bounds
from workers.footprint.prediction import dry_run
from workers.footprint.rehearsal import DryRun
from workers.llama.gguf import read_header
from workers.models.prices import Rates
from workers.models.spec import AdapterSpec, LlamaSettings, ModelSpec
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


async def test_settings_of_the_kv_cache_are_predicted_anew(tmp_path: Path) -> None:
    """Not only other files: what was predicted for fewer or smaller cells is worth nothing for more or larger ones."""
    needs, spec = needs_of(tmp_path), model(DEMO_MODEL)
    needs.serve([spec])
    running = asyncio.create_task(needs.run(asyncio.Event()))
    try:
        await until(lambda: "m" in needs.found, needs)
        for changed in (
            replace(spec, ctx=512),
            replace(spec, ctx=512, slots=4),
            replace(spec, kv_tokens=8192),
            replace(spec, kv_tokens=8192, llama=replace(spec.llama, cache_type_k="f32")),
            replace(spec, kv_tokens=8192, llama=replace(spec.llama, cache_type_k="f32", cache_type_v="f32")),
        ):
            before = needs.found["m"]
            needs.serve([changed])
            assert "m" not in needs.found, "nothing is loaded by the old figures"
            assert needs.outdated["m"] is before
            await until(lambda: "m" in needs.found, needs)
            assert needs.found["m"].need.cpu_bytes > before.need.cpu_bytes
            assert needs.found["m"].key != before.key, "what was learned of others does not count"
            assert not needs.outdated
    finally:
        running.cancel()


async def test_another_models_max_and_another_adapter_are_predicted_anew(tmp_path: Path) -> None:
    """Cells and threads were those for two models on a machine that was to have eight by then."""
    adapter = tmp_path / "a.gguf"
    adapter_files.write(adapter, adapter_files.weights_for(read_header(DEMO_MODEL)))
    needs = Needs(Learned(tmp_path / "learned.json"), Bounds(), (HOST_MEMORY,), cores=8)
    spec = replace(model(DEMO_MODEL), llama=LlamaSettings(), adapters=(AdapterSpec(name="a", path=str(adapter)),))
    needs.serve([spec])
    running = asyncio.create_task(needs.run(asyncio.Event()))
    try:
        await until(lambda: "m" in needs.found, needs)
        assert needs.found["m"].spec.llama.n_threads == 4
        needs.serve([spec], 2)
        assert "m" in needs.found, "two are what is expected anyway"
        needs.serve([spec], 8)
        assert "m" not in needs.found
        await until(lambda: "m" in needs.found, needs)
        assert needs.found["m"].spec.llama.n_threads == 1
        assert needs.holds("m")
        os.utime(adapter, (1, 1))
        assert not needs.holds("m")
    finally:
        running.cancel()


async def test_models_that_differ_in_name_and_price_only_share_a_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def counted(spec: ModelSpec, *, free_bytes: int | None, workers: int = 1) -> DryRun:
        made.append(spec.name)
        return dry_run(spec, free_bytes=free_bytes, workers=workers)

    monkeypatch.setattr(predictions, "dry_run", counted)
    needs, first = needs_of(tmp_path), model(DEMO_MODEL)
    needs.serve(
        [first, replace(first, name="other", price=Rates(per_million_prompt=1)), replace(first, name="long", ctx=128)]
    )
    running = asyncio.create_task(needs.run(asyncio.Event()))
    try:
        await until(lambda: len(needs.found) == 3, needs)
        assert made == ["m", "long"]
        assert needs.found["other"].need == needs.found["m"].need
        assert needs.found["other"].spec.name == "other"
        assert needs.found["long"].need.cpu_bytes > needs.found["m"].need.cpu_bytes
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
