"""Which turns of a conversation fit, for `truncation: auto`.

Workers render and count; the gateway knows no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec.structs import replace as replace_struct

from gateway.api.responses.request import ResponseRequest
from gateway.inquiries import Inquiries
from workers.protocol.requests import GenerateRequest, Message

ANSWER_SHARE = 8
"""Without `max_output_tokens`, one part in so many of the context is kept free for the answer."""
STANDING = ("system", "developer")


class Truncation:
    def __init__(self, inquiries: Inquiries) -> None:
        self._inquiries = inquiries

    async def fitted(self, asked: ResponseRequest, model: str, team: str) -> ResponseRequest:
        """Without as many of the first turns as it takes to fit; the last one and system messages stay.

        What does not fit even so is left to the worker to refuse. Raises PaddockError.
        """
        request = asked.requests[0]
        room = self._room(model, request)
        if room is None or await self._inquiries.num_tokens(model, request, team) <= room:
            return asked
        turns = turns_of(request.messages)
        fewest, most = 1, len(turns) - 1
        while fewest < most:
            middle = (fewest + most) // 2
            if await self._inquiries.num_tokens(model, without(request, turns, middle), team) <= room:
                most = middle
            else:
                fewest = middle + 1
        return replace(asked, requests=(without(request, turns, max(most, 0)),))

    def _room(self, model: str, request: GenerateRequest) -> int | None:
        """Most tokens that the prompt may have; None: nobody knows."""
        n_ctx = min((beat.n_ctx for beat in self._inquiries.workers(model)), default=0)
        if not n_ctx:
            return None
        wanted = n_ctx // ANSWER_SHARE if request.max_tokens is None else request.max_tokens
        return n_ctx - min(max(1, wanted), n_ctx // 2)


def turns_of(messages: Sequence[Message]) -> list[tuple[Message, ...]]:
    """Each begins with a user's message; results stay with the calls that they answer."""
    turns: list[list[Message]] = []
    for message in messages:
        if message.role in STANDING:
            continue
        if not turns or message.role == "user":
            turns.append([])
        turns[-1].append(message)
    return [tuple(turn) for turn in turns]


def without(request: GenerateRequest, turns: Sequence[tuple[Message, ...]], number: int) -> GenerateRequest:
    """The request without its first turns."""
    dropped = {id(message) for turn in turns[:number] for message in turn}
    return replace_struct(request, messages=tuple(m for m in request.messages if id(m) not in dropped))
