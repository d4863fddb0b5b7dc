"""The yardstick for what an engine says: one sequence on a context driven by hand, the prompt in one step, greedy.

An engine's greedy text is the same except from a step on where the best two tokens were closer than the model's
measured tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.support.lone_context import LoneContext
from tests.support.tolerance import Tolerance
from workers.engine.step.answer_text import AnswerText

UNCERTAIN_STEPS = 4
"""A character may be made of so many tokens: by the text alone a difference is known no nearer."""


@dataclass(frozen=True, slots=True)
class Spoken:
    """What a model says alone, and by how much each token was ahead of the next best."""

    tokens: list[int]
    gaps: list[float]


class Alone:
    """The yardstick: one model, driven by hand."""

    def __init__(self, lone: LoneContext, tolerance: Tolerance) -> None:
        self.lone = lone
        self.tolerance = tolerance
        self._vocab = lone.model.vocab
        self._banned = sorted({*self._vocab.suppressed, *self._vocab.eog})

    def speak(self, prompt: Sequence[int], num_tokens: int) -> Spoken:
        spoken = Spoken([], [])
        self.lone.memory.clear()
        logits = self.lone.feed(0, prompt)
        for position in range(len(prompt), len(prompt) + num_tokens):
            logits[self._banned] = -np.inf
            second, first = np.partition(logits, -2)[-2:]
            spoken.tokens.append(int(logits.argmax()))
            spoken.gaps.append(float(first - second))
            (logits,) = self.lone.step((0, spoken.tokens[-1], position))
        return spoken

    def text(self, tokens: Sequence[int]) -> str:
        answer = AnswerText()
        return "".join(answer.push(self._vocab.piece(token)) for token in tokens) + answer.finish()

    def differences(self, prompts: Sequence[Sequence[int]], texts: Sequence[str], num_tokens: int) -> int:
        """-> how many of these answers of `num_tokens` differ; asserts that each of them may."""
        count = 0
        for prompt, text in zip(prompts, texts, strict=True):
            spoken = self.speak(prompt, num_tokens)
            if text == self.text(spoken.tokens):
                continue
            count += 1
            agreed = max(step for step in range(num_tokens) if text.startswith(self._settled(spoken.tokens[:step])))
            closest = min(spoken.gaps[max(0, agreed - UNCERTAIN_STEPS) : agreed + 1])
            assert closest < self.tolerance.gap, (
                f"differs about token {agreed}, where the best two were {closest:.4f} apart"
                f" (tolerance {self.tolerance.gap:.4f}): {text!r}, not {self.text(spoken.tokens)!r}"
            )
        return count

    def _settled(self, tokens: Sequence[int]) -> str:
        """Without a character that may still be going on."""
        answer = AnswerText()
        return "".join(answer.push(self._vocab.piece(token)) for token in tokens)
