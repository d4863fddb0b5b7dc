"""Callers who come back: whether a conversation's earlier turns are still known, and after a restart too."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from benchmarks.engine.bench import Bench, Model
from benchmarks.engine.calls import Answer, Call, Samples, Unmeasured, ttft_p50_s
from benchmarks.engine.prompts import Conversation
from benchmarks.engine.servers import Client, Serve, Shape, in_order, paddock, reference
from benchmarks.table import Row
from workers.settings import WorkerSettings

SHAPE = Shape(slots=8, ctx=1024)
CONVERSATIONS, TURNS, CALLERS = 24, 4, 8
FIRST, REPLY, QUESTION, NUM_PREDICT = 256, 16, 32, 16
BAR, RESTARTED_BAR = 1.0, 1 / 3
SIDES = ("llama-server", "Paddock")


def turn_calls(label: str, turn: int) -> list[Call]:
    """One turn of every conversation, always in the same order: a slot has served others when its caller is back."""
    conversations = [Conversation(f"{label}/{number}", FIRST, REPLY, QUESTION) for number in range(CONVERSATIONS)]
    return [Call(conversation.prompt(turn), NUM_PREDICT) for conversation in conversations]


async def measure(bench: Bench) -> list[Row]:
    """Every turn on one server."""
    model = bench.toy if bench.quick else bench.big
    waits = {side: Samples() for side in SIDES}
    for number in range(bench.rounds(2)):
        for side, serve in (("llama-server", reference()), ("Paddock", paddock())):
            later: list[Answer] = []
            async with serve(bench.stack, model.path, SHAPE) as client:
                for turn in range(TURNS):
                    answers = await talk(bench, client, f"{number}", turn, side)
                    later += answers if turn else []
            waits[side].add(ttft_p50_s(later))
    return [row(f"{CONVERSATIONS} conversations, {TURNS} turns, {SHAPE.slots} slots, {model.name}", waits, BAR)]


async def measure_restarted(bench: Bench) -> list[Row]:
    """A server of its own for every turn. Ours keeps its prefixes on disk; llama-server has nothing to keep them in."""
    if "cache_dir" not in WorkerSettings.model_fields:
        raise Unmeasured("this worker has no setting `cache_dir`: it keeps nothing on disk")
    model = bench.toy if bench.quick else bench.big
    waits = {side: Samples() for side in SIDES}
    for number in range(bench.rounds(1)):
        for side in SIDES:
            folder = Path(tempfile.mkdtemp(prefix="pd-cache-"))
            try:
                serve = reference() if side == "llama-server" else paddock(cache_dir=folder)
                waits[side].add(await restarted(bench, serve, model, f"restarted {number}", side))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    what = f"{CONVERSATIONS} conversations, {TURNS} turns, restarted between the turns, {model.name}"
    return [row(what, waits, RESTARTED_BAR)]


async def restarted(bench: Bench, serve: Serve, model: Model, label: str, side: str) -> float:
    """-> TTFT p50 of the turns after the first, seconds."""
    later: list[Answer] = []
    for turn in range(TURNS):
        async with serve(bench.stack, model.path, SHAPE) as client:
            answers = await talk(bench, client, label, turn, side)
            later += answers if turn else []
    return ttft_p50_s(later)


async def talk(bench: Bench, client: Client, label: str, turn: int, side: str) -> list[Answer]:
    answers = await in_order(client, turn_calls(label, turn), CALLERS)
    computed = sum(answer.num_prompt - answer.num_cached for answer in answers) / len(answers)
    bench.say(
        f"conversations {label}, {side}, turn {turn + 1}: TTFT p50 {ttft_p50_s(answers):.2f} s, "
        f"{computed:.0f} of {answers[0].num_prompt} prompt tokens computed"
    )
    return answers


def row(what: str, waits: dict[str, Samples], bar: float) -> Row:
    ours, theirs = waits["Paddock"], waits["llama-server"]
    ratio = ours.median / theirs.median
    figure = f"{ours.text(2)} against {theirs.text(2)} s"
    shown = "<= 1/3" if bar == RESTARTED_BAR else f"<= {bar} x"
    return Row(f"{what}: TTFT p50 of turns 2 to {TURNS}", figure, f"{ratio:.2f} x", shown, ratio <= bar)
