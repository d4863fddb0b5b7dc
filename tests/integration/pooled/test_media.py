"""Pictures and sounds in what is embedded: the same vectors as by hand, made once, in turns with texts."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from llama_cpp import mtmd_cpp as m

from tests.integration.pooled.bench import PooledBench, running, settings
from tests.integration.pooled.test_memories import likeness
from tests.support.media_reader import settings as projector_settings
from tests.support.projectors import PROJECTORS, Pair, picture, sound, write_pair
from workers.chat.prompts import Prompts
from workers.engine.cache.prompt import Prompt
from workers.engine.encoder import MediaEncoder
from workers.engine.pooled.jobs import Vectors
from workers.llama.media.parts import MediaChunk, Part, Picture, Sound
from workers.llama.media.projector import Embeddings, Projector
from workers.llama.model import Model
from workers.llama.native import EncodeFailed
from workers.llama.pooling import PooledContext, Pooling
from workers.models.spec import LlamaSettings
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.requests import GenerateRequest, Medium

BEFORE, BETWEEN, AFTER = "Once upon a time there was a cat. Say what ", " and then ", " was there, and what was not?"
TEXTS = ["Once upon a time", "The cat sat on the mat and slept. " * 6, "x"]
MARKER = "<__media__>"
POOLINGS = ["last", "mean", "cls", "none"]


@dataclass
class SeeingBench:
    name: str
    model: Model
    projector: Projector
    encoder: MediaEncoder
    bench: PooledBench

    def medium(self, seed: int) -> Picture | Sound:
        return Picture(picture(seed)) if PROJECTORS[self.name].sees else Sound(sound(seed))

    def large(self) -> Picture | Sound:
        return Picture(picture(7, 320, 320)) if PROJECTORS[self.name].sees else Sound(sound(7))

    def prompt(self, *media: Picture | Sound, after: str = AFTER, before: str = BEFORE) -> Prompt:
        """An input as a worker makes it of a text with places."""
        texts = [before, *[BETWEEN] * (len(media) - 1), after]
        places = [sum(map(len, texts[:number])) for number in range(1, len(texts))]
        files = tuple(Medium("picture", b"") for _ in media)
        asked = GenerateRequest(prompt="".join(texts), prompt_media=tuple(places), media=files)
        prompts = Prompts(None, self.model, bos_text=self.model.bos_text, end_token=self.model.vocab.end_token)
        made = prompts.prompt(asked, [self.seen(one) for one in media])
        return Prompt.placed(made.tokens, made.media)

    def seen(self, medium: Part) -> list[Sequence[int] | MediaChunk]:
        read = self.projector.read([medium])
        return [one if isinstance(one, MediaChunk) else one.tokens.tolist() for one in read]

    def vector(self, *media: Picture | Sound) -> Vectors:
        return self.bench.vectors([self.prompt(*media)])[0]


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("projectors")
    return {name: write_pair(folder, name) for name in PROJECTORS}


@contextmanager
def seeing(
    name: str, pair: Pair, llama: LlamaSettings | None = None, *, start: bool = True, slots: int = 4
) -> Iterator[SeeingBench]:
    llama = llama or settings("last")
    with (
        Model.load(pair.model, llama) as model,
        Projector.load(model, projector_settings(pair), n_ubatch=llama.n_ubatch) as projector,
    ):
        encoder = MediaEncoder(projector)
        encoder.start()
        try:
            with running(
                model, llama, slots=slots, n_ctx=2048, kv_tokens=4096, start=start, encoder=encoder
            ) as bench:
                yield SeeingBench(name, model, projector, encoder, bench)
        finally:
            encoder.stop()


def rows_by_hand(eyes: SeeingBench, *media: Picture | Sound) -> Vectors:
    """The vector of each cell, from libmtmd's own tokenizer and decoder over a context without pooling."""
    texts = [BEFORE, *[BETWEEN] * (len(media) - 1), AFTER]
    text = MARKER.join(texts).encode()
    given = m.mtmd_input_text(text=text, text_len=len(text), add_special=True, parse_special=True)
    bitmaps = (m.mtmd_bitmap_p_ctypes * len(media))(*map(bitmap_of, media))
    chunks = m.mtmd_input_chunks_init()
    assert chunks is not None
    rows: list[Vectors] = []
    past = ctypes.c_int32(0)
    llama = settings("none", n_ubatch=1024)
    with PooledContext(
        eyes.model, llama, pooling=Pooling.NONE, n_ctx=2048, kv_tokens=2048, num_sequences=1
    ) as context:
        assert m.mtmd_tokenize(eyes.projector.pointer, chunks, ctypes.byref(given), bitmaps, len(media)) == 0
        for number in range(m.mtmd_input_chunks_size(chunks)):
            chunk = m.mtmd_input_chunks_get(chunks, number)
            status = m.mtmd_helper_eval_chunk_single(
                eyes.projector.pointer, context.pointer, chunk, past, 0, llama.n_ubatch, True, ctypes.byref(past)
            )
            assert status == 0
            rows.append(context.rows(0, m.mtmd_input_chunk_get_n_tokens(chunk)))
    m.mtmd_input_chunks_free(chunks)
    for bitmap in bitmaps:
        m.mtmd_bitmap_free(bitmap)
    return np.concatenate(rows)


def bitmap_of(medium: Picture | Sound) -> int | None:
    if isinstance(medium, Picture):
        height, width, _ = medium.pixels.shape
        return m.mtmd_bitmap_init(width, height, medium.pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)))
    samples = medium.samples.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    return m.mtmd_bitmap_init_from_audio(len(medium.samples), samples)


def pooled(rows: Vectors, pooling: str) -> Vectors:
    chosen = {"last": rows[-1:], "cls": rows[:1], "mean": rows.mean(axis=0, keepdims=True), "none": rows}[pooling]
    return chosen if pooling == "none" else chosen / np.linalg.norm(chosen, axis=1, keepdims=True)


@pytest.mark.parametrize("name", list(PROJECTORS))
def test_a_vector_is_that_of_a_context_driven_by_hand(name: str, pairs: dict[str, Pair]) -> None:
    with seeing(name, pairs[name]) as eyes:
        inputs = [(eyes.medium(1),), (eyes.medium(2), eyes.medium(1)), (eyes.large(),)]
        expected = [rows_by_hand(eyes, *media) for media in inputs]
        found = [eyes.vector(*media) for media in inputs]
        again = eyes.bench.vectors([eyes.prompt(*media) for media in inputs])
        for rows, one, other, media in zip(expected, found, again, inputs, strict=True):
            assert len(rows) == len(eyes.prompt(*media)), "every cell counts"
            assert np.abs(one - pooled(rows, "last")).max() < 1e-3
            assert np.abs(other - one).max() < 1e-2
    assert likeness(found[0], found[1]) < 0.99
