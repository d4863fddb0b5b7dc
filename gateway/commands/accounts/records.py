"""Carries out `paddock keys`, `teams`, `users`, `organisations` and `aliases`: list, show, create, change, delete."""

from __future__ import annotations

import json
import secrets
from argparse import Namespace
from functools import partial
from typing import Any

import msgspec

from accounts.protocol.key_format import new_key
from accounts.protocol.records import FIRST_KEY_NAME, RESERVED_PREFIXES, AccessRecord, digest, reserved_name
from gateway.client import ConnectionFailed, NotConnected, Timeout
from gateway.commands.accounts import flags
from gateway.commands.accounts.api import Answer, path_of
from gateway.commands.accounts.flags import add_flags, document_of, limit_flags_beside
from gateway.commands.accounts.kinds import KEY, TEAM, Kind, describe
from gateway.commands.accounts.parser import (
    Call,
    Parser,
    Result,
    Unusable,
    add_command,
    add_group,
    add_offline_command,
    add_paging,
    more_text,
)
from workers.commands.layout import card, table

KEEP = """Keep the key now: it is shown this once, and only its hash is stored. Its holder sends it with every call:
Authorization: Bearer {key}"""
UNPUBLISHED = "Redis does not answer: gateways know of this only once it does."
STATIC_FLAGS = (*flags.RECORD_OF_KEY, *limit_flags_beside(flags.RECORD_OF_KEY))


def add_commands(kind: Kind, parsers: Any, name: str, about: str) -> None:
    """Add the commands of one kind of record."""
    commands = add_group(parsers, name, about)
    listing = add_command(commands, "list", partial(_list, kind), f"list the {kind.plural}")
    for filter_ in kind.filters:
        listing.add_argument(f"--{filter_}", metavar="NAME", help=f"those of this {filter_} only")
    add_paging(listing)
    _named(add_command(commands, "show", partial(_show, kind), f"show {kind.one}"), kind)
    making = add_command(commands, "create", partial(_create, kind), f"make {kind.one}")
    if kind is KEY:
        making.add_argument("--name", metavar="NAME", help="its name in lists and logs; default: a random one")
        _add_request(making)
    else:
        _named(making, kind)
    changing = _named(add_command(commands, "update", partial(_update, kind), f"change {kind.one}"), kind)
    for parser in (making, changing):
        add_flags(parser, "what it is", kind.flags)
        add_flags(parser, "its limits; `none` removes one", kind.limit_flags)
    deleting = _named(add_command(commands, "delete", partial(_delete, kind), f"delete {kind.one}"), kind)
    if kind is TEAM:
        deleting.add_argument("--with-keys", action="store_true", help="and all keys of the team")
    if kind.can_block:
        blocking = f"refuse all calls of {kind.one} until it is unblocked"
        _named(add_command(commands, "block", partial(_post, kind, "block"), blocking), kind)
        _named(
            add_command(commands, "unblock", partial(_post, kind, "unblock"), f"take calls of {kind.one} again"), kind
        )
    if kind is KEY:
        _add_key_commands(commands)


def _add_key_commands(commands: Any) -> None:
    rotating = add_command(commands, "rotate", _rotate, "give a key a new secret, and let the old one work for a while")
    _named(rotating, KEY)
    rotating.add_argument(
        "--grace", type=flags.read_duration, metavar="DURATION", help="how long the old one still works; default: 1d"
    )
    _add_request(rotating)
    making = add_offline_command(
        commands, "make", _make_static, "print a new key, and its record for PADDOCK_API_KEYS; nothing is stored"
    )
    making.add_argument("--name", metavar="NAME", required=True, help="its name in logs")
    making.add_argument("--sha256", metavar="HEX", help="SHA-256 of a key that exists already; no new one is made then")
    add_flags(making, "what it is", flags.RECORD_OF_KEY)
    add_flags(making, "its limits", limit_flags_beside(flags.RECORD_OF_KEY))


def _named(parser: Parser, kind: Kind) -> Parser:
    parser.add_argument("name", metavar="NAME", help=f"name of the {kind.name}")
    return parser


