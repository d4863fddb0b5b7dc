"""Carries out `paddock audit` and `paddock apply`: what was changed, and what a file would change."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.commands.accounts.api import path_of
from gateway.commands.accounts.kinds import budget_text
from gateway.commands.accounts.parser import (
    Call,
    Result,
    Unusable,
    add_command,
    add_paging,
    more_text,
)
from workers.commands import layout
from workers.commands.layout import Column, table
from workers.protocol.exits import Exit

Document = Mapping[str, Any]

FILTERS = {
    "kind": "changes of one kind: key, team, user, organisation, alias, prices",
    "subject": "changes of this name",
    "actor": "changes by one, such as key:ci or user:ann@example.com",
    "team": "changes that concern this team",
}
STDIN = "-"
UNTOLD = frozenset({"name", "hash", "created_at", "updated_at"})
"""Fields that a line about a change does not repeat."""
TIMES = frozenset({"expires_at", "previous_until", "valid_from"})
DEFAULTS: tuple[Any, ...] = (None, "", False, 0, 1.0, [], {})
"""Values of a new record that say nothing."""
SIGNS = {"create": "+", "update": "~", "delete": "-"}
COUNTED = {"create": "to make", "update": "to change", "delete": "to delete"}
"""Action -> how the number of its changes is told."""


def add_audit(parsers: Any, name: str, about: str) -> None:
    """Add `paddock audit`, which lists by itself."""
    listing = add_command(parsers, name, _list, about)
    for filter_, told in FILTERS.items():
        listing.add_argument(f"--{filter_}", metavar="NAME", help=told)
    add_paging(listing)
    commands = listing.add_subparsers(title="commands", metavar="COMMAND")
    add_command(commands, "verify", _verify, "check that no entry was altered or removed")


def add_apply(parsers: Any, name: str, about: str) -> None:
    """Add `paddock apply`."""
    parser = add_command(parsers, name, _apply, about)
    parser.add_argument(
        "-f", "--file", metavar="FILE", required=True, help="YAML or JSON that declares access; `-`: standard input"
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would change, and change nothing")
    parser.add_argument("--prune", action="store_true", help="delete what was applied before and is not in the file")


def _list(call: Call) -> Result:
    options = call.options
    query = {name: getattr(options, name) for name in (*FILTERS, "limit", "cursor")}
    answer = call.api.get(path_of("audit"), **query)
    entries = answer.document["data"]
    shown = table(_COLUMNS, entries, call.width) if entries else "There are no changes."
    return Result(answer, shown + more_text(answer))


_COLUMNS: tuple[Column[Document], ...] = (
    Column("NUMBER", lambda entry: str(entry["number"]), is_number=True),
    Column("WHEN", lambda entry: layout.write_time(entry["at"])),
    Column("WHO", lambda entry: entry["actor"]),
    Column("FROM", lambda entry: entry["address"]),
    Column("DID", lambda entry: entry["action"]),
    Column("WHAT", lambda entry: f"{entry['kind']} {entry['subject']}"),
    Column("CHANGE", lambda entry: ", ".join(differences(entry["before"], entry["after"]))),
)


def _verify(call: Call) -> Result:
    answer = call.api.get(path_of("audit", "verify"))
    found = answer.document
    count = layout.write_number(found["num_entries"])
    if not found["is_whole"]:
        text = f"The audit is not whole: {found['fault']}. The {count} entries before it are as they were written."
        return Result(answer, text, Exit.BROKEN)
    kept = "Keep this hash elsewhere: it shows whether entries are cut off at the end."
    return Result(answer, f"The audit is whole: {count} entries.\nThe last one's hash is {found['last_hash']}\n{kept}")


def differences(before: Document | None, after: Document | None) -> list[str]:
    """Return a text for each field that a change set anew; nothing for a deletion."""
    if after is None:
        return []
    new, old = dict(_fields(after)), dict(_fields(before or {}))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return _texts({name: (old.get(name), new.get(name)) for name in names}, before is None)


def _texts(fields: Mapping[str, Sequence[Any]], is_new: bool) -> list[str]:
    """Return a text for each field. `fields`: name -> value before and after."""
    if is_new:
        told = _fields({name: after for name, (_, after) in fields.items()})
        return [f"{name}={_value(name, after)}" for name, after in told if after not in DEFAULTS]
    return [f"{name} {_value(name, before)} → {_value(name, after)}" for name, (before, after) in fields.items()]


def _fields(record: Document, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each field's name, with the objects that it is in, and its value."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _fields(value, f"{path}{name}.")
        elif name not in UNTOLD or path:
            yield f"{path}{name}", value


def _value(name: str, value: Any) -> str:
    if value in (None, "", {}, []):
        return "none"
    if name in TIMES and isinstance(value, float):
        return layout.write_time(value)
    if isinstance(value, list) and all(isinstance(item, dict) and "amount" in item for item in value):
        return "; ".join(map(budget_text, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _apply(call: Call) -> Result:
    options = call.options
    text = _read(options.file)
    answer = call.api.upload(path_of("apply"), text, dry_run=options.dry_run, prune=options.prune)
    return Result(answer, _told(answer.document))


def _told(document: Document) -> str:
    changes = document["changes"]
    if not changes:
        return "All is as the file declares it."
    lines = [line for change in changes for line in _change_lines(change)]
    counts = [(sum(change["action"] == action for change in changes), words) for action, words in COUNTED.items()]
    told = ", ".join(f"{count} {words}" for count, words in counts if count)
    state = "nothing is done yet, as --dry-run says" if document["dry_run"] else "done"
    return "\n".join([*lines, "", f"{told}: {state}."])


def _change_lines(change: Document) -> Iterator[str]:
    action = change["action"]
    yield layout.clean(f"{SIGNS.get(action, '~')} {change['kind']} {change['name']}")
    for text in _texts(change["fields"], action == "create"):
        yield layout.clean(f"    {text}")


def _read(file: str) -> bytes:
    """Return the contents of a file, which the API reads. Raises Unusable."""
    try:
        return sys.stdin.buffer.read() if file == STDIN else Path(file).read_bytes()
    except OSError as error:
        raise Unusable(f"apply: {file} can't be read ({error.strerror}); name another file with -f") from None
