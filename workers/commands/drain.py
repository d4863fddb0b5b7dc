"""`paddock drain`: takes a gateway or a worker of this machine out of service and waits, as a container's preStop hook.

gateway              drain the gateway at --host and --port (PADDOCK_HOST, PADDOCK_PORT)
worker               drain the worker at --worker-host and --worker-port
--url URL            drain the gateway or worker at this address instead
--timeout-s S        maximum seconds to wait; default: until nothing runs any more
--settle-s S         for a gateway: seconds in which no new call must have come; default: 5
flags                these are settings, too: --gateway-secret, --worker-secret, --api-key (an admin's), --state-dir,
                     --config

It does not stop the process: do that afterwards, with SIGTERM. Exit codes: 0 nothing runs any more, 75 something still
ran when the time was up, 1 nobody answers, 2 a flag is wrong, or the key or secret is refused.
"""

from __future__ import annotations

import json
import socket
import ssl
import sys
from argparse import Action, ArgumentError, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, NoReturn
from urllib.parse import urlencode, urlsplit

from workers import secret_file, sources
from workers.commands import command
from workers.process import sockets
from workers.protocol import control
from workers.protocol.exits import Exit
from workers.protocol.framing import HEALTH_PATH
from workers.secret_file import GATEWAY_SECRET, WORKER_SECRET
from workers.settings import PaddockSettings, WorkerSettings

SECRETS = {"gateway": ("gateway_secret", GATEWAY_SECRET), "worker": ("worker_secret", WORKER_SECRET)}
"""Kind of process -> the setting for its secret, and the file in the state folder used if that setting is empty."""
PARTS: Mapping[str, type[PaddockSettings]] = {"worker": WorkerSettings}
ANSWER_S = 10.0
"""Maximum seconds for the health check. A process that takes longer is still loading its model, and has no calls."""
MAX_ANSWER_BYTES = 64 << 10
MARGIN_S = 10.0
"""Seconds for which the HTTP client waits for the answer after the drain's own `timeout_s` is over."""


