"""Opens the parts of a worker that see and hear: its projector, what decodes files, and what makes embeddings."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from workers.engine.encoder import MediaEncoder
from workers.llama.media.parts import MediaChunk
from workers.llama.media.projector import Projector, ProjectorSettings
from workers.llama.model import Model, ModelError
from workers.llama.native import EncodeFailed, MediaRefused
from workers.media.bounds import MediaLimits
from workers.media.decoder import MediaDecoder
from workers.models.spec import NO_PROJECTOR, ModelSpec
from workers.process.helper_process import NotStarted
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.heartbeat import Modality, ModelFacts
from workers.protocol.requests import Medium

logger = logging.getLogger(__name__)

PICTURE_SIDE, SOUND_S = 1024, 10.0
"""Pixels of a side of the picture, and seconds of the sound, whose cells are told to gateways as usual ones."""


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


@dataclass(frozen=True, slots=True)
class ServedMedia:
    projector: Projector
    reader: MediaReader
    encoder: MediaEncoder

    @property
    def inputs(self) -> tuple[Modality, ...]:
        """Return the kinds of input that the model takes."""
        seen: tuple[Modality, ...] = ("image",) if self.projector.sees else ()
        heard: tuple[Modality, ...] = ("audio",) if self.projector.hears else ()
        return ("text", *seen, *heard)

    def facts(self, model: ModelFacts) -> ModelFacts:
        """Return the model's facts, with those of its projector."""
        return replace(
            model,
            inputs=self.inputs,
            picture_cells=self.projector.num_picture_cells(PICTURE_SIDE, PICTURE_SIDE),
            sound_cells=self.projector.num_sound_cells(SOUND_S),
        )


def open_media(
    opened: contextlib.ExitStack, model: Model, spec: ModelSpec, *, n_ubatch: int, max_bytes: int
) -> ServedMedia | None:
    """Open what reads pictures and sounds; None: the model has no projector. `opened` closes it all. `n_ubatch`:
    micro-batch of the context that reads them. `max_bytes`: memory for embeddings that no call uses.

    Raises ModelError, ModelTooLarge."""
    if spec.projector in ("", NO_PROJECTOR):
        return None
    limits, llama = MediaLimits(), spec.llama
    settings = ProjectorSettings(
        Path(spec.projector).expanduser(),
        n_threads=llama.n_threads_batch or llama.n_threads,
        use_gpu=spec.projector_on_gpu,
        image_min_tokens=spec.image_min_tokens,
        image_max_tokens=spec.image_max_tokens,
    )
    projector = opened.enter_context(
        contextlib.closing(Projector.load(model, settings, n_ubatch=n_ubatch, limits=limits))
    )
    try:
        projector.warm_up()
    except EncodeFailed as error:
        raise ModelError(str(error)) from None
    decoder = opened.enter_context(MediaDecoder(limits, sample_rate=projector.sample_rate, sees=projector.sees))
    try:
        decoder.start()
    except NotStarted as error:
        raise ModelError(f"the process that decodes pictures and sounds did not start: {error}") from None
    encoder = MediaEncoder(projector, max_bytes=max_bytes)
    opened.callback(encoder.stop)
    encoder.start()
    served = ServedMedia(projector, MediaReader(decoder, projector), encoder)
    logger.info("the model reads %s, by %s", ", ".join(served.inputs), projector.path.name)
    return served
