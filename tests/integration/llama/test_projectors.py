"""What a model is told of pictures and sound: of small ones with random weights, of each kind."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import numpy as np
import pytest
from llama_cpp import mtmd_cpp as m

from tests.support.lone_context import Logits, same
from tests.support.media_reader import AFTER, BEFORE, ONE_THREAD, MediaReader, media_reader, settings
from tests.support.projectors import PROJECTORS, SAMPLE_RATE, Pair, picture, sound, write_pair
from workers.llama.media.parts import MediaChunk, Picture, Sound, TextChunk
from workers.llama.media.projector import Projector
from workers.llama.model import Model

SLICED = "idefics3"


def test_the_files_are_always_the_same(tmp_path: Path, pairs: dict[str, Pair]) -> None:
    again = write_pair(tmp_path, "gemma3")
    assert again.model.read_bytes() == pairs["gemma3"].model.read_bytes()
    assert again.projector.read_bytes() == pairs["gemma3"].projector.read_bytes()
    assert all(pair.projector.stat().st_size < 1 << 20 for pair in pairs.values())


def test_a_projector_tells_what_it_reads(reader: MediaReader) -> None:
    projector, small = reader.projector, reader.small
    assert (projector.sees, projector.hears) == (small.sees, not small.sees)
    assert projector.sample_rate == (None if small.sees else SAMPLE_RATE)
    assert projector.is_causal is small.is_causal
    assert projector.uses_mrope is (small.architecture == "qwen2vl")


def test_equal_media_have_equal_embeddings_and_say_the_same(reader: MediaReader) -> None:
    first, again, other = (reader.read(seed) for seed in (1, 1, 2))
    embeddings = [[reader.projector.encode(one) for one in reader.media(seed)] for seed in (1, 1, 2)]
    for one, same_one, another in zip(*embeddings, strict=True):
        assert one.tobytes() == same_one.tobytes()
        assert np.abs(one - another).max() > 0.1
    said = [reader.feed(sequence, chunks) for sequence, chunks in enumerate((first, again, other))]
    assert np.abs(said[0] - said[1]).max() < tolerance(said[0])
    assert np.abs(said[0] - said[2]).max() > 0.2 * said[0].std()
    reader.lone.memory.clear()
    assert same(reader.feed(0, again), said[0])


def test_digests_tell_media_and_slices_apart(reader: MediaReader) -> None:
    first, again, other = ([chunk.digest for chunk in reader.media(seed)] for seed in (1, 1, 2))
    assert first == again
    assert len({*first, *other}) == 2 * len(first)


@pytest.mark.parametrize("seeds", [(1,), (2, 1), (1, 2)], ids=str)
def test_logits_are_those_of_libmtmds_helper(seeds: tuple[int, ...], reader: MediaReader) -> None:
    chunks = reader.read(*seeds)
    said = reader.feed(0, chunks)
    end = reader.lone.memory.last_position(0)
    reader.lone.memory.clear()
    assert same(helped(reader, *seeds), said)
    assert reader.lone.memory.last_position(0) == end
    assert end + 1 == sum(c.num_positions if isinstance(c, MediaChunk) else len(c.tokens) for c in chunks)


def tolerance(logits: Logits) -> float:
    """What the place of cells in the cache may change: keys and values have 16 bits."""
    return 0.01 * float(logits.std())


def helped(reader: MediaReader, *seeds: int) -> Logits:
    """The whole prompt read and computed by libmtmd's own functions -> the last logits."""
    bitmaps = (m.mtmd_bitmap_p_ctypes * len(seeds))(*(bitmap(reader.medium(seed)) for seed in seeds))
    text = (BEFORE + m.mtmd_default_marker().decode() * len(seeds) + AFTER).encode()
    asked = m.mtmd_input_text(text=text, text_len=len(text), add_special=False, parse_special=True)
    chunks = m.mtmd_input_chunks_init()
    context, end = reader.lone.context, ctypes.c_int32(0)
    assert m.mtmd_tokenize(reader.projector.pointer, chunks, ctypes.byref(asked), bitmaps, len(seeds)) == 0
    evaluated = m.mtmd_helper_eval_chunks(
        reader.projector.pointer, context.pointer, chunks, 0, 0, context.n_ubatch, True, ctypes.byref(end)
    )
    assert evaluated == 0
    m.mtmd_input_chunks_free(chunks)
    for one in bitmaps:
        m.mtmd_bitmap_free(one)
    return reader.lone._logits(-1)