class _Unusable(ValueError):
    """Raised if the command can't do what it was asked for; the message tells the user why."""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Unusable(f"drain: {message}; `paddock drain --help` lists the flags")

    def _check_value(self, action: Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            raise ArgumentError(
                action, f"{value!r} is not known{sources.nearest(str(value), known)}; use one of: {', '.join(known)}"
            )


@dataclass(frozen=True, slots=True)
class Target:
    """The process to drain, and the credential for that: its secret or, if `secret` is empty, an admin's API key."""

    part: str
    url: str
    secret: str
    key: str = ""
    is_own: bool = False
    """Whether the address is this machine's own, from the settings: its certificate is for callers from elsewhere."""
    uds: str = ""
    """The Unix socket on which it listens; empty: it listens on a port."""

    def connection(self, timeout_s: float) -> HTTPConnection:
        parts = urlsplit(self.url)
        if parts.scheme == "https":
            context = ssl.create_default_context()
            if self.is_own:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            return HTTPSConnection(parts.netloc, timeout=timeout_s, context=context)
        connection = HTTPConnection(parts.netloc, timeout=timeout_s)
        if self.uds:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(timeout_s)
            connection.sock.connect(self.uds)
        return connection

    def bearer(self, told: Mapping[str, Any]) -> str:
        """Return the bearer token to send, never the secret itself. `told`: the target's answer to the health check."""
        if not self.secret:
            return self.key
        if self.part == "worker":
            return control.drain_token(self.secret, str(told.get("worker", "")), str(told.get("boot", "")))
        return control.gateway_drain_token(self.secret)


def main(args: Sequence[str], known: Collection[str] = (), parts: Mapping[str, type[PaddockSettings]] = PARTS) -> int:
    """Drain a process and return the exit code. `known`: names of all settings. `parts`: the kinds of process that can
    be drained, each with the class of its settings."""
    if not {"-h", "--help"}.isdisjoint(args):
        print((__doc__ or "").strip())
        return 0
    try:
        options, flags = make_parser(parts).parse_known_args(args)
        reading = sources.read(parts[options.part], flags, prog=f"paddock drain {options.part}", known=known)
        for warning in reading.warnings:
            print(f"paddock: warning: {warning}", file=sys.stderr)
        return _drain(_target(options, reading.settings), options)
    except sources.SettingsError as error:
        return command.complain(error.problems)
    except _Unusable as error:
        return command.complain([str(error)])


def make_parser(parts: Mapping[str, type[PaddockSettings]]) -> ArgumentParser:
    """Return the parser of the flags that are no settings. `parts`: kind of process -> the class of its settings."""
    parser = _Parser(prog="paddock drain", allow_abbrev=False, add_help=False)
    parser.add_argument("part", choices=sorted(parts), metavar="|".join(sorted(parts)))
    parser.add_argument("--url", default="")
    parser.add_argument("--timeout-s", type=_seconds)
    parser.add_argument("--settle-s", type=_seconds)
    return parser


def _seconds(text: str) -> float:
    """Return the seconds that a flag gives. Raises ArgumentTypeError."""
    try:
        return control.seconds_of(text)
    except ValueError as error:
        raise ArgumentTypeError(f"it {error}, and is {text!r}") from None


def _target(options: Namespace, settings: PaddockSettings) -> Target:
    """Return the target that flags and settings name. Raises _Unusable."""
    url = options.url or _own_url(options.part, settings)
    if urlsplit(url).scheme not in ("http", "https"):
        raise _Unusable(f"drain: --url {url!r} is no address; give http://HOST:PORT")
    name, file = SECRETS[options.part]
    secret, key = str(getattr(settings, name)), str(getattr(settings, "api_key", ""))
    secret = secret or secret_file.read(settings.state_dir / file)
    if not secret and not key:
        flag = name.replace("_", "-")
        raise _Unusable(f"drain: {name} is unset, and there is none in the state folder; give --{flag}")
    uds = getattr(settings, "uds", None) if options.part == "gateway" and not options.url else None
    return Target(options.part, url.rstrip("/"), secret, key, not options.url, str(uds or ""))


def _own_url(part: str, settings: PaddockSettings) -> str:
    prefix = "worker_" if part == "worker" else ""
    host, port = str(getattr(settings, f"{prefix}host")), int(getattr(settings, f"{prefix}port"))
    if not port:
        raise _Unusable(f"drain: {prefix}port is 0, so the port is not known; give --url")
    is_encrypted = part == "gateway" and getattr(settings, "tls_cert", None) is not None
    return sockets.url_of(host, port, "https" if is_encrypted else "http")


def _drain(target: Target, options: Namespace) -> int:
    asked = {name: getattr(options, name) for name in ("timeout_s", "settle_s")}
    asked = {name: value for name, value in asked.items() if value is not None}
    try:
        _, alive = _ask(target, "GET", HEALTH_PATH, ANSWER_S)
        path = f"{control.DRAIN_PATH}?{urlencode(asked)}"
        patience_s = asked.get("timeout_s", control.LONGEST_S) + MARGIN_S
        status, told = _ask(target, "POST", path, patience_s, f"Bearer {target.bearer(alive)}")
    except (OSError, HTTPException, ValueError) as error:
        remedy = f"start the {target.part}, or name another with --url"
        print(f"paddock: {target.url} does not answer ({error}); {remedy}", file=sys.stderr)
        return int(Exit.CRASHED)
    if status != 200:
        return command.complain([f"{target.url} refuses to drain ({status}): {_reason(told)}"])
    print(f"paddock: {told['status']} after {told['waited_s']} s, {told['calls']} calls run")
    return int(Exit.OK if told["status"] == "drained" else Exit.DRAIN_CUT)


def _ask(
    target: Target, method: str, path: str, timeout_s: float, authorization: str = ""
) -> tuple[int, dict[str, Any]]:
    """Send a request; return status and JSON. Raises OSError, HTTPException, ValueError (no JSON object, too long)."""
    parts = urlsplit(target.url)
    connection = target.connection(timeout_s)
    try:
        connection.request(method, parts.path + path, headers={"Authorization": authorization} if authorization else {})
        response = connection.getresponse()
        answer = json.loads(response.read(MAX_ANSWER_BYTES))
        if not isinstance(answer, dict):
            raise ValueError("no JSON object")
        return response.status, answer
    finally:
        connection.close()


def _reason(told: dict[str, Any]) -> str:
    error = told.get("error")
    return str(error.get("message") if isinstance(error, dict) else told.get("message", told))
