"""Paddock against the field in one run: nginx, LiteLLM's proxy, Bifrost and llama-swap behind the same fake upstream.

    python -m benchmarks field          three to six minutes once all is installed

Each gateway has core 0, one at a time; load and upstreams have core 1. By turns each carries 1, 64 and 512 streams
while its CPU time, its memory and what a newcomer waits for the first token are taken (`benchmarks.field.crowd`). What
can't be installed or started here is a row that says why, and the rest goes on (`benchmarks.field.install`).
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct
from msgspec.json import decode

from benchmarks.field.crowd import cpu_seconds, processes_of, resident_bytes
from benchmarks.field.gateways import CORES, LOAD_CORE, STARTS, TITLES, Arrangement, Gateway
from benchmarks.field.install import Missing
from benchmarks.gateway_cpu import start_upstream
from benchmarks.plain_upstream import AT_ONCE
from benchmarks.table import Row
from tests.support.stack import Stack

REST_S = 3.0
REFERENCE = "nginx"
MOST_WORDS = 300
"""Characters of a failure in a row."""
IN_TIME = 0.95
"""Of the tokens that were due: with fewer a gateway falls behind its upstream."""


@dataclass(frozen=True, slots=True)
class Shape:
    """So many streams of `tokens` tokens each, one every `step_ms`, which begin within `ramp_s`."""

    streams: int
    step_ms: int
    tokens: int
    ramp_s: float

    @property
    def model(self) -> str:
        return f"every-{self.step_ms}ms"

    @property
    def tokens_per_s(self) -> float:
        return self.streams * 1000 / self.step_ms


SHAPES = (Shape(1, 20, 250, 0.0), Shape(64, 40, 150, 0.5), Shape(512, 100, 120, 2.5))
"""Slower with more of them, so that a gateway's one core carries them where it can; 512 streams are 5,120 tokens/s."""
WARM_UP = Shape(8, 20, 60, 0.0)


class Trial(Struct, frozen=True):
    """What one crowd saw. Of a single caller beside it: `ttft_ms` through the gateway, `direct_ms` past it."""

    cpu_s: float
    tokens: int
    window_s: float
    num_begun: int
    most_bytes: int
    longest_gap_ms: float
    ttft_ms: float
    direct_ms: float


@dataclass(frozen=True, slots=True)
class Rest:
    """A gateway without calls, after its first ones: bytes of memory, and its share of a core."""

    resident: int
    cpu_share: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one gateway with one shape of crowd: medians over the rounds, the longest gap of all."""

    us_per_token: float
    ttft_added_ms: float
    bytes_per_stream: float
    longest_gap_ms: float
    share_in_time: float
    num_late: int
    """Streams that had not begun when the others were measured, at most."""


def measure(rounds: int, names: Sequence[str] = ()) -> list[Row]:
    """Return the rows of these gateways; all of them by default."""
    rows: list[Row] = []
    gateways: dict[str, Gateway] = {}
    figures: dict[tuple[str, Shape], Figures | str] = {}
    with Stack(measured=True, cores=CORES) as stack:
        upstream = start_upstream(stack, "upstream", "--tokens", "100000", "--slots", "4096")
        run = Arrangement(stack, upstream, (AT_ONCE, *(shape.model for shape in SHAPES)))
        for name in names or STARTS:
            try:
                gateways[name] = STARTS[name](run)
                tried(gateways[name], WARM_UP)
            except (Missing, RuntimeError) as error:
                gateways.pop(name, None)
                rows.append(Row(TITLES.get(name, name), f"not measured: {error}", "", "", True))
        rests = at_rest(gateways)
        for shape in SHAPES:
            for name, trials in in_turns(gateways, shape, rounds).items():
                figures[name, shape] = trials if isinstance(trials, str) else figures_of(trials, rests[name], shape)
    rested = [rest_row(gateway, rests[name]) for name, gateway in gateways.items()]
    return [*rested, *rows, *crowd_rows(gateways, figures)]


def in_turns(gateways: dict[str, Gateway], shape: Shape, rounds: int) -> dict[str, list[Trial] | str]:
    """Try each gateway once a round, so that all see the same machine; a failure is kept in place of the trials."""
    found: dict[str, list[Trial] | str] = {name: [] for name in gateways}
    for _ in range(rounds):
        for name, gateway in gateways.items():
            before = found[name]
            if isinstance(before, str):
                continue
            try:
                before.append(tried(gateway, shape))
            except RuntimeError as error:
                found[name] = str(error)
    return found


def tried(gateway: Gateway, shape: Shape) -> Trial:
    """Run one crowd on the load's core. Raises RuntimeError when a stream failed."""
    command = ["taskset", "-c", LOAD_CORE, sys.executable, "-m", "benchmarks.field.crowd", "--url", gateway.url]
    command += ["--key", gateway.key, "--prefix", gateway.prefix, "--model", shape.model, *gateway.direct]
    command += ["--streams", str(shape.streams), "--tokens", str(shape.tokens), "--ramp", str(shape.ramp_s)]
    if shape is WARM_UP:
        command += ["--window", "0.5", "--probes", "2"]
    done = subprocess.run([*command, "--watch", *map(str, gateway.pids)], capture_output=True, text=True)
    if done.returncode:
        said_last = (done.stderr.strip().splitlines() or ["the crowd ended without a word of why"])[-1]
        raise RuntimeError(said_last.replace("|", "/")[:MOST_WORDS])
    return decode(done.stdout, type=Trial)


