"""The records of access: keys, teams, users, aliases, organisations and prices. Each says what its holder may do.

A record in Redis is sealed:

    <64 hexadecimal digits> <the record, JSON>

The seal is made with the gateway secret, so that only holders of the secret can make keys. It covers the bytes of the
JSON, so that a record stays valid in versions that add fields. A key's record has its hash instead of the key.
"""

from __future__ import annotations

import hashlib
import hmac
from ipaddress import ip_network
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from workers.models.prices import Rates

FIRST_KEY_NAME = "first"
SESSION_PREFIX = "session-"
"""Beginning of the names of keys of people who have signed in."""
PERSON_PREFIX = "user:"
"""Beginning of the key id of calls with a token of an identity provider; the user's name follows."""
RESERVED_PREFIXES = (SESSION_PREFIX, PERSON_PREFIX)
"""Beginnings that no other key's name may have: usage, limits and audit would take it for a person's."""
DEFAULT_TEAM = "default"
DEFAULT_ORGANISATION = "default"
LEAST_WEIGHT = 0.001
MOST_WEIGHT = 1000.0
MOST_URGENT_PRIORITY = -100
"""The lowest, and so most urgent, `priority` number that a request may name."""
MAX_NAME_CHARS = 64
MAX_BUDGETS = 4
"""Maximum number of budgets of one subject: each is a counter that every call of the subject reads."""

Role = Literal["admin", "manager", "user", "metrics"]
"""The rights of a key or person: everything; the keys and usage of its own team; calls; `/metrics` alone."""
SubjectKind = Literal["organisation", "team", "user", "key", "alias"]
"""The kinds of subject. A subject is whoever limits and budgets count for."""
Period = Literal["day", "week", "month"]

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Names = Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=1000)]
Count = Annotated[int, Meta(ge=1, le=1 << 53)]
FewObjects = Annotated[int, Meta(ge=1, le=10_000)]
"""The number of objects that are looked at one by one: as many as the setting of the same objects may allow."""


class Budget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The money that a subject may spend per period, in the currency of the price list."""

    amount: Annotated[float, Meta(gt=0, le=1e6)]
    period: Period = "month"
    time_zone: Annotated[str, Meta(min_length=1, max_length=64)] = "UTC"
    """IANA name. Periods begin at midnight there; weeks on Monday."""
    warn_at: Annotated[tuple[Annotated[float, Meta(gt=0, le=1)], ...], Meta(max_length=8)] = (0.8,)
    """Shares of the amount at which a warning is sent, each once per period."""
    refuses: bool = True
    """Whether calls are refused once the amount is spent, until the next period; otherwise there are warnings only."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The limits of one subject, over all gateways; None: no limit."""

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    """Prompt and completion tokens together; cached ones count as well."""
    tokens_per_day: Count | None = None
    tokens_per_month: Count | None = None
    """Days and months are those of UTC."""
    max_parallel: Count | None = None
    """Maximum calls under way at once."""
    max_prompt_tokens: Count | None = None
    max_tokens: Count | None = None
    """Maximum tokens of one answer, and the default if the request names no limit."""
    budgets: Annotated[tuple[Budget, ...], Meta(max_length=MAX_BUDGETS)] = ()


class TeamLimits(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The limits of a team or an organisation: those of its calls, and of what each team stores.

    The least of a team's and its organisation's replaces the setting for that team; None: the setting holds."""

    stored_responses: Count | None = None
    """Most stored responses of a team; the oldest make room. No setting limits their number."""
    stored_response_bytes: Annotated[int, Meta(ge=0, le=1 << 53)] | None = None
    """Most bytes of a team's stored responses, in place of `responses_bytes_per_team`; 0 stores none."""
    resumable_streams: FewObjects | None = None
    """Most streams of a team that outlive their connections, at a time, in place of `resume_streams_per_team`."""
    resumable_stream_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 53)] | None = None
    """Most bytes of such streams, in place of `resume_bytes_per_team`."""
    saved_slots: FewObjects | None = None
    """Most files of a team in a folder of saved slots, in place of the workers' `slot_saves_per_team`."""
    saved_slot_bytes: Count | None = None
    """Most bytes of such files, in place of the workers' `slot_save_mib_per_team`."""


