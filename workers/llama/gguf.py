"""Reads the header of a GGUF file before llama.cpp sees the file, so that a damaged file gets a clear error.

Source of the layout: docs/gguf.md of ggml; of block sizes: ggml-common.h of the llama.cpp that the bindings carry.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from workers.llama.native import ModelError
from workers.models.files import NotAFile, open_regular

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]

MAX_KEPT_ARRAY = 4096
"""Maximum elements of a metadata array; longer arrays (vocabularies) are skipped when the header is read."""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING = 8
_ARRAY = 9

MAX_DIMS = 4
"""Maximum dimensions of a tensor: ggml's own bound."""

_QK_K = 256
BLOCKS = {
    # ggml type: (elements per block, bytes per block)
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36),
    10: (_QK_K, 84), 11: (_QK_K, 110), 12: (_QK_K, 144), 13: (_QK_K, 176), 14: (_QK_K, 210), 15: (_QK_K, 292),
    16: (_QK_K, 66), 17: (_QK_K, 74), 18: (_QK_K, 98), 19: (_QK_K, 50), 20: (32, 18), 21: (_QK_K, 110),
    22: (_QK_K, 82), 23: (_QK_K, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (_QK_K, 56),
    30: (1, 2), 34: (_QK_K, 54), 35: (_QK_K, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18), 42: (64, 18),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The header's entry of one tensor; the tensor's name is the key of `GgufHeader.tensors`."""

    shape: tuple[int, int, int, int]
    """Elements per dimension, the innermost first; 1 where the tensor has fewer dimensions."""
    kind: int
    """ggml's number of the tensor's type."""
    offset: int
    """Bytes between the beginning of the tensor data and this tensor."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The contents of a header. Keys of `metadata` are GGUF's own; arrays longer than `MAX_KEPT_ARRAY` are left out."""

    path: Path
    version: int
    metadata: dict[str, Value]
    num_tensors: int
    tensor_bytes: int
    """Bytes of all tensors of this file whose type is known."""
    tensors: Mapping[str, TensorInfo]
    """Tensors by name, those of a split model's other parts included."""
    types: Mapping[str, int]
    """GGUF's number of each metadata value's type, also for values that are left out."""
    data_offset: int
    """Bytes before the tensor data."""

    def text(self, key: str) -> str | None:
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def number(self, key: str) -> int | None:
        value = self.metadata.get(key)
        return value if isinstance(value, int) else None

    def numbers(self, key: str) -> list[int]:
        """Return an array of integers, or one integer as an array of one; empty if there is none."""
        value = self.metadata.get(key)
        values = value if isinstance(value, list) else [value]
        return [one for one in values if isinstance(one, int)]


class _Cut(Exception):
    """The header continues beyond the end of the file."""


class _Reader:
    """A cursor over the mapped file. Every read is checked against the file's end."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data
        self.at = 0

    def skip(self, num_bytes: int) -> int:
        start = self.at
        if num_bytes > len(self._data) - start:
            raise _Cut
        self.at = start + num_bytes
        return start

    def scalar(self, form: str) -> int | float | bool:
        start = self.skip(struct.calcsize(form))
        value: int | float | bool = struct.unpack_from(form, self._data, start)[0]
        return value

    def count(self, form: str = "<Q") -> int:
        return int(self.scalar(form))

    def string(self) -> str:
        length = self.count()
        start = self.skip(length)
        return self._data[start : start + length].decode("utf-8", "replace")

    def value(self, kind: int) -> Value | None:
        """Return one metadata value; None for an array that is not kept."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        return self.scalar(_SCALARS[kind])

    def _array(self) -> Value | None:
        kind, length = self.count("<I"), self.count()
        if length <= MAX_KEPT_ARRAY and kind != _ARRAY:
            values = [self.value(kind) for _ in range(length)]
            return [value for value in values if value is not None and not isinstance(value, list)]
        if kind in _SCALARS:
            self.skip(length * struct.calcsize(_SCALARS[kind]))
        elif kind == _STRING:
            self._skip_strings(length)
        else:
            for _ in range(length):
                self.value(kind)
        return None

    def _skip_strings(self, number: int) -> None:
        """Skip strings, of which a vocabulary has hundreds of thousands: this loop is most of the time of a header."""
        at, data, length_at = self.at, self._data, struct.Struct("<Q").unpack_from
        try:
            for _ in range(number):
                at += 8 + length_at(data, at)[0]
        except (struct.error, OverflowError):
            raise _Cut from None
        self.at = at
        self.skip(0)


def read_header(path: Path, read: Callable[[Path], GgufHeader] | None = None) -> GgufHeader:
    """Read and check the header of `path`, and of the other parts of a split file. Raises ModelError.

    The check covers magic, version and that every tensor ends before the file does. `read` reads that of one file;
    None: `read_file`."""
    read = read or read_file
    header = read(path)
    parts = header.number("split.count") or 1
    match = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\.gguf)", path.name)
    if parts > 1 and match:
        tensors = dict(header.tensors)
        for part in range(2, parts + 1):
            tensors |= read(path.with_name(f"{match[1]}{part:05d}{match[2]}")).tensors
        header = replace(header, tensors=tensors)
    return header


