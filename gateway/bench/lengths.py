"""The lengths of prompts, answers and conversations by workload: log-normal lengths, geometric turns.

The medians follow published traces: Azure's chats have 1,155 tokens in and 211 out in the mean, its code 2,047 and 28
(Splitwise, ISCA 2024); Mooncake's agents re-send long histories and answer briefly (FAST'25).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log
from random import Random


@dataclass(frozen=True, slots=True)
class Length:
    """A distribution of lengths in tokens. `sigma` is the standard deviation of the logarithm; 0: always the median."""

    median: float
    sigma: float

    def draw(self, chance: Random) -> int:
        return max(1, round(chance.lognormvariate(log(self.median), self.sigma)))


@dataclass(frozen=True, slots=True)
class Preset:
    """One workload. Each conversation has one of `systems` system prompts, and `turns` turns in the mean."""

    name: str
    summary: str
    systems: int
    system: Length
    prompt: Length
    """Tokens that each turn adds."""
    answer: Length
    turns: float

    def scaled(self, by: float) -> Preset:
        """Return the preset with all lengths times `by`, for models with a small context."""
        system, prompt, answer = (
            replace(length, median=max(1.0, length.median * by)) for length in (self.system, self.prompt, self.answer)
        )
        return replace(self, system=system, prompt=prompt, answer=answer)


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("chat", "people who talk", 4, Length(250, 0.3), Length(60, 1.0), Length(180, 0.7), 4.0),
        Preset("code", "completions in an editor", 2, Length(400, 0.2), Length(1_500, 0.7), Length(30, 0.9), 1.5),
        Preset("rag", "a question with documents", 2, Length(300, 0.2), Length(3_000, 0.5), Length(220, 0.5), 1.2),
        Preset("agent", "tools called in a loop", 2, Length(2_500, 0.2), Length(300, 1.0), Length(80, 0.8), 10.0),
    )
}
