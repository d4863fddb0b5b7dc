"""Downloads single files of the Hugging Face hub, goes on where an earlier attempt ended, and checks what came.

The library itself begins a file from the start in each process, so 40 GB would never arrive over a connection that
breaks now and then. An unfinished file is `<etag>.part` beside the finished ones. Each file is compared with the hub's
SHA-256, if the hub gives one, before it is used.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.file_download import HfFileMetadata, http_get, repo_folder_name
from huggingface_hub.utils._headers import build_hf_headers

from workers.models.files import PART, bytes_in, sha256_of
from workers.models.hub.progress import PlainProgress, no_progress, size_text

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

REPORT_EVERY_S = 0.2
"""Seconds between two reports of how much of a file has come."""
SHA256 = re.compile(r"[0-9a-f]{64}")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Pattern of etags that can be file names in the cache, never paths. The hub's are hashes; mirrors' are similar."""


class Unusable(Exception):
    """The file can't be fetched; the message says why, and the remedy."""


@dataclass(frozen=True, slots=True)
class Cache:
    """The folder that files of the hub are kept in."""

    folder: str | None
    """None: the library's own, which `HF_HOME` names."""
    quota_bytes: int = 0
    """Most bytes of all files in `folder`; 0: any number, or the folder is the library's."""

    @property
    def path(self) -> Path:
        return Path(self.folder or constants.HF_HUB_CACHE)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of one commit of a repository, as the hub describes it."""

    repo: str
    name: str
    commit: str
    url: str
    told: HfFileMetadata
    blob: Path | None
    """The file of the cache that gets the contents; None: the hub gives no name for these."""

    @property
    def num_missing(self) -> int:
        """The number of bytes that are still to come."""
        size = self.told.size or 0
        if self.blob is None:
            return size
        if self.blob.exists():
            return 0
        part = part_of(self.blob)
        return size - (part.stat().st_size if part.exists() else 0)


def part_of(blob: Path) -> Path:
    """Return the path of what has come so far of a file of the cache."""
    return blob.with_name(f"{blob.name}{PART}")


def describe(api: HfApi, repo: str, name: str, commit: str, cache: Cache) -> RemoteFile:
    """Ask the hub about a file. Raises Unusable, OSError, and what the library raises."""
    url = hf_hub_url(repo, name, revision=commit, endpoint=api.endpoint)
    told = get_hf_file_metadata(url, token=api.token)
    if told.etag and not FILE_NAME.fullmatch(told.etag):
        raise Unusable(f"{name}: the hub names its contents {told.etag[:200]!r}, which is no hash; use another hub")
    folder = cache.path / repo_folder_name(repo_id=repo, repo_type="model") / "blobs"
    return RemoteFile(repo, name, commit, url, told, folder / told.etag if told.etag else None)


def check_room(files: Sequence[RemoteFile], cache: Cache) -> None:
    """Raise Unusable unless the files fit the disk, and the quota of the models folder."""
    needed, folder = sum(file.num_missing for file in files), cache.path
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise Unusable(
            f"{size_text(needed)} are to come, but {folder} has {size_text(free)} left; make room, by `paddock models "
            "rm` for one"
        )
    if not cache.quota_bytes or cache.folder is None or not needed:
        return
    left = max(0, cache.quota_bytes - bytes_in(folder))
    if needed > left:
        raise Unusable(
            f"{size_text(needed)} are to come, but models_mib leaves {size_text(left)} of "
            f"{size_text(cache.quota_bytes)} in {folder}; remove models by `paddock models rm`, or raise models_mib"
        )


def download(
    api: HfApi, file: RemoteFile, cache: Cache, report: Callable[[str, int, int], None] | None = None
) -> tuple[Path, str]:
    """Download a file unless the cache has it; return its path there and its SHA-256. `report` is called now and then
    with the file's address, and the bytes that are there and that there will be. Raises Unusable, OSError, and what the
    library raises."""
    told = file.told
    # The hub sends larger files only in chunks of its own format, which only the library can put together.
    whole = (told.size or 0) <= constants.MAX_HTTP_DOWNLOAD_SIZE
    if file.blob and whole and not file.blob.exists():
        file.blob.parent.mkdir(parents=True, exist_ok=True)
        _fetch(api, file, file.blob, report)
    # The library finds the content in the cache if it was fetched above, and does the cache's bookkeeping.
    path = Path(api.hf_hub_download(file.repo, file.name, revision=file.commit, cache_dir=cache.folder))
    digest = sha256_of(path)
    if report is not None:
        report(file.url, told.size or path.stat().st_size, told.size or path.stat().st_size)
    if told.etag and SHA256.fullmatch(told.etag) and digest != told.etag:
        path.resolve().unlink()
        raise Unusable(
            f"{file.name} is not the file that the hub describes (SHA-256 {told.etag}); it is removed: start again"
        )
    return path, digest


def _fetch(api: HfApi, file: RemoteFile, target: Path, report: Callable[[str, int, int], None] | None) -> None:
    told, part = file.told, part_of(target)
    if told.size is None:
        raise Unusable(f"{target.name}: the hub does not tell how long it is; use another hub")
    with io.FileIO(part, "ab") as raw:
        begun = raw.tell()
        lines = None if sys.stderr.isatty() else PlainProgress(file.name, begun, told.size, _say, time.monotonic)
        tell = lines.update if lines else no_progress
        if report is not None:
            tell = partial(_reported, _Reports(report, file.url, told.size), tell)
        opened = _AsLongAsTold(raw, told.size, tell)
        headers = build_hf_headers(token=api.token)
        if urlsplit(told.location)[:2] != urlsplit(file.url)[:2]:  # schemes too: no token is sent unencrypted
            headers.pop("authorization", None)  # a URL on another host carries its own permission
        with opened:
            if begun != told.size:
                http_get(
                    told.location,
                    opened,
                    resume_size=begun,
                    headers=headers,
                    expected_size=told.size,
                    displayed_filename=file.name,
                )
    os.replace(part, target)
    if lines:
        lines.finish()


def _say(line: str) -> None:
    print(f"paddock: {line}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class _Reports:
    """Reports one file's progress, a few times a second."""

    report: Callable[[str, int, int], None]
    url: str
    total: int
    told_at: float = 0.0

    def tell(self, done: int) -> None:
        now = time.monotonic()
        if now - self.told_at >= REPORT_EVERY_S:
            self.told_at = now
            self.report(self.url, done, self.total)


def _reported(reports: _Reports, tell: Callable[[int], None], done: int) -> None:
    tell(done)
    reports.tell(done)


class _AsLongAsTold(io.BufferedWriter):
    """A file that takes no more bytes than the hub has announced, since an endless answer would fill the disk."""

    def __init__(self, raw: io.FileIO, most: int, tell_progress: Callable[[int], None]) -> None:
        super().__init__(raw)
        self._most = most
        self._tell_progress = tell_progress

    def write(self, data: ReadableBuffer, /) -> int:
        """Append `data`. Raises Unusable if the file would get longer than announced."""
        after = self.tell() + len(memoryview(data))
        if after > self._most:
            raise Unusable(f"the hub sends more than the {self._most} bytes that it told; use another hub")
        self._tell_progress(after)
        return super().write(data)
