"""Downloads one file of a hub's repository into the library's cache, going on where an earlier attempt ended.

The library itself begins a file anew in each process, so a model of 40 GB would never come over a line that breaks.
An unfinished download lies beside the finished files as `<etag>.part`. Every file is compared with the hub's SHA-256,
where the hub tells one, before it is used.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.file_download import HfFileMetadata, http_get, repo_folder_name
from huggingface_hub.utils._headers import build_hf_headers

from workers.supervisor.fetched import sha256_of

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

SHA256 = re.compile(r"[0-9a-f]{64}")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""A file's name in the cache: a hash with the hub, something like it with mirrors, and never a path."""


class Unusable(Exception):
    """The file can't be had; the message says why, and the remedy."""


def download(api: HfApi, repo: str, name: str, commit: str, cache: str | None) -> tuple[Path, str]:
    """Return the file's path in the cache, and its SHA-256. Raises Unusable, OSError, and what the library raises."""
    url = hf_hub_url(repo, name, revision=commit, endpoint=api.endpoint)
    told = get_hf_file_metadata(url, token=api.token)
    if told.etag and not FILE_NAME.fullmatch(told.etag):
        raise Unusable(f"{name}: the hub names its contents {told.etag[:200]!r}, which is no hash; use another hub")
    folder = Path(cache or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model") / "blobs"
    # Larger files the hub gives only in pieces of its own, which the library can put together.
    whole = (told.size or 0) <= constants.MAX_HTTP_DOWNLOAD_SIZE
    if told.etag and whole and not (folder / told.etag).exists():
        folder.mkdir(parents=True, exist_ok=True)
        _fetch(api, url, told, folder / told.etag)
    # The library finds the content there, and does the cache's bookkeeping.
    path = Path(api.hf_hub_download(repo, name, revision=commit, cache_dir=cache))
    digest = sha256_of(path)
    if told.etag and SHA256.fullmatch(told.etag) and digest != told.etag:
        path.resolve().unlink()
        raise Unusable(
            f"{name} is not the file that the hub describes (SHA-256 {told.etag}); it is removed: start again"
        )
    return path, digest


def _fetch(api: HfApi, url: str, told: HfFileMetadata, target: Path) -> None:
    if told.size is None:
        raise Unusable(f"{target.name}: the hub does not tell how long it is; use another hub")
    part = target.with_name(f"{target.name}.part")
    with _AsLongAsTold(io.FileIO(part, "ab"), told.size) as file:
        begun = file.tell()
        _require_room(target.parent, told.size - begun)
        headers = build_hf_headers(token=api.token)
        if urlsplit(told.location)[:2] != urlsplit(url)[:2]:  # by scheme as well: no token goes unencrypted
            headers.pop("authorization", None)  # an address elsewhere carries its own permission
        if begun != told.size:
            http_get(told.location, file, resume_size=begun, headers=headers, expected_size=told.size)
    os.replace(part, target)


class _AsLongAsTold(io.BufferedWriter):
    """A file that takes no more bytes than the hub has announced: an endless answer would fill the disk."""

    def __init__(self, raw: io.FileIO, most: int) -> None:
        super().__init__(raw)
        self._most = most

    def write(self, data: ReadableBuffer, /) -> int:
        """Write more. Raises Unusable where it would pass the bound."""
        if self.tell() + len(memoryview(data)) > self._most:
            raise Unusable(f"the hub sends more than the {self._most} bytes that it told; use another hub")
        return super().write(data)


def _require_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise Unusable(f"{needed / 2**30:.1f} GiB are to come, but {folder} has {free / 2**30:.1f} GiB left; make room")
