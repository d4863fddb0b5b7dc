"""`paddock key`: makes API keys, and manages their sealed records in Redis.

make --name NAME       print a new key, its record for PADDOCK_API_KEYS, and the sealed record for Redis; store nothing
add --name NAME        the same, and store the record in Redis: the key is valid at every gateway within a second
list                   list the records in Redis (names, teams, rights) and say which of them gateways ignore
remove --name NAME     delete a key's record from Redis
--team T               the team whose caches and limits the key shares; default: default
--alias A              a model name that the key may use; repeat it for several; default: all
--admin                allow the key what is reserved for operators
--weight W             share of the key's team while calls of several teams wait
--fields JSON          other fields of the record, see docs/keys.md
--sha256 HEX           hash of a key that exists already; no new key is made then
flags                  these are settings, too: --redis-url, --gateway-secret, --state-dir, --config

Run it where a gateway runs: it needs the gateway's secret. Without --redis-url it uses the Redis of `paddock up` on
this machine. Exit codes: 0 done, 2 a flag is wrong, 69 Redis does not answer.
"""

from __future__ import annotations

import asyncio
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Sequence
from typing import NoReturn

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from accounts.protocol import changes
from accounts.protocol.key_format import new_key
from accounts.protocol.records import FIRST_KEY_NAME, AccessRecord, digest, open_record, seal_record
from gateway.settings import UpSettings
from gateway.store.client import connect
from workers import secret_file, sources
from workers.commands import command
from workers.protocol import keys
from workers.protocol.exits import Exit
from workers.redis.link import run_command
from workers.supervisor.redis_process import private_url


class _Unusable(ValueError):
    """The command can't do what its flags say; the message says why, for a person."""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Unusable(f"key: {message}; `paddock key --help` lists the flags")


def main(args: Sequence[str], known: Collection[str] = ()) -> int:
    """Run the command and return the exit code. `known`: the names of all settings."""
    if not args or not {"-h", "--help"}.isdisjoint(args):
        print((__doc__ or "").strip())
        return 0
    try:
        options, flags = _parser().parse_known_args(args)
        reading = sources.read(UpSettings, flags, prog=f"paddock key {options.deed}", known=known)
        return asyncio.run(_run(options, reading.settings))
    except sources.SettingsError as error:
        return command.complain(error.problems)
    except (_Unusable, OSError) as error:
        return command.complain([str(error)])
    except RedisError as error:
        print(f"paddock: key: Redis can't be asked ({error}); check --redis-url", file=sys.stderr)
        return int(Exit.NO_REDIS)


def _parser() -> _Parser:
    parser = _Parser(prog="paddock key", allow_abbrev=False, add_help=False)
    parser.add_argument("deed", choices=("add", "list", "make", "remove"))
    parser.add_argument("--name", default="")
    parser.add_argument("--team")
    parser.add_argument("--alias", action="append")
    parser.add_argument("--admin", action="store_true")
    parser.add_argument("--weight", type=float)
    parser.add_argument("--fields", default="{}")
    parser.add_argument("--sha256", default="")
    return parser


async def _run(options: Namespace, settings: UpSettings) -> int:
    """Make, add, list or remove keys, and return the exit code. Raises _Unusable, OSError, redis.RedisError."""
    path = settings.state_dir / secret_file.GATEWAY_SECRET
    secret = settings.gateway_secret or secret_file.read(path)
    if not secret:
        raise _Unusable(
            f"key: gateway_secret is unset, and {path} is not there; give --gateway-secret, as gateways have"
        )
    if options.deed == "make":
        key, record = _make_key(options)
        _show(key, record, secret)
        return 0
    async with connect(settings.redis_url or private_url(settings.state_dir, secret)) as client:
        if options.deed == "list":
            await _list(client, secret)
        elif options.deed == "remove":
            await _remove(client, options.name)
        else:
            key, record = _make_key(options)
            await run_command(client, changes.command([changes.put(record, secret)]))
            _show(key, record, secret)
    return 0


def _make_key(options: Namespace) -> tuple[str, AccessRecord]:
    """Return a key and its record. The key is empty if `--sha256` gives only its hash. Raises _Unusable."""
    if options.name == FIRST_KEY_NAME:
        raise _Unusable(f"key: {FIRST_KEY_NAME!r} is the name of the first key; preset that with PADDOCK_API_KEY")
    key = "" if options.sha256 else new_key()
    given = {"team": options.team, "aliases": options.alias, "weight": options.weight, "admin": options.admin or None}
    try:
        more = json.loads(options.fields)
        fields = {**more, **{name: value for name, value in given.items() if value is not None}}
        named = {**fields, "name": options.name, "sha256": options.sha256 or digest(key)}
        return key, msgspec.convert(named, AccessRecord)
    except (ValueError, TypeError) as error:  # msgspec's own error is a ValueError
        raise _Unusable(f"key: {error}; docs/keys.md lists the fields") from None


def _show(key: str, record: AccessRecord, secret: str) -> None:
    if key:
        print(f"key      {key}")
    print(f"record   {msgspec.json.encode(record).decode()}")
    print(f"in Redis {seal_record(record, secret).decode()}")


async def _remove(client: redis.asyncio.Redis, name: str) -> None:
    if await run_command(client, changes.command([changes.delete(changes.KEY + name)])) == [0]:
        raise _Unusable(f"key: there is no record {name!r} in Redis; `paddock key list` shows them")
    print(f"removed  {name}; no gateway takes it a second from now")


async def _list(client: redis.asyncio.Redis, secret: str) -> None:
    for name, value in sorted((await client.hgetall(keys.ACCESS_KEYS)).items()):
        shown = name.decode(errors="replace") if isinstance(name, bytes) else name
        try:
            record = open_record(value, secret)
        except ValueError as error:
            print(f"{shown}: left out, {error}")
        else:
            print(msgspec.json.encode(record).decode())