def first_fault(paths: Iterable[Path]) -> str:
    """Return what is wrong with the first of these files that can't be loaded; empty: nothing is, by their headers."""
    for path in paths:
        try:
            read_header(path)
        except ModelError as error:
            return str(error)
    return ""


def parse_header(path: Path, data: bytes, size: int) -> GgufHeader:
    """Return the header of a file of `size` bytes that begins with `data`. Raises ModelError, which names `path`.

    Use it for files that others may still write to: a mapped file that shrinks ends the process."""
    return _guarded(path, data, size)


def read_file(path: Path) -> GgufHeader:
    """Read and check the header of one file, whether or not it is a part of a split one. Raises ModelError."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            if size == 0:
                raise ModelError(f"{path}: the file is empty; download or copy it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _guarded(path, data, size)
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file; check the path of the model") from None
    except IsADirectoryError:
        raise ModelError(f"{path}: this is a folder; give the path of the .gguf file inside it") from None
    except NotAFile as error:
        raise ModelError(f"{path}: {error.strerror}; give the path of a .gguf file") from None
    except OSError as error:
        raise ModelError(f"{path}: can't be read ({error.strerror}); check its permissions") from None


def _guarded(path: Path, data: mmap.mmap | bytes, size: int) -> GgufHeader:
    try:
        return _parse(path, data, size)
    except (_Cut, MemoryError, OverflowError):
        raise ModelError(
            f"{path}: truncated: its {size:,} bytes end inside the header; download or copy it again"
        ) from None
    except KeyError as error:
        raise ModelError(f"{path}: damaged header (value of unknown type {error}); download or copy it again") from None
    except RecursionError:
        raise ModelError(f"{path}: damaged header (arrays within arrays); download or copy it again") from None


def _parse(path: Path, data: mmap.mmap | bytes, size: int) -> GgufHeader:
    if data[:4] != b"GGUF":
        pointer = data[:24] == b"version https://git-lfs."
        remedy = "fetch the real file with `git lfs pull`" if pointer else "give a .gguf file"
        what = "a Git LFS pointer" if pointer else f"it begins with {data[:4]!r}"
        raise ModelError(f"{path}: not a GGUF file ({what}); {remedy}")
    reader = _Reader(data)
    reader.skip(4)
    version = reader.count("<I")
    if version not in (2, 3):
        order = " (its byte order is that of another kind of machine)" if version > 0xFFFF else ""
        raise ModelError(
            f"{path}: GGUF version {version}{order} is not supported, only 2 and 3; convert the model again"
        )
    num_tensors, num_values = reader.count(), reader.count()
    metadata: dict[str, Value] = {}
    types: dict[str, int] = {}
    for _ in range(num_values):
        key, kind = reader.string(), reader.count("<I")
        value = reader.value(kind)
        types[key] = kind
        if value is not None:
            metadata[key] = value
    tensors: dict[str, TensorInfo] = {}
    tensor_bytes, extent = _walk_tensors(path, reader, num_tensors, tensors)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"{path}: damaged header (alignment {alignment!r}); download or copy it again")
    data_offset = -(-reader.at // alignment) * alignment
    needed = data_offset + extent if num_tensors else reader.at
    if needed > size:
        raise ModelError(
            f"{path}: truncated: the file is shorter than its header says, {size:,} of {needed:,} bytes are there; "
            "download or copy it again"
        )
    return GgufHeader(path, version, metadata, num_tensors, tensor_bytes, tensors, types, data_offset)


def _walk_tensors(path: Path, reader: _Reader, num_tensors: int, tensors: dict[str, TensorInfo]) -> tuple[int, int]:
    """Read the tensor list into `tensors`; return the bytes of all, and where in the tensor data the last one ends."""
    total = extent = 0
    for _ in range(num_tensors):
        name, num_dims = reader.string(), reader.count("<I")
        if num_dims > MAX_DIMS:
            raise ModelError(f"{path}: damaged header (a tensor of {num_dims} dimensions); download or copy it again")
        dims = [reader.count() for _ in range(num_dims)] + [1] * (MAX_DIMS - num_dims)
        kind, offset = reader.count("<I"), reader.count()
        per_block, block_bytes = BLOCKS.get(kind, (1, 0))
        num_bytes = math.prod(dims) // per_block * block_bytes
        total += num_bytes
        extent = max(extent, offset + num_bytes)
        tensors[name] = TensorInfo((dims[0], dims[1], dims[2], dims[3]), kind, offset)
    return total, extent


if __name__ == "__main__":  # `workers.supervisor.loading.file_check` runs it
    print(first_fault(map(Path, sys.argv[1:])))
