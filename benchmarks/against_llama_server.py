"""Tokens per second end to end against the C++ llama-server of the same source: 1, 8 and 16 callers, one thread each.

    python -m benchmarks.against_llama_server

Both serve the same file with the same slots and context, have core 0 to themselves (Paddock with its worker, gateway
and Redis, llama-server as it is), and are asked by the same load on core 1: streamed chat completions, prompts that
differ from their first word on, so that no prompt cache helps. Only one of the two runs at a time; rounds alternate
and the ratio is of the medians.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.reference import llama_server
from benchmarks.synthetic_model import synthetic_model
from benchmarks.table import Row, print_rows
from tests.support.stack import DEMO_MODEL, Stack, free_port

CALLERS = (1, 8, 16)
SLOTS = 16
CTX = 512
PROMPTS = itertools.count()
"""Each load has prompts of its own."""


def load(url: str, key: str, model: str, callers: int, rounds_each: int, max_tokens: int) -> float:
    """Tokens per second over `callers * rounds_each` answers; raises when one failed."""
    command = ["taskset", "-c", "1", sys.executable, "-m", "benchmarks.load", "--url", url, "--key", key]
    command += ["--model", model, "--callers", str(callers), "--requests", str(callers * rounds_each)]
    command += ["--first", str(next(PROMPTS) * 1000)]
    done = subprocess.run([*command, "--max-tokens", str(max_tokens)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"load failed: {done.stdout[-600:]} {done.stderr[-600:]}")
    return float(json.loads(done.stdout)["tokens_per_s"])


@contextmanager
def reference_server(stack: Stack, model: Path) -> Iterator[str]:
    port = free_port()
    flags = ["-m", str(model), "-t", "1", "-tb", "1", "-c", str(SLOTS * CTX), "-np", str(SLOTS), "--no-warmup"]
    command = ["taskset", "-c", "0", str(llama_server()), *flags, "--host", "127.0.0.1", "--port", str(port)]
    process = stack.spawn(f"llama-server-{port}", command)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                break
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            if time.monotonic() > deadline or process.popen.poll() is not None:
                raise RuntimeError(f"llama-server did not start: {process.text()[-1000:]}") from None
            time.sleep(0.1)
    yield url
    process.stop()


@contextmanager
def paddock(stack: Stack, model: Path) -> Iterator[str]:
    worker = stack.worker(model, "bench", worker_id=f"worker-{free_port()}", slots=SLOTS, ctx=CTX)
    gateway = stack.gateway(log_level="warning")
    yield gateway.url
    gateway.stop()
    worker.stop()


def compare(model: Path, name: str, *, max_tokens: int, rounds: int, bar: float | None) -> list[Row]:
    speeds: dict[tuple[str, int], list[float]] = {}
    with Stack(measured=True, cores={"worker": "0", "gateway": "0", "redis": "0"}) as stack:
        for _ in range(rounds):
            for who, serve in (("llama-server", reference_server), ("paddock", paddock)):
                with serve(stack, model) as url:
                    load(url, stack.key, "bench", 2, 1, 8)
                    for callers in CALLERS:
                        speed = load(url, stack.key, "bench", callers, 1 if callers > 1 else 2, max_tokens)
                        speeds.setdefault((who, callers), []).append(speed)
    rows = []
    for callers in CALLERS:
        ours = statistics.median(speeds["paddock", callers])
        theirs = statistics.median(speeds["llama-server", callers])
        ratio = ours / theirs
        rows.append(
            Row(
                f"{name}, {callers} caller{'s' if callers > 1 else ''}",
                f"{ours:,.0f} against {theirs:,.0f} tokens/s",
                f"{ratio:.2f} x",
                f">= {bar} x" if bar else "",
                bar is None or ratio >= bar,
            )
        )
    return rows


def measure(rounds: int) -> list[Row]:
    return [
        *compare(synthetic_model(), "0.5 B synthetic Q8_0", max_tokens=64, rounds=rounds, bar=0.9),
        *compare(DEMO_MODEL, "demo model", max_tokens=256, rounds=rounds, bar=None),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    print_rows("end to end against llama-server", measure(parser.parse_args().rounds))
