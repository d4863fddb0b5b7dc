"""200 concurrent streams through one gateway on two 8-slot workers: all finish, none is lost, memory stays flat.

    python -m benchmarks.many_streams

True workers with the demo model; 16 streams run at a time and the others wait in the queue. Memory is the gateway's
resident set after each round; flat means that the last rounds add less than 2 % to what it was after the first ones.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import psutil

from benchmarks.table import Row, print_rows
from tests.support.stack import DEMO_MODEL, Stack

STREAMS, TOKENS = 200, 64


def measure(rounds: int) -> list[Row]:
    finished, errors, memory = 0, 0, []
    with Stack(measured=True) as stack:
        for _ in range(2):
            stack.worker(DEMO_MODEL, "bench", slots=8)
        gateway = stack.gateway(log_level="warning", queue_timeout_s=300)
        command = [sys.executable, "-m", "benchmarks.load", "--url", gateway.url, "--key", stack.key]
        command += ["--model", "bench", "--callers", str(STREAMS), "--requests", str(STREAMS)]
        for _ in range(rounds):
            done = subprocess.run([*command, "--max-tokens", str(TOKENS)], capture_output=True, text=True)
            result = json.loads(done.stdout)
            finished += result["requests"] - result["errors"]
            errors += result["errors"]
            memory.append(psutil.Process(gateway.pid).memory_info().rss / 2**20)
        leases = stack.leases("bench")
    growth = memory[-1] / memory[rounds // 2] - 1
    return [
        Row("streams that finished", f"{finished} of {STREAMS * rounds}", "", "all", errors == 0),
        Row("slots still leased afterwards", str(leases), "", "0", leases == 0),
        Row(
            "gateway memory, by round",
            " ".join(f"{m:.0f}" for m in memory) + " MiB",
            f"{growth:+.1%} over the second half",
            "<= 2 %",
            growth <= 0.02,
        ),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    print_rows("200 concurrent streams", measure(parser.parse_args().rounds))
