"""Finds the records that scripts for LiteLLM name: a key by itself or its hash, a team by what it was to be called."""

from __future__ import annotations

import re

from sqlalchemy import Connection, select

from accounts.access.records import Kind, RecordT, Stored
from accounts.access.rights import Actor
from accounts.access.subjects import Subjects
from accounts.database.schema import api_keys
from accounts.errors import Invalid, Missing
from accounts.protocol.records import MAX_NAME_CHARS, digest


def name_of(alias: object, field: str) -> str | None:
    """Return the name that an alias of LiteLLM's stands for: what no name may have becomes `-`. Raises Invalid."""
    if alias is None or alias == "":
        return None
    if not isinstance(alias, str):
        raise Invalid(f"`{field}` is a text.", param=field)
    return re.sub(r"[^A-Za-z0-9_.@+:=-]+", "-", alias).lstrip("-.:=")[:MAX_NAME_CHARS] or None


def find_key(connection: Connection, given: str) -> str | None:
    """Return the name of the key that is given itself, by its hash or, if it is none of these, by its name; None: there
    is none. Names are chosen: one that is the hash of another key must not stand for that."""
    for is_it in (api_keys.c.sha256.in_((digest(given), given)), api_keys.c.name == given):
        found = connection.execute(select(api_keys.c.name).where(is_it)).scalar()
        if found is not None:
            return str(found)
    return None


def find_subject(subjects: Subjects, actor: Actor, kind: Kind[RecordT], given: str) -> Stored[RecordT]:
    """Return the team or user of this name, or of the name that one to be called so was given. Raises Missing."""
    try:
        return subjects.show(actor, kind, given)
    except Missing:
        name = name_of(given, "name")
        if name is None or name == given:
            raise
        return subjects.show(actor, kind, name)


def subject_name(subjects: Subjects, actor: Actor, kind: Kind[RecordT], given: object) -> object:
    """Return the name of that team or user; what was given, if there is none, for others to refuse."""
    try:
        return find_subject(subjects, actor, kind, given).record.name if isinstance(given, str) else given
    except Missing:
        return given
