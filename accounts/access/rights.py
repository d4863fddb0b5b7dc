"""The rights of callers: who may see and change what. Pure: callers hand in all records.

An admin may do everything. A manager may manage the keys of its own team, up to the rights of its own key and the
limits of the team. A user sees its own keys. Nobody makes or opens a key with more rights than its own.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from accounts.errors import Forbidden, Missing
from accounts.protocol.caller import Caller
from accounts.protocol.records import (
    FIRST_KEY_NAME,
    AccessRecord,
    Limits,
    Names,
    Role,
    TeamRecord,
    encode_record,
)

RANKS: dict[Role, int] = {"user": 1, "manager": 2, "admin": 3}
"""Role -> rank; `metrics` has none: only admins give it."""
MAX_RECORD_BYTES = 8 << 10
"""Maximum bytes of the record of a key that no admin makes or changes: Redis and each gateway keep all records in
memory, and the names of a thousand models take 256 KiB."""
COUNTS = tuple(name for name in Limits.__struct_fields__ if name != "budgets")


@dataclass(frozen=True, slots=True)
class Actor:
    """Whoever changes or reads access."""

    name: str
    """`key:NAME`, `user:NAME`, or a part of Paddock, such as `system`: as the audit tells it."""
    role: Role
    team: str = ""
    key: str = ""
    """Name of the API key; empty: none."""
    of_settings: bool = False
    """Whether the key is one of a gateway's settings: a key of its name in the database is another one."""
    user: str = ""
    address: str = ""
    request_id: str = ""

    @property
    def is_admin(self) -> bool:
        return self.role == "admin"


def actor_of(caller: Caller) -> Actor:
    """Return the actor of a request. The caller's role is known."""
    name = f"key:{caller.key}" if caller.key else f"user:{caller.user}"
    return Actor(
        name,
        caller.role or "user",
        caller.team,
        caller.key,
        caller.of_settings,
        caller.user,
        caller.address,
        caller.request_id,
    )


def system(part: str) -> Actor:
    """Return the actor that stands for a part of Paddock."""
    return Actor(part, "admin")


def require_key_current(actor: Actor, own: AccessRecord | None, now: float) -> None:
    """Raise Forbidden if the caller's key has lost since what its gateway knows of it. `own`: its record.

    A gateway may be a second behind: within it, a key that was taken away could make one that stays."""
    if own is None or own.blocked or (own.expires_at is not None and own.expires_at <= now):
        raise Forbidden(f"{actor.name} has just been taken away, blocked, or has expired.")
    if RANKS.get(own.granted_role, 0) < RANKS.get(actor.role, 0) or (own.team != actor.team and not actor.is_admin):
        raise Forbidden(f"{actor.name} has just lost the rights that this takes; send the request again.")


def require_person(actor: Actor, before: str, wanted: str) -> None:
    """Raise Forbidden if a key would become that of another person: its holder would see and use what is theirs, in
    other teams too. `before`: the user whose key it is."""
    if not actor.is_admin and wanted and wanted not in (before, actor.user):
        raise Forbidden(
            f"Only an admin may make a key that counts as {wanted}'s; leave `user` out, for a key of the team.",
            param="user",
        )


def require_admin(actor: Actor, what: str) -> None:
    if not actor.is_admin:
        raise Forbidden(f"Only an admin may {what}; the caller is {actor.name}, a {actor.role}.")


def sees_team(actor: Actor, team: str) -> bool:
    return actor.is_admin or (bool(team) and actor.team == team)


def sees_key(actor: Actor, record: AccessRecord) -> bool:
    """Return whether the caller may see the key: a user its own ones, a manager those of its team."""
    if actor.is_admin:
        return True
    if record.team != actor.team:
        return False
    return actor.role == "manager" or record.name == actor.key or (bool(actor.user) and record.user == actor.user)


def require_key_seen(actor: Actor, record: AccessRecord) -> None:
    """Raise Missing if the key is none of the caller's: that it exists is not told either."""
    if not sees_key(actor, record):
        raise Missing(f"There is no key {record.name!r} that {actor.name} may see.")


def require_key_managed(actor: Actor, record: AccessRecord) -> None:
    """Raise unless the caller may block, change or delete the key."""
    if actor.is_admin:
        return
    require_key_seen(actor, record)
    if actor.role != "manager":
        raise Forbidden(f"Only managers and admins manage keys; {actor.name} is a {actor.role}.")
    if RANKS.get(record.granted_role, 3) > RANKS[actor.role]:
        raise Forbidden(
            f"The key {record.name!r} has the role {record.granted_role}, more than {actor.name} has; ask an admin."
        )


def require_key_opened(actor: Actor, own: AccessRecord | None, team: TeamRecord, record: AccessRecord) -> None:
    """Raise unless the caller may get the secret of a key that exists, as whoever rotates it does."""
    require_key_managed(actor, record)
    if actor.is_admin:
        return
    if record.user and record.user != actor.user:
        raise Forbidden(f"The key {record.name!r} is {record.user}'s own; only an admin may rotate it.")
    require_within(actor, own, team, record)


