"""Where a worker's bytes go, for main memory alone and for hosts with GPUs."""

from __future__ import annotations

import msgspec
import pytest

from workers.footprint.footprint import Share
from workers.footprint.predict import (
    CHAT_BYTES,
    CONSTRAINT_BYTES,
    DECODER_BYTES,
    GPU_PROCESS_BYTES,
    POOLED_BYTES,
    RENDERER_BYTES,
    TOKENIZER_BYTES,
    Bounds,
    layer_places,
    predict,
)
from workers.footprint.rehearsal import DryRun, LayerBytes, Rehearsed
from workers.models.spec import ModelSpec

MIB = 1 << 20
LAYERS = (
    LayerBytes(host=10 * MIB),
    *(LayerBytes(weights=100 * MIB, host=5 * MIB, cells=8 * MIB) for _ in range(4)),
    LayerBytes(weights=20 * MIB),
)
MODEL = Rehearsed(
    weights=450 * MIB,
    cells=32 * MIB,
    compute=64 * MIB,
    outputs=3 * MIB,
    scratch=2 * MIB,
    inputs=4 * MIB,
    num_cells=4096,
)
RUN = DryRun(
    kind="chat",
    model=MODEL,
    layers=LAYERS,
    vocabulary=30 * MIB,
    structures=6 * MIB,
    mapped=450 * MIB,
    n_vocab=1000,
    helpers=2,
)
PROCESSES = CHAT_BYTES + 2 * (RENDERER_BYTES + TOKENIZER_BYTES) + 1000 * CONSTRAINT_BYTES + 66 * MIB


def spec(**fields: object) -> ModelSpec:
    return msgspec.convert({"name": "m", "path": "m.gguf", **fields}, ModelSpec)


def test_on_the_processor_all_is_in_main_memory() -> None:
    told = predict(RUN, spec())
    assert told.host == Share(weights=450 * MIB, cells=32 * MIB, compute=69 * MIB, other=PROCESSES)
    assert (told.gpus, told.mapped, told.num_cells) == ((), 450 * MIB, 4096)
    assert told.total == told.host.total == 551 * MIB + PROCESSES


def test_a_worker_for_vectors_renders_nothing() -> None:
    told = predict(msgspec.structs.replace(RUN, kind="pooled"), spec())
    assert told.host.other == POOLED_BYTES + 2 * TOKENIZER_BYTES + 66 * MIB


def test_draft_and_projector_count() -> None:
    run = msgspec.structs.replace(RUN, draft=MODEL, draft_mapped=450 * MIB, projector=40 * MIB, decoders=2)
    told = predict(run, spec(projector="mmproj.gguf"))
    assert told.host.weights == 940 * MIB
    assert (told.host.cells, told.host.compute) == (64 * MIB, 138 * MIB)
    assert told.host.other == PROCESSES + 2 * DECODER_BYTES
    assert told.mapped == 900 * MIB


@pytest.mark.parametrize(
    ("bounds", "later"),
    [
        (Bounds(), 50),
        (Bounds(max_adapters=2), 30),
        (Bounds(max_adapters=1), 0),
        (Bounds(adapters_bytes=25 * MIB), 15),
        (Bounds(adapters_bytes=5 * MIB), 0),
    ],
)
def test_adapters_are_loaded_at_the_start_or_later(bounds: Bounds, later: int) -> None:
    run = msgspec.structs.replace(RUN, adapters=(10 * MIB, 20 * MIB, 30 * MIB), num_pinned=1)
    told = predict(run, spec(), bounds=bounds)
    assert told.host.weights == 460 * MIB
    assert told.growth == later * MIB


def test_caches_are_growth() -> None:
    bounds = Bounds(cache_ram_bytes=100, media_cache_bytes=10)
    assert predict(RUN, spec(), bounds=bounds).growth == 100
    assert predict(msgspec.structs.replace(RUN, projector=1), spec(), bounds=bounds).growth == 110
    assert predict(msgspec.structs.replace(RUN, kind="pooled"), spec(), bounds=bounds).growth == 0


