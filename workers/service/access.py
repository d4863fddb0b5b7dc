"""Checks the tokens of requests to a worker: those of gateways for this process, and one that only drains it."""

from __future__ import annotations

from workers.protocol import proofs
from workers.protocol.drain import DRAIN_PATH

GUARDED = "/v1/"


class WorkerAccess:
    """The tokens of one worker process. A token of another process, or the secret itself, opens nothing."""

    def __init__(self, secret: str, worker: str, boot: str) -> None:
        self._secret, self._worker, self._boot = secret, worker, boot
        self._access = _bearer(proofs.access_token(secret, worker, boot))
        self._drain = _bearer(proofs.drain_token(secret, worker, boot))

    def admits(self, path: str, authorization: bytes) -> bool:
        """Return whether a request for this path may pass. `authorization`: the header's value, empty without one."""
        if path.startswith(GUARDED):
            return proofs.fits(authorization, self._access)
        return not path.startswith(DRAIN_PATH) or proofs.fits(authorization, self._drain)

    def proof(self, challenge: str) -> str:
        """Return the proof to a gateway that this worker knows the secret."""
        return proofs.proof(self._secret, self._worker, self._boot, challenge)


def _bearer(token: str) -> bytes:
    return b"Bearer " + token.encode()
