"""Fetches a model from the Hugging Face hub: `python -m workers.models.hub REFERENCE CACHE_FOLDER [COMMIT]`.

Runs as a process of its own so that the supervisor does not have to load the hub's library. Prints a line of JSON on
stdout (`FetchedModel`), the progress bar and errors on stderr. With COMMIT, files are fetched of that commit, even if
the reference's branch or tag has moved on. All files are of one commit, even if the repository changes meanwhile.
`HF_TOKEN`, `HF_HOME`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` mean what they mean to the library; with neither `HF_HOME` nor
`HF_HUB_CACHE`, files go to CACHE_FOLDER.

A download resumes where an earlier attempt ended. The library itself begins a file from the start in each process, so
40 GB would never arrive over a connection that breaks now and then. An unfinished file is `<etag>.part` beside the
finished ones. Each file is compared with the hub's SHA-256, if the hub gives one, before it is used.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import HfFileMetadata, http_get, repo_folder_name
from huggingface_hub.utils._headers import build_hf_headers

from workers.models.files import COMMIT, SPLIT, FetchedModel, HubReference, parse_reference, sha256_of
from workers.process import parent_death
from workers.protocol.exits import Exit

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PREFERRED = ("Q4_K_M", "Q8_0")
LIST_TIMEOUT_S = 20.0
PROJECTOR = "mmproj"
"""Word in the names of .gguf files that make a model see or hear."""
PRECISIONS = ("f16", "bf16", "q8_0")
"""Precisions of projectors, the preferred first: smaller ones cost quality, larger ones memory."""
COMPANIONS = (PROJECTOR, "imatrix")
"""Words in the names of .gguf files that can't be served as a model by themselves."""


SHA256 = re.compile(r"[0-9a-f]{64}")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Pattern of etags that can be file names in the cache, never paths. The hub's are hashes; mirrors' are similar."""


class HubError(Exception):
    """The model can't be fetched from the hub; the message says why, and the remedy."""


def choose(repo: str, names: Iterable[str], quant: str = "") -> tuple[str, ...]:
    """Return the files of one of a repository's models, all parts in order. Raises HubError. Without `quant`:
    the model of the first quantisation in `PREFERRED` that the repository has, or else the first model by name."""
    models = _models(names)
    if not models:
        raise HubError(f"{repo} holds no GGUF file; name a repository with GGUF files (often called ...-GGUF)")
    offer = ", ".join(sorted(models))
    if quant:
        found = [model for model in models if quant.lower() == model.lower() or _has_quant(model, quant)]
        if not found:
            raise HubError(f"{repo} has no file for {quant!r}; it has: {offer}")
        if len(found) > 1:
            raise HubError(f"{repo}: {quant!r} fits several files: {', '.join(sorted(found))}; give one file's name")
        return _whole(repo, models[found[0]])
    for preferred in PREFERRED:
        found = [model for model in models if _has_quant(model, preferred)]
        if found:
            return _whole(repo, models[min(found)])
    return _whole(repo, models[min(models)])


def choose_projector(names: Iterable[str], model: str) -> tuple[str, ...]:
    """Return a repository's projector for a model, if it has one: in the model's folder, else at the top."""
    found = sorted(name for name in names if PROJECTOR in name.lower() and name.lower().endswith(".gguf"))
    folder = model.rpartition("/")[0]
    for place in (folder, ""):
        here = [name for name in found if name.rpartition("/")[0] == place]
        fitting = [name for precision in PRECISIONS for name in here if _has_quant(name, precision)]
        if here:
            return ((fitting or here)[0],)
    return ()


def fetch(asked: HubReference, cache: str, api: HfApi) -> FetchedModel:
    """Return the model, after downloading the files that are not in the cache yet. Raises HubError."""
    repo = asked.repo
    folder = None if os.environ.get("HF_HOME") or os.environ.get("HF_HUB_CACHE") else cache
    try:
        # Unlike the listing of a repository's tree, this fails at once when the hub is out of reach.
        told = api.model_info(repo, revision=asked.revision or None, timeout=LIST_TIMEOUT_S)
        commit = _commit(asked, told.sha)
        names = [sibling.rfilename for sibling in told.siblings or []]
        files = choose(repo, names, asked.quant)
        projector = choose_projector(names, files[0])
        found = [download(api, repo, name, commit, folder) for name in (*files, *projector)]
    except Unusable as error:
        raise HubError(f"{repo}: {error}") from None
    except GatedRepoError:
        raise HubError(
            f"{repo} is gated: accept its terms on the hub's page, then set HF_TOKEN to a token that may read it"
        ) from None
    except RevisionNotFoundError:
        raise HubError(
            f"{repo} has no revision {asked.revision!r} (any more); name a commit, a tag or a branch that it has"
        ) from None
    except RepositoryNotFoundError:
        raise HubError(f"{repo}: no such model on the hub, or it is private; check the name, or set HF_TOKEN") from None
    except HFValidationError:
        raise HubError(f"{repo}: not a repository name; give OWNER/NAME, such as ggml-org/gemma-3-1b-it-GGUF") from None
    except HfHubHTTPError as error:
        raise HubError(f"{repo}: the hub answered: {_one_line(error)}; try again later") from None
    except (OfflineModeIsEnabled, LocalEntryNotFoundError):
        raise HubError(
            f"{repo}: HF_HUB_OFFLINE is set or the hub is out of reach, and there is no local copy"
        ) from None
    except OSError as error:
        raise HubError(f"{repo}: download failed: {_one_line(error)}; check the network and the disk") from None
    beside = str(found[-1][0]) if projector else ""
    return FetchedModel(str(found[0][0]), commit, {path.name: digest for path, digest in found}, beside)


