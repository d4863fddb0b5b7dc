"""Predicted within 5 % of what a worker and its helper processes really take, once they have used all of it."""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.deep_copies import write_deep_copy
from tests.support.pooled_models import (
    write_bert,
    write_rank_decoder,
    write_reranker,
    write_t5_encoder,
    write_two_way_llama,
)
from tests.support.projectors import write_pair
from tests.support.quantised import Q4_0, Q8_0, write_quantised
from tests.support.small_models import (
    SMALL_MODELS,
    write_infill_model,
    write_small_model,
    write_stories_model,
    write_wide_model,
)
from tests.support.stack import DEMO_MODEL, SHARED_MODELS, Process, Stack
from workers.footprint.devices import free_bytes
from workers.footprint.footprint import Footprint
from workers.footprint.predict import predict
from workers.footprint.prediction import dry_run
from workers.footprint.rehearsal import DryRun
from workers.footprint.taken import num_processes, taken_bytes
from workers.models.spec import ModelSpec

TOLERANCE = 0.05
SETTLED_BYTES = 256 << 10
SMALL = {"slots": 4, "ctx": 512}
TEXTS = "word " * 90
ROUNDS = 4
"""How often more work is done where less was taken than predicted: the most is looked for, and whether the largest step
comes with all cells in use is chance on a busy machine. What is predicted too low fails all the sooner for it."""

FILLINGS = 3
"""How often prompts fill all cells."""
LASTING = 128
"""Tokens of answers during which all other prompts are read, one of them in a step or two."""
ROOM = 16
"""Cells of a conversation that are left to its answer, where most of it is prompt."""


