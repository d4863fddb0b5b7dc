"""`paddock models pull`: fetches the models that a catalog, `--hf` or the command line names, and prints their paths.

For setups that start workers themselves: an init container, a compose file, a machine's setup. It prints one line per
model: its name and its file, separated by a tab; and one for its projector, its draft model and each adapter of the
hub, whose names are `NAME.projector`, `NAME.draft` and `NAME.adapter.ADAPTER`. The file is a link that has the model's
name, whatever the hub calls it (`NAME.gguf`, or `NAME-00001-of-0000N.gguf` for a split model), so that a worker's path
can be set before anything is fetched. This command replaces and removes links of these names, but never real files. If
the settings name no model and a real file has the name of the default model, that file is the model. References of the
hub on the command line get no links.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from workers.commands.models.parser import Request, Unusable
from workers.models.catalog import Catalog
from workers.models.files import ADAPTER, DRAFT, PROJECTOR, SPLIT, SUFFIX, first_part, parts, plain_name
from workers.models.generation import HF_PATTERN
from workers.models.library import DEMO_ALIAS, Library, ModelUnusable, wanted
from workers.models.spec import NO_PROJECTOR, ModelSpec
from workers.protocol.exits import Exit
from workers.settings import SupervisorSettings


def run(request: Request) -> Exit:
    """Fetch the models that are not there yet, blocking until all are there. Raises CatalogError, ModelUnusable,
    Unusable, OSError."""
    return pull(request.settings, request.library, request.options.names)


def pull(settings: SupervisorSettings, library: Library, names: Sequence[str] = ()) -> Exit:
    """Fetch the models of the settings, or those of `names` only. Raises CatalogError, ModelUnusable, Unusable,
    OSError."""
    catalog = wanted(_with_own_file(settings, library.folder))
    known = {model.name for model in catalog.models}
    references = [name for name in names if name not in known and re.search(HF_PATTERN, name)]
    if chosen := [name for name in names if name not in references]:
        _bring_all(library, _only(catalog, chosen))
    elif not names:
        _bring_all(library, catalog)
    for reference in references:
        print(f"{reference}\t{library.locate_reference(reference)}", flush=True)
    return Exit.OK


def _only(catalog: Catalog, names: Iterable[str]) -> Catalog:
    """Return the catalog with these models only, as if each had a worker. Raises Unusable."""
    known = {model.name: model for model in catalog.models}
    if unknown := next((name for name in names if name not in known), ""):
        raise Unusable(
            f"models pull: {unknown}: no model of the catalog has this name ({', '.join(known)}), and it is no "
            "reference of the hub, OWNER/NAME[:QUANT][@REVISION]"
        )
    return replace(catalog, models=tuple(replace(known[name], workers=max(1, known[name].workers)) for name in names))


def _bring_all(library: Library, catalog: Catalog) -> None:
    """Fetch and link the files of a catalog's models. Raises ModelUnusable, OSError."""
    # Adapters that are files already are no business of this command: it may run where they are not mounted.
    models = tuple(replace(model, adapters=tuple(one for one in model.adapters if one.hf)) for model in catalog.models)
    for model in library.locate_all(replace(catalog, models=models)):
        for name, path in _files_of(model):
            print(f"{name}\t{named(library.folder, name, Path(path or ''))}", flush=True)


def _files_of(model: ModelSpec) -> Iterable[tuple[str, str | None]]:
    """Yield the name and the path of each file that a model's workers read."""
    yield model.name, model.path
    if model.projector not in ("", NO_PROJECTOR):
        yield f"{model.name}{PROJECTOR}", model.projector
    if (draft := model.speculation.draft) is not None:
        yield f"{model.name}{DRAFT}", draft.path
    for adapter in model.adapters:
        yield f"{model.name}{ADAPTER}{plain_name(adapter.name)}", adapter.path


def _with_own_file(settings: SupervisorSettings, folder: Path) -> SupervisorSettings:
    """Return the settings. If they name no model, and a real file has the name of the demo model's link,
    `folder/NAME.gguf`, return settings whose model is that file. Raises OSError."""
    if settings.catalog or settings.model or settings.hf:
        return settings
    own = first_part(folder / f"{plain_name(settings.alias or DEMO_ALIAS)}{SUFFIX}")
    return settings.model_copy(update={"model": own}) if _is_real(own) else settings


def named(folder: Path, model: str, first: Path) -> Path:
    """Make a link `folder/NAME.gguf` to the model's file, or one for each part of a split model, and return the first.
    Remove all other links of this model name. Raises OSError, and ModelUnusable if a real file has such a name."""
    plain, links = folder / f"{plain_name(model)}{SUFFIX}", dict[Path, Path]()
    for part in parts(first.absolute()):
        split = SPLIT.search(part.name)
        links[plain.with_stem(f"{plain.stem}{split[0] if split else ''}")] = part
    others = [near for near in _called(plain) if near not in links]
    _check_free(model, plain, links, others)
    for link, part in links.items():
        if not _is_real(link) and not (link.is_symlink() and link.readlink() == part):
            _link(link, part)
    for other in others:
        if other.is_symlink():
            other.unlink(missing_ok=True)
    return next(iter(links))


def _called(plain: Path) -> list[Path]:
    """Return the files and links that a worker could take for the model `plain`: itself, and parts of a split model."""
    if not plain.parent.is_dir():
        return []
    return [near for near in plain.parent.iterdir() if SPLIT.sub("", near.name) == plain.name]


def _check_free(model: str, plain: Path, links: Mapping[Path, Path], others: Sequence[Path]) -> None:
    """Raise ModelUnusable if a link would replace a real file, or if workers could take a real file for the model."""
    taken = [link for link, part in links.items() if _is_real(link) and not (part.exists() and link.samefile(part))]
    if plain not in links:
        taken += [other for other in others if _is_real(other)]
    if taken:
        raise ModelUnusable(
            f"model {model}: {taken[0]} is a file that `paddock models pull` has not made, and has the name under "
            "which the model is to be found; move it away, or give the model another name"
        )


def _is_real(path: Path) -> bool:
    return path.exists() and not path.is_symlink()


def _link(link: Path, target: Path) -> None:
    """Make or replace a link in one step, so that a worker that starts meanwhile finds the old file or the new one."""
    link.parent.mkdir(parents=True, exist_ok=True)
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    os.replace(fresh, link)
