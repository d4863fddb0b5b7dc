"""Makes records from what callers send: strict about names and values, and with errors that name the field at fault."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from accounts.access.records import KEY, USER, Kind, RecordT, Stored
from accounts.errors import Conflict, Invalid
from accounts.protocol.records import RESERVED_PREFIXES, STORAGE_LIMITS, reserved_name

StructT = TypeVar("StructT", bound=msgspec.Struct)
Document = dict[str, Any]
"""A JSON object as callers send it."""

METADATA_BYTES = 16 << 10
VERSION = "version"
NAME_PATTERN = re.compile(r"[A-Za-z0-9_@+][A-Za-z0-9_.@+:=-]*")
"""The pattern of names, which go into paths, Redis keys and labels of metrics. Aliases have models' names instead."""
_FAULT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<where>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")


def editable(kind: Kind[Any]) -> tuple[str, ...]:
    """Return the fields that callers may set."""
    fields = tuple(name for name in kind.record.__struct_fields__ if name not in kind.hidden)
    return (*fields, "email", "metadata") if kind is USER else (*fields, "metadata")


def edited(kind: Kind[RecordT], before: Stored[RecordT] | None, name: str, patch: Mapping[str, Any]) -> Stored[RecordT]:
    """Return the record with the fields of the patch (RFC 7396: null sets the default, objects are merged).

    `before`: None makes a record of that name. Raises Invalid, naming the field; Conflict, if the patch names a version
    that is no longer the last."""
    patch = dict(patch)
    given = patch.pop("name", name)
    if before is not None and before.version:
        require_version(kind, before, patch.pop(VERSION, None))
    if given != name:
        raise Invalid(f"The name can't be changed from {name!r} to {given!r}; make a new {kind.name}.", param="name")
    allowed = editable(kind)
    for field in patch:
        if field not in allowed:
            raise Invalid(f"A {kind.name} has no field `{field}`; it has: {', '.join(allowed)}.", param=field)
    metadata = _metadata(merged(before.metadata if before else {}, {"metadata": patch.pop("metadata", {})}, "metadata"))
    email = _email(patch.pop("email", before.email if before else None))
    values: Document = _values(before) if before is not None else {"name": name}
    if kind is KEY and patch.get("role") is not None:
        values["admin"] = False  # `role` says it all
    record = _record(kind, _merge(values, patch))
    _check(record)
    return msgspec.structs.replace(before or Stored(record=record), record=record, metadata=metadata, email=email)


def require_version(kind: Kind[Any], before: Stored[Any], version: object) -> None:
    """Raise Conflict if the caller read another version than the last. None: it does not say which it read."""
    if version is None:
        return
    if isinstance(version, bool) or not isinstance(version, int):
        raise Invalid("`version` is the number that the last answer had.", param=VERSION)
    if version != before.version:
        raise Conflict(
            f"The {kind.name} {before.record.name!r} has been changed since: its version is {before.version}, not "
            f"{version}. Read it again, and repeat the change."
        )


def merged(current: Mapping[str, Any], patch: Mapping[str, Any], field: str) -> Document:
    """Return the object `current` with what `patch[field]` changes of it. Raises Invalid if that is no object."""
    changes = patch[field]
    if changes is None:
        return {}
    if not isinstance(changes, dict):
        raise Invalid(f"`{field}` is an object.", param=field)
    found: Document = _merge(dict(current), changes)
    return found


def require_name(name: str, kind: Kind[Any]) -> None:
    """Raise Invalid unless the name fits into paths and labels. Names that were made before are left alone."""
    if not NAME_PATTERN.fullmatch(name):
        raise Invalid(
            f"{name!r} is no name for a {kind.name}: use letters, digits and `_ . @ + : = -`, and begin with none of "
            "`. : = -`.",
            param="name",
        )
    if kind is KEY and name.startswith(RESERVED_PREFIXES):
        message = reserved_name(name)
        raise Invalid(f"{message[0].upper()}{message[1:]}.", param="name")


def required(document: Document, field: str) -> str:
    """Take a text out of the document. Raises Invalid."""
    value = document.pop(field, None)
    if not isinstance(value, str) or not value:
        raise Invalid(f"`{field}` is missing; it is a text.", param=field)
    return value


def convert(values: Any, kind: type[StructT]) -> StructT:
    """Return the struct of these values. Raises Invalid, naming the field."""
    try:
        return msgspec.convert(values, kind, strict=True)
    except msgspec.ValidationError as error:
        raise fault_of(error) from None


def fault_of(error: msgspec.DecodeError) -> Invalid:
    """Return the error for callers, with the field in its path."""
    found = _FAULT.match(str(error))
    what, where = (found["what"], found["where"] or "") if found else (str(error), "")
    if inner := _UNKNOWN.search(what) or _MISSING.search(what):
        where = f"{where}.{inner['name']}".strip(".")
        verb = "not known" if _UNKNOWN.search(what) else "missing"
        is_of_teams = inner["name"] in STORAGE_LIMITS
        remedy = " What is stored is limited for teams and organisations only." if is_of_teams else ""
        return Invalid(f"The field `{where}` is {verb}.{remedy}", param=where)
    if what.startswith("networks: "):  # the record's own check of its values
        where, what = "networks", what.removeprefix("networks: ")
    return Invalid(f"`{where}`: {what}." if where else f"{what}.", param=where or None)


def _record(kind: Kind[RecordT], values: Document) -> RecordT:
    tag = kind.record.__struct_config__.tag
    return convert({"type": tag, **values} if tag else values, kind.record)


def _values(before: Stored[Any]) -> Document:
    values: Document = msgspec.to_builtins(before.record)
    values.pop("type", None)
    return values


def _merge(values: Document, patch: Mapping[str, Any]) -> Document:
    for name, value in patch.items():
        if value is None:
            values.pop(name, None)
        elif isinstance(value, dict) and isinstance(values.get(name), dict):
            values[name] = _merge(dict(values[name]), value)
        else:
            values[name] = _merge({}, value) if isinstance(value, dict) else value
    return values


def _metadata(metadata: Document) -> Document:
    if (size := len(msgspec.json.encode(metadata))) > METADATA_BYTES:
        raise Invalid(f"`metadata` has {size} bytes; at most {METADATA_BYTES} are kept.", param="metadata")
    return metadata


def _email(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > 320:
        raise Invalid("`email` is a text of at most 320 characters.", param="email")
    return value


def _check(record: Any) -> None:
    """Raise Invalid for values that their types let through, but nothing could use."""
    for number, budget in enumerate(record.limits.budgets):
        try:
            ZoneInfo(budget.time_zone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise Invalid(
                f"{budget.time_zone!r} is no time zone; name one such as `Europe/Berlin`, or `UTC`.",
                param=f"limits.budgets[{number}].time_zone",
            ) from None
