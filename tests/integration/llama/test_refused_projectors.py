"""Projectors that do not fit and media that are not read: each is refused with a reason, and the process goes on.

Where a test says that llama.cpp ends the process, it is there to tell us when it does no longer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFValue, GGUFValueType

from tests.support.media_reader import ONE_THREAD, MediaReader, media_reader, settings
from tests.support.projectors import PROJECTORS, WIDTH, Pair, picture, sound, ultravox, write_projector
from tests.support.small_models import N_EMBD, Draft, write_model
from workers.llama.media.parts import MediaChunk, Part, Picture, Sound
from workers.llama.media.projector import Projector, ProjectorSettings
from workers.llama.model import Model
from workers.llama.native import MediaRefused, ModelError
from workers.media.bounds import MediaLimits

Change = Callable[[Draft], None]


def changed(folder: Path, pair: Pair, name: str, change: Change) -> Pair:
    """The same projector after a change of what is written."""
    path = folder / "mmproj.gguf"

    def fill(draft: Draft) -> None:
        PROJECTORS[name].write(draft)
        change(draft)

    write_projector(path, fill)
    return Pair(pair.model, path)


def value(key: str, number: object, kind: GGUFValueType) -> Change:
    def change(draft: Draft) -> None:
        draft.writer.kv_data[0][key] = GGUFValue(number, kind)

    return change


def without(tensor: str) -> Change:
    def change(draft: Draft) -> None:
        del draft.writer.tensors[0][tensor]

    return change


def load(pair: Pair, *, n_ubatch: int = 512, limits: MediaLimits | None = None) -> None:
    with Model.load(pair.model, ONE_THREAD) as model:
        Projector.load(model, settings(pair), n_ubatch=n_ubatch, limits=limits).close()


def wider(draft: Draft) -> None:
    del draft.writer.tensors[0]["mm.2.weight"]
    draft.matrix("mm.2.weight", N_EMBD + 16, N_EMBD)


def odd_type(draft: Draft) -> None:
    ultravox(draft)
    value("clip.audio.block_count", 2, GGUFValueType.INT32)(draft)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("phi4", wider, r"text model \(n_embd = 64\) and mmproj \(n_embd = 80\)"),
        ("phi4", without("mm.2.weight"), "unable to find tensor mm.2.weight"),
        ("phi4", value("clip.projector_type", "phi99", GGUFValueType.STRING), "unknown projector type: phi99"),
        ("phi4", value("clip.projector_type", "hunyuanvl", GGUFValueType.STRING), "depends on its place in the prompt"),
        ("phi4", value("clip.vision.block_count", 2, GGUFValueType.INT32), "block_count has type 5, not 4"),
        ("phi4", value("clip.use_gelu", 1, GGUFValueType.UINT32), "use_gelu has type 4, not 7"),
        ("phi4", value("clip.vision.attention.head_count", 0, GGUFValueType.UINT32), "with 0 heads"),
        ("phi4", value("clip.vision.embedding_length", 48, GGUFValueType.UINT32), "ln1.weight has not the width 48"),
        ("phi4", value("clip.has_vision_encoder", False, GGUFValueType.BOOL), "neither pictures nor sound"),
        ("phi4", value("clip.vision.patch_size", 0, GGUFValueType.UINT32), r"patch_size \(0\) must be positive"),
        ("phi4", value("clip.vision.patch_size", 3, GGUFValueType.UINT32), "patches of 3, .* contradict each other"),
        ("phi4", value("clip.vision.image_size", 7, GGUFValueType.UINT32), "pictures of 7 pixels, patches of 8"),
        ("phi4", value("clip.vision.image_min_pixels", 0, GGUFValueType.UINT32), "least and most pixels 0 and"),
        ("gemma3", value("clip.vision.projector.scale_factor", 4096, GGUFValueType.UINT32), "scale 4096"),
        ("phi4", without("v.blk.1.attn_k.weight"), "layer 1 lacks attn_k.weight, which another layer has"),
        ("qwen2a", value("clip.audio.num_mel_bins", 7, GGUFValueType.UINT32), "reads 20 bands, .* says 7"),
        ("ultravox", value("clip.audio.projector.stack_factor", 0, GGUFValueType.UINT32), "stack factor of 0"),
        ("ultravox", without("a.position_embd.weight"), "fewer than 1,500 positions"),
        ("ultravox", value("clip.audio.projector.stack_factor", 8, GGUFValueType.UINT32), "counts 187 .* makes 188"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_projector_that_does_not_fit_is_refused(
    name: str, change: Change, words: str, tmp_path: Path, pairs: dict[str, Pair]
) -> None:
    with pytest.raises(ModelError, match=words) as refused:
        load(changed(tmp_path, pairs[name], name, change))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_no_projector_is_refused(tmp_path: Path, pairs: dict[str, Pair]) -> None:
    pair = pairs["phi4"]
    with pytest.raises(ModelError, match="not a projector, but a file of architecture llama"):
        load(Pair(pair.model, pair.model))
    with pytest.raises(ModelError, match="no such file"):
        load(Pair(pair.model, tmp_path / "none.gguf"))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(pair.projector.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="truncated"):
        load(Pair(pair.model, cut))
    cut.write_bytes(b"RIFF" + bytes(1000))
    with pytest.raises(ModelError, match="not a GGUF file"):
        load(Pair(pair.model, cut))


@pytest.mark.parametrize("name", [name for name, small in PROJECTORS.items() if small.tokens])
def test_a_model_without_the_tokens_around_media_is_refused(name: str, tmp_path: Path, pairs: dict[str, Pair]) -> None:
    small = PROJECTORS[name]
    for missing in small.tokens:
        path = tmp_path / "text.gguf"
        write_model(path, small.architecture, small.fill, names=[token for token in small.tokens if token != missing])
        with pytest.raises(ModelError, match="lacks tokens that stand around"):
            load(Pair(path, pairs[name].projector))


def test_pictures_whose_cells_see_each_other_need_a_micro_batch(pairs: dict[str, Pair]) -> None:
    load(pairs["gemma3"], n_ubatch=16)
    with pytest.raises(ModelError, match=r"up to 16, see each other .* raise n_ubatch to 16"):
        load(pairs["gemma3"], n_ubatch=15)
    load(pairs["qwen2vl"], n_ubatch=15)


def test_a_batch_takes_no_more_than_llama_cpp_does(pairs: dict[str, Pair]) -> None:
    with media_reader("gemma3", pairs["gemma3"], ONE_THREAD) as one:
        batch = one.batch
        (chunk,) = one.media(1)
        embeddings, positions = one.projector.encode(chunk), chunk.positions(0)
        batch.add(embeddings, positions, 0, is_causal=False)
        with pytest.raises(ValueError, match="sequence 0 has a picture"):
            batch.add(embeddings, positions, 0, is_causal=False)
        assert (batch.room(is_causal=False), batch.room(is_causal=True)) == (512 - 16, 0)
        with pytest.raises(ValueError, match="16 rows do not fit"):
            batch.add(embeddings, positions, 1)
        rows = np.zeros((497, N_EMBD), np.float32)
        with pytest.raises(ValueError, match="497 rows do not fit; there is room for 496"):
            batch.add(rows, np.arange(497, dtype=np.int32).reshape(1, -1), 1, is_causal=False)
        batch.clear()
        assert batch.room(is_causal=True) == batch.capacity


def refusal(one: MediaReader, part: Part) -> str:
    with pytest.raises(MediaRefused) as refused:
        one.projector.read(["This: ", part])
    return str(refused.value)


def test_media_that_are_not_read_are_refused(pairs: dict[str, Pair]) -> None:
    with media_reader("qwen2vl", pairs["qwen2vl"]) as one:
        assert "reads no sound" in refusal(one, Sound(sound(1)))
        assert "8,193 x 10 pixels is more than the 8,192" in refusal(one, Picture(np.zeros((10, 8193, 3), np.uint8)))
        assert "33,554,432 in all" in refusal(one, Picture(np.zeros((8000, 8000, 3), np.uint8)))
        assert "more than 200 times" in refusal(one, Picture(np.zeros((3, 601, 3), np.uint8)))
        assert "has no pixels" in refusal(one, Picture(np.zeros((0, 5, 3), np.uint8)))
        with pytest.raises(MediaRefused, match="33 pictures and sounds are more than the 32"):
            one.projector.read([Picture(picture(1))] * 33)
    with media_reader("idefics3", pairs["idefics3"]) as one:
        assert "can't take a picture" in refusal(one, Picture(picture(1, 1, 200)))
    with media_reader("ultravox", pairs["ultravox"]) as one:
        assert "reads no pictures" in refusal(one, Picture(picture(1)))
        assert "0.09 seconds is not read" in refusal(one, Sound(sound(1, seconds=0.09)))
        assert "600" in refusal(one, Sound(np.zeros(600 * 16_000 + 1, np.float32)))
        assert "no numbers" in refusal(one, Sound(np.full(16_000, np.inf, np.float32)))


@pytest.mark.parametrize("pixels", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4, 3))])
def test_pixels_of_another_form_are_refused(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
    with pytest.raises(ValueError, match="contiguous uint8"):
        Picture(pixels)
    with pytest.raises(ValueError, match="contiguous uint8"):
        Picture(picture(1)[:, ::2])
    with pytest.raises(ValueError, match="contiguous float32"):
        Sound(sound(1)[::2])


@pytest.mark.parametrize("name", PROJECTORS)
def test_the_smallest_and_the_longest_media_are_read(name: str, pairs: dict[str, Pair]) -> None:
    """They come near to where libmtmd ends the process."""
    with media_reader(name, pairs[name]) as one:
        one.projector.warm_up()
        media: list[Part] = [Sound(sound(1, seconds)) for seconds in (0.1, 29.999, 30.0, 30.001)]
        if one.projector.sees:
            sizes = [(1, 1), (31, 33), (1, 2), (2, 1), (8192, 200)]
            if name != "idefics3":  # of thinner ones it makes pictures without height
                sizes += [(1, 200), (200, 1), (8192, 41), (41, 8192)]
            media = [Picture(picture(1, *size)) for size in sizes]
        for medium in media:
            for chunk in one.projector.read([medium]):
                if isinstance(chunk, MediaChunk):
                    assert one.projector.encode(chunk).shape == (chunk.num_cells, N_EMBD)


QUIET = {**os.environ, "GGML_NO_BACKTRACE": "1"}
"""Without it ggml has a debugger print where it ended."""

LOADS = """
import sys
from llama_cpp import mtmd_cpp as m
context = m.mtmd_init_from_file(sys.argv[1].encode(), None, m.mtmd_context_params_default())
"""
HEARS = """
from ctypes import POINTER, byref, pointer
from llama_cpp.mtmd_cpp import mtmd_input_part
bitmap = m.mtmd_bitmap_init_from_audio(num_samples, (m.c_float * num_samples)())
chunks = m.mtmd_input_chunks_init()
parts = (POINTER(mtmd_input_part) * 1)(pointer(mtmd_input_part(text=None, bitmap=bitmap)))
m.mtmd_tokenize_from_parts(context, chunks, parts, 1, False)
m.mtmd_encode_chunk(context, m.mtmd_input_chunks_get(chunks, 0))
"""


@pytest.mark.parametrize(
    ("fill", "script", "words"),
    [
        (partial(ultravox, stacked_frames=8), LOADS + "num_samples = 8000" + HEARS, "Invalid number of output tokens"),
        (ultravox, LOADS + "num_samples = 1" + HEARS, "buf.size() > sizeof(float)"),
        (odd_type, LOADS, "type_to_gguf_type<T>::value == type"),
    ],
    ids=["another number of cells", "one sample", "another type"],
)
def test_libmtmd_itself_ends_the_process(fill: Change, script: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mmproj.gguf"
    write_projector(path, fill)
    died = subprocess.run([sys.executable, "-c", script, path], env=QUIET, capture_output=True, text=True)
    assert died.returncode == -signal.SIGABRT
    assert words in died.stderr


STILL_ENDS = {("idefics3", "scale_factor > 1")}
"""Kind of projector, and the assertion of libmtmd that ends the process over a file that passes all checks."""
NUM_CHANGED = 34
"""Files of each kind: 204 in all."""


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in PROJECTORS if name != "gemma3-window"])
def test_a_changed_projector_is_refused_or_loads(name: str, tmp_path: Path, pairs: dict[str, Pair]) -> None:
    """Each in a process of its own, with one number of its header or some bytes changed at random."""
    pair = pairs[name]
    places = (str(pair.model), str(pair.projector), str(tmp_path))
    command = [sys.executable, "-m", "tests.support.projector_trials", *places]
    done = subprocess.run([*command, "0", str(NUM_CHANGED)], env=QUIET, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    assert {how for _, how, _ in ends} >= {"loaded", "refused"}
    bad = [(seed, how, said) for seed, how, said in ends if how not in ("loaded", "refused")]
    assert not [one for one in bad if not any(name == kind and words in one[2] for kind, words in STILL_ENDS)]
    assert len(ends) == NUM_CHANGED


CROWDS = """
import sys
from pathlib import Path
import numpy as np
from tests.support.lone_context import lone_context
with lone_context(Path(sys.argv[1]), kv_tokens=1024) as lone:
    batch = lone.context.new_embedding_batch()
    batch.n_ubatch += 1
    rows = batch.n_ubatch
    batch.add(np.zeros((rows, 64), np.float32), np.arange(rows, dtype=np.int32).reshape(1, -1), 0, is_causal=False)
    lone.context.decode_embeddings(batch)
"""


def test_llama_cpp_itself_ends_the_process_for_a_picture_of_more_cells(pairs: dict[str, Pair]) -> None:
    command = [sys.executable, "-c", CROWDS, str(pairs["gemma3"].model)]
    died = subprocess.run(command, env=QUIET, capture_output=True, text=True)
    assert died.returncode == -signal.SIGABRT
    assert "non-causal attention requires n_ubatch >= n_tokens" in died.stderr


def test_a_projector_whose_weights_are_no_numbers_is_found_out(tmp_path: Path, pairs: dict[str, Pair]) -> None:
    def spoil(draft: Draft) -> None:
        draft.writer.tensors[0]["v.post_ln.bias"].tensor[WIDTH // 2] = np.nan

    pair = changed(tmp_path, pairs["phi4"], "phi4", spoil)
    with (
        Model.load(pair.model, ONE_THREAD) as model,
        Projector.load(model, ProjectorSettings(pair.projector, n_threads=1), n_ubatch=512) as projector,
        pytest.raises(RuntimeError, match="is not a number"),
    ):
        projector.warm_up()
