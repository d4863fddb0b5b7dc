"""The measuring: short runs that differ in one thing each, and runs of many streams that the model is held against."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import redis
from msgspec import Struct

from benchmarks.capacity.costs import Costs, gateway_cpu
from benchmarks.placement_cost import GO, SETTLE_S
from tests.support.redis_server import RedisServer
from tests.support.stack import Process, Stack

CORES = {"gateway": "0", "fake": "1", "redis": "1"}
SPREAD_OVER = 8
"""Workers of the models that have several."""
STEP_MS = {"one": 20, "eight": 20, "slow": 100}
SLOTS = {"one": 64, "eight": 64, "slow": 600}
WORKERS = {"one": 1, "eight": SPREAD_OVER, "slow": 4}
CALL_S = 0.008
"""Callers begin so far apart where there are many: a gateway takes some milliseconds of CPU to take each in."""
IDLE_S = 5.0
FOLLOWED_S = 5.0
FITTED = (("eight", 256, 400), ("slow", 1_024, 120))
MANY = (("one", 64, 300), ("slow", 2_000, 200))
"""Model, streams, tokens of each."""


class Checked(Struct, frozen=True):
    """A run that the costs were not made of. CPU in cores."""

    streams: int
    tokens_per_s: float
    calls_per_s: float
    measured_cpu: float
    predicted_cpu: float
    gateway_mib: float
    longest_gap_ms: float
    """Of any stream, the worker's own step included."""


class Trial(Struct, frozen=True):
    costs: Costs
    checked: tuple[Checked, ...]
    machine: str
    generator_us: float = 0.0
    """CPU of `paddock bench` for a token, requests included."""


@dataclass(frozen=True, slots=True)
class Run:
    """Load of one shape. CPU times in seconds."""

    calls: int
    tokens: int
    wall_s: float
    gateway_s: float
    redis_s: float
    most_bytes: int
    longest_gap_ms: float


def measured(many: tuple[tuple[str, int, int], ...] = MANY) -> Trial:
    """Some four minutes."""
    news = _news()
    with Stack(measured=True, cores=CORES) as stack:
        for model, workers in WORKERS.items():
            flags = ("--step-ms", str(STEP_MS[model]), "--tokens", "1000")
            for number in range(workers):
                stack.fake_worker(model, *flags, worker_id=f"fake-{model}-{number}", slots=SLOTS[model], wait=False)
        for process in stack.workers:
            stack.wait_for_worker(process.name.split("-")[1], process.name, process)
        bench = _Bench(stack, stack.gateway(log_level="warning", max_queue=5000))
        bench.load("one", 64, 64, 20)  # warms up
        costs = _costs(bench, news)
        checked = tuple(_checked(bench, costs, *shape) for shape in many)
        generator_us = _generator(stack, bench.url)
    return Trial(costs, checked, f"{platform.machine()}, Python {platform.python_version()}", generator_us)


def _generator(stack: Stack, url: str) -> float:
    """256 callers, 5,000 tokens a second and more."""
    file = stack.folder / "bench.json"
    command = ["taskset", "-c", "1", sys.executable, "-m", "gateway.cli", "bench", "--url", url, "--json", str(file)]
    command += ["--model", "eight", "--concurrency", "256", "--duration", "10"]
    subprocess.run(command, env=stack.environment(), check=True, capture_output=True)
    return float(json.loads(file.read_text())["generator"]["cpu_us_per_piece"])


def _costs(bench: _Bench, news: _News) -> Costs:
    idle = bench.idle()
    empty = bench.resident()
    idle_rate, redis_rate = idle.gateway_s / idle.wall_s, idle.redis_s / idle.wall_s
    short = bench.load("one", 32, 1_500, 1)
    together, apart = (_per_token(bench, model, idle_rate) for model in ("one", "eight"))
    # The same calls and tokens; streams of one worker share its steps among 64, those of eight among 8.
    step_us = (apart - together) / (SPREAD_OVER / 64 - 1 / 64)
    runs = [(bench.load(model, streams, streams, tokens), _steps(model)) for model, streams, tokens in FITTED]
    token_us, call_us = fitted(
        [(run, run.gateway_s - (idle_rate + steps * step_us / 1e6) * run.wall_s) for run, steps in runs]
    )
    return Costs(
        gateway_token_us=token_us,
        gateway_step_us=step_us,
        gateway_call_us=call_us,
        gateway_news_us=news.gateway_us,
        gateway_idle_us_per_s=idle_rate * 1e6,
        gateway_bytes=empty,
        stream_bytes=max(0, runs[-1][0].most_bytes - empty) / FITTED[-1][1],
        redis_call_us=(short.redis_s - redis_rate * short.wall_s) / short.calls * 1e6,
        redis_news_us=news.redis_us,
        redis_read_us=news.read_us,
        redis_gateway_us_per_s=redis_rate * 1e6,
    )


