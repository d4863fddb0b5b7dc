"""Keeps the keys of `paddock login` in a file of the state folder that only its owner can read.

A key belongs to the address that it was given for, and is never sent to another one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

FILE_NAME = "logins.json"
DEFAULT_PORTS = {"http": 80, "https": 443}


class Login(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A key that is kept, and whose it is as far as the gateway said."""

    key: str
    user: str = ""
    team: str = ""
    role: str = ""
    expires_at: float | None = None
    """Unix time; None: it is not known to expire."""


class _Document(msgspec.Struct, frozen=True, kw_only=True):
    last: str = ""
    logins: dict[str, Login] = {}


class LoginsUnreadable(ValueError):
    """The file is there and can't be used; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Logins:
    """The kept keys, as they were read from a file."""

    path: Path
    last: str = ""
    """The address of the last login; empty: there is none."""
    by_address: Mapping[str, Login] = field(default_factory=dict)

    def at(self, url: str) -> Login | None:
        """Return the login at an address; None: there is none."""
        return self.by_address.get(address_of(url))

    def keep(self, url: str, login: Login) -> None:
        """Keep a login in the file, in place of an earlier one at its address. Raises OSError."""
        address = address_of(url)
        self._write(_Document(last=address, logins={**self.by_address, address: login}))

    def forget(self, url: str) -> None:
        """Remove the login at an address from the file. Raises OSError."""
        left = {address: login for address, login in self.by_address.items() if address != address_of(url)}
        self._write(_Document(last=self.last if self.last in left else next(iter(left), ""), logins=left))

    def _write(self, document: _Document) -> None:
        """Replace the file as a whole, with mode 0600."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{FILE_NAME}-")  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(document) + b"\n")
            os.replace(temporary, self.path)
        except OSError:
            os.unlink(temporary)
            raise


def read(state_dir: Path) -> Logins:
    """Return what the file in a state folder keeps; nothing if there is no file. Raises LoginsUnreadable."""
    path = state_dir.expanduser() / FILE_NAME
    try:
        document = msgspec.json.decode(path.read_bytes(), type=_Document)
    except FileNotFoundError:
        return Logins(path)
    except (OSError, msgspec.DecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise LoginsUnreadable(f"{path} can't be read ({why}); remove it, and run `paddock login` again") from None
    return Logins(path, document.last, document.logins)


def address_of(url: str) -> str:
    """Return an address in the one form that logins are kept by: without `/v1`, with a port, in lower case."""
    parts = urlsplit((url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1"))
    netloc = parts.netloc.rpartition("@")[2].lower()
    _, colon, port = netloc.rpartition(":")
    if not colon or not port.isdecimal():
        netloc = f"{netloc}:{DEFAULT_PORTS.get(parts.scheme.lower(), 0)}"
    return f"{parts.scheme.lower()}://{netloc}{parts.path.rstrip('/')}"
