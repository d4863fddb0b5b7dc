"""Carries out `paddock login` and `paddock logout`: keeps a key for later commands, one key for each address.

A person signs in by a browser on this machine, which comes back to a port of this program (RFC 8252), or anywhere else
by a code (RFC 8628); both end in a key that expires. A key that exists already is read from standard input.
"""

from __future__ import annotations

import base64
import getpass
import hashlib
import secrets
import sys
import threading
import time
import webbrowser
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from gateway.client import AuthenticationFailed, BadRequest, ClientError, NotFound, NotSupported
from gateway.client.request import Request
from gateway.commands.accounts.api import AdminApi, path_of
from gateway.commands.accounts.parser import Call, Result, Unusable, add_command
from gateway.commands.logins import Login
from workers.commands import layout

SIGN_IN_S = 600.0
"""Seconds that a person has to sign in."""
STDIN = "-"
REDIRECTS = frozenset({200, 302, 303})
"""Answers of the page at which signing in begins: it leads to the provider, or lets people choose one."""
DONE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Paddock</title>
<p>{}</p><p>You may close this page, and go back to the terminal.</p></html>"""


def add_login(parsers: Any, name: str, about: str) -> None:
    """Add `paddock login`."""
    parser = add_command(parsers, name, _log_in, about)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--device", action="store_true", help="sign in on another device, by a code that is shown")
    ways.add_argument(
        "--key", metavar=STDIN, choices=(STDIN,), help=f"`{STDIN}`: keep the key that comes in on standard input"
    )
    parser.add_argument("--provider", metavar="NAME", help="identity provider to sign in at, if there are several")


def add_logout(parsers: Any, name: str, about: str) -> None:
    """Add `paddock logout`."""
    add_command(parsers, name, _log_out, about)


def _log_in(call: Call) -> Result:
    if call.options.key:
        login = _given_key(call)
    else:
        with call.api.with_key("") as api:
            login = _by_device(call, api) if call.options.device else _by_browser(call, api)
    call.logins.keep(call.address, login)
    role = f"{login.role} in the team {login.team}" if login.team else login.role
    who = f"You are {login.user}" if login.user else "The key is valid"
    until = f" until {layout.write_time(login.expires_at)}" if login.expires_at else ""
    kept = f"The key for {call.address} is kept in {call.logins.path}{until}."
    return Result(None, f"{who}{f': {role}' if role else ''}.\n{kept}")


def _log_out(call: Call) -> Result:
    """Forget the key, and end its session if the gateway can be reached."""
    login = call.logins.at(call.address)
    if login is None:
        known = ", ".join(call.logins.by_address) or "none"
        raise Unusable(f"logout: no key is kept for {call.address}; give the address with --url. Kept are: {known}")
    call.logins.forget(call.address)
    removed = f"The key for {call.address} is removed."
    try:
        with call.api.with_key(login.key) as api:
            answer = api.post("/auth/logout")
    except AuthenticationFailed:
        return Result(None, f"{removed} It was not valid any more.")
    except ClientError as error:
        return Result(None, f"{removed} Its session goes on until it expires: {error.message}")
    if answer.document.get("signed_out"):
        return Result(None, f"{removed} Its session has ended.")
    return Result(None, f"{removed} It stays valid until somebody deletes or blocks it.")


def _given_key(call: Call) -> Login:
    """Return the login of a key from standard input, once the gateway has taken it. Raises Unusable, ClientError."""
    typed = getpass.getpass("API key: ") if sys.stdin.isatty() else sys.stdin.read()
    key = typed.strip()
    if not key or len(key.split()) != 1:
        raise Unusable(f"login: no key came in on standard input; `paddock login --key {STDIN} < FILE` sends one")
    with call.api.with_key(key) as api:
        try:
            return _login_of(key, api.get(path_of("whoami")).document)
        except NotSupported:  # without an accounts service nobody knows whose it is
            api.get("/v1/models")
            return Login(key=key)


def _login_of(key: str, told: Mapping[str, Any]) -> Login:
    return Login(
        key=key,
        user=told.get("user") or "",
        team=told.get("team") or "",
        role=told.get("role") or "",
        expires_at=told.get("expires_at"),
    )


def _by_device(call: Call, api: AdminApi) -> Login:
    """Show a code, and return the login once somebody has signed in with it. Raises Unusable, ClientError."""
    body = {"provider": call.options.provider} if call.options.provider else {}
    begun = api.post("/auth/device", body).document
    address = begun.get("verification_uri_complete") or begun["verification_uri"]
    _say(f"Open {begun['verification_uri']} on any device, and enter the code {begun['user_code']}")
    if address != begun["verification_uri"]:
        _say(f"or open {address}")
    interval_s, ends_at = float(begun.get("interval", 5)), time.monotonic() + begun["expires_in"]
    while time.monotonic() < ends_at:
        time.sleep(interval_s)
        try:
            session = api.post("/auth/device/token", {"device_code": begun["device_code"]}).document
        except BadRequest as error:
            if error.code == "slow_down":
                interval_s += 5
            elif error.code != "authorization_pending":
                raise
        else:
            return _login_of(session["key"], session)
    raise Unusable("login: nobody signed in with the code in time; begin again")


def _by_browser(call: Call, api: AdminApi) -> Login:
    """Open a browser, and return the login that it brings back. Raises Unusable, ClientError."""
    verifier, state = secrets.token_urlsafe(32), secrets.token_urlsafe(16)
    with _Return(state) as returned:
        challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).decode().rstrip("=")
        query = {"return_to": returned.address, "code_challenge": challenge}
        if call.options.provider:
            query["provider"] = call.options.provider
        _require_sign_on(api, query)
        url = f"{api.url}/auth/login?{urlencode(query)}"
        _say(f"Sign in with your browser. If it does not open by itself, open this address on this machine:\n{url}")
        # A browser in a terminal stays in front until its user leaves: the answer to it is given meanwhile.
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        found = returned.wait(SIGN_IN_S)
    if "code" not in found:
        why = found.get("error_description") or found.get("error") or "the browser did not come back in time"
        raise Unusable(f"login: {why}; begin again, or sign in on another device with --device")
    session = api.post("/auth/token", {"code": found["code"], "code_verifier": verifier}).document
    return _login_of(session["key"], session)


def _require_sign_on(api: AdminApi, query: Mapping[str, str]) -> None:
    """Raise if the gateway has no single sign-on: a browser would show that, and this program wait in vain."""
    try:
        api.send(Request("GET", "/auth/login", lambda body: body, query, read_at=REDIRECTS))
    except NotFound:
        raise Unusable(
            f"login: {api.url} has no such single sign-on; keep a key with "
            f"`paddock login --key {STDIN}`, or name the --provider"
        ) from None


def _say(text: str) -> None:
    """Tell the person what to do meanwhile; standard output is for the result."""
    print(text, file=sys.stderr, flush=True)


class _Return:
    """The port of this program that the browser comes back to, with what it brings in its query."""

    def __init__(self, state: str) -> None:
        """`state`: a secret in the address, without which nobody else's request counts."""
        self._state = state
        self._found: dict[str, str] = {}
        returned = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                told = returned.take(self.path).encode()
                self.send_response(200)
                self.send_header("content-type", "text/html; charset=utf-8")
                self.send_header("content-length", str(len(told)))
                self.send_header("cache-control", "no-store")
                self.send_header("content-security-policy", "default-src 'none'")
                self.end_headers()
                self.wfile.write(told)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> _Return:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.server_close()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/?{urlencode({'state': self._state})}"

    def wait(self, seconds: float) -> dict[str, str]:
        """Return the query that the browser brought; empty: it did not come in time."""
        ends_at = time.monotonic() + seconds
        while not self._found and (left := ends_at - time.monotonic()) > 0:
            self._server.timeout = left
            self._server.handle_request()
        return self._found

    def take(self, path: str) -> str:
        """Keep the query of a request if it is the one waited for, and return the page that answers it."""
        query = {name: found[0] for name, found in parse_qs(urlsplit(path).query).items()}
        if not secrets.compare_digest(query.get("state", "").encode(), self._state.encode()):
            return DONE.format("This is not the sign-in that the terminal waits for.")
        self._found = query
        return DONE.format("You are signed in." if "code" in query else "You are not signed in.")
