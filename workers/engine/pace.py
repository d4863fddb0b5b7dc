"""Estimates learned while the engine works: the costs of a prompt token, of a step and of moving a cached token on this
machine, and the length of the next answers.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from itertools import accumulate

LONGEST_STEP_S = 2.0
"""Longest planned step, in seconds, that running streams wait for, where prompts can be cut finer."""

FIXED_SHARE = 1 / 17
"""Most of a step that its fixed cost may be, a share: prompt chunks are just long enough for that.

A longer chunk makes running streams wait longer, a shorter one the prompt: a 0.5 B model on one core read 3,072 tokens
beside three streams in 51 s with steps of 64 rows (longest gap 1.5 s), in 34 s with about 128 (1.4 s), and alone, in
steps of 512, in 24 s.
"""

AGAIN_S = 0.02
"""Seconds of a step, beside other calls, for tokens computed again: their caller has a part of the answer already.

With the demo model, calls that gave their slots to another team read 600 tokens again in steps of 0.13 to 0.28 s.
"""

GENTLE_S, GENTLE_TOKENS = 0.045, 64
"""Most seconds that one team's prompts add to a step that another team's answers wait for, or the step's fixed cost if
that is more; but never fewer than `GENTLE_TOKENS` tokens.

Shorter steps waste more of a device than the streams gain. With the demo model, prompts of 450 tokens that were not
cached were read whole: streams of others waited 0.23 s.
"""

_STEADY_STEPS = 4
"""Number of last steps whose estimates all bound the length of a chunk.

