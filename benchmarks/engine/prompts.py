"""What is asked: token ids drawn at random, always the same ones, the same for both sides."""

from __future__ import annotations

import random
from dataclasses import dataclass

LEAST_TOKEN, MOST_TOKEN = 1_000, 100_000
"""Plain tokens of the synthetic models' vocabulary; what controls a model lies above 151,000."""


def tokens(label: str, count: int) -> tuple[int, ...]:
    """`count` token ids that belong to the label; two labels' first tokens differ as good as always."""
    draw = random.Random(label)
    return tuple(draw.randrange(LEAST_TOKEN, MOST_TOKEN) for _ in range(count))


@dataclass(frozen=True, slots=True)
class Conversation:
    """A caller who comes back. Each turn's prompt is the last one, the reply to it and a new question.

    The reply is a fixed run of tokens and not what the model said: text of random weights cannot be tokenised back to
    what made it, and both sides must be asked the same. So both lose the KV of the tokens that they generated, and
    nothing else.
    """

    label: str
    first: int
    """Tokens of the first prompt."""
    reply: int
    question: int

    def prompt(self, turn: int) -> tuple[int, ...]:
        """Turns count from 0."""
        prompt = tokens(f"{self.label}/first", self.first)
        for earlier in range(turn):
            prompt += tokens(f"{self.label}/reply {earlier}", self.reply)
            prompt += tokens(f"{self.label}/question {earlier}", self.question)
        return prompt
