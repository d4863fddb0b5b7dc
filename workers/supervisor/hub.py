"""Fetches a model from the Hugging Face hub: `python -m workers.supervisor.hub REFERENCE CACHE_FOLDER [COMMIT]`.

Runs as a process of its own so that the supervisor needs not carry the hub's library. Prints a line of JSON on stdout
(`FetchedModel`), the progress bar and errors on stderr. With COMMIT it is that one, whatever the reference leads to
now. All files are of one commit, also where the repository changes meanwhile. `HF_TOKEN`, `HF_HOME`, `HF_ENDPOINT`
and `HF_HUB_OFFLINE` mean what they mean to the library; without `HF_HOME` files go to CACHE_FOLDER.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence

import msgspec
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from workers import lifeline
from workers.model_file import SPLIT
from workers.protocol.exits import Exit
from workers.supervisor.fetched import FetchedModel
from workers.supervisor.hub_reference import COMMIT, HubReference, parsed
from workers.supervisor.resuming import Unusable, download

PREFERRED = ("Q4_K_M", "Q8_0")
LIST_TIMEOUT_S = 20.0
COMPANIONS = ("mmproj", "imatrix")
"""Words in names of .gguf files that are no model that can be served by itself."""


class HubError(Exception):
    """The model can't be had from the hub; the message names the thing and the remedy."""


def choose(repo: str, names: Iterable[str], quant: str = "") -> tuple[str, ...]:
    """Return the files of one model of a repository: all its parts, in order. Raises HubError."""
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


def fetch(asked: HubReference, cache: str, api: HfApi) -> FetchedModel:
    """Download what is not in the cache yet. Raises HubError."""
    repo = asked.repo
    folder = None if os.environ.get("HF_HOME") or os.environ.get("HF_HUB_CACHE") else cache
    try:
        # Unlike the listing of a repository's tree, this fails at once when the hub is out of reach.
        told = api.model_info(repo, revision=asked.revision or None, timeout=LIST_TIMEOUT_S)
        commit = _commit(asked, told.sha)
        files = choose(repo, [sibling.rfilename for sibling in told.siblings or []], asked.quant)
        found = [download(api, repo, name, commit, folder) for name in files]
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
    return FetchedModel(str(found[0][0]), commit, {path.name: digest for path, digest in found})


def _commit(asked: HubReference, told: str | None) -> str:
    """Return the commit that all files are taken of. Raises HubError where it is not the one that was asked for."""
    if told is None or not COMMIT.fullmatch(told):
        raise HubError(f"{asked.repo}: the hub does not say which commit it has; name another hub with HF_ENDPOINT")
    if asked.is_pinned and told != asked.revision:
        raise HubError(f"{asked.repo}: the hub answered with commit {told}, and {asked.revision} was asked for")
    return told


def main(args: Sequence[str]) -> int:
    lifeline.hold()
    if len(args) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return int(Exit.USAGE)
    asked = parsed(args[0])
    repo = asked.repo
    if not asked.is_pinned and args[2:]:
        asked = asked._replace(revision=args[2])
    try:
        found = fetch(asked, args[1], HfApi())
        print(msgspec.json.encode(found).decode())
        if not parsed(args[0]).is_pinned:
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
    """Return the model file's name, without a part number -> its parts in order."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        stem = name.rpartition("/")[2].lower()
        if stem.endswith(".gguf") and not any(word in stem for word in COMPANIONS):
            models.setdefault(SPLIT.sub("", name), []).append(name)
    return models


def _has_quant(name: str, quant: str) -> bool:
    """Return whether the quantisation stands in the name as a whole word (`Q4_K` is not in `Q4_K_M`)."""
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
