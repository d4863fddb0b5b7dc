"""Reads a caller's pictures and sounds for the model: from the file to the cells that stand in a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from workers.llama.media.parts import MediaChunk
from workers.llama.media.projector import Projector
from workers.llama.native import MediaRefused
from workers.media.decoder import MediaDecoder
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.requests import Medium


class MediaReader:
    """Reads media, on any thread. Takes what a helper process needs to decode them, and some milliseconds more."""

    def __init__(self, decoder: MediaDecoder, projector: Projector) -> None:
        self._decoder = decoder
        self._projector = projector

    def read(self, medium: Medium) -> list[Sequence[int] | MediaChunk]:
        """Return a medium's cells, and the tokens that the model expects around them. Raises CallFailed."""
        decoded = self._decoder.decode(medium)
        try:
            chunks = self._projector.read([decoded])
        except MediaRefused as refused:
            failure = Failure(FailureCode.INVALID_REQUEST, str(refused), medium.param or None)
            raise CallFailed(failure) from None
        return [one if isinstance(one, MediaChunk) else one.tokens.tolist() for one in chunks]
