"""Checks the file of a projector before libmtmd sees it, since libmtmd ends the process for some that are damaged.

It asserts the type of each value that it reads (`get_u32` and its like in clip.cpp, gguf.cpp of llama.cpp). Weights
whose shapes contradict the metadata fail only when a picture is encoded, and end the process, too; of these only what
the sizes of an encoder's layers show is checked here.

Source: `clip_model_loader` in tools/mtmd/clip.cpp, and clip-impl.h.
"""

from __future__ import annotations

from pathlib import Path

from workers.llama.gguf import GgufHeader, read_header
from workers.llama.native import ModelError

_UINT32, _INT32, _FLOAT32, _BOOL, _STRING = 4, 5, 6, 7, 8

_TYPES = {
    "general.name": _STRING,
    "general.description": _STRING,
    "clip.projector_type": _STRING,
    "clip.has_vision_encoder": _BOOL,
    "clip.has_audio_encoder": _BOOL,
    "clip.has_gen_audio_encoder": _BOOL,
    "clip.use_gelu": _BOOL,
    "clip.use_silu": _BOOL,
    "clip.minicpmv_version": _INT32,
    "clip.minicpmv_query_num": _UINT32,
}
_COUNTS = """
embedding_length feed_forward_length block_count projection_dim attention.head_count attention.head_count_kv
attention.head_dim image_size image_min_pixels image_max_pixels preproc_min_tiles preproc_max_tiles
preproc_image_size patch_size projector.scale_factor projector.query_side projector.window_side spatial_merge_size
n_wa_pattern window_size sam.head_count sam.block_count sam.embedding_length expert_used_count num_mel_bins
projector.stack_factor chunk_size conv_kernel_size max_pos_emb projector.window_size projector.downsample_rate
projector.head_count rvq.num_quantizers local_block_count local_group_size subsampling_factor
"""
_TYPES_IN_HALF = {
    "projector_type": _STRING,
    "mm_patch_merge_type": _STRING,
    "model_variant": _STRING,
    "attention.layer_norm_epsilon": _FLOAT32,
    "swiglu_clamp": _FLOAT32,
    **dict.fromkeys(_COUNTS.split(), _UINT32),
}
"""GGUF's number of the type that libmtmd expects, by the key without `clip.vision.` or the like before it."""

_HALVES = {"vision": "v", "audio": "a"}
"""Name in keys -> in tensors."""

_WHISPER = frozenset({"ultravox", "qwen2a", "qwen2.5o", "voxtral", "meralion", "musicflamingo", "glma"})
_STACKING = frozenset({"ultravox", "voxtral", "meralion"})
_POOLING = frozenset({"voxtral", "musicflamingo", "qwen2a", "qwen2.5o"})
_WHISPER_FRAMES, _WHISPER_POSITIONS = 3000, 1500

_BY_PLACE = frozenset({"deepseek4v", "hunyuanvl"})
"""Kinds whose cells depend on the tokens or the pictures before them in the prompt."""

_NO_LAYERS = frozenset({"gemma3nv"})
_IN_ALL_LAYERS = ("attn_", "ln")
"""Beginnings of the names of tensors that all layers of an encoder have, or none. Of others, experts for example, some
layers may have none."""
_COLOURS = 3


def read_projector(path: Path) -> GgufHeader:
    """Return the header of a projector's file. Raises ModelError if libmtmd must not be given it."""
    header = read_header(path)
    architecture = header.text("general.architecture")
    if architecture != "clip":
        raise ModelError(f"{path}: not a projector, but a file of architecture {architecture}; give the mmproj file")
    for key, kind in header.types.items():
        expected = _expected_type(key)
        if expected is not None and kind != expected:
            raise ModelError(f"{path}: damaged metadata ({key} has type {kind}, not {expected}); convert it again")
    for name in header.tensors:
        if not name.isprintable() or " " in name:
            raise ModelError(f"{path}: damaged: a tensor is named {name!r}; convert it again")
    halves = [half for half in _HALVES if header.metadata.get(f"clip.has_{half}_encoder") is True]
    if not halves:
        raise ModelError(f"{path}: reads neither pictures nor sound; give the mmproj file of a model that does")
    for half in halves:
        _check_half(header, half)
    return header


def _expected_type(key: str) -> int | None:
    for prefix in ("clip.vision.", "clip.audio.", "clip.gen.audio."):
        if key.startswith(prefix):
            return _TYPES_IN_HALF.get(key.removeprefix(prefix))
    return _TYPES.get(key)


