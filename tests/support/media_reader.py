"""A context that reads pictures and sound, driven by hand: chunks in, logits out, no engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.support.lone_context import Logits, LoneContext, lone_context
from tests.support.projectors import PROJECTORS, Pair, picture, sound
from workers.llama.context import EmbeddingBatch
from workers.llama.media.parts import Chunk, MediaChunk, Part, Picture, Sound, TextChunk
from workers.llama.media.projector import Embeddings, Projector, ProjectorSettings
from workers.llama.model import Model
from workers.models.spec import LlamaSettings

ONE_THREAD = LlamaSettings(n_threads=1)
BEFORE, AFTER = "system\nYou see and hear. Say what", "was there, and what was not?"


class MediaReader:
    """One thread, so equal chunks in equal cells give equal bits."""

    def __init__(self, name: str, projector: Projector, lone: LoneContext) -> None:
        self.small = PROJECTORS[name]
        self.projector = projector
        self.lone = lone
        self.batch: EmbeddingBatch = lone.context.new_embedding_batch()

    def medium(self, seed: int) -> Picture | Sound:
        return Picture(picture(seed)) if self.small.sees else Sound(sound(seed))

    def read(self, *seeds: int) -> list[Chunk]:
        """A prompt with pictures or sounds, one after the other."""
        parts: list[Part] = [BEFORE, *(self.medium(seed) for seed in seeds), AFTER]
        return self.projector.read(parts)

    def media(self, seed: int) -> list[MediaChunk]:
        return [chunk for chunk in self.read(seed) if isinstance(chunk, MediaChunk)]

    def feed(self, sequence: int, chunks: Sequence[Chunk], position: int = 0) -> Logits:
        """Compute chunks one after the other -> the logits of the last, which is text."""
        for chunk in chunks:
            if isinstance(chunk, TextChunk):
                logits = self.lone.feed(sequence, chunk.tokens.tolist(), position)
                position += len(chunk.tokens)
            else:
                self.add(sequence, chunk, self.projector.encode(chunk), position)
                self.decode()
                position += chunk.num_positions
        return logits

    def add(self, sequence: int, chunk: MediaChunk, embeddings: Embeddings, position: int) -> None:
        self.batch.add(embeddings, chunk.positions(position), sequence, is_causal=chunk.is_causal)

    def decode(self) -> None:
        self.lone.context.decode_embeddings(self.batch)
        self.batch.clear()


def settings(pair: Pair, **more: int) -> ProjectorSettings:
    return ProjectorSettings(pair.projector, n_threads=1, use_gpu=False, **more)


@contextmanager
def media_reader(name: str, pair: Pair, llama: LlamaSettings = ONE_THREAD) -> Iterator[MediaReader]:
    with (
        Model.load(pair.model, llama) as model,
        Projector.load(model, settings(pair), n_ubatch=llama.n_ubatch) as projector,
        lone_context(model, slots=4, kv_tokens=4096, llama=llama) as lone,
    ):
        yield MediaReader(name, projector, lone)
