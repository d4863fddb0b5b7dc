"""One call of a benchmark, what was seen of its answer, and the figures that follow from that."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


class Unmeasured(RuntimeError):
    """A side did not do what was asked of it, so there is no figure; the message says what it did instead."""


@dataclass(frozen=True, slots=True)
class Call:
    prompt: tuple[int, ...] | str
    """Token ids, the same for both sides; text where one of them takes no tokens."""
    num_predict: int


@dataclass(slots=True)
class Answer:
    """Filled while the answer comes in. Times are `time.perf_counter` seconds."""

    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """When each piece of the answer came."""
    counts: list[int] = field(default_factory=list)
    """Tokens of each piece: more than one where the first did not make a whole character."""
    ended: float = 0.0
    num_prompt: int = 0
    num_cached: int = 0
    """Prompt tokens that the server did not have to compute, by its own count."""

    heard: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with each piece."""

    def note(self, now: float, num_tokens: int) -> None:
        self.arrivals.append(now)
        self.counts.append(num_tokens)
        self.heard.set()

    async def said(self, num_pieces: int) -> None:
        """Returns when so many pieces have come."""
        while len(self.arrivals) < num_pieces:
            self.heard.clear()
            await self.heard.wait()

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def ttft_s(self) -> float:
        """Raises Unmeasured where no token came."""
        if not self.arrivals:
            raise Unmeasured("an answer without a token")
        return self.arrivals[0] - self.sent

    def gaps_s(self, since: float, until: float) -> list[float]:
        """Waits between two pieces that lie in the given time, in part at least."""
        return [after - before for before, after in pairwise(self.arrivals) if after > since and before < until]


def decode_rate(answers: Sequence[Answer]) -> float:
    """Tokens per second of all together, from the last one's first token to the first one's last.

    Each answer's rate is taken between its own tokens, so that it does not matter on which side of the borders the
    others' tokens of the same step fall. Raises Unmeasured where they do not overlap.
    """
    if not all(answer.arrivals for answer in answers):
        raise Unmeasured("an answer without a token")
    start = max(answer.arrivals[0] for answer in answers)
    end = min(answer.arrivals[-1] for answer in answers)
    rate = 0.0
    for answer in answers:
        inside = [(at, count) for at, count in zip(answer.arrivals, answer.counts, strict=True) if start <= at <= end]
        if len(inside) < 2:
            raise Unmeasured("the answers did not overlap long enough to tell their speed; ask for longer ones")
        rate += sum(count for _, count in inside[1:]) / (inside[-1][0] - inside[0][0])
    return rate


def total_s(answers: Sequence[Answer]) -> float:
    """From the first call's start to the last one's end."""
    return max(answer.ended for answer in answers) - min(answer.sent for answer in answers)


def ttft_p50_s(answers: Sequence[Answer]) -> float:
    return statistics.median(answer.ttft_s for answer in answers)


@dataclass(slots=True)
class Samples:
    """One figure, once per round."""

    values: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        self.values.append(value)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def text(self, digits: int, factor: float = 1.0) -> str:
        """`12.3 (11.9-12.8)`: the median and the least and the most of all rounds."""
        shown = [f"{value * factor:,.{digits}f}" for value in (self.median, min(self.values), max(self.values))]
        return shown[0] if len(self.values) < 2 else f"{shown[0]} ({shown[1]}-{shown[2]})"