def bitmap(medium: Picture | Sound) -> int:
    if isinstance(medium, Picture):
        height, width, _ = medium.pixels.shape
        data = medium.pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        found: int = m.mtmd_bitmap_init(width, height, data)
    else:
        samples = medium.samples.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        found = m.mtmd_bitmap_init_from_audio(len(medium.samples), samples)
    return found


def test_slices_have_their_tokens_around(pairs: dict[str, Pair]) -> None:
    with media_reader(SLICED, pairs[SLICED]) as one:
        chunks = one.projector.read(["A ", Picture(picture(1, 32, 64)), Picture(picture(2, 64, 64))])
        media = [chunk for chunk in chunks if isinstance(chunk, MediaChunk)]
        assert len(media) == (2 + 1) + (4 + 1)
        texts = [one.lone.model.vocab.join(c.tokens.tolist()) for c in chunks if isinstance(c, TextChunk)]
        assert texts[:3] == [
            b"A <fake_token_around_image><row_1_col_1>",
            b"<fake_token_around_image><row_1_col_2>",
            b"\n\n<fake_token_around_image><global-img>",
        ]
        assert texts[3] == b"<fake_token_around_image><fake_token_around_image><row_1_col_1>"


def test_positions_with_m_rope_are_rows_and_columns(pairs: dict[str, Pair]) -> None:
    """A picture of 3 x 4 cells takes 4 positions; the next token comes after its longer side."""
    with media_reader("qwen2vl", pairs["qwen2vl"]) as one:
        (chunk,) = one.media(1)
        assert (chunk.num_cells, chunk.num_positions) == (12, 4)
        rows, columns = np.divmod(np.arange(12), 4)
        assert chunk.positions(7).tolist() == [[7] * 12, (7 + rows).tolist(), (7 + columns).tolist(), [0] * 12]
        before, _, after = chunks = one.read(1)
        assert isinstance(before, TextChunk)
        assert isinstance(after, TextChunk)
        one.feed(0, chunks)
        start = len(before.tokens)
        assert one.lone.positions(0) == (0, start + 4 + len(after.tokens) - 1)


def test_positions_of_sound_with_m_rope_are_alike_in_all_sections(pairs: dict[str, Pair]) -> None:
    with media_reader("qwen2a", pairs["qwen2a"]) as one:
        (chunk,) = one.media(1)
        assert chunk.num_positions == chunk.num_cells == 750
        assert chunk.positions(5).tolist() == [list(range(5, 755))] * 4


def test_a_long_sound_is_several_chunks(pairs: dict[str, Pair]) -> None:
    with media_reader("ultravox", pairs["ultravox"]) as one:
        chunks = one.projector.read([Sound(sound(1, seconds=31.0))])
        assert [type(chunk) for chunk in chunks] == [MediaChunk, MediaChunk]
        assert all(isinstance(chunk, MediaChunk) and chunk.num_cells == 375 for chunk in chunks)


def test_the_size_of_pictures_can_be_bounded(pairs: dict[str, Pair]) -> None:
    pair = pairs["qwen2vl"]
    with Model.load(pair.model, ONE_THREAD) as model:
        for more, cells in (({"image_max_tokens": 16}, 16), ({"image_min_tokens": 256}, 256)):
            with Projector.load(model, settings(pair, **more), n_ubatch=512) as projector:
                side = 640 if "image_max_tokens" in more else 64
                (_, chunk, _) = projector.read([Picture(picture(1, side, side))])
                assert isinstance(chunk, MediaChunk)
                assert chunk.num_cells == cells


