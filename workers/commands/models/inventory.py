"""Finds what lies in the models folder, what the catalog names, and which of it a running fleet uses.

"In use" is what a supervisor with this state folder has handed to its workers. Fleets of other machines that share the
folder, and workers that somebody starts by themselves, are not known here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from workers.commands.models.parser import Unusable
from workers.models.catalog import Catalog
from workers.models.files import PART, SPLIT, SUFFIX, first_part, parts
from workers.models.library import Library
from workers.models.spec import NO_PROJECTOR, ModelSpec
from workers.sources import nearest
from workers.supervisor import state_folder

QUANT = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4|NVFP4|BF16|F16|F32)(?![A-Za-z0-9])", re.IGNORECASE
)
"""Names of quantisations, as they stand in the names of files."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file or a model of the hub that a catalog's model needs, and what for."""

    use: str
    """The model's name, and what the file is to it unless it is the model itself."""
    path: Path | None
    hf: str | None


@dataclass(frozen=True, slots=True)
class Item:
    """Something that can be listed, verified or removed: a model of the hub, a file, or the rest of a download."""

    name: str
    """The reference, or the file's path: relative in the models folder, else absolute."""
    is_of_hub: bool
    files: tuple[Path, ...]
    """All its files, whether they are there or not; the model's own come first."""
    used_by: tuple[str, ...] = ()
    """The uses that the catalog has for it."""
    running: tuple[str, ...] = ()
    """The same of the fleet that runs with this state folder."""
    is_unfinished: bool = False
    """Whether this is what has come so far of a file of the hub."""

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files if file.is_file())

    @property
    def missing(self) -> tuple[Path, ...]:
        return tuple(file for file in self.files if not file.is_file())

    @property
    def state(self) -> str:
        """Whether it can be served: `here`, `missing`, `incomplete` or `unfinished`."""
        if self.is_unfinished:
            return "unfinished"
        if not self.missing and self.files:
            return "here"
        return "incomplete" if len(self.missing) < len(self.files) else "missing"

    @property
    def quant(self) -> str:
        """The quantisation that the file's name tells; empty: it tells none."""
        found = QUANT.search(SPLIT.sub("", self.files[0].name) if self.files else self.name)
        return found[1].upper() if found else ""


def sources_of(models: Iterable[ModelSpec]) -> Iterator[Source]:
    """Yield each file and each model of the hub that the models name."""
    for model in models:
        yield Source(model.name, _path(model.path), model.hf)
        if model.projector not in ("", NO_PROJECTOR):
            yield Source(f"{model.name} (projector)", Path(model.projector), None)
        if (draft := model.speculation.draft) is not None:
            yield Source(f"{model.name} (draft)", _path(draft.path), draft.hf)
        for adapter in model.adapters:
            yield Source(f"{model.name} (adapter {adapter.name})", _path(adapter.path), adapter.hf)
        for vector in model.llama.control_vectors:
            yield Source(f"{model.name} (control vector)", Path(vector.path), None)


def take_inventory(library: Library, catalog: Catalog, state_dir: Path) -> tuple[Item, ...]:
    """Return what the catalog names and what else lies in the models folder. Raises OSError."""
    by_reference, by_path = defaultdict[str, list[str]](list), defaultdict[Path, list[str]](list)
    for source in sources_of(catalog.models):
        if source.hf:
            by_reference[source.hf].append(source.use)
        elif source.path:
            by_path[source.path].append(source.use)
    running = running_files(state_dir)
    items = [
        _item(reference, library.fetched.files_of(reference), by_reference[reference], running, is_of_hub=True)
        for reference in sorted({*library.fetched.references(), *by_reference})
    ]
    items += [_item(_name(path, library.folder), parts(path), uses, running) for path, uses in by_path.items()]
    listed = {file.absolute() for item in items for file in item.files}
    for path in sorted(_loose_files(library.folder)):
        if path.name.endswith(PART):
            items.append(Item(_name(path, library.folder), False, (path,), is_unfinished=True))
        elif path not in listed:
            items.append(_item(_name(path, library.folder), (path,), (), running))
    return tuple(items)


def running_files(state_dir: Path) -> Mapping[Path, tuple[str, ...]]:
    """Return the files that the workers of a running supervisor read, by their real paths, each with its uses."""
    if not state_folder.is_held(state_dir):
        return {}
    found = defaultdict[Path, dict[str, None]](dict)
    for file in (state_dir / "run").glob("*.json"):
        try:
            spec = msgspec.json.decode(file.read_bytes(), type=ModelSpec)
        except (OSError, msgspec.DecodeError):
            continue  # it went away meanwhile, or is no worker's
        for source in sources_of((spec,)):
            for part in parts(source.path) if source.path else ():
                found[part.resolve()][source.use] = None
    return {path: tuple(uses) for path, uses in found.items()}


def chosen(items: Sequence[Item], names: Iterable[str], command: str) -> tuple[Item, ...]:
    """Return the items of these names, each once: references, names of the catalog's models, or files, as `models
    list` names them. Raises Unusable."""
    return tuple({item.name: item for name in names for item in _of(items, name, command)}.values())


def _of(items: Sequence[Item], name: str, command: str) -> list[Item]:
    found = [item for item in items if item.name == name]
    found = found or [item for item in items if name in item.used_by]
    path = Path(name).absolute()
    found = found or [item for item in items if path in {file.absolute() for file in item.files}]
    if not found:
        known = [*(item.name for item in items), *(use for item in items for use in item.used_by)]
        raise Unusable(
            f"models {command}: {name}: not found{nearest(name, known)}; `paddock models list` lists what is"
        )
    return found


def real_paths(files: Iterable[Path]) -> frozenset[Path]:
    """Return the paths that files have without links."""
    return frozenset(file.resolve() for file in files)


def _item(
    name: str,
    files: tuple[Path, ...],
    uses: Iterable[str],
    running: Mapping[Path, tuple[str, ...]],
    *,
    is_of_hub: bool = False,
) -> Item:
    now = {use: None for file in files for use in running.get(file.resolve(), ())}
    return Item(name, is_of_hub, files, tuple(uses), tuple(now))


def _loose_files(folder: Path) -> Iterator[Path]:
    """Yield files that lie in the folder and are no links: GGUF files, and what has come so far of some of the hub."""
    if folder.is_dir():
        for path in folder.rglob("*"):
            if path.name.endswith((SUFFIX, PART)) and path.is_file() and not path.is_symlink():
                yield path


def _name(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def _path(path: str | None) -> Path | None:
    return first_part(Path(path)) if path else None
