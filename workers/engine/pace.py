"""Learns, while the engine works, the seconds per prompt token, per step and per cached token moved on this machine,
and the length of answers. A stream is an answer that is being written; a chunk is the part of a prompt in one step.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from itertools import accumulate

LONGEST_STEP_S = 2.0
"""Maximum seconds planned for a step while streams run. Chunks are made shorter for it, down to `least` tokens."""

FIXED_SHARE = 1 / 17
"""Share of a step's time that its fixed cost should take. Chunks are made long enough to bring the share down to this.

Longer chunks make running streams wait longer, shorter ones make the prompt take longer. A 0.5 B model on one core read
3,072 tokens beside three streams in 51 s with steps of 64 rows (longest gap between two tokens of a stream: 1.5 s), and
in 34 s with steps of about 128 rows (1.4 s). Without streams, in steps of 512 rows, it took 24 s."""

AGAIN_S = 0.02
"""Seconds of a step that computing tokens again should take at most while other calls run (`PrefillPace.again`). The
tokens are those of calls that lost their slots (were preempted) when a part of their answers had been sent already.

Without this bound, calls that had given their slots to another team recomputed 600 tokens in steps of 0.13 to 0.28 s
(demo model)."""

GENTLE_S, GENTLE_TOKENS = 0.045, 64
"""`GENTLE_S`: maximum seconds that prompts add to a step while answers of other teams run; if the step's fixed cost is
higher, that is the maximum. `GENTLE_TOKENS`: number of prompt tokens that such a step may compute in any case.

Shorter steps waste more of a device than the streams gain. When prompts of 450 uncached tokens were computed in one
step, with the demo model, streams of other teams waited 0.23 s."""

_STEADY_STEPS = 4
"""Number of recent steps that each give an estimate of the best chunk length. The smallest estimate is used.

With the newest estimate alone, lengths swing up and down, because each chunk changes the next estimate: a 16k prompt of
a 2-layer model was read in chunks of 505 and 313 tokens alternately, and streams waited 2.6 s at its end."""

_DECAY = 0.9
"""Factor by which the weight of earlier steps shrinks with each new step."""

_WEIGHT = 0.3
"""Weight of the newest measurement in a running mean; the measurements before it share the rest."""

_STEADY_DECAY = 0.95
"""Like `_DECAY`, but for the cost that is reported to gateways: it must be steadier, as they compare workers by it."""


class PrefillPace:
    """Learns how a step's time depends on its tokens (`seconds = fixed + tokens * each`) and derives the `budget`."""

    def __init__(self, least: int, most: int) -> None:
        self._least = least
        self._most = most
        self._wanted: deque[int] = deque(maxlen=_STEADY_STEPS)
        self._recent: deque[tuple[float, float]] = deque(maxlen=_STEADY_STEPS)
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.token_s = 0.0
        """Seconds per prompt token, including its part of the step's fixed cost; 0: not known yet."""
        self._fixed = self._dearest = 0.0
        self._steady_x = self._steady_y = 0.0
        self.budget = most
        """Most prompt tokens of a step while streams run and one call waits for its first token; `least` to `most`."""

    @property
    def again(self) -> int:
        """Return how many tokens a step should recompute for calls preempted in mid-answer; `plan_step` adapts it."""
        return max(self._least, min(self.budget, int(AGAIN_S / self.token_s))) if self.token_s else self._least

    @property
    def gentle(self) -> int:
        """Return the maximum prompt tokens of a step while streams of other teams run, however many prompts wait."""
        if not self.token_s:
            return self._most
        # The learned cost of a token alone swings more than its cost together with its part of the fixed cost.
        each = max(self._dearest, self.token_s / 2)
        return max(GENTLE_TOKENS, int(max(GENTLE_S, self._fixed) / each))

    @property
    def steady_s(self) -> float:
        """Return the mean seconds per token of more steps than `token_s` has; a few short prompts barely raise it."""
        return self._steady_y / self._steady_x if self._steady_x else 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        """Update the estimates with a step that computed `num_tokens` tokens in `seconds`."""
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
            # With the highest cost per token of the last steps, as the cost grows with the tokens before the chunk.
            self._recent.append((x, y))
            self._dearest = max(each, *((seconds - fixed) / tokens for tokens, seconds in self._recent))
            bearable = (LONGEST_STEP_S - fixed) / self._dearest
            self._wanted.append(max(self._least, min(self._most, int(min(worth, bearable)))))
            self.budget = min(self._wanted)