def test_on_one_gpu_the_input_stays_in_main_memory() -> None:
    told = predict(RUN, spec(), gpus=[1 << 30])
    assert told.gpus == (Share(weights=420 * MIB, cells=32 * MIB, compute=64 * MIB, other=GPU_PROCESS_BYTES),)
    assert told.host == Share(weights=30 * MIB, compute=7 * MIB, other=PROCESSES)
    assert told.mapped == 30 * MIB


def test_a_model_without_devices_leaves_the_gpu_alone() -> None:
    for llama in ({"n_gpu_layers": 0}, {"devices": ["none"]}):
        assert predict(RUN, spec(llama=llama), gpus=[1 << 30]).gpus == ()


@pytest.mark.parametrize(
    ("llama", "gpus", "places"),
    [
        ({}, [1], [0, 0, 0, 0, 0]),
        ({}, [1, 1], [0, 0, 0, 1, 1]),
        ({}, [3, 1], [0, 0, 0, 0, 1]),
        ({"tensor_split": [1, 3]}, [9, 9], [0, 0, 1, 1, 1]),
        ({"n_gpu_layers": 2}, [1, 1], [None, None, None, 0, 1]),
        ({"n_gpu_layers": 99}, [1], [0, 0, 0, 0, 0]),
        ({"split_mode": "none", "main_gpu": 1}, [1, 1], [1, 1, 1, 1, 1]),
        ({}, [0, 0], [0, 0, 0, 1, 1]),
        ({}, [1] * 8, [0, 1, 3, 4, 6]),
    ],
)
def test_layers_go_where_llama_cpp_puts_them(
    llama: dict[str, object], gpus: list[int], places: list[int | None]
) -> None:
    assert layer_places(spec(llama=llama), 4, gpus) == places


def test_two_gpus_share_layers_cells_and_what_goes_beside() -> None:
    run = msgspec.structs.replace(RUN, projector=40 * MIB, adapters=(10 * MIB,), num_pinned=1)
    told = predict(run, spec(), gpus=[1, 1])
    assert [share.weights // MIB for share in told.gpus] == [345, 125]
    assert [share.cells // MIB for share in told.gpus] == [24, 8]
    assert [share.compute // MIB for share in told.gpus] == [64, 64]


def test_layers_that_stay_are_computed_in_main_memory() -> None:
    told = predict(RUN, spec(llama={"n_gpu_layers": 3}), gpus=[1])
    assert told.gpus[0].weights == 220 * MIB
    assert (told.host.weights, told.host.cells, told.host.compute) == (230 * MIB, 16 * MIB, 67 * MIB)


def test_cells_can_stay_in_main_memory() -> None:
    told = predict(RUN, spec(llama={"offload_kqv": False}), gpus=[1])
    assert (told.gpus[0].cells, told.host.cells, told.host.compute) == (0, 32 * MIB, 67 * MIB)


def test_rows_are_spread_by_shares() -> None:
    told = predict(RUN, spec(llama={"split_mode": "row", "tensor_split": [1, 3]}), gpus=[1, 1])
    assert [share.weights // MIB for share in told.gpus] == [105, 315]


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_draft_model_goes_where_its_layers_go(on_gpu: bool) -> None:
    run = msgspec.structs.replace(RUN, draft=MODEL)
    draft = {"path": "d.gguf", "n_gpu_layers": -1 if on_gpu else 0}
    told = predict(run, spec(speculation={"draft": draft}), gpus=[1])
    alone = predict(RUN, spec(), gpus=[1])
    assert told.gpus[0].total - alone.gpus[0].total == (546 * MIB if on_gpu else 0)
    assert told.host.total - alone.host.total == (7 * MIB if on_gpu else 549 * MIB)


def test_no_byte_is_lost_between_the_devices() -> None:
    for num_gpus in range(1, 9):
        told = predict(RUN, spec(), gpus=[1] * num_gpus)
        assert sum(share.weights for share in (told.host, *told.gpus)) == 450 * MIB
        assert sum(share.cells for share in (told.host, *told.gpus)) == 32 * MIB
