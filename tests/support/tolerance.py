"""How far a model's logits move when nothing changes but the layout of batches and cells.

Sums of floats depend on their order: how a prompt is cut into steps, who computes beside, where cells lie. What is
measured here bounds that for one model and its settings; greedy text may differ where the best two tokens are closer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.support.lone_context import Logits, LoneContext, lone_context
from workers.llama.model import Model
from workers.models.spec import LlamaSettings

MARGIN = 2.0
"""A sample of layouts is not all of them."""
ROUNDING = 2.0**-10
"""Of the logits' deviation: keys and values are stored in 16 bits, and the last one may round either way."""

PROMPT_TOKENS, ANSWER_TOKENS = 60, 12
NEEDED_TOKENS = 4 * (PROMPT_TOKENS + ANSWER_TOKENS)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest differences of a logit from the sequence computed alone, its prompt in one step."""

    chunked: float
    """The prompt in steps of 7 and of 32."""
    elsewhere: float
    """In cells behind another sequence's, the prompt's second half in front of its first."""
    beside: float
    """Decoding in one batch with three others."""
    shared: float
    """Half of the prompt in cells that another sequence computed."""
    deviation: float
    """Of the logits themselves, to judge the others by."""

    @property
    def gap(self) -> float:
        """Two tokens closer than this may change places: each logit moves by as much as was seen, and some more."""
        seen = max(self.chunked, self.elsewhere, self.beside, self.shared, ROUNDING * self.deviation)
        return 2 * MARGIN * seen


def measure_tolerance(
    model: Model | Path, *, tokens: Sequence[int] | None = None, llama: LlamaSettings | None = None
) -> Tolerance:
    """`tokens`: what is read, `NEEDED_TOKENS` of them; random ones if left out. Computes four times as many."""
    with lone_context(model, kv_tokens=1024, llama=llama) as lone:
        if tokens is None:
            high = lone.model.vocab.num_tokens
            tokens = [int(token) for token in np.random.default_rng(3).integers(high // 10, high, NEEDED_TOKENS)]
        length = NEEDED_TOKENS // 4
        texts = [list(tokens[start : start + length]) for start in range(0, NEEDED_TOKENS, length)]
        alone = _alone(lone, texts[0])
        return Tolerance(
            chunked=max(_largest(alone, _alone(lone, texts[0], chunk)) for chunk in (7, 32)),
            elsewhere=_largest(alone, _elsewhere(lone, texts)),
            beside=_largest(alone, _beside(lone, texts)),
            shared=_largest(alone, _shared(lone, texts)) if lone.memory.kind.by_range else 0.0,
            deviation=float(np.std(alone[0])),
        )


def _largest(left: list[Logits], right: list[Logits]) -> float:
    return max(float(np.abs(one - other).max()) for one, other in zip(left, right, strict=True))


def _read(lone: LoneContext, sequence: int, text: list[int], chunk: int = PROMPT_TOKENS, start: int = 0) -> Logits:
    for at in range(start, PROMPT_TOKENS, chunk):
        logits = lone.feed(sequence, text[at : min(at + chunk, PROMPT_TOKENS)], at)
    return logits


def _alone(lone: LoneContext, text: list[int], chunk: int = PROMPT_TOKENS) -> list[Logits]:
    lone.memory.clear()
    return [_read(lone, 0, text, chunk), *_answer(lone, 0, text)]


def _answer(lone: LoneContext, sequence: int, text: list[int]) -> list[Logits]:
    return [lone.step((sequence, text[at], at))[0] for at in range(PROMPT_TOKENS, len(text))]


def _elsewhere(lone: LoneContext, texts: list[list[int]]) -> list[Logits]:
    half = PROMPT_TOKENS // 2
    lone.memory.clear()
    for sequence in (1, 2):
        _read(lone, sequence, texts[sequence])
    lone.feed(0, texts[0][:half])
    lone.memory.remove(1)
    return [lone.feed(0, texts[0][half:PROMPT_TOKENS], half), *_answer(lone, 0, texts[0])]


def _beside(lone: LoneContext, texts: list[list[int]]) -> list[Logits]:
    lone.memory.clear()
    first = [_read(lone, sequence, texts[sequence]) for sequence in (1, 0, 2, 3)][1]
    rest = [
        lone.step(*((sequence, texts[sequence][at], at) for sequence in (1, 0, 2, 3)))[1]
        for at in range(PROMPT_TOKENS, len(texts[0]))
    ]
    return [first, *rest]


def _shared(lone: LoneContext, texts: list[list[int]]) -> list[Logits]:
    half = PROMPT_TOKENS // 2
    lone.memory.clear()
    _read(lone, 1, texts[0])
    lone.memory.share(1, 0, 0, half)
    return [_read(lone, 0, texts[0], start=half), *_answer(lone, 0, texts[0])]
