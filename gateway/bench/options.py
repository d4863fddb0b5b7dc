"""Reads and checks the flags of `paddock bench`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import NoReturn

from gateway.bench.bounds import Bound, BoundUnusable, of_calls, of_runs
from gateway.bench.workload import PRESETS

FORM = "`paddock bench --help` lists the flags"
DURATION_S = 60.0
STEP_S = 20.0
CALLERS = 8
WARMUP_SHARE, MOST_WARMUP_S = 0.1, 10.0


class BenchUnusable(ValueError):
    """The benchmark can't run with these flags; the message says why, for a person."""


@dataclass(frozen=True, slots=True)
class Options:
    """All options. Times are in seconds, lengths in tokens. The times at which calls are sent follow from `rate`,
    `callers`, `limit` or the trace."""

    url: str | None
    model: str | None
    keys: Path | None
    insecure: bool
    workload: str
    trace: Path | None
    speed: float
    scale: float
    prompt: float | None
    answer: float | None
    most_tokens: int
    rate: float | None
    variation: float
    callers: int | None
    limit: tuple[Bound, ...]
    step_s: float
    duration_s: float
    count: float
    warmup_s: float
    seed: int
    let_stop: bool
    temperature: float | None
    timeout_s: float
    slo: tuple[Bound, ...]
    asserts: tuple[Bound, ...]
    json: Path | None
    html: Path | None

    def told(self) -> dict[str, str | float | int | bool | None]:
        """Return the options for the report: flag -> value, so that the run can be repeated."""
        when = {
            "rate": self.rate,
            "bursts": self.variation if self.rate else None,
            "speed": self.speed if self.trace and not self.rate else None,
            "concurrency": self.callers,
            "find_limit": ",".join(bound.text for bound in self.limit) or None,
            "step": self.step_s if self.limit else None,
            "duration": None if self.duration_s == inf else self.duration_s,
            "count": None if self.count == inf else int(self.count),
        }
        what = {
            "workload": None if self.trace else self.workload,
            "trace": self.trace.name if self.trace else None,
            "scale": self.scale,
            "prompt_tokens": self.prompt,
            "answer_tokens": self.answer,
            "max_context": self.most_tokens,
            "temperature": self.temperature,
            "let_stop": self.let_stop,
            "seed": self.seed,
        }
        return {name: value for name, value in (when | what).items() if value is not None}


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BenchUnusable(f"bench: {message}; {FORM}")


def read(args: Sequence[str]) -> tuple[Options, list[str]]:
    """Return the options in the flags, and the remaining flags (the gateway's settings). Raises BenchUnusable."""
    found, rest = make_parser().parse_known_args(args)
    try:
        return _options(found), rest
    except BoundUnusable as error:
        raise BenchUnusable(str(error)) from None


def _options(found: Namespace) -> Options:
    ways = [flag for flag, given in (("--rate", found.rate), ("--concurrency", found.concurrency)) if given]
    if len(ways) > 1:
        raise BenchUnusable("bench: --rate and --concurrency exclude each other: calls come by a clock, or by answers")
    if found.find_limit and found.concurrency:
        raise BenchUnusable("bench: --find-limit raises a rate; leave out --concurrency")
    if found.bursts != 1 and not (found.rate or found.find_limit):
        raise BenchUnusable("bench: --bursts is how a --rate varies; give one")
    if found.trace and found.find_limit:
        raise BenchUnusable("bench: --find-limit needs calls without end; leave out --trace")
    timed = bool(found.rate or found.find_limit)
    duration = found.duration or (inf if found.count or found.trace else DURATION_S)
    warmup = found.warmup
    if warmup is None:
        lasting = found.step if found.find_limit else duration
        warmup = 0.0 if lasting == inf else min(MOST_WARMUP_S, WARMUP_SHARE * lasting)
    if warmup >= duration:
        raise BenchUnusable(f"bench: --warmup {warmup:g} leaves nothing of --duration {duration:g} to be measured")
    return Options(
        url=found.url,
        model=found.model,
        keys=found.keys,
        insecure=found.insecure,
        workload=found.workload,
        trace=found.trace,
        speed=found.speed,
        scale=found.scale,
        prompt=found.prompt_tokens,
        answer=found.answer_tokens,
        most_tokens=found.max_context,
        rate=found.rate,
        variation=found.bursts,
        callers=None if timed or (found.trace and not found.concurrency) else found.concurrency or CALLERS,
        limit=of_runs(found.find_limit, "--find-limit") if found.find_limit else (),
        step_s=found.step,
        duration_s=duration,
        count=found.count or inf,
        warmup_s=warmup,
        seed=found.seed,
        let_stop=found.let_stop,
        temperature=found.temperature,
        timeout_s=found.timeout,
        slo=of_calls(found.slo) if found.slo else (),
        asserts=of_runs(found.asserts, "--assert") if found.asserts else (),
        json=found.json,
        html=found.html,
    )


def make_parser() -> ArgumentParser:
    """Return the parser of the flags that are no settings."""
    parser = _Parser(prog="paddock bench", allow_abbrev=False, add_help=False)
    parser.add_argument("--url")
    parser.add_argument("--model")
    parser.add_argument("--keys", type=Path)
    parser.add_argument("--insecure", action="store_true")
    parser.add_argument("--workload", choices=list(PRESETS), default="chat")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--speed", type=_above_zero, default=1.0)
    parser.add_argument("--scale", type=_above_zero, default=1.0)
    parser.add_argument("--prompt-tokens", type=_above_zero)
    parser.add_argument("--answer-tokens", type=_above_zero)
    parser.add_argument("--max-context", type=_whole(16), default=1 << 20)
    parser.add_argument("--rate", type=_above_zero)
    parser.add_argument("--bursts", type=_not_negative, default=1.0)
    parser.add_argument("--concurrency", type=_whole(1))
    parser.add_argument("--find-limit")
    parser.add_argument("--step", type=_above_zero, default=STEP_S)
    parser.add_argument("--duration", type=_above_zero)
    parser.add_argument("--count", type=_whole(1))
    parser.add_argument("--warmup", type=_not_negative)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--let-stop", action="store_true")
    parser.add_argument("--temperature", type=_not_negative)
    parser.add_argument("--timeout", type=_above_zero, default=600.0)
    parser.add_argument("--slo")
    parser.add_argument("--assert", dest="asserts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--html", type=Path)
    return parser


def _above_zero(text: str) -> float:
    value = _not_negative(text)
    if value == 0:
        raise ValueError
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < inf:
        raise ValueError
    return value


def _whole(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise ValueError
        return value

    number.__name__ = f"whole number from {least}"
    return number


_above_zero.__name__ = "number above 0"
_not_negative.__name__ = "number from 0"
