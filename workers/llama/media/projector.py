"""Loads a projector, the file that makes a text model see or hear, and owns its `mtmd_context` pointer.

`read` makes cells of pictures and sounds and counts them; `encode` computes their embeddings, which `EmbeddingBatch`
brings into a context. `read` may be called from any thread, several at once. `encode` works for one caller at a time,
beside `llama_decode` of the same model, with which it shares nothing.

Sources: mtmd.h, mtmd.cpp and clip.cpp in tools/mtmd of llama.cpp.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as c
from llama_cpp import mtmd_cpp as m
from numpy.typing import NDArray

from workers.llama.gguf import GgufHeader
from workers.llama.media.parts import (
    Chunk,
    MediaChunk,
    MediaKind,
    NativeChunk,
    Part,
    Picture,
    Positions,
    Sound,
    TextChunk,
    Tokens,
    chunk_digest,
)
from workers.llama.media.projector_file import read_projector
from workers.llama.model import Model
from workers.llama.native import EncodeFailed, MediaRefused, ModelError, ModelTooLarge, NativeOwner, native_log
from workers.llama.tokens.vocab import NO_TOKEN, Vocab
from workers.media.bounds import MAX_ASPECT, MIN_SECONDS, MediaLimits

Embeddings = NDArray[np.float32]

SECTIONS = 4
"""Parts of a position with M-RoPE."""

_NAMED = 8 | 16
"""Bits of `llama_token_attr`: control tokens, and those that the model's makers defined."""


@dataclass(frozen=True, slots=True)
class ProjectorSettings:
    """How a projector is loaded."""

    path: Path
    n_threads: int = 0
    """Threads that encode; 0: one per processor."""
    use_gpu: bool = True
    """Whether a GPU encodes, if there is one."""
    image_min_tokens: int = 0
    """Minimum cells of a picture, for models that let pictures have any size; 0: as the file says."""
    image_max_tokens: int = 0
    """Maximum cells of a picture, for the same models; 0: as the file says."""


