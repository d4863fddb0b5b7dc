"""Runs a whole benchmark: probes the server, runs the load or searches for its limit, and returns the result."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from random import Random

import msgspec
from msgspec import Struct

from gateway.bench.bounds import Bound
from gateway.bench.connection import Connections, Reading, Tape, Target
from gateway.bench.document import Document, Limit, Step, Verdict
from gateway.bench.driver import Caller, Driver, Form, Span
from gateway.bench.findings import Frame, document
from gateway.bench.options import BenchUnusable, Options
from gateway.bench.terminal import Progress
from gateway.bench.workload import (
    PRESETS,
    Conversations,
    Length,
    Preset,
    Prompt,
    Recorded,
    Replay,
    Source,
    Words,
    arrivals,
)

CLOSE_ENOUGH = 1.1
"""Maximum ratio of the lowest rate that broke an objective to the highest that broke none, for the search to end."""
MOST_STEPS = 20
MOST_FAILED = 0.01


async def search(
    measured: Callable[[float], Awaitable[Document]],
    objectives: tuple[Bound, ...],
    first_rate: float,
    tell: Callable[[Step], None],
) -> tuple[Document, Limit]:
    """Double the rate of calls until an objective is broken, then narrow the interval around the limit.

    Return the result at the highest rate at which all objectives held (at the first rate if none held), and the limit.
    """
    steps: list[Step] = []
    told: Document | None = None
    low, high, rate = 0.0, 0.0, first_rate
    for _ in range(MOST_STEPS):
        found = await measured(rate)
        told = told or found
        step = judge(found, objectives, rate)
        if found.ended == "interrupted":
            break
        steps.append(step)
        tell(step)
        if step.held:
            low, told = rate, found
        else:
            high = rate
        if found.generator.saturated or (low and high and high / low <= CLOSE_ENOUGH):
            break
        rate = _next(low, high)
        if rate < first_rate / 1_000:
            break
    if told is None:
        raise AssertionError("a search has at least one step")
    return told, Limit(",".join(bound.text for bound in objectives), low, tuple(steps))


def judge(found: Document, objectives: tuple[Bound, ...], rate: float) -> Step:
    """Return the search's step at this rate: whether the objectives held, and which were broken.

    A step with a saturated generator fails as well, as it did not measure the server."""
    calls = found.calls
    broken = [f"{verdict.expression}: {_value(verdict.value)}" for verdict in _verdicts(found, objectives)]
    if calls.failed > MOST_FAILED * max(1, calls.sent):
        broken.append(f"{calls.failed} of {calls.sent} calls failed")
    if found.generator.saturated:
        broken.append("the generator was saturated")
    return Step(
        rate=round(rate, 4),
        held=not broken,
        why="; ".join(broken),
        sent=calls.sent,
        ttft_p95_s=found.ttft_s.p95,
        itl_p95_s=found.itl_s.p95,
        tokens_per_s=found.rates.tokens_per_s,
    )


def _verdicts(found: Document, objectives: tuple[Bound, ...]) -> list[Verdict]:
    return [verdict for bound in objectives if not (verdict := bound.verdict(found)).held]


def _value(value: float | None) -> str:
    return "nothing was measured" if value is None else f"{value:.3g}"


def _next(low: float, high: float) -> float:
    if not high:
        return low * 2
    return (low * high) ** 0.5 if low else high / 2


TIMEOUT_S = 120.0
"""Maximum seconds of one probe, since the server may have to load the model first."""
LONG, SHORT = 160, 40
"""Words in the two probing prompts. What the chat template adds cancels out in the difference of their token counts."""


async def calibrate(there: Target, form: Form, caller: Caller, words: Words) -> None:
    """Set the tokens per word of `words`, from the server's token counts for two prompts. Raises BenchUnusable."""
    connections = Connections(there)
    try:
        counts = [await _tokens(connections, there, form, caller, words, count) for count in (SHORT, LONG)]
    finally:
        connections.close()
    if counts[1] > counts[0]:
        words.calibrated(LONG - SHORT, counts[1] - counts[0])


async def _tokens(connections: Connections, there: Target, form: Form, caller: Caller, words: Words, count: int) -> int:
    """Ask the server how many tokens a prompt of `count` words has; 0: it does not report them."""
    tape = Tape(time.perf_counter())
    reading = Reading(tape)
    text = words.text(round(count * words.tokens_per_word), Random(count))
    request = there.request(form.body(Prompt([{"role": "user", "content": text}], 2)), caller.key)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await connections.exchange(request, reading)
    except TimeoutError:
        raise BenchUnusable(f"{there.origin} gave no answer within {TIMEOUT_S:g} s; is a model loaded?") from None
    except OSError as error:
        raise BenchUnusable(
            f"nothing answers at {there.origin} ({error}); start one with `paddock up`, or name another with --url"
        ) from None
    if tape.error in ("", "empty"):
        return tape.prompt_tokens
    detail = caller.covered(tape.detail)
    kind = KeyRefused if tape.error in ("http_401", "http_403") else BenchUnusable
    raise kind(f"{there.origin}: {_describe_error(tape.error, detail)}")


