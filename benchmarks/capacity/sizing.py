"""How many workers, gateways and Redis so many users need: formulas, and a simulation of the line.

A user at work asks, reads, thinks, asks again. A call holds a slot while its prompt is computed and its answer is said.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import ceil, log, sqrt
from random import Random

from benchmarks.capacity.costs import Costs, gateway_cpu, redis_cpu
from workers.protocol import keys
from workers.service.registration.heartbeat import NEWS_RATE

GATEWAY_CPU = 0.6
"""Of its core: beyond it a token's wait for the loop grows."""
REDIS_CPU = 0.5
NEWS_EACH_PER_S = 1 / keys.NEWS_INTERVAL_S
"""Of one worker at most; `NEWS_RATE` of all together."""
WAIT_S, WAIT_SHARE = 1.0, 0.95
"""So many calls wait no longer than that for a slot."""
SPARE = 1.3
"""Standard deviations of the busy slots that are kept free: the formula for what the simulation finds."""
SIGMA = 0.7
SIMULATED = 20_000
MOST_PREFILL = 0.6
"""Of a worker's time, at most, is prompts."""


@dataclass(frozen=True, slots=True)
class Demand:
    """`active` of the users are at work in the busiest minutes; each asks every `every_s` seconds."""

    users: int
    active: float = 0.2
    every_s: float = 60.0
    prompt: int = 1_500
    cached: float = 0.6
    answer: int = 250

    @property
    def calls_per_s(self) -> float:
        return self.users * self.active / self.every_s


@dataclass(frozen=True, slots=True)
class Worker:
    """One device with one model, with all slots busy. Measure yours: `paddock bench --find-limit`."""

    name: str
    slots: int
    prefill: float
    """Prompt tokens per second."""
    step_s: float
    """Every stream gets a token in each."""

    def hold_s(self, demand: Demand) -> float:
        return demand.prompt * (1 - demand.cached) / self.prefill + demand.answer * self.step_s


@dataclass(frozen=True, slots=True)
class Plan:
    """CPU in cores; of gateways each."""

    workers: int
    by_formula: int
    gateways: int
    calls_per_s: float
    streams: float
    tokens_per_s: float
    gateway_cpu: float
    gateway_mib: float
    redis_cpu: float
    wait_p95_s: float


def plan(costs: Costs, demand: Demand, worker: Worker) -> Plan:
    """The fewest workers of which the simulation says that the line is short, and what stands before them."""
    workers = fewest_workers(demand, worker)
    streams = demand.calls_per_s * worker.hold_s(demand)
    fleet = Fleet(workers, streams, worker.step_s, demand.calls_per_s)
    gateways = fewest_gateways(costs, fleet)
    return Plan(
        workers=workers,
        by_formula=workers_by_formula(demand, worker),
        gateways=gateways,
        calls_per_s=demand.calls_per_s,
        streams=streams,
        tokens_per_s=fleet.tokens_per_s,
        gateway_cpu=fleet.cpu_of_gateway(costs, gateways),
        gateway_mib=(costs.gateway_bytes + streams / gateways * costs.stream_bytes) / 2**20,
        redis_cpu=fleet.cpu_of_redis(costs, gateways),
        wait_p95_s=waits(demand, worker, workers),
    )


@dataclass(frozen=True, slots=True)
class Fleet:
    """`streams` run on average, spread evenly over the workers."""

    workers: int
    streams: float
    step_s: float
    calls_per_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.streams / self.step_s

    @property
    def news_per_s(self) -> float:
        """A worker tells when something has changed: twice for each call, and no more than it may."""
        return min(NEWS_RATE, NEWS_EACH_PER_S * self.workers, 2 * self.calls_per_s)

    def steps_of_gateway(self, gateways: int) -> float:
        """Steps per second that bring a gateway any token: the more gateways, the fewer tokens come together."""
        on_worker = self.streams / self.workers
        none = (1 - 1 / gateways) ** on_worker if gateways > 1 else 0.0
        return self.workers / self.step_s * min(1.0, on_worker) * (1 - none)

    def cpu_of_gateway(self, costs: Costs, gateways: int) -> float:
        return gateway_cpu(
            costs,
            tokens=self.tokens_per_s / gateways,
            steps=self.steps_of_gateway(gateways),
            calls=self.calls_per_s / gateways,
            news=self.news_per_s,
        )

    def cpu_of_redis(self, costs: Costs, gateways: int) -> float:
        records = self.workers / keys.HEARTBEAT_INTERVAL_S
        return redis_cpu(costs, calls=self.calls_per_s, records=records, news=self.news_per_s, gateways=gateways)


