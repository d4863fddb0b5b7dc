"""What tracing costs a gateway: CPU with every call traced, to a collector beside it, against CPU with none.

    python -m benchmarks.tracing_cost

Two gateways, one that traces and one that does not, have core 0; load, fake worker, Redis and the collector share core
1. Two runs of the same gateway differ by more than tracing costs, so that it is measured where it is spent: what the
calls' own thread does for it is timed alone, what the thread does that makes and sends spans is that thread's CPU, by
the scheduler's nanoseconds, from before the load until the last span has left. The share is of all CPU of the gateway
that traces. Long answers (64 streams of 300 tokens, a step every 20 ms) are what `gateway_cpu` measures, short ones (8
tokens, no pauses) the worst case. The difference to the other gateway, in pairs, is shown beside it with its noise.
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
from gateway.telemetry import finish
from gateway.telemetry.answer_log import begin_trace
from gateway.telemetry.request_log import RequestLog
from tests.support.stack import Process, Stack
from workers.protocol.heartbeat import WorkerAddress
from workers.tracing.span import TraceContext, new_context
from workers.tracing.tracer import EVERY_S, OFF, Journey, Tracer

STREAMS, STEP_MS, TOKENS = 64, 20, 300
SETTLE_S = EVERY_S + 0.5
"""Longer than spans wait to be sent."""
BAR = 0.05
OFF_BAR_US = 10.0
"""Per request, of which a gateway spends some milliseconds on each."""
ALONE_ROUNDS = 20_000


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    model: str
    callers: int
    requests: int
    tokens: int


LONG = Load("64 streams x 300 tokens", "long", STREAMS, 2 * STREAMS, TOKENS)
SHORT = Load("answers of 8 tokens", "short", 16, 600, 8)


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of CPU per call."""

    loop: float
    """Of the thread that serves calls."""
    beside: float
    """Of all others, of which there is tracing's."""


WORKER = WorkerAddress("m", "w", "b", "http://w")


class Recorder:
    """A tracer that records everything and sends nothing."""

    def inside(self, caller: TraceContext | None) -> TraceContext:
        return new_context()

    def tell(self, journey: Journey) -> None:
        """That is all."""


def cpu_s(pid: int) -> tuple[float, float]:
    """Of the main thread, and of all others that live."""
    told = {
        int(task.name): int((task / "schedstat").read_text().split()[0]) / 1e9
        for task in Path(f"/proc/{pid}/task").iterdir()
    }
    return told[pid], sum(told.values()) - told[pid]


def cost(load: Load, gateway: Process, key: str, first: int) -> Cost:
    """Raises RuntimeError where a call failed."""
    command = ["taskset", "-c", "1", sys.executable, "-m", "benchmarks.load", "--url", gateway.url, "--key", key]
    command += ["--model", load.model, "--callers", str(load.callers), "--requests", str(load.requests)]
    command += ["--max-tokens", str(load.tokens), "--first", str(first)]
    before = cpu_s(gateway.pid)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or json.loads(done.stdout)["tokens"] != load.requests * load.tokens:
        raise RuntimeError(f"{load.name}: load failed: {done.stdout[-600:]} {done.stderr[-600:]}")
    time.sleep(SETTLE_S)
    loop, beside = (after - was for after, was in zip(cpu_s(gateway.pid), before, strict=True))
    return Cost(loop / load.requests * 1e6, beside / load.requests * 1e6)


def in_calls_us(tracer: Tracer) -> float:
    """What is done per call for tracing by the thread that serves it."""
    began = time.thread_time()
    for _ in range(ALONE_ROUNDS):
        request_log = RequestLog("r", "POST", "/v1/chat/completions", trace=begin_trace(tracer, None))
        answer = request_log.answer
        answer.begin_wait("m").end()
        answer.begin_attempt(WORKER)
        attempt = answer.attempts[0]
        told = attempt.context.traceparent if attempt.context is not None else ""
        attempt.begin_answer()
        attempt.end()
        finish.tell(request_log)
    took_s = time.thread_time() - began
    began = time.thread_time()
    for _ in range(ALONE_ROUNDS):
        RequestLog("r", "POST", "/v1/chat/completions")
    assert isinstance(told, str)
    return (took_s - (time.thread_time() - began)) / ALONE_ROUNDS * 1e6


def measure(rounds: int) -> list[Row]:
    costs: dict[tuple[str, str], list[Cost]] = {}
    with Stack(measured=True, cores={"gateway": "0", "fake": "1", "redis": "1", "sink": "1"}) as stack:
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
                    found = cost(load, gateway, stack.key, number * load.requests)
                    if number:
                        costs.setdefault((load.name, name), []).append(found)
    return rows_of(costs, in_calls_us(OFF), in_calls_us(Recorder()))


def rows_of(costs: dict[tuple[str, str], list[Cost]], off_us: float, on_us: float) -> list[Row]:
    """`costs` by load and whether tracing is `off` or `on`, pairs side by side. Microseconds in a call's own thread."""
    rows = [
        Row("tracing off, per call", f"{off_us:.1f} us", "", f"<= {OFF_BAR_US:.0f} us", off_us <= OFF_BAR_US),
        Row("every call traced, in the calls' thread", f"{on_us:.1f} us", "", "", True),
    ]
    for load in (LONG, SHORT):
        off, on = costs[load.name, "off"], costs[load.name, "on"]
        beside = statistics.median(one.beside for one in on)
        whole = statistics.median(one.loop + one.beside for one in on)
        share = (beside + on_us) / whole
        told = f"{beside + on_us:.0f} us of {whole / 1e3:.2f} ms"
        rows.append(Row(f"{load.name}, every call traced", told, f"{share:.1%}", f"<= {BAR:.0%}", share <= BAR))
        more = [traced.loop + traced.beside - plain.loop - plain.beside for plain, traced in zip(off, on, strict=True)]
        spread = f"{min(more):+.0f} to {max(more):+.0f}"
        rows.append(Row(f"{load.name}, on less off, pairs", f"{statistics.median(more):+.0f} us", spread, "", True))
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    print_rows("what tracing costs a gateway", measure(parser.parse_args().rounds))
