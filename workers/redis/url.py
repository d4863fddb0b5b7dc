"""Reads from a URL where a Redis is and how to connect to it: a single server, Sentinels or a Cluster.

    redis://[user[:password]@]host[:port][/db]                          rediss:// with TLS
    unix://[user[:password]@]/path[?db=]
    redis+sentinel://[user[:password]@]host[:port],...[/service[/db]]   rediss+sentinel:// with TLS
    redis+cluster://[user[:password]@]host[:port],...                   rediss+cluster:// with TLS

No message of this module contains a password, a user's name or a part of the URL that might be either.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, unquote

Kind = Literal["server", "socket", "sentinel", "cluster"]

SCHEMES: Mapping[str, tuple[Kind, bool]] = {
    "redis": ("server", False),
    "rediss": ("server", True),
    "unix": ("socket", False),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
"""Scheme -> the kind of Redis it names, and whether TLS is used."""

PORT = 6379
SENTINEL_PORT = 26379
SERVICE = "mymaster"

TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname", "ssl_cert_reqs")
SENTINEL_OPTIONS = ("service", "sentinel_username", "sentinel_password")

YES = frozenset({"1", "true", "yes", "on"})
NO = frozenset({"0", "false", "no", "off"})


class BadRedisUrl(ValueError):
    """The URL can't be used; the message names the part at fault and the remedy, and contains no secret."""


@dataclass(frozen=True, slots=True)
class Login:
    """The login of a Redis or of the Sentinels; empty: none is needed."""

    username: str = ""
    password: str = ""

    def __repr__(self) -> str:
        return f"Login({'given' if self.username or self.password else 'none'})"


@dataclass(frozen=True, slots=True)
class Tls:
    """How the server's certificate is verified, and our own certificate."""

    ca_certs: str = ""
    """File of trusted certificates; empty: the system's."""
    certfile: str = ""
    """File of our own certificate, with its key in `keyfile`; empty: the server asks for none."""
    keyfile: str = ""
    check_hostname: bool = True
    verify: bool = True
    """False: any certificate is accepted."""

    @property
    def files(self) -> dict[str, str]:
        """The files that are given: name of the option -> path."""
        paths = {"ssl_ca_certs": self.ca_certs, "ssl_certfile": self.certfile, "ssl_keyfile": self.keyfile}
        return {option: path for option, path in paths.items() if path}


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """The parts of a Redis URL."""

    kind: Kind
    hosts: tuple[tuple[str, int], ...] = ()
    """Host and port: the server, the Sentinels, or some nodes of the Cluster."""
    path: str = ""
    """Path of the Unix socket."""
    db: int = 0
    login: Login = Login()
    tls: Tls | None = None
    service: str = ""
    """The Sentinels' name for the master."""
    sentinel_login: Login = Login()


def parse(url: str) -> RedisUrl:
    """Return the parts of a URL. Raises BadRedisUrl."""
    scheme, mark, rest = url.partition("://")
    if not mark or scheme.lower() not in SCHEMES:
        known = [f"{name}://" for name in SCHEMES]
        raise BadRedisUrl(f"must begin with {', '.join(known[:-1])} or {known[-1]}")
    kind, encrypted = SCHEMES[scheme.lower()]
    rest, _, query = rest.partition("?")
    who, _, place = rest.rpartition("@")
    options = _options(query, kind, encrypted)
    login = Login(*(unquote(part) for part in who.partition(":")[::2]))
    tls = _tls(options) if encrypted else None
    if kind == "socket":
        if not place.startswith("/"):
            raise BadRedisUrl("the path of a unix:// URL must be whole: unix:///run/redis.sock")
        return RedisUrl(kind, path=unquote(place), db=_db(options.get("db", "")), login=login)
    authority, _, path = place.partition("/")
    hosts = _hosts(authority, kind)
    service, db = _names(kind, path, options)
    sentinel = Login(options.get("sentinel_username", ""), options.get("sentinel_password", ""))
    return RedisUrl(kind, hosts, db=db, login=login, tls=tls, service=service, sentinel_login=sentinel)


def checked(url: str) -> RedisUrl:
    """Return what `parse` returns, after checking that the files named in the URL can be read: the error of a failed
    connection would not name the unreadable file. Raises BadRedisUrl."""
    place = parse(url)
    for option, path in (place.tls.files if place.tls else {}).items():
        try:
            Path(path).expanduser().open("rb").close()
        except OSError as error:
            raise BadRedisUrl(f"{option}: {path}: {error.strerror}; name a readable file") from None
    return place


