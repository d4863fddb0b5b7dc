"""The measurements of `benchmarks/gpu_check.py`, on whatever device this environment's llama.cpp computes.

    python -m benchmarks.gpu_rows --device gpu|cpu [--model FILE.gguf]

One context per row, the best of a few rounds or the median of many steps. `--device cpu` takes the demo model and small
sizes: it shows that every measurement runs, its numbers mean little.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from llama_cpp import llama_cpp as c

from benchmarks import engine_step
from benchmarks.synthetic_model import synthetic_model
from benchmarks.table import Row, print_rows
from workers.llama.adapters import Adapter, AppliedAdapters, inspect
from workers.llama.context import Context
from workers.llama.gguf import GgufHeader
from workers.llama.model import Model
from workers.models.spec import LlamaSettings

DEMO = Path(__file__).resolve().parents[1] / "deploy" / "demo" / "paddock-demo.gguf"
ADAPTED = ("attn_q.weight", "attn_v.weight", "ffn_down.weight")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured; tokens where nothing else is said."""

    prefill: tuple[int, ...] = (512, 2048)
    slots: tuple[int, ...] = (1, 8, 16, 32)
    answer: int = 128
    moved: int = 1024
    """Range of KV cells that is saved and brought back."""
    idle: tuple[int, ...] = (0, 2048, 8192)
    """Cells of a prefix that nobody uses."""
    streams: int = 8
    steps: int = 50
    rounds: int = 3


SMALL = Sizes(prefill=(64, 256), slots=(1, 4), answer=16, moved=128, idle=(0, 128, 512), streams=4, steps=8, rounds=2)


class Bench:
    """A context that is filled and stepped by hand, without an engine."""

    def __init__(self, model: Model, settings: LlamaSettings, *, slots: int, kv_tokens: int) -> None:
        self.context = Context(model, settings, slots=slots, kv_tokens=kv_tokens)
        self.context.warm_up()
        self.memory = self.context.memory
        self._batch = self.context.new_batch()
        self._rng = np.random.default_rng(1)
        self._high = model.facts.n_vocab

    def fill(self, sequence: int, num_tokens: int) -> float:
        """Computes a prompt of random tokens in whole micro-batches -> seconds."""
        tokens = self._rng.integers(0, self._high, num_tokens, dtype=np.int32)
        start = time.perf_counter()
        size = self.context.n_ubatch
        for position in range(0, num_tokens, size):
            chunk = tokens[position : position + size]
            self._batch.clear()
            self._batch.add_prompt(chunk, position, sequence, num_logits=int(position + size >= num_tokens))
            self.context.decode(self._batch)
        c.llama_synchronize(self.context.pointer)
        return time.perf_counter() - start

    def step(self, num_streams: int, position: int) -> None:
        """One more token for each of the first streams; their logits lie in rows 0, 1, ..."""
        self._batch.clear()
        for stream in range(num_streams):
            self._batch.add_token((position * 31 + stream) % self._high, position, stream)
        self.context.decode(self._batch)

    def steps(self, num_streams: int, start: int, count: int, after: Callable[[int], object] | None = None) -> float:
        """Milliseconds per step, the median; `after(number)` counts as part of each."""
        times = []
        for number in range(count):
            began = time.perf_counter()
            self.step(num_streams, start + number)
            if after is not None:
                after(number)
            c.llama_synchronize(self.context.pointer)
            times.append(time.perf_counter() - began)
        return statistics.median(times) * 1e3


@contextmanager
def benched(model: Model, settings: LlamaSettings, *, slots: int, kv_tokens: int) -> Iterator[Bench]:
    bench = Bench(model, settings, slots=slots, kv_tokens=kv_tokens)
    try:
        yield bench
    finally:
        bench.context.close()


def row(what: str, figure: str, ratio: str = "") -> Row:
    return Row(what, figure, ratio, "", True)


def prefill(model: Model, settings: LlamaSettings, sizes: Sizes) -> list[Row]:
    rows = []
    for num_tokens in sizes.prefill:
        with benched(model, settings, slots=1, kv_tokens=num_tokens + 256) as bench:
            seconds = []
            for _ in range(sizes.rounds):
                bench.memory.clear()
                seconds.append(bench.fill(0, num_tokens))
        rows.append(row(f"prefill of {num_tokens:,} tokens", f"{num_tokens / min(seconds):,.0f} tokens/s"))
    return rows


