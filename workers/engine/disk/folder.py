"""The folder of the disk tier, and a process's index of it.

Files lie at `<version>/<team>/<2 hex digits>/<name>`, opened level by level without following links; names that are not
of this form are neither read nor removed. Processes on several machines may use one folder at the same time: a file
that is missing was removed by another process.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workers.engine.disk.sealed import FOLDER_HEX, NAME_HEX, STEM_HEX, TEMPORARY, discard

FOLDER_MODE = 0o700
STALE_S = 3600.0
"""Age in seconds after which a file that still has its temporary name counts as left by a process that has ended."""

SKEW_S = 60.0
"""Seconds by which a file's time of last use may be in the future: clocks of machines that share a folder differ."""

COARSE_S = 1.0
"""Seconds by which a new file's time may be behind `time.time`: file systems have coarser clocks, some of seconds."""

LEFT = ".left"
"""File that an ending worker touches once all its queued blocks are written, so that other workers scan again."""

ERASED = ".erased-"
ERASE_TRIES = 20
ERASE_WAIT_S = 0.05

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers of a disk that is full, or as full as this process may make it (`ulimit -f`)."""
DISK_TROUBLE = DISK_FULL | {errno.EROFS, errno.EIO}
"""Error numbers of a disk that takes no writes for a while. Workers serve all the same, without what they would keep
there."""

log = logging.getLogger(__name__)

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = re.compile(rf"[0-9a-f]{{{FOLDER_HEX}}}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_NAME = re.compile(rf"[0-9a-f]{{{NAME_HEX}}}(?:[0-9a-f]{{{STEM_HEX}}})?")


class CacheFolderUnusable(ValueError):
    """Raised if the configured folder can't hold a cache; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A folder of the lowest level, `<version>/<team>/<2 hex digits>`: only these folders hold files of the cache."""

    version: str
    tenant: str
    shard: str

    @property
    def parts(self) -> tuple[str, str, str]:
        return self.version, self.tenant, self.shard


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one file in the folder."""

    version: str
    tenant: str
    name: str

    @property
    def leaf(self) -> Leaf:
        return Leaf(self.version, self.tenant, self.name[:2])


@dataclass(frozen=True, slots=True)
class Entry:
    """One file in the folder, as the last scan found it."""

    place: Place
    size: int
    used_at: float
    """Time of the last use, `time.time` seconds."""


class CacheFolder:
    """The folder, held open so that nobody can put another one in its place. Methods can raise OSError."""

    def __init__(self, path: Path) -> None:
        """Make the folder if it is missing, and open it. Raises CacheFolderUnusable."""
        self.path = path
        self._root = open_private(path)

    def close(self) -> None:
        os.close(self._root)

    @contextmanager
    def opened(self, *names: str, create: bool = False) -> Iterator[int]:
        """Yield the descriptor of a subfolder. Raises FileNotFoundError; OSError if a level is a link or a file."""
        folder = os.dup(self._root)
        try:
            for name in names:
                below = _enter(folder, name, create=create)
                os.close(folder)
                folder = below
            yield folder
        finally:
            os.close(folder)

    def mark_left(self) -> None:
        """Touch `.left`, so that other workers see that a worker which is about to end has written something."""
        mark = os.open(LEFT, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._root)
        try:
            now = time.time_ns()  # finer than the file system's own clock, with which two marks could have one time
            os.utime(mark, ns=(now, now))
        finally:
            os.close(mark)

    def left_at(self) -> int:
        """Return when a worker last called `mark_left`, unix time in ns; 0: never, or it can't be seen now."""
        try:
            return os.stat(LEFT, dir_fd=self._root, follow_symlinks=False).st_mtime_ns
        except OSError:
            return 0

    def sync(self, leaf: Leaf) -> None:
        """Write the file names in a leaf folder through to the disk, so that they survive a power cut."""
        with suppress(FileNotFoundError), self.opened(*leaf.parts) as folder:
            sync_folder(folder)

    def remove(self, place: Place) -> None:
        """Remove a file, if it is there. Raises OSError."""
        with suppress(FileNotFoundError), self.opened(*place.leaf.parts) as folder:
            os.unlink(place.name, dir_fd=folder)

    def leaves(self) -> Iterator[Leaf]:
        """Yield each folder that may hold files. Another process may remove a folder before the caller opens it."""
        for version in self.versions():
            for tenant in self.tenants(version):
                for shard in self._names(_SHARD, version, tenant):
                    yield Leaf(version, tenant, shard)

    def versions(self) -> list[str]:
        return self._names(_FOLDER)

    def tenants(self, version: str) -> list[str]:
        return self._names(_FOLDER, version)

    def entries(self, leaf: Leaf, stepped_at: float | None = None) -> list[Entry]:
        """Return a leaf's files. Removes unfinished files after `STALE_S`, and the leaf if empty for `STALE_S`.

        `stepped_at`: `time.time` seconds to which files' times of last use are set that are more than `SKEW_S` in the
        future, since the clock has stepped back; None: they are left as they are."""
        found, now = [], time.time()
        try:
            with self.opened(*leaf.parts) as folder:
                seen = list(_stats(folder))
                for name, status in seen:
                    if name.endswith(TEMPORARY) and now - status.st_mtime > STALE_S:
                        discard(folder, name)
                    elif _NAME.fullmatch(name) and stat.S_ISREG(status.st_mode):
                        used_at = min(status.st_mtime, now)
                        if stepped_at is not None and status.st_mtime - now > SKEW_S:
                            used_at = stepped_at
                            _set_used(folder, name, used_at)
                        found.append(Entry(Place(leaf.version, leaf.tenant, name), status.st_size, used_at))
                age_s = now - os.fstat(folder).st_mtime
            if not seen and age_s > STALE_S:
                self._remove_empty(leaf)
        except FileNotFoundError:
            pass
        return found

    def files(self, *names: str) -> dict[str, int]:
        """Return the size of each plain file in a folder, by name. Removes unfinished files of a killed process."""
        found, now = {}, time.time()
        with suppress(FileNotFoundError), self.opened(*names) as folder:
            for name, status in _stats(folder):
                if name.endswith(TEMPORARY) and now - status.st_mtime > STALE_S:
                    discard(folder, name)
                elif stat.S_ISREG(status.st_mode):
                    found[name] = status.st_size
        return found

    def erase(self, tenant: str) -> int:
        """Remove the files in a team's folder (`CacheKeys.tenant_folder`) of every version; return their number."""
        return sum(self.erase_folder(version, tenant) for version in self.versions())

    def erase_all(self) -> int:
        """Remove every team's files; return how many there were."""
        return sum(
            self.erase_folder(version, tenant) for version in self.versions() for tenant in self.tenants(version)
        )

    def erase_folder(self, *names: str) -> int:
        """Remove one folder with all that is in it; return how many files there were, 0 if there is no such folder.

        Also removes and counts the files that an earlier erasure left behind because its process was killed."""
        count = 0
        with suppress(FileNotFoundError), self.opened(*names[:-1]) as above:
            # Renamed first: from then on nobody finds any of it, and files that others still write there go with it.
            with suppress(FileNotFoundError):
                os.rename(names[-1], f"{ERASED}{secrets.token_hex(8)}", src_dir_fd=above, dst_dir_fd=above)
            for gone in [name for name in os.listdir(above) if name.startswith(ERASED)]:
                count += _count(above, gone)
                _remove_tree(above, gone)
        return count

    def _names(self, form: re.Pattern[str], *parents: str) -> list[str]:
        try:
            with self.opened(*parents) as folder, os.scandir(folder) as entries:
                return [e.name for e in entries if form.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _remove_empty(self, leaf: Leaf) -> None:
        for depth in (3, 2, 1):
            try:
                with self.opened(*leaf.parts[: depth - 1]) as above:
                    os.rmdir(leaf.parts[depth - 1], dir_fd=above)
            except OSError:
                return


def open_private(path: Path) -> int:
    """Open or make the folder; return its descriptor. Raises CacheFolderUnusable if others may write to it."""
    try:
        path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        folder = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno in DISK_TROUBLE:
            raise CacheFolderUnusable(
                f"{path}: the disk takes no new folder now ({error.strerror}); give it room and let it be written to, "
                "or name a folder on another"
            ) from None
        is_link = error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink()
        what = "it is a symbolic link, which is not followed" if is_link else error.strerror
        raise CacheFolderUnusable(f"{path}: {what}; name a folder of this user's own") from None
    status = os.fstat(folder)
    try:
        if status.st_uid not in (os.geteuid(), 0):
            raise CacheFolderUnusable(
                f"{path}: it belongs to user {status.st_uid}, who could replace what is in it; "
                "name a folder of this user's own"
            )
        if status.st_mode & 0o022:
            raise CacheFolderUnusable(
                f"{path}: other users may write to it (mode {stat.S_IMODE(status.st_mode):03o}); "
                "run `chmod go-w` on it, or name a folder inside it that does not exist yet"
            )
        probe = f".{secrets.token_hex(8)}{TEMPORARY}"
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder))
        os.unlink(probe, dir_fd=folder)
    except CacheFolderUnusable:
        os.close(folder)
        raise
    except OSError as error:
        if error.errno in DISK_TROUBLE:
            log.warning("%s takes no files now (%s); what is there is used all the same", path, error.strerror)
            return folder
        os.close(folder)
        raise CacheFolderUnusable(f"{path}: can't be written to ({error.strerror}); change its owner or mode") from None
    return folder


