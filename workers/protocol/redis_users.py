"""The rights of Paddock's Redis users: one for gateways, one for workers, each with no more than it needs.

A worker parses models and prompts of strangers in C++. Should one be taken over, its login writes no API key, reads no
stored response, and changes no queue: it reaches the records that workers keep of themselves, and nothing else.
Supervisors keep workers, and log in as workers do. The rules are those of Redis 6.2, where a name may be read and
written or neither; scripts run with the rights of their caller.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Literal

from workers.protocol import keys

Role = Literal["gateway", "worker"]
ROLES: tuple[Role, ...] = ("gateway", "worker")

_ANY = "*"
_NAMES: Mapping[Role, tuple[str, ...]] = {
    "gateway": ("pd:*",),
    "worker": (
        keys.MODELS,
        keys.NEWS,
        keys.workers(_ANY),
        keys.worker(_ANY, _ANY),
        keys.gateway(_ANY),  # whether it still beats
        # For supervisors: the models that they keep, and those that an admin has unloaded.
        keys.supervised(_ANY),
        keys.unloaded(_ANY),
    ),
}
_CHANNELS: Mapping[Role, tuple[str, ...]] = {"gateway": ("pd:*",), "worker": (keys.FLEET_CHANNEL,)}

_CONNECTING = (
    "hello select ping echo client|setname client|id command asking readonly readwrite "
    "cluster|slots cluster|nodes cluster|info cluster|keyslot cluster|myid cluster|shards"
)
_COMMANDS: Mapping[Role, str] = {
    "gateway": (
        "del exists get set setnx mget incr incrby expire pexpire pttl time multi exec discard "
        "publish subscribe unsubscribe "
        "hdel hexists hget hgetall hincrby hincrbyfloat hkeys hmget hset hsetnx sadd scard smembers srem "
        "xadd xlen xrange xread xrevrange xtrim zadd zcard zcount zrange zrangebyscore zrank zrem zremrangebyscore "
        "zscore eval evalsha script|load"
    ),
    "worker": "del exists type set setrange strlen pexpire hget hset sadd scard xadd publish multi exec discard",
}


def user_of(role: Role) -> str:
    """Return the name of the role's user."""
    return f"paddock-{role}"


def rules_of(role: Role) -> str:
    """Return the user's rights as `ACL SETUSER`, `redis.conf` and ACL files have them, without a password."""
    words = ["resetkeys", *(f"~{name}" for name in _NAMES[role])]
    words += ["resetchannels", *(f"&{channel}" for channel in _CHANNELS[role])]
    words += ["-@all", *(f"+{command}" for command in f"{_CONNECTING} {_COMMANDS[role]}".split())]
    return " ".join(words)


def user_line(role: Role, password: str) -> str:
    """Return the line that makes the user in `redis.conf` or an ACL file; it holds the password's SHA-256 only."""
    return f"user {user_of(role)} on #{_digest(password)} {rules_of(role)}"


def operator_line(password: str) -> str:
    """Return the line for the user of clients that give no name: with the password it may do everything."""
    return f"user default on #{_digest(password)} ~* &* +@all"


def derived_password(secret: str, user: str) -> str:
    """Return the default password of a user, made from a secret that those who may log in have."""
    return hmac.digest(secret.encode(), f"paddock redis {user}".encode(), "sha256").hex()


def _digest(password: str) -> str:
    return hashlib.sha256(password.encode()).hexdigest()