def decode(model: Model, settings: LlamaSettings, sizes: Sizes) -> list[Row]:
    """The whole engine, its thread and its sampling as in a worker."""
    options = argparse.Namespace(tokens=sizes.answer, temperature=0.8, busy=False, release=False)
    rows = []
    for slots in sizes.slots:
        one = engine_step.measure(model, settings, options, slots)
        native_us = one.decode_us + one.sample_us
        parts = (
            f"llama.cpp {native_us:,.0f} us, Python {one.step_us - native_us:,.0f} us of {one.step_us:,.0f} us a step"
        )
        rows.append(row(f"decode, {slots} slots", f"{one.tokens_per_s:,.0f} tokens/s", parts))
    return rows


def moving(model: Model, settings: LlamaSettings, sizes: Sizes) -> list[Row]:
    """A cached prefix that leaves the device and comes back, against computing it again."""
    num = sizes.moved
    saves, loads, fills = [], [], []
    with benched(model, settings, slots=2, kv_tokens=2 * num + 256) as bench:
        for _ in range(sizes.rounds):
            bench.memory.clear()
            fills.append(bench.fill(0, num))
            start = time.perf_counter()
            state = bench.memory.save(0)
            saves.append(time.perf_counter() - start)
            start = time.perf_counter()
            bench.memory.load(1, state)
            c.llama_synchronize(bench.context.pointer)
            loads.append(time.perf_counter() - start)
    again = min(fills)
    return [
        row(f"prefill of {num:,} tokens, to compare", f"{again * 1e3:,.2f} ms"),
        row(f"save {num:,} cells ({len(state) / 2**20:,.1f} MiB)", f"{min(saves) * 1e3:,.2f} ms", share(saves, again)),
        row(f"bring back {num:,} cells", f"{min(loads) * 1e3:,.2f} ms", share(loads, again)),
    ]


def share(times: Sequence[float], whole: float) -> str:
    return f"{min(times) / whole:.1%} of prefilling them"


def idle_prefixes(model: Model, settings: LlamaSettings, sizes: Sizes) -> list[Row]:
    """Attention scans every used cell, whoever uses it."""
    rows = []
    for flash_attn in ("on", "off"):
        own = LlamaSettings(n_threads=settings.n_threads, flash_attn=flash_attn)
        kv_tokens = max(sizes.idle) + sizes.streams * (sizes.steps + 1) + 256
        with benched(model, own, slots=sizes.streams, kv_tokens=kv_tokens) as bench:
            base = 0.0
            for num_idle in sizes.idle:
                bench.memory.clear()
                if num_idle:
                    bench.fill(sizes.streams, num_idle)
                step_ms = bench.steps(sizes.streams, 0, sizes.steps)
                base = base or step_ms
                what = f"step of {sizes.streams} streams beside {num_idle:,} idle cells, flash attention {flash_attn}"
                rows.append(row(what, f"{step_ms:,.2f} ms", f"{step_ms / base:.2f} x"))
    return rows


def chain(seed: int) -> int:
    """A usual one, whose stages all have a device's version."""
    params = c.llama_sampler_chain_default_params()
    params.no_perf = True
    made: int = c.llama_sampler_chain_init(params)
    c.llama_sampler_chain_add(made, c.llama_sampler_init_top_k(40))
    c.llama_sampler_chain_add(made, c.llama_sampler_init_temp(0.8))
    c.llama_sampler_chain_add(made, c.llama_sampler_init_dist(seed))
    return made


