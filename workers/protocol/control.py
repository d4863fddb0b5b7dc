"""Proves that gateways and workers share a secret, without sending it. Also bounds how long draining may take.

The secret is proved by values of three kinds, each an HMAC-SHA256 under the worker secret. Each use has a label of its
own, so that a value that was stolen from one use is good for no other:

    a seal      stands beside a heartbeat or `News` in Redis and shows that their writer holds the secret
    a token     sent by gateways that ask a worker, and by `paddock drain`; each worker process (boot) has its own
    a proof     a worker's reply to a gateway's challenge: it runs and knows the secret. Only then it is sent prompts

`POST /health/drain`, of gateways and of workers, takes a process out of service and answers when nothing runs there.
`timeout_s` in the query bounds the wait. A gateway also takes `settle_s`: it waits until no new request has come for
so many seconds.

`POST /v1/leave`, of workers, is how gateways have one drained and started anew: it is answered at once with `Leaving`.
The worker takes no new calls from then on, and ends with `Exit.DRAINED` when the last one that it has is done, however
long that takes; whoever keeps its process starts another one.
"""

from __future__ import annotations

import hmac
import math

import msgspec

CHALLENGE_HEADER = "paddock-challenge"
"""Request header of `GET /v1/events`: a text that the gateway makes up anew for each connection."""
PROOF_HEADER = "paddock-proof"
"""Response header of `GET /v1/events`: the `proof` for the request's challenge."""
MAX_CHALLENGE_CHARS = 128

SEAL_BYTES = 32


def seal_heartbeat(secret: str, beat: bytes) -> bytes:
    """Return the seal of an encoded heartbeat, `SEAL_BYTES` long."""
    return _mac(secret, b"paddock heartbeat", beat)


def seal_news(secret: str, news: bytes) -> bytes:
    """Return the seal of an encoded `heartbeat.News`, `SEAL_BYTES` long."""
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
LEAVE_PATH = "/v1/leave"


class Leaving(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `POST /v1/leave`."""

    boot: str
    """Id of the process that leaves."""
    num_calls: int
    """Calls that it finishes first."""


decode_leaving = msgspec.json.Decoder(Leaving).decode

LONGEST_S = 86_400.0
"""Maximum of the query parameters `timeout_s` and `settle_s` of a drain request, seconds."""

LEAST_S = 20.0
"""Minimum seconds that calls get after SIGTERM, however long draining took before it. The Helm chart kills a process
30 s after its preStop hook."""


def left_s(bound_s: float, drained_s: float) -> float:
    """Return the seconds that calls get after SIGTERM: `bound_s` less `drained_s`, but at least `LEAST_S` and never
    more than `bound_s`. `drained_s`: seconds since draining began, as in a preStop hook; negative: it begins now."""
    return min(bound_s, max(LEAST_S, bound_s - max(0.0, drained_s)))


def seconds_of(text: str) -> float:
    """Return the seconds that `text` gives, 0 to `LONGEST_S`. Raises ValueError, whose message says what is allowed."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found <= LONGEST_S:
        raise ValueError(f"must be a number of seconds from 0 to {LONGEST_S:g}")
    return found
