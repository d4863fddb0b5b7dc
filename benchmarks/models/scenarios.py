"""The points on which systems that load models on demand differ, each as something that happens and is looked at.

Every scenario begins with the models that it names, asks as callers do, and says what became of the calls; whether that
is as it should be is decided by the same rule for each system.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from benchmarks.models.calls import LIMIT_S, LOOK_S, Answer, Caller, watching
from benchmarks.models.files import LATE, MANUAL, SLOW, SLOWER, SMALL
from benchmarks.models.systems import PLACES

A, B, C, D = SMALL
NUM_WAITERS = 12
PAUSE_S = 0.3
TIMES = 3
"""How often a race is run."""
WASTE_S = 3.0
"""How long a load is looked for that nobody waits for any more."""
QUICK_S = 2.0
"""A caller who shall not wait is told within this time."""
NONE = "none"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a scenario showed."""

    said: str
    is_good: bool


class Unprepared(Exception):
    """A scenario could not begin; the message says why."""


async def have(caller: Caller, *models: str) -> None:
    """Have just these models loaded, those called last that stand last. Raises Unprepared."""
    system, session = caller.system, caller.session
    for model in await system.loaded(session):
        await system.order(session, "unload", model)
    await until(caller, lambda loaded: not loaded)
    for model in models:
        answer = await caller.ask(model)
        if not answer.is_answered:
            raise Unprepared(f"{model} was {answer.outcome}")
    await until(caller, lambda loaded: loaded == {*models})


async def until(caller: Caller, is_so: Callable[[frozenset[str]], bool], limit_s: float = LIMIT_S) -> frozenset[str]:
    """Return the loaded models once they are so. Raises Unprepared."""
    deadline = time.monotonic() + limit_s
    while not is_so(loaded := await caller.system.loaded(caller.session)):
        if time.monotonic() > deadline:
            raise Unprepared(f"{sorted(loaded)} are loaded, after {limit_s:g} s")
        await asyncio.sleep(LOOK_S)
    return loaded


def told(answers: Sequence[Answer]) -> str:
    """Return what became of calls in words: the longest wait of those that were answered, and all others."""
    waits = [answer.wait_s for answer in answers if answer.is_answered]
    parts = [f"{len(waits)} of {len(answers)} answered" + (f", the last after {max(waits):.1f} s" if waits else "")]
    return "; ".join([*parts, *sorted({answer.outcome for answer in answers if not answer.is_answered})])


def all_answered(answers: Collection[Answer]) -> bool:
    return all(answer.is_answered for answer in answers)


def in_order(answers: Sequence[Answer]) -> bool:
    """Return whether the first tokens came in the order of the calls."""
    firsts = [answer.first_at for answer in answers]
    return all_answered(answers) and firsts == sorted(firsts)


async def lru(caller: Caller) -> Outcome:
    """A and B are loaded, A is used again, C is called: B leaves."""
    await have(caller, A, B)
    await caller.ask(A)
    answer = await caller.ask(C)
    loaded = await until(caller, lambda loaded: C in loaded)
    left = sorted({A, B} - loaded)
    which = "the one used longest ago leaves" if left == [B] else f"{' and '.join(left)} of {A} and {B} left"
    return Outcome(f"{which}; the call is {answer.outcome}", left == [B] and answer.is_answered)


async def fifo(caller: Caller) -> Outcome:
    """Two models are loaded, four others are called one after the other: they are answered in that order."""
    await have(caller, SLOW, SLOWER)
    answers = await caller.ask_each(SMALL, PAUSE_S)
    order = ", ".join(str(answers.index(each) + 1) for each in sorted(answers, key=lambda each: each.first_at))
    return Outcome(f"{told(answers)}; in the order {order}", in_order(answers))


async def coalesced(caller: Caller) -> Outcome:
    """Many call a model that is not loaded: it is loaded once."""
    await have(caller)
    before = len(caller.system.loads())
    answers = await caller.ask_each([A] * NUM_WAITERS)
    num_loads = len(caller.system.loads()) - before
    said = f"{num_loads} load for {NUM_WAITERS} calls; {told(answers)}"
    return Outcome(said, num_loads == 1 and all_answered(answers))


