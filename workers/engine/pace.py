"""Learns, while the engine works, the seconds per prompt token, per step and per cached token moved on this machine,
and the length of answers. A stream is an answer that is being written; a chunk is the part of a prompt in one step.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from itertools import accumulate

LONGEST_STEP_S = 3.0
"""Maximum seconds planned for a step while streams run. Chunks are made shorter for it, down to a tile of rows, or down
to `least` tokens if a tile takes twice as long.

With 2 s, and chunks of down to 32 tokens, a slow machine read 3,000 tokens beside three streams in 49.5 s (longest gap
2.5 s), where llama-server took 34.3 s in steps of 256 rows (3.4 s)."""

FIRST_TILES = 2
"""Tiles of rows that a chunk has while streams run, before any chunk was measured, on devices with tiles."""

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

_WEIGHT = 0.3
"""Weight of the newest measurement in a running mean; the measurements before it share the rest."""

_STEADY_DECAY = 0.95
"""Factor by which the weight of earlier steps shrinks with each new step, in the cost that is reported to gateways: it
must be steadier than other estimates, as they compare workers by it."""


class PrefillPace:
    """Learns how a step's time depends on its tokens (`seconds = fixed + tokens * each`) and derives the `budget`.

    Two sizes of steps are measured and tell one from the other: those that decode, and those with whole chunks. So the
    fixed cost stays known while a long prompt is read in steps that are all alike, each dearer than the one before."""

    def __init__(self, least: int, most: int, tile: int = 0) -> None:
        """`tile`: number of rows below which a row costs far more than in larger steps (`ROWS_MULTIPLES`); 0: none.

        Steps with fewer rows, but more than decoding takes, say nothing of what larger ones cost: if they counted, each
        would make the next one shorter, down to `least`, the dearest of all."""
        self._least = least
        self._most = most
        self._tile = tile if tile <= most else 0
        self._wanted: deque[int] = deque(maxlen=_STEADY_STEPS)
        self._recent: deque[tuple[float, float]] = deque(maxlen=_STEADY_STEPS)
        """Tokens and seconds of the last steps with chunks of at least `least` tokens, or a tile of rows."""
        self._few_x = self._few_y = 0.0
        """Mean tokens and seconds of the last steps with fewer than `least` tokens; 0: there was none yet."""
        self.token_s = 0.0
        """Seconds per prompt token, including its part of the step's fixed cost; 0: not known yet."""
        self._fixed = self._dearest = 0.0
        self._steady_x = self._steady_y = 0.0
        self.budget = min(most, FIRST_TILES * self._tile) or most
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
        x = float(num_tokens)
        if num_tokens < self._least:
            self._few_x = _mean(self._few_x, x)
            self._few_y = _mean(self._few_y, seconds)
            return
        self.token_s = _mean(self.token_s, seconds / x)
        self._steady_x = self._steady_x * _STEADY_DECAY + x
        self._steady_y = self._steady_y * _STEADY_DECAY + seconds
        if num_tokens < self._tile:
            return
        self._recent.append((x, seconds))
        costs = [self._each(*step) for step in self._recent]
        each = sum(costs) / len(costs)
        # With the highest cost per token of the last steps, as the cost grows with the tokens before the chunk.
        self._dearest = max(costs)
        self._fixed = max(self._few_y - self._few_x * each, 0.0)
        self._wanted.append(self._wanted_tokens(self._fixed, each))
        self.budget = min(self._wanted)

    def _each(self, num_tokens: float, seconds: float) -> float:
        """Return the seconds that a step took for each token more than a step has that only decodes."""
        return max((seconds - self._few_y) / (num_tokens - self._few_x), 1e-9)

    def _wanted_tokens(self, fixed: float, each: float) -> int:
        """Return the best length of a chunk if a step costs `fixed` seconds and its tokens `each` or `_dearest`."""
        dearest = self._dearest
        worth = fixed / each * (1 / FIXED_SHARE - 1) if self._few_x else self._most
        bearable = (LONGEST_STEP_S - fixed) / dearest
        least = self._tile if fixed + self._tile * dearest <= 2 * LONGEST_STEP_S else 0
        return max(self._least, least, min(self._most, int(min(worth, bearable))))


def _mean(before: float, newest: float) -> float:
    """Return the running mean with one measurement more; `before` 0: there was none."""
    return before + _WEIGHT * (newest - before) if before else newest


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
