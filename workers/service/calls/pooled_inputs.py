"""Makes the inputs of pooled work: reads pictures and sounds, renders messages, and tokenises texts.

Runs on the event loop. What takes longer than an instant is made on the threads of lanes, where teams take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from workers.chat.prompts import SHORT_CHARS, Patience, Prompts, Seen, length_of, text_chars
from workers.engine.cache.prompt import Prompt
from workers.engine.pooled.jobs import PooledInput
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.pieces import extend, in_array, joined
from workers.protocol.pooled import PoolInput, PoolPrompt, PoolRequest
from workers.protocol.requests import GenerateRequest, Medium
from workers.service.calls.lanes import FairLane


class Inputs(Protocol):
    """Turns texts into tokens, on any thread."""

    def of_text(self, text: str, *, add_special: bool = True) -> Sequence[int]: ...
    def of_pair(self, query: str, document: str) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class PooledReader:
    """Reads the inputs of requests for pooled work."""

    inputs: Inputs
    prompts: Prompts
    """Makes inputs of messages, and of texts with pictures or sounds."""
    lane: FairLane
    """Threads on which long inputs are tokenised."""
    media_lane: FairLane
    """Threads on which pictures and sounds are read."""
    longest: int
    """Maximum tokens of one input that the engine takes."""

    async def read(self, request: PoolRequest, is_over: Callable[[], bool]) -> list[PooledInput]:
        """Return the inputs as the engine takes them, or fewer if one is so long that the engine will refuse the call.
        `is_over`: whether the call has ended meanwhile; any thread calls it. Raises CallFailed."""
        seen = await self._seen(request) if request.media else ()
        # Count the parts first: if there are many, counting their characters takes long as well.
        is_plain = not any(isinstance(one, PoolPrompt) for one in request.inputs)
        if is_plain and _num_parts(request) <= SHORT_CHARS and _num_chars(request) <= SHORT_CHARS:
            return self._tokenized(request, seen, is_over)
        return await self.lane.run(request.tenant, 0, self._tokenized, request, seen, is_over)

    async def _seen(self, request: PoolRequest) -> list[Seen]:
        """Return what the model reads of the request's media. Raises CallFailed, and CallFailed (CONTEXT_OVERFLOW) as
        soon as those of one input are too long: each keeps megabytes until it is encoded."""
        seen: list[Seen] = []
        num_bytes = sum(len(one.data) for one in request.media)  # all are kept while one waits
        for number, one in enumerate(request.inputs):
            num_cells = 0
            for medium in request.media[len(seen) :][: one.num_media if isinstance(one, PoolPrompt) else 0]:
                seen.append(await self.media_lane.run(request.tenant, num_bytes, self.prompts.see, medium))
                num_cells += length_of(seen[-1])
                if num_cells > self.longest:
                    raise CallFailed(_too_many_cells(number, num_cells, self.longest, medium.param))
        return seen

    def _tokenized(self, request: PoolRequest, seen: Sequence[Seen], is_over: Callable[[], bool]) -> list[PooledInput]:
        """Return the tokens of each input. Stop after an input that is too long, since the engine will refuse the call:
        a query of megabytes would be tokenised in vain with each further document. Stop also if the call is over.

        `seen`: what the model reads of the request's media."""
        tokens: list[PooledInput] = []
        num_seen = 0
        patience = Patience(_num_chars(request))
        for one in request.inputs:
            if is_over():
                break
            patience.check()
            if isinstance(one, PoolPrompt):
                own = slice(num_seen, num_seen + one.num_media)
                num_seen = own.stop
                tokens.append(self._prompted(_generate_request(one, request.media[own]), seen[own]))
            elif not isinstance(one, str):
                tokens.append(self._in_turn(one))
            elif request.query is not None and request.kind == "rank":
                tokens.append(self.inputs.of_pair(request.query, one))
            else:
                tokens.append(self.inputs.of_text(one))
            if len(tokens[-1]) > self.longest:
                break
        return tokens

    def _prompted(self, request: GenerateRequest, seen: Sequence[Seen]) -> PooledInput:
        """Return the input that messages make, or a text with media. Raises CallFailed."""
        prompt = self.prompts.prompt(request, seen)
        return Prompt.placed(prompt.tokens, prompt.media) if prompt.media else prompt.tokens

    def _in_turn(self, parts: Sequence[int | str]) -> Sequence[int]:
        """Return the tokens of an input of texts and token ids, or so many that the engine will refuse the input.

        Only a text that comes first gets special tokens."""
        if not any(isinstance(part, str) for part in parts):
            ids = cast("Sequence[int]", parts)
            if len(ids) > self.longest:
                return ids
            try:
                return in_array(ids)  # a list would be walked once more on the event loop, id by id
            except OverflowError:  # the engine refuses an id that no vocabulary has
                return ids
        tokens = joined()
        for number, part in enumerate(parts):
            if len(tokens) > self.longest:
                break
            if isinstance(part, str):
                extend(tokens, self.inputs.of_text(part, add_special=number == 0))
                continue
            try:
                tokens.append(part)
            except OverflowError:
                return [*tokens, part]
        return tokens


def _num_chars(request: PoolRequest) -> int:
    """Return the number of characters that are tokenised; the query counts once for each document."""
    query = len(request.query or "")
    return sum(query + _chars_of(one) for one in request.inputs)


def _num_parts(request: PoolRequest) -> int:
    """Return the number of elements (token ids and texts) of those inputs that are lists; plain texts add none."""
    return sum(len(one) for one in request.inputs if not isinstance(one, str | PoolPrompt))


def _chars_of(one: PoolInput) -> int:
    if isinstance(one, PoolPrompt):
        return text_chars(_generate_request(one))
    return len(one) if isinstance(one, str) else sum(len(part) for part in one if isinstance(part, str))


def _generate_request(one: PoolPrompt, media: tuple[Medium, ...] = ()) -> GenerateRequest:
    """Return the request for an answer that would have an input as its prompt."""
    if one.messages:
        return GenerateRequest(messages=one.messages, media=media, template_values=one.template_values)
    return GenerateRequest(prompt=one.text, prompt_media=one.media, media=media)


def _too_many_cells(number: int, num_cells: int, longest: int, param: str) -> Failure:
    remedy = f"the pictures and sounds of input {number} are too many or too large: send fewer or smaller ones"
    message = f"input {number} has {num_cells} tokens or more and this model reads {longest} at once; {remedy}"
    return Failure(FailureCode.CONTEXT_OVERFLOW, message, param or None, num_cells, longest, remedy)