MOVE_S = 0.02
"""Maximum seconds that a step spends on moving cached tokens while streams run; one block is moved in any case."""

RECENT_MOVES = 8
"""Number of recent restores. The quickest of them counts as the cost, since slower ones may have been interrupted."""

TRY_AGAIN_S = 10.0
"""Seconds after the last restore until one is made just to measure it again, even if computing was quicker before."""


class MovePace:
    """Learns how long it takes to restore a token from RAM to the KV cache, and whether computing it is quicker."""

    def __init__(self, prefill: PrefillPace, clock: Callable[[], float] = time.monotonic) -> None:
        self._prefill = prefill
        self._clock = clock
        self._restores: deque[float] = deque(maxlen=RECENT_MOVES)
        self._restored_at = 0.0

    @property
    def restore_s(self) -> float:
        """Return the seconds that restoring one token from RAM takes; 0: not known yet."""
        return min(self._restores, default=0.0)

    @property
    def restore_pays(self) -> bool:
        """Return whether to restore a prefix from RAM: if that is quicker than computing it, or not measured lately."""
        return self.fetch_pays(0.0)

    def fetch_pays(self, read_s: float) -> bool:
        """Return the same as `restore_pays`, for a prefix that is read from disk first: `read_s` seconds per token."""
        if not (self._restores and self._prefill.token_s) or read_s + self.restore_s < self._prefill.token_s:
            return True
        return self._clock() - self._restored_at > TRY_AGAIN_S

    def note_restore(self, num_tokens: int, seconds: float) -> None:
        self._restores.append(seconds / num_tokens)
        self._restored_at = self._clock()

    def rebuild_s(self, num_tokens: int, *, saved: bool) -> float:
        """Return the seconds to get a freed prefix of `num_tokens` back: restored if `saved`, computed if not."""
        return num_tokens * ((self.restore_s if saved else self._prefill.token_s) or 1e-6)


NUM_ANSWERS = 256
"""Number of latest answers whose lengths are kept."""

QUANTILE = 0.9

FIRST_GUESS_TOKENS = 64
"""Assumed length of an answer, in tokens, before any answer has ended."""


class AnswerLengths:
    """Estimates the length of answers from the latest ones. The engine's thread adds lengths; any thread may ask."""

    def __init__(self) -> None:
        self._answers: deque[int] = deque(maxlen=NUM_ANSWERS)
        self._table: tuple[list[int], list[int]] = ([], [0])
        """The sorted lengths, and the sums of the first 0, 1, 2, ... of them. Never changed, only replaced."""

    def note(self, num_tokens: int) -> None:
        """Note the length of an answer that has ended. Takes about 15 us."""
        self._answers.append(num_tokens)
        ordered = sorted(self._answers)
        self._table = (ordered, list(accumulate(ordered, initial=0)))

    @property
    def usual(self) -> float:
        """Return the length, in tokens, that one answer in ten exceeds; 0: no answer has ended yet."""
        ordered, _ = self._table
        return float(ordered[int(QUANTILE * len(ordered))]) if ordered else 0.0

    def left(self, num_predicted: int, limit: int) -> float:
        """Return how many more tokens an answer will probably get, by the mean of recent answers longer than it is now.

        `num_predicted`: tokens of the answer so far. `limit`: maximum tokens of the answer."""
        ordered, sums = self._table
        longer = bisect_right(ordered, num_predicted)
        count = len(ordered) - longer
        if count:
            left = (sums[-1] - sums[longer]) / count - num_predicted
        else:
            left = float(max(FIRST_GUESS_TOKENS, num_predicted))
        return min(left, limit - num_predicted)
