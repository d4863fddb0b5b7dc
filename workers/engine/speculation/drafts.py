"""Drafts one answer: looks for what may come next in the conversation, in earlier answers and in what is expected."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

from workers.engine.speculation.hit_rates import HitRates, Source, length_of
from workers.engine.speculation.pools import NO_TOKEN, Pool
from workers.engine.speculation.token_index import MAX_MATCH, MIN_MATCH, TokenIndex

MAX_UNREAD = 64
"""Number of unread tokens from which they are entered all at once, without following where they led."""

MAX_ROOM = 4_096
"""Maximum number of tokens of an answer for which buckets are reserved; a longer one only shares them."""


MODEL_WEIGHT = 0.05
"""Weight of a draft model's newest token in `Drafts.model_rate`."""


@dataclass(slots=True)
class Lead:
    """A place from which the answer's next tokens are guessed. It moves on as long as the tokens there are drawn."""

    source: Source
    text: array[int]
    follow: int
    """Index in `text` of the token that should be drawn next."""
    length: int
    """Number of tokens before it that are alike; of a form's text, how many tokens it has. `MAX_MATCH` at most."""
    lengths: tuple[int, ...] = ()
    """For each token of a draft model, the length that stands for its probability (`length_of`); else empty."""

    @property
    def token(self) -> int:
        """Return the token that should be drawn next; `NO_TOKEN` if the text ends here."""
        return self.text[self.follow] if self.follow < len(self.text) else NO_TOKEN

    @property
    def num_left(self) -> int:
        """Return how many tokens follow before the text ends, `MAX_MATCH` at most."""
        ahead = self.text[self.follow : self.follow + MAX_MATCH].tolist()
        return ahead.index(NO_TOKEN) if NO_TOKEN in ahead else len(ahead)

    def tokens(self, count: int) -> list[int]:
        """Return the next `count` tokens, or fewer where the text ends. A conversation that ends within them has begun
        to repeat itself, so the draft goes on from its own beginning."""
        found = self.text[self.follow : self.follow + count].tolist()
        if self.source is Source.HISTORY:
            while found and len(found) < count:
                found += found[: count - len(found)]
        return found[: found.index(NO_TOKEN)] if NO_TOKEN in found else found

    def move_on(self) -> None:
        """Go on to the next token, as this one was drawn."""
        self.follow += 1
        if not self.lengths:
            self.length = min(self.length + 1, MAX_MATCH)
        elif self.follow < len(self.lengths):
            self.length = self.lengths[self.follow]


