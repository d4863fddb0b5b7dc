"""Pictures and sounds as they are given to a projector, and the chunks that it makes of a prompt.

Pictures come as pixels and sounds as samples: nothing that a caller sent is decoded by llama.cpp.
"""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass
from enum import Enum

import numpy as np
from llama_cpp import mtmd_cpp as m
from numpy.typing import NDArray

from workers.llama.native import MediaRefused
from workers.media.bounds import MediaLimits

Pixels = NDArray[np.uint8]
Samples = NDArray[np.float32]
Tokens = NDArray[np.int32]
Positions = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A picture of at least one pixel."""

    pixels: Pixels
    """Red, green and blue: contiguous uint8 [height, width, 3]."""

    def __post_init__(self) -> None:
        pixels = self.pixels
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.flags.c_contiguous:
            raise ValueError(f"pixels are contiguous uint8 [height, width, 3], not {pixels.dtype} {pixels.shape}")

    def check(self, limits: MediaLimits) -> None:
        """Raise MediaRefused if libmtmd must not be given the picture."""
        height, width, _ = self.pixels.shape
        if fault := limits.picture_fault(width, height):
            raise MediaRefused(fault)

    def digest(self) -> bytes:
        """Return a hash of the contents."""
        height, width, _ = self.pixels.shape
        return _hash(b"picture", height.to_bytes(4, "little"), width.to_bytes(4, "little"), self.pixels)


@dataclass(frozen=True, slots=True, eq=False)
class Sound:
    """A sound of one channel, at the projector's sample rate."""

    samples: Samples
    """About -1 to 1: contiguous float32 [samples]."""

    def __post_init__(self) -> None:
        samples = self.samples
        if samples.dtype != np.float32 or samples.ndim != 1 or not samples.flags.c_contiguous:
            raise ValueError(f"samples are contiguous float32 [samples], not {samples.dtype} {samples.shape}")

    def check(self, limits: MediaLimits, sample_rate: int) -> None:
        """Raise MediaRefused if libmtmd must not be given the sound."""
        if fault := limits.sound_fault(len(self.samples) / sample_rate):
            raise MediaRefused(fault)
        if not np.isfinite(self.samples).all():
            raise MediaRefused("a sound holds samples that are no numbers; encode it again")

    def digest(self) -> bytes:
        """Return a hash of the contents."""
        return _hash(b"sound", self.samples)


Part = str | Tokens | Picture | Sound
"""A part of a prompt. Of a text, names of control tokens become those tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class TextChunk:
    """A run of tokens: of the prompt's texts, and those that the model expects around media."""

    tokens: Tokens


class MediaKind(Enum):
    """The numbers are `mtmd_input_chunk_type`."""

    IMAGE = m.MTMD_INPUT_CHUNK_TYPE_IMAGE
    AUDIO = m.MTMD_INPUT_CHUNK_TYPE_AUDIO


class NativeChunk:
    """Owns a `mtmd_input_chunk *`, which holds prepared pixels or frames: some megabytes, freed with this object."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer
        self.free = weakref.finalize(self, m.mtmd_input_chunk_free, pointer)
        """Frees it at once. Calling it again does nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaChunk:
    """A picture or one slice of it, or up to half a minute of sound: what is encoded at a time."""

    kind: MediaKind
    num_cells: int
    num_positions: int
    """How many positions the next token is further than the chunk's first cell; with M-RoPE fewer than `num_cells`."""
    digest: bytes
    """Hash of the medium's contents, of the slice, and of how it is laid out. libmtmd's own id is the same for all
    slices."""
    is_causal: bool
    """Whether a cell sees only those before it. If not, all cells belong into one micro-batch."""
    starts: Positions
    """The cells' positions in a prompt that begins with them: int32 [sections, num_cells]. M-RoPE has 4 sections (time,
    row, column, and one that few models use), all others have 1."""
    moves: Positions
    """How far each position moves when the chunk moves by one: 1, or 0 where it only says which cell of it this is."""
    native: NativeChunk

    def positions(self, first: int) -> Positions:
        """Return the positions of the cells in a prompt where the chunk begins at `first`: int32 [sections, cells]."""
        return self.starts + self.moves * np.int32(first)


Chunk = TextChunk | MediaChunk


def chunk_digest(medium: bytes, number: int, starts: Positions, moves: Positions) -> bytes:
    """Return the digest of a chunk: the `number`-th of the medium with that digest."""
    return _hash(b"chunk", medium, number.to_bytes(4, "little"), starts, moves)


def _hash(kind: bytes, *parts: bytes | Pixels | Samples | Positions) -> bytes:
    whole = hashlib.blake2b(digest_size=32, person=kind)
    for part in parts:
        whole.update(part if isinstance(part, bytes) else part.data)
    return whole.digest()