def sync_folder(folder: int) -> None:
    """Write the file names in an open folder through to the disk, so that they survive a power cut. Raises OSError."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems can't
            raise


def _enter(folder: int, name: str, *, create: bool) -> int:
    try:
        return os.open(name, _FLAGS, dir_fd=folder)
    except FileNotFoundError:
        if not create:
            raise
    try:
        os.mkdir(name, FOLDER_MODE, dir_fd=folder)
        sync_folder(folder)
    except FileExistsError:
        pass
    return os.open(name, _FLAGS, dir_fd=folder)


def _stats(folder: int) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                yield entry.name, entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue


def _set_used(folder: int, name: str, used_at: float) -> None:
    """Set a file's time of last use, if that is allowed and the file still exists."""
    with suppress(OSError):
        os.utime(name, (used_at, used_at), dir_fd=folder, follow_symlinks=False)


def _remove_tree(folder: int, name: str) -> None:
    """Remove a folder tree. Tries again, since processes that have it open may still write there. Raises OSError."""
    for left in reversed(range(ERASE_TRIES)):
        shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
        discard(folder, name)  # where it is a link
        try:
            os.lstat(name, dir_fd=folder)
        except FileNotFoundError:
            return
        if left:
            time.sleep(ERASE_WAIT_S)
    raise OSError(errno.ENOTEMPTY, "can't be removed; erase again", name)


