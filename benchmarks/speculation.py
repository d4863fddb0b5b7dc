"""Drafted answers against answers without drafts, and tokens per step against llama-server's own speculation.

    python -m benchmarks speculation

The engine runs in this process, on one thread. Tokens per step are counted with every draft computed, whatever it
costs; seconds are measured with drafts as far as the engine thinks that they pay.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.engine.bench import big_model, toy_model
from benchmarks.reference import llama_server
from benchmarks.table import Row
from tests.integration.engine.listener import GREEDY, ONE_THREAD, Bench, changed, running
from tests.support.deep_copies import write_deep_copy
from tests.support.quantised import Q8_0, write_quantised
from tests.support.stack import DEMO_MODEL, ROOT, free_port
from workers.chat.environment import new_environment
from workers.engine.speculation.step_costs import MAX_DRAFTED, StepCosts
from workers.llama.model import Model
from workers.models.generation import DraftSpec, SpeculationSettings
from workers.protocol.events import Tokens
from workers.protocol.requests import Sampling, Speculation

KINDS = ("echo", "json", "story", "tool call", "identity")
"""Kinds of prompts that the demo model was made for (deploy/demo/evaluate.py)."""
PROMPTS, LONGEST = 48, 200
SETTINGS = {
    "ngram-simple 3": ("ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "16"),
    "ngram-simple 12": ("ngram-simple",),
    "ngram-map-k 3": ("ngram-map-k", "--spec-ngram-map-k-size-n", "3", "--spec-ngram-map-k-size-m", "16"),
    "ngram-mod 6": (
        *("ngram-mod", "--spec-ngram-mod-n-match", "6"),
        *("--spec-ngram-mod-n-min", "2", "--spec-ngram-mod-n-max", "16"),
    ),
    "ngram-cache": ("ngram-cache",),
}
"""Settings of llama-server's drafts without a second model, by name."""

CALLERS = (1, 4, 8, 16)
PLAIN_BAR, COPY_BAR = 0.97, 1.6
PREDICT, EDIT_EVERY = 200, 60
PLAIN = Speculation(enabled=False)
DRAFT_LENGTHS, DEEPER, GUESSED_BAR, PAIR_BAR = (3, 7), 75, 0.95, 1.4
"""`DEEPER`: layers added to the demo model that change nothing of what it says."""


@dataclass(frozen=True, slots=True)
class Spoken:
    """What came of some answers."""

    num_tokens: int
    num_accepted: int

    @property
    def per_step(self) -> float:
        return self.num_tokens / (self.num_tokens - self.num_accepted)


def measure(rounds: int) -> list[Row]:
    return [*per_step(), *beside_plain(rounds), *copying(rounds), *drafted_by_model(rounds)]


def prompts_of(kind: str) -> list[str]:
    """Return prompts of the demo model as its template writes them."""
    code = (
        "import json, sys; sys.path.insert(0, 'deploy/demo'); import evaluate; "
        f"print(json.dumps([(m, t) for m, t, _ in evaluate.prompts({kind!r}, {PROMPTS})]))"
    )
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    template = new_environment().from_string((ROOT / "deploy" / "demo" / "chat_template.jinja").read_text())
    return [
        template.render(messages=messages, tools=tools, add_generation_prompt=True)
        for messages, tools in json.loads(told.stdout)
    ]


def per_step() -> list[Row]:
    """Return tokens per step on the demo model beside the best of llama-server's settings."""
    theirs: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    texts = {kind: prompts_of(kind) for kind in KINDS}
    for name, flags in SETTINGS.items():
        for kind in KINDS:
            with reference(DEMO_MODEL, flags) as url:
                theirs[kind][name] = spoken_by_reference(url, texts[kind]).per_step
    rows = []
    with Model.load(DEMO_MODEL, ONE_THREAD) as model:
        for kind in KINDS:
            with running(model, slots=1, n_ctx=1024, kv_tokens=2048) as bench, every_draft():
                ours = spoken(bench, texts[kind]).per_step
            best, of_best = max(theirs[kind].items(), key=lambda one: one[1])
            figure = f"{ours:.2f} against {of_best:.2f} tokens a step ({best})"
            rows.append(Row(f"demo model, {kind}", figure, f"{ours / of_best:.2f} x", ">= 1 x", ours >= of_best))
    return rows


