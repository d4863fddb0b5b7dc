"""Carries out `paddock usage`: sums of calls, single calls, and their export."""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.commands.accounts import flags
from gateway.commands.accounts.api import path_of
from gateway.commands.accounts.parser import (
    Call,
    Parser,
    Result,
    Unusable,
    add_command,
    add_paging,
    more_text,
)
from workers.commands import layout
from workers.commands.layout import Column, table

Row = Mapping[str, Any]

FILTERS = ("team", "key", "user", "end_user", "alias", "model")
SINCE = "30d"
CALLS_SHOWN = 50
STDOUT = "-"
FORMATS = ("csv", "parquet")
SUMS = ("num_calls", "num_failed", "prompt_tokens", "cached_tokens", "completion_tokens", "compute_ms", "cost")


def add_commands(parsers: Any, name: str, about: str) -> None:
    """Add `paddock usage`, which sums up by itself, and its commands for single calls."""
    summing = add_command(parsers, name, _sum_up, about)
    summing.add_argument(
        "--by",
        type=flags.read_names,
        metavar="GROUPS",
        default=[],
        help="what to sum up by, such as team,model: hour, day, month, organisation, team, key, user, end_user, alias, "
        "model, adapter",
    )
    _add_selection(summing)
    add_paging(summing)
    commands = summing.add_subparsers(title="commands", metavar="COMMAND")
    listing = add_command(commands, "calls", _list_calls, "list single calls, newest first")
    exporting = add_command(commands, "export", _export, "write single calls into a file, oldest first")
    for parser in (listing, exporting):
        _add_selection(parser, default=SUPPRESS)
        parser.add_argument(
            "--outcome", metavar="NAME", help="calls that ended so; `failed`: all that did not end well"
        )
        parser.add_argument("--request-id", metavar="ID", help="the calls of one request")
    add_paging(listing, default=SUPPRESS)
    exporting.add_argument("--format", choices=FORMATS, help="default: by the file's name, else csv")
    exporting.add_argument("-o", "--output", metavar="FILE", default=STDOUT, help="default: standard output")


def _add_selection(parser: Parser, default: Any = None) -> None:
    """Add the flags that select calls. `default`: SUPPRESS for a command below another one that has them."""
    for filter_ in FILTERS:
        name = f"--{filter_.replace('_', '-')}"
        parser.add_argument(name, default=default, metavar="NAME", help=f"calls of this {filter_.replace('_', ' ')}")
    parser.add_argument(
        "--since", type=flags.read_past, default=default, metavar="WHEN", help=f"such as {SINCE}, or a date (UTC)"
    )
    parser.add_argument("--until", type=flags.read_past, default=default, metavar="WHEN", help="calls before then")


def _selection(call: Call) -> dict[str, Any]:
    options = vars(call.options)
    query = {name: options[name] for name in FILTERS} | {"from": options["since"], "to": options["until"]}
    return query | {name: options.get(name) for name in ("outcome", "request_id")}


def _sum_up(call: Call) -> Result:
    groups: list[str] = call.options.by
    query = _selection(call)
    query["from"] = query["from"] or flags.read_past(SINCE)
    answer = call.api.get(
        path_of("usage", "summary"),
        group_by=",".join(groups),
        limit=call.options.limit,
        cursor=call.options.cursor,
        **query,
    )
    document, rows = answer.document, answer.document["data"]
    if groups and len(rows) > 1 and not document["next"]:
        rows = [*rows, {name: sum(row[name] for row in rows) for name in SUMS} | {groups[0]: "in all"}]
    begin, end = layout.write_iso(document["from"]), layout.write_iso(document["to"])
    shown = table(_sum_columns(groups, document["currency"]), rows, call.width) if rows else "There were no calls."
    return Result(answer, f"Calls from {begin} to {end}\n\n{shown}{more_text(answer)}")


def _sum_columns(groups: Sequence[str], currency: str) -> list[Column[Row]]:
    return [
        *(_group_column(name) for name in groups),
        _count("CALLS", "num_calls"),
        _count("FAILED", "num_failed"),
        _count("PROMPT TOKENS", "prompt_tokens"),
        _count("CACHED", "cached_tokens"),
        _count("ANSWER TOKENS", "completion_tokens"),
        Column("COMPUTE S", lambda row: layout.write_number(round(row["compute_ms"] / 1000, 1)), is_number=True),
        Column(f"COST ({currency})", lambda row: layout.write_money(row["cost"]), is_number=True),
    ]


def _group_column(name: str) -> Column[Row]:
    return Column(
        name.upper().replace("_", " "), lambda row: layout.write_iso(str(row.get(name) or "")), is_always=True
    )


def _count(title: str, field: str) -> Column[Row]:
    return Column(title, lambda row: layout.write_number(row[field]), is_number=True)


def _list_calls(call: Call) -> Result:
    limit = call.options.limit or CALLS_SHOWN
    answer = call.api.get(path_of("usage"), limit=limit, cursor=call.options.cursor, **_selection(call))
    rows = answer.document["data"]
    shown = table(_call_columns(answer.document["currency"]), rows, call.width) if rows else "There were no calls."
    return Result(answer, shown + more_text(answer))


def _call_columns(currency: str) -> list[Column[Row]]:
    return [
        Column("ENDED", lambda row: layout.write_time(row["ended_at"])),
        _field("TEAM", "team"),
        _field("KEY", "key"),
        _field("USER", "user"),
        _field("END USER", "end_user"),
        Column("MODEL", _model),
        _field("OUTCOME", "outcome"),
        _count("PROMPT", "prompt_tokens"),
        _count("CACHED", "cached_tokens"),
        _count("ANSWER", "completion_tokens"),
        _count("QUEUED MS", "queue_ms"),
        _count("COMPUTE MS", "compute_ms"),
        Column(f"COST ({currency})", lambda row: layout.write_money(row["cost"]), is_number=True),
        _field("REQUEST", "request_id"),
    ]


def _field(title: str, field: str) -> Column[Row]:
    return Column(title, lambda row: str(row[field] or ""))


def _model(row: Row) -> str:
    model = row["model"] if row["alias"] in ("", row["model"]) else f"{row['alias']} ({row['model']})"
    return f"{model} + {row['adapter']}" if row["adapter"] else str(model)


def _export(call: Call) -> Result:
    """Write calls into a file, which is there as a whole or not at all. Raises Unusable, ClientError."""
    options = call.options
    file_format = options.format or Path(options.output).suffix.lower().lstrip(".")
    query = {**_selection(call), "format": file_format if file_format in FORMATS else FORMATS[0]}
    path = path_of("usage", "export")
    if options.output == STDOUT:
        if sys.stdout.isatty() and query["format"] != FORMATS[0]:
            raise Unusable("usage export: Parquet is not for a terminal; name a file with -o")
        call.api.save(path, sys.stdout.buffer, **query)
        return Result(None, "")
    target = Path(options.output)
    try:
        num_bytes = _write_file(call, path, target, query)
    except OSError as error:
        raise Unusable(
            f"usage export: {target} can't be written ({error.strerror}); name another file with -o"
        ) from None
    return Result(None, f"{target}: {layout.write_number(num_bytes)} bytes")


def _write_file(call: Call, path: str, target: Path, query: Row) -> int:
    if target.exists() and not target.is_file():
        with target.open("wb") as device:
            return call.api.save(path, device, **query)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            num_bytes = call.api.save(path, file, **query)
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return num_bytes
