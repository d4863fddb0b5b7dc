"""Learns what steps cost by their number of rows, and decides how many drafted rows make a batch quicker."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import accumulate

MAX_DRAFTED = 32
"""Maximum number of drafted rows of a step: llama.cpp has memory for the logits of so many (`PROMPT_LOGITS`)."""

SIZES = (2, 3, 4, 5, 6, 8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64, 80, 96, 128, 192, 256)
"""Numbers of rows that a step with drafts may have: few, so that each is soon measured. From 8 on multiples of 4, with
which the kernels of CPUs are fastest."""

MIN_GAIN = 1.1
"""How many times the tokens per second without drafts a step must promise: less is within the estimates' error."""

SHARE = 0.01
"""Share of the time of steps without drafts that may be lost by drafts that turn out wrong, or by trying a number of
rows that has not been measured yet. What drafts have gained may be lost as well, up to `MAX_CREDIT_S`."""

MAX_CREDIT_S = 1.0

MAX_BESIDE, BESIDE_S = 2.0, 0.045
"""How many times as long as without drafts a step may take if it brings other calls' tokens as well, or `BESIDE_S`
seconds if that is more: these wait for the step, though all together get more tokens per second."""

MAX_BESIDE_TEAMS = 1.25
"""The same where calls of several teams are in the step: what one team gains, others should hardly feel."""

FIRST_STEPS, MAX_UNCOMPARED = 3, 64
"""Steps without drafts that are measured before any draft is computed, and steps after which one is measured again: the
time that drafts spare is known only as well as theirs."""

STALE_STEPS = 4_096
"""Number of steps after which a measured number of rows counts as not measured: contexts have grown meanwhile."""

MAX_SURPRISE = 3.0
"""Longer than so many times its expected time no step counts: it was interrupted by something else."""

MAX_LEAST = 0.95
"""A draft model goes on after tokens with a higher chance than this, whatever it costs."""

_WEIGHT = 0.2
_GUESSED_SLOPE = 0.25


@dataclass(slots=True)
class _Cost:
    seconds: float
    step: int
    """Number of the step that was measured last."""
    num_steps: int = 1


