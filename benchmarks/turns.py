"""The longest turn of a gateway's event loop with 1,000 streams: whoever comes with a request or a probe waits for one.

    python -m benchmarks.turns

Four fake workers, each of which steps 250 answers together every 100 ms. The gateway is the project's, with one more
callback that its event loop makes in every turn, and that takes the thread's own CPU time since the one before: what
the machine does beside it does not count. Gateway on core 0; load, fake workers and Redis on core 1.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from typing import Any

import uvloop

from benchmarks.table import Row, print_rows
from gateway import cli
from tests.support.stack import Process, Stack

STREAMS, WORKERS, STEP_MS, TOKENS = 1000, 4, 100, 150
BAR_MS = 5.0
TOLD_WITHIN_S = 10.0
LONG_S = 0.002
BEGUN_S, STREAMED_S = 6.0, 6.0
"""Seconds in which all callers come and get their first tokens, and for which they are then watched."""


class Turns:
    """Measures the turns of an event loop, and prints on SIGUSR2 what they were since the last one."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._begin()
        loop.call_soon(self._turn)
        loop.add_signal_handler(signal.SIGUSR2, self._tell)

    def _begin(self) -> None:
        self._longest_s, self._num_long, self._last_s = 0.0, 0, time.thread_time()

    def _turn(self) -> None:
        now_s = time.thread_time()
        took_s, self._last_s = now_s - self._last_s, now_s
        self._longest_s = max(self._longest_s, took_s)
        self._num_long += took_s > LONG_S
        self._loop.call_soon(self._turn)

    def _tell(self) -> None:
        print(json.dumps({"turns": [self._longest_s, self._num_long]}), flush=True)
        self._begin()


def run_gateway() -> int:
    """Run a gateway whose event loop is measured."""
    new_event_loop = uvloop.new_event_loop

    def measured_loop() -> uvloop.Loop:
        loop = new_event_loop()
        loop.call_soon(Turns, loop)
        return loop

    uvloop.new_event_loop = measured_loop
    return cli.main()


def turns_of(gateway: Process) -> tuple[float, int]:
    """Return the longest turn in seconds and the number of long ones, since this was last asked."""
    before = gateway.text().count('"turns"')
    gateway.signal(signal.SIGUSR2)
    until = time.monotonic() + TOLD_WITHIN_S
    while time.monotonic() < until:
        lines = [line for line in gateway.text().splitlines() if line.startswith('{"turns"')]
        if len(lines) > before:
            longest_s, num_long = json.loads(lines[-1])["turns"]
            return longest_s, num_long
        time.sleep(0.05)
    raise RuntimeError("the gateway does not tell its turns")


def measure(rounds: int) -> list[Row]:
    cores = {"gateway": "0", "fake": "1", "redis": "1"}
    begun: list[tuple[float, int]] = []
    streamed: list[tuple[float, int]] = []
    with Stack(measured=True, module="benchmarks.turns", cores=cores) as stack:
        for number in range(WORKERS):
            flags = ("--step-ms", str(STEP_MS), "--tokens", str(TOKENS))
            stack.fake_worker("many", *flags, worker_id=f"fake-{number}", slots=STREAMS // WORKERS)
        gateway = stack.gateway(max_queue_per_team=STREAMS, max_queue=STREAMS)
        command = ["taskset", "-c", "1", sys.executable, "-m", "benchmarks.load", "--url", gateway.url]
        command += ["--key", stack.key, "--model", "many", "--callers", str(STREAMS), "--requests", str(STREAMS)]
        for _ in range(rounds):
            turns_of(gateway)
            with subprocess.Popen([*command, "--max-tokens", str(TOKENS)], stdout=subprocess.PIPE, text=True) as load:
                time.sleep(BEGUN_S)
                begun.append(turns_of(gateway))
                num_streams = stack.leases("many")
                time.sleep(STREAMED_S)
                streamed.append(turns_of(gateway))
                result = json.loads(load.communicate()[0])
            if result["errors"] or num_streams != STREAMS:
                raise RuntimeError(f"{num_streams} streams ran at once, {result['errors']} failed")
    return [_row("while 1,000 callers come", begun, None), _row("while 1,000 streams run", streamed, BAR_MS)]


def _row(when: str, seen: list[tuple[float, int]], bar_ms: float | None) -> Row:
    longest_ms = max(longest_s for longest_s, _ in seen) * 1e3
    long = sum(num for _, num in seen)
    bar = "" if bar_ms is None else f"<= {bar_ms:g} ms"
    reached = bar_ms is None or longest_ms <= bar_ms
    return Row(f"longest turn of the event loop {when}", f"{longest_ms:.1f} ms", f"{long} over 2 ms", bar, reached)


if __name__ == "__main__":
    if sys.argv[1:] == ["gateway"]:
        sys.exit(run_gateway())
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    print_rows("turns of the event loop", measure(parser.parse_args().rounds))