NO_LIMITS = Limits()
NO_TEAM_LIMITS = TeamLimits()
STORAGE_LIMITS = tuple(name for name in TeamLimits.__struct_fields__ if name not in Limits.__struct_fields__)
"""The fields of `TeamLimits` about what a team stores."""


class AccessRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The record of one key, in the settings (`api_keys`) and in Redis (`pd:keys`)."""

    name: Name
    """Id of the key, shown in logs."""
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the key's UTF-8 bytes, lower-case hexadecimal. Keys are long and random: they need no salt."""
    team: Name = DEFAULT_TEAM
    """The team (tenant) of the key. Cached prompts are shared only within a team. Also a label of metrics."""
    aliases: Names | None = None
    """Model names that the key may use, and LoRA adapters that it may name; null: all that its team may."""
    admin: bool = False
    """Whether the key's role is `admin`: short for `role`, as in the settings."""
    weight: Annotated[float, Meta(ge=LEAST_WEIGHT, le=MOST_WEIGHT)] = 1.0
    """Share of the key's team while calls of several teams wait for a model: weight 3 gets three times as many tokens
    as weight 1. Each call has the weight of its own key."""

    min_priority: Annotated[int, Meta(ge=MOST_URGENT_PRIORITY, le=-MOST_URGENT_PRIORITY)] = 0
    """Lowest (most urgent) `priority` number of the key's calls; a lower one is raised to it. Admin keys use any."""
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Maximum tokens of one answer, and the default if the request names no limit; null: the model's context."""
    answer_timeout_s: Annotated[float, Meta(gt=0)] | None = None
    """Maximum seconds from an answer's first token to its end; null: the setting `answer_timeout_s`."""

    role: Role | None = None
    """The key's rights; null: `admin` if that is set, else `user`."""
    user: Annotated[str, Meta(max_length=256)] = ""
    """Id of the user whose key this is; empty: it is a service's."""
    blocked: bool = False
    """Whether calls with the key are refused for now."""
    expires_at: float | None = None
    """Unix time after which the key is not valid; null: never."""
    previous_sha256: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    """Hash of the key that this one replaced in a rotation; empty: none is valid any more."""
    previous_until: float = 0.0
    """Unix time until which the replaced key is still valid."""
    networks: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=100)] = ()
    """Networks (CIDR) that the key may be used from; empty: all."""
    names_end_users: bool = False
    """Whether the key is trusted to name the end user of each call, whose usage is then counted apart."""
    limits: Limits = NO_LIMITS

    def __post_init__(self) -> None:
        for network in self.networks:
            try:
                ip_network(network, strict=False)
            except ValueError:
                raise ValueError(
                    f"networks: {network!r} is no network; write `10.1.0.0/16` or `2001:db8::/32`"
                ) from None

    @property
    def granted_role(self) -> Role:
        return self.role or ("admin" if self.admin else "user")


class OrganisationRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="organisation"):
    """An organisation: teams that share limits."""

    name: Name
    blocked: bool = False
    limits: TeamLimits = NO_TEAM_LIMITS


class TeamRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="team"):
    """A team (tenant)."""

    name: Name
    organisation: Name = DEFAULT_ORGANISATION
    aliases: Names | None = None
    """Model names and adapters that the team's keys may use; null: all."""
    blocked: bool = False
    limits: TeamLimits = NO_TEAM_LIMITS


class UserRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="user"):
    """A person, known by single sign-on or made by an admin."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    """Id of the user: an email address, or whatever the identity provider's rule names."""
    teams: Annotated[dict[Name, Role], Meta(max_length=100)] = {}
    """Team -> the user's role there: `manager` or `user`."""
    admin: bool = False
    blocked: bool = False
    limits: Limits = NO_LIMITS


class AliasRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="alias"):
    """The limits of all calls of one model name together."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    limits: Limits = NO_LIMITS


class Price(Rates, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The price of a model or an adapter from one day on, in the currency of the price list."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    """A model or adapter; `*`: all that have no price of their own."""
    valid_from: float = 0.0
    """Unix time."""


class PriceListRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="prices"):
    """The price list: gateways compute each call's cost from it."""

    name: Literal["prices"] = "prices"
    currency: Annotated[str, Meta(min_length=1, max_length=16)] = "USD"
    prices: Annotated[tuple[Price, ...], Meta(max_length=10_000)] = ()


SubjectRecord = OrganisationRecord | TeamRecord | UserRecord | AliasRecord | PriceListRecord
"""A record in the Redis hash `keys.ACCESS_SUBJECTS`; its field there is `KIND:NAME`."""


class KeysInvalid(ValueError):
    """The setting `api_keys` can't be used; the message says where the fault is and how to correct it."""


encode_record = msgspec.json.Encoder().encode
decode_record = msgspec.json.Decoder(AccessRecord).decode
decode_subject = msgspec.json.Decoder(SubjectRecord).decode
_decode_records = msgspec.json.Decoder(tuple[AccessRecord, ...]).decode

RecordT = TypeVar("RecordT", bound=msgspec.Struct)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def first_record(key: str) -> AccessRecord:
    """Return the record of the first key, which may do everything."""
    return AccessRecord(name=FIRST_KEY_NAME, sha256=digest(key), admin=True)


def reserved_name(name: str) -> str:
    """Return what is wrong with a key's name that begins as those of signed-in people do."""
    begins = " and ".join(f"`{prefix}`" for prefix in RESERVED_PREFIXES)
    return f"the name {name!r} is reserved: {begins} begin the names of people who have signed in; choose another one"


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
        if name.startswith(RESERVED_PREFIXES):
            raise KeysInvalid(f"api_keys: {reserved_name(name)}")
    return records


class NotSealed(ValueError):
    """The record has no seal made with the gateway secret."""

    def __init__(self) -> None:
        super().__init__(
            "no seal of PADDOCK_GATEWAY_SECRET, the same on all gateways; make the key anew with `paddock keys create`"
        )


def seal_record(record: AccessRecord | SubjectRecord, secret: str) -> bytes:
    """Return the sealed record, as it is stored in the Redis hash of its kind."""
    encoded = encode_record(record)
    return _seal(encoded, secret) + b" " + encoded


def open_record(value: bytes | str, secret: str) -> AccessRecord:
    """Return the record in a value of `keys.ACCESS_KEYS`.

    Raises NotSealed, a ValueError, if the seal is wrong, and ValueError if the value is not a record."""
    return decode_record(_opened(value, secret))


def opened_record(value: bytes) -> AccessRecord:
    """Return the record in a value that `open_record` has opened before, without checking its seal again."""
    return decode_record(value[value.index(b" ") + 1 :])


def open_subject(value: bytes | str, secret: str) -> SubjectRecord:
    """Return the record in a value of `keys.ACCESS_SUBJECTS`. Raises as `open_record` does."""
    record: SubjectRecord = decode_subject(_opened(value, secret))
    return record


def subject_field(record: SubjectRecord) -> str:
    """Return the field of the record in the Redis hash `keys.ACCESS_SUBJECTS`."""
    return f"{record.__struct_config__.tag}:{record.name}"


def is_bare(value: bytes | str) -> bool:
    """Return whether the value is a record without any seal, as earlier versions wrote it."""
    return value.lstrip()[:1] in (b"{", "{")


def _opened(value: bytes | str, secret: str) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()  # the types of the Redis client allow both
    seal, _, encoded = raw.partition(b" ")
    if not hmac.compare_digest(seal, _seal(encoded, secret)):
        raise NotSealed
    return encoded


def _seal(encoded: bytes, secret: str) -> bytes:
    return hmac.digest(secret.encode(), b"paddock access record\0" + encoded, "sha256").hex().encode()