@pytest.mark.parametrize("name", PROJECTORS)
def test_conversations_in_one_batch_are_as_each_alone(name: str, pairs: dict[str, Pair]) -> None:
    with media_reader(name, pairs[name]) as one:
        prompts = [one.read(seed) for seed in (1, 2)]
        alone = []
        for chunks in prompts:
            alone.append(one.feed(0, chunks))
            one.lone.memory.clear()
        ends = []
        for sequence, chunks in enumerate(prompts):
            first = chunks[0]
            assert isinstance(first, TextChunk)
            one.lone.feed(sequence, first.tokens.tolist())
            ends.append(len(first.tokens))
        for sequence, chunks in enumerate(prompts):
            medium = chunks[1]
            assert isinstance(medium, MediaChunk)
            one.add(sequence, medium, one.projector.encode(medium), ends[sequence])
            ends[sequence] += medium.num_positions
        one.decode()
        for sequence, chunks in enumerate(prompts):
            said = one.feed(sequence, chunks[2:], ends[sequence])
            assert np.abs(said - alone[sequence]).max() < tolerance(said)


def test_encoding_beside_decoding_changes_neither(reader: MediaReader) -> None:
    chunks = reader.media(1)
    expected = [reader.projector.encode(chunk).tobytes() for chunk in chunks]
    tokens = list(range(100, 130))

    def say() -> list[Logits]:
        found = []
        for length in range(10, len(tokens)):
            reader.lone.memory.remove(0)
            found.append(reader.lone.feed(0, tokens[:length]))
        return found

    said = say()
    wrong: list[bytes] = []
    stop = threading.Event()
    rounds = 0

    def encode() -> None:
        nonlocal rounds
        while not stop.is_set():
            found = [reader.projector.encode(chunk).tobytes() for chunk in chunks]
            wrong.extend(one for one, known in zip(found, expected, strict=True) if one != known)
            rounds += 1

    thread = threading.Thread(target=encode)
    thread.start()
    try:
        for _ in range(10):
            assert all(same(one, known) for one, known in zip(say(), said, strict=True))
    finally:
        stop.set()
        thread.join()
    assert not wrong
    assert rounds


def test_reading_in_several_threads_finds_the_same(reader: MediaReader) -> None:
    expected = [chunk.digest for chunk in reader.media(1)]
    found: list[list[bytes]] = []

    def read() -> None:
        found.extend([chunk.digest for chunk in reader.media(1)] for _ in range(5))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 20


@pytest.mark.parametrize("name", ["idefics3", pytest.param("ultravox", marks=pytest.mark.long)])
def test_nothing_leaks(name: str, pairs: dict[str, Pair]) -> None:
    """Loads and encodings: 200 times the weights would be 20 MiB and more, 200 times a chunk's frames 45 MiB."""
    pair = pairs[name]
    with Model.load(pair.model, ONE_THREAD) as model:
        sizes = []
        for number in range(201):
            with Projector.load(model, settings(pair), n_ubatch=512) as projector:
                medium = Picture(picture(number)) if projector.sees else Sound(sound(number, 0.5))
                for chunk in projector.read([medium]):
                    if isinstance(chunk, MediaChunk):
                        projector.encode(chunk)
            if number % 100 == 0:
                sizes.append(resident_bytes())
        assert sizes[2] - sizes[1] < 2 << 20


def resident_bytes() -> int:
    """Memory in use, once what was freed has been given back."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_many_pictures_leave_nothing_behind(pairs: dict[str, Pair]) -> None:
    with media_reader("gemma3", pairs["gemma3"]) as one:
        sizes = []
        for number in range(601):
            (chunk,) = one.media(number % 7)
            one.projector.encode(chunk)
            if number % 200 == 0:
                sizes.append(resident_bytes())
        assert sizes[3] - sizes[1] < 1 << 20


def test_closing_twice_is_harmless_and_encoding_then_is_refused(pairs: dict[str, Pair]) -> None:
    pair = pairs["phi4"]
    with Model.load(pair.model, ONE_THREAD) as model:
        projector = Projector.load(model, settings(pair), n_ubatch=512)
        (chunk,) = projector.read([Picture(picture(1))])
        assert isinstance(chunk, MediaChunk)
        projector.close()
        projector.close()
        with pytest.raises(ValueError, match="closed"):
            projector.encode(chunk)
        with pytest.raises(ValueError, match="closed"):
            projector.read([Picture(picture(1))])
        chunk.native.free()
        chunk.native.free()
