"""Follows a folder of GGUF files: which models lie in it now. Each file's header is read once, unless it changes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from workers.models import catalog
from workers.models.catalog import Catalog, CatalogError
from workers.models.files import SUFFIX, parts
from workers.models.folder.contents import Contents, HeaderFacts, contents_of, decode_facts, is_first
from workers.models.library import wanted, with_absolute_paths
from workers.process import parent_death
from workers.settings import SupervisorSettings

READER = "workers.models.folder.header_reader"
MAX_DEPTH = 5
"""Folders below the one that is served; in a cache of the Hugging Face hub models lie three below it."""
MAX_FILES = 10_000
READ_TIMEOUT_S = 120.0
"""Seconds that the headers of a folder's new files may take."""

NOTHING_NAMED = Catalog(models=())
"""The catalog for those who ask which files it names, where a folder is served: a model is there because its file is,
and nothing names it."""

Stamp = tuple[int, int]
"""Size, and time of the last change in nanoseconds, of a file."""
Stamps = tuple[Stamp | None, ...]
"""Those of all parts of a model; None: a part is not there."""
ReadFacts = Callable[[Sequence[Path]], Mapping[Path, HeaderFacts]]


class ModelsFolder:
    """A folder whose models are served."""

    def __init__(self, path: Path, read: ReadFacts | None = None) -> None:
        """`read` returns what files are; None: a process is asked for it."""
        self.path = path
        self._read = read or read_facts
        self._known: dict[Path, tuple[Stamps, HeaderFacts]] = {}
        self._judged: Mapping[Path, Stamp] = {}
        """The files whose contents were returned last."""
        self._seen: Mapping[Path, Stamp] = {}
        """The files at the last look."""

    def load(self) -> Contents:
        """Return what the folder has now. Raises CatalogError if it can't be read."""
        self._judged = self._seen = files = self._look()
        return self._contents(files)

    def has_changed(self) -> bool:
        """Return whether the folder has other files than at the last `load`, and has stayed so since the last call: a
        file that is being copied grows from look to look. Raises CatalogError."""
        seen, self._seen = self._seen, self._look()
        return self._seen != self._judged and self._seen == seen

    def _contents(self, files: Mapping[Path, Stamp]) -> Contents:
        stamps = {path: tuple(map(files.get, parts(path))) for path in files if is_first(path)}
        known = {path: one for path, one in self._known.items() if one[0] == stamps.get(path)}
        new = [path for path in stamps if path not in known]
        read = self._read(new) if new else {}
        self._known = {**known, **{path: (stamps[path], facts) for path, facts in read.items()}}
        return contents_of(self.path, {path: facts for path, (_, facts) in self._known.items()})

    def _look(self) -> Mapping[Path, Stamp]:
        """Return the GGUF files in the folder, each once, however many links lead to it. Raises CatalogError."""
        found: dict[Path, Stamp] = {}
        real: set[Path] = set()
        for folder, folders, names in os.walk(self.path, onerror=self._refuse):
            here = Path(folder)
            is_deep = len(here.relative_to(self.path).parts) >= MAX_DEPTH
            folders[:] = [] if is_deep else sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                path = here / name
                if not name.lower().endswith(SUFFIX) or name.startswith(".") or len(found) >= MAX_FILES:
                    continue
                try:
                    state, target = path.stat(), path.resolve()
                except OSError:
                    continue  # it is gone, or a link that leads nowhere
                if stat.S_ISREG(state.st_mode) and target not in real:
                    real.add(target)
                    found[path] = (state.st_size, state.st_mtime_ns)
        return found

    def _refuse(self, error: OSError) -> None:
        if error.filename == str(self.path):
            raise CatalogError(f"models_dir: {self.path}: {error.strerror}; name a folder of GGUF files")


def read_facts(paths: Sequence[Path]) -> dict[Path, HeaderFacts]:
    """Return what files are. A process reads them, and another one goes on where it ended."""
    found: dict[Path, HeaderFacts] = {}
    left = [path for path in paths if _is_plain(path)]
    found |= dict.fromkeys(set(paths).difference(left), HeaderFacts(fault="its name is odd; rename it"))
    environment = {**os.environ, parent_death.VARIABLE: str(os.getpid())}
    while left:
        asked = "".join(f"{path}\n" for path in left)
        try:
            answer = subprocess.run(
                (sys.executable, "-m", READER),
                input=asked.encode(),
                stdout=subprocess.PIPE,
                check=False,
                env=environment,
                timeout=READ_TIMEOUT_S,
            ).stdout
        except subprocess.TimeoutExpired as error:
            answer = error.stdout or b""
        lines = answer.splitlines()
        found |= zip(left, map(decode_facts, lines), strict=False)
        left = left[len(lines) :]
        if left:
            found[left.pop(0)] = HeaderFacts(fault="reading its header failed; it may be written just now")
    return found


def _is_plain(path: Path) -> bool:
    """Return whether a file's path is text of one line."""
    return str(path).isprintable() and not any("\ud800" <= char <= "\udfff" for char in str(path))


def folder_of(settings: SupervisorSettings) -> Path | None:
    """Return the folder whose models the settings ask to serve; None: they name a model, or a catalog. Raises
    CatalogError."""
    if settings.models_dir is None or settings.model or settings.hf or settings.catalog:
        return None
    if settings.alias:
        raise CatalogError("alias: models_dir serves many models, each by its file's name; leave --alias out")
    return settings.models_dir.absolute()


def named_by(settings: SupervisorSettings, *, may_be_empty: bool = False) -> Catalog:
    """Return the catalog that the settings ask for, or that of a folder as it is now. Raises CatalogError; also if no
    model lies in the folder, unless that `may_be_empty`, or not be there yet: then the catalog is empty, too."""
    folder = folder_of(settings)
    if folder is None:
        return wanted(settings)
    if may_be_empty and not folder.exists():
        return NOTHING_NAMED
    contents = ModelsFolder(folder).load()
    if may_be_empty and not contents.models:
        return NOTHING_NAMED
    return catalog_of(contents, folder, settings)


def catalog_of(contents: Contents, folder: Path, settings: SupervisorSettings) -> Catalog:
    """Return a catalog of the folder's models, each loaded when it is called, with the settings of models. Raises
    CatalogError; also if there is no model."""
    if not contents.models:
        raise CatalogError(
            f"models_dir: {folder} has no model ({len(contents.left_out)} other GGUF files); put GGUF files there, or "
            "say with --model, --hf or --catalog what to serve"
        )
    workers = settings.workers if "workers" in settings.model_fields_set else 1
    first, *_ = contents.models
    entry = settings.entry(name=first.name, path=str(first.path), hf=None, workers=workers, residency={})
    (pattern,) = with_absolute_paths(catalog.convert({"models": [entry]}, catalog.SETTINGS), Path.cwd()).models
    models = (
        replace(pattern, name=model.name, path=str(model.path), projector=str(model.projector or ""))
        for model in contents.models
    )
    return catalog.check(Catalog(models=tuple(models)), catalog.SETTINGS)
