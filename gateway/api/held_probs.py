"""How many probabilities a gateway holds of one request's answers, and what they take of its memory: each is dozens of
bytes, and a hundred may come with every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.errors import InvalidRequest
from workers.protocol.events import CallEvent, Logprobs, PromptLogprobs, TokenLogprob
from workers.protocol.requests import GenerateRequest

MAX_WHOLE_PROBS = 1 << 20
"""Of answers that are told whole at their end: some 70 MB of JSON."""
MAX_WAITING_PROBS = 1 << 17
"""Of tokens in a stream whose text has not come yet."""

TOKEN_BYTES = 640
"""What a token of the answer takes beside its probabilities: its places in lists, and the objects around them."""
PROB_BYTES = 128
"""What a probability takes, as JSON and as it waits for its text, with the part that is joined as it is sent."""
PIECE_FACTOR = 5
"""And for each byte of its token, which is told as a number and as text."""

Holds = Callable[[int], None]
"""Is told how many bytes more, or fewer, a request holds. Raises HeldTooMuch, MemoryFull, TakesTooMuch."""


class HeldProbs:
    """Counts them for one request: by number, and by bytes in its memory budget, where they are until they are sent."""

    def __init__(self, requests: Sequence[GenerateRequest], holds: Holds, *, streams: bool, repeats: bool) -> None:
        """`repeats`: all of them are told at the end, of a stream as well, from the same bytes."""
        self.are_told = any(one.n_probs for one in requests)
        self._holds = holds
        self._ends_whole = repeats or not streams
        self._most = MAX_WHOLE_PROBS if self._ends_whole else MAX_WAITING_PROBS
        # After the samplers each is told twice over, as a probability and as its logarithm.
        self._factors = [2 if one.post_sampling_probs else 1 for one in requests]
        self._num = [0] * len(requests)
        self._num_bytes = [0] * len(requests)

    def hear(self, choice: int, events: Sequence[CallEvent], *, written: bool) -> None:
        """Count those of these events, or, where a stream has `written` all that it had of the answer, none.

        Raises InvalidRequest where they are too many, HeldTooMuch, MemoryFull and TakesTooMuch.
        """
        if written and not self._ends_whole:
            self._clear(choice)
            return
        num = num_bytes = 0
        for event in events:
            if isinstance(event, Logprobs):
                num += 1 + len(event.top)
                num_bytes += _bytes_of(event.chosen, event.top)
            elif isinstance(event, PromptLogprobs):  # whose number is bounded when they are asked for
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
        """Begin anew with one of the answers: what was counted has been sent."""
        if num_bytes := self._num_bytes[choice]:
            self._num[choice] = self._num_bytes[choice] = 0
            self._holds(-num_bytes)


def _bytes_of(chosen: TokenLogprob, top: Sequence[TokenLogprob]) -> int:
    num_piece_bytes = len(chosen.piece) + sum([len(token.piece) for token in top])
    return TOKEN_BYTES + PROB_BYTES * (1 + len(top)) + PIECE_FACTOR * num_piece_bytes
