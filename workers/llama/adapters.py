"""Checks the files of LoRA adapters before llama.cpp sees them, and owns `llama_adapter_lora` pointers.

llama.cpp refuses most bad adapters with a reason, but some end the process: metadata of an unexpected type, weights of
a shape that fails only in the compute graph, an adapter of the token embeddings on a model whose output uses the same
tensor. Non-finite weights spoil every call. `inspect`, on any thread, refuses all of these first.

`Adapter.load`, `Adapter.close` and `AppliedAdapters.apply` belong to the context's thread: each model keeps a list of
its adapters without a lock, and `llama_decode` walks it when it lays out the graph anew.

Sources: src/llama-adapter.cpp, build_lora_mm in src/llama-graph.cpp and ggml/src/gguf.cpp of llama.cpp.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as c
from numpy.typing import NDArray

from workers.llama.gguf import BLOCKS, GgufHeader, TensorInfo, parse_header
from workers.llama.model import Model
from workers.llama.native import AdapterError, AdapterUnreadable, ModelError, native_log
from workers.models.files import NotAFile, open_regular

__all__ = ["Adapter", "AdapterError", "AdapterFile", "AdapterUnreadable", "AppliedAdapters", "inspect"]

MAX_HEADER_BYTES = 16 << 20
"""Maximum bytes of metadata and tensor list; usual adapters have a few kilobytes."""

MAX_ALPHA = 65536.0
"""Maximum absolute alpha; usual ones are 8 to 64. Weights are multiplied by it and divided by the rank."""

SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Error numbers that say nothing of the file: the process or its machine is short of file descriptors or memory."""

_PIECE_BYTES = 4 << 20
_GGUF_FLOAT32 = 6
_NVFP4 = 40

_EXPONENTS = {0: ("<u4", 0x7F800000), 1: ("<u2", 0x7C00), 30: ("<u2", 0x7F80)}
"""ggml's number of a float type -> numpy's type for its bits, and the bits that are all set in an infinity or NaN."""

