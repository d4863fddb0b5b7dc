"""Reads control vectors, checks that they were made for the model, and has llama.cpp add them to what its layers say.

A file holds a direction for some of the layers: a tensor `direction.<layer>` of single floats, as wide as the model's
embeddings; layer 0 has none. Several files are added up. Source: `common_control_vector_load_one` in common.cpp and
`llama_adapter_cvec` in llama-adapter.cpp of llama.cpp.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as c
from numpy.typing import NDArray

from workers.llama.gguf import TensorInfo, read_header
from workers.llama.native import ModelError
from workers.models.spec import ControlVectorSpec

Floats = NDArray[np.float32]

_DIRECTION = re.compile(r"direction\.([1-9][0-9]{0,3})")
_F32 = 0


@dataclass(frozen=True, slots=True, eq=False)
class ControlVector:
    """Holds what is added to a model's layers: one row for each from layer 1 on, 0 where there is no direction."""

    rows: Floats
    first: int
    last: int
    """The layers that it acts on, both included."""

    def digest(self) -> str:
        """Return a hash of all that the vector changes; it is part of the fingerprint of KV."""
        acting = self.rows[self.first - 1 : self.last]
        return hashlib.sha256(b"%d" % self.first + acting.tobytes()).hexdigest()

    def apply(self, context: int) -> None:
        """Have a `llama_context *` compute with it from the next step on. Raises ModelError."""
        data = self.rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        if c.llama_set_adapter_cvec(context, data, self.rows.size, self.rows.shape[1], self.first, self.last):
            raise ModelError("llama.control_vectors: llama.cpp has no memory for them; give the worker more")

    def require_effect(self, context: int, architecture: str, compute: Callable[[], Floats]) -> None:
        """Raise ModelError unless what `compute` returns differs with and without it, and is numbers: in the graphs of
        some architectures llama.cpp has no place for control vectors, and says nothing."""
        self.apply(context)
        with_it = compute()
        nothing: Any = None
        c.llama_set_adapter_cvec(context, nothing, 0, 0, 0, 0)
        without = compute()
        self.apply(context)
        if np.isnan(with_it).any() and not np.isnan(without).any():
            raise ModelError("llama.control_vectors: with them the model computes no numbers; lower `scale`")
        if np.array_equal(with_it, without, equal_nan=True):
            raise ModelError(
                "llama.control_vectors: they change nothing: llama.cpp has no place for them in models of architecture "
                f"{architecture}, or they are too weak; remove them, or raise `scale`"
            )


def read_control_vectors(
    specs: Sequence[ControlVectorSpec], layers: Sequence[int], *, n_embd: int, n_layer: int
) -> ControlVector | None:
    """Return the sum of the files' vectors; None: there are none, or all have a scale of 0.

    `layers`: first and last layer to act on; empty: all. Raises ModelError for a file that is damaged or made for
    another model, and for layers that the model or the vectors lack."""
    if not specs:
        return None
    last_layer = n_layer - 1
    first, last = layers or (1, last_layer)
    if last > last_layer or last_layer < 1:
        raise ModelError(
            f"llama.control_vector_layers: {last} is beyond the model's layers, of which control vectors act on 1 to "
            f"{last_layer}; lower it"
        )
    rows = np.zeros((last_layer, n_embd), np.float32)
    for spec in specs:
        _add(rows, Path(spec.path).expanduser(), np.float32(spec.scale))
    if not np.isfinite(rows).all():
        names = ", ".join(Path(spec.path).name for spec in specs)
        raise ModelError(f"llama.control_vectors: {names}: holds infinities or NaN; make the vector again")
    if not any(spec.scale for spec in specs):
        return None
    if not rows[first - 1 : last].any():
        raise ModelError(
            f"llama.control_vectors: there is no direction for the layers {first} to {last}, or their sum is 0; change "
            "`control_vector_layers`, or remove the vectors"
        )
    return ControlVector(rows, first, last)


def _add(rows: Floats, path: Path, scale: np.float32) -> None:
    """Add a file's directions to the rows. Raises ModelError."""
    where = "llama.control_vectors"
    try:
        header = read_header(path)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from None
    if not header.tensors:
        raise ModelError(f"{where}: {path}: holds no directions; make the vector with llama-cvector-generator")
    for name, tensor in header.tensors.items():
        match = _DIRECTION.fullmatch(name)
        if match is None or tensor.kind != _F32 or tensor.shape[1:] != (1, 1, 1):
            raise ModelError(
                f"{where}: {path}: tensor {name!r} is no direction of single floats; make the vector with "
                "llama-cvector-generator"
            )
        if tensor.shape[0] != rows.shape[1]:
            raise ModelError(
                f"{where}: {path}: {name} has {tensor.shape[0]} numbers and the model's layers are {rows.shape[1]} "
                "wide; use a vector that was made for this model"
            )
        layer = int(match[1])
        if layer > len(rows):
            raise ModelError(
                f"{where}: {path}: {name} is for a layer that the model lacks: its last one is {len(rows)}; use a "
                "vector that was made for this model"
            )
        rows[layer - 1] += scale * _read(path, header.data_offset, tensor)


def _read(path: Path, data_offset: int, tensor: TensorInfo) -> Floats:
    try:
        return np.fromfile(path, "<f4", count=tensor.shape[0], offset=data_offset + tensor.offset)
    except OSError as error:
        raise ModelError(f"llama.control_vectors: {path}: can't be read ({error.strerror}); check it") from None