def fitted(runs: Sequence[tuple[Run, float]]) -> tuple[float, float]:
    """Microseconds of a token and of a call, of two runs and the seconds of CPU that their tokens and calls took.

    Calls cost twice as much beside streams as they do back to back, so they are measured where they are made.
    """
    (one, one_s), (two, two_s) = runs
    divisor = one.tokens * two.calls - two.tokens * one.calls
    token_s = (one_s * two.calls - two_s * one.calls) / divisor
    call_s = (one.tokens * two_s - two.tokens * one_s) / divisor
    return token_s * 1e6, call_s * 1e6


def _per_token(bench: _Bench, model: str, idle_rate: float) -> float:
    """Microseconds, requests included; the median of three."""
    runs = [bench.load(model, 64, 64, 300) for _ in range(3)]
    return statistics.median((run.gateway_s - idle_rate * run.wall_s) / run.tokens * 1e6 for run in runs)


def _steps(model: str) -> float:
    """Per second: while streams run each worker has tokens in every step."""
    return WORKERS[model] * 1_000 / STEP_MS[model]


def _checked(bench: _Bench, costs: Costs, model: str, streams: int, tokens: int) -> Checked:
    run = bench.load(model, streams, streams, tokens)
    return checked_with(costs, streams, run, _steps(model))


def checked_with(costs: Costs, streams: int, run: Run, steps: float) -> Checked:
    predicted = gateway_cpu(costs, tokens=run.tokens / run.wall_s, steps=steps, calls=run.calls / run.wall_s, news=0.0)
    return Checked(
        streams=streams,
        tokens_per_s=run.tokens / run.wall_s,
        calls_per_s=run.calls / run.wall_s,
        measured_cpu=run.gateway_s / run.wall_s,
        predicted_cpu=predicted,
        gateway_mib=run.most_bytes / 2**20,
        longest_gap_ms=run.longest_gap_ms,
    )


class _Bench:
    """One gateway, one Redis, load on the other core."""

    def __init__(self, stack: Stack, gateway: Process) -> None:
        self._stack = stack
        self._gateway = psutil.Process(gateway.pid)
        self._redis = psutil.Process(stack.redis.pid)
        self.url = gateway.url

    def resident(self) -> int:
        return self._gateway.memory_info().rss

    def idle(self) -> Run:
        gateway, other, began = _cpu(self._gateway), _cpu(self._redis), time.perf_counter()
        time.sleep(IDLE_S)
        wall = time.perf_counter() - began
        return Run(0, 0, wall, _cpu(self._gateway) - gateway, _cpu(self._redis) - other, self.resident(), 0.0)

    def load(self, model: str, callers: int, calls: int, tokens: int) -> Run:
        """Raises RuntimeError when a call failed."""
        command = ["taskset", "-c", "1", sys.executable, "-m", "benchmarks.load", "--url", self.url]
        command += ["--key", self._stack.key, "--model", model, "--max-tokens", str(tokens)]
        command += ["--callers", str(callers), "--requests", str(calls), "--watch", str(self._gateway.pid)]
        command += ["--ramp", str(callers * CALL_S if callers > 64 else 0.0)]
        other, most = _cpu(self._redis), 0
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
            while running.poll() is None:
                most = max(most, self.resident())
                time.sleep(0.2)
            said, complained = running.communicate()
        if running.returncode:
            raise RuntimeError(f"load failed: {said[-600:]} {complained[-600:]}")
        found = json.loads(said)
        redis_s = _cpu(self._redis) - other
        return Run(
            found["requests"],
            found["tokens"],
            found["wall_s"],
            found["watched_cpu_s"],
            redis_s,
            most,
            found["longest_gap_ms"],
        )


@dataclass(frozen=True, slots=True)
class _News:
    """Of one entry."""

    gateway_us: float
    redis_us: float
    read_us: float


def _news() -> _News:
    """As `placement_cost` does it: a thousand workers that exist in Redis only, one gateway's picture of them."""
    command = [sys.executable, "-m", "benchmarks.placement_cost"]
    with RedisServer() as server, redis.Redis(unix_socket_path=str(server.socket)) as client:
        of_redis = psutil.Process(server.pid)
        with subprocess.Popen([*command, "publish", server.url]) as publisher:
            try:
                with subprocess.Popen([*command, "follow", server.url], stdout=subprocess.PIPE, text=True) as follower:
                    while follower.poll() is None and not client.exists(GO):
                        time.sleep(0.05)
                    time.sleep(SETTLE_S)
                    both = _told(client, of_redis)
                    found = json.loads(follower.communicate()[0])
                alone = _told(client, of_redis)
            finally:
                publisher.terminate()
    return _News(found["cpu"] / found["news"] * 1e6, alone, max(0.0, both - alone))


def _told(client: redis.Redis, process: psutil.Process) -> float:
    """Microseconds of Redis for an entry."""
    cpu, entries = _cpu(process), _entries(client)
    time.sleep(FOLLOWED_S)
    return (_cpu(process) - cpu) / (_entries(client) - entries) * 1e6


def _entries(client: redis.Redis) -> int:
    return int(client.info("commandstats").get("cmdstat_xadd", {}).get("calls", 0))


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
