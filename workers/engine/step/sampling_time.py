"""Bounds on the time of a step for drawing tokens: samplers that sort the vocabulary, probabilities, masks.

Most calls take microseconds. Calls that take milliseconds share a part of each step, and take turns where it is too
small: they become slower, and the others don't wait for them. A call that exceeds its own bound is ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from workers.protocol.events import Failure, FailureCode

QUICK_S = 0.001
"""Seconds per token up to which a call is quick, and takes part in every step."""

SHARE_S = 0.03
"""Seconds of one step for all slow calls together; a single one may take longer."""

MAX_DRAW_S = 0.1
"""Seconds that drawing a token may take while other calls run."""
MAX_DEBT_S = 1.0
"""Seconds beyond `MAX_DRAW_S` that all tokens of a call together may take."""

FIRST_TOKENS = 512
"""Most tokens left of a prompt that may be computed in one step, with its first token drawn at the end of it."""

PASSED_S, PASSED_TOKENS = 0.05, 64
"""Slow calls miss a step that computes so few tokens for a first token, unless their own newest token is this old."""

WEIGHT = 0.2
"""Weight of the newest token in the mean."""


@dataclass(slots=True)
class SamplingCost:
    """Processor seconds of the engine's thread for drawing one call's tokens, whatever else the machine does."""

    mean_s: float = 0.0
    """Mean seconds per token; an estimate until some were drawn."""
    debt_s: float = 0.0
    """Sum of the seconds beyond `MAX_DRAW_S` per token, less those that quicker tokens saved; at least 0."""

    @property
    def is_quick(self) -> bool:
        return self.mean_s <= QUICK_S

    def note(self, seconds: float) -> None:
        """Note the seconds of a token that was drawn."""
        self.mean_s += WEIGHT * (seconds - self.mean_s)
        self.debt_s = max(0.0, self.debt_s + seconds - MAX_DRAW_S)

    def failure(self) -> Failure | None:
        """Return why the call may not continue beside others; None: it may."""
        if self.debt_s <= MAX_DEBT_S:
            return None
        message = (
            f"drawing a token of this answer takes {self.mean_s * 1e3:.0f} ms, and may take {MAX_DRAW_S * 1e3:.0f} "
            "beside other calls; leave out `samplers` that sort the vocabulary, `n_probs`, or the answer's form"
        )
        return Failure(FailureCode.INVALID_REQUEST, message)


class Drawer(Protocol):
    """A call, as far as `within_share` must know it."""

    @property
    def cost(self) -> SamplingCost: ...

    @property
    def decoding(self) -> bool: ...

    @property
    def num_predicted(self) -> int:
        """Return the tokens of its answer so far."""
        ...

    @property
    def num_prompt_left(self) -> int:
        """Return the tokens of its prompt that are still to be computed."""
        ...

    @property
    def token_at(self) -> float:
        """Return when its newest token came, seconds of any clock."""
        ...

    @property
    def started_at(self) -> float:
        """Return when it was given its slot, by the same clock."""
        ...


S = TypeVar("S", bound=Drawer)


def within_share(ready: Sequence[S], now: float) -> list[S]:
    """Return the calls that take part in the next step; `now` is by the clock of `token_at`.

    Slow calls share `SHARE_S`, those about to draw their first token included: the call that waited longest goes first,
    and at least one takes part, unless the step can bring some call's first token. Then slow calls that decode may be
    left out for `PASSED_S`.
    """
    slow = [one for one in ready if not one.cost.is_quick and one.num_prompt_left <= FIRST_TOKENS]
    if not slow:
        return list(ready)
    passed = set[int]()
    if any(0 < one.num_prompt_left <= PASSED_TOKENS and not one.num_predicted for one in ready):
        passed = {id(one) for one in slow if one.decoding and now - one.token_at < PASSED_S}
    left = SHARE_S
    slow = [one for one in slow if id(one) not in passed]
    for place, one in enumerate(sorted(slow, key=lambda one: max(one.token_at, one.started_at))):
        if place and one.cost.mean_s > left:
            passed.add(id(one))
        else:
            left -= one.cost.mean_s
    return [one for one in ready if id(one) not in passed]