def _add_request(parser: Parser) -> None:
    parser.add_argument(
        "--idempotency-key", metavar="TEXT", help="the one that a command told whose answer was lost: its key is shown"
    )


def _list(kind: Kind, call: Call) -> Result:
    query = {name: getattr(call.options, name) for name in (*kind.filters, "limit", "cursor")}
    answer = call.api.get(path_of(kind.plural), **query)
    found = answer.document["data"]
    shown = table(kind.columns, found, call.width) if found else f"There are no {kind.plural}."
    return Result(answer, shown + more_text(answer))


def _show(kind: Kind, call: Call) -> Result:
    answer = call.api.get(path_of(kind.plural, call.options.name))
    return Result(answer, describe(kind, answer.document))


def _create(kind: Kind, call: Call) -> Result:
    document = document_of(call.options, kind.all_flags)
    if call.options.name is not None:
        document["name"] = call.options.name
    if kind is KEY:
        return _minted(call, path_of(kind.plural), document)
    return changed(kind, call.api.post(path_of(kind.plural), document))


def _update(kind: Kind, call: Call) -> Result:
    document = document_of(call.options, kind.all_flags)
    if not document:
        raise Unusable(
            f"{kind.plural} update: no change is given; `paddock {kind.plural} update --help` lists the flags"
        )
    return changed(kind, call.api.patch(path_of(kind.plural, call.options.name), document))


def _delete(kind: Kind, call: Call) -> Result:
    with_keys = getattr(call.options, "with_keys", False)
    answer = call.api.delete(path_of(kind.plural, call.options.name), with_keys=with_keys)
    return Result(answer, _with_warning(answer, f"The {kind.name} {call.options.name} is deleted."))


def _post(kind: Kind, deed: str, call: Call) -> Result:
    return changed(kind, call.api.post(path_of(kind.plural, call.options.name, deed)))


def _rotate(call: Call) -> Result:
    body = {} if call.options.grace is None else {"grace_s": call.options.grace}
    return _minted(call, path_of(KEY.plural, call.options.name, "rotate"), body)


def _minted(call: Call, path: str, body: object) -> Result:
    """Have a key made, and return the result that shows it. Raises ClientError, which says how to do it again."""
    request = call.options.idempotency_key or secrets.token_urlsafe(16)
    try:
        answer = call.api.post(path, body, request=request)
    except NotConnected:
        raise  # no key was asked for
    except (ConnectionFailed, Timeout) as error:
        raise type(error)(
            f"{error.message}; the key may have been made: repeat the command with --idempotency-key {request}, which "
            "shows it and makes no second one"
        ) from None
    key = answer.document["key"]
    shown = describe(KEY, answer.document, key)
    return Result(answer, _with_warning(answer, f"{shown}\n\n{KEEP.format(key=key)}"))


def changed(kind: Kind, answer: Answer) -> Result:
    """Return the result that shows a record after a change."""
    return Result(answer, _with_warning(answer, describe(kind, answer.document)))


def _with_warning(answer: Answer, text: str) -> str:
    return text if answer.document.get("published", True) else f"{text}\n\n{UNPUBLISHED}"


def _make_static(options: Namespace) -> str:
    """Return a new key and its record, or the record of the key whose hash is given. Raises Unusable."""
    if options.name == FIRST_KEY_NAME:
        raise Unusable(f"keys make: {FIRST_KEY_NAME!r} is the first key's name; preset that one with PADDOCK_API_KEY")
    if options.name.startswith(RESERVED_PREFIXES):
        raise Unusable(f"keys make: {reserved_name(options.name)}")
    key = "" if options.sha256 else new_key()
    document = document_of(options, STATIC_FLAGS)
    fields = {name: value for name, value in document.items() if value is not None}
    fields |= {"name": options.name, "sha256": options.sha256 or digest(key)}
    try:
        record = msgspec.convert(fields, AccessRecord)
    except msgspec.ValidationError as error:
        raise Unusable(f"keys make: {error}; docs/keys.md lists the fields") from None
    return card({"key": key, "record": json.dumps(msgspec.to_builtins(record))})
