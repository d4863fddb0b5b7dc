"""Decoding alone: tokens per second of 1, 8 and 16 callers, and what a cache full of idle prefixes costs."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.engine.bench import Bench, Model
from benchmarks.engine.calls import Call, Samples, decode_rate, total_s
from benchmarks.engine.prompts import tokens
from benchmarks.engine.servers import Client, Shape, at_once, paddock, reference
from benchmarks.load import cpu_seconds
from benchmarks.table import Row

BARS = {1: 1.0, 8: 0.95, 16: 0.95}
SHAPE = Shape(slots=16, ctx=512)
PROMPT = 32
IDLE_BAR = 0.9
IDLE_CALLERS = (1, 8)
IDLE_PROMPT = 480
SIDES = {"llama-server": reference(), "Paddock": paddock()}

Figures = dict[tuple[str, int], Samples]


async def measure(bench: Bench) -> list[Row]:
    rows: list[Row] = []
    for model, num_predict, rounds in (
        (bench.big, 48, bench.rounds(3)),
        (bench.toy, 160, bench.rounds(3)),
    ):
        rows += await compare(bench, model, num_predict, rounds)
    rows += await idle(bench, bench.toy, bench.rounds(3))
    if not bench.quick:
        rows += await idle(bench, bench.big, bench.rounds(1))
    return rows


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second."""

    decoding: float
    """While all callers decode."""
    whole: float
    """From the first call to the last answer's end, prompts included."""
    per_cpu: float
    """The same by the server's processor time: what other programs on the machine disturb less."""

    def __str__(self) -> str:
        return f"{self.decoding:.1f} tokens/s, {self.whole:.1f} with prompts, {self.per_cpu:.1f} by processor time"


async def rate(client: Client, label: str, callers: int, num_predict: int) -> Speed:
    calls = [Call(tokens(f"{label}/{callers}/{number}", PROMPT), num_predict) for number in range(callers)]
    cpu_before = cpu_seconds((client.pid,))
    answers = await at_once(client, calls)
    cpu_s = cpu_seconds((client.pid,)) - cpu_before
    num_tokens = sum(answer.num_tokens for answer in answers)
    return Speed(decode_rate(answers), num_tokens / total_s(answers), num_tokens / cpu_s)


async def compare(bench: Bench, model: Model, num_predict: int, rounds: int) -> list[Row]:
    decoding: Figures = {}
    whole: Figures = {}
    per_cpu: Figures = {}
    for number in range(rounds):
        for side, serve in SIDES.items():
            async with serve(bench.stack, model.path, SHAPE) as client:
                await rate(client, f"warm {number}", 2, 8)
                for callers in BARS:
                    # One answer alone is short: a longer one tells as much as the many do.
                    length = num_predict * 2 if callers == 1 else num_predict
                    speed = await rate(client, f"decode {number}", callers, length)
                    decoding.setdefault((side, callers), Samples()).add(speed.decoding)
                    whole.setdefault((side, callers), Samples()).add(speed.whole)
                    per_cpu.setdefault((side, callers), Samples()).add(speed.per_cpu)
                    bench.say(f"decode, {model.name}, {side}, {counted(callers)}: {speed}")
    rows = []
    for callers, bar in BARS.items():
        what = f"decode, {model.name}, {counted(callers)}"
        rows.append(row(what, decoding, callers, bar))
        rows.append(row(f"{what}, prompts included", whole, callers, None))
        rows.append(row(f"{what}, prompts included, by processor time", per_cpu, callers, None))
    return rows


def counted(callers: int) -> str:
    return f"{callers} caller{'s' if callers > 1 else ''}"


def row(what: str, figures: Figures, callers: int, bar: float | None) -> Row:
    ours, theirs = figures["Paddock", callers], figures["llama-server", callers]
    ratio = ours.median / theirs.median
    figure = f"{ours.text(1)} against {theirs.text(1)} tokens/s"
    return Row(what, figure, f"{ratio:.2f} x", f">= {bar} x" if bar else "", bar is None or ratio >= bar)


async def idle(bench: Bench, model: Model, rounds: int) -> list[Row]:
    """The same worker before and after other callers' prompts have filled its cache."""
    before: dict[int, Samples] = {callers: Samples() for callers in IDLE_CALLERS}
    after: dict[int, Samples] = {callers: Samples() for callers in IDLE_CALLERS}
    num_predict = 160 if model is bench.toy else 48
    filling = [Call(tokens(f"idle {number}", IDLE_PROMPT), 1) for number in range(SHAPE.kv_tokens // IDLE_PROMPT + 2)]
    for number in range(rounds):
        async with paddock()(bench.stack, model.path, SHAPE) as client:
            await rate(client, "warm", 2, 8)
            for callers, samples in before.items():
                samples.add((await rate(client, f"empty {number}", callers, num_predict)).decoding)
            for start in range(0, len(filling), SHAPE.slots):
                await at_once(client, filling[start : start + SHAPE.slots])
            for callers, samples in after.items():
                samples.add((await rate(client, f"full {number}", callers, num_predict)).decoding)
                bench.say(f"idle prefixes, {model.name}, {counted(callers)}: {samples.values[-1]:.1f} tokens/s")
    rows = []
    for callers in IDLE_CALLERS:
        ratio = after[callers].median / before[callers].median
        what = f"decode with {SHAPE.kv_tokens:,} cells of idle prefixes, {model.name}, {counted(callers)}"
        figure = f"{after[callers].text(1)} against {before[callers].text(1)} tokens/s with an empty cache"
        rows.append(Row(what, figure, f"{ratio:.2f} x", f">= {IDLE_BAR} x", ratio >= IDLE_BAR))
    return rows