class StepCosts:
    """Seconds per step without drafts by its calls, and with drafts by its rows; and the credit for losing some."""

    def __init__(self, row_s: Callable[[], float] = lambda: 0.0, credit_s: float = 0.0) -> None:
        """`row_s()`: seconds that a row takes in the large steps that read prompts; 0: not known yet. `credit_s`:
        seconds that drafts may lose before any step was measured."""
        self._row_s = row_s
        self._plain: dict[int, _Cost] = {}
        self._drafted: dict[int, _Cost] = {}
        self._num_steps = 0
        self.credit_s = credit_s
        """Seconds that drafts may lose now."""

    @property
    def row_s(self) -> float:
        """Return the seconds that a row takes in large steps; 0: not known yet."""
        return self._row_s()

    def plain_s(self, num_calls: int) -> float:
        """Return the seconds that a step without drafts takes; 0: not known yet."""
        plain = self._plain.get(num_calls)
        return 0.0 if plain is None else plain.seconds

    def note_plain(self, num_calls: int, seconds: float) -> None:
        """Record a step without drafts."""
        self._num_steps += 1
        cost = self._plain.get(num_calls)
        if cost is None:
            self._plain[num_calls] = _Cost(seconds, self._num_steps)
            return
        seconds = min(seconds, MAX_SURPRISE * cost.seconds)
        # The first steps may hold what else was done before them: the shortest counts.
        is_settled = cost.num_steps >= FIRST_STEPS
        cost.seconds = cost.seconds + _WEIGHT * (seconds - cost.seconds) if is_settled else min(cost.seconds, seconds)
        cost.step, cost.num_steps = self._num_steps, cost.num_steps + 1
        self.credit_s = min(self.credit_s + SHARE * seconds, MAX_CREDIT_S)

    def note_lost(self, seconds: float) -> None:
        """Record time that a draft model took and that brought no draft."""
        self.credit_s -= seconds

    def note_drafted(
        self, num_calls: int, num_rows: int, num_tokens: int, seconds: float, before_s: float = 0.0
    ) -> None:
        """Record a step of `num_rows` rows for `num_calls` calls, which brought `num_tokens` tokens. `before_s`:
        seconds that a draft model took for it, besides."""
        self._num_steps += 1
        seconds = min(seconds, MAX_SURPRISE * self._expected(num_calls, num_rows))
        cost = self._drafted.get(num_rows)
        if cost is None or self._is_stale(cost):
            self._drafted[num_rows] = _Cost(seconds, self._num_steps)
        else:
            cost.seconds += _WEIGHT * (seconds - cost.seconds)
            cost.step = self._num_steps
        saved_s = num_tokens / num_calls * self._plain[num_calls].seconds - seconds - before_s
        self.credit_s = min(self.credit_s + saved_s, MAX_CREDIT_S)

    def choose(
        self,
        chances: Sequence[Sequence[float]],
        num_calls: int,
        *,
        max_rows: int,
        is_shared: bool = False,
        before_s: Callable[[int], float] = lambda num_drafted: 0.0,
    ) -> list[int]:
        """Return how many tokens of each draft a step should compute; empty if no draft pays.

        `chances`: for each draft, the chance of each of its tokens that it and all before it are drawn. `num_calls`:
        calls of the step, with and without a draft. `max_rows`: maximum rows of the step. `is_shared`: whether calls
        of several teams are in it. `before_s(n)`: seconds that making drafts of n tokens in all takes before it."""
        plain = self._plain.get(num_calls)
        if plain is None or plain.num_steps < FIRST_STEPS or self.credit_s < 0:
            return []
        if self._num_steps - plain.step > MAX_UNCOMPARED:
            return []
        most = min(MAX_DRAFTED, max_rows - num_calls, sum(map(len, chances)))
        best = chances[0] if len(chances) == 1 else nlargest(most, (chance for one in chances for chance in one))
        beside_s = MAX_BESIDE_TEAMS * plain.seconds if is_shared else max(MAX_BESIDE * plain.seconds, BESIDE_S)
        limit_s = beside_s if num_calls > 1 else math.inf
        chosen = self._best_size(best, num_calls, plain.seconds, most, limit_s, before_s)
        if not chosen:
            return []
        if len(chances) == 1:
            return [chosen]
        least = best[chosen - 1]
        counts = [sum(chance >= least for chance in one) for one in chances]
        spare = sum(counts) - chosen
        for number in reversed(range(len(counts))):  # several may have the same chance as the last one of the best
            num_cut = min(spare, sum(chance == least for chance in chances[number]))
            counts[number] -= num_cut
            spare -= num_cut
        return counts

    def saved_s(self, num_calls: int, num_drafted: int, num_gained: float, before_s: float) -> float:
        """Return the seconds that steps like this one save for each of their tokens. `num_gained`: drafted tokens that
        are probably drawn."""
        num_tokens = num_calls + num_gained
        seconds = self._expected(num_calls, num_calls + num_drafted) + before_s
        return self._plain[num_calls].seconds / num_calls - seconds / num_tokens

    def least_chance(self, num_calls: int, num_rows: int, token_s: float) -> float:
        """Return the chance from which a further drafted token pays in a step of about `num_rows` rows. `token_s`:
        seconds that drafting it takes."""
        plain_s = self._plain[num_calls].seconds
        row_s = (self._expected(num_calls, num_rows) - plain_s) / (num_rows - num_calls)
        return min((max(row_s, 0.0) + token_s) * num_calls / plain_s, MAX_LEAST)

    def _best_size(
        self,
        chances: Sequence[float],
        num_calls: int,
        plain_s: float,
        most: int,
        limit_s: float,
        before_s: Callable[[int], float],
    ) -> int:
        """Return how many drafted tokens to compute, of those with `chances`, best first; 0: none. `limit_s`: maximum
        seconds of the step, with the `before_s` before it."""
        chosen, best_rate = 0, MIN_GAIN * num_calls / plain_s
        gains = list(accumulate(chances))
        for num_rows in SIZES:
            num_drafted = num_rows - num_calls
            if num_drafted <= 0:
                continue
            if num_drafted > most:
                break
            cost = self._drafted.get(num_rows)
            is_known = cost is not None and not self._is_stale(cost)
            seconds = cost.seconds if cost is not None and is_known else self._expected(num_calls, num_rows)
            seconds += before_s(num_drafted)
            rate = (num_calls + gains[num_drafted - 1]) / seconds
            if rate > best_rate and seconds <= limit_s and (is_known or self.credit_s >= seconds - plain_s):
                chosen, best_rate = num_drafted, rate
        return chosen

    def _expected(self, num_calls: int, num_rows: int) -> float:
        """Return the seconds that a step of `num_rows` rows probably takes, from what nearby numbers took."""
        plain_s = self._plain[num_calls].seconds
        low, low_s, high, high_s = num_calls, plain_s, 0, 0.0
        for rows, cost in self._drafted.items():
            if low <= rows <= num_rows:
                low, low_s = rows, cost.seconds
            elif rows > num_rows and (not high or rows < high):
                high, high_s = rows, cost.seconds
        if high:
            return low_s + (high_s - low_s) * (num_rows - low) / (high - low)
        slope = (low_s - plain_s) / (low - num_calls) if low > num_calls else _GUESSED_SLOPE * plain_s / num_calls
        seconds = low_s + max(slope, 0.0) * (num_rows - low)
        # Few rows may cost far more each than many: of a 0.5 B model on one core, 2 rows took 4 times as long as one,
        # 16 rows 7.6 times.
        row_s = self._row_s()
        return min(seconds, plain_s + row_s * num_rows) if row_s else seconds

    def _is_stale(self, cost: _Cost) -> bool:
        return self._num_steps - cost.step > STALE_STEPS


class RoundCosts:
    """Seconds that a draft model takes for one more token of so many answers at once."""

    def __init__(self, first_s: Callable[[int], float]) -> None:
        """`first_s(n)`: what n answers probably take, before any round was measured."""
        self._first_s = first_s
        self._rounds: dict[int, _Cost] = {}

    def note(self, num_answers: int, seconds: float) -> None:
        """Record a round."""
        cost = self._rounds.get(num_answers)
        if cost is None:
            self._rounds[num_answers] = _Cost(seconds, 0)
        elif cost.num_steps < FIRST_STEPS:
            cost.seconds, cost.num_steps = min(cost.seconds, seconds), cost.num_steps + 1
        else:
            cost.seconds += _WEIGHT * (min(seconds, MAX_SURPRISE * cost.seconds) - cost.seconds)

    def expected(self, num_answers: int) -> float:
        """Return the seconds that a round probably takes, from what those of nearby numbers of answers took."""
        if not self._rounds:
            return self._first_s(num_answers)
        near = min(self._rounds, key=lambda known: (abs(known - num_answers), known))
        more = max(0.0, num_answers / near - 1)
        return self._rounds[near].seconds * (1 + _GUESSED_SLOPE * more)
