"""Calls whose tokens take long to draw, beside a stream, on a vocabulary of 150,000 tokens."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest

from tests.integration.engine.listener import ONE_THREAD, UNDRAFTED, Bench, changed, running
from tests.support.small_models import write_wide_model
from workers.engine.step.sampling import SamplingCost
from workers.llama.model import Model
from workers.protocol.events import CallEvent, Failed, Finished, Text
from workers.protocol.requests import Sampling

NUM_TOKENS = 150_000

HEAVY = Sampling(
    seed=1,
    samplers=("typ_p", "xtc", "top_p", "min_p", "temperature"),
    typical_p=0.99999,
    xtc_probability=0.9,
    top_p=0.99999,
    min_p=1e-9,
    temperature=2.0,
    dynatemp_range=0.5,
)
WIDE = Sampling(seed=1, frequency_penalty=0.5, top_n_sigma=100.0, samplers=("penalties", "top_n_sigma", "min_p"))
STREAM_TOKENS = 25
NUM_HEAVY = 7


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    write_wide_model(path, NUM_TOKENS)
    with (
        Model.load(path, ONE_THREAD) as model,
        running(model, slots=NUM_HEAVY + 1, kv_tokens=8192, speculation=UNDRAFTED) as one,
    ):
        yield one


def heavy(bench: Bench, count: int, n_probs: int = 0) -> list[int]:
    """Calls that go on for longer than the stream."""
    requests = [bench.request("Hello", 400, sampling=HEAVY, ignore_eos=True) for _ in range(count)]
    probs = {"n_probs": n_probs, "post_sampling_probs": n_probs > 0}
    return [bench.submit(changed(request, **probs)) for request in requests]


def stream_gaps_s(bench: Bench) -> list[float]:
    """Between the steps that brought another caller something, until its answer ends."""
    request = bench.request("Good day", STREAM_TOKENS, ignore_eos=True)
    times: list[float] = []

    def note(_: int, events: list[CallEvent]) -> None:
        if any(event.call == request.key and isinstance(event, Text) for event in events):
            times.append(time.monotonic())

    bench.heard.on_step = note
    key = bench.submit(request)
    bench.heard.until(lambda: bench.heard.has_ended(key), 90)
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


@pytest.mark.serial
@pytest.mark.parametrize("n_probs", [0, pytest.param(100, marks=pytest.mark.long)])
def test_a_stream_waits_for_one_slow_call_in_a_step_and_not_for_seven(bench: Bench, n_probs: int) -> None:
    """The machine is as busy in one measure as in the other; without turns the second is seven times the first."""
    medians = []
    for count in (1, NUM_HEAVY):
        keys = heavy(bench, count, n_probs)
        medians.append(median(stream_gaps_s(bench)))
        progress = [sum(isinstance(event, Text) for event in bench.heard.calls[key]) for key in keys]
        for key in keys:
            bench.engine.cancel(key)
            assert not any(isinstance(event, Failed) for event in bench.heard.calls[key])
        assert min(progress) > 2
        assert max(progress) < 3 * min(progress) + 10
    assert medians[1] < 3 * medians[0], medians


@pytest.mark.parametrize(("sampling", "most"), [(HEAVY, 2), (WIDE, 5)])
def test_of_many_slow_calls_a_few_draw_their_first_token_in_a_step(bench: Bench, sampling: Sampling, most: int) -> None:
    """The answers end with it, so that a crowd of such calls would never take turns."""
    stream = bench.submit(bench.request("Good day", 400, ignore_eos=True))
    bench.heard.until(lambda: len(bench.heard.calls[stream]) > 1)
    ended: list[int] = []

    def note(_: int, events: list[CallEvent]) -> None:
        ended.append(sum(isinstance(event, Finished) for event in events))

    bench.heard.on_step = note
    keys = [bench.submit(bench.request("Hello", 1, sampling=sampling, ignore_eos=True)) for _ in range(NUM_HEAVY)]
    bench.heard.until(lambda: all(bench.heard.has_ended(key) for key in keys), 90)
    bench.heard.on_step = lambda *_: None
    bench.engine.cancel(stream)
    assert sum(ended) == NUM_HEAVY
    assert 1 <= max(ended) <= most, ended


def test_each_token_is_timed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[SamplingCost] = []  # held, so that none takes the place of another in memory
    monkeypatch.setattr(SamplingCost, "note", lambda cost, _: noted.append(cost))
    key = bench.submit(bench.request("Hello", 9, sampling=WIDE, ignore_eos=True))
    bench.heard.until(lambda: bench.heard.has_ended(key))
    assert sum(cost is noted[-1] for cost in noted) == 9
