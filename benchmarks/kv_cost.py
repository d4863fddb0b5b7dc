"""What a cell of the KV cache costs: to compute, to save, to bring back, and to have lying there.

    python -m benchmarks.kv_cost [MODEL.gguf ...]

One thread, its CPU time instead of the clock, and the best of a few runs, so that a busy machine tells nearly the
same. Idle cells and long ranges are copies of one computed block moved to their positions: their values do not matter
here, their number does.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.reference import bench_dir
from benchmarks.synthetic_model import synthetic_model, write
from benchmarks.table import Row, print_rows
from workers.llama.context import Batch, Context
from workers.llama.model import Model
from workers.models.spec import LlamaSettings

STREAMS = 8
BLOCK = 64
"""Tokens that are computed; everything longer is made of these."""
RANGES = (16, 64, 256, 1024)
IDLE = (0, 2048, 8192)
LONG, SCRATCH = STREAMS, STREAMS + 1
"""Sequences beside the streams."""
KV_TOKENS = max(IDLE) + 2 * max(RANGES) + 1024


@dataclass(frozen=True, slots=True)
class KvCost:
    """Times are seconds of one thread."""

    model: str
    flash_attn: bool
    bytes_per_token: float
    prefill_s: float
    """Per token, in a step of `BLOCK` tokens on an empty cache."""
    save_s: dict[int, float]
    """Tokens of the range -> per token: shared to a scratch sequence, saved, removed."""
    restore_s: dict[int, float]
    """The same way back."""
    step_s: dict[int, float]
    """Idle cells -> one step of `STREAMS` decoding sequences."""
    step_left_s: float
    """The same when the idle cells are gone, and what the streams said meanwhile still lies above the hole."""
    step_packed_s: float
    """The same when the streams were saved and brought back, into the hole."""

    @property
    def idle_cell_s(self) -> float:
        """What one idle cell adds to one step."""
        most = max(self.step_s)
        return (self.step_s[most] - self.step_s[0]) / most


class Cache:
    """A context under test."""

    def __init__(self, context: Context, vocab: int, repeats: int) -> None:
        self.context = context
        self.memory = context.memory
        self.repeats = repeats
        self._state = b""
        self._batch: Batch = context.new_batch()
        self._tokens = np.random.default_rng(1).integers(vocab // 10, vocab, BLOCK, dtype=np.int32)

    def prefill(self) -> float:
        """Reads one block into `LONG`. -> seconds."""
        self._batch.clear()
        self._batch.add_prompt(self._tokens, 0, LONG, num_logits=1)
        return _timed(lambda: self.context.decode(self._batch))

    def lengthen(self, start: int, end: int, block: bytes) -> None:
        """Give `LONG` the positions from `start` to `end`, a block at a time."""
        memory = self.memory
        for position in range(start, end, BLOCK):
            memory.load(SCRATCH, block)
            if position:
                memory.shift(SCRATCH, 0, BLOCK, position)
            memory.share(SCRATCH, LONG, position, position + BLOCK)
            memory.remove(SCRATCH)

    def move(self, num_tokens: int) -> tuple[float, float]:
        """Saves and brings back the beginning of `LONG`. -> seconds per token of either."""
        saves, restores = [], []
        for _ in range(self.repeats):
            saves.append(_timed(lambda: self._save(num_tokens)))
            restores.append(_timed(lambda: self._restore(num_tokens)))
            self.memory.remove(SCRATCH + 1)
        return min(saves) / num_tokens, min(restores) / num_tokens

    def _save(self, num_tokens: int) -> None:
        self.memory.share(LONG, SCRATCH, 0, num_tokens)
        self._state = self.memory.save(SCRATCH)
        self.memory.remove(SCRATCH)

    def _restore(self, num_tokens: int) -> None:
        self.memory.load(SCRATCH, self._state)
        self.memory.share(SCRATCH, SCRATCH + 1, 0, num_tokens)
        self.memory.remove(SCRATCH)

    def steps(self, position: int) -> float:
        """Seconds of one step, the best of `repeats` behind one more, which turns the keys that were moved."""
        times = [self._step(position + number) for number in range(self.repeats + 1)]
        return min(times[1:])

    def _step(self, position: int) -> float:
        self._batch.clear()
        for stream in range(STREAMS):
            self._batch.add_token(int(self._tokens[stream]), position, stream)
        return _timed(lambda: self.context.decode(self._batch))


def _timed(act: Callable[[], None]) -> float:
    start = time.thread_time()
    act()
    return time.thread_time() - start


@contextmanager
def _cache(path: Path, *, flash_attn: bool, repeats: int) -> Iterator[Cache]:
    settings = LlamaSettings(n_threads=1, flash_attn="on" if flash_attn else "off", n_batch=128, n_ubatch=128)
    with (
        Model.load(path, settings) as model,
        Context(model, settings, slots=STREAMS, kv_tokens=KV_TOKENS) as context,
    ):
        context.warm_up()
        yield Cache(context, model.vocab.num_tokens, repeats)


def measure_model(path: Path, *, flash_attn: bool, repeats: int = 5) -> KvCost:
    """Takes some seconds for half a billion parameters. The model's positions must be movable (`Memory.can_shift`)."""
    with _cache(path, flash_attn=flash_attn, repeats=repeats) as cache:
        memory = cache.memory
        prefill_s = cache.prefill() / BLOCK
        block = memory.save(LONG)
        for stream in range(STREAMS):
            memory.share(LONG, stream, 0, BLOCK)
        memory.remove(LONG)
        positions = itertools.count(BLOCK, repeats + 1)
        step_s: dict[int, float] = {}
        for before, idle in zip((0, *IDLE), IDLE, strict=False):
            cache.lengthen(before, idle, block)
            step_s[idle] = cache.steps(next(positions))
        moves = {num_tokens: cache.move(num_tokens) for num_tokens in RANGES}
        memory.remove(LONG)
        step_left_s = cache.steps(next(positions))
        for stream in range(STREAMS):
            memory.load(stream, memory.save(stream))
        step_packed_s = cache.steps(next(positions))
        return KvCost(
            model=path.stem,
            flash_attn=flash_attn,
            bytes_per_token=len(block) / BLOCK,
            prefill_s=prefill_s,
            save_s={num_tokens: save for num_tokens, (save, _) in moves.items()},
            restore_s={num_tokens: restore for num_tokens, (_, restore) in moves.items()},
            step_s=step_s,
            step_left_s=step_left_s,
            step_packed_s=step_packed_s,
        )