class Drafts:
    """The drafts of one answer. Made by `submit` on any thread; then only the engine's thread uses it."""

    __slots__ = (
        *("_forced", "_history", "_is_searched", "_lead", "_num_prompt", "_pool", "_prediction"),
        *(
            "_rates",
            "_searches",
            "_unread",
            "is_greedy",
            "model_rate",
            "num_accepted",
            "num_drafted",
            "num_foretold",
            "num_of_prediction",
            "push",
            "source",
        ),
    )

    def __init__(
        self,
        prompt: NDArray[np.int32],
        rates: HitRates,
        *,
        room: int,
        is_greedy: bool,
        prediction: Sequence[int] = (),
        searches: bool = True,
        forced: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """`room`: maximum number of tokens of the answer. `prediction`: tokens that the caller expects it to have.
        `searches`: whether text that stood before, in the conversation or in earlier answers, is drafted.
        `forced()`: tokens that the answer's form leaves as the only ones now; None: the answer has no form."""
        self._history = TokenIndex(prompt, min(room, MAX_ROOM))
        self._num_prompt = len(prompt)
        self._rates = rates
        self.is_greedy = is_greedy
        self._searches = searches
        self._forced = forced
        self._pool: Pool | None = None
        self._prediction = TokenIndex(np.asarray(prediction, np.int32), 0) if len(prediction) else None
        self._lead: Lead | None = None
        if self._prediction is not None:
            self._lead = Lead(Source.PREDICTION, self._prediction.tokens, 0, MIN_MATCH)
        self._is_searched = False
        self._unread: list[int] = []
        """The answer's newest tokens, which are read when they are needed: several at once take less time."""
        self.push = self._unread.append
        """Notes the answer's next token."""
        self.model_rate = rates.model_rates[is_greedy]
        """Share of a draft model's tokens that were drawn after all before them, in this answer and those before."""
        self.num_drafted = self.num_accepted = 0
        self.num_of_prediction = self.num_foretold = 0
        """`num_of_prediction`: tokens of drafts that came from the caller's prediction. `num_foretold`: those drawn."""
        self.source = Source.HISTORY
        """Where the newest draft came from."""

    def newest(self, most: int) -> list[int]:
        """Return the answer's tokens so far, the last `most` of them."""
        self._read()
        tokens = self._history.tokens
        return tokens[max(self._num_prompt, len(tokens) - most) :].tolist()

    def share(self, pool: Pool | None) -> None:
        """Draft from `pool` too: the one of the call's scope, if there is one."""
        self._pool = pool

    def chances(self) -> list[float]:
        """Return, for each token that can be drafted, the chance that it and all before it are drawn."""
        self._read()
        lead = self._lead
        if lead is None:
            if self._is_searched:
                return []
            self._is_searched = True
            lead = self._lead = self._search()
            if lead is None:
                return []
        if lead.source is Source.MODEL:
            each = [self._rates.chance(self.is_greedy, lead.source, length) for length in lead.lengths[lead.follow :]]
            return list(accumulate(each, mul))
        chances = self._rates.chances(self.is_greedy, lead.source, lead.length)
        if lead.source is Source.HISTORY:
            return chances
        num_left = lead.num_left
        if not num_left:
            self._lead = None
        return chances if num_left >= len(chances) else chances[:num_left]

    def follow(self, tokens: Sequence[int], probabilities: Sequence[float]) -> None:
        """Draft from a draft model's tokens, of the probabilities that it gives them, as long as they are drawn."""
        lengths = tuple(map(length_of, probabilities))
        self._lead = Lead(Source.MODEL, array("i", tokens), 0, lengths[0], lengths)

    def take(self, count: int) -> list[int]:
        """Return a draft of `count` tokens, or fewer. `chances` must have been asked since the last `push`."""
        lead = self._lead
        if lead is None:
            return []
        self.source = lead.source
        return lead.tokens(count)

    def _read(self) -> None:
        """Move the lead along the answer's newest tokens, and enter these into the history."""
        history = self._history
        if len(self._unread) > MAX_UNREAD:
            history.extend(self._unread)
            self._unread.clear()
            self._lead, self._is_searched = None, False
            return
        for token in self._unread:
            lead = self._lead
            if lead is not None:
                is_hit = lead.token == token
                if lead.token != NO_TOKEN:  # where its text ends it has said nothing
                    self._note(lead, is_hit=is_hit)
                if is_hit:
                    lead.move_on()
                else:
                    self._lead = None
            self._is_searched = False
            history.push(token)
        self._unread.clear()

    def _note(self, lead: Lead, *, is_hit: bool) -> None:
        self._rates.note(self.is_greedy, lead.source, lead.length, is_hit)
        if lead.source is Source.MODEL:
            self.model_rate += (is_hit - self.model_rate) * MODEL_WEIGHT

    def _search(self) -> Lead | None:
        """Return the place with the longest match (of equal ones that in the prediction, or else the conversation's
        own), or what the form leaves if that probably brings more."""
        history = self._history
        best: Lead | None = None
        if self._prediction is not None and (match := self._prediction.find(history.tokens)) is not None:
            best = Lead(Source.PREDICTION, self._prediction.tokens, match.follow, match.length)
        if self._searches and (match := history.repeats()) is not None and (not best or match.length > best.length):
            best = Lead(Source.HISTORY, history.tokens, match.follow, match.length)
        others: list[tuple[Source, TokenIndex]] = []
        if self._pool is not None:
            others += [(Source.POOL, generation) for generation in self._pool.generations]
        for source, index in others:
            if best is not None and best.length >= MAX_MATCH:
                break
            match = index.find(history.tokens)
            if match is not None and (best is None or match.length > best.length):
                best = Lead(source, index.tokens, match.follow, match.length)
        if self._forced is not None and (tokens := self._forced()):
            forced = Lead(Source.FORM, array("i", tokens), 0, min(len(tokens), MAX_MATCH))
            return forced if best is None else max(forced, best, key=self._expected)
        return best

    def _expected(self, lead: Lead) -> float:
        """Return how many tokens a draft that begins at `lead` probably brings."""
        num_left = MAX_MATCH if lead.source is Source.HISTORY else lead.num_left
        return sum(self._rates.chances(self.is_greedy, lead.source, lead.length)[:num_left])
