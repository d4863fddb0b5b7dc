"""Decodes the pictures and sounds of callers in processes that can be stopped.

A picture or a sound is a file of a stranger's, read by libraries in C. In the worker's own process a fault in one of
them would end every call and reach every team's prompts; a picture that is small as a file and large as pixels would
take its memory. So a helper process decodes, one medium at a time: it has bounds on its memory and its time, can open
nothing, has no secret and no prompt in memory, and is replaced when it ends (docs/media.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from workers.llama.media.parts import Picture, Sound
from workers.media.bounds import NUM_DECODERS, MediaLimits
from workers.media.messages import Answer, Kind, Pixels, Question, Refused, Setup
from workers.process.helper_pool import HelperPool
from workers.process.helper_process import NotStarted, ProcessEnded, TookTooLong
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.requests import Medium

START_S = 30.0
DECODE_S = 5.0
"""Maximum seconds for decoding one medium. The slowest that are accepted take less (docs/media.md)."""

SMALLER = {"picture": "send a smaller picture", "sound": "send a shorter sound, or one channel of it"}

_encode = msgspec.json.Encoder().encode
_decode_answer: Callable[[bytes], Answer] = msgspec.json.Decoder(Answer).decode


class MediaDecoder:
    """Decodes media, one per process at a time. Safe to use from several threads."""

    def __init__(
        self,
        limits: MediaLimits,
        *,
        sample_rate: int | None,
        sees: bool,
        decode_s: float = DECODE_S,
        start_s: float = START_S,
        number: int = NUM_DECODERS,
    ) -> None:
        """`sample_rate`: of the sounds that the projector reads; None: it reads none. `sees`: whether it reads
        pictures. `number`: how many processes; without `start` each starts when it is first needed."""
        self._limits = limits
        self._sample_rate = sample_rate
        self._sees = sees
        self._decode_s = decode_s
        self._pool = HelperPool("workers.media.decode_process", number=number, start_s=start_s)
        setup = Setup(limits=limits, sample_rate=sample_rate, sees=sees, cpu_s=math.ceil(decode_s) + 1)
        self._setup = _encode(setup)
        self._pool.tell_successors(self._setup)

    @property
    def pid(self) -> int | None:
        """Id of the helper process that is used first."""
        return self._pool.pid

    def start(self) -> None:
        """Start the first process, which takes some tenths of a second, and let the second one follow. Call it once.

        Raises NotStarted."""
        self._pool.start(self._setup)
        self._pool.start_spare()

    def decode(self, medium: Medium) -> Picture | Sound:
        """Return the medium's pixels or samples, within the limits. Blocks until a process is free, then for
        `decode_s` at most. Raises CallFailed.

        Threads beside it go on: nothing here holds the interpreter's lock for longer than a piece of a file takes."""
        if not (self._sees if medium.kind == "picture" else self._sample_rate):
            message = f"this model reads no {medium.kind}s; send text, or ask a model that reads them"
            raise CallFailed(Failure(FailureCode.UNSUPPORTED, message, _param(medium)))
        arrival = _Arrival(medium.kind, self._limits, self._sample_rate)
        self._ask(medium, arrival)
        if arrival.decoded is None:
            raise CallFailed(Failure(FailureCode.INVALID_REQUEST, arrival.reason, _param(medium)))
        return arrival.decoded

    def _ask(self, medium: Medium, arrival: _Arrival) -> None:
        """Have a process decode the medium. Raises CallFailed."""
        question = _encode(Question(medium.kind, len(medium.data)))
        try:
            with self._pool.lent() as process:
                process.ask(question, self._decode_s, attached=medium.data, room=arrival.room)
        except TookTooLong as late:
            if late.starved:
                message = f"the process that decodes media had no processor for {self._decode_s:g} s; send it again"
                raise CallFailed(Failure(FailureCode.UNAVAILABLE, message)) from None
            raise CallFailed(self._too_much(medium, f"longer than {self._decode_s:g} s")) from None
        except NotStarted as error:
            message = (
                f"media can't be decoded on this worker: the process for it did not start ({error}); send it again"
            )
            raise CallFailed(Failure(FailureCode.UNAVAILABLE, message)) from None
        except ProcessEnded as ended:
            if ended.killed:
                message = "the process that decodes media was killed, for want of memory perhaps; send it again"
                raise CallFailed(Failure(FailureCode.OUT_OF_MEMORY, message)) from None
            raise CallFailed(self._too_much(medium, "more memory or time than one medium may")) from None

    def _too_much(self, medium: Medium, what: str) -> Failure:
        """Return the failure of a medium that the process did not survive."""
        message = f"decoding the {medium.kind} takes {what}; {SMALLER[medium.kind]}, or encode it anew"
        return Failure(FailureCode.INVALID_REQUEST, message, _param(medium))

    def close(self) -> None:
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Arrival:
    """A medium that comes from a helper process: memory for it, once its size is known and within the limits."""

    def __init__(self, kind: Kind, limits: MediaLimits, sample_rate: int | None) -> None:
        self._kind = kind
        self._limits = limits
        self._sample_rate = sample_rate
        self.decoded: Picture | Sound | None = None
        """Its memory is filled when `HelperProcess.ask` has returned."""
        self.reason = ""
        """Why it was refused, for the caller."""

    def room(self, line: bytes) -> memoryview:
        """Return the memory for the medium that the line announces; none if it was refused. Raises CallFailed.

        The process read a stranger's file, and is not believed: a size beyond the limits is its fault."""
        try:
            answer = _decode_answer(line)
        except msgspec.DecodeError:
            raise CallFailed(_NO_ANSWER) from None
        if isinstance(answer, Refused):
            self.reason = answer.message
            return memoryview(b"")
        if isinstance(answer, Pixels):
            if self._kind != "picture" or self._limits.picture_fault(answer.width, answer.height):
                raise CallFailed(_NO_ANSWER)
            picture = self.decoded = Picture(np.empty((answer.height, answer.width, 3), np.uint8))
            return picture.pixels.data.cast("B")
        rate = self._sample_rate
        if self._kind != "sound" or not rate or self._limits.sound_fault(answer.number / rate):
            raise CallFailed(_NO_ANSWER)
        sound = self.decoded = Sound(np.empty(answer.number, np.float32))
        return sound.samples.data.cast("B")


_NO_ANSWER = Failure(FailureCode.INTERNAL, "the process that decodes media gave no answer that can be read")


def _param(medium: Medium) -> str | None:
    return medium.param or None
