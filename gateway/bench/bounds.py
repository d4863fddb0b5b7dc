"""Reads and checks the bounds that a person sets: `ttft_p95<1.5` for a whole run, `ttft<1.5` for each call."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from gateway.bench.connection import Tape
from gateway.bench.document import Document, Spread, Verdict

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_FORM = re.compile(r"([a-z0-9_]+)\s*(<=|>=|<|>)\s*(\d+(?:\.\d+)?)\s*(ms|s|%)?")
_UNITS = {"ms": 1e-3, "%": 1e-2}
TIMES = ("ttft", "itl", "tpot", "e2e")
PARTS = tuple(name for name in Spread.__struct_fields__ if name != "count")
SINGLE: dict[str, Callable[[Document], float | None]] = {
    "error_share": lambda done: done.calls.failed / max(1, done.calls.failed + done.calls.finished),
    "errors": lambda done: float(done.calls.failed),
    "finished": lambda done: float(done.calls.finished),
    "tokens_per_s": lambda done: done.rates.tokens_per_s,
    "finished_per_s": lambda done: done.rates.finished_per_s,
    "cached_share": lambda done: done.tokens.cached_share,
    "goodput_share": lambda done: done.goodput.share if done.goodput else None,
}


class BoundUnusable(ValueError):
    """The text can't be read as bounds; the message says why, for a person."""


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound. `value` is in seconds if it is a time; a percentage is stored as a share (0 to 1)."""

    text: str
    name: str
    sign: str
    value: float

    def holds(self, found: float) -> bool:
        return _OPERATORS[self.sign](found, self.value)

    def verdict(self, document: Document) -> Verdict:
        found = _found(document, self.name)
        return Verdict(self.text, found, found is not None and self.holds(found))


def of_runs(text: str, flag: str) -> tuple[Bound, ...]:
    """Read a flag's text as bounds of a whole run. Raises BoundUnusable."""
    known = [f"{time}_{part}" for time in TIMES for part in PARTS] + list(SINGLE)
    return tuple(_read(part, flag, known, "ttft_p95<1.5,itl_p99<200ms,error_share<1%") for part in text.split(","))


def of_calls(text: str) -> tuple[Bound, ...]:
    """Read the text of `--slo` as bounds for each call. Raises BoundUnusable."""
    return tuple(_read(part, "--slo", TIMES, "ttft<1.5,itl<200ms") for part in text.split(","))


def met(bounds: tuple[Bound, ...], tape: Tape) -> bool:
    """Return whether a call succeeded and met all bounds. The `itl` of a call is its longest gap between two pieces."""
    if not tape.good:
        return False
    found: dict[str, Callable[[], float]] = {
        "ttft": lambda: tape.ttft_s,
        "itl": lambda: max(tape.gaps(), default=0.0),
        "tpot": lambda: tape.tpot_s,
        "e2e": lambda: tape.e2e_s,
    }
    return all(bound.holds(found[bound.name]()) for bound in bounds)


def _read(text: str, flag: str, known: list[str] | tuple[str, ...], example: str) -> Bound:
    form = _FORM.fullmatch(text.strip())
    if form is None:
        raise BoundUnusable(f"{flag}: {text.strip()!r} is no bound; give them like {example}")
    name, sign, value, unit = form.groups()
    if name not in known:
        raise BoundUnusable(f"{flag}: nothing is called {name}; there are {', '.join(known)}")
    return Bound(text.strip(), name, sign, float(value) * _UNITS.get(unit, 1.0))


def _found(document: Document, name: str) -> float | None:
    if name in SINGLE:
        return SINGLE[name](document)
    time, _, part = name.rpartition("_")
    spread: Spread = getattr(document, f"{time}_s")
    return float(getattr(spread, part)) if spread.count else None
