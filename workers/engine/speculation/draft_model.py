"""Has a second, smaller model guess how answers go on, several answers in one batch.

The model has a context of its own, whose sequences follow those of the engine's context by their ids: what is shared,
cut or removed there is so here too, as far as this context has it. Tokens that it lacks (a prompt, what was restored
from RAM, a conversation after a context shift) are read when a draft is wanted and that pays. Copies of its cells in
RAM would be quicker (0.7 us a token, where a 2-layer toy reads one in 900 us), but would displace those of the engine's
model, of which each byte spares more computing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from workers.engine.cache.prompt import Tokens
from workers.engine.request import IntegrityError
from workers.engine.speculation.step_costs import RoundCosts
from workers.llama.context import Context
from workers.llama.memory import MemoryKind
from workers.llama.native import DecodeFailed

MAX_FAILURES = 3
"""Guesses in a row that failed, by a batch or by what is not a number, after which the model drafts no more."""

_WEIGHT = 0.2

log = logging.getLogger("paddock.engine")


@dataclass(slots=True)
class Wanted:
    """An answer whose next tokens are to be guessed."""

    sequence: int
    """The conversation's id in the engine's memory."""
    known: Tokens
    """All tokens of the conversation."""
    most: int
    """Maximum number of tokens to guess."""
    chance_of: Callable[[float], float]
    """Returns the chance that a token is drawn, by the model's own probability for it."""
    least: float
    """Chance of all tokens so far, taken together, below which no further one is guessed."""
    tokens: list[int] = field(default_factory=list)
    """The guess, and (`probabilities`) the model's own probability for each of its tokens."""
    probabilities: list[float] = field(default_factory=list)
    chance: float = 1.0


