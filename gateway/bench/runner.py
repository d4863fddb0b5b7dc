"""Runs a whole benchmark: probe, run or search, document."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from random import Random

import msgspec

from gateway.bench import probe
from gateway.bench.arrivals import arrivals
from gateway.bench.asks import Source
from gateway.bench.connection import Target
from gateway.bench.conversations import Conversations
from gateway.bench.document import Document, Step
from gateway.bench.driver import Caller, Driver, Form, Span
from gateway.bench.findings import Frame, document
from gateway.bench.lengths import PRESETS, Length, Preset
from gateway.bench.limit import search
from gateway.bench.options import Options
from gateway.bench.progress import Progress
from gateway.bench.traces import Recorded, Replay
from gateway.bench.words import Words

FIRST_RATE = 1.0
"""Calls per second at which a search for the limit begins."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The inputs of a benchmark. `trace` is empty where conversations are made up."""

    options: Options
    there: Target
    form: Form
    callers: Sequence[Caller]
    trace: Sequence[Recorded] = ()


class Runner:
    """One benchmark; call `run` once."""

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self._plan = plan
        self._progress = progress
        self._words = Words(plan.options.seed)
        self._driver: Driver | None = None
        self._stopped = False

    async def run(self) -> Document:
        """Run the benchmark. SIGINT and SIGTERM end it; the results so far are returned. Raises BenchUnusable."""
        plan, options = self._plan, self._plan.options
        await probe.calibrate(plan.there, plan.form, plan.callers[0], self._words)
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
        # Other prompts at each rate: those of the last one are cached.
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
        # A random generator of its own: the times of calls do not depend on their prompts.
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
    """Return the workload's preset as the flags change it."""
    chosen = PRESETS[options.workload]
    if options.prompt:
        chosen = replace(chosen, prompt=Length(options.prompt, chosen.prompt.sigma))
    if options.answer:
        chosen = replace(chosen, answer=Length(options.answer, chosen.answer.sigma))
    return chosen.scaled(options.scale)
