"""Figures of a run whose tapes are written by hand."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from gateway.bench import bounds
from gateway.bench.connection import UNFINISHED, Tape
from gateway.bench.document import Document
from gateway.bench.driver import Run
from gateway.bench.findings import Frame, document
from gateway.bench.runner import judge

FRAME = Frame("now", {"model": "m"}, 2.0, bounds.of_calls("ttft<=1,e2e<3"))


def tape(due: float, *times: float, tokens: int = 0, error: str = "", ended: float = 0.0) -> Tape:
    return Tape(due, "", due + 0.25, ended or times[-1], array("d", times), tokens or len(times), 10, 4, error, error)


def run(*tapes: Tape) -> Document:
    made = Run(100.0, 112.0, 115.0, 0.3, list(tapes), array("d", [0.0, 0.001]))
    return document(made, FRAME)


def test_rates_tokens_and_times() -> None:
    done = run(
        tape(101.0, 101.5, 103.0, 104.0),  # of the warm-up: its tokens count in the throughput when they came later
        tape(103.0, 104.0, 104.5, 105.0, tokens=6),
        tape(104.0, 106.0, 107.0, 114.0),
        tape(105.0, error="http_503", ended=106.0),
        tape(106.0, 108.0, error=UNFINISHED, ended=115.0),
    )
    calls = done.calls
    assert (calls.sent, calls.finished, calls.failed, calls.unfinished, calls.warmup) == (4, 2, 1, 1, 1)
    assert done.measured_s == 10.0
    assert done.rates.sent_per_s == 0.4
    assert done.rates.finished_per_s == 0.2  # the warm-up's and the first: the other ended after the sending
    assert done.rates.tokens_per_s == pytest.approx((2 + 6 + 2 + 1) / 10)
    assert (done.ttft_s.p50, done.ttft_s.max, done.ttft_s.mean) == (1.0, 2.0, 1.5)
    assert (done.itl_s.count, done.itl_s.p50, done.itl_s.max) == (4, 0.5, 7.0)
    assert done.tpot_s.p50 == pytest.approx(0.2)
    assert done.e2e_s.max == 10.0
    assert (done.tokens.prompt, done.tokens.cached, done.tokens.cached_share) == (20, 8, 0.4)
    assert done.goodput is not None
    assert [done.goodput.share, done.goodput.per_s] == pytest.approx([1 / 3, 0.1], abs=1e-3)
    assert done.errors == {"http_503": 1}
    assert done.generator.cpu_us_per_piece == pytest.approx(0.3 / 10 * 1e6)
    assert done.generator.late_s.p50 == 0.25
    assert not done.generator.saturated


def test_the_series_counts_each_call_once() -> None:
    done = run(tape(103.0, 104.0, 104.5, tokens=4), tape(104.2, error="cut", ended=104.9))
    assert [point.at_s for point in done.series] == [float(at) for at in range(15)]
    assert [point.in_flight for point in done.series][2:7] == [0, 0.75, 0.95, 0, 0]
    assert sum(point.tokens_per_s for point in done.series) == pytest.approx(4)
    assert [point.finished for point in done.series][4] == 1
    assert [point.failed for point in done.series][4] == 1


def test_a_generator_at_its_end_says_so() -> None:
    slow = Run(0.0, 10.0, 10.0, 9.5, [tape(5.0, 6.0)], array("d", [0.0]))
    late = Run(0.0, 10.0, 10.0, 1.0, [tape(5.0, 6.0)], array("d", [0.2] * 100))
    for made in (slow, late):
        done = document(made, replace(FRAME, warmup_s=0.0))
        assert done.generator.saturated
        step = judge(done, bounds.of_runs("ttft_p95<100", "--find-limit"), 1.0)
        assert (step.held, step.why) == (False, "the generator was saturated")


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("ttft_p50<1001ms", True),
        ("ttft_p50<1", False),
        ("ttft_p50<=1s", True),
        ("error_share<=50%", True),
        ("errors<1", False),
        ("cached_share>39%", True),
        ("tokens_per_s>=0.5", False),
        ("itl_max<1", True),
    ],
)
def test_bounds(text: str, held: bool) -> None:
    done = run(tape(103.0, 104.0, 104.5, tokens=4), tape(104.2, error="cut", ended=104.9))
    (bound,) = bounds.of_runs(text, "--assert")
    assert bound.verdict(done).held is held


def test_a_bound_of_what_was_not_measured_is_broken() -> None:
    verdict = bounds.of_runs("itl_p50<9", "--assert")[0].verdict(run(tape(103.0, 104.0)))
    assert (verdict.value, verdict.held) == (None, False)


def test_callers_whose_calls_are_short_are_not_counted_twice() -> None:
    """Eight calls of a tenth of a second each, of one caller."""
    calls = [tape(101.75 + at / 10, 102.1 + at / 10) for at in range(8)]
    assert [point.in_flight for point in run(*calls).series][1:4] == [0, 0.8, 0]


def test_a_call_is_in_flight_in_each_second_that_it_lasts() -> None:
    done = run(tape(101.25, 102.0, 104.25))
    assert [point.in_flight for point in done.series][:6] == [0, 0.5, 1, 1, 0.25, 0]