def _check_half(header: GgufHeader, half: str) -> None:
    """Raise ModelError if an encoder's sizes contradict each other, or its kind is not served."""
    path = header.path
    kind = header.text("clip.projector_type") or header.text(f"clip.{half}.projector_type") or ""
    if kind in _BY_PLACE:
        raise ModelError(
            f"{path}: what a projector of kind {kind} makes of a picture depends on its place in the prompt, which is "
            "not served; serve another model"
        )
    if kind in _NO_LAYERS:
        return
    width = header.number(f"clip.{half}.embedding_length") or 0
    num_heads = header.number(f"clip.{half}.attention.head_count") or 0
    num_layers = header.number(f"clip.{half}.block_count") or 0
    if not (0 < num_heads <= width and 0 < num_layers <= len(header.tensors)):
        raise ModelError(
            f"{path}: damaged metadata ({num_layers} layers of width {width} with {num_heads} heads in clip.{half}); "
            "convert it again"
        )
    prefix = _HALVES[half]
    for layer in range(num_layers):
        name = f"{prefix}.blk.{layer}.ln1.weight"
        norm = header.tensors.get(name)
        if norm is not None and norm.shape != (width, 1, 1, 1):
            raise ModelError(f"{path}: damaged: {name} has not the width {width}; convert it again")
    _check_layers(header, prefix, num_layers)
    if half == "vision":
        _check_patches(header)
    if half == "audio" and kind in _WHISPER:
        _check_whisper(header, kind)


def _check_layers(header: GgufHeader, prefix: str, num_layers: int) -> None:
    """Raise ModelError if a layer lacks a tensor of attention that another has: libmtmd then reads from address 0."""
    parts = [set[str]() for _ in range(num_layers)]
    for name in header.tensors:
        before, _, rest = name.partition(".blk.")
        number, _, part = rest.partition(".")
        if before == prefix and number.isdecimal() and int(number) < num_layers and part.startswith(_IN_ALL_LAYERS):
            parts[int(number)].add(part)
    for layer, found in enumerate(parts):
        if missing := set.union(*parts) - found:
            raise ModelError(
                f"{header.path}: damaged: layer {layer} lacks {min(missing)}, which another layer has; convert it again"
            )


def _check_patches(header: GgufHeader) -> None:
    """Raise ModelError if what reads patches has another size than the metadata says, or pictures have none."""
    patch = header.number("clip.vision.patch_size") or 0
    image = header.number("clip.vision.image_size")
    scale = header.number("clip.vision.projector.scale_factor")
    weight = header.tensors.get("v.patch_embd.weight")
    sizes = [header.number(f"clip.vision.image_{end}_pixels") for end in ("min", "max")]
    sides = {patch, patch * (scale or 1)}  # some kinds read as many patches at once
    wrong = [
        patch > 0 and weight is not None and weight.shape[2] == _COLOURS and not sides.issuperset(weight.shape[:2]),
        image is not None and image < max(patch, (scale or 1) * patch),
        scale == 0,
        0 in sizes,
    ]
    if any(wrong):
        raise ModelError(
            f"{header.path}: damaged metadata (pictures of {image} pixels, patches of {patch}, scale {scale}, least "
            f"and most pixels {sizes[0]} and {sizes[1]} contradict each other or the weights); convert it again"
        )


def _check_whisper(header: GgufHeader, kind: str) -> None:
    """Raise ModelError if the encoder is too short for half a minute, or if libmtmd would make another number of cells
    of that than it counts (`clip_n_output_tokens`, against `build_stack`): it then ends the process."""
    positions = header.tensors.get("a.position_embd.weight")
    if positions is None or positions.shape[1] < _WHISPER_POSITIONS:
        raise ModelError(
            f"{header.path}: damaged: a.position_embd.weight has fewer than {_WHISPER_POSITIONS:,} positions; convert "
            "it again"
        )
    bins, reads = header.number("clip.audio.num_mel_bins"), header.tensors.get("a.conv1d.1.weight")
    if reads is not None and reads.shape[1] != bins:
        raise ModelError(
            f"{header.path}: damaged: a.conv1d.1.weight reads {reads.shape[1]} bands, and the metadata says {bins}; "
            "convert it again"
        )
    factor = header.number("clip.audio.projector.stack_factor")
    stacked = (factor or 1) if kind in _STACKING else 1
    pooled = 2 if kind in _POOLING else 1
    counted = -(-_WHISPER_FRAMES // stacked) // 2 // pooled
    made = -(-(_WHISPER_POSITIONS // pooled) // stacked)
    if counted != made:
        raise ModelError(
            f"{header.path}: this version of libmtmd counts {counted} cells for half a minute of sound and makes "
            f"{made}, which ends the process (kind {kind}, stack factor {stacked}); serve another model"
        )
    norm, width = header.tensors.get("mm.a.norm_pre.weight"), header.number("clip.audio.embedding_length") or 0
    if factor == 0 or (kind == "ultravox" and norm is not None and norm.shape[0] != stacked * width):
        raise ModelError(
            f"{header.path}: damaged: its weights are not those of a stack factor of {factor}; convert it again"
        )
