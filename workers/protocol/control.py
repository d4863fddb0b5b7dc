"""Control of gateways and workers beside their calls: proofs that both share a secret, which itself never travels, and
draining.

Each proof is an HMAC-SHA256 under the worker secret. Each use has its own label, so that a stolen proof is good for
nothing else:

    a seal      beside a heartbeat or an entry of news in Redis: a holder of the secret wrote these bytes
    a token     a gateway shows it to a worker, and `paddock drain` to its target; it belongs to one process (boot)
    a proof     a worker's answer to a gateway's challenge: it lives, and knows the secret, before it is sent a prompt

`POST /health/drain`, of gateways and of workers, takes a process out of service and answers when nothing runs there.
`timeout_s` of the query bounds the waiting. A gateway knows `settle_s` too: seconds in which no new request came.
"""

from __future__ import annotations

import hmac
import math

CHALLENGE_HEADER = "paddock-challenge"
"""Header of `GET /v1/events`: words that the gateway chooses, new for each connection."""
PROOF_HEADER = "paddock-proof"
"""Header of the answer: the `proof` of that challenge."""
MAX_CHALLENGE_CHARS = 128

SEAL_BYTES = 32


def seal_heartbeat(secret: str, beat: bytes) -> bytes:
    """Return the seal of an encoded heartbeat, `SEAL_BYTES` long."""
    return _mac(secret, b"paddock heartbeat", beat)


def seal_news(secret: str, news: bytes) -> bytes:
    """Return the seal of an encoded entry of news, `SEAL_BYTES` long."""
    return _mac(secret, b"paddock news", news)


def access_token(secret: str, worker: str, boot: str) -> str:
    """Return the token that gateways show this worker process with each request."""
    return _mac(secret, b"paddock worker access", worker.encode(), boot.encode()).hex()


def drain_token(secret: str, worker: str, boot: str) -> str:
    """Return the token that lets its holder drain this worker process, and nothing else."""
    return _mac(secret, b"paddock worker drain", worker.encode(), boot.encode()).hex()


def gateway_drain_token(secret: str) -> str:
    """Return the token that lets its holder drain any gateway, and nothing else."""
    return _mac(secret, b"paddock gateway drain").hex()


def proof(secret: str, worker: str, boot: str, challenge: str) -> str:
    """Return a worker's answer to a challenge."""
    return _mac(secret, b"paddock worker proof", worker.encode(), boot.encode(), challenge.encode()).hex()


def fits(given: bytes, expected: bytes) -> bool:
    """Return whether two seals, tokens or proofs are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(given, expected)


def _mac(secret: str, use: bytes, *parts: bytes) -> bytes:
    # With their lengths, so that no two lists of parts are the same bytes.
    message = b"".join(len(part).to_bytes(8, "big") + part for part in (use, *parts))
    return hmac.digest(secret.encode(), message, "sha256")


DRAIN_PATH = "/health/drain"
LONGEST_S = 86_400.0
"""Longest time that may be asked for, seconds."""

LEAST_S = 20.0
"""Least seconds for calls after SIGTERM, however long the draining has gone on: the chart kills 30 s after its hook."""


def left_s(bound_s: float, drained_s: float) -> float:
    """Return the seconds left of a bound for draining, when SIGTERM comes `drained_s` after it began; negative: it
    begins now. A hook that waited in vain has used the bound up: calls that go on for longer would be killed.
    """
    return min(bound_s, max(LEAST_S, bound_s - max(0.0, drained_s)))


def seconds_of(text: str) -> float:
    """Return the seconds that a text asks for. Raises ValueError: what it must be."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found <= LONGEST_S:
        raise ValueError(f"must be a number of seconds from 0 to {LONGEST_S:g}")
    return found