def require_within(actor: Actor, own: AccessRecord | None, team: TeamRecord, wanted: AccessRecord) -> None:
    """Raise Forbidden if a key would have more rights than the caller. `own`: the record of the caller's key."""
    if actor.is_admin:
        return
    if actor.role != "manager" or wanted.team != actor.team:
        raise Forbidden(f"{actor.name} may make and change keys of its own team only, which is {actor.team!r}.")
    if own is None and actor.key:
        raise Forbidden(
            f"The key {actor.key!r} is not in the database (it may be one of the setting `api_keys`), so its rights "
            "are not known here; manage keys with one that `POST /admin/keys` made."
        )
    own = own or AccessRecord(name="none", sha256="0" * 64, team=actor.team, role=actor.role)
    if RANKS.get(wanted.granted_role, 3) > RANKS[actor.role]:
        raise _more("role", wanted.granted_role, actor.role)
    _require_names(wanted.aliases, own.aliases, "the caller's key")
    _require_names(wanted.aliases, team.aliases, f"the team {team.name!r}")
    _require_numbers(own, wanted)
    _require_networks(own, wanted)
    _require_limits(team.limits, wanted.limits, f"the team {team.name!r}")


def require_small(actor: Actor, before: AccessRecord | None, wanted: AccessRecord) -> None:
    """Raise Forbidden if whoever is no admin makes a key, or lets one grow, beyond MAX_RECORD_BYTES. `before`: the
    record until now; None: the key is new."""
    num_bytes = len(encode_record(wanted))
    most = MAX_RECORD_BYTES if before is None else max(MAX_RECORD_BYTES, len(encode_record(before)))
    if not actor.is_admin and num_bytes > most:
        raise Forbidden(
            f"The record of the key {wanted.name!r} has {num_bytes} bytes, more than the {MAX_RECORD_BYTES} that a "
            "manager's may have; name fewer `aliases` and `networks`, or ask an admin.",
            param="aliases",
        )


def _require_numbers(own: AccessRecord, wanted: AccessRecord) -> None:
    if wanted.weight > own.weight:
        raise _more("weight", wanted.weight, own.weight)
    if wanted.min_priority < own.min_priority:
        raise _more("min_priority", wanted.min_priority, own.min_priority)
    for name in ("max_tokens", "answer_timeout_s", "expires_at"):
        most, asked = getattr(own, name), getattr(wanted, name)
        if most is not None and (asked is None or asked > most):
            raise _more(name, asked, most)
    if wanted.names_end_users and not own.names_end_users:
        raise _more("names_end_users", True, False)


def _require_names(wanted: Names | None, allowed: Names | None, whose: str) -> None:
    """Raise Forbidden unless the model names are among those allowed; a key without a list has its team's."""
    if allowed is None:
        return
    if wanted is None:
        if whose.startswith("the team"):
            return  # null means: what the team may
        raise Forbidden(f"{whose} may use {', '.join(allowed)} only; name `aliases` among these.", param="aliases")
    if more := sorted(set(wanted) - set(allowed)):
        raise Forbidden(f"{whose} may not use {', '.join(more)}; it may use: {', '.join(allowed)}.", param="aliases")


def _require_networks(own: AccessRecord, wanted: AccessRecord) -> None:
    if not own.networks:
        return
    allowed = [ipaddress.ip_network(network, strict=False) for network in own.networks]
    asked = [ipaddress.ip_network(network, strict=False) for network in wanted.networks]
    if not asked or not all(_is_within(network, allowed) for network in asked):
        raise _more("networks", ", ".join(wanted.networks) or "all", ", ".join(own.networks))


def _is_within(
    network: ipaddress.IPv4Network | ipaddress.IPv6Network,
    allowed: Iterable[ipaddress.IPv4Network | ipaddress.IPv6Network],
) -> bool:
    return any(
        network.version == one.version and network.prefixlen >= one.prefixlen and network.network_address in one
        for one in allowed
    )


def _require_limits(most: Limits, wanted: Limits, whose: str) -> None:
    """Raise Forbidden where a limit is wider than the other; a limit that is not set is bounded by it anyway."""
    for name in COUNTS:
        bound, asked = getattr(most, name), getattr(wanted, name)
        if bound is not None and asked is not None and asked > bound:
            raise Forbidden(
                f"`limits.{name}` of {asked} is more than that of {whose}, {bound}; name {bound} at most.",
                param=f"limits.{name}",
            )
    for budget in wanted.budgets:
        for other in most.budgets:
            if (other.period, other.time_zone) == (budget.period, budget.time_zone) and budget.amount > other.amount:
                raise Forbidden(
                    f"A budget of {budget.amount:g} per {budget.period} is more than {whose} has, {other.amount:g}.",
                    param="limits.budgets",
                )


def _more(name: str, asked: object, most: object) -> Forbidden:
    return Forbidden(f"`{name}` of {asked} is more than the caller's own key has, which is {most}.", param=name)


def require_not_first(name: str, deed: str, remedy: str) -> None:
    if name == FIRST_KEY_NAME:
        raise Forbidden(f"The first key can't be {deed} here, since gateways keep it: {remedy}.")
