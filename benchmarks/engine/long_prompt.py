"""A long prompt comes while others are being answered: how long they stall, and how long it waits itself."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from benchmarks.engine.bench import Bench, Model
from benchmarks.engine.calls import Answer, Call, Samples, Unmeasured
from benchmarks.engine.prompts import tokens
from benchmarks.engine.servers import Client, Serve, Shape, paddock, reference
from benchmarks.table import Row

GAP_BAR = 1 / 5
TTFT_BAR = 1.5
EQUAL = 1.05
"""Times that differ by less are the same: rounds scatter by as much."""
STREAM_PROMPT = 32
WARM_TOKENS = 8
"""What each stream has said before the long prompt comes."""
AFTER_TOKENS = 4
"""What the long prompt's answer has to say before the streams are cut."""
DEADLINE_S = 900.0
BATCHES = (64, 128, 256, 512)
DEFAULTS = "llama-server"


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    model: Model
    streams: int
    long: int
    """Tokens of the long prompt."""
    ctx: int
    batches: tuple[int, ...]
    rounds: int

    @property
    def shape(self) -> Shape:
        return Shape(self.streams + 1, self.ctx)


@dataclass(slots=True)
class Figures:
    """Seconds; one value per round."""

    gap: Samples = field(default_factory=Samples)
    ttft: Samples = field(default_factory=Samples)

    def text(self) -> str:
        return f"gap {self.gap.text(2)} s, TTFT {self.ttft.text(1)} s"


def cases(bench: Bench) -> list[Case]:
    batches = (256,) if bench.quick else BATCHES
    models = (bench.toy, bench.big) if bench.patient else (bench.toy,)
    return [
        Case("3k prompt, 3 streams", bench.big, 3, 3000, 4096, batches, bench.rounds(2)),
        *(Case("16k prompt, 7 streams", model, 7, 16000, 17000, batches, bench.rounds(1)) for model in models),
    ]


async def measure(bench: Bench) -> list[Row]:
    rows: list[Row] = []
    for case in cases(bench):
        sides: dict[str, Serve] = {DEFAULTS: reference(), "Paddock": paddock()}
        for batch in case.batches:
            sides[f"llama-server -b {batch} -ub {batch}"] = reference("-b", str(batch), "-ub", str(batch))
        figures = {side: Figures() for side in sides}
        for number in range(case.rounds):
            for side, serve in sides.items():
                async with serve(bench.stack, case.model.path, case.shape) as client:
                    gap_s, ttft_s = await beside(client, case, f"{case.name} {number}")
                figures[side].gap.add(gap_s)
                figures[side].ttft.add(ttft_s)
                bench.say(f"{case.name}, {case.model.name}, {side}: gap {gap_s:.2f} s, TTFT {ttft_s:.1f} s")
        rows += judge(f"{case.name}, {case.model.name}", figures)
    return rows


async def beside(client: Client, case: Case, label: str) -> tuple[float, float]:
    """-> longest gap of the streams while the long prompt was read, and its time to first token, both in seconds."""
    streams = [Answer() for _ in range(case.streams)]
    long = Answer()
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        tasks = []
        for number, answer in enumerate(streams):
            prompt = tokens(f"{label}/stream {number}", STREAM_PROMPT)
            tasks.append(group.create_task(client.ask(Call(prompt, case.ctx - STREAM_PROMPT - 1), answer)))
        for answer in streams:
            await answer.said(WARM_TOKENS)
        call = Call(tokens(f"{label}/long", case.long), case.ctx - case.long - 1)
        tasks.append(group.create_task(client.ask(call, long)))
        await long.said(AFTER_TOKENS)
        for task in tasks:
            task.cancel()
    if any(answer.ended for answer in streams):
        raise Unmeasured("a stream ended before the long prompt was read; give the case a larger ctx")
    until = long.arrivals[0]
    gaps = [gap for answer in streams for gap in answer.gaps_s(long.sent, until)]
    return max(gaps), long.ttft_s


def judge(what: str, figures: dict[str, Figures]) -> list[Row]:
    """Rows with bars against the defaults and against the best `-b/-ub`, then every setting's figures."""
    ours, theirs = figures["Paddock"], figures[DEFAULTS]
    gap, ttft = ours.gap.median / theirs.gap.median, ours.ttft.median / theirs.ttft.median
    rows = [
        Row(
            f"{what}: longest gap",
            f"{ours.gap.text(2)} against {theirs.gap.text(2)} s",
            f"{gap:.2f} x",
            "<= 1/5",
            gap <= GAP_BAR,
        ),
        Row(
            f"{what}: TTFT of the long prompt",
            f"{ours.ttft.text(1)} against {theirs.ttft.text(1)} s",
            f"{ttft:.2f} x",
            f"<= {TTFT_BAR} x",
            ttft <= TTFT_BAR,
        ),
        against_best(what, figures),
    ]
    rows += [Row(f"{what}: {side}", one.text(), "", "", True) for side, one in figures.items()]
    return rows


def against_best(what: str, figures: dict[str, Figures]) -> Row:
    """The shortest gap of all its settings whose long prompt waits no longer than ours."""
    ours = figures["Paddock"]
    equal = {
        side: one for side, one in figures.items() if side != "Paddock" and one.ttft.median <= ours.ttft.median * EQUAL
    }
    bar = "no longer gap at equal TTFT, within 5 %"
    if not equal:
        return Row(f"{what}: against its best -b/-ub", "each of its settings waits longer", "", bar, True)
    best = min(equal, key=lambda side: equal[side].gap.median)
    ratio = ours.gap.median / equal[best].gap.median
    figure = f"{ours.text()} against {equal[best].text()} ({best})"
    return Row(f"{what}: against its best -b/-ub", figure, f"{ratio:.2f} x", bar, ratio <= EQUAL)