def _commit(asked: HubReference, told: str | None) -> str:
    """Return the commit that the hub answered with. Raises HubError if another one was asked for."""
    if told is None or not COMMIT.fullmatch(told):
        raise HubError(f"{asked.repo}: the hub does not say which commit it has; name another hub with HF_ENDPOINT")
    if asked.is_pinned and told != asked.revision:
        raise HubError(f"{asked.repo}: the hub answered with commit {told}, and {asked.revision} was asked for")
    return told


class Unusable(Exception):
    """The file can't be fetched; the message says why, and the remedy."""


def download(api: HfApi, repo: str, name: str, commit: str, cache: str | None) -> tuple[Path, str]:
    """Download a file unless the cache has it; return its path there and its SHA-256. Raises Unusable, OSError, and
    what the library raises."""
    url = hf_hub_url(repo, name, revision=commit, endpoint=api.endpoint)
    told = get_hf_file_metadata(url, token=api.token)
    if told.etag and not FILE_NAME.fullmatch(told.etag):
        raise Unusable(f"{name}: the hub names its contents {told.etag[:200]!r}, which is no hash; use another hub")
    folder = Path(cache or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model") / "blobs"
    # The hub sends larger files only in chunks of its own format, which only the library can put together.
    whole = (told.size or 0) <= constants.MAX_HTTP_DOWNLOAD_SIZE
    if told.etag and whole and not (folder / told.etag).exists():
        folder.mkdir(parents=True, exist_ok=True)
        _fetch(api, url, told, folder / told.etag)
    # The library finds the content in the cache if it was fetched above, and does the cache's bookkeeping.
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
        if urlsplit(told.location)[:2] != urlsplit(url)[:2]:  # schemes are compared too: no token is sent unencrypted
            headers.pop("authorization", None)  # a URL on another host carries its own permission
        if begun != told.size:
            http_get(told.location, file, resume_size=begun, headers=headers, expected_size=told.size)
    os.replace(part, target)


class _AsLongAsTold(io.BufferedWriter):
    """A file that takes no more bytes than the hub has announced, since an endless answer would fill the disk."""

    def __init__(self, raw: io.FileIO, most: int) -> None:
        super().__init__(raw)
        self._most = most

    def write(self, data: ReadableBuffer, /) -> int:
        """Append `data`. Raises Unusable if the file would get longer than announced."""
        if self.tell() + len(memoryview(data)) > self._most:
            raise Unusable(f"the hub sends more than the {self._most} bytes that it told; use another hub")
        return super().write(data)


def _require_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise Unusable(f"{needed / 2**30:.1f} GiB are to come, but {folder} has {free / 2**30:.1f} GiB left; make room")


def main(args: Sequence[str]) -> int:
    parent_death.hold()
    if len(args) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return int(Exit.USAGE)
    asked = parse_reference(args[0])
    repo = asked.repo
    if not asked.is_pinned and args[2:]:
        asked = asked._replace(revision=args[2])
    try:
        found = fetch(asked, args[1], HfApi())
        print(msgspec.json.encode(found).decode())
        if not parse_reference(args[0]).is_pinned:
            print(
                f"paddock: {args[0]} is of commit {found.commit}; pin it as {asked._replace(revision=found.commit)}",
                file=sys.stderr,
            )
    except HubError as error:
        print(f"paddock: {error}", file=sys.stderr)
        return int(Exit.BAD_MODEL)
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - the process's edge: which HTTP library the hub's uses changes with it
        reason = f"{type(error).__name__}: {_one_line(error)}"
        print(f"paddock: {repo}: can't reach the hub ({reason}); check the network or HF_ENDPOINT", file=sys.stderr)
        return int(Exit.BAD_MODEL)
    return 0


def _models(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the models among a repository's files: file name without part number -> names of its parts in order."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        stem = name.rpartition("/")[2].lower()
        if stem.endswith(".gguf") and not any(word in stem for word in COMPANIONS):
            models.setdefault(SPLIT.sub("", name), []).append(name)
    return models


def _has_quant(name: str, quant: str) -> bool:
    """Return whether the quantisation is in the name as a whole word (`Q4_K` is not in `Q4_K_M`)."""
    pattern = rf"(?<![A-Za-z0-9_]){re.escape(quant)}(?![A-Za-z0-9_])"
    return re.search(pattern, name.removesuffix(".gguf"), re.IGNORECASE) is not None


def _whole(repo: str, parts: list[str]) -> tuple[str, ...]:
    split = SPLIT.search(parts[0])
    if split and len(parts) != int(split[2]):
        raise HubError(f"{repo}: {parts[0]} is one of {int(split[2])} parts, but only {len(parts)} are there")
    return tuple(parts)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
