"""`paddock fetch`: brings the models that a catalog or `--hf` names into the models folder, and tells where they lie.

For whoever starts workers by themselves: an init container, a compose file, a machine's setup. One line per model,
its name and its file, separated by a tab. The file's name is the model's, whatever the hub calls it (`NAME.gguf`, or
`NAME-00001-of-0000N.gguf` for a split model), so that a worker can be told where to look before anything is fetched.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from workers.model_file import SPLIT, parts, plain_name
from workers.protocol.catalog import CatalogError
from workers.protocol.exits import Exit
from workers.settings import SupervisorSettings
from workers.supervisor.library import Library, ModelUnusable, wanted


def run(settings: SupervisorSettings) -> int:
    """Blocks until all is there; returns the exit code. What was fetched before is not asked for again."""
    try:
        wish = wanted(settings)
        library = Library.of(settings)
        for name, path in library.locate_all(wish).items():
            print(f"{name}\t{named(library.folder, name, path)}", flush=True)
    except CatalogError as error:
        return _complain(str(error), Exit.USAGE)
    except ModelUnusable as error:
        return _complain(str(error), error.exit)
    except OSError as error:
        return _complain(f"models_dir: {error.filename}: {error.strerror}; name a folder with --models-dir", Exit.USAGE)
    return Exit.OK


def named(folder: Path, model: str, first: Path) -> Path:
    """Links `folder/NAME.gguf`, or a link for each part, to the model's files; the first. Raises OSError."""
    links = []
    for part in parts(first.absolute()):
        split = SPLIT.search(part.name)
        links.append((folder / f"{plain_name(model)}{split[0] if split else ''}.gguf", part))
    for link, part in links:
        if part != link and not (link.is_symlink() and link.readlink() == part):
            _link(link, part)
    return links[0][0]


def _link(link: Path, target: Path) -> None:
    """In one step: a worker that starts meanwhile finds the old file or the new one."""
    link.parent.mkdir(parents=True, exist_ok=True)
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    os.replace(fresh, link)


def _complain(line: str, code: Exit) -> int:
    print(f"paddock: {line}", file=sys.stderr)
    return code
