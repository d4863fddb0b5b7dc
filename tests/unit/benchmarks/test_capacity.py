"""The page on capacity says what the formulas make of what was measured; the formulas say what theory says."""

from __future__ import annotations

import re
from dataclasses import replace
from statistics import mean

import pytest

from benchmarks.capacity.costs import Costs, gateway_cpu, redis_cpu
from benchmarks.capacity.save import PAGE, PLACE
from benchmarks.capacity.sizing import (
    GATEWAY_CPU,
    SIGMA,
    WAIT_S,
    Demand,
    Fleet,
    Worker,
    fewest_gateways,
    fewest_workers,
    line,
    loop_wait,
    plan,
    waits,
    workers_by_formula,
)
from benchmarks.capacity.tables import load, tables
from benchmarks.capacity.trial import Run, fitted

COSTS = Costs(
    gateway_token_us=25.0,
    gateway_step_us=50.0,
    gateway_call_us=4_000.0,
    gateway_news_us=70.0,
    gateway_idle_us_per_s=5_000.0,
    gateway_bytes=80e6,
    stream_bytes=40_000.0,
    redis_call_us=300.0,
    redis_news_us=50.0,
    redis_read_us=5.0,
    redis_gateway_us_per_s=1_000.0,
)
WORKER = Worker("w", 8, 1_500.0, 0.025)


def test_the_page_has_the_tables_that_the_measurement_makes() -> None:
    page, made = PAGE.read_text(), tables(load())
    assert {place[1] for place in PLACE.finditer(page)} == set(made)
    for name, table in made.items():
        assert f"<!-- table: {name} -->\n{table}\n<!-- end -->" in page, (
            "run: python -m benchmarks.capacity.save --tables"
        )


def test_the_page_names_the_bounds_of_the_formulas() -> None:
    page = PAGE.read_text()
    assert f"under {GATEWAY_CPU} of a core each" in page
    assert "1.3 x sqrt(streams)" in page
    demand = Demand(1)
    told = re.search(r"(\d+) % at work, each asking every (\d+) s; prompts of ([\d,]+) tokens, (\d+) % of them", page)
    assert told is not None
    assert [float(group.replace(",", "")) for group in told.groups()] == [
        demand.active * 100,
        demand.every_s,
        demand.prompt,
        demand.cached * 100,
    ]


def test_the_model_foretold_what_was_measured() -> None:
    trial = load()
    assert max(point.streams for point in trial.checked) >= 2_000
    for point in trial.checked:
        assert point.predicted_cpu == pytest.approx(point.measured_cpu, rel=0.25), point.streams


def test_two_runs_tell_what_a_token_and_a_call_cost() -> None:
    few, many = (Run(calls, tokens, 1.0, 0.0, 0.0, 0, 0.0) for calls, tokens in ((100, 50_000), (1_000, 20_000)))
    costs = [(run, run.tokens * 25e-6 + run.calls * 5e-3) for run in (few, many)]
    assert fitted(costs) == pytest.approx((25.0, 5_000.0))


def test_cpu_is_the_sum_of_its_parts() -> None:
    assert gateway_cpu(COSTS, tokens=10_000, steps=400, calls=10, news=100) == pytest.approx(0.322)
    assert redis_cpu(COSTS, calls=100, records=20, news=100, gateways=4) == pytest.approx(0.042)


def test_a_line_of_one_waits_as_pollaczek_and_khinchine_say() -> None:
    """Mean wait of M/G/1: rate x E[S^2] / 2 / (1 - load)."""
    demand, worker = Demand(60, active=1.0, every_s=60.0, prompt=0, answer=100), Worker("one", 1, 1.0, 0.006)
    hold = worker.hold_s(demand)
    assert hold == pytest.approx(0.6)
    second_moment = hold**2 * 2.718281828 ** (SIGMA**2)
    expected = demand.calls_per_s * second_moment / 2 / (1 - 0.6)
    assert mean(line(demand, worker, 1)) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("users", [100, 1_000, 10_000])
def test_the_formula_finds_what_the_simulation_finds(users: int) -> None:
    demand = Demand(users)
    found, formula = fewest_workers(demand, WORKER), workers_by_formula(demand, WORKER)
    assert abs(found - formula) <= max(1, 0.15 * found)
    assert waits(demand, WORKER, found) <= WAIT_S
    if found > 1:
        assert waits(demand, WORKER, found - max(1, found // 10)) > WAIT_S


def test_gateways_are_as_few_as_the_bound_allows_and_one_more() -> None:
    assert plan(COSTS, Demand(10), WORKER).gateways == 2
    fleet = Fleet(100, 2_000.0, 0.05, 100.0)
    gateways = fewest_gateways(COSTS, fleet)
    assert fleet.cpu_of_gateway(COSTS, gateways - 1) <= GATEWAY_CPU < fleet.cpu_of_gateway(COSTS, gateways - 2)


def test_more_gateways_share_steps_less() -> None:
    fleet = Fleet(10, 100.0, 0.05, 1.0)
    assert fleet.steps_of_gateway(1) == pytest.approx(200)
    assert fleet.steps_of_gateway(10) == pytest.approx(200 * (1 - 0.9**10))
    # Ten gateways see far more than a tenth each.
    assert fleet.steps_of_gateway(10) > 6 * 200 / 10


def test_a_busier_loop_waits_longer() -> None:
    fleet = Fleet(16, 400.0, 0.05, 10.0)
    calm, busy = (loop_wait(COSTS, replace(fleet, streams=streams), 1, seconds=5.0) for streams in (100.0, 1_200.0))
    assert 0 < calm < busy < 0.1
