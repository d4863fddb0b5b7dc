"""Tiny projectors with random weights, each with a text model that reads what it makes of pictures or sound.

They mean nothing, yet each pixel and each sample changes what the model says next. Keys and tensors:
tools/mtmd/clip.cpp, clip-impl.h and models/*.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.support.small_models import N_EMBD, WINDOW, Draft, gemma3, llama, qwen2vl, write_model

WIDTH, N_HEAD, N_FF, N_LAYER = 32, 2, 48, 2
"""Sizes of the encoders. `N_FF` is not the text model's width: from equal ones libmtmd concludes that names are swapped
in the file."""
PATCH = 8
NUM_MEL_BINS = 20
NUM_FRAMES = 1500
"""Positions of an encoder of sound: half a minute."""
STACKED_FRAMES = 4
STACKED_FF = 40

SAMPLE_RATE = 16_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of an encoder, and the width of the text model that it is for."""

    width: int = WIDTH
    n_head: int = N_HEAD
    n_ff: int = N_FF
    n_layer: int = N_LAYER
    patch: int = PATCH
    n_embd: int = N_EMBD


SMALL = Sizes()


@dataclass(frozen=True, slots=True)
class SmallProjector:
    name: str
    write: Callable[[Draft], None]
    architecture: str = "llama"
    fill: Callable[[Draft], None] = llama
    """Writes the tensors of the text model."""
    tokens: tuple[str, ...] = ()
    """Tokens that the text model's vocabulary must have besides the demo model's."""
    sees: bool = True
    is_causal: bool = True


def _linear(draft: Draft, name: str, rows: int, columns: int, *, bias: bool = True, gain: float = 1.0) -> None:
    draft.matrix(f"{name}.weight", rows, columns, gain)
    if bias:
        draft.vector(f"{name}.bias", rows, 0.0)


def _norm(draft: Draft, name: str, length: int) -> None:
    draft.vector(f"{name}.weight", length)
    draft.vector(f"{name}.bias", length, 0.0)


def _encoder(draft: Draft, prefix: str, *, key_bias: bool = True, sizes: Sizes = SMALL) -> None:
    """Layers as SigLIP and Whisper have them."""
    width = sizes.width
    for layer in range(sizes.n_layer):
        block = f"{prefix}.blk.{layer}"
        _norm(draft, f"{block}.ln1", width)
        _norm(draft, f"{block}.ln2", width)
        _linear(draft, f"{block}.attn_q", width, width, gain=1.5)
        _linear(draft, f"{block}.attn_k", width, width, gain=1.5, bias=key_bias)
        _linear(draft, f"{block}.attn_v", width, width)
        _linear(draft, f"{block}.attn_out", width, width)
        _linear(draft, f"{block}.ffn_up", sizes.n_ff, width)
        _linear(draft, f"{block}.ffn_down", width, sizes.n_ff)


def _shape(draft: Draft, half: str, kind: str, sizes: Sizes = SMALL) -> None:
    writer = draft.writer
    writer.add_type("mmproj")
    writer.add_bool(f"clip.has_{half}_encoder", True)
    writer.add_string("clip.projector_type", kind)
    writer.add_bool("clip.use_gelu", True)
    writer.add_uint32(f"clip.{half}.embedding_length", sizes.width)
    writer.add_uint32(f"clip.{half}.feed_forward_length", sizes.n_ff)
    writer.add_uint32(f"clip.{half}.block_count", sizes.n_layer)
    writer.add_uint32(f"clip.{half}.projection_dim", sizes.n_embd)
    writer.add_uint32(f"clip.{half}.attention.head_count", sizes.n_head)
    writer.add_float32(f"clip.{half}.attention.layer_norm_epsilon", 1e-6)


def _vision(
    draft: Draft,
    kind: str,
    image_size: int,
    *,
    num_positions: int = 0,
    patches: tuple[str, ...] = (),
    sizes: Sizes = SMALL,
) -> None:
    """What encoders of pictures have in common. `patches`: names of the tensors that read patches, if not the usual
    one with a bias."""
    _shape(draft, "vision", kind, sizes)
    writer, width, patch = draft.writer, sizes.width, sizes.patch
    writer.add_uint32("clip.vision.image_size", image_size)
    writer.add_uint32("clip.vision.patch_size", patch)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)
    for name in patches or ("v.patch_embd.weight",):
        draft.add(name, draft.rng.standard_normal((width, 3, patch, patch)) / patch)
    if not patches:
        draft.vector("v.patch_embd.bias", width, 0.0)
    if num_positions:
        draft.add("v.position_embd.weight", draft.rng.standard_normal((num_positions, width)) / 2)
    _norm(draft, "v.post_ln", width)
    _encoder(draft, "v", sizes=sizes)


def _gemma3(draft: Draft) -> None:
    """Pictures of 64 x 64 pixels, each four by four cells that see each other."""
    _vision(draft, "gemma3", 64, num_positions=64)
    draft.writer.add_uint32("clip.vision.projector.scale_factor", 2)
    draft.add("mm.input_projection.weight", draft.rng.standard_normal((WIDTH, N_EMBD)) / np.sqrt(WIDTH))
    draft.vector("mm.soft_emb_norm.weight", WIDTH)


def _gemma3_window(draft: Draft) -> None:
    """The text model as it is in real files: most layers see a window only, here all of them."""
    draft.writer.add_sliding_window(2 * WINDOW)
    gemma3(draft)


