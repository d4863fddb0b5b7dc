"""Makes and locks the state folder, which is private to its user, serves one supervisor at a time and holds secrets."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from workers import secret_file


class FolderTaken(RuntimeError):
    """Another process uses the state folder; the message says which, and the remedy."""


def make(path: Path) -> None:
    """Make the state folder and its folders of logs and of the running processes, as far as they are not there, each
    accessible to its user only. Raises OSError."""
    for folder in (path, path / "logs", path / "run"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def holds(file: Path, content: bytes) -> bool:
    """Return whether this is a file with this content; False where that can't be known."""
    try:
        found = file.lstat()
        # Looked at before it is read: a device has no end, and a pipe may have no writer.
        return stat.S_ISREG(found.st_mode) and found.st_size == len(content) and file.read_bytes() == content
    except OSError:
        return False


def write_whole(file: Path, content: bytes) -> None:
    """Write a file of mode 0600 by way of another one beside it, so that it never has a part of its content only.
    Nothing is written where it holds the content already. Raises OSError, and leaves the file as it was."""
    if holds(file, content):
        return
    new = file.with_name(f".{file.name}.new")
    new.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(content)
        new.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def remove(file: Path, say: Callable[[str], None]) -> None:
    """Remove a file, if it is there. `say` is told of one that can't be removed: whoever ends does so nevertheless."""
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        say(f"paddock: {file} can't be removed: {error.strerror}")


def say_nothing(line: str) -> None:
    """Do nothing: the default `say` of `StateFolder`."""


class StateFolder:
    """The state folder: `with` makes and locks it, and unlocks it at the end. Raises FolderTaken, OSError.

    A folder that is made here is accessible to its user only; an existing one keeps its mode (see `exposure`)."""

    def __init__(self, path: Path, say: Callable[[str], None] = say_nothing) -> None:
        """`say` is told of files that can't be removed."""
        self.path = path.absolute()
        self._say = say
        self.logs = self.path / "logs"
        self.run = self.path / "run"
        self.first_key = self.path / "first-key"
        self._lock = self.run / "lock"
        self._descriptor = -1
        self._kept: dict[Path, bytes] = {}

    def __enter__(self) -> StateFolder:
        try:
            make(self.path)
            self._descriptor = self._locked()
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"process {os.getpid()}".encode())
        except OSError as error:
            raise OSError(
                f"state_dir: can't use {error.filename or self.path}: {error.strerror}; "
                "name a folder that you may write to with --state-dir"
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Unlinked while locked: a process that opened the file meanwhile sees that its name is gone, and tries again.
        remove(self._lock, self._say)
        os.close(self._descriptor)

    def exposure(self) -> str:
        """Return a warning if other users may enter the folder, otherwise an empty text. Call it inside `with`."""
        mode = stat.S_IMODE(self.path.stat().st_mode)
        if not mode & 0o011:
            return ""
        return f"warning: other users may enter the state folder {self.path} (mode {mode:03o}); `chmod 700` closes it"

    def secret(self, name: str) -> str:
        """Return the secret of this name. It is made once and kept in a file of mode 0600 (`workers.secret_file`)."""
        return secret_file.made_once(self.path / name)

    def keep(self, file: Path, content: bytes) -> None:
        """Write a file in this folder that running processes need; `restore` writes it again. Raises OSError."""
        write_whole(file, content)
        self._kept[file] = content

    def remove(self, file: Path) -> None:
        """Remove a file, which may have been given to `keep`."""
        self._kept.pop(file, None)
        remove(file, self._say)

    def restore(self) -> None:
        """Make the folders that somebody has removed, and write the files given to `keep` that are not there any more,
        or not as they were written. Raises OSError."""
        make(self.path)
        for file, content in self._kept.items():
            write_whole(file, content)

    def is_whole(self) -> bool:
        """Return whether all files given to `keep` are there and as they were written."""
        return all(holds(file, content) for file, content in self._kept.items())

    def _locked(self) -> int:
        while True:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(descriptor, 200).decode("ascii", "replace") or "another process"
                os.close(descriptor)
                raise FolderTaken(
                    f"{self.path} is in use by {holder}; stop it, or give another folder with --state-dir"
                ) from None
            if self._lock.exists() and os.path.samestat(os.fstat(descriptor), self._lock.stat()):
                return descriptor
            os.close(descriptor)


def is_held(path: Path) -> bool:
    """Return whether a supervisor runs with this state folder. One that ended without unlocking it does not count."""
    try:
        descriptor = os.open(path / "run" / "lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
