"""Names of model files, of a split model's parts and of models on the Hugging Face hub; hashes and sizes of files.

Files are opened without waiting for anybody: opening a pipe waits until somebody opens its other end, and reading a
device may never end, so that a name in a catalog, or a file that was exchanged since, would stop a supervisor or a
worker for good.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

SUFFIX = ".gguf"
DRAFT, PROJECTOR, ADAPTER = ".draft", ".projector", ".adapter."
"""Parts of the names of files that belong to a model: `NAME.draft.gguf`, `NAME.projector.gguf`, and
`NAME.adapter.ADAPTER.gguf` for an adapter of the hub."""
PART = ".part"
"""Ending of the name of a file that has not come whole."""
SPLIT = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
"""The part number and the count of parts, which llama.cpp writes before the suffix."""
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def parts(first: Path) -> tuple[Path, ...]:
    """Return the paths of all files of a model in order, given its only file or its first part."""
    split = SPLIT.search(first.name)
    if split is None:
        return (first,)
    count = int(split[2])
    return tuple(
        first.with_name(SPLIT.sub(f"-{number:05}-of-{split[2]}", first.name)) for number in range(1, count + 1)
    )


def first_part(path: Path) -> Path:
    """Return `NAME-00001-of-0000N.gguf` for `NAME.gguf` if `NAME.gguf` does not exist but that first part does, so that
    settings can leave out the part's number. Return other paths unchanged."""
    if path.suffix.lower() != SUFFIX or path.exists():
        return path
    prefix, found = f"{path.stem}-00001-of-", []
    if path.parent.is_dir():
        found = [near for near in path.parent.iterdir() if near.name.startswith(prefix) and SPLIT.search(near.name)]
    return found[0] if len(found) == 1 else path


def plain_name(model: str) -> str:
    """Return the name of a served model in a form that can be a file's name, with `--` for each `/` and `:`."""
    return re.sub(r"[/:]", "--", model)


def clean_name(text: str) -> str:
    """Return a text, such as a file's name without its suffix, as the name of a model."""
    without_ends = re.sub(r"[^A-Za-z0-9._+-]+(?=[._-]|$)", "", text)
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", without_ends).strip("-._+") or "model"


COMMIT = re.compile(r"[0-9a-f]{40}")


class HubReference(NamedTuple):
    """The name of a model of the Hugging Face hub: `OWNER/NAME[:QUANT][@REVISION]`."""

    repo: str
    quant: str = ""
    """The quantisation, as it is in the file's name; empty: a preferred one that the repository has."""
    revision: str = ""
    """Branch, tag or commit; empty: the newest commit."""

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, so that the reference always means the same files."""
        return COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        quant, revision = f":{self.quant}" if self.quant else "", f"@{self.revision}" if self.revision else ""
        return self.repo + quant + revision


def parse_reference(text: str) -> HubReference:
    """Return a reference's parts. They are not checked here: the hub answers with an error if one is wrong."""
    rest, _, revision = text.partition("@")
    repo, _, quant = rest.partition(":")
    return HubReference(repo, quant, revision)


BLOCK_BYTES = 8 << 20


class FetchedModel(msgspec.Struct, frozen=True):
    """A model that was fetched from the hub."""

    path: str
    """Path of the model's file, or of the first part of a split one."""
    commit: str
    sha256: dict[str, str]
    """File name of each part, and of the projector -> SHA-256."""
    projector: str | None = None
    """Path of the file that makes the model see or hear; empty: its repository has none; None: it was not wanted."""


decode_model = msgspec.json.Decoder(FetchedModel).decode


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's contents. Raises OSError."""
    seen = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(BLOCK_BYTES):
            seen.update(block)
    return seen.hexdigest()


def bytes_in(folder: Path) -> int:
    """Return the number of bytes of all files in a folder and below it; links count nothing."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


FRESH_NS = 2_000_000_000
"""For so many nanoseconds after a file changed, nothing that was read of it is remembered: a new change may not show in
its times."""


@dataclass(frozen=True, slots=True)
class FileState:
    """Facts that show whether a file changed. Programs can set the modification time but not the change time."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        status = path.stat()
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)

    def text(self) -> str:
        return f"{self.size} {self.mtime_ns} {self.ctime_ns} {self.inode} {self.device}"


def replace_file(file: Path, data: bytes) -> None:
    """Write a file that its user alone may read, whole or not at all. Raises OSError; nothing is left of it then."""
    temporary = file.with_name(f".{file.name}-{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as written:
            written.write(data)
        temporary.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


class NotAFile(OSError):
    """The path leads to something that is no regular file; `strerror` says what it is."""


def open_regular(path: Path) -> io.FileIO:
    """Open a regular file for reading, unbuffered, and never wait. Raises NotAFile, IsADirectoryError, OSError."""
    _check(os.stat(path).st_mode, path)  # opening a device can have effects of its own
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check(os.fstat(descriptor).st_mode, path)  # it may be another one by now
        return io.FileIO(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: Path) -> None:
    """Raise NotAFile or IsADirectoryError if a path leads to something that is no regular file, OSError if to
    nothing."""
    _check(os.stat(path).st_mode, path)


def _check(mode: int, path: Path) -> None:
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    what = _KINDS.get(stat.S_IFMT(mode), "something else")
    raise NotAFile(errno.EINVAL, f"it is {what}, not a file", str(path))
