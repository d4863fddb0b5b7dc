"""Makes a secret once and keeps it in a file of the state folder that only the file's owner can read."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

SECRET_BYTES = 32

WORKER_SECRET = "worker-secret"  # noqa: S105 - the names of files
GATEWAY_SECRET = "gateway-secret"  # noqa: S105
CACHE_SECRET = "cache-secret"  # noqa: S105


def made_once(path: Path) -> str:
    """Return the secret in the file; if there is no file, make it with mode 0600. Raises OSError.

    Processes that start at the same time get the same secret: the file appears complete, and is never replaced."""
    while not (found := read(path)):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mode 0600
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_urlsafe(SECRET_BYTES) + "\n")
            os.link(temporary, path)
        except FileExistsError:
            if not read(path):
                raise OSError(None, "the file is empty; remove it", str(path)) from None
        finally:
            os.unlink(temporary)
    return found


def read(path: Path) -> str:
    """Return the secret in the file; empty where there is no file."""
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""
