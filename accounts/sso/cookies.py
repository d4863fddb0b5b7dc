"""Sets the cookies of browsers that sign in: one that binds a sign-in to its browser, one with the session key.

By TLS their names begin with `__Host-`: a browser takes such cookies from no other host and without TLS from nobody.
Source: RFC 6265bis, section 4.1.3.
"""

from __future__ import annotations

from starlette.responses import Response

from accounts.protocol.sign_on import PLAIN_COOKIE, SECURE_COOKIE
from accounts.sso.pending import hashed

LOGIN = "paddock-login-"
"""Beginning of the name of the cookie of one sign-in; some digits of the hash of its state follow, so that several in
one browser do not overwrite each other."""
HOST = "__Host-"
STATE_CHARS = 16


def put_login(response: Response, state: str, value: str, life_s: float, is_secure: bool) -> None:
    """Set the cookie that binds a sign-in to the browser."""
    _put(response, login_name(state, is_secure), value, life_s, is_secure)


def drop_login(response: Response, state: str, is_secure: bool) -> None:
    _put(response, login_name(state, is_secure), "", 0, is_secure)


def put_session(response: Response, key: str, life_s: float, is_secure: bool) -> None:
    """Set the cookie with the session key."""
    _put(response, SECURE_COOKIE if is_secure else PLAIN_COOKIE, key, life_s, is_secure)


def drop_session(response: Response, is_secure: bool) -> None:
    _put(response, SECURE_COOKIE if is_secure else PLAIN_COOKIE, "", 0, is_secure)


def login_of(header: str, state: str, is_secure: bool) -> str:
    """Return the cookie of a sign-in from a request's header `cookie`; empty: there is none."""
    wanted = login_name(state, is_secure)
    parts = (part.strip().partition("=") for part in header.split(";"))
    return next((value for name, _, value in parts if name == wanted), "")


def login_name(state: str, is_secure: bool) -> str:
    return f"{HOST if is_secure else ''}{LOGIN}{hashed(state)[:STATE_CHARS]}"


def _put(response: Response, name: str, value: str, life_s: float, is_secure: bool) -> None:
    response.set_cookie(name, value, max_age=int(life_s), path="/", secure=is_secure, httponly=True, samesite="lax")
