"""Bounds the probabilities that a gateway holds of one request's answers, and counts their memory: each is dozens of
bytes, and a hundred may come with every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.errors import InvalidRequest
from workers.protocol.events import CallEvent, Logprobs, PromptLogprobs, TokenLogprob
from workers.protocol.requests import GenerateRequest

MAX_WHOLE_PROBS = 1 << 20
"""Most probabilities of answers that are sent whole at their end: some 70 MB of JSON."""
MAX_WAITING_PROBS = 1 << 17
"""Most probabilities of tokens in a stream whose text has not come yet."""

TOKEN_BYTES = 640
"""Bytes that a token of the answer takes beside its probabilities: places in lists, and the objects around them."""
PROB_BYTES = 128
"""Bytes that a probability takes as JSON and while it waits for its text, with the part that is joined to send it."""
PIECE_FACTOR = 5
"""Bytes more for each byte of its token, which is told as a number and as text."""

Holds = Callable[[int], None]
"""Called with how many bytes more, or fewer, a request holds. Raises HeldTooMuch, MemoryFull, TakesTooMuch."""


class HeldProbs:
    """Counts one request's probabilities until they are sent: by number, and by bytes in its memory budget."""

    def __init__(self, requests: Sequence[GenerateRequest], holds: Holds, *, streams: bool, repeats: bool) -> None:
        """`repeats`: all of them are told at the end, also of a stream, from the same bytes."""
        self.are_told = any(one.n_probs for one in requests)
        self._holds = holds
        self._ends_whole = repeats or not streams
        self._most = MAX_WHOLE_PROBS if self._ends_whole else MAX_WAITING_PROBS
        # Those after the samplers are told twice over, as probabilities and as their logarithms.
        self._factors = [2 if one.post_sampling_probs else 1 for one in requests]
        self._num = [0] * len(requests)
        self._num_bytes = [0] * len(requests)

    def hear(self, choice: int, events: Sequence[CallEvent], *, written: bool) -> None:
        """Count the probabilities of these events. Begin anew where a stream has `written` all it had of the answer.

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
        """Begin anew with one of the answers: what was counted of it has been sent."""
        if num_bytes := self._num_bytes[choice]:
            self._num[choice] = self._num_bytes[choice] = 0
            self._holds(-num_bytes)


def _bytes_of(chosen: TokenLogprob, top: Sequence[TokenLogprob]) -> int:
    num_piece_bytes = len(chosen.piece) + sum([len(token.piece) for token in top])
    return TOKEN_BYTES + PROB_BYTES * (1 + len(top)) + PIECE_FACTOR * num_piece_bytes