def sampling(model: Model, settings: LlamaSettings, sizes: Sizes) -> list[Row]:
    """`llama_sampler_sample` on the host against `llama_set_sampler`, which draws where the logits are."""
    streams, steps = sizes.streams, sizes.steps
    chains = [chain(stream) for stream in range(streams)]
    with benched(model, settings, slots=streams, kv_tokens=3 * streams * (steps + 1) + 256) as bench:
        pointer = bench.context.pointer

        def on_host(_: int) -> None:
            for stream in range(streams):
                c.llama_sampler_sample(chains[stream], pointer, stream)

        def on_device(_: int) -> None:
            for stream in range(streams):
                c.llama_get_sampled_token_ith(pointer, stream)

        none = bench.steps(streams, 0, steps)
        host = bench.steps(streams, steps, steps, on_host)
        taken = [c.llama_set_sampler(pointer, stream, chains[stream]) for stream in range(streams)]
        bench.step(streams, 2 * steps)  # lays out the graph anew, once
        drawn = [c.llama_get_sampled_token_ith(pointer, stream) for stream in range(streams)]
        device = bench.steps(streams, 2 * steps + 1, steps, on_device)
        for stream in range(streams):
            c.llama_set_sampler(pointer, stream, None)
    for one in chains:
        c.llama_sampler_free(one)
    if not all(taken) or min(drawn) < 0:
        return [row("sampling by the device", "llama.cpp refused it", "")]
    names = ("by the host", "by the device")
    return [
        row(f"sampling {name}, {streams} streams", f"{step_ms:,.2f} ms a step", per_token(step_ms - none, streams))
        for name, step_ms in zip(names, (host, device), strict=True)
    ]


def per_token(added_ms: float, num_tokens: int) -> str:
    return f"{max(0.0, added_ms) * 1e3 / num_tokens:,.1f} us a token beside no sampling"


def write_adapter(folder: Path, base: GgufHeader, rank: int = 8) -> Path:
    """A random LoRA for usual matrices of the model."""
    path = folder / "adapter.gguf"
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, base.text("general.architecture") or "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for name, tensor in base.tensors.items():
        if name.endswith(ADAPTED):
            columns, rows = tensor.shape[:2]
            for part, shape in (("lora_a", (rank, columns)), ("lora_b", (rows, rank))):
                writer.add_tensor(f"{name}.{part}", (rng.standard_normal(shape) / 100).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def lora(model: Model, settings: LlamaSettings, sizes: Sizes) -> list[Row]:
    """What an adapter adds to each step, and what changing it between two steps adds to that."""
    streams, steps = sizes.streams, sizes.steps
    with (
        tempfile.TemporaryDirectory() as folder,
        benched(model, settings, slots=streams, kv_tokens=3 * streams * (steps + 1) + 256) as bench,
    ):
        adapter = Adapter.load(model, inspect(write_adapter(Path(folder), model.header), model.header))
        applied = AppliedAdapters(bench.context.pointer)
        plain = bench.steps(streams, 0, steps)
        applied.apply(((adapter, 1.0),))
        bench.step(streams, steps)
        steady = bench.steps(streams, steps + 1, steps)
        switched = bench.steps(
            streams, 2 * steps + 1, steps, lambda number: applied.apply(((adapter, 1.0),) if number % 2 else ())
        )
        applied.apply(())
        adapter.close()
    added = max(0.0, switched - (plain + steady) / 2)
    return [
        row(f"step of {streams} streams without an adapter", f"{plain:,.2f} ms"),
        row("the same with one (rank 8)", f"{steady:,.2f} ms", f"{steady / plain:.2f} x"),
        row("changing it before each step", f"{switched:,.2f} ms", f"{added:,.2f} ms a change"),
    ]


PARTS = (prefill, decode, moving, idle_prefixes, sampling, lora)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["gpu", "cpu"], required=True)
    parser.add_argument("--model", type=Path)
    arguments = parser.parse_args()
    on_gpu = arguments.device == "gpu"
    if on_gpu and not c.llama_supports_gpu_offload():
        print("gpu_check: this environment's llama.cpp is not built for a GPU; run `python benchmarks/gpu_check.py`")
        return 1
    settings = LlamaSettings(n_gpu_layers=-1) if on_gpu else LlamaSettings(n_gpu_layers=0, n_threads=1)
    path = arguments.model or (synthetic_model() if on_gpu else DEMO)
    sys.setswitchinterval(0.0005)  # as in a worker
    with Model.load(path, settings) as model:
        rows = [one for part in PARTS for one in part(model, settings, Sizes() if on_gpu else SMALL)]
    print_rows(f"{model.name} on the {arguments.device.upper()}", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
