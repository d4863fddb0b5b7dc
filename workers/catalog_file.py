"""Reads a catalog file into a `Catalog`, for gateways (names, aliases) and for the supervisor (sources, sizes)."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import msgspec
import yaml

from workers.protocol.catalog import (
    AliasChain,
    Catalog,
    CatalogError,
    Defaults,
    DefaultSampling,
    LlamaSettings,
    ModelSpec,
    Target,
    convert,
)

FIELDS = sorted(
    field.name
    for struct in (Catalog, Defaults, ModelSpec, LlamaSettings, DefaultSampling, AliasChain, Target)
    for field in msgspec.structs.fields(struct)
)


def load(path: Path) -> Catalog:
    """Return the checked catalog of a YAML or JSON file. Raises CatalogError: file, path inside, remedy."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CatalogError(f"{path}: {error.strerror}; --catalog must name a readable file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CatalogError(f"{path}: not valid YAML or JSON: {' '.join(str(error).split())}") from None
    try:
        return convert(document, str(path))
    except CatalogError as error:
        raise CatalogError(_with_hint(str(error))) from None


def _with_hint(message: str) -> str:
    unknown = re.search(r"unknown field `([^`]*)`", message)
    close = difflib.get_close_matches(unknown[1], FIELDS, n=1) if unknown else []
    return message.replace(unknown[0], f"{unknown[0]} (did you mean `{close[0]}`?)") if unknown and close else message