class DraftModel:
    """A draft model's context, and which tokens of which sequences it has read. For the engine's thread only."""

    def __init__(self, context: Context, *, num_tokens: int, ends: frozenset[int]) -> None:
        """`num_tokens`: size of the engine's vocabulary. `ends`: tokens after which nothing is guessed. Raises
        ValueError for a memory that can't drop its last tokens."""
        if context.memory.kind is not MemoryKind.ATTENTION:
            raise ValueError(f"a draft model needs attention in all layers, not {context.memory.kind.value} memory")
        self.num_params, self.n_ubatch = context.model.facts.n_params, context.n_ubatch
        self._context, self._memory = context, context.memory
        self._batch = context.new_batch()
        self._num_own = context.model.vocab.num_tokens
        self._num_tokens = min(num_tokens, self._num_own)
        self._knows_all = self._num_own >= num_tokens
        self._ends = ends
        self._num_held = [0] * context.num_sequences
        """Cells of each sequence that are known to be those of its first tokens."""
        self._ahead: list[list[int]] = [[] for _ in range(context.num_sequences)]
        """Tokens of the cells behind these: guesses, which may have been drawn since."""
        self._num_failures = 0
        self.row_s = 0.0
        """Seconds that a token takes in a batch of many; 0: not known yet."""

    @property
    def is_able(self) -> bool:
        return self._num_failures < MAX_FAILURES

    @property
    def num_cells(self) -> int:
        """Return how many cells all sequences hold; those that several share are counted for each."""
        return sum(self._num_held) + sum(map(len, self._ahead))

    # The engine's memory calls these (`workers.llama.memory.Follower`).

    def share(self, source: int, target: int, start: int, end: int) -> None:
        held, end = self._num_held[target], min(end, self._num_held[source])
        if start <= held < end:
            self.cut(target, held)
            self._memory.share(source, target, held, end)
            self._num_held[target] = end
            self._check_window(target)

    def cut(self, sequence: int, start: int) -> None:
        held, ahead = self._num_held[sequence], self._ahead[sequence]
        if start < held + len(ahead):
            self._memory.cut(sequence, start, -1)
            self._num_held[sequence] = min(held, start)
            del ahead[max(0, start - held) :]
            self._check_window(sequence)

    def _check_window(self, sequence: int) -> None:
        """Forget a sequence that lacks cells behind a window which its next token sees (`Memory.window`)."""
        num_cells = self._num_held[sequence] + len(self._ahead[sequence])
        if self._memory.window and not self._memory.can_continue(sequence, num_cells):
            self._memory.remove(sequence)
            self._num_held[sequence] = 0
            self._ahead[sequence].clear()

    def clear(self) -> None:
        self._memory.clear()
        self._num_held = [0] * len(self._num_held)
        for ahead in self._ahead:
            ahead.clear()

    # The engine calls these between its own steps.

    def num_missing(self, sequence: int, known: Tokens) -> int:
        """Return how many of a conversation's tokens are to be read before the next one can be guessed, its newest
        included. Guesses that have come true need not be."""
        held, ahead = self._num_held[sequence], self._ahead[sequence]
        drawn = known[held : held + len(ahead)].tolist()
        num_true = next((at for at, token in enumerate(drawn) if token != ahead[at]), len(drawn))
        self._num_held[sequence] = held + num_true
        del ahead[:num_true]
        self.cut(sequence, min(held + num_true, len(known) - 1))
        return len(known) - self._num_held[sequence]

    def can_read(self, sequence: int, known: Tokens) -> bool:
        """Return whether the model has all tokens that it is to read: its vocabulary may be somewhat smaller."""
        return self._knows_all or bool((known[self._num_held[sequence] :] < self._num_own).all())

    def read(self, sequence: int, known: Tokens, num_tokens: int) -> bool:
        """Read the next `num_tokens` tokens of a conversation, at most one micro-batch. Return False if it fails: all
        conversations are to be read anew then."""
        held = self._num_held[sequence]
        batch = self._batch
        batch.clear()
        batch.add_prompt(known[held : held + num_tokens], held, sequence, num_logits=0)
        started = time.perf_counter()
        if not self._decode():
            return False
        self._num_held[sequence] = held + num_tokens
        row_s = (time.perf_counter() - started) / num_tokens
        self.row_s = self.row_s + _WEIGHT * (row_s - self.row_s) if self.row_s else row_s
        return True

    def guess(self, asked: Sequence[Wanted], costs: RoundCosts) -> None:
        """Guess the next tokens of these conversations, one of each in a batch. `num_missing` must have been asked."""
        batch = self._batch
        batch.clear()
        going, rows = list(asked), []
        for one in going:
            held = self._num_held[one.sequence]
            rows.append(batch.add_prompt(one.known[held:], held, one.sequence, num_logits=1))
        num_failures, started = self._num_failures, time.perf_counter()
        while going and self._decode():
            for one, row in zip(going, rows, strict=True):
                self._take(one, row)
            now = time.perf_counter()
            if batch.num_tokens < 2 * len(going):  # else many are tokens that were read
                costs.note(len(going), now - started)
            started = now
            going, rows = [one for one in going if self._goes_on(one)], []
            batch.clear()
            for one in going:
                position = len(one.known) + len(self._ahead[one.sequence])
                rows.append(batch.add_token(one.tokens[-1], position, one.sequence))
        if self._num_failures > num_failures:
            return
        if all(one.tokens for one in asked):
            self._num_failures = 0
        else:
            self._fail("it computed something that is not a number")

    def _take(self, one: Wanted, row: int) -> None:
        """Note what a batch has read for an answer, and take its likeliest next token."""
        if one.tokens:
            self._ahead[one.sequence].append(one.tokens[-1])
        else:
            self._num_held[one.sequence] = len(one.known)
        token, probability = self._context.surest(row, self._num_tokens)
        one.chance *= one.chance_of(probability) if probability else 0.0
        if probability:
            one.tokens.append(token)
            one.probabilities.append(probability)

    def _goes_on(self, one: Wanted) -> bool:
        is_over = not one.tokens or len(one.tokens) >= one.most or one.tokens[-1] in self._ends
        return not is_over and one.chance >= one.least

    def _decode(self) -> bool:
        """Compute the batch. If that fails, for lack of cells perhaps, forget everything and return False."""
        try:
            self._context.decode(self._batch)
        except DecodeFailed as error:
            self._fail(str(error))
            return False
        return True

    def _fail(self, why: str) -> None:
        self._num_failures += 1
        log.warning("the draft model forgets all conversations: %s", why)
        self.clear()

    def check(self, last_position: Callable[[int], int], most_ahead: int) -> None:
        """Compare the records with this context's memory and with the engine's: `last_position(id)` of a sequence
        there. Raises IntegrityError."""
        for sequence, held in enumerate(self._num_held):
            num_cells = held + len(self._ahead[sequence])
            if not self._memory.can_continue(sequence, num_cells):
                last = self._memory.last_position(sequence)
                raise IntegrityError(f"draft model, sequence {sequence}: {num_cells} cells by the book, last {last}")
            known = last_position(sequence) + 1
            if num_cells > (known + most_ahead if known else 0):
                raise IntegrityError(f"draft model, sequence {sequence}: {num_cells} cells, the engine has {known}")