class Projector(NativeOwner):
    """A projector beside its model. Close it before the model."""

    def __init__(self, pointer: int, model: Model, header: GgufHeader, limits: MediaLimits, n_ubatch: int) -> None:
        self.pointer = pointer
        self.model = model
        self.path = header.path
        self.limits = limits
        self.sees: bool = m.mtmd_support_vision(pointer)
        """Whether it reads pictures."""
        self.hears: bool = m.mtmd_support_audio(pointer)
        """Whether it reads sounds."""
        self.sample_rate: int | None = m.mtmd_get_audio_sample_rate(pointer) if self.hears else None
        """Samples per second that sounds must have; None: it reads none."""
        self.is_causal: bool = not (self.sees and m.mtmd_decode_use_non_causal(pointer, None))
        """Whether a picture's cell sees only those before it."""
        self.uses_mrope: bool = m.mtmd_decode_use_mrope(pointer)
        """Whether positions have 4 sections."""
        self.width = model.n_embd_inp
        """Numbers of one cell's embedding."""
        self._n_ubatch = n_ubatch
        self._encoding = threading.Lock()

    @classmethod
    def load(
        cls, model: Model, settings: ProjectorSettings, *, n_ubatch: int, limits: MediaLimits | None = None
    ) -> Projector:
        """Load the weights. Raises ModelError if the file is damaged or does not fit the model, ModelTooLarge.

        `n_ubatch`: micro-batch of the contexts that will compute its embeddings."""
        path = settings.path
        header = read_projector(path)
        log = native_log()
        m.mtmd_helper_log_set(log.callback, None)  # else it writes to stderr
        log.clear()
        params = m.mtmd_context_params_default()
        params.use_gpu = settings.use_gpu
        params.n_threads = settings.n_threads or os.cpu_count() or 1
        params.print_timings = False
        params.warmup = False  # the first picture takes longer instead; a warm-up is as long as the largest picture
        params.image_min_tokens = settings.image_min_tokens or -1
        params.image_max_tokens = settings.image_max_tokens or -1
        pointer = m.mtmd_init_from_file(os.fsencode(path), model.pointer, params)
        if not pointer:
            raise _refusal(path, log.reason())
        projector = cls(pointer, model, header, limits or MediaLimits(), n_ubatch)
        try:
            projector._check_boundaries()
            projector._check_batches()
        except MediaRefused as error:
            projector.close()
            raise ModelError(f"{path}: {error}") from None
        except BaseException:
            projector.close()
            raise
        return projector

    def read(self, parts: Sequence[Part]) -> list[Chunk]:
        """Return a prompt as chunks; changes pictures to the sizes that the encoder takes, which takes milliseconds.

        Texts are tokenised as they are, without begin and end tokens. Those of callers can be too much for llama.cpp:
        `GuardedTokenizer` makes tokens of them. Raises MediaRefused."""
        if not self.pointer:
            raise ValueError(f"{self.path}: the projector is closed")
        media = [part for part in parts if isinstance(part, Picture | Sound)]
        if len(media) > self.limits.max_media:
            raise MediaRefused(
                f"{len(media)} pictures and sounds are more than the {self.limits.max_media} that a prompt may have; "
                "send fewer"
            )
        for one in media:
            self._check(one)
        chunks: list[Chunk] = []
        for part in parts:
            if isinstance(part, Picture | Sound):
                found = self._chunks(part)
            elif isinstance(part, str):
                tokens = self.model.vocab.tokenize(part, add_special=False, parse_special=True)
                found = [TextChunk(np.array(tokens, dtype=np.int32))]
            else:
                found = [TextChunk(np.asarray(part, dtype=np.int32))]
            for chunk in found:
                _append(chunks, chunk)
        return chunks

    def encode(self, chunk: MediaChunk) -> Embeddings:
        """Return the embeddings of a chunk: float32 [cells, width]. Takes seconds for a large picture on a CPU, and
        releases the interpreter lock meanwhile. Raises EncodeFailed."""
        with self._encoding:
            if not self.pointer:
                raise ValueError(f"{self.path}: the projector is closed")
            status = m.mtmd_encode_chunk(self.pointer, chunk.native.pointer)
            if status:
                raise EncodeFailed(f"{self.path}: libmtmd can't encode ({native_log().reason() or status})")
            values: Any = m.mtmd_get_output_embd(self.pointer)
            embeddings = np.ctypeslib.as_array(values, (chunk.num_cells, self.width)).astype(np.float32)
        if not np.isfinite(embeddings).all():
            raise EncodeFailed(f"{self.path}: what it makes of a {chunk.kind.name.lower()} is not a number")
        return embeddings

    def num_picture_cells(self, width: int, height: int) -> int:
        """Return the cells of a picture of this size, those of its slices together; 0: the model reads none."""
        return sum(self._cells(m.mtmd_bitmap_init(width, height, None))) if self.sees else 0

    def num_sound_cells(self, seconds: float) -> int:
        """Return the cells of a sound of this length; 0: the model reads none."""
        if self.sample_rate is None:
            return 0
        return sum(self._cells(m.mtmd_bitmap_init_from_audio(int(seconds * self.sample_rate), None)))

    def warm_up(self) -> None:
        """Encode the smallest picture and the shortest sound, so that buffers are there, and that libmtmd ends the
        process now, not at a caller's picture, if it can't compute with this file. Raises EncodeFailed."""
        media: list[Part] = [Picture(np.zeros((1, 1, 3), np.uint8))] if self.sees else []
        if self.sample_rate is not None:
            media.append(Sound(np.zeros(int(self.sample_rate * MIN_SECONDS) + 1, np.float32)))
        for chunk in self.read(media):
            if isinstance(chunk, MediaChunk):
                self.encode(chunk)

    def close(self) -> None:
        """Free the weights; waits for an `encode` in progress, but not for `read`. Calling it again does nothing."""
        with self._encoding:
            if self.pointer:
                m.mtmd_free(self.pointer)
                self.pointer = 0

    def _check(self, medium: Picture | Sound) -> None:
        if isinstance(medium, Picture):
            if not self.sees:
                raise MediaRefused("this model reads no pictures; send text or sound")
            medium.check(self.limits)
        else:
            if self.sample_rate is None:
                raise MediaRefused("this model reads no sound; send text or pictures")
            medium.check(self.limits, self.sample_rate)

    def _chunks(self, medium: Picture | Sound) -> list[Chunk]:
        """Return the chunks of one medium, with the tokens around them."""
        digest = medium.digest()
        if isinstance(medium, Picture):
            height, width, _ = medium.pixels.shape
            pixels = medium.pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            bitmap = m.mtmd_bitmap_init(width, height, pixels)
        else:
            samples = medium.samples.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            bitmap = m.mtmd_bitmap_init_from_audio(len(medium.samples), samples)
        with self._tokenized(bitmap) as found:
            chunks: list[Chunk] = []
            for native in found:
                kind = m.mtmd_input_chunk_get_type(native)
                if kind == m.MTMD_INPUT_CHUNK_TYPE_TEXT:
                    chunks.append(TextChunk(_tokens(native)))
                else:
                    number = sum(isinstance(chunk, MediaChunk) for chunk in chunks)
                    chunks.append(self._media_chunk(native, MediaKind(kind), digest, number))
        for chunk in chunks:
            if isinstance(chunk, TextChunk):
                if NO_TOKEN in chunk.tokens:
                    raise MediaRefused("the model's vocabulary lacks a token for slices of this picture; send another")
            elif not chunk.is_causal and chunk.num_cells > self._n_ubatch:
                raise MediaRefused(
                    f"a picture of {chunk.num_cells:,} cells is more than the {self._n_ubatch:,} that are computed at "
                    "a time; send one that is less thin"
                )
        return chunks

    @contextmanager
    def _tokenized(self, bitmap: int) -> Iterator[list[int]]:
        """Yield the addresses of what libmtmd makes of a bitmap, valid in the block; free them and the bitmap then."""
        chunks = m.mtmd_input_chunks_init()
        try:
            part = m.mtmd_input_part(text=None, bitmap=bitmap)
            pointers = (ctypes.POINTER(m.mtmd_input_part) * 1)(ctypes.pointer(part))
            status = m.mtmd_tokenize_from_parts(self.pointer, chunks, pointers, 1, False)
            if status:
                # The reason is in the log, which other threads write to as well: it is not for the caller.
                raise MediaRefused("the model can't take a picture or sound of this shape; send one that is less thin")
            yield [m.mtmd_input_chunks_get(chunks, number) for number in range(m.mtmd_input_chunks_size(chunks))]
        finally:
            m.mtmd_input_chunks_free(chunks)
            m.mtmd_bitmap_free(bitmap)

    def _media_chunk(self, native: int, kind: MediaKind, medium: bytes, number: int) -> MediaChunk:
        num_cells = m.mtmd_input_chunk_get_n_tokens(native)
        starts = self._positions(native, kind, num_cells, 0)
        moves = self._positions(native, kind, num_cells, 1) - starts
        return MediaChunk(
            kind=kind,
            num_cells=num_cells,
            num_positions=m.mtmd_input_chunk_get_n_pos(native),
            digest=chunk_digest(medium, number, starts, moves),
            is_causal=not m.mtmd_decode_use_non_causal(self.pointer, native),
            starts=starts,
            moves=moves,
            native=NativeChunk(m.mtmd_input_chunk_copy(native)),
        )

    def _positions(self, native: int, kind: MediaKind, num_cells: int, first: int) -> Positions:
        """Return the positions of a chunk that begins at `first`, in the order of llama.cpp's batches: time, row,
        column, the rest (`set_position_mrope_2d` in mtmd-helper-common.h)."""
        if not self.uses_mrope:
            return np.arange(first, first + num_cells, dtype=np.int32).reshape(1, -1)
        if kind is MediaKind.AUDIO:
            return np.tile(np.arange(first, first + num_cells, dtype=np.int32), (SECTIONS, 1))
        found = (m.mtmd_decoder_pos * num_cells)()
        m.mtmd_helper_image_get_decoder_pos(m.mtmd_input_chunk_get_tokens_image(native), first, found)
        columns = np.frombuffer(memoryview(found).cast("B"), dtype=np.uint32).reshape(num_cells, SECTIONS)
        return np.ascontiguousarray(columns[:, [0, 2, 1, 3]].T.astype(np.int32))

    def _check_boundaries(self) -> None:
        """Raise ModelError if a token that stands around media is missing in the model's vocabulary: libmtmd then puts
        -1 there, which no batch may have, or reads the token's name as text, which the model does not understand."""
        side = self.limits.max_side
        pictures = [(1, 1), (side, side), (side, 1 + side // 2), (1 + side // 2, side)] if self.sees else []
        bitmaps = [m.mtmd_bitmap_init(width, height, None) for width, height in pictures]
        if self.sample_rate is not None:
            bitmaps.append(m.mtmd_bitmap_init_from_audio(self.sample_rate, None))
        for bitmap in bitmaps:
            with self._tokenized(bitmap) as found:
                for native in found:
                    if m.mtmd_input_chunk_get_type(native) == m.MTMD_INPUT_CHUNK_TYPE_TEXT:
                        self._check_boundary(_tokens(native))

    def _check_boundary(self, tokens: Tokens) -> None:
        vocab = self.model.vocab
        plain = [_is_plain(vocab, token) for token in tokens.tolist()]
        if NO_TOKEN in tokens or any(one and other for one, other in pairwise(plain)):
            text = vocab.join(token for token in tokens.tolist() if token != NO_TOKEN).decode("utf-8", "replace")
            raise ModelError(
                f"{self.path}: {self.model.path} lacks tokens that stand around pictures or sound (read as {text!r}); "
                "give the projector that was made with this model"
            )

    def _check_batches(self) -> None:
        """Raise ModelError if a picture may need a larger micro-batch: llama.cpp would end the process."""
        if self.is_causal:
            return
        most = max(self._largest_chunk(width, height) for width, height in self._sizes())
        if most > self._n_ubatch:
            raise ModelError(
                f"{self.path}: the cells of a picture, up to {most:,}, see each other and need one micro-batch, and "
                f"n_ubatch is {self._n_ubatch:,}; raise n_ubatch to {most:,}, or lower image_max_tokens"
            )

    def _sizes(self) -> Iterator[tuple[int, int]]:
        """Yield widths and heights of pictures, among them about the ones with the most cells."""
        most = self.limits.max_side
        sides = {1 << power for power in range(most.bit_length())} | {most, -(-most // MAX_ASPECT)}
        return (
            (width, height)
            for width, height in product(sides, repeat=2)
            if width * height <= self.limits.max_pixels and max(width, height) <= MAX_ASPECT * min(width, height)
        )

    def _largest_chunk(self, width: int, height: int) -> int:
        """Return the most cells of a chunk of a picture of this size. Takes microseconds: there are no pixels."""
        return max(self._cells(m.mtmd_bitmap_init(width, height, None)))

    def _cells(self, bitmap: int) -> list[int]:
        """Return the number of cells, or of tokens, of each chunk of a bitmap, which is freed."""
        with self._tokenized(bitmap) as found:
            return [m.mtmd_input_chunk_get_n_tokens(native) for native in found]


def _tokens(native: int) -> Tokens:
    """Return a copy of the tokens of a text chunk."""
    count = ctypes.c_size_t()
    tokens = m.mtmd_input_chunk_get_tokens_text(native, ctypes.byref(count))
    return np.array(tokens[: count.value], dtype=np.int32)


def _append(chunks: list[Chunk], chunk: Chunk) -> None:
    """Append a chunk; one of text becomes part of the text before it, and an empty one is left out."""
    if isinstance(chunk, TextChunk):
        if not len(chunk.tokens):
            return
        if chunks and isinstance(last := chunks[-1], TextChunk):
            chunks[-1] = TextChunk(np.concatenate([last.tokens, chunk.tokens]))
            return
    chunks.append(chunk)


def _is_plain(vocab: Vocab, token: int) -> bool:
    """Return whether a token is an ordinary part of texts, and not blank."""
    if token == NO_TOKEN or c.llama_vocab_get_attr(vocab.pointer, token) & _NAMED:
        return False
    return bool(vocab.special_piece(token).strip())


def _refusal(path: Path, reason: str) -> ModelError:
    if "alloc" in reason.lower() or "out of memory" in reason.lower():
        return ModelTooLarge(f"{path}: does not fit the memory ({reason}); serve a smaller model or quantisation")
    return ModelError(
        f"{path}: libmtmd can't load it ({' '.join(reason.split()) or 'no reason given'}); give the projector that was "
        "made for this model"
    )
