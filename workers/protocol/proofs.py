"""What gateways and workers prove to each other by the secret that they share, which itself never travels.

Everything here is an HMAC-SHA256 under the worker secret, each use with a label of its own, so that what is learnt of
one is good for nothing else:

    a seal      beside a heartbeat or an entry of news in Redis: a holder of the secret wrote these bytes
    a token     what a gateway shows a worker, and `paddock drain` whom it drains; it belongs to one process (boot)
    a proof     a worker's answer to a gateway's challenge: it lives, and knows the secret, before it is sent a prompt
"""

from __future__ import annotations

import hmac

CHALLENGE_HEADER = "paddock-challenge"
"""Of `GET /v1/events`: words of the gateway's own, new for each connection."""
PROOF_HEADER = "paddock-proof"
"""Of the answer: `proof` of that challenge."""
MAX_CHALLENGE_CHARS = 128

SEAL_BYTES = 32


def seal_heartbeat(secret: str, beat: bytes) -> bytes:
    """Return the seal of an encoded heartbeat, `SEAL_BYTES` long."""
    return _mac(secret, b"paddock heartbeat", beat)


def seal_news(secret: str, news: bytes) -> bytes:
    """Return the seal of an encoded entry of news, `SEAL_BYTES` long."""
    return _mac(secret, b"paddock news", news)


def access_token(secret: str, worker: str, boot: str) -> str:
    """Return what gateways show this process of a worker with each request."""
    return _mac(secret, b"paddock worker access", worker.encode(), boot.encode()).hex()


def drain_token(secret: str, worker: str, boot: str) -> str:
    """Return what has this process of a worker drain, and nothing else."""
    return _mac(secret, b"paddock worker drain", worker.encode(), boot.encode()).hex()


def gateway_drain_token(secret: str) -> str:
    """Return what has any gateway drain, and nothing else."""
    return _mac(secret, b"paddock gateway drain").hex()


def proof(secret: str, worker: str, boot: str, challenge: str) -> str:
    """Return a worker's answer to a challenge."""
    return _mac(secret, b"paddock worker proof", worker.encode(), boot.encode(), challenge.encode()).hex()


def fits(given: bytes, expected: bytes) -> bool:
    """Return whether two seals, tokens or proofs are equal, in a time that does not tell how much of them is."""
    return hmac.compare_digest(given, expected)


def _mac(secret: str, use: bytes, *parts: bytes) -> bytes:
    # With their lengths, so that no two lists of parts are the same bytes.
    message = b"".join(len(part).to_bytes(8, "big") + part for part in (use, *parts))
    return hmac.digest(secret.encode(), message, "sha256")
