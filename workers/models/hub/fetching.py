"""Fetches one model of the Hugging Face hub with all its parts, of one commit, and translates the library's errors."""

from __future__ import annotations

from collections.abc import Callable

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

from workers.models.files import COMMIT, FetchedModel, HubReference
from workers.models.hub.choice import HubError, choose, choose_projector
from workers.models.hub.download import Cache, Unusable, check_room, describe, download

LIST_TIMEOUT_S = 20.0


def fetch(
    asked: HubReference,
    cache: Cache,
    api: HfApi,
    *,
    with_projector: bool = False,
    report: Callable[[str, int, int], None] | None = None,
) -> FetchedModel:
    """Return the model, after downloading the files that are not in the cache yet, with the projector beside it if
    that is wanted and there is one. `report`: as in `download`. Raises HubError."""
    repo = asked.repo
    try:
        # Unlike the listing of a repository's tree, this fails at once when the hub is out of reach.
        told = api.model_info(repo, revision=asked.revision or None, timeout=LIST_TIMEOUT_S)
        commit = _commit(asked, told.sha)
        names = [sibling.rfilename for sibling in told.siblings or []]
        files = choose(repo, names, asked.quant)
        projector = choose_projector(names, files[0]) if with_projector else ()
        described = [describe(api, repo, name, commit, cache) for name in (*files, *projector)]
        check_room(described, cache)
        found = [download(api, file, cache, report) for file in described]
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
        raise HubError(f"{repo}: the hub answered: {one_line(error)}; try again later") from None
    except (OfflineModeIsEnabled, LocalEntryNotFoundError):
        raise HubError(
            f"{repo}: HF_HUB_OFFLINE is set or the hub is out of reach, and there is no local copy"
        ) from None
    except OSError as error:
        raise HubError(f"{repo}: download failed: {one_line(error)}; check the network and the disk") from None
    beside = str(found[-1][0]) if projector else ""
    digests = {path.name: digest for path, digest in found}
    return FetchedModel(str(found[0][0]), commit, digests, beside if with_projector else None)


def _commit(asked: HubReference, told: str | None) -> str:
    """Return the commit that the hub answered with. Raises HubError if another one was asked for."""
    if told is None or not COMMIT.fullmatch(told):
        raise HubError(f"{asked.repo}: the hub does not say which commit it has; name another hub with HF_ENDPOINT")
    if asked.is_pinned and told != asked.revision:
        raise HubError(f"{asked.repo}: the hub answered with commit {told}, and {asked.revision} was asked for")
    return told


def one_line(error: Exception) -> str:
    """Return an error's text without line breaks."""
    return " ".join(str(error).split())