def _count(folder: int, name: str) -> int:
    return sum(len(files) for _, _, files, _ in os.fwalk(name, dir_fd=folder, follow_symlinks=False))


LOW_WATER = 0.9
"""Share of `max_bytes` to which a full folder shrinks, so that its oldest files rarely have to be searched for."""

REFRESH_S = 60.0
REFRESH_SHARE = 0.01
"""`REFRESH_S`: minimum seconds between scans of the folder without a reason. `REFRESH_SHARE`: maximum share of time
spent on them."""

HURRIED_S = 0.5
HURRIED_SHARE = 0.1
"""`REFRESH_S` and `REFRESH_SHARE` for scans with a reason: a worker has marked its end (`mark_left`), so its files may
be wanted soon; or this process has written much (`UNSEEN_SHARE`), so others may have, too."""

UNSEEN_SHARE = 1 / 8
"""Bytes that this process writes before it scans again, as a share of the room that its index shows in the folder.
Seven others that write as fast can't fill the room before. More or faster ones exceed `max_bytes`, by what they write
until the next scan: for `HURRIED_S`, or ten times as long as a scan takes."""


class DiskIndex:
    """The names, sizes and last uses of the folder's files, from regular scans and from this process's own work.

    Other processes write and remove files too, so a file in the index may be gone (only opening it shows that), and
    `num_bytes` only tells when to scan again (`full`, `is_outdated`). One thread changes the index; any thread may call
    `knows`."""

    def __init__(self, folder: CacheFolder, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.next_scan_at = 0.0
        """When the next scan is due, `time.monotonic` seconds."""
        self.next_hurried_at = 0.0
        """Earliest time of a scan with a reason (see `HURRIED_S`), `time.monotonic` seconds."""
        self._scanned_at: float | None = None
        """When the last scan began, `time.monotonic` seconds."""
        self._unseen_bytes = 0
        """Bytes that this process has written since the last scan ended."""
        self._shrinks_at = 0.0
        """Earliest time to remove files, `time.monotonic` seconds: later, where the disk has kept one."""
        self._folder = folder
        self._entries: dict[Place, Entry] = {}
        self._written_since: dict[Place, Entry] | None = None
        """Files that this process has written since the running scan began; None: no scan runs."""

    @property
    def num_files(self) -> int:
        return len(self._entries)

    @property
    def full(self) -> bool:
        return self.num_bytes > self.max_bytes

    @property
    def must_shrink(self) -> bool:
        """Whether files have to be removed, and the disk may let them go."""
        return self.full and time.monotonic() >= self._shrinks_at

    @property
    def is_outdated(self) -> bool:
        """Whether this process has written so much since the last scan that what others wrote may fill the folder."""
        is_much = self._unseen_bytes >= max(0, self.max_bytes - self.num_bytes) * UNSEEN_SHARE
        return is_much and time.monotonic() >= self.next_hurried_at

    def knows(self, place: Place) -> bool:
        return place in self._entries

    def size(self, place: Place) -> int:
        """Return the size of a file in bytes; 0 if the index does not know the file."""
        entry = self._entries.get(place)
        return 0 if entry is None else entry.size

    def states(self, version: str) -> list[Place]:
        """Return the places of a version's files that hold the state of a whole conversation, not a block of it."""
        return [place for place in self._entries if len(place.name) > NAME_HEX and place.version == version]

    def add(self, place: Place, size: int) -> None:
        """Add a file that this process has written."""
        entry = Entry(place, size, time.time())
        self.forget(place)
        self._entries[place] = entry
        self.num_bytes += size
        self._unseen_bytes += size
        if self._written_since is not None:
            self._written_since[place] = entry

    def forget(self, place: Place) -> None:
        """Take a file out of the index, because the file no longer exists."""
        entry = self._entries.pop(place, None)
        if entry is not None:
            self.num_bytes -= entry.size
        if self._written_since is not None:
            self._written_since.pop(place, None)

    def scan(self) -> Iterator[None]:
        """Scan the folder anew; yields after each leaf, so that other work can come between. Raises OSError."""
        started = time.monotonic()
        # If the clock has stepped back, then since the last scan: what was used before it is older than what this
        # process has written after it, and is not evicted later than that.
        stepped_at = time.time() - COARSE_S - (0.0 if self._scanned_at is None else started - self._scanned_at)
        self._scanned_at = started
        self._written_since = {}
        try:
            entries: dict[Place, Entry] = {}
            for leaf in self._folder.leaves():
                entries.update((entry.place, entry) for entry in self._folder.entries(leaf, stepped_at))
                yield
            entries |= self._written_since
            self._entries = entries
            self.num_bytes = sum(entry.size for entry in entries.values())
            self._unseen_bytes = 0
        finally:
            self._written_since = None
            now = time.monotonic()
            self.next_scan_at = now + max(REFRESH_S, (now - started) / REFRESH_SHARE)
            self.next_hurried_at = now + max(HURRIED_S, (now - started) / HURRIED_SHARE)

    def shrink(self) -> int:
        """Remove the least recently used files down to `LOW_WATER`; return their number. Call it right after a scan.

        Raises OSError if the disk lets no file go; what is left stays in the index."""
        entries = list(self._entries.values())
        # numpy's sort releases the interpreter lock, list.sort does not.
        order = np.argsort(np.fromiter((entry.used_at for entry in entries), np.float64, len(entries)), kind="stable")
        removed = 0
        for at in order:
            if self.num_bytes <= self.max_bytes * LOW_WATER:
                break
            entry = entries[int(at)]
            try:
                self._folder.remove(entry.place)  # if another process was quicker, it is gone all the same
            except OSError as error:
                if error.errno in DISK_TROUBLE:
                    self._shrinks_at = time.monotonic() + REFRESH_S
                    raise
            self.forget(entry.place)
            removed += 1
        return removed