class KeyRefused(BenchUnusable):
    """The server refuses the API key."""


class _Message(Struct):
    message: str


class _Refusal(Struct):
    error: _Message


def _describe_error(kind: str, detail: str) -> str:
    try:
        return f"{msgspec.json.decode(detail, type=_Refusal).error.message} ({kind})"
    except msgspec.MsgspecError:
        return f"{kind}: {detail}"


FIRST_RATE = 1.0
"""Calls per second at which a search for the limit begins."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The inputs of a benchmark. `trace`: recorded calls; empty: conversations are made up."""

    options: Options
    there: Target
    form: Form
    callers: Sequence[Caller]
    trace: Sequence[Recorded] = ()


class Runner:
    """Runs one benchmark. Call `run` once."""

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self._plan = plan
        self._progress = progress
        self._words = Words(plan.options.seed)
        self._driver: Driver | None = None
        self._stopped = False

    async def run(self) -> Document:
        """Run the benchmark. SIGINT and SIGTERM end it; the results so far are returned. Raises BenchUnusable."""
        plan, options = self._plan, self._plan.options
        await calibrate(plan.there, plan.form, plan.callers[0], self._words)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        try:
            if options.limit:
                found, limit = await search(self._step, options.limit, options.rate or FIRST_RATE, self._tell)
                found = msgspec.structs.replace(found, limit=limit)
                if self._stopped:
                    found = msgspec.structs.replace(found, ended="interrupted")
            else:
                found = await self._once(options, self._source(0), "")
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        return msgspec.structs.replace(found, asserts=tuple(bound.verdict(found) for bound in options.asserts))

    def _stop(self) -> None:
        self._stopped = True
        if self._driver is not None:
            self._driver.stop()

    async def _step(self, rate: float) -> Document:
        options = replace(self._plan.options, rate=rate, duration_s=self._plan.options.step_s)
        # New prompts at each rate, since the server has cached those of earlier rates.
        return await self._once(options, self._source(round(rate * 1000)), f"{rate:.3g} calls/s ")

    async def _once(self, options: Options, source: Source, label: str) -> Document:
        plan, span = self._plan, Span(options.duration_s, self._calls(options))
        driver = Driver(plan.there, plan.form, plan.callers, source, options.timeout_s)
        self._driver = driver
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        follower = asyncio.create_task(self._progress.follow(driver, span, label))
        try:
            if options.callers:
                await driver.together(options.callers, span)
            else:
                await driver.timed(self._dues(options), span)
        finally:
            follower.cancel()
            with suppress(asyncio.CancelledError):
                await follower
        settings = {"url": plan.there.origin, "model": plan.form.model, "keys": len(plan.callers), **options.told()}
        return document(driver.run, Frame(started_at, settings, options.warmup_s, options.slo))

    def _dues(self, options: Options) -> Iterable[float]:
        if options.rate is None:
            return [call.at_s / options.speed for call in self._plan.trace]
        # A separate random generator, so that the times of calls do not depend on their prompts.
        return arrivals(options.rate, options.variation, Random(f"arrivals {options.seed}"))

    def _calls(self, options: Options) -> float:
        return min(options.count, len(self._plan.trace)) if self._plan.trace else options.count

    def _source(self, round_: int) -> Source:
        options = self._plan.options
        seed = options.seed * 1_000_003 + round_
        if self._plan.trace:
            return Replay(self._plan.trace, self._words, options.scale, options.most_tokens, seed)
        return Conversations(preset(options), self._words, options.most_tokens, seed)

    def _tell(self, step: Step) -> None:
        verdict = "held" if step.held else f"broke: {step.why}"
        self._progress.tell(f"{step.rate:.3g} calls/s, {step.sent:,} calls: {verdict}")


def preset(options: Options) -> Preset:
    """Return the preset of the chosen workload, with the lengths that the flags set."""
    chosen = PRESETS[options.workload]
    if options.prompt:
        chosen = replace(chosen, prompt=Length(options.prompt, chosen.prompt.sigma))
    if options.answer:
        chosen = replace(chosen, answer=Length(options.answer, chosen.answer.sigma))
    return chosen.scaled(options.scale)