async def busy(caller: Caller) -> Outcome:
    """A stream runs, other models are called in turn: its model stays, they share the other place."""
    await have(caller, SLOW, A)
    before = len(caller.system.loads())
    async with caller.streaming(SLOW) as stream:
        answers = [await caller.ask(model) for model in (B, C, B)]
        is_on, num = stream.is_unbroken, stream.num_tokens
        loads = caller.system.loads()[before:]
    fate = f"the stream runs on, {num} tokens" if is_on else f"the stream ended: {stream.error or f'{num} tokens'}"
    return Outcome(f"{fate}; {told(answers)}", is_on and SLOW not in loads and all_answered(answers))


async def crowded(caller: Caller) -> Outcome:
    """Both places have streams, a third model is called: it waits until one of them has ended."""
    await have(caller, SLOW, SLOWER)
    async with caller.streaming(SLOW) as first:
        async with caller.streaming(SLOWER) as second:
            waiting = caller.begin(A)
            await asyncio.sleep(WASTE_S)
            waits = not waiting.done() and first.is_unbroken and second.is_unbroken
        ended_at = time.monotonic()
        answer = await waiting
        stayed = first.is_unbroken
    said = "it waits" if waits else "a stream was ended for it, or it was refused"
    after = f", answered {answer.first_at - ended_at:.1f} s after a stream ended" if answer.is_answered else ""
    return Outcome(f"{said}{after or f', then {answer.outcome}'}", waits and stayed and answer.is_answered)


async def leaver(caller: Caller) -> Outcome:
    """A caller leaves while the call waits for a place: nothing is loaded for it, and the next one is answered."""
    await have(caller, SLOW, SLOWER)
    before = len(caller.system.loads())
    async with caller.streaming(SLOW), caller.streaming(SLOWER):
        gone = caller.begin(A)
        await asyncio.sleep(2 * PAUSE_S)
        gone.cancel()
        await asyncio.wait([gone])
        await asyncio.sleep(2 * PAUSE_S)
    await asyncio.sleep(WASTE_S)
    wasted = caller.system.loads()[before:]
    answer = await caller.ask(B)
    what = "nothing is loaded for it" if not wasted else f"{wasted[0]} is loaded for nobody"
    return Outcome(f"{what}; the next call is {answer.outcome}", not wasted and answer.is_answered)


async def autoload(caller: Caller) -> Outcome:
    """A model that calls do not load is called: the caller is told at once."""
    query = caller.system.manual_query()
    if query is None:
        return Outcome(NONE, False)
    await have(caller, A)
    before = len(caller.system.loads())
    answer = await caller.ask(MANUAL, query=query)
    is_told = 400 <= answer.status < 600 and answer.wait_s < QUICK_S and len(caller.system.loads()) == before
    status = await caller.system.order(caller.session, "load", MANUAL)
    await until(caller, lambda loaded: MANUAL in loaded)
    then = await caller.ask(MANUAL, query=query)
    how = f"refused with {answer.status} after {answer.wait_s:.2f} s" if answer.error else answer.outcome
    return Outcome(f"{how}; after a load by the API ({status}) {then.outcome}", is_told and then.is_answered)


async def by_api(caller: Caller) -> Outcome:
    """A model is loaded and unloaded by the API, the second time while a stream of it runs."""
    await have(caller)
    system, session = caller.system, caller.session
    began = time.monotonic()
    status = await system.order(session, "load", SLOW)
    if status:
        await until(caller, lambda loaded: SLOW in loaded)
    load = f"load: {status}, there after {time.monotonic() - began:.1f} s" if status else "load: none"
    async with caller.streaming(SLOW) as stream:
        unloaded = await system.order(session, "unload", SLOW)
        await asyncio.sleep(WASTE_S)
        is_on, num = stream.is_unbroken, stream.num_tokens
    await until(caller, lambda loaded: SLOW not in loaded)
    fate = "its stream runs on" if is_on else f"its stream ends after {num} tokens"
    again = await caller.ask(SLOW)
    said = f"{load}; unload: {unloaded}, {fate}; a call afterwards is {again.outcome}"
    return Outcome(said, status == 200 and unloaded == 200 and is_on and again.is_answered)