def _qwen2vl(draft: Draft) -> None:
    """A cell for 16 x 16 pixels, with rotary positions in rows and columns."""
    _vision(draft, "qwen2vl_merger", 560, patches=("v.patch_embd.weight", "v.patch_embd.weight.1"))
    _linear(draft, "mm.0", 2 * N_EMBD, 4 * WIDTH)
    _linear(draft, "mm.2", N_EMBD, 2 * N_EMBD)


def _idefics3(draft: Draft) -> None:
    """A view of the whole picture and slices of it, each of 32 x 32 pixels and of four cells."""
    _vision(draft, "idefics3", 32, num_positions=16)
    draft.writer.add_uint32("clip.vision.projector.scale_factor", 2)
    draft.writer.add_uint32("clip.vision.preproc_image_size", 64)
    draft.matrix("mm.model.fc.weight", N_EMBD, 4 * WIDTH)


def phi4(draft: Draft, sizes: Sizes = SMALL, least: int = 4, most: int = 64) -> None:
    """A cell for each patch, `least` to `most` of them, and no tokens around."""
    side = int(np.sqrt(least)) * 2
    _vision(draft, "phi4", side * sizes.patch, num_positions=side**2, sizes=sizes)
    draft.writer.add_uint32("clip.vision.image_min_pixels", least * sizes.patch**2)
    draft.writer.add_uint32("clip.vision.image_max_pixels", most * sizes.patch**2)
    _linear(draft, "mm.0", sizes.n_embd, sizes.width)
    _linear(draft, "mm.2", sizes.n_embd, sizes.n_embd)


def _sound(draft: Draft, kind: str) -> None:
    """Whisper's encoder, which reads half a minute at a time."""
    _shape(draft, "audio", kind)
    draft.writer.add_uint32("clip.audio.num_mel_bins", NUM_MEL_BINS)
    for number, columns in (1, NUM_MEL_BINS), (2, WIDTH):
        weights = draft.rng.standard_normal((WIDTH, columns, 3)) / np.sqrt(columns)
        draft.add(f"a.conv1d.{number}.weight", weights, np.float16)  # ggml's convolution takes no others
        draft.add(f"a.conv1d.{number}.bias", 0.1 * draft.rng.standard_normal((WIDTH, 1)))
    draft.add("a.position_embd.weight", draft.rng.standard_normal((NUM_FRAMES, WIDTH)) / 4)
    _norm(draft, "a.post_ln", WIDTH)
    _encoder(draft, "a", key_bias=False)


def ultravox(draft: Draft, stacked_frames: int = STACKED_FRAMES) -> None:
    _sound(draft, "ultravox")
    draft.writer.add_uint32("clip.audio.projector.stack_factor", stacked_frames)
    draft.vector("mm.a.norm_pre.weight", stacked_frames * WIDTH)
    draft.matrix("mm.a.mlp.1.weight", 2 * STACKED_FF, stacked_frames * WIDTH)
    draft.vector("mm.a.norm_mid.weight", STACKED_FF)
    draft.matrix("mm.a.mlp.2.weight", N_EMBD, STACKED_FF)


def _qwen2a(draft: Draft) -> None:
    _sound(draft, "qwen2a")
    _linear(draft, "mm.a.fc", N_EMBD, WIDTH)


SLICE_TOKENS = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))

PROJECTORS = {
    one.name: one
    for one in (
        SmallProjector("gemma3", _gemma3, "gemma3", gemma3, ("<start_of_image>", "<end_of_image>"), is_causal=False),
        SmallProjector(
            "gemma3-window",
            _gemma3,
            "gemma3",
            _gemma3_window,
            ("<start_of_image>", "<end_of_image>"),
            is_causal=False,
        ),
        SmallProjector("qwen2vl", _qwen2vl, "qwen2vl", qwen2vl, ("<|vision_start|>", "<|vision_end|>")),
        SmallProjector(
            "idefics3",
            _idefics3,
            tokens=("\n\n", "<fake_token_around_image>", "<global-img>", *SLICE_TOKENS),
        ),
        SmallProjector("phi4", phi4),
        SmallProjector("ultravox", ultravox, sees=False),
        SmallProjector("qwen2a", _qwen2a, "qwen2vl", qwen2vl, ("<|audio_bos|>", "<|audio_eos|>"), sees=False),
    )
}


@dataclass(frozen=True, slots=True)
class Pair:
    """The files of a model and of its projector."""

    model: Path
    projector: Path


def write_pair(folder: Path, name: str) -> Pair:
    """Write a text model and its projector into `folder`: always the same bytes."""
    small = PROJECTORS[name]
    pair = Pair(folder / f"{name}-text.gguf", folder / f"mmproj-{name}.gguf")
    write_model(pair.model, small.architecture, small.fill, names=small.tokens)
    write_projector(pair.projector, small.write)
    return pair


def write_projector(path: Path, fill: Callable[[Draft], None], *, seed: int = 2) -> None:
    draft = Draft(path, "clip", seed)
    fill(draft)
    draft.finish()


def picture(seed: int, height: int = 48, width: int = 64) -> np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]:
    """Return the pixels of a picture: coloured rectangles, which a change of size does not make alike."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    rows, columns = np.arange(height) * 4 // height, np.arange(width) * 4 // width
    return np.ascontiguousarray(blocks[rows][:, columns])


def sound(seed: int, seconds: float = 1.5) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return samples of a chord with some noise."""
    rng = np.random.default_rng(seed)
    times = np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    tones = sum(np.sin(2 * np.pi * tone * times) for tone in rng.uniform(100, 4000, 3))
    return np.ascontiguousarray(0.2 * tones + 0.01 * rng.standard_normal(len(times)), dtype=np.float32)