def rows(cost: KvCost) -> list[Row]:
    name = f"{cost.model}, flash attention {'on' if cost.flash_attn else 'off'}"
    back = cost.save_s[BLOCK] + cost.restore_s[BLOCK]
    found = [
        Row(f"{name}: bytes per token saved", f"{cost.bytes_per_token:,.0f}", "", "", True),
        Row(f"{name}: prefill, per token", _us(cost.prefill_s), "", "", True),
    ]
    for what, times in (("save", cost.save_s), ("restore", cost.restore_s)):
        figures = " / ".join(_us(seconds) for seconds in times.values())
        sizes = " / ".join(f"{num_tokens:,}" for num_tokens in times)
        ratio = f"{cost.prefill_s / times[BLOCK]:,.0f} x less than prefill"
        found.append(Row(f"{name}: {what} per token, ranges of {sizes}", figures, ratio, "", True))
    steps = " / ".join(f"{seconds * 1e3:.2f} ms" for seconds in cost.step_s.values())
    idle = " / ".join(f"{cells:,}" for cells in cost.step_s)
    found.append(Row(f"{name}: step of {STREAMS} streams, {idle} idle cells", steps, "", "", True))
    left = f"{cost.step_left_s * 1e3:.2f} ms / {cost.step_packed_s * 1e3:.2f} ms"
    found.append(Row(f"{name}: the same, idle cells gone / streams moved into the hole", left, "", "", True))
    worth = f"a cell pays for its way out and back after {back / max(cost.idle_cell_s, 1e-9):,.0f} steps"
    found.append(Row(f"{name}: per idle cell and step", _us(cost.idle_cell_s), worth, "", True))
    return found


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.2f} us"


def toy() -> Path:
    path = bench_dir() / "synthetic-2-layers-q8_0.gguf"
    if not path.exists():
        partial = path.with_suffix(".partial")
        write(partial, n_layer=2)
        partial.rename(path)
    return path


def measure(repeats: int, paths: tuple[Path, ...] = ()) -> list[Row]:
    found = []
    for path in paths or (toy(), synthetic_model()):
        for flash_attn in (True, False):
            found += rows(measure_model(path, flash_attn=flash_attn, repeats=repeats))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", type=Path, nargs="*", help="GGUF files; the two synthetic ones by default")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print_rows("what a cell of the KV cache costs", measure(arguments.repeats, tuple(arguments.models)))
