"""What is asked of a simulated fleet: public traces, and overlaid copies of them for larger fleets."""

from __future__ import annotations

import csv
import heapq
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

BLOCK_TOKENS = 512
FOLDER_VARIABLE = "PADDOCK_TRACES"
MOONCAKE = "mooncake_synthetic_trace.jsonl"
"""kvcache-ai/Mooncake, FAST'25, Apache-2.0: 3,993 calls with an id per block of the prompt."""
AZURE = {"chat": "AzureLLMInferenceTrace_conv.csv", "code": "AzureLLMInferenceTrace_code.csv"}
"""Azure/AzurePublicDataset, CC-BY-4.0 (Splitwise, ISCA 2024): lengths alone, so no prompt shares anything."""

_COPY = 1 << 40
"""Block ids of one copy of a trace lie this far from those of the next."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One call as the trace has it."""

    at_s: float
    tokens: int
    """Of its prompt."""
    answer: int
    """Tokens of its answer."""
    blocks: tuple[int, ...] = ()
    """An id for each `BLOCK_TOKENS` of the prompt, the rest at its end included; equal ids are equal beginnings."""
    team: str = "team"
    slo_s: float = 0.0
    """The first token is wanted so soon after the call came; 0: it did not say."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Calls in the order in which they come."""

    name: str
    calls: tuple[Arrival, ...]

    @property
    def duration_s(self) -> float:
        return self.calls[-1].at_s

    @property
    def tokens_per_s(self) -> float:
        return sum(call.tokens for call in self.calls) / self.duration_s

    def first(self, calls: int) -> Trace:
        return Trace(self.name, self.calls[:calls])

    def turned(self, part: float) -> Trace:
        """The same calls, beginning at a later one, with those before it at the end."""
        return Trace(self.name, tuple(_turned(self, part * self.duration_s, 0)))


def traces_folder() -> Path | None:
    """Where the public traces lie, if they do: as `PADDOCK_TRACES` says, or in `shared/traces` beside the checkout."""
    named = os.environ.get(FOLDER_VARIABLE)
    folder = Path(named) if named else Path(__file__).resolve().parents[3] / "shared" / "traces"
    return folder if (folder / MOONCAKE).is_file() else None


def mooncake(path: Path) -> Trace:
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    calls = (
        Arrival(row["timestamp"] / 1000, row["input_length"], row["output_length"], tuple(row["hash_ids"]))
        for row in rows
    )
    return Trace("Mooncake", tuple(calls))


def azure(path: Path, name: str) -> Trace:
    with path.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    calls = (
        Arrival(at - times[0], int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        for at, row in zip(times, rows, strict=True)
    )
    return Trace(f"Azure {name}", tuple(calls))


def overlaid(trace: Trace, copies: int, end_s: float | None = None) -> Iterator[Arrival]:
    """So many copies at once, in order of time: each begins at another place of the trace, with block ids of its own.

    `end_s`: calls that come later are left out.
    """
    turned = (_turned(trace, copy / copies * trace.duration_s, copy * _COPY) for copy in range(copies))
    merged = heapq.merge(*turned, key=lambda call: call.at_s)
    return merged if end_s is None else itertools.takewhile(lambda call: call.at_s < end_s, merged)


def _turned(trace: Trace, by_s: float, offset: int) -> Iterator[Arrival]:
    first = next((place for place, call in enumerate(trace.calls) if call.at_s >= by_s), 0)
    for lap, calls in ((0.0, trace.calls[first:]), (trace.duration_s, trace.calls[:first])):
        for call in calls:
            blocks = tuple(block + offset for block in call.blocks)
            yield Arrival(call.at_s + lap - by_s, call.tokens, call.answer, blocks, call.team, call.slo_s)


def most_that_could_hit(calls: Iterable[Arrival]) -> float:
    """Part of all prompt tokens that one cache without bounds would have had."""
    seen: set[int] = set()
    cached = total = 0
    for call in calls:
        known = itertools.takewhile(seen.__contains__, call.blocks)
        cached += min(call.tokens, BLOCK_TOKENS * sum(1 for _ in known))
        total += call.tokens
        seen.update(call.blocks)
    return cached / total
