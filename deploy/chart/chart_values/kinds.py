"""Kinds of values, as JSON Schema (draft 7, which every Helm 3 reads)."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def text(pattern: str = "") -> Schema:
    return {"type": "string", **({"pattern": pattern} if pattern else {})}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def flag() -> Schema:
    return {"type": "boolean"}


def whole(least: int = 0, most: int | None = None) -> Schema:
    return {"type": "integer", "minimum": least, **({} if most is None else {"maximum": most})}


def number(least: float = 0, *, above: bool = False) -> Schema:
    return {"type": "number", ("exclusiveMinimum" if above else "minimum"): least}


def several(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def named(of: Schema) -> Schema:
    """A mapping of free names."""
    return {"type": "object", "additionalProperties": of}


def kubernetes() -> Schema:
    """What Kubernetes checks itself: handed on as it is."""
    return {"type": "object"}


def fields(**properties: Schema) -> Schema:
    """A mapping that has these keys and no others."""
    return {"type": "object", "properties": properties, "additionalProperties": False}


def with_required(mapping: Schema, *names: str) -> Schema:
    return {**mapping, "required": list(names)}


QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|[kKMGTPE]i?)?$"
DNS = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
OPTIONAL_DNS = r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$"
HOST = r"^(\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"
DURATION = r"^([0-9]+(ms|s|m|h))+$"
IMAGE = r"^[a-z0-9][a-z0-9._/:-]*$"


def quantity() -> Schema:
    return text(QUANTITY)


def resources() -> Schema:
    amounts = named({"type": ["string", "integer", "number"], "pattern": QUANTITY})
    return fields(requests=amounts, limits=amounts, claims=several(kubernetes()))


def volume(*types: str) -> Schema:
    return fields(
        type=one_of(*types),
        size=quantity(),
        accessModes=several(one_of("ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod")),
        storageClass=text(OPTIONAL_DNS),
        existingClaim=text(OPTIONAL_DNS),
    )


def budget() -> Schema:
    return fields(enabled=flag(), maxUnavailable=count_or_share())


def count_or_share() -> Schema:
    return {"type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9]+%?$"}


def placement() -> dict[str, Schema]:
    """Where pods go."""
    return {
        "nodeSelector": named(text()),
        "tolerations": several(kubernetes()),
        "affinity": kubernetes(),
        "priorityClassName": text(OPTIONAL_DNS),
    }


def pods() -> dict[str, Schema]:
    """What may be said of pods that are Paddock's own."""
    return {
        **placement(),
        "spread": flag(),
        "topologySpreadConstraints": several(kubernetes()),
        "podAnnotations": named(text()),
        "podLabels": named(text()),
        "extraEnv": several(kubernetes()),
        "extraVolumes": several(kubernetes()),
        "extraVolumeMounts": several(kubernetes()),
        "extraContainers": several(kubernetes()),
        "extraInitContainers": several(kubernetes()),
    }