def masked(url: str) -> str:
    """Return the URL with its passwords masked, even if it can't be parsed."""
    covered = re.sub(r"(://[^:/@?]*):.*@", r"\1:********@", url, flags=re.DOTALL)
    return re.sub(r"([?&][^=&]*password=)[^&]*", r"\1********", covered, flags=re.IGNORECASE)


def _options(query: str, kind: Kind, encrypted: bool) -> dict[str, str]:
    known = ["db", *(TLS_OPTIONS if encrypted else ()), *(SENTINEL_OPTIONS if kind == "sentinel" else ())]
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in options:
            raise BadRedisUrl(f"the option {name} is given twice; give it once")
        if name not in known:
            raise BadRedisUrl(f"{_unknown(name, known)}; docs/redis.md lists them")
        options[name] = value
    return options


def _unknown(name: str, known: Sequence[str]) -> str:
    if name in TLS_OPTIONS:
        return f"the option {name} needs TLS: a scheme that begins with rediss"
    if name in SENTINEL_OPTIONS:
        return f"the option {name} is for redis+sentinel:// and rediss+sentinel://"
    close = difflib.get_close_matches(name, known, n=1)
    # An unknown option may be part of a password that contains a `?`, so it is not repeated.
    return f"there is an unknown option (did you mean {close[0]}?)" if close else "there is an unknown option"


def _tls(options: Mapping[str, str]) -> Tls:
    verify = options.get("ssl_cert_reqs", "required").lower()
    if verify not in ("required", "none"):
        raise BadRedisUrl("the option ssl_cert_reqs is required or none")
    if options.get("ssl_keyfile") and not options.get("ssl_certfile"):
        raise BadRedisUrl("the option ssl_keyfile belongs to a certificate: give ssl_certfile as well")
    return Tls(
        options.get("ssl_ca_certs", ""),
        options.get("ssl_certfile", ""),
        options.get("ssl_keyfile", ""),
        verify == "required" and _yes(options, "ssl_check_hostname"),
        verify == "required",
    )


def _yes(options: Mapping[str, str], name: str) -> bool:
    value = options.get(name, "yes").lower()
    if value not in YES | NO:
        raise BadRedisUrl(f"the option {name} is yes or no")
    return value in YES


def _hosts(authority: str, kind: Kind) -> tuple[tuple[str, int], ...]:
    usual = SENTINEL_PORT if kind == "sentinel" else PORT
    hosts = tuple(_host(text, usual) for text in authority.split(",")) if authority else (("localhost", usual),)
    if kind == "server" and len(hosts) > 1:
        raise BadRedisUrl(
            f"{len(hosts)} hosts are named and redis:// is one server; use redis+sentinel:// or redis+cluster://"
        )
    return hosts


def _host(text: str, usual: int) -> tuple[str, int]:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^:\[\]]+)?(?::(\d*))?", text)
    if found is None:
        raise BadRedisUrl("a host is not host, host:port or [IPv6]:port; a password's own : / @ ? # are written as %XX")
    port = int(found[2] or usual)
    if not 0 < port < 65536:
        raise BadRedisUrl("a port is not a number from 1 to 65535")
    return unquote(found[1] or "localhost").strip("[]"), port


def _names(kind: Kind, path: str, options: Mapping[str, str]) -> tuple[str, int]:
    """Return the Sentinels' name for the master (empty for other kinds), and the number of the database."""
    parts = [unquote(part) for part in path.split("/") if part]
    service = ""
    if kind == "sentinel":
        service = options.get("service") or (parts.pop(0) if parts and not parts[0].isdigit() else SERVICE)
    if len(parts) > 1:
        raise BadRedisUrl("there is more behind the hosts than a database's number")
    db = _db(options.get("db") or (parts[0] if parts else ""))
    if kind == "cluster" and db:
        raise BadRedisUrl("a Cluster has database 0 only; leave the number out")
    return service, db


def _db(text: str) -> int:
    if text and not text.isdigit():
        raise BadRedisUrl("the database is not a number; it stands last, as in redis://host:6379/0")
    return int(text or 0)