A chunk of another length changes what is learned of a step's costs, and so the next chunk's length, which would swing:
a 16k prompt of the 2-layer toy was read in turns of 505 and 313 tokens, and streams waited 2.6 s at its end.
"""

_DECAY = 0.9
"""Factor on the weight of earlier steps, for each newer one."""

_WEIGHT = 0.3
"""Weight of the newest measurement, against all before it."""

_STEADY_DECAY = 0.95
"""`_DECAY` for the cost that is reported: comparisons of workers must not show noise."""


class PrefillPace:
    """Learns `seconds = fixed + tokens * each` of a step. `budget` lies between `least` and `most` tokens."""

    def __init__(self, least: int, most: int) -> None:
        self._least = least
        self._most = most
        self._wanted: deque[int] = deque(maxlen=_STEADY_STEPS)
        self._recent: deque[tuple[float, float]] = deque(maxlen=_STEADY_STEPS)
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.token_s = 0.0
        """Seconds of a prompt token in a step that has others; 0: not known yet."""
        self._fixed = self._dearest = 0.0
        self._steady_x = self._steady_y = 0.0
        self.budget = most
        """Most prompt tokens of a step with running streams."""

    @property
    def again(self) -> int:
        """Return the most prompt tokens, beside other calls, of calls that compute tokens again."""
        return max(self._least, min(self.budget, int(AGAIN_S / self.token_s))) if self.token_s else self._least

    @property
    def gentle(self) -> int:
        """Return the most prompt tokens that a step reads beside streams of other teams, however many callers wait."""
        if not self.token_s:
            return self._most
        # The learned cost of a token alone swings more than its cost together with its part of the fixed cost.
        each = max(self._dearest, self.token_s / 2)
        return max(GENTLE_TOKENS, int(max(GENTLE_S, self._fixed) / each))

    @property
    def steady_s(self) -> float:
        """Return `token_s` weighed by tokens, not steps, and over more: short prompts don't make a worker look slow."""
        return self._steady_y / self._steady_x if self._steady_x else 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step that computed `num_tokens` tokens in `seconds`."""
        x, y = float(num_tokens), seconds
        self._weight = self._weight * _DECAY + 1
        self._x, self._y = self._x * _DECAY + x, self._y * _DECAY + y
        self._xx, self._xy = self._xx * _DECAY + x * x, self._xy * _DECAY + x * y
        spread = self._weight * self._xx - self._x * self._x
        mean_s = self._y / max(self._x, 1.0)
        if spread > self._weight * self._xx * 0.01:
            each = max((self._weight * self._xy - self._x * self._y) / spread, 1e-9)
            fixed = max((self._y - each * self._x) / self._weight, 0.0)
        else:  # all steps alike: nothing tells the fixed cost from the rest
            each, fixed = mean_s, 0.0
        self._fixed = fixed
        if num_tokens >= self._least:
            self._steady_x, self._steady_y = self._steady_x * _STEADY_DECAY + x, self._steady_y * _STEADY_DECAY + y
            self.token_s = mean_s if not self.token_s else self.token_s + _WEIGHT * (y / x - self.token_s)
            worth = fixed / each * (1 / FIXED_SHARE - 1) if fixed else self._most
            # At the highest cost per token of the last steps: it grows with the tokens before it.
            self._recent.append((x, y))
            self._dearest = max(each, *((seconds - fixed) / tokens for tokens, seconds in self._recent))
            bearable = (LONGEST_STEP_S - fixed) / self._dearest
            self._wanted.append(max(self._least, min(self._most, int(min(worth, bearable)))))
            self.budget = min(self._wanted)


MOVE_S = 0.02
"""Most seconds that a step with running streams spends on moving cached tokens, beside one block."""

RECENT_MOVES = 8
"""Moves of which the quickest tells the cost, since a move may be interrupted."""

TRY_AGAIN_S = 10.0
"""Seconds without a measurement after which restoring is tried again, to see whether it pays."""


class MovePace:
    """Learns the cost of moving a token between the KV cache and RAM, to compare with computing it."""

    def __init__(self, prefill: PrefillPace, clock: Callable[[], float] = time.monotonic) -> None:
        self._prefill = prefill
        self._clock = clock
        self._restores: deque[float] = deque(maxlen=RECENT_MOVES)
        self._restored_at = 0.0

    @property
    def restore_s(self) -> float:
        """Return the seconds of restoring a token; 0: not known yet."""
        return min(self._restores, default=0.0)

    @property
    def restore_pays(self) -> bool:
        """Return whether restoring a prefix is quicker than computing it, as far as is known."""
        return self.fetch_pays(0.0)

    def fetch_pays(self, read_s: float) -> bool:
        """Return the same for a prefix that must be read first, in `read_s` seconds per token."""
        if not (self._restores and self._prefill.token_s) or read_s + self.restore_s < self._prefill.token_s:
            return True
        return self._clock() - self._restored_at > TRY_AGAIN_S

    def note_restore(self, num_tokens: int, seconds: float) -> None:
        self._restores.append(seconds / num_tokens)
        self._restored_at = self._clock()

    def rebuild_s(self, num_tokens: int, *, saved: bool) -> float:
        """Return the seconds to restore or compute a prefix again after it was freed."""
        return num_tokens * ((self.restore_s if saved else self._prefill.token_s) or 1e-6)


NUM_ANSWERS = 256
"""Last answers whose lengths are kept."""

QUANTILE = 0.9

FIRST_GUESS_TOKENS = 64
"""Assumed length of an answer, tokens, before any was seen."""


class AnswerLengths:
    """The one estimator of an engine. Its thread notes lengths; any thread may ask."""

    def __init__(self) -> None:
        self._answers: deque[int] = deque(maxlen=NUM_ANSWERS)
        self._table: tuple[list[int], list[int]] = ([], [0])
        """The lengths in order, and their sums: of none, of the first one, of the first two, ... Replaced whole."""

    def note(self, num_tokens: int) -> None:
        """Note an answer that has ended. Takes about 15 us."""
        self._answers.append(num_tokens)
        ordered = sorted(self._answers)
        self._table = (ordered, list(accumulate(ordered, initial=0)))

    @property
    def usual(self) -> float:
        """Return the length, tokens, that one answer in ten exceeds; 0: none was seen yet."""
        ordered, _ = self._table
        return float(ordered[int(QUANTILE * len(ordered))]) if ordered else 0.0

    def left(self, num_predicted: int, limit: int) -> float:
        """Return the tokens that an answer still takes, by those of the last answers that were longer than it is.

        `limit`: most tokens of the answer.
        """
        ordered, sums = self._table
        longer = bisect_right(ordered, num_predicted)
        count = len(ordered) - longer
        if count:
            left = (sums[-1] - sums[longer]) / count - num_predicted
        else:
            left = float(max(FIRST_GUESS_TOKENS, num_predicted))
        return min(left, limit - num_predicted)