@contextmanager
def every_draft() -> Iterator[None]:
    """Have every draft computed whole, whatever it costs."""

    def choose(_: StepCosts, chances: Sequence[Sequence[float]], __: int, *, max_rows: int, **___: object) -> list[int]:
        return [min(len(one), MAX_DRAFTED // len(chances), max_rows - 1) for one in chances]

    with (
        mock.patch.object(StepCosts, "choose", choose),
        mock.patch.object(StepCosts, "note_drafted"),
        mock.patch.object(StepCosts, "least_chance", return_value=0.0),
        mock.patch.object(StepCosts, "saved_s", return_value=1.0),
        mock.patch("workers.engine.step.speculator.LOOK_S", 0.0),
    ):
        yield


def spoken(bench: Bench, texts: Sequence[str]) -> Spoken:
    timings = []
    for text in texts:
        key = bench.submit(bench.request(text, LONGEST, sampling=GREEDY))
        bench.wait(key)
        timings.append(bench.heard.finished(key).timings)
    return Spoken(sum(one.predicted_n for one in timings), sum(one.draft_n_accepted for one in timings))


@contextmanager
def reference(model: Path, flags: Sequence[str]) -> Iterator[str]:
    """Run llama-server with one of its kinds of drafts, and yield its address."""
    port = free_port()
    command = [str(llama_server()), "-m", str(model), "-t", "1", "-tb", "1", "-c", "1024", "-np", "1"]
    command += ["--spec-type", *flags, "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            until_ready(url, process)
            yield url
        finally:
            process.terminate()


def until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1):
                return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"llama-server did not start (exit code {process.poll()})")


def spoken_by_reference(url: str, texts: Sequence[str]) -> Spoken:
    num_tokens = num_accepted = 0
    for text in texts:
        body = json.dumps({"prompt": text, "n_predict": LONGEST, "temperature": 0}).encode()
        request = urllib.request.Request(f"{url}/completion", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            timings: dict[str, Any] = json.load(answer)["timings"]
        num_tokens += timings["predicted_n"]
        num_accepted += timings.get("draft_n_accepted", 0)
    return Spoken(num_tokens, num_accepted)


def beside_plain(rounds: int) -> list[Row]:
    """Return tokens per second of the 2-layer toy, on text of random weights, beside the same without drafts."""
    rows = []
    rng = np.random.default_rng(1)
    with Model.load(toy_model().path, ONE_THREAD) as model:
        for callers in CALLERS:
            prompts = [rng.integers(1000, 100_000, 32).tolist() for _ in range(callers)]
            with running(model, slots=max(CALLERS), n_ctx=512, kv_tokens=8192) as bench:
                rates: dict[bool, list[float]] = {False: [], True: []}
                for enabled in (False, True) * rounds:
                    rates[enabled].append(rate(bench, prompts, Speculation(enabled=enabled)))
            plain, drafted = (statistics.median(rates[enabled]) for enabled in (False, True))
            ratio = drafted / plain
            what = f"2-layer toy, {callers} caller{'s' if callers > 1 else ''}, text that does not repeat itself"
            figure = f"{drafted:.1f} against {plain:.1f} tokens/s without drafts"
            rows.append(Row(what, figure, f"{ratio:.2f} x", f">= {PLAIN_BAR} x", ratio >= PLAIN_BAR))
    return rows


def rate(bench: Bench, prompts: Sequence[list[int]], speculation: Speculation) -> float:
    """Return the tokens per second of all callers, from when all have begun until the first has ended."""
    requests = [bench.request(prompt, PREDICT, sampling=GREEDY, ignore_eos=True) for prompt in prompts]
    keys = [bench.submit(changed(one, speculation=speculation, cache_prompt=False)) for one in requests]
    running_calls = bench.engine._stepper._scheduler.running
    while len(running_calls) < len(prompts) or any(one.num_predicted < 3 for one in running_calls):
        time.sleep(0.002)
    began, before = time.perf_counter(), sum(one.num_predicted for one in running_calls)
    ended, after = began, before
    while len(calls := running_calls[:]) == len(prompts):
        ended, after = time.perf_counter(), sum(one.num_predicted for one in calls)
        time.sleep(0.002)
    bench.heard.until(lambda: all(map(bench.heard.has_ended, keys)), 120)
    return (after - before) / (ended - began)


def copying(rounds: int) -> list[Row]:
    """Return the speed of an answer that the caller predicted but for one token in `EDIT_EVERY`."""
    rng = np.random.default_rng(2)
    ratios, exact = [], True
    with (
        Model.load(big_model().path, ONE_THREAD) as model,
        running(model, slots=1, n_ctx=1024, kv_tokens=2048) as bench,
    ):
        for number in range(rounds + 1):
            prompt = rng.integers(1000, 100_000, 64).tolist()
            sampling = Sampling(temperature=0, repeat_penalty=1.1)
            request = changed(bench.request(prompt, PREDICT, sampling=sampling, ignore_eos=True), cache_prompt=False)
            plain, plain_s = answered(bench, changed(request, tell=("tokens",), speculation=PLAIN))
            edited = [7 if at % EDIT_EVERY == EDIT_EVERY - 1 else token for at, token in enumerate(plain)]
            again = changed(bench.again(request), tell=("tokens",), prediction=edited)
            drafted, drafted_s = answered(bench, again)
            exact &= drafted == plain
            if number:  # the first one also measures what steps cost
                ratios.append(plain_s / drafted_s)
    ratio = statistics.median(ratios)
    figure = f"{'the same' if exact else 'another'} text, {min(ratios):.2f} to {max(ratios):.2f} x as fast"
    what = "0.5 B Q8_0, 1 caller, a prediction with one wrong token in 60"
    return [Row(what, figure, f"{ratio:.2f} x", f">= {COPY_BAR} x", ratio >= COPY_BAR)]


def answered(bench: Bench, request: Any) -> tuple[list[int], float]:
    """Return an answer's tokens, and the seconds from its first to its last."""
    key = bench.submit(request)
    bench.heard.until(lambda: bench.heard.has_ended(key), 300)
    told = [event.tokens[0] for event in bench.heard.calls[key] if isinstance(event, Tokens)]
    return told, bench.heard.finished(key).timings.predicted_ms / 1e3


def drafted_by_model(rounds: int) -> list[Row]:
    """Return what a draft model's guesses are worth: how many are drawn, and the speed of a model that says the same as
    the demo model in 16 times the time, drafted by the demo model with coarser weights."""
    texts = prompts_of("story")
    settings = SpeculationSettings(ngram=False, draft=DraftSpec(path="small.gguf"))
    with ExitStack() as opened:
        folder = Path(opened.enter_context(TemporaryDirectory()))
        small = write_quantised(DEMO_MODEL, folder / "small.gguf", Q8_0)
        deep = write_deep_copy(DEMO_MODEL, folder / "deep.gguf", DEEPER)
        draft = opened.enter_context(Model.load(small, ONE_THREAD))
        rows = []
        with Model.load(DEMO_MODEL, ONE_THREAD) as model, every_draft():
            for most in DRAFT_LENGTHS:
                with running(model, n_ctx=1024, kv_tokens=2048, draft=draft, speculation=settings) as bench:
                    rows.append(_guessed(bench, texts[0], most))
        with Model.load(deep, ONE_THREAD) as model:
            for callers in CALLERS[:3]:
                with running(
                    model, slots=callers, n_ctx=512, kv_tokens=8192, draft=draft, speculation=settings
                ) as bench:
                    rows.append(_quicker(bench, texts, callers, rounds))
    return rows


def _guessed(bench: Bench, text: str, most: int) -> Row:
    request = bench.request(text, 300, sampling=GREEDY, ignore_eos=True)
    key = bench.submit(changed(request, speculation=Speculation(n_max=most)))
    bench.wait(key)
    timings = bench.heard.finished(key).timings
    share = timings.draft_n_accepted / timings.draft_n
    figure = f"{timings.draft_n_accepted} of {timings.draft_n} guesses drawn"
    what = f"demo model drafted by its Q8_0 copy, {most} tokens at once"
    return Row(what, figure, f"{share:.0%}", f">= {GUESSED_BAR:.0%}", share >= GUESSED_BAR)


def _quicker(bench: Bench, texts: Sequence[str], callers: int, rounds: int) -> Row:
    rates: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds + 1):
        prompts = [bench.tokens(text) for text in texts[number * callers :][:callers]]
        for enabled in (False, True):
            rates[enabled].append(rate(bench, prompts, Speculation(enabled=enabled)))
    plain, drafted = (statistics.median(rates[enabled][1:]) for enabled in (False, True))  # the first one is learned in
    what = f"a model 16 times as slow as its draft model, {callers} caller{'s' if callers > 1 else ''}"
    figure = f"{drafted:.1f} against {plain:.1f} tokens/s without drafts"
    bar = PAIR_BAR if callers == 1 else PLAIN_BAR
    return Row(what, figure, f"{drafted / plain:.2f} x", f">= {bar} x", drafted / plain >= bar)


if __name__ == "__main__":
    from benchmarks.table import print_rows

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print_rows("drafted answers", measure(3))