def fewest_gateways(costs: Costs, fleet: Fleet) -> int:
    """None has more than `GATEWAY_CPU` to do when one is away: one more than needed, so two at least."""
    needed = 1
    while fleet.cpu_of_gateway(costs, needed) > GATEWAY_CPU:
        needed += 1
        if needed > 10_000:
            raise ValueError("following the fleet alone is more than a gateway can do")
    return needed + 1


def workers_by_formula(demand: Demand, worker: Worker) -> int:
    """Square-root staffing: the slots that are busy on average and some deviations more."""
    busy = demand.calls_per_s * worker.hold_s(demand)
    return max(ceil((busy + SPARE * sqrt(busy)) / worker.slots), for_prompts(demand, worker), 1)


def for_prompts(demand: Demand, worker: Worker) -> int:
    work = demand.calls_per_s * demand.prompt * (1 - demand.cached) / worker.prefill
    return ceil(work / MOST_PREFILL)


def fewest_workers(demand: Demand, worker: Worker) -> int:
    busy = demand.calls_per_s * worker.hold_s(demand)
    workers = max(1, ceil(busy * 1.001 / worker.slots), for_prompts(demand, worker))
    while waits(demand, worker, workers) > WAIT_S:
        workers += max(1, workers // 100)
    return workers


def waits(demand: Demand, worker: Worker, workers: int) -> float:
    """p95 of the wait for a slot, in seconds."""
    found = sorted(line(demand, worker, workers))
    return found[int(WAIT_SHARE * len(found))]


def line(demand: Demand, worker: Worker, workers: int) -> list[float]:
    """Each call's wait, simulated: calls come by chance, answers are log-normally long, one line for all."""
    chance, free, now = Random(1), [0.0] * (workers * worker.slots), 0.0
    found = []
    prompt_s = demand.prompt * (1 - demand.cached) / worker.prefill
    middle = log(demand.answer) - SIGMA**2 / 2
    # Long enough for answers of many slots to end several times.
    count = max(SIMULATED, 10 * len(free))
    for number in range(count):
        now += chance.expovariate(demand.calls_per_s)
        start = max(now, free[0])
        heapq.heapreplace(free, start + prompt_s + chance.lognormvariate(middle, SIGMA) * worker.step_s)
        if number > count // 5:
            found.append(start - now)
    return found


def loop_wait(costs: Costs, fleet: Fleet, gateways: int, *, seconds: float = 20.0) -> float:
    """p99 of what a step's tokens wait until the gateway has dealt with what came before, simulated; in seconds.

    Steps of each worker come at a beat of its own, calls as they like, each a piece of work that is not divided.
    """
    chance = Random(2)
    per_worker = fleet.steps_of_gateway(gateways) / fleet.workers
    tokens = fleet.tokens_per_s / gateways / max(1e-9, fleet.steps_of_gateway(gateways))
    # A handful of workers' beats looks like none where there are many: those that matter are drawn one by one.
    work: list[tuple[float, float, bool]] = []
    step = costs.gateway_step_us + tokens * costs.gateway_token_us
    for _ in range(fleet.workers):
        at = chance.uniform(0, 1 / per_worker)
        while at < seconds:
            work.append((at, step / 1e6, True))
            at += 1 / per_worker
    at = 0.0
    while (at := at + chance.expovariate(fleet.calls_per_s / gateways)) < seconds:
        work.append((at, costs.gateway_call_us / 1e6, False))
    done, found = 0.0, []
    for at, takes, is_step in sorted(work):
        start = max(at, done)
        done = start + takes
        if is_step:
            found.append(done - at)
    return sorted(found)[int(0.99 * len(found))]
