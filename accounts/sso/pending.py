"""Keeps what is under way in the table `sessions`: sign-ins of browsers, device flows, and codes for programs.

A row is found by the hash of a secret that only its owner holds, and is taken out when it is used: no secret works
twice.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from typing import Any, TypeVar

import msgspec
from sqlalchemy import ColumnElement, delete, insert, select

from accounts.database.database import Database
from accounts.database.schema import sessions
from accounts.oidc.people import Person

SECRET_BYTES = 32


class Login(msgspec.Struct, frozen=True, kw_only=True, tag="login"):
    """A browser that was sent to the provider. Its secret is the `state`."""

    browser: str
    """SHA-256 of the cookie that it got: the state is refused without that cookie."""
    issuer: str
    nonce: str
    code_verifier: str
    redirect_uri: str
    return_to: str = ""
    """Address to which it is sent in the end; empty: a page that says that it is signed in."""
    code_challenge: str = ""
    """Code challenge of the program that sent it and waits at `return_to`; empty: no program did."""


class Device(msgspec.Struct, frozen=True, kw_only=True, tag="device"):
    """A device flow that a program has begun. Its secret is the `device_code` that the program got."""

    issuer: str
    device_code: str
    """The provider's own device code."""


class Handover(msgspec.Struct, frozen=True, kw_only=True, tag="handover"):
    """A person who is signed in, whose program has yet to fetch the key. Its secret is the `code` that it got."""

    person: Person
    code_challenge: str


Waiting = Login | Device | Handover
WaitingT = TypeVar("WaitingT", Login, Device, Handover)

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Waiting).decode


class Pending:
    """Sign-ins under way. Its methods block."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, waiting: Waiting, life_s: float, secret: str = "") -> str:
        """Keep it for so many seconds, and return the secret by which it is found again; by default a new one."""
        secret = secret or new_secret()
        value, expires_at = _encode(waiting).decode(), time.time() + life_s
        kind = _tag(type(waiting))
        with self._database.transaction() as connection:
            connection.execute(
                insert(sessions).values(id=hashed(secret), kind=kind, value=value, expires_at=expires_at)
            )
        return secret

    def find(self, secret: str, kind: type[WaitingT]) -> WaitingT | None:
        """Return what is kept for a secret; None: there is nothing, or it has expired."""
        with self._database.reading() as connection:
            row = connection.execute(select(sessions).where(*_of(secret, kind))).first()
        return _read(row, kind)

    def take(self, secret: str, kind: type[WaitingT]) -> WaitingT | None:
        """Return what is kept for a secret, and forget it: a second call with the same one gets None."""
        with self._database.transaction() as connection:
            row = connection.execute(select(sessions).where(*_of(secret, kind))).first()
            removed = connection.execute(delete(sessions).where(*_of(secret, kind)))
        return _read(row, kind) if removed.rowcount else None

    def sweep(self) -> None:
        """Forget what has expired."""
        kinds = [_tag(each) for each in (Login, Device, Handover)]
        with self._database.transaction() as connection:
            connection.execute(delete(sessions).where(sessions.c.expires_at < time.time(), sessions.c.kind.in_(kinds)))


def new_secret() -> str:
    return secrets.token_urlsafe(SECRET_BYTES)


def hashed(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _tag(kind: type[Waiting]) -> str:
    return str(kind.__struct_config__.tag)


def _of(secret: str, kind: type[Waiting]) -> tuple[ColumnElement[bool], ...]:
    return (sessions.c.id == hashed(secret), sessions.c.kind == _tag(kind))


def _read(row: Any, kind: type[WaitingT]) -> WaitingT | None:
    if row is None or row.expires_at < time.time():
        return None
    found = _decode(row.value)
    return found if isinstance(found, kind) else None
