"""Changes of access records in Redis, each with a version, so that every gateway finds it within a second.

Whoever writes a record writes it by `command`: the accounts service, and gateways for the first key.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from accounts.protocol.records import AccessRecord, SubjectRecord, seal_record, subject_field
from workers.protocol import keys

MAX_CHANGES = 200
"""Maximum changes of one command: Redis does nothing else meanwhile, for about a millisecond."""
KEY = "key:"
"""Begins the member of `keys.ACCESS_CHANGES` for a key; a subject's is its field in `keys.ACCESS_SUBJECTS`."""


class Move(NamedTuple):
    """A step of `keys.ACCESS_POSITION`, by which services that publish the same database do not undo each other."""

    before: str
    """The changes are made only if this is the position; empty: there is none."""
    after: str


REBUILD = b" rebuild "
"""Part of a position while a service compares all records in Redis with its database, and puts them right."""
NO_MOVE = Move("", "")
STALE = -1
"""Answer of a command whose move is not from the position that Redis has: nothing was changed."""


class Change(NamedTuple):
    """A change of one record."""

    what: Literal["put", "offer", "delete"]
    """`offer` puts the record only if its name has none."""
    member: str
    """`key:NAME`, or a subject's field, such as `team:NAME`."""
    record: bytes = b""
    """The sealed record."""


def put(record: AccessRecord | SubjectRecord, secret: str) -> Change:
    """Return the change that writes a record, sealed with the gateway secret."""
    return Change("put", member_of(record), seal_record(record, secret))


def offer(record: AccessRecord | SubjectRecord, secret: str) -> Change:
    """Return the change that writes a record unless one of its name is there."""
    return Change("offer", member_of(record), seal_record(record, secret))


def delete(member: str) -> Change:
    """Return the change that deletes the record of a member, such as `key:ci` or `team:red`."""
    return Change("delete", member)


def member_of(record: AccessRecord | SubjectRecord) -> str:
    """Return the record's member of `keys.ACCESS_CHANGES`."""
    return KEY + record.name if isinstance(record, AccessRecord) else subject_field(record)


def command(changes: Sequence[Change], move: Move = NO_MOVE) -> tuple[str | int | bytes, ...]:
    """Return the Redis command, for `execute_command`, that makes all the changes or, if it fails, none that lacks its
    version.

    Its answer is a list with 1 for each change, or 0 where everything was so already; or STALE. Without a move it may
    be sent twice. Raises ValueError if there are more than MAX_CHANGES."""
    if len(changes) > MAX_CHANGES:
        raise ValueError(f"{len(changes)} changes are more than {MAX_CHANGES}, which one command may make")
    arguments = [item for change in changes for item in change]
    names = keys.ACCESS_KEYS, keys.ACCESS_SUBJECTS, keys.ACCESS_CHANGES, keys.ACCESS_POSITION
    return "EVAL", _script(), len(names), *names, *move, *arguments


@cache
def _script() -> str:
    return Path(__file__).with_name("change_records.lua").read_text("utf-8")
