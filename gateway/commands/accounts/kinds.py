"""Describes the kinds of record: the flags that set their fields, the columns of their tables, and their cards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.commands.accounts import flags
from gateway.commands.accounts.flags import ALL_LIMITS, LIMITS_OF_CALLS, Flag, Limit, limit_flags_beside
from workers.commands import layout
from workers.commands.layout import Column, card

Document = Mapping[str, Any]
"""A record, or a part of one, as the API answers it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of record."""

    name: str
    plural: str
    flags: tuple[Flag, ...]
    columns: tuple[Column[Document], ...]
    fields: Callable[[Document], dict[str, str]]
    """Returns what a card tells of a record beside its name, limits and notes."""
    filters: tuple[str, ...] = ()
    """Parameters of the list that name a record of another kind."""
    can_block: bool = True
    limits: tuple[Limit, ...] = LIMITS_OF_CALLS

    @property
    def one(self) -> str:
        """The kind with its article, such as `a team`."""
        return f"{'an' if self.name[0] in 'ao' else 'a'} {self.name}"

    @property
    def all_flags(self) -> tuple[Flag, ...]:
        return (*self.flags, *self.limit_flags)

    @property
    def limit_flags(self) -> tuple[Flag, ...]:
        """The flags of its limits."""
        return limit_flags_beside(self.flags, self.limits)


def describe(kind: Kind, record: Document, key: str = "") -> str:
    """Return a record as a card. `key`: the secret of a key that was made."""
    limits = record["limits"]
    return card(
        {
            "key": key,
            "name": record["name"],
            **kind.fields(record),
            "limits": "\n".join(f"{text} {words}" for words, _, text in _limits_of(limits)),
            "budgets": "\n".join(map(budget_text, limits.get("budgets", ()))),
            "notes": "\n".join(f"{name}={value}" for name, value in record["metadata"].items()),
            "made": layout.write_time(record["created_at"]),
            "changed": layout.write_time(record["updated_at"]),
            "declared": "in a file (`paddock apply`)" if record["applied"] else "",
        }
    )


def budget_text(budget: Document) -> str:
    """Return a budget in words."""
    zone, warn_at = budget.get("time_zone", "UTC"), budget.get("warn_at", (0.8,))
    warns = ", ".join(f"{share:.0%}" for share in warn_at)
    parts = [
        f"{layout.write_money(budget['amount'])} per {budget.get('period', 'month')}",
        "" if zone == "UTC" else f"({zone})",
        "" if budget.get("refuses", True) else "warns only",
        f"warns at {warns}" if warns else "warns not",
    ]
    return ", ".join(filter(None, parts)).replace(", (", " (")


def brief_limits(record: Document) -> str:
    """Return the limits of a record in a few words, for tables."""
    limits = record["limits"]
    budgets = [
        f"{layout.write_money(budget['amount'])}/{budget.get('period', 'month')}"
        for budget in limits.get("budgets", ())
    ]
    return ", ".join([*(f"{title.lower()} {text}" for _, title, text in _limits_of(limits)), *budgets])


def _limits_of(limits: Document) -> list[tuple[str, str, str]]:
    """Return the words, title and value of each limit that is set."""
    found = ((limit, limits.get(limit.field)) for limit in ALL_LIMITS)
    return [(limit.words, limit.title, limit.write(value)) for limit, value in found if value is not None]


def _state(record: Document) -> str:
    return "blocked" if record["blocked"] else "active"


def _key_state(record: Document) -> str:
    if record["blocked"]:
        return "blocked"
    if layout.is_over(record["expires_at"]):
        return "expired"
    return "rotated" if _old_secret(record) else "active"


def _old_secret(record: Document) -> str:
    until = record["previous_until"]
    return "" if until is None or layout.is_over(until) else f"works until {layout.write_time(until)}"


def _moment(at: float | None) -> str:
    return "never" if at is None else f"{layout.write_time(at)} ({layout.write_distance(at)})"


def _key_fields(record: Document) -> dict[str, str]:
    timeout_s = record["answer_timeout_s"]
    return {
        "state": _key_state(record),
        "team": record["team"],
        "user": record["user"],
        "role": record["role"],
        "models": layout.write_list(record["aliases"]),
        "networks": layout.write_list(record["networks"] or None, "all"),
        "expires": _moment(record["expires_at"]),
        "old secret": _old_secret(record),
        "weight": "" if record["weight"] == 1 else f"{record['weight']:g}",
        "min priority": "" if record["min_priority"] == 0 else str(record["min_priority"]),
        "max tokens": layout.write_number(record["max_tokens"]),
        "answer timeout": "" if timeout_s is None else f"{timeout_s:g} s",
        "end users": "named by its calls" if record["names_end_users"] else "",
        "hash": f"{record['hash']}…",
        "made by": record["created_by"],
        "last used": _moment(record["last_used_at"]),
    }


def _team_fields(record: Document) -> dict[str, str]:
    models = layout.write_list(record["aliases"])
    return {"state": _state(record), "organisation": record["organisation"], "models": models}


def _user_fields(record: Document) -> dict[str, str]:
    role = "admin" if record["admin"] else ""
    return {"state": _state(record), "email": record["email"], "role": role, "teams": _memberships(record)}


def _memberships(record: Document) -> str:
    teams = record["teams"].items()
    return ", ".join(team if role == "user" else f"{team} ({role})" for team, role in teams)


def _text(field: str, title: str) -> Column[Document]:
    return Column(title, lambda record: record[field])


NAME: Column[Document] = Column("NAME", lambda record: record["name"], is_always=True)
_STATE: Column[Document] = Column("STATE", _state)
_LIMITS: Column[Document] = Column("LIMITS", brief_limits)
_MODELS: Column[Document] = Column("MODELS", lambda record: layout.write_list(record["aliases"]))

KEY = Kind(
    "key",
    "keys",
    flags.KEY_FLAGS,
    (
        NAME,
        _text("team", "TEAM"),
        _text("user", "USER"),
        _text("role", "ROLE"),
        Column("STATE", _key_state),
        _MODELS,
        Column("EXPIRES", lambda record: layout.write_distance(record["expires_at"])),
        Column("LAST USED", lambda record: layout.write_distance(record["last_used_at"]) or "never"),
        _LIMITS,
    ),
    _key_fields,
    ("team", "user"),
)
ORGANISATION = Kind(
    "organisation",
    "organisations",
    flags.ORGANISATION_FLAGS,
    (NAME, _STATE, _LIMITS),
    lambda record: {"state": _state(record)},
    limits=ALL_LIMITS,
)
TEAM = Kind(
    "team",
    "teams",
    flags.TEAM_FLAGS,
    (NAME, _text("organisation", "ORGANISATION"), _STATE, _MODELS, _LIMITS),
    _team_fields,
    ("organisation",),
    limits=ALL_LIMITS,
)
USER = Kind(
    "user",
    "users",
    flags.USER_FLAGS,
    (
        NAME,
        _text("email", "EMAIL"),
        Column("TEAMS", _memberships),
        Column("ROLE", lambda record: "admin" if record["admin"] else ""),
        _STATE,
        _LIMITS,
    ),
    _user_fields,
    ("team",),
)
ALIAS = Kind("alias", "aliases", flags.ALIAS_FLAGS, (NAME, _LIMITS), lambda record: {}, can_block=False)

KINDS = (KEY, TEAM, USER, ORGANISATION, ALIAS)
BY_NAME = {kind.name: kind for kind in KINDS}
