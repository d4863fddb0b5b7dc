"""Seconds from a call for a model that is not loaded to its first token, against the bare load of llama.cpp.

All systems run all the time, and take turns within a round, so that they see the same machine. A swap is a call for a
third model while both places have idle ones; it comes when no policy keeps them any more.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.models.bare import load_s
from benchmarks.models.calls import PROMPT, Caller
from benchmarks.models.files import SMALL
from benchmarks.models.scenarios import Unprepared, have
from benchmarks.models.systems import server_flags
from benchmarks.reference import llama_server
from benchmarks.table import Row
from tests.support.stack import free_port
from workers.residency.picture import Bounds

MOST = 1.3
"""Times the bare load."""
SETTLED_S = Bounds().quiet_s + 1.0
"""After that an idle model of Paddock's leaves at once, and processes that were asked to end have ended."""
STARTUP_S = 120.0


@dataclass(slots=True)
class Times:
    """Seconds that were measured of one file, by round."""

    bare: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    """A llama-server of its own, from its start until it is healthy."""
    cold: dict[str, list[float]] = field(default_factory=dict)
    swap: dict[str, list[float]] = field(default_factory=dict)


async def measured(callers: Mapping[str, Caller], files: Mapping[str, Path], name: str, rounds: int) -> Times:
    """Return the times of one model. Raises Unprepared."""
    times = Times()
    path = files[name]
    others = [other for other in SMALL if other != name][:2]
    num_tokens = await _num_prompt_tokens(next(iter(callers.values())), name)
    for _ in range(rounds):
        times.bare.append(await asyncio.to_thread(load_s, path, num_tokens))
        times.alone.append(await asyncio.to_thread(alone_s, path))
        for system, caller in callers.items():
            await have(caller)
            await asyncio.sleep(SETTLED_S)
            times.cold.setdefault(system, []).append(await _first_token_s(caller, name))
            await have(caller, *others)
            await asyncio.sleep(SETTLED_S)
            times.swap.setdefault(system, []).append(await _first_token_s(caller, name))
            await have(caller)
    return times


async def _num_prompt_tokens(caller: Caller, model: str) -> int:
    """Return the number of tokens of the prompt that is asked."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1}
    async with caller.session.post(f"{caller.system.url}/v1/completions", json=body) as response:
        response.raise_for_status()
        return int((await response.json())["usage"]["prompt_tokens"])


async def _first_token_s(caller: Caller, model: str) -> float:
    answer = await caller.ask(model, max_tokens=1)
    if not answer.is_answered:
        raise Unprepared(f"{model} was {answer.outcome}")
    return answer.wait_s


def alone_s(path: Path) -> float:
    """Return the seconds from starting a llama-server with this file until it is healthy."""
    port = free_port()
    began = time.perf_counter()
    command = [str(llama_server()), "-m", str(path), "--port", str(port), *server_flags()]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while time.perf_counter() - began < STARTUP_S and process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    return time.perf_counter() - began
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.005)
    finally:
        process.kill()
        process.wait()
    raise Unprepared(f"llama-server did not load {path.name}")


def rows(name: str, times: Times, ours: str = "paddock") -> list[Row]:
    """Return the medians, and their ratios to the bare load."""
    bare = statistics.median(times.bare)
    found = [
        Row(f"{name}: bare load of llama.cpp (model, context, the prompt)", _told(times.bare), "1.00", "", True),
        Row(f"{name}: a llama-server of its own, until it is healthy", *_against(times.alone, bare), "", True),
    ]
    for what, by_system in (("cold call", times.cold), ("swap", times.swap)):
        for system, seconds in by_system.items():
            has_bar = system == ours and what == "swap"
            figure, ratio = _against(seconds, bare)
            reached = not has_bar or statistics.median(seconds) <= MOST * bare
            found.append(Row(f"{name}: {what}, {system}", figure, ratio, f"<= {MOST}" if has_bar else "", reached))
    return found


def _told(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def _against(seconds: Sequence[float], bare: float) -> tuple[str, str]:
    return _told(seconds), f"{statistics.median(seconds) / bare:.2f}"
