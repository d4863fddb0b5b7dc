"""Pictures and sounds in what is embedded: the same vectors as by hand, made once, in turns with texts."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
from workers.engine.pooled.jobs import Vectors, normalized
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
            with running(model, llama, slots=slots, n_ctx=2048, kv_tokens=4096, start=start, encoder=encoder) as bench:
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
    with PooledContext(eyes.model, llama, pooling=Pooling.NONE, n_ctx=2048, kv_tokens=2048, num_sequences=1) as context:
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


def bitmap_of(medium: Picture | Sound) -> Any:
    if isinstance(medium, Picture):
        height, width, _ = medium.pixels.shape
        return m.mtmd_bitmap_init(width, height, medium.pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)))
    samples = medium.samples.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    return m.mtmd_bitmap_init_from_audio(len(medium.samples), samples)


def pooled(rows: Vectors, pooling: str) -> Vectors:
    ways = {"last": rows[-1:], "cls": rows[:1], "mean": rows.mean(axis=0, keepdims=True), "none": rows}
    return ways[pooling] if pooling == "none" else normalized(ways[pooling], 2)


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


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("name", ["gemma3", "gemma3-window", "qwen2vl", "idefics3"])
def test_every_pooling_counts_cells_as_tokens(name: str, pooling: str, pairs: dict[str, Pair]) -> None:
    """In parts of 32 rows, beside others: a picture of 400 cells is cut, one whose cells see each other is not."""
    with seeing(name, pairs[name], settings(pooling, n_ubatch=32), slots=3) as eyes:
        media = [(eyes.medium(1),), (eyes.medium(2), eyes.medium(1)), (eyes.large(),)]
        found = eyes.bench.vectors([*(eyes.prompt(*one) for one in media), *TEXTS])
        texts = eyes.bench.vectors(TEXTS)
        for one, vectors in zip(media, found, strict=False):
            assert likeness(vectors, pooled(rows_by_hand(eyes, *one), pooling)) > 0.999
    for mixed, alone in zip(found[len(media) :], texts, strict=True):
        assert likeness(mixed, alone) > 0.999


def test_nothing_but_a_picture_can_be_embedded(pairs: dict[str, Pair]) -> None:
    with seeing("qwen2vl", pairs["qwen2vl"], settings("mean")) as eyes:
        prompts = [eyes.prompt(eyes.medium(seed), before="", after="") for seed in (1, 2)]
        bare, other = eyes.bench.vectors(prompts)
        assert bare.shape == other.shape == (1, eyes.bench.context.width)
        assert likeness(bare, other) < 0.999


def test_the_end_token_stands_at_the_end(pairs: dict[str, Pair]) -> None:
    """As libmtmd has it, and not behind the text before the first picture: its vector is that of the input."""
    llama = msgspec.structs.replace(settings("last"), override_kv={"tokenizer.ggml.add_eos_token": True})
    with seeing("phi4", pairs["phi4"], llama) as eyes:
        vocab = eyes.model.vocab
        prompt = eyes.prompt(eyes.medium(1))
        assert vocab.end_token == vocab.eos
        assert [number for number, token in enumerate(prompt.tokens) if token == vocab.eos] == [len(prompt) - 1]
        rows = rows_by_hand(eyes, eyes.medium(1))
        assert len(rows) == len(prompt)
        assert likeness(eyes.vector(eyes.medium(1)), rows[-1:]) > 0.999


def test_the_same_picture_is_encoded_once_and_another_has_another_vector(pairs: dict[str, Pair]) -> None:
    with seeing("phi4", pairs["phi4"]) as eyes:
        first = eyes.vector(eyes.medium(1))
        assert eyes.encoder.num_encoded == 1
        again = eyes.vector(eyes.medium(1))
        assert eyes.encoder.num_encoded == 1
        assert likeness(first, again) > 0.9999
        other = eyes.vector(eyes.medium(2))
        assert eyes.encoder.num_encoded == 2
        assert likeness(first, other) < 0.999
        twice = eyes.bench.vectors([eyes.prompt(eyes.medium(3)), eyes.prompt(eyes.medium(3))])
        assert eyes.encoder.num_encoded == 3
        assert likeness(*twice) > 0.9999
        assert eyes.bench.engine.load().encode_s == eyes.encoder.cell_s > 0


def test_another_team_has_it_encoded_anew(pairs: dict[str, Pair]) -> None:
    with seeing("phi4", pairs["phi4"]) as eyes:
        prompt = eyes.prompt(eyes.medium(1))
        scopes = [("red", ""), ("blue", ""), ("red", "salt"), ("red", "")]
        found = [eyes.bench.vectors([prompt], team=team, salt=salt)[0] for team, salt in scopes]
        assert eyes.encoder.num_encoded == 3
        assert all(likeness(found[0], one) > 0.9999 for one in found)


def test_several_callers_at_once(pairs: dict[str, Pair]) -> None:
    with seeing("qwen2vl", pairs["qwen2vl"], settings("last", n_ubatch=32)) as eyes:
        prompts = [eyes.prompt(eyes.medium(seed)) for seed in (1, 2, 3)] + [eyes.prompt(eyes.large())]
        alone = [eyes.bench.vectors([prompt])[0] for prompt in prompts]
        text = eyes.bench.vectors(TEXTS)
        found: dict[int, tuple[Vectors, ...]] = {}

        def ask(number: int) -> None:
            team = f"team {number % 3}"
            found[number] = eyes.bench.vectors([prompts[number % 4], *TEXTS, prompts[0]], team=team)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, vectors in found.items():
            for one, expected in zip(vectors, [alone[number % 4], *text, alone[0]], strict=True):
                assert likeness(one, expected) > 0.999
    assert len(found) == 8


class SlowProjector:
    """Encodes when it is told to."""

    def __init__(self, projector: Projector) -> None:
        self.projector = projector
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.num = 0

    def encode(self, chunk: MediaChunk) -> Embeddings:
        self.num += 1
        self.begun.set()
        assert self.may_go_on.wait(20)
        if self.error is not None:
            raise self.error
        return self.projector.encode(chunk)


@pytest.fixture
def slow(pairs: dict[str, Pair]) -> Iterator[tuple[SeeingBench, SlowProjector]]:
    with seeing("qwen2vl", pairs["qwen2vl"]) as eyes:
        projector = SlowProjector(eyes.projector)
        eyes.encoder._projector = projector
        yield eyes, projector
        projector.may_go_on.set()


def test_texts_are_embedded_while_a_picture_is_encoded(slow: tuple[SeeingBench, SlowProjector]) -> None:
    eyes, projector = slow
    key = eyes.bench.submit([eyes.prompt(eyes.medium(1)), "a text after it"])
    assert projector.begun.wait(5)
    assert len(eyes.bench.vectors(TEXTS)) == len(TEXTS)
    assert key not in eyes.bench.ended
    load = eyes.bench.engine.load()
    assert (load.slots_busy, load.kv_tokens_used) == (1, 0), "it holds no cells meanwhile"
    busy = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - busy < 0.15, "nobody spins meanwhile"
    projector.may_go_on.set()
    outcome = eyes.bench.outcome(key)
    assert not isinstance(outcome, Failure)
    assert likeness(outcome[0], rows_by_hand(eyes, eyes.medium(1))[-1:]) > 0.999


def test_only_the_next_inputs_of_a_call_are_encoded_ahead(slow: tuple[SeeingBench, SlowProjector]) -> None:
    eyes, projector = slow
    key = eyes.bench.submit([eyes.prompt(eyes.medium(seed)) for seed in range(1, 7)])
    assert projector.begun.wait(5)
    eyes.bench.engine.check_integrity()
    assert len(eyes.encoder._known) == 2
    eyes.bench.engine.cancel(key)
    eyes.bench.engine.check_integrity()
    projector.may_go_on.set()
    eyes.vector(eyes.medium(9))
    assert projector.num == 2, "what nobody wants any more is not begun"
    assert key not in eyes.bench.ended


def test_a_picture_that_can_not_be_encoded_ends_its_call_alone(slow: tuple[SeeingBench, SlowProjector]) -> None:
    eyes, projector = slow
    projector.error = EncodeFailed("no number")
    failing = eyes.bench.submit(["a text", eyes.prompt(eyes.medium(1))])
    text = eyes.bench.submit(TEXTS)
    projector.may_go_on.set()
    outcome = eyes.bench.outcome(failing)
    assert isinstance(outcome, Failure)
    assert (outcome.code, outcome.param) == (FailureCode.INVALID_REQUEST, "input")
    assert not isinstance(eyes.bench.outcome(text), Failure)
    projector.error = None
    assert likeness(eyes.vector(eyes.medium(1)), rows_by_hand(eyes, eyes.medium(1))[-1:]) > 0.999, "it is tried again"


def test_the_books_know_the_positions_of_a_picture(pairs: dict[str, Pair]) -> None:
    """With M-RoPE a picture of 400 cells has one position in time, and the text after it goes on 20 further."""
    with seeing("qwen2vl", pairs["qwen2vl"], settings("last", n_ubatch=32), start=False) as eyes:
        prompt = eyes.prompt(eyes.large())
        key = eyes.bench.submit([prompt])
        engine, offsets = eyes.bench.engine, list[int]()
        run = engine._run

        def watched(parts: object) -> None:
            run(parts)  # type: ignore[arg-type]
            engine._check()
            offsets.extend(job.offset for job in engine._jobs if job.offset)

        engine._run = watched  # type: ignore[method-assign]
        engine.start()
        assert not isinstance(eyes.bench.outcome(key), Failure)
    span = prompt.spans[0]
    assert any(span.start < offset < span.end for offset in offsets)
    assert any(span.end < offset for offset in offsets) or len(prompt) - span.end <= 32


def test_media_of_inputs_that_are_done_are_given_back(pairs: dict[str, Pair]) -> None:
    with seeing("phi4", pairs["phi4"], start=False) as eyes:
        eyes.bench.submit([eyes.prompt(eyes.medium(seed)) for seed in (1, 2, 3)])
        engine, left = eyes.bench.engine, list[list[list[int]]]()
        run = engine._run

        def watched(parts: object) -> None:
            run(parts)  # type: ignore[arg-type]
            left.append([list(job.media) for job in engine._jobs])

        engine._run = watched  # type: ignore[method-assign]
        engine.start()
        eyes.bench.outcome(1)
    assert left[-1] == [[]]
    assert [[1, 2]] in left or [[2]] in left


def test_a_model_without_a_projector_refuses_them(pairs: dict[str, Pair]) -> None:
    with seeing("phi4", pairs["phi4"]) as eyes, running(eyes.model, settings("last")) as blind:
        with pytest.raises(CallFailed, match="input 0 has pictures or sounds") as refused:
            blind.submit([eyes.prompt(eyes.medium(1))])
        assert refused.value.failure.code is FailureCode.UNSUPPORTED
        assert len(blind.vectors([eyes.prompt(after="no picture")])[0]) == 1
        long = eyes.prompt(eyes.medium(1), after="word " * 2100)
        with pytest.raises(CallFailed, match="input 1 has") as refused:
            eyes.bench.submit(["x", long])
        assert refused.value.failure.num_prompt_tokens == len(long)