_F16, _Q8_0 = 1, 8
_WEIGHT_TYPES = frozenset({*_EXPONENTS, _Q8_0})
"""F32, F16, BF16 and Q8_0: the types that the converter writes (convert_lora_to_gguf.py)."""


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A file that passed `inspect`."""

    path: Path
    digest: bytes
    """SHA-256 of the contents."""
    size: int
    """Bytes of the file."""
    name: str
    """The adapter's name in the file; may be empty."""
    rank: int
    """Largest rank of the adapter's pairs of matrices."""
    stamp: tuple[int, ...]
    """Device, inode, size, and times of modification and change: if one differs, the contents may have changed."""

    def is_unchanged(self) -> bool:
        try:
            return _stamp(os.stat(self.path)) == self.stamp
        except OSError:
            return False

    def require_openable(self) -> None:
        """Open and close the file. Raises AdapterError if it has changed since it was checked, or can't be opened."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe in its place would wait
            try:
                is_unchanged = _stamp(os.fstat(descriptor)) == self.stamp
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _unreadable(self.path, error) from None
        if not is_unchanged:
            raise AdapterError(f"{self.path.name}: the file changed since it was checked; load it again")


def inspect(path: Path, base: GgufHeader, *, max_bytes: int = 0) -> AdapterFile:
    """Read all of `path` and check that it is a LoRA of the model `base`. Raises AdapterError; AdapterUnreadable if
    file descriptors or memory are short.

    Safe on any thread; takes as long as reading the file. `max_bytes`: maximum size of the file; 0: no bound."""
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if max_bytes and status.st_size > max_bytes:
                raise AdapterError(
                    f"{path.name}: {status.st_size:,} bytes are more than the {max_bytes:,} that adapters may take; "
                    "raise adapters_mib"
                )
            digest = hashlib.sha256()
            head = _read(file.read, min(status.st_size, MAX_HEADER_BYTES))
            header = _header(path, head, status.st_size, base)
            rank = _check_tensors(path, header, base)
            digest.update(head)
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
            _check_values(path, file, header)
            if _stamp(os.fstat(file.fileno())) != _stamp(status):
                raise AdapterError(f"{path.name}: the file changed while it was read; load it again")
    except OSError as error:
        raise _unreadable(path, error) from None
    return AdapterFile(path, digest.digest(), status.st_size, header.text("general.name") or "", rank, _stamp(status))


class Adapter:
    """A loaded adapter. Close it when no context computes with it any more, and before its model."""

    def __init__(self, pointer: Any, file: AdapterFile) -> None:
        self.pointer = pointer
        self.file = file
        self.num_contexts = 0
        """Number of contexts that compute with the adapter."""

    @classmethod
    def load(cls, model: Model, file: AdapterFile) -> Adapter:
        """Copy an adapter's weights to where the model's weights are. Raises AdapterError, with llama.cpp's reason;
        AdapterUnreadable if file descriptors or memory are short."""
        if not file.is_unchanged():
            raise AdapterError(f"{file.path.name}: the file changed since it was checked; load it again")
        log = native_log()
        log.clear()
        pointer = c.llama_adapter_lora_init(model.pointer, os.fsencode(file.path))
        if not pointer:
            # llama.cpp names the file with its folder, which must not leave this machine.
            reason = log.reason().replace(str(file.path), file.path.name) or "no reason given"
            if any(os.strerror(number) in reason for number in SHORTAGES):
                raise AdapterUnreadable(
                    f"{file.path.name}: llama.cpp can't load it now ({reason}); load it again later"
                )
            raise AdapterError(f"{file.path.name}: llama.cpp can't load it ({reason})")
        adapter = cls(pointer, file)
        if not file.is_unchanged():
            adapter.close()
            raise AdapterError(f"{file.path.name}: the file changed while it was loaded; load it again")
        return adapter

    def close(self) -> None:
        """Free the weights. Calling it again does nothing. Raises ValueError while a context computes with it."""
        if self.num_contexts:
            raise ValueError(f"{self.file.path.name}: a context still computes with this adapter")
        if self.pointer:
            c.llama_adapter_lora_free(self.pointer)
            self.pointer = None


Uses = tuple[tuple[Adapter, float], ...]
"""Adapters with their scales; each adapter at most once."""


class AppliedAdapters:
    """The adapters that one context computes with. llama.cpp lays out its graphs anew in the step after a change."""

    def __init__(self, context: int) -> None:
        """`context`: a `llama_context *` that lives at least as long as this object."""
        self._context = context
        self.uses: Uses = ()

    def apply(self, uses: Uses) -> bool:
        """Compute with the adapters `uses` from the next step on; return whether they differ from the ones before."""
        if uses == self.uses:
            return False
        pointers = (c.llama_adapter_lora_p_ctypes * len(uses))(*(adapter.pointer for adapter, _ in uses))
        scales = (ctypes.c_float * len(uses))(*(scale for _, scale in uses))
        c.llama_set_adapters_lora(self._context, pointers, len(uses), scales)
        for adapter, _ in uses:
            adapter.num_contexts += 1
        for adapter, _ in self.uses:
            adapter.num_contexts -= 1
        self.uses = uses
        return True

    def drop(self, adapter: Adapter) -> None:
        """Stop computing with all adapters if `adapter`, which is about to be freed, is one of them."""
        if any(one is adapter for one, _ in self.uses):
            self.apply(())


def _unreadable(path: Path, error: OSError) -> AdapterError:
    if isinstance(error, NotAFile | IsADirectoryError):
        return AdapterError(f"{path.name}: is no file; give the path of the .gguf file")
    if error.errno in SHORTAGES:
        return AdapterUnreadable(
            f"{path.name}: can't be read now ({error.strerror}), though nothing is known to be wrong with it; load it "
            "again later, and give the worker more file descriptors (ulimit -n) or memory"
        )
    return AdapterError(f"{path.name}: can't be read ({error.strerror}); check the path")


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _read(read: Callable[[int], bytes | None], num_bytes: int) -> bytes:
    parts = []
    while num_bytes > 0 and (part := read(num_bytes)):
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def _header(path: Path, head: bytes, size: int, base: GgufHeader) -> GgufHeader:
    """Return the header. Raises AdapterError if it would crash `llama_adapter_lora_init`, or its kind is not served."""
    try:
        header = parse_header(Path(path.name), head, size)
    except ModelError as error:
        raise AdapterError(str(error)) from None
    meta = header.metadata
    if meta.get("general.type") != "adapter" or meta.get("adapter.type") != "lora":
        kind = meta.get("general.type", "a model")
        raise AdapterError(f"{path.name}: not a LoRA adapter, but {kind}; convert one with convert_lora_to_gguf.py")
    own, wanted = meta.get("general.architecture"), base.text("general.architecture")
    if not isinstance(own, str) or own != wanted:
        raise AdapterError(f"{path.name}: made for a model of architecture {own}, and this one is {wanted}")
    alpha = meta.get("adapter.lora.alpha", 0.0)
    if header.types.get("adapter.lora.alpha", _GGUF_FLOAT32) != _GGUF_FLOAT32 or not _is_gain(alpha):
        raise AdapterError(f"{path.name}: damaged metadata (adapter.lora.alpha {alpha!r}); convert the adapter again")
    if "adapter.alora.invocation_tokens" in header.types:
        raise AdapterError(
            f"{path.name}: an activated LoRA, which acts from its invocation tokens on only, is not served; "
            "use an ordinary LoRA"
        )
    return header


def _is_gain(value: object) -> bool:
    return isinstance(value, float) and abs(value) <= MAX_ALPHA


def _check_tensors(path: Path, header: GgufHeader, base: GgufHeader) -> int:
    """Return the largest rank of any pair. Raises AdapterError unless all weights form pairs that fit the model."""
    pairs: dict[str, dict[str, TensorInfo]] = {}
    for name, tensor in header.tensors.items():
        target, dot, half = name.rpartition(".lora_")
        if not dot or half not in ("a", "b") or ".lora_" in target:
            if name.endswith("_norm.weight"):
                continue  # llama.cpp leaves these out too
            raise AdapterError(f"{path.name}: tensor {name!r} is no part of a LoRA; convert the adapter again")
        pairs.setdefault(target, {})[half] = tensor
    if not pairs or len(header.tensors) != header.num_tensors:
        raise AdapterError(f"{path.name}: holds no weights, or some of them twice; convert the adapter again")
    return max(_check_pair(f"{path.name}: {target}", target, halves, base) for target, halves in pairs.items())


def _check_pair(where: str, target: str, halves: dict[str, TensorInfo], base: GgufHeader) -> int:
    """Return the rank of a pair of matrices. Raises AdapterError if they do not fit the model's weight `target`."""
    a, b, weight = halves.get("a"), halves.get("b"), base.tensors.get(target)
    if a is None or b is None:
        raise AdapterError(f"{where}: one half of the pair is missing; convert the adapter again")
    if weight is None:
        raise AdapterError(f"{where}: the model has no such weight; use an adapter that was made for this model")
    for half in (a, b):
        if half.kind not in _WEIGHT_TYPES:
            raise AdapterError(f"{where}: ggml type {half.kind} is not served; convert it to f32, f16, bf16 or q8_0")
    is_embedding = target == "token_embd.weight"
    if is_embedding and "output.weight" not in base.tensors:
        # Both uses of the weight find the pair by this name, and its shape fits only one: the other one aborts.
        raise AdapterError(
            f"{where}: the model's output is the same weight, and llama.cpp can't adapt only one of them"
        )
    if weight.kind == _NVFP4:
        raise AdapterError(f"{where}: llama.cpp can't adapt weights of type NVFP4; serve another quantisation")
    if weight.shape[1] < 2:
        raise AdapterError(f"{where}: the model's weight is no matrix, and a LoRA has no effect on it")
    rank = b.shape[0]
    columns, rows, *outer = weight.shape
    shape_a = (rank, rows, *outer) if is_embedding else (columns, rank, *outer)
    shape_b = (rank, columns, *outer) if is_embedding else (rank, rows, *outer)
    if rank < 1 or a.shape != shape_a or b.shape != shape_b:
        raise AdapterError(
            f"{where}: shapes {_plain(a)} and {_plain(b)} do not fit the model's {_plain(weight)}; "
            "use an adapter that was made for this model"
        )
    return rank


