"""Keeps what the headers of model files say, in a folder of this user's which workers may share.

Reading a header takes 35 ms where it has a vocabulary of 150,000 tokens, and the file can't be loaded meanwhile: so
that of a file is read once, until the file's size, times or inode change.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from pathlib import Path

import msgspec

from workers.llama.gguf import BLOCKS, MAX_KEPT_ARRAY, GgufHeader, TensorInfo, Value, read_file, read_header
from workers.models.files import FRESH_NS, FileState, replace_file

FOLDER = "headers"
"""Name of the folder in the state folder."""

MOST_KEPT = 64
"""Maximum number of files whose headers are kept; those that were read longest ago are forgotten."""

MOST_BYTES = 8 << 20
"""Maximum size of a header that is kept. That of a model with a thousand tensors takes 0.1 MB."""

READING = hashlib.sha256(repr((1, MAX_KEPT_ARRAY, BLOCKS)).encode()).hexdigest()[:16]
"""Changes with how headers are read. Raise the number when `workers.llama.gguf` reads them in another way."""


class _Kept(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The header of one file, with the state of the file that it was read from."""

    reading: str
    state: str
    version: int
    metadata: dict[str, Value]
    num_tensors: int
    tensor_bytes: int
    tensors: dict[str, TensorInfo]
    types: dict[str, int]
    data_offset: int

    def header(self, path: Path) -> GgufHeader:
        return GgufHeader(
            path,
            self.version,
            self.metadata,
            self.num_tensors,
            self.tensor_bytes,
            self.tensors,
            self.types,
            self.data_offset,
        )


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Kept).decode


class HeaderCache:
    """Reads headers of model files. A folder that is missing, damaged or can't be written counts as an empty one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, path: Path) -> GgufHeader:
        """Return the header of a model, as `read_header` does. Raises ModelError."""
        return read_header(path, self._read_file)

    def _read_file(self, path: Path) -> GgufHeader:
        try:
            state, file = FileState.of(path), self._file_of(path)
        except OSError:
            return read_file(path)  # it says what is wrong
        if (known := self._known(file, state)) is not None:
            return known.header(path)
        header = read_file(path)
        with contextlib.suppress(OSError):  # it is only kept for speed
            if time.time_ns() - state.ctime_ns > FRESH_NS and FileState.of(path) == state:
                self._keep(file, state, header)
        return header

    def _file_of(self, path: Path) -> Path:
        return self._folder / hashlib.sha256(str(path.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:32]

    def _known(self, file: Path, state: FileState) -> _Kept | None:
        try:
            if file.stat().st_size > MOST_BYTES:
                return None
            kept = _decode(file.read_bytes())
        except (OSError, ValueError, RecursionError):  # msgspec's own are a ValueError
            return None
        return kept if (kept.reading, kept.state) == (READING, state.text()) else None

    def _keep(self, file: Path, state: FileState, header: GgufHeader) -> None:
        """Keep a header, and forget others if there are too many. Raises OSError."""
        data = _encode(
            _Kept(
                reading=READING,
                state=state.text(),
                version=header.version,
                metadata=header.metadata,
                num_tensors=header.num_tensors,
                tensor_bytes=header.tensor_bytes,
                tensors=dict(header.tensors),
                types=dict(header.types),
                data_offset=header.data_offset,
            )
        )
        if len(data) > MOST_BYTES:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(file, data)
        kept = sorted(self._folder.iterdir(), key=lambda one: one.lstat().st_mtime_ns)
        for old in kept[: max(0, len(kept) - MOST_KEPT)]:
            old.unlink(missing_ok=True)
