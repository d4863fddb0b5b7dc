"""Bounds the bytes that requests hold in this process, from the first byte of a body until the call is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gateway.back_pressure import memory_full, memory_share_taken
from gateway.call import Principal
from gateway.errors import InvalidRequest, TakesTooMuch
from workers.protocol.events import CallEvent, Logprobs, PromptLogprobs, TokenLogprob
from workers.protocol.requests import GenerateRequest

KEY_SHARE = 0.75


class MemoryBudget:
    """Counts the bytes that requests hold, by team and by key, and limits them.

    A team may hold as many bytes as stay free for others: one team alone half of all bytes, two teams a third each.
    So there is always room for one more team (dynamic thresholds of shared-memory switches; Choudhury and Hahne, 1998).
    A key may hold three quarters of what its team may."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = 0
        self._of_team: dict[str, int] = {}
        self._of_key: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        return self._held

    @property
    def largest(self) -> int:
        """Return the bytes that a single key may hold when nobody else holds any."""
        return int(self._max_bytes // 2 * KEY_SHARE)

    def reserve(self, principal: Principal) -> Reservation:
        """Return an empty reservation for a request of this caller. Close it in any case."""
        return Reservation(self, principal)

    def take(self, principal: Principal, num_bytes: int, num_before: int = 0) -> None:
        """Count `num_bytes` more for a request. `num_before`: bytes that the request holds already.

        Raises TakesTooMuch if the request can never fit, HeldTooMuch, MemoryFull."""
        if num_before + num_bytes > self.largest:
            raise TakesTooMuch(
                f"The request and its answer take {num_before + num_bytes} bytes of memory; one key may hold "
                f"{self.largest}. Send less or ask for less, or have the operator raise PADDOCK_CALL_MEMORY_BYTES."
            )
        free = self._max_bytes - self._held
        of_team = self._of_team.get(principal.team, 0) + num_bytes
        of_key = self._of_key.get(principal.key_id, 0) + num_bytes
        may = (free + of_team - num_bytes) // 2
        if num_bytes > free:
            raise memory_full(self._held, self._max_bytes)
        if of_team > may or of_key > may * KEY_SHARE:
            taken = ("team", of_team, may) if of_team > may else ("key", of_key, int(may * KEY_SHARE))
            raise memory_share_taken(*taken)
        self.add(principal, num_bytes)

    def add(self, principal: Principal, num_bytes: int) -> None:
        """Count bytes without checking the limits, since they are held already; a negative number gives bytes back."""
        self._held += num_bytes
        for held, name in ((self._of_team, principal.team), (self._of_key, principal.key_id)):
            now = held.get(name, 0) + num_bytes
            if now:
                held[name] = now
            else:
                held.pop(name, None)


class Reservation:
    """Counts, in the budget, the bytes that one request holds, until it is closed."""

    __slots__ = ("_budget", "_num_holders", "_principal", "num_bytes")

    def __init__(self, budget: MemoryBudget, principal: Principal) -> None:
        self._budget = budget
        self._principal = principal
        self._num_holders = 1
        self.num_bytes = 0

    @property
    def team(self) -> str:
        return self._principal.team

    def grow(self, num_bytes: int) -> None:
        """Hold at least `num_bytes` in all. Raises what `resize` raises."""
        if num_bytes > self.num_bytes:
            self.resize(num_bytes)

    def add(self, num_bytes: int) -> None:
        """Hold `num_bytes` more; negative: fewer. Raises what `resize` raises."""
        self.resize(self.num_bytes + num_bytes)

    def resize(self, num_bytes: int) -> None:
        """Hold `num_bytes` in all. Raises what `MemoryBudget.take` raises; the number held then stays as it was.

        Once closed, the reservation only notes them, for a `shared` block that may begin later: what was given back
        must not be given back again."""
        more = num_bytes - self.num_bytes
        if self._num_holders and more > 0:
            self._budget.take(self._principal, more, self.num_bytes)
        elif self._num_holders and more:
            self._budget.add(self._principal, more)
        self.num_bytes = num_bytes

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Keep the reserved bytes at least until the block ends, even if the request's connection ends before."""
        if not self._num_holders:
            self._budget.add(self._principal, self.num_bytes)
        self._num_holders += 1
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        """End one use of the reservation (the request's own or a `shared` block). The last one gives all bytes back."""
        self._num_holders -= 1
        if not self._num_holders:
            self._budget.add(self._principal, -self.num_bytes)


MAX_WHOLE_PROBS = 1 << 20
"""Maximum probabilities in answers that are sent whole at the end, about 70 MB of JSON; more: InvalidRequest."""
MAX_WAITING_PROBS = 1 << 17
"""Maximum probabilities that a stream holds back until their tokens' text comes; more: InvalidRequest."""

TOKEN_BYTES = 640
"""Bytes of memory of a token of the answer, in addition to its probabilities: list entries and enclosing objects."""
PROB_BYTES = 128
"""Bytes of memory for all copies of a probability: one that waits for its token's text, one as JSON, one being sent."""
PIECE_FACTOR = 5
"""Further bytes of memory for each byte of a token's text: the answer has the byte both as text and as a number."""

Holds = Callable[[int], None]
"""Counts more bytes for a request; negative: fewer. Raises HeldTooMuch, MemoryFull, TakesTooMuch."""


class ProbabilityBudget:
    """Limits one request's probabilities that are not sent yet: by number, and by their bytes in the memory budget.

    A probability takes dozens of bytes, and a hundred of them can come with every token."""

    def __init__(self, requests: Sequence[GenerateRequest], holds: Holds, *, streams: bool, repeats: bool) -> None:
        """`repeats`: whether an answer's end, even in a stream, repeats all its probabilities. Then all are kept."""
        self.are_wanted = any(one.n_probs for one in requests)
        self._holds = holds
        self._ends_whole = repeats or not streams
        self._most = MAX_WHOLE_PROBS if self._ends_whole else MAX_WAITING_PROBS
        # With `post_sampling_probs` each is written twice, as a probability and as its logarithm.
        self._factors = [2 if one.post_sampling_probs else 1 for one in requests]
        self._num = [0] * len(requests)
        self._num_bytes = [0] * len(requests)

    def count(self, choice: int, events: Sequence[CallEvent], *, written: bool) -> None:
        """Count the probabilities in `events`, which are of one answer (`choice`). `written`: whether the stream has
        sent all of that answer's probabilities so far: then they count as 0, unless the answer's end repeats them.

        Raises InvalidRequest if there are too many, HeldTooMuch, MemoryFull and TakesTooMuch."""
        if written and not self._ends_whole:
            self._clear(choice)
            return
        num = num_bytes = 0
        for event in events:
            if isinstance(event, Logprobs):
                num += 1 + len(event.top)
                num_bytes += _bytes_of(event.chosen, event.top)
            elif isinstance(event, PromptLogprobs):  # their number is limited where the request is read
                num_bytes += sum(_bytes_of(chosen, top) for chosen, top in event.tokens)
        if not num_bytes:
            return
        self._num[choice] += num
        if sum(self._num) > self._most:
            message = f"The answers have more than {self._most} probabilities that can't be sent yet. Ask for fewer "
            raise InvalidRequest(message + "with each token or for shorter answers, or have them streamed.")
        num_bytes *= self._factors[choice]
        self._holds(num_bytes)
        self._num_bytes[choice] += num_bytes

    def _clear(self, choice: int) -> None:
        """Set the count of one answer's probabilities to 0, as they have been sent."""
        if num_bytes := self._num_bytes[choice]:
            self._num[choice] = self._num_bytes[choice] = 0
            self._holds(-num_bytes)


def _bytes_of(chosen: TokenLogprob, top: Sequence[TokenLogprob]) -> int:
    num_piece_bytes = len(chosen.piece) + sum([len(token.piece) for token in top])
    return TOKEN_BYTES + PROB_BYTES * (1 + len(top)) + PIECE_FACTOR * num_piece_bytes
