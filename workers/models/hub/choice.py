"""Chooses files of a repository of the Hugging Face hub: the model that a reference names, and its projector."""

from __future__ import annotations

import re
from collections.abc import Iterable

from workers.models.files import SPLIT

PREFERRED = ("Q4_K_M", "Q8_0")
PROJECTOR = "mmproj"
"""Word in the names of .gguf files that make a model see or hear."""
PRECISIONS = ("f16", "bf16", "q8_0")
"""Precisions of projectors, the preferred first: smaller ones cost quality, larger ones memory."""
COMPANIONS = (PROJECTOR, "imatrix")
"""Words in the names of .gguf files that can't be served as a model by themselves."""


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
