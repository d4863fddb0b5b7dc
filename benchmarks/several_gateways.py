"""Several gateways on one machine: what another one costs, and how many tokens two carry against one.

    python -m benchmarks.several_gateways

Another gateway reads the fleet's records and every worker's event stream, whether or not it has calls: that is its CPU
time while it is idle, with 9 workers. It makes a worker write a frame of its own for each step in which it has calls:
that is the CPU time of one true worker per token, with 8 answers through one gateway and 4 through each of two.

How many tokens two gateways carry needs a core for each process that works (two gateways, load, two workers): with
fewer than 4 cores there is no such row. Each gateway is asked for more than it can carry, and counts what it carried.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import psutil

from benchmarks.table import Row, print_rows
from tests.support.stack import DEMO_MODEL, Process, Stack

IDLE_S = 10.0
ANSWERS, TOKENS = 8, 128
STREAMS, FULL_TOKENS = 256, 300
CORES = 4


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def start_load(stack: Stack, gateway: Process, model: str, callers: int, tokens: int) -> subprocess.Popen[str]:
    """Start a load of one round: each caller asks once."""
    command = [sys.executable, "-m", "benchmarks.load", "--url", gateway.url, "--key", stack.key, "--model", model]
    command += ["--callers", str(callers), "--requests", str(callers), "--max-tokens", str(tokens)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def tokens_of(loads: list[subprocess.Popen[str]]) -> float:
    """Wait for loads and return their tokens. Raises RuntimeError if a stream failed."""
    results = [json.loads(load.communicate()[0]) for load in loads]
    if any(result["errors"] for result in results):
        raise RuntimeError(f"streams failed: {results}")
    return float(sum(result["tokens"] for result in results))


def idle_cost() -> Row:
    with Stack(measured=True) as stack:
        for number in range(9):
            stack.fake_worker("idle", "--step-ms", "20", worker_id=f"fake-{number}", slots=8)
        gateway = stack.gateway(log_level="info")
        time.sleep(3)
        begun_s, began = cpu_s(gateway.pid), time.monotonic()
        time.sleep(IDLE_S)
        took = (cpu_s(gateway.pid) - begun_s) / (time.monotonic() - began)
    return Row("another gateway that is idle, 9 workers", f"{took * 1000:.1f} ms of CPU per second", "", "", True)


def worker_cost(rounds: int) -> list[Row]:
    costs: dict[int, list[float]] = {1: [], 2: []}
    with Stack(measured=True) as stack:
        worker = stack.worker(DEMO_MODEL, "bench", slots=ANSWERS)
        gateways = [stack.gateway(log_level="warning") for _ in range(2)]
        for number in range(rounds + 1):  # the first round warms up
            for used in costs:
                begun_s = cpu_s(worker.pid)
                loads = [start_load(stack, one, "bench", ANSWERS // used, TOKENS) for one in gateways[:used]]
                tokens = tokens_of(loads)
                if number:
                    costs[used].append((cpu_s(worker.pid) - begun_s) / tokens * 1e6)
    one, two = statistics.median(costs[1]), statistics.median(costs[2])
    return [
        Row("a worker, 8 answers through one gateway", f"{one:.0f} us of CPU per token", "1.00 x", "", True),
        Row("the same, 4 through each of two", f"{two:.0f} us of CPU per token", f"{two / one:.2f} x", "", True),
    ]


def throughput(rounds: int) -> list[Row]:
    """Return the tokens per second of two gateways against one, each on a core of its own."""
    cores = {"gateway-0": "0", "gateway-1": "1", "fake": "2", "redis": "2"}
    rates: dict[int, list[float]] = {1: [], 2: []}
    with Stack(measured=True, cores=cores) as stack:
        for number in range(2):
            # Steps as fast as they go: the gateways are what is full.
            stack.fake_worker("full", "--step-ms", "1", worker_id=f"fake-{number}", slots=STREAMS)
        gateways = [stack.gateway(log_level="warning") for _ in range(2)]
        for number in range(rounds + 1):
            for used in rates:
                began = time.monotonic()
                loads = [start_load(stack, one, "full", STREAMS // used, FULL_TOKENS) for one in gateways[:used]]
                tokens = tokens_of(loads)
                if number:
                    rates[used].append(tokens / (time.monotonic() - began))
    one, two = statistics.median(rates[1]), statistics.median(rates[2])
    return [
        Row("one gateway on a core, 256 streams", f"{one:,.0f} tokens/s", "1.00 x", "", True),
        Row("two on a core each", f"{two:,.0f} tokens/s", f"{two / one:.2f} x", ">= 1.8 x", two / one >= 1.8),
    ]


def measure(rounds: int) -> list[Row]:
    rows = [idle_cost(), *worker_cost(rounds)]
    cores = len(os.sched_getaffinity(0))
    if cores < CORES:
        return [*rows, Row("two gateways against one", f"needs {CORES} cores, there are {cores}", "", "", True)]
    return rows + throughput(rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    print_rows("several gateways on one machine", measure(parser.parse_args().rounds))
