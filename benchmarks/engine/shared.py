"""One system prompt, many callers: how long until all have their answers."""

from __future__ import annotations

from benchmarks.engine.bench import Bench
from benchmarks.engine.calls import Call, Samples, total_s, ttft_p50_s
from benchmarks.engine.prompts import tokens
from benchmarks.engine.servers import Shape, at_once, paddock, reference
from benchmarks.table import Row

SHAPE = Shape(slots=8, ctx=2048)
CALLERS = 16
SHARED, OWN, NUM_PREDICT = 1450, 50, 32
BAR = 1 / 3


async def measure(bench: Bench) -> list[Row]:
    model = bench.big
    totals = {"llama-server": Samples(), "Paddock": Samples()}
    waits = {"llama-server": Samples(), "Paddock": Samples()}
    for number in range(bench.rounds(2)):
        for side, serve in (("llama-server", reference()), ("Paddock", paddock())):
            shared = tokens(f"shared {number}", SHARED)
            calls = [Call(shared + tokens(f"own {number}/{one}", OWN), NUM_PREDICT) for one in range(CALLERS)]
            async with serve(bench.stack, model.path, SHAPE) as client:
                answers = await at_once(client, calls)
            totals[side].add(total_s(answers))
            waits[side].add(ttft_p50_s(answers))
            computed = sum(answer.num_prompt - answer.num_cached for answer in answers)
            bench.say(f"shared prompt, {side}: {totals[side].values[-1]:.1f} s, {computed:,} prompt tokens computed")
    ours, theirs = totals["Paddock"], totals["llama-server"]
    ratio = ours.median / theirs.median
    what = f"{CALLERS} callers, {SHAPE.slots} slots, {SHARED:,} shared + {OWN} own tokens, {model.name}"
    return [
        Row(
            f"{what}: time for all",
            f"{ours.text(1)} against {theirs.text(1)} s",
            f"{ratio:.2f} x",
            "<= 1/3",
            ratio <= BAR,
        ),
        Row(
            f"{what}: TTFT p50",
            f"{waits['Paddock'].text(1)} against {waits['llama-server'].text(1)} s",
            f"{waits['Paddock'].median / waits['llama-server'].median:.2f} x",
            "",
            True,
        ),
    ]