def at_rest(gateways: dict[str, Gateway]) -> dict[str, Rest]:
    """Leave all gateways alone for a while, and return what each has and does then."""
    pids = {name: processes_of(gateway.pids) for name, gateway in gateways.items()}
    before = {name: cpu_seconds(pids[name]) for name in gateways}
    time.sleep(REST_S)
    return {
        name: Rest(resident_bytes(pids[name]), (cpu_seconds(pids[name]) - before[name]) / REST_S) for name in gateways
    }


def figures_of(trials: Sequence[Trial], rest: Rest, shape: Shape) -> Figures:
    """Return the medians of a gateway's trials; its CPU time at rest is no token's."""
    return Figures(
        us_per_token=statistics.median(
            max(0.0, one.cpu_s - rest.cpu_share * one.window_s) / max(1, one.tokens) * 1e6 for one in trials
        ),
        ttft_added_ms=statistics.median(one.ttft_ms - one.direct_ms for one in trials),
        bytes_per_stream=statistics.median(max(0, one.most_bytes - rest.resident) / shape.streams for one in trials),
        longest_gap_ms=max(one.longest_gap_ms for one in trials),
        share_in_time=statistics.median(one.tokens / (shape.tokens_per_s * one.window_s) for one in trials),
        num_late=max(shape.streams - one.num_begun for one in trials),
    )


def rest_row(gateway: Gateway, rest: Rest) -> Row:
    figure = f"{rest.resident / 2**20:.0f} MiB, {rest.cpu_share:.1%} of a core"
    return Row(f"{gateway.name} {gateway.version}".strip() + ", at rest", figure, "", "", True)


def crowd_rows(gateways: dict[str, Gateway], figures: dict[tuple[str, Shape], Figures | str]) -> list[Row]:
    """Return a row for each crowd and gateway, with its CPU time against nginx's where that was measured."""
    rows = []
    for shape in SHAPES:
        yardstick = figures.get((REFERENCE, shape))
        for name, gateway in gateways.items():
            found = figures[name, shape]
            what = f"{gateway.name}, {shape.streams} {'stream' if shape.streams == 1 else 'streams'}"
            if isinstance(found, str):
                rows.append(Row(what, f"failed: {found}", "", "", True))
                continue
            ratio = ""
            if isinstance(yardstick, Figures) and yardstick.us_per_token:
                ratio = f"{found.us_per_token / yardstick.us_per_token:.1f} x"
            rows.append(Row(what, said(found), ratio, "", True))
    return rows


def said(found: Figures) -> str:
    """Return the figures in words."""
    parts = [
        f"{found.us_per_token:.1f} us/token",
        f"TTFT {found.ttft_added_ms:+.1f} ms",
        f"{found.bytes_per_stream / 1024:.0f} KiB a stream",
        f"longest gap {found.longest_gap_ms:.0f} ms",
    ]
    if found.share_in_time < IN_TIME:
        parts.append(f"only {found.share_in_time:.0%} of the tokens in time")
    if found.num_late:
        parts.append(f"{found.num_late} streams late to begin")
    return ", ".join(parts)
