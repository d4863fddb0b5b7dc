"""The record of an API key: all that is stored about the key, and its hash instead of the key. In Redis, sealed:

    <64 hexadecimal digits> <the record, JSON>

The seal is made with the gateway secret, so that only holders of the secret can make keys. It covers the bytes of the
JSON, so that a record stays valid in versions that add fields.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.call import CallBounds, Principal

FIRST_KEY_NAME = "first"
DEFAULT_TEAM = "default"
LEAST_WEIGHT = 0.001
MOST_WEIGHT = 1000.0
MOST_URGENT_PRIORITY = -100
"""The lowest, and so most urgent, `priority` number that a request may name."""


class AccessRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record of one key, in the settings (`api_keys`) and in Redis (`pd:keys`)."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    """Id of the key, shown in logs."""
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the key's UTF-8 bytes, lower-case hexadecimal. Keys are long and random: they need no salt."""
    team: Annotated[str, Meta(min_length=1, max_length=64)] = DEFAULT_TEAM
    """The team (tenant) of the key. Cached prompts are shared only within a team. Also a label of metrics."""
    aliases: tuple[str, ...] | None = None
    """Model names that the key may use; null: all."""
    admin: bool = False
    weight: Annotated[float, Meta(ge=LEAST_WEIGHT, le=MOST_WEIGHT)] = 1.0
    """Share of the key's team while calls of several teams wait for a model: weight 3 gets three times as many tokens
    as weight 1. Each call has the weight of its own key."""

    min_priority: Annotated[int, Meta(ge=MOST_URGENT_PRIORITY, le=-MOST_URGENT_PRIORITY)] = 0
    """Lowest (most urgent) `priority` number of the key's calls; a lower one is raised to it. Admin keys use any."""
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Maximum tokens of one answer, and the default if the request names no limit; null: the model's context."""
    answer_timeout_s: Annotated[float, Meta(gt=0)] | None = None
    """Maximum seconds from an answer's first token to its end; null: the setting `answer_timeout_s`."""

    def principal(self) -> Principal:
        aliases = None if self.aliases is None else frozenset(self.aliases)
        min_priority = MOST_URGENT_PRIORITY if self.admin else self.min_priority
        bounds = CallBounds(min_priority, self.max_tokens, self.answer_timeout_s)
        return Principal(self.name, self.team, aliases, self.admin, self.weight, bounds)


class KeysInvalid(ValueError):
    """The setting `api_keys` can't be used; the message says where the fault is and how to correct it."""


encode_record = msgspec.json.Encoder().encode
decode_record = msgspec.json.Decoder(AccessRecord).decode
_decode_records = msgspec.json.Decoder(tuple[AccessRecord, ...]).decode


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def first_record(key: str) -> AccessRecord:
    """Return the record of the first key, which may do everything."""
    return AccessRecord(name=FIRST_KEY_NAME, sha256=digest(key), admin=True)


def read_records(setting: str) -> tuple[AccessRecord, ...]:
    """Return the records in the setting `api_keys`, a JSON list. Raises KeysInvalid."""
    try:
        records = _decode_records(setting.strip() or "[]")
    except msgspec.DecodeError as error:
        raise KeysInvalid(
            f"api_keys: {error}; give a JSON list of {{name, team, sha256, aliases, admin, ...}}, see docs/keys.md"
        ) from None
    names = [record.name for record in records]
    for name in names:
        if names.count(name) > 1 or name == FIRST_KEY_NAME:
            raise KeysInvalid(f"api_keys: the name {name!r} is taken; give each key a name of its own")
    return records


class NotSealed(ValueError):
    """The record has no seal made with the gateway secret."""

    def __init__(self) -> None:
        super().__init__("no seal of PADDOCK_GATEWAY_SECRET, the same on all gateways; write it with `paddock key add`")


def seal_record(record: AccessRecord, secret: str) -> bytes:
    """Return the sealed record, as it is stored in the Redis hash `keys.ACCESS_KEYS`."""
    encoded = encode_record(record)
    return _seal(encoded, secret) + b" " + encoded


def open_record(value: bytes | str, secret: str) -> AccessRecord:
    """Return the record in a value of `keys.ACCESS_KEYS`.

    Raises NotSealed, a ValueError, if the seal is wrong, and ValueError if the value is not a record."""
    raw = value if isinstance(value, bytes) else value.encode()  # the types of the Redis client allow both
    seal, _, encoded = raw.partition(b" ")
    if not hmac.compare_digest(seal, _seal(encoded, secret)):
        raise NotSealed
    return decode_record(encoded)


def is_bare(value: bytes | str) -> bool:
    """Return whether the value is a record without any seal, as earlier versions wrote it."""
    return value.lstrip()[:1] in (b"{", "{")


def _seal(encoded: bytes, secret: str) -> bytes:
    return hmac.digest(secret.encode(), b"paddock access record\0" + encoded, "sha256").hex().encode()
