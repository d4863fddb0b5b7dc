"""Decides from the files of a folder which models it has, under which names, and which projector each takes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from workers.models.files import SPLIT, clean_name
from workers.models.hub.choice import choose_projector

Kind = Literal["model", "projector", "adapter", "control vector", "importance matrix", "vocabulary"]

MAX_NAME_CHARS = 128
SUFFIX_LENGTH = len(".gguf")
FIRST_PART = 1
NOT_SERVED: Mapping[Kind, str] = {
    "adapter": "a LoRA adapter and no model; a catalog names it among the `adapters` of its model (docs/catalog.md)",
    "control vector": "a control vector and no model; a catalog names it in `llama.control_vectors` (docs/catalog.md)",
    "importance matrix": "an importance matrix, with which models are quantised, and no model",
    "vocabulary": "it has a vocabulary and no weights",
}
QUANT = r"(?:UD-)?I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|BF16|F16|F32|FP16"
OF_NAMES = re.compile(rf"(?:^|[-_.])(?:mmproj|{QUANT})(?=[-_.]|$)", re.IGNORECASE)
"""What names of files have beside the name of the model."""
NAMELESS = frozenset({"", "model"})
"""Names of projectors that say nothing of their model."""


class HeaderFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The kind of one GGUF file, or why it can't be told."""

    kind: Kind = "model"
    fault: str = ""
    """What is wrong with the file; empty: nothing, as far as its header and its length tell."""


encode_facts = msgspec.json.Encoder().encode
decode_facts = msgspec.json.Decoder(HeaderFacts).decode


@dataclass(frozen=True, slots=True)
class FolderModel:
    """A model of the folder."""

    name: str
    path: Path
    """Its file, or its first part."""
    projector: Path | None = None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file that is not served as a model."""

    path: Path
    why: str


@dataclass(frozen=True, slots=True)
class Contents:
    """The models of a folder, and the files that are none."""

    models: tuple[FolderModel, ...]
    left_out: tuple[LeftOut, ...]


def is_first(path: Path) -> bool:
    """Return whether a file is a model's only one, or its first part."""
    split = SPLIT.search(path.name)
    return split is None or int(split[1]) == FIRST_PART


def contents_of(folder: Path, files: Mapping[Path, HeaderFacts]) -> Contents:
    """Return what a folder has. `files`: its GGUF files, of split ones the first parts."""
    ordered = sorted(files, key=lambda path: (len(path.parts), path))
    left_out = [LeftOut(path, files[path].fault) for path in ordered if files[path].fault]
    sound = {path: files[path].kind for path in ordered if not files[path].fault}
    left_out += [LeftOut(path, NOT_SERVED[kind]) for path, kind in sound.items() if kind in NOT_SERVED]
    models = [path for path, kind in sound.items() if kind == "model"]
    projectors = [path for path, kind in sound.items() if kind == "projector"]
    found = list(_named(folder, models, projectors))
    taken = {model.projector for model in found}
    spare = [path for path in projectors if path not in taken]
    left_out += [LeftOut(path, _why_spare(path, found)) for path in spare]
    return Contents(tuple(found), tuple(sorted(left_out, key=lambda one: one.path)))


def _named(folder: Path, models: Sequence[Path], projectors: Sequence[Path]) -> Iterator[FolderModel]:
    names: set[str] = set()
    for path in models:
        name = clean_name(_stem(path))
        if name in names:  # of a file with the same name in another folder
            name = "/".join(map(clean_name, (*path.parent.relative_to(folder).parts, _stem(path))))
        name = name[:MAX_NAME_CHARS]
        if name not in names:
            names.add(name)
            yield FolderModel(name, path, _projector(folder, path, models, projectors))


def _projector(folder: Path, model: Path, models: Sequence[Path], projectors: Sequence[Path]) -> Path | None:
    """Return the projector beside a model: one with the model's name or, if all models there are one and the same in
    several quantisations, one without a name; in a folder below the one that is served, any."""
    beside = [path for path in projectors if path.parent == model.parent]
    bases = {_base(path) for path in models if path.parent == model.parent}
    fitting = [path for path in beside if _base(path) == _base(model)]
    if not fitting and len(bases) == 1:
        fitting = [path for path in beside if model.parent != folder or _base(path) in NAMELESS]
    chosen = choose_projector([path.name for path in fitting], model.name) or [path.name for path in fitting][:1]
    return next((path for path in fitting if path.name == chosen[0]), None) if chosen else None


def _why_spare(projector: Path, models: Sequence[FolderModel]) -> str:
    """Return why no model takes a projector."""
    beside = [model for model in models if model.path.parent == projector.parent]
    other = next((one.projector for one in beside if one.projector and _base(one.projector) == _base(projector)), None)
    if other is not None:
        return f"a projector, and {other.name} is taken in its place"
    example = _stem(beside[0].path) if beside else "MODEL"
    return (
        "a projector, and no model beside it has its name; put the two into a folder of their own, or call it "
        f"mmproj-{example}.gguf"
    )


def _stem(path: Path) -> str:
    return SPLIT.sub("", path.name)[:-SUFFIX_LENGTH]


def _base(path: Path) -> str:
    """Return what a file's name says of its model, without its quantisation."""
    return OF_NAMES.sub("", _stem(path)).strip("-_.").lower()
