"""A long prompt beside streams, by processor time: the streams' longest gap and the prompt's TTFT over chunk sizes.

    python -m benchmarks.prefill_steps MODEL.gguf --prompt 3000 --sizes 64 128 256

Each row is one size of `-b` and `-ub`. `engine` is our engine with that as its largest step, `auto` with its default.
`reference` steps as llama-server does: each step has a row for each stream and fills up with the prompt's next rows, in
a context with a cache of its own for each slot, as `llama-server -np` makes it; its HTTP and sampling are left out. All
times are seconds of the computing thread's processor time, one thread, so other programs on the machine count little.

One number sums up a side: the mean over the sizes of gap x TTFT (s^2). A side whose gap and TTFT are both shorter at
each size has the smaller one.
"""

from __future__ import annotations

import argparse
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llama_cpp import llama_cpp as c

from workers.engine.cache.prompt import Prompt
from workers.engine.engine import Engine, EngineRequest
from workers.llama.context import Batch, Context
from workers.llama.model import Model
from workers.llama.model_params import fill_context
from workers.models.spec import LlamaSettings
from workers.protocol.events import CallEvent, Started
from workers.protocol.requests import GenerateRequest, Sampling

STREAMS, STREAM_PROMPT, CTX = 3, 32, 4096
WARM_TOKENS = 8
"""Tokens of each stream before the long prompt comes."""
GREEDY = Sampling(temperature=0)


@dataclass(frozen=True)
class Figures:
    gap_s: float
    ttft_s: float

    @property
    def area(self) -> float:
        return self.gap_s * self.ttft_s

    def __str__(self) -> str:
        return f"gap {self.gap_s:6.3f} s, TTFT {self.ttft_s:7.3f} s, gap x TTFT {self.area:8.3f} s^2"


def tokens(seed: int, count: int, num_vocab: int) -> list[int]:
    """Return random tokens, the same for the same seed."""
    found: list[int] = np.random.default_rng(seed).integers(num_vocab // 100, num_vocab // 2, count).tolist()
    return found


class Watch:
    """Notes the engine thread's processor time at each step, from when the long prompt comes until its first token."""

    def __init__(self, engine_starts: threading.Event) -> None:
        self.times: list[float] = []
        self.done = threading.Event()
        self.warm = engine_starts
        self._num_text = 0

    def emit(self, step: int, events: list[CallEvent]) -> None:
        now = time.thread_time()
        if any(event.call == STREAMS and not isinstance(event, Started) for event in events):
            self.times.append(now)
            self.done.set()
        elif not self.done.is_set():
            self._num_text += 1
            if self._num_text >= WARM_TOKENS:
                self.times.append(now)
                self.warm.set()


def of_engine(model: Model, settings: LlamaSettings, prompt: list[int]) -> Figures:
    """Run our engine; the long prompt joins when the streams have said some tokens."""
    num_vocab = model.vocab.num_tokens
    watch = Watch(threading.Event())
    asked = GenerateRequest(max_tokens=CTX - STREAM_PROMPT - 1, ignore_eos=True)
    with Context(model, settings, slots=STREAMS + 1, kv_tokens=(STREAMS + 1) * CTX) as context:
        context.warm_up()
        engine = Engine(model, context, slots=STREAMS + 1, n_ctx=CTX, emit=watch.emit)
        for key in range(STREAMS):
            engine.submit(EngineRequest(key, asked, Prompt(tokens(key, STREAM_PROMPT, num_vocab)), GREEDY))
        engine.start()
        watch.warm.wait()
        few = GenerateRequest(max_tokens=4, ignore_eos=True)
        num_before = len(watch.times)
        engine.submit(EngineRequest(STREAMS, few, Prompt(prompt), GREEDY))
        watch.done.wait()
        engine.stop()
    times = watch.times[max(0, num_before - 1) :]
    return Figures(max(np.diff(times)), times[-1] - times[0])


class ReferenceContext(Context):
    """A context as llama-server makes it: a cache of its own for each slot."""

    def __init__(self, model: Model, settings: LlamaSettings, *, slots: int, kv_tokens: int) -> None:
        params = c.llama_context_default_params()
        fill_context(params, settings)
        params.n_ctx, params.n_seq_max, params.kv_unified = kv_tokens, slots, False
        self.pointer = c.llama_init_from_model(model.pointer, params) or 0
        self.model = model
        self._decode, self._queues = c.llama_decode, False
        self.num_sequences, self.kv_tokens, self.n_batch = slots, c.llama_n_ctx(self.pointer), settings.n_batch


def of_reference(model: Model, settings: LlamaSettings, prompt: list[int]) -> Figures:
    """Fill each step as llama-server does: every stream's token, then the prompt up to `-b` rows."""
    with ReferenceContext(model, settings, slots=STREAMS + 1, kv_tokens=(STREAMS + 1) * CTX) as context:
        batch = Batch(settings.n_batch, STREAMS + 1, CTX)
        for stream in range(STREAMS):
            batch.clear()
            start = tokens(stream, STREAM_PROMPT, model.vocab.num_tokens)
            batch.add_prompt(np.array(start, np.int32), 0, stream, num_logits=1)
            context.decode(batch)
        steps: list[float] = []
        known, position = 0, STREAM_PROMPT
        while known < len(prompt):
            batch.clear()
            for stream in range(STREAMS):
                batch.add_token(prompt[stream], position, stream)
            chunk = prompt[known : known + settings.n_batch - STREAMS]
            is_last = known + len(chunk) == len(prompt)
            batch.add_prompt(np.array(chunk, np.int32), known, STREAMS, num_logits=int(is_last))
            before = time.thread_time()
            context.decode(batch)
            steps.append(time.thread_time() - before)
            known, position = known + len(chunk), position + 1
    return Figures(max(steps), sum(steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", type=int, default=3000, help="tokens of the long prompt")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--sides", nargs="+", default=["engine", "reference"], choices=["engine", "reference"])
    arguments = parser.parse_args()
    sides = {"engine": of_engine, "reference": of_reference}
    with Model.load(arguments.model, LlamaSettings(n_threads=1)) as model:
        prompt = tokens(99, arguments.prompt, model.vocab.num_tokens)
        found: dict[str, list[Figures]] = {}
        for size in arguments.sizes:
            for side in arguments.sides:
                settings = LlamaSettings(n_threads=1, n_batch=size, n_ubatch=size)
                found.setdefault(side, []).append(figures := sides[side](model, settings, prompt))
                print(f"{side:10s} {size:4d}: {figures}", flush=True)
        if "engine" in arguments.sides:
            print(f"engine     auto: {of_engine(model, LlamaSettings(n_threads=1), prompt)}", flush=True)
        for side, figures_of in found.items():
            print(f"{side:10s} mean gap x TTFT: {np.mean([one.area for one in figures_of]):.3f} s^2")


if __name__ == "__main__":
    main()