async def reload(caller: Caller) -> Outcome:
    """A model comes into the configuration while a stream of another one runs: both go on."""
    await have(caller, SLOW)
    async with caller.streaming(SLOW) as stream:
        began = time.monotonic()
        await caller.system.add_late(caller.session)
        answer = await caller.ask(LATE)
        while not answer.is_answered and time.monotonic() - began < LIMIT_S:
            await asyncio.sleep(PAUSE_S)
            answer = await caller.ask(LATE)
        took_s, is_on = time.monotonic() - began, stream.is_unbroken
    fate = "the stream runs on" if is_on else "the stream is broken"
    what = f"answers {took_s:.1f} s after the change" if answer.is_answered else answer.outcome
    return Outcome(f"the new model {what}; {fate}", is_on and answer.is_answered)


async def cold(caller: Caller) -> Outcome:
    """Nothing is loaded, and as many models as fit are called at the same moment, then twice as many."""
    answers: list[Answer] = []
    most = 0
    for number in range(TIMES):
        await have(caller)
        async with counting(caller) as counted:
            answers += await caller.ask_each(SMALL[: PLACES if number == 0 else 2 * PLACES])
        most = max(most, *counted)
    said = f"{told(answers)}; at most {most} loaded at once"
    return Outcome(said, all_answered(answers) and most <= PLACES)


async def evicted(caller: Caller) -> Outcome:
    """All places have idle models, and two others are called at the same moment, one of them again at once."""
    answers: list[Answer] = []
    for _ in range(TIMES):
        await have(caller, SLOW, SLOWER)
        answers += await caller.ask_each((A, B, C, A))
    return Outcome(told(answers), all_answered(answers))


async def health(caller: Caller) -> Outcome:
    """While a model loads, the system says that it is well, and which model loads."""
    await have(caller)
    async with watching(caller, "/health") as seen:
        await asyncio.sleep(PAUSE_S)
        answer = await caller.ask(SLOWER)
    others = [status for status in seen.statuses if status != 200]
    said = f"{len(seen.statuses)} asked, the slowest took {max(seen.times_s) * 1e3:.0f} ms"
    said += f"; {len(others)} of them {others[0]}" if others else ", all 200"
    return Outcome(f"{said}; the call is {answer.outcome}", not others and answer.is_answered)


@asynccontextmanager
async def counting(caller: Caller) -> AsyncIterator[list[int]]:
    """Yield how many models are loaded, noted again and again."""
    found = [0]

    async def count() -> None:
        while True:
            found.append(len(await caller.system.loaded(caller.session)))
            await asyncio.sleep(5 * LOOK_S)

    task = asyncio.create_task(count())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.wait([task])


Scenario = Callable[[Caller], Awaitable[Outcome]]

POINTS: dict[str, tuple[str, Scenario]] = {
    "lru": ("LRU eviction", lru),
    "fifo": ("FIFO of waiters", fifo),
    "coalesced": (f"{NUM_WAITERS} callers of one cold model", coalesced),
    "busy": ("busy models are never evicted", busy),
    "crowded": ("all places busy", crowded),
    "leaver": ("a caller leaves while waiting", leaver),
    "autoload": ("autoload off", autoload),
    "api": ("load and unload by the API", by_api),
    "cold": ("cold models called at the same moment (llama.cpp 28774)", cold),
    "evicted": ("waiters while idle models are evicted (28443)", evicted),
    "health": ("health while loading (28829)", health),
    "reload": ("reload of the configuration", reload),
}
"""`reload` comes last: it changes the configuration."""
