"""Searches for the highest rate of calls at which objectives hold: doubles it until they break, then narrows it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gateway.bench.bounds import Bound
from gateway.bench.document import Document, Limit, Step, Verdict

CLOSE_ENOUGH = 1.1
"""Ratio of the lowest rate that broke to the highest that held at which the search ends."""
MOST_STEPS = 20
MOST_FAILED = 0.01


async def search(
    measured: Callable[[float], Awaitable[Document]],
    objectives: tuple[Bound, ...],
    first_rate: float,
    tell: Callable[[Step], None],
) -> tuple[Document, Limit]:
    """Return the limit, and the document of the best step that held, or of the first one if none did."""
    steps: list[Step] = []
    told: Document | None = None
    low, high, rate = 0.0, 0.0, first_rate
    for _ in range(MOST_STEPS):
        found = await measured(rate)
        told = told or found
        step = judged(found, objectives, rate)
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


def judged(found: Document, objectives: tuple[Bound, ...], rate: float) -> Step:
    """Return the step's result. Saturation of the generator breaks it too: it did not measure the server then."""
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
