"""The engine alone, no HTTP: tokens per second, and where the time of one step goes.

    python -m benchmarks.engine_step MODEL.gguf --slots 1 8 16

Every row is one engine with that many greedy answers running from start to end. `decode` is the time inside
`llama_decode`, `sample` that of finding the likeliest token or inside `llama_sampler_sample`, `python` the rest of the
step, all in microseconds of the engine thread's processor time, so that other programs on the machine count little;
`python/seq` is the rest divided by the number of sequences. `--busy` runs a thread of pure Python beside the engine, as
a loaded event loop would; `--switch` sets the interpreter's switch interval and `--release` lets the small calls give
the interpreter lock away, to see what keeping it is worth.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from llama_cpp import llama_cpp as c

from workers.engine.cache.prompt import Prompt
from workers.engine.engine import Engine, EngineRequest
from workers.llama.context import Batch, Context
from workers.llama.model import Model
from workers.models.spec import LlamaSettings
from workers.protocol.events import CallEvent, Finished, Text
from workers.protocol.requests import GenerateRequest, Sampling

PROMPT = "Once upon a time there was a little"


@dataclass
class Clock:
    """Seconds per step, one list per part."""

    decode: list[float] = field(default_factory=list)
    sample: list[float] = field(default_factory=list)
    ended_at: list[float] = field(default_factory=list)

    def clear(self) -> None:
        for times in (self.decode, self.sample, self.ended_at):
            times.clear()


class TimedContext(Context):
    """A context that notes how long llama.cpp takes."""

    clock: Clock

    def decode(self, batch: Batch) -> None:
        start = time.thread_time()
        super().decode(batch)
        self.clock.decode.append(time.thread_time() - start)
        self.clock.sample.append(0.0)

    def sample(self, chain: int, row: int) -> int:
        start = time.thread_time()
        token = super().sample(chain, row)
        self.clock.sample[-1] += time.thread_time() - start
        return token

    def sample_top(self, chain: int, row: int, k: int) -> int:
        start = time.thread_time()
        token = super().sample_top(chain, row, k)
        self.clock.sample[-1] += time.thread_time() - start
        return token

    def likeliest_of(self, num_rows: int) -> list[int]:
        start = time.thread_time()
        found = super().likeliest_of(num_rows)
        self.clock.sample[-1] += time.thread_time() - start
        return found

    def release_small_calls(self) -> None:
        self._sample = c.llama_sampler_sample


@dataclass(frozen=True)
class Row:
    slots: int
    tokens_per_s: float
    step_us: float
    decode_us: float
    sample_us: float

    def __str__(self) -> str:
        python_us = self.step_us - self.decode_us - self.sample_us
        return (
            f"{self.slots:5d} {self.tokens_per_s:10.0f} {self.step_us:9.0f} {self.decode_us:9.0f} "
            f"{self.sample_us:9.0f} {python_us:9.0f} {python_us / self.slots:11.1f}"
        )


HEADER = "slots   tokens/s   step us    decode    sample    python  python/seq"


@contextmanager
def busy_thread(wanted: bool) -> Iterator[None]:
    """Pure Python that never gives the interpreter lock away by itself."""
    done = threading.Event()

    def spin() -> None:
        while not done.is_set():
            sum(range(2000))

    thread = threading.Thread(target=spin, name="busy")
    if wanted:
        thread.start()
    try:
        yield
    finally:
        done.set()
        if wanted:
            thread.join()


def measure(model: Model, settings: LlamaSettings, arguments: argparse.Namespace, slots: int) -> Row:
    num_tokens: int = arguments.tokens
    prompt = model.tokenize(PROMPT, add_special=True, parse_special=False)
    n_ctx = len(prompt) + num_tokens
    clock, finished = Clock(), threading.Semaphore(0)

    def emit(step: int, events: list[CallEvent]) -> None:
        clock.ended_at.append(time.thread_time())
        for event in events:
            if not isinstance(event, Text) and isinstance(event, Finished):
                finished.release()

    with TimedContext(model, settings, slots=slots, kv_tokens=slots * n_ctx) as context:
        context.clock = clock
        if arguments.release:
            context.release_small_calls()
        context.warm_up()
        clock.clear()
        engine = Engine(model, context, slots=slots, n_ctx=n_ctx, emit=emit)
        sampling = Sampling(temperature=arguments.temperature, seed=1)
        asked = GenerateRequest(max_tokens=num_tokens, ignore_eos=True)
        for key in range(slots):
            engine.submit(EngineRequest(key, asked, Prompt(prompt), sampling))
        with busy_thread(arguments.busy):
            start = time.perf_counter()
            engine.start()
            for _ in range(slots):
                finished.acquire()
            seconds = time.perf_counter() - start
        engine.stop()
    return summary(clock, slots, slots * num_tokens / seconds)


def summary(clock: Clock, slots: int, tokens_per_s: float) -> Row:
    """Medians over the steps that only decode."""
    steps = [(after - before) * 1e6 for before, after in zip(clock.ended_at, clock.ended_at[1:], strict=False)]
    middle: Callable[[list[float]], float] = statistics.median
    decode, sample = (middle([one * 1e6 for one in times[1:]]) for times in (clock.decode, clock.sample))
    return Row(slots, tokens_per_s, middle(steps), decode, sample)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per second of the engine alone, and the parts of a step.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--tokens", type=int, default=200, help="tokens per answer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--flash-attn", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--busy", action="store_true", help="run a busy Python thread beside the engine")
    parser.add_argument("--switch", type=float, default=0.0005, help="the interpreter's switch interval, s")
    parser.add_argument("--release", action="store_true", help="let small calls give the interpreter lock away")
    arguments = parser.parse_args()
    sys.setswitchinterval(arguments.switch)
    settings = LlamaSettings(n_threads=arguments.threads, flash_attn=arguments.flash_attn)
    with Model.load(arguments.model, settings) as model:
        print(HEADER)
        for slots in arguments.slots:
            print(measure(model, settings, arguments, slots), flush=True)


if __name__ == "__main__":
    main()
