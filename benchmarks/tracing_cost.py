"""What tracing costs a gateway: CPU with every call traced against CPU with none, in pairs, to a collector beside it.

    python -m benchmarks.tracing_cost

Two gateways, one that traces and one that does not, have core 0; load, fake worker, Redis and the collector share core
1. Rounds alternate between the two, so that both see the same machine. CPU is all threads' own, by the scheduler's
nanoseconds, from before the load until the last span has left: spans are made and sent after the calls. Long answers
(64 streams of 300 tokens, a step every 20 ms) are what `gateway_cpu` measures; short ones (8 tokens, no pauses) show
the cost per call at its worst. What is left to do where tracing is off is timed alone: no pair of runs would show it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.table import Row, print_rows
from gateway.telemetry import request_spans
from gateway.telemetry.record import begun
from gateway.telemetry.trail import Trail
from tests.support.stack import Process, Stack
from workers.tracing.tracer import EVERY_S, OFF

STREAMS, STEP_MS, TOKENS = 64, 20, 300
SETTLE_S = EVERY_S + 0.5
"""Longer than spans wait to be sent."""
IDLE_S = 1.5
"""So long it is measured what a gateway takes that does nothing."""
BAR = 0.05
OFF_BAR_US = 10.0
"""Per request, of which a gateway spends some milliseconds on each."""
OFF_ROUNDS = 20_000


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    model: str
    callers: int
    requests: int
    tokens: int


LONG = Load("64 streams x 300 tokens", "long", STREAMS, 2 * STREAMS, TOKENS)
SHORT = Load("answers of 8 tokens", "short", 16, 600, 8)


def cpu_s(pid: int) -> float:
    """Of all threads that live."""
    told = (task / "schedstat" for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int(path.read_text().split()[0]) for path in told) / 1e9


def cost_us(load: Load, gateway: Process, key: str, first: int) -> float:
    """CPU of the gateway per call. Raises RuntimeError where a call failed."""
    command = ["taskset", "-c", "1", sys.executable, "-m", "benchmarks.load", "--url", gateway.url, "--key", key]
    command += ["--model", load.model, "--callers", str(load.callers), "--requests", str(load.requests)]
    command += ["--max-tokens", str(load.tokens), "--first", str(first)]
    before = cpu_s(gateway.pid)
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or json.loads(done.stdout)["tokens"] != load.requests * load.tokens:
        raise RuntimeError(f"{load.name}: load failed: {done.stdout[-600:]} {done.stderr[-600:]}")
    time.sleep(SETTLE_S)
    spent_s, took_s = cpu_s(gateway.pid) - before, time.monotonic() - began
    idle = cpu_s(gateway.pid)
    time.sleep(IDLE_S)
    spent_s -= (cpu_s(gateway.pid) - idle) / IDLE_S * took_s
    return spent_s / load.requests * 1e6


def off_us() -> float:
    """What is done per request for tracing where there is none."""
    began = time.perf_counter()
    for _ in range(OFF_ROUNDS):
        trail = Trail("r", "POST", "/v1/chat/completions", record=begun(OFF, None))
        wait = trail.record.waits("m", trail.standing)
        wait.over(overtaken=0)
        attempt = trail.record.asks("m", "w", "http://w", 1)
        attempt.begun()
        attempt.over()
        request_spans.tell(trail)
    with_ = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(OFF_ROUNDS):
        Trail("r", "POST", "/v1/chat/completions")
    return (with_ - (time.perf_counter() - began)) / OFF_ROUNDS * 1e6


def measure(rounds: int) -> list[Row]:
    costs: dict[tuple[str, str], list[float]] = {}
    with Stack(cores={"gateway": "0", "fake": "1", "redis": "1", "sink": "1"}) as stack:
        sink = stack.spawn("sink", [sys.executable, "-m", "tests.support.otlp_sink"])
        while not (url := sink.text().strip()):
            time.sleep(0.02)
        for model, step_ms in {LONG.model: STEP_MS, SHORT.model: 1}.items():
            flags = ["--step-ms", str(step_ms), "--tokens", str(TOKENS), "--otlp-endpoint", url]
            stack.fake_worker(model, *flags, worker_id=f"fake-{model}", slots=STREAMS)
        gateways = {"off": stack.gateway(log_level="info"), "on": stack.gateway(log_level="info", otlp_endpoint=url)}
        for number in range(rounds + 1):  # the first round warms up
            for load in (LONG, SHORT):
                # Who goes first takes turns.
                for name, gateway in sorted(gateways.items(), reverse=bool(number % 2)):
                    cost = cost_us(load, gateway, stack.key, number * load.requests)
                    if number:
                        costs.setdefault((load.name, name), []).append(cost)
    return rows_of(costs, off_us())


def rows_of(costs: dict[tuple[str, str], list[float]], per_request_us: float) -> list[Row]:
    """`costs`: microseconds of CPU per call, by load and whether tracing is `off` or `on`; pairs stand side by side."""
    rows = [
        Row(
            "tracing off, what is left of it per call",
            f"{per_request_us:.1f} us",
            "",
            f"<= {OFF_BAR_US:.0f} us",
            per_request_us <= OFF_BAR_US,
        )
    ]
    for load in (LONG, SHORT):
        off, on = costs[load.name, "off"], costs[load.name, "on"]
        more = statistics.median(traced - plain for plain, traced in zip(off, on, strict=True))
        share = more / statistics.median(off)
        told = f"{statistics.median(off) / 1e3:.2f} ms/call"
        rows.append(Row(f"{load.name}, off", told, f"{min(off) / 1e3:.2f} to {max(off) / 1e3:.2f}", "", True))
        bar = f"<= {BAR:.0%}" if load is LONG else ""
        reached = share <= BAR or load is not LONG
        rows.append(Row(f"{load.name}, every call traced", f"{more:+.0f} us/call", f"{share:+.1%}", bar, reached))
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    print_rows("what tracing costs a gateway", measure(parser.parse_args().rounds))