class Fleet:
    """One gateway for the workers of all tests here, which run one after the other."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        self.stack = stack
        self.folder = folder
        self._gateway = stack.gateway(wait=False)

    def post(self, path: str, body: dict[str, object]) -> None:
        headers = {"Authorization": f"Bearer {self.stack.key}", "Content-Type": "application/json"}
        asked = urllib.request.Request(self._gateway.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(asked, timeout=300) as answer:
            answer.read()

    def started(self, spec: ModelSpec) -> Process:
        file = self.folder / f"{spec.name}.json"
        file.write_bytes(msgspec.json.encode(spec))
        # What left the KV cache would be kept in memory, as it comes: that is `growth`, which is no part of the sum.
        worker = self.stack.worker(Path(spec.path or ""), spec.name, model_spec=file, cache_ram_mib=0)
        self.stack.wait_until_ready(self._gateway)
        self.stack.wait_until_listed(self._gateway, spec.name)
        return worker

    def exercise(self, spec: ModelSpec, run: DryRun, worker: Process) -> None:
        """Have the worker use all that it has: all helper processes, all cells, the largest step."""
        wanted = 2 + run.helpers + run.decoders
        if run.kind == "pooled":
            self._read_texts(spec)
        else:
            wanted += run.helpers
            self._chat(spec, worker, wanted)
            self._fill(spec, run.model.num_cells)
        deadline = time.monotonic() + 30
        while num_processes(worker.pid) < wanted:
            assert time.monotonic() < deadline, f"{num_processes(worker.pid)} processes of {wanted}"
            time.sleep(0.05)

    def _chat(self, spec: ModelSpec, worker: Process, num_wanted: int) -> None:
        body = {"model": spec.name, "messages": [{"role": "user", "content": "hi " * 50}], "max_tokens": 2}
        # A worker has the vocabulary as grammars need it once a call has a schema, or when it has been idle.
        form = {"type": "json_schema", "json_schema": {"name": "any", "schema": {"type": "object"}}}
        self.post("/v1/chat/completions", {**body, "response_format": form})
        for _ in range(20):
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda _: self.post("/v1/chat/completions", body), range(16)))
            if num_processes(worker.pid) >= num_wanted:
                return

    def _fill(self, spec: ModelSpec, num_cells: int) -> None:
        """Have all cells taken at the same moment, by conversations whose answers last until the last prompt has been
        read, and then by prompts that come together: a step is as large as it can be once two of them wait."""
        longest = min(spec.ctx, num_cells) - ROOM
        num_at_once = min(spec.slots, num_cells // (longest + ROOM))
        num_answer = min(longest // 2, LASTING)
        self._complete(spec, range(num_at_once), longest - num_answer, num_answer)
        for filling in range(1, FILLINGS + 1):
            first = filling * num_at_once
            self._complete(spec, range(first, first + num_at_once), longest, ROOM - 4)

    def _complete(self, spec: ModelSpec, seeds: range, num_prompt: int, num_answer: int) -> None:
        """Have prompts of so many tokens answered, which come in one request."""
        prompts = [random.Random(seed).choices(range(20, 430), k=num_prompt) for seed in seeds]
        body = {"model": spec.name, "max_tokens": num_answer, "temperature": 0, "ignore_eos": True}
        self.post("/v1/completions", body | {"prompt": prompts})

    def _read_texts(self, spec: ModelSpec) -> None:
        texts = [f"{number} {TEXTS}" for number in range(32)]
        try:
            self.post("/v1/embeddings", {"model": spec.name, "input": texts})
        except urllib.error.HTTPError:
            self.post("/v1/rerank", {"model": spec.name, "query": "word", "documents": texts})


def settled(worker: Process, files: list[Path]) -> int:
    """What the worker takes, once that does not change any more."""
    last = 0
    for _ in range(40):
        taken = taken_bytes(worker.pid, files)
        assert worker.popen.poll() is None, worker.text()[-3000:]
        assert taken is not None
        if abs(taken - last) < SETTLED_BYTES:
            return taken
        last = taken
        time.sleep(0.3)
    return last


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Stack(measured=True) as stack:
        yield Fleet(stack, tmp_path_factory.mktemp("specs"))


def check(fleet: Fleet, path: Path, **fields: object) -> Footprint:
    """Compare prediction and truth; return the prediction."""
    llama = {"n_threads": 1, **fields.pop("llama", {})}  # type: ignore[dict-item]
    name = f"m{len(fleet.stack.workers)}"
    spec = msgspec.convert({"name": name, "path": str(path), "llama": llama, **fields}, ModelSpec)
    run = dry_run(spec, free_bytes=free_bytes())
    told = predict(run, spec)
    worker = fleet.started(spec)
    try:
        longest = spec if spec.ctx else msgspec.structs.replace(spec, ctx=trained(fleet, worker, name))
        fleet.exercise(longest, run, worker)
        draft = spec.speculation.draft
        files = [path, *([Path(draft.path)] if draft and draft.path else [])]
        taken = settled(worker, files)
        for _ in range(ROUNDS):
            if told.host.total <= taken * (1 + TOLERANCE):
                break
            fleet.exercise(longest, run, worker)
            taken = settled(worker, files)
    finally:
        worker.stop()
    error = told.host.total / taken - 1
    print(f"{path.name} {fields}: predicted {told.host.total / 2**20:.1f} MiB, took {taken / 2**20:.1f}, {error:+.1%}")
    assert abs(error) <= TOLERANCE, (told, taken, error)
    return told


def trained(fleet: Fleet, worker: Process, name: str) -> int:
    beat = fleet.stack.heartbeat(name, worker.name)
    assert beat is not None
    return beat.facts.n_ctx_train


WRITERS = {
    "bert": write_bert,
    "reranker": write_reranker,
    "two-way": write_two_way_llama,
    "t5-encoder": write_t5_encoder,
    "rank-decoder": write_rank_decoder,
    "stories": write_stories_model,
    "infill": write_infill_model,
}
POOLED = {"bert", "reranker", "two-way", "t5-encoder", "rank-decoder"}


def many(names: list[str], *always: str) -> list[object]:
    """All names, of which those not in `always` are for `make test-full`."""
    return [name if name in always else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.parametrize("name", many(sorted(SMALL_MODELS), "window", "recurrent", "attention-latent"))
def test_each_kind_of_memory(fleet: Fleet, tmp_path: Path, name: str) -> None:
    check(fleet, write_small_model(tmp_path, name), **SMALL)


@pytest.mark.parametrize("name", many(sorted(WRITERS), "bert", "rank-decoder"))
def test_each_kind_of_work(fleet: Fleet, tmp_path: Path, name: str) -> None:
    WRITERS[name](path := tmp_path / f"{name}.gguf")
    check(fleet, path, **({} if name in POOLED else SMALL))


SHARED = ("stories260K", "stories260K-q8_0", "stories260K-infill", "bert-bge-small-random", "jina-reranker-random")


@pytest.mark.parametrize("name", many(list(SHARED), "stories260K", "bert-bge-small-random"))
def test_the_shared_models(fleet: Fleet, name: str) -> None:
    check(fleet, SHARED_MODELS / f"{name}.gguf", **({} if "random" in name else SMALL))


SETTINGS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "more slots": {"slots": 16},
    "cells by number": {"kv_tokens": 4096, "ctx": 1024},
    "cells of f32": {"llama": {"cache_type_k": "f32", "cache_type_v": "f32"}},
    "cells of q8_0": {"llama": {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}},
    "no flash attention": {"llama": {"flash_attn": "off"}, "slots": 4, "ctx": 1024},
    "large steps": {"llama": {"n_ubatch": 2048}},
    "small steps": {"llama": {"n_ubatch": 64}},
    "not mapped": {"llama": {"use_mmap": False}},
    "vectors": {"llama": {"embeddings": True}},
}


@pytest.mark.parametrize("name", many(list(SETTINGS), "as it comes", "no flash attention"))
def test_settings(fleet: Fleet, name: str) -> None:
    check(fleet, DEMO_MODEL, **SETTINGS[name])


@pytest.mark.long
@pytest.mark.parametrize("ftype", [Q4_0, Q8_0])
def test_weights_that_are_repacked(fleet: Fleet, tmp_path: Path, ftype: int) -> None:
    check(fleet, write_quantised(DEMO_MODEL, tmp_path / "small.gguf", ftype))


@pytest.mark.long
def test_many_slots_over_a_window(fleet: Fleet, tmp_path: Path) -> None:
    check(fleet, write_small_model(tmp_path, "window"), slots=16, ctx=512)


@pytest.mark.long
@pytest.mark.parametrize("slots", [4, 16])
def test_cells_behind_a_window(fleet: Fleet, tmp_path: Path, slots: int) -> None:
    """llama.cpp gives some of them to others before it has used them all, unless conversations hold them at the same
    moment."""
    path = write_small_model(tmp_path, "window")
    check(fleet, path, slots=slots, ctx=512, llama={"swa_full": True})


@pytest.mark.long
def test_states_that_can_be_taken_back(fleet: Fleet, tmp_path: Path) -> None:
    check(fleet, write_small_model(tmp_path, "hybrid-convolution"), **SMALL, speculation={"rollback": 4})


@pytest.mark.long
def test_a_large_vocabulary(fleet: Fleet, tmp_path: Path) -> None:
    write_wide_model(path := tmp_path / "wide.gguf", 20_000)
    check(fleet, path, **SMALL)


def test_a_draft_model(fleet: Fleet, tmp_path: Path) -> None:
    small = write_quantised(DEMO_MODEL, tmp_path / "draft.gguf", Q8_0)
    told = check(fleet, DEMO_MODEL, **SMALL, speculation=drafted(small))
    assert told.host.weights == pytest.approx(DEMO_MODEL.stat().st_size + small.stat().st_size, rel=0.05)


@pytest.mark.long
def test_a_draft_model_whose_drafts_do_not_pay(fleet: Fleet, tmp_path: Path) -> None:
    """With many cells: its compute buffer stays empty, and is small beside the model's."""
    small = write_quantised(DEMO_MODEL, tmp_path / "draft.gguf", Q8_0)
    check(fleet, DEMO_MODEL, speculation=drafted(small))


@pytest.mark.long
def test_a_draft_model_whose_drafts_pay(fleet: Fleet, tmp_path: Path) -> None:
    check(fleet, write_deep_copy(DEMO_MODEL, tmp_path / "deep.gguf", 6), **SMALL, speculation=drafted(DEMO_MODEL))


def drafted(path: Path) -> dict[str, object]:
    return {"draft": {"path": str(path)}}


def test_a_pinned_adapter(fleet: Fleet) -> None:
    lora = SHARED_MODELS / "stories260K-shakespeare-lora.gguf"
    told = check(
        fleet,
        SHARED_MODELS / "stories260K.gguf",
        **SMALL,
        adapters=[{"name": "old", "path": str(lora), "pinned": True}],
    )
    assert told.host.weights > (SHARED_MODELS / "stories260K.gguf").stat().st_size


@pytest.mark.parametrize("name", many(["gemma3", "ultravox"], "gemma3"))
def test_a_projector(fleet: Fleet, tmp_path: Path, name: str) -> None:
    pair = write_pair(tmp_path, name)
    check(fleet, pair.model, **SMALL, projector=str(pair.projector))
