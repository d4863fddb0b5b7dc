"""Runs the commands over the admin API: reads the flags, finds the gateway, calls it, and prints the result."""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from gateway.client import (
    AnswerError,
    AuthenticationFailed,
    ClientError,
    ConnectionFailed,
    NotSupported,
    PermissionDenied,
    RateLimited,
    ServerError,
    Timeout,
    Unavailable,
)
from gateway.client.transport import Server
from gateway.commands import logins
from gateway.commands.accounts import changes, limits, login, prices, records, usage
from gateway.commands.accounts.api import AdminApi, told
from gateway.commands.accounts.kinds import ALIAS, KEY, ORGANISATION, TEAM, USER
from gateway.commands.accounts.parser import DEFAULTS, SETTINGS, Call, Parser, Result, Unusable
from gateway.commands.fleet import command as fleet
from gateway.commands.logins import LoginsUnreadable
from gateway.commands.target import Access, find
from gateway.settings import GatewaySettings
from workers import sources
from workers.commands import command
from workers.protocol.exits import Exit

TIMEOUT_S = 120.0
"""Seconds without a byte from the gateway after which a command gives up."""

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

Add = Callable[[Any, str, str], None]
"""Adds a command to sub-parsers, by its name and what it is about."""

COMMANDS: Mapping[str, Add] = {
    "keys": partial(records.add_commands, KEY),
    "teams": partial(records.add_commands, TEAM),
    "users": partial(records.add_commands, USER),
    "organisations": partial(records.add_commands, ORGANISATION),
    "aliases": partial(records.add_commands, ALIAS),
    "limits": limits.add_limits,
    "budgets": limits.add_budgets,
    "usage": usage.add_commands,
    "prices": prices.add_commands,
    "audit": changes.add_audit,
    "apply": changes.add_apply,
    "status": fleet.add_status,
    "ps": fleet.add_ps,
    "top": fleet.add_top,
    "stop": fleet.add_stop,
    "restart": fleet.add_restart,
    "login": login.add_login,
    "logout": login.add_logout,
}


def add_commands(parsers: Any, summaries: Mapping[str, str]) -> None:
    """Add all commands to the sub-parsers of a parser. `summaries`: name -> what the command does."""
    for name, add in COMMANDS.items():
        add(parsers, name, summaries.get(name, name))


def main(name: str, args: Sequence[str], known: Collection[str], summaries: Mapping[str, str]) -> int:
    """Run the command of this name and return the exit code. `known`: the names of all settings."""
    root = Parser(prog="paddock", add_help=False)
    root.set_defaults(**DEFAULTS)
    add_commands(root.add_subparsers(required=True), summaries)
    try:
        options, left = root.parse_known_args([name, *args])
        options.parser.refuse_unknown(left)
        if "write" in options:
            print(options.write(options))
            return int(Exit.OK)
        if "run" not in options:  # a command of several alone
            options.parser.print_help()
            return int(Exit.OK)
        return _run(options, known)
    except sources.SettingsError as error:
        return command.complain(error.problems)
    except (Unusable, LoginsUnreadable) as error:
        return command.complain([str(error)])


def _run(options: Namespace, known: Collection[str]) -> int:
    """Call the gateway, print the result, and return the exit code.

    Raises SettingsError, Unusable, LoginsUnreadable."""
    given = [text for name in SETTINGS if (value := getattr(options, name)) for text in (sources.flag(name), value)]
    reading = sources.read(GatewaySettings, given, prog=options.parser.prog, known=known)
    for warning in reading.warnings:
        print(f"paddock: warning: {warning}", file=sys.stderr)
    access, kept = find(options.url, reading), logins.read(reading.settings.state_dir)
    url = access.url if options.url else _at_admin_port(access.url, reading.settings.admin_port)
    server = Server(url, access.key, TIMEOUT_S, not options.insecure)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    try:
        with AdminApi(server) as api:
            result = options.run(Call(options, api, access.url, kept, width))
    except ClientError as error:
        return _fail(error, access)
    except OSError as error:
        print(f"paddock: {error.filename or options.parser.prog}: {error.strerror}", file=sys.stderr)
        return int(Exit.CRASHED)
    _print(result, options.json)
    return int(result.code)


def _at_admin_port(url: str, port: int) -> str:
    """Return the address of a gateway on this machine with the port for admins. `port`: 0: there is none."""
    parts = urlsplit(url)
    if not port or parts.hostname not in LOOPBACK:
        return url
    return urlunsplit(parts._replace(netloc=f"{parts.netloc.rpartition(':')[0]}:{port}"))


def _print(result: Result, prints_json: bool) -> None:
    if prints_json and result.answer is not None:
        print(result.answer.raw.decode())
    elif result.text:
        print(result.text)


def _fail(error: ClientError, access: Access) -> int:
    """Print an error in one line, and return the exit code."""
    message, code = error.message, Exit.REFUSED
    if isinstance(error, AnswerError):
        message = told(error)
    if isinstance(error, AuthenticationFailed):
        message, code = f"{message} ({access.key_from})", Exit.FORBIDDEN
    elif isinstance(error, PermissionDenied):
        code = Exit.FORBIDDEN
    elif isinstance(error, ConnectionFailed):
        message = f"{message}; start a gateway with `paddock up`, or name another with --url"
        code = Exit.NO_GATEWAY
    elif isinstance(error, (Timeout, Unavailable, RateLimited, ServerError)):
        code = Exit.NO_GATEWAY
    elif isinstance(error, NotSupported):
        message = f"{message} Without one, `paddock keys make` makes keys for PADDOCK_API_KEYS."
    print(f"paddock: {message}", file=sys.stderr)
    return int(code)
