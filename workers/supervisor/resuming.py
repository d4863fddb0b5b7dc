"""Brings one file of a hub's repository into the library's cache, going on where an earlier attempt ended.

The library itself begins a file anew in each process, which for a model of 40 GB on a line that breaks means never.
What has come lies beside the finished files as `<etag>.part`. Every file is compared with the hub's SHA-256, where it
tells one, before it is used.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.file_download import HfFileMetadata, http_get, repo_folder_name
from huggingface_hub.utils._headers import build_hf_headers

from workers.supervisor.fetched import sha256_of

SHA256 = re.compile(r"[0-9a-f]{64}")


class Unusable(Exception):
    """The file can't be had; the message says why, and what helps."""


def download(api: HfApi, repo: str, name: str, commit: str, cache: str | None) -> tuple[Path, str]:
    """The file's path in the cache, and its SHA-256. Raises Unusable, OSError, and what the library raises."""
    url = hf_hub_url(repo, name, revision=commit, endpoint=api.endpoint)
    told = get_hf_file_metadata(url, token=api.token)
    folder = Path(cache or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model") / "blobs"
    # Larger ones the hub gives in pieces of its own only, which the library knows to put together.
    whole = (told.size or 0) <= constants.MAX_HTTP_DOWNLOAD_SIZE
    if told.etag and whole and not (folder / told.etag).exists():
        folder.mkdir(parents=True, exist_ok=True)
        _fetch(api, url, told, folder / told.etag)
    # Finds the content there, and does the cache's bookkeeping.
    path = Path(api.hf_hub_download(repo, name, revision=commit, cache_dir=cache))
    digest = sha256_of(path)
    if told.etag and SHA256.fullmatch(told.etag) and digest != told.etag:
        path.resolve().unlink()
        raise Unusable(
            f"{name} is not the file that the hub describes (SHA-256 {told.etag}); it is removed: start again"
        )
    return path, digest


def _fetch(api: HfApi, url: str, told: HfFileMetadata, target: Path) -> None:
    part = target.with_name(f"{target.name}.part")
    with part.open("ab") as file:
        begun = file.tell()
        _require_room(target.parent, (told.size or 0) - begun)
        headers = build_hf_headers(token=api.token)
        if urlsplit(told.location).netloc != urlsplit(url).netloc:
            headers.pop("authorization", None)  # an address elsewhere carries its own permission
        if begun != told.size:
            http_get(told.location, file, resume_size=begun, headers=headers, expected_size=told.size)
    os.replace(part, target)


def _require_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise Unusable(f"{needed / 2**30:.1f} GiB are to come, but {folder} has {free / 2**30:.1f} GiB left; make room")