def _plain(tensor: TensorInfo) -> str:
    shape: tuple[int, ...] = tensor.shape
    while len(shape) > 2 and shape[-1] == 1:
        shape = shape[:-1]
    return " x ".join(str(length) for length in shape)


def _check_values(path: Path, file: RawIOBase, header: GgufHeader) -> None:
    """Raise AdapterError if a weight is infinite or NaN, which would spoil the answers of every call."""
    for name, tensor in header.tensors.items():
        if tensor.kind not in _WEIGHT_TYPES:
            continue
        per_block, block_bytes = BLOCKS[tensor.kind]
        file.seek(header.data_offset + tensor.offset)
        data = np.frombuffer(_read(file.read, math.prod(tensor.shape) // per_block * block_bytes), dtype=np.uint8)
        if _has_nonfinite(tensor.kind, data):
            raise AdapterError(f"{path.name}: tensor {name!r} holds infinities or NaN; train or convert it again")


def _has_nonfinite(kind: int, data: NDArray[np.uint8]) -> bool:
    if kind == _Q8_0:  # each block begins with its scale
        data, kind = np.ascontiguousarray(data.reshape(-1, BLOCKS[_Q8_0][1])[:, :2]).reshape(-1), _F16
    word, exponent = _EXPONENTS[kind]
    return bool(np.any(np.bitwise_and(data.view(word), exponent) == exponent))
