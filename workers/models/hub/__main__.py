"""Fetches a model from the Hugging Face hub: `python -m workers.models.hub REFERENCE CACHE_FOLDER [flags]`.

Runs as a process of its own so that the supervisor does not have to load the hub's library. Prints a line of JSON on
stdout (`FetchedModel`), progress and errors on stderr; with `--progress`, before it, lines of JSON on stdout that tell
how far each file is (`workers.models.hub.watch`). With `--commit`, files are fetched of that commit, even if
the reference's branch or tag has moved on. All files are of one commit, even if the repository changes meanwhile.
`HF_TOKEN`, `HF_HOME`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` mean what they mean to the library; with neither `HF_HOME` nor
`HF_HUB_CACHE`, files go to CACHE_FOLDER.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence

import msgspec
from huggingface_hub import HfApi

from workers.models.files import parse_reference
from workers.models.hub.choice import HubError
from workers.models.hub.download import Cache
from workers.models.hub.fetching import fetch, one_line
from workers.models.hub.watch import Progress, encode_line
from workers.process import parent_death
from workers.protocol.exits import Exit


def main(args: Sequence[str]) -> int:
    """Fetch one model and return the exit code."""
    parent_death.hold()
    parser = ArgumentParser(prog="python -m workers.models.hub", allow_abbrev=False)
    parser.add_argument("reference")
    parser.add_argument("folder")
    parser.add_argument("--commit", default="")
    parser.add_argument("--with-projector", action="store_true")
    parser.add_argument("--progress", action="store_true")
    parser.add_argument("--quota-bytes", type=int, default=0)
    options = parser.parse_args(args)
    named = parse_reference(options.reference)
    asked = named._replace(revision=options.commit) if options.commit and not named.is_pinned else named
    has_own = bool(os.environ.get("HF_HOME") or os.environ.get("HF_HUB_CACHE"))
    cache = Cache(None if has_own else options.folder, options.quota_bytes)
    try:
        report = _report if options.progress else None
        found = fetch(asked, cache, HfApi(), with_projector=options.with_projector, report=report)
        print(msgspec.json.encode(found).decode())
        if not named.is_pinned:
            print(
                f"paddock: {named} is of commit {found.commit}; pin it as {named._replace(revision=found.commit)}",
                file=sys.stderr,
            )
    except HubError as error:
        print(f"paddock: {error}", file=sys.stderr)
        return int(Exit.BAD_MODEL)
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - the process's edge: which HTTP library the hub's uses changes with it
        reason = f"{type(error).__name__}: {one_line(error)}"
        print(
            f"paddock: {named.repo}: can't reach the hub ({reason}); check the network or HF_ENDPOINT", file=sys.stderr
        )
        return int(Exit.BAD_MODEL)
    return 0


def _report(url: str, done: int, total: int) -> None:
    print(encode_line(Progress(url, done, total)).decode(), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
