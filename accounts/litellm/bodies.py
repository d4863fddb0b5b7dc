"""Reads bodies of LiteLLM's form: its field names become those of records, its durations seconds, its budgets ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import msgspec

from accounts.errors import Invalid
from accounts.protocol.records import NO_LIMITS, Budget, Limits, Period

LIMITS: Mapping[str, str] = {
    "rpm_limit": "requests_per_minute",
    "tpm_limit": "tokens_per_minute",
    "max_parallel_requests": "max_parallel",
}
"""LiteLLM's field -> the limit."""
MAX_BUDGET, SOFT_BUDGET, BUDGET_DURATION = BUDGET = ("max_budget", "soft_budget", "budget_duration")
DEFAULT_WARN_AT = Budget(amount=1.0).warn_at
MAX_TEXTS = 1000
"""Maximum texts of a list. Each is looked up in the database, on one of a few threads that nobody can stop."""
EVERY_MODEL = ("all-team-models", "all-proxy-models")
"""Names in `models` that stand for all."""
ROLES: Mapping[str, bool] = {"proxy_admin": True, "internal_user": False}
"""LiteLLM's role of a user -> whether the user is an admin."""
UNUSED: frozenset[str] = frozenset(
    {
        *("aliases", "allowed_cache_controls", "allowed_routes", "allowed_vector_store_indexes", "auto_rotate"),
        *("budget_id", "config", "enforced_params", "guardrails", "key_type", "mcp_tool_permissions"),
        *("model_max_budget", "model_rpm_limit", "model_tpm_limit", "object_permission", "permissions", "policies"),
        *("prompts", "rotation_interval", "router_settings", "send_invite_email", "spend", "team_member_permissions"),
        *("temp_budget_expiry", "temp_budget_increase", "model_aliases", "sso_user_id"),
    }
)
"""Fields that Paddock has nothing for: they are taken while they ask for nothing."""

_DURATION = re.compile(r"([0-9]{1,12})\s*(s|m|h|d|w|mo)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400, "mo": 30 * 86_400}
_PERIODS: Mapping[str, Period] = {
    "1d": "day",
    "24h": "day",
    "daily": "day",
    "7d": "week",
    "1w": "week",
    "weekly": "week",
    "30d": "month",
    "1mo": "month",
    "monthly": "month",
}


class Form(NamedTuple):
    """The fields that bodies about one kind of record have, beside limits, budget and `metadata`."""

    renamed: Mapping[str, str]
    """LiteLLM's field -> the record's."""
    notes: tuple[str, ...] = ()
    """Fields that are kept among the record's metadata, since Paddock has no use for them."""
    apart: tuple[str, ...] = ()
    """Fields that the route's handler reads itself."""


KEY = Form(
    {"models": "aliases", "duration": "duration_s", "team_id": "team", "user_id": "user", "blocked": "blocked"},
    ("tags",),
    ("key", "key_alias"),
)
TEAM_ALIAS, USER_ALIAS = "team_alias", "user_alias"
TEAM = Form(
    {"models": "aliases", "organization_id": "organisation", "blocked": "blocked"}, ("tags", TEAM_ALIAS), ("team_id",)
)
NEW_TEAM = TEAM._replace(apart=(*TEAM.apart, "members_with_roles"))
USER = Form({"user_email": "email", "user_role": "admin", "blocked": "blocked"}, (USER_ALIAS,), ("user_id",))
OF_FIRST_KEY = ("key_alias", "duration", "models")
"""Fields of a new user that are its key's."""
NEW_USER = USER._replace(apart=(*USER.apart, "teams", "team_id", "auto_create_key", *OF_FIRST_KEY))


def fields_of(body: Mapping[str, Any], form: Form, before: Limits = NO_LIMITS) -> dict[str, Any]:
    """Return the record's fields for those that a body names. `before`: the record's limits until now. A field that is
    null is left alone, but a limit is taken away. Raises Invalid."""
    _refuse_unknown(body, {*form.renamed, *form.notes, *form.apart, "metadata", *LIMITS, *BUDGET})
    fields: dict[str, Any] = {}
    for theirs, ours in form.renamed.items():
        if (value := body.get(theirs)) is not None:
            fields[ours] = _READERS[theirs](value, theirs) if theirs in _READERS else value
    if (metadata := body.get("metadata")) is not None:
        fields["metadata"] = metadata
    notes = {name: body[name] or None for name in form.notes if name in body}
    if notes and isinstance(metadata, dict | None):
        fields["metadata"] = {**(metadata or {}), **notes}
    if limits := _limits_of(body, before):
        fields["limits"] = limits
    return fields


def seconds_of(text: object, field: str) -> float:
    """Return the seconds of a duration such as `30d`. Raises Invalid."""
    found = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise Invalid(f"`{field}` is a duration such as `30s`, `30m`, `30h`, `30d`, `1w` or `1mo`.", param=field)
    return float(int(found[1]) * _SECONDS[found[2]])


def text_of(body: Mapping[str, Any], field: str) -> str:
    """Return a text that the body has to have. Raises Invalid."""
    value = body.get(field)
    if not isinstance(value, str) or not value:
        raise Invalid(f"`{field}` is missing; it is a text.", param=field)
    return value


def texts_of(body: Mapping[str, Any], field: str) -> list[str]:
    """Return a list of texts in a body; none if it is left out. Raises Invalid."""
    found = body.get(field)
    return [] if found is None else _texts(found, field)


def _texts(value: object, field: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise Invalid(f"`{field}` is a list of texts.", param=field)
    if len(value) > MAX_TEXTS:
        raise Invalid(f"`{field}` has {len(value)} texts. Send {MAX_TEXTS} at most.", param=field)
    return value


def _aliases(models: object, field: str) -> list[str] | None:
    """Return the model names of `models`; None: all, as an empty list says. Raises Invalid."""
    names = _texts(models, field)
    return None if not names or any(name in EVERY_MODEL for name in names) else names


def _is_admin(role: object, field: str) -> bool:
    if not isinstance(role, str) or role not in ROLES:
        raise Invalid(f"`{field}` is {' or '.join(f'`{name}`' for name in ROLES)}.", param=field)
    return ROLES[role]


_READERS: Mapping[str, Callable[[object, str], Any]] = {
    "models": _aliases,
    "duration": seconds_of,
    "user_role": _is_admin,
}
"""LiteLLM's field -> reader of its value; the values of other fields are taken as they are."""


def _refuse_unknown(body: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise Invalid for a field that is not known, or that asks for something that Paddock does not have."""
    for name, value in body.items():
        if name in UNUSED and value in (None, "", 0, False, [], {}):
            continue
        if name not in known:
            told = "is not supported here; leave it out" if name in UNUSED else "is not known"
            raise Invalid(f"The field `{name}` {told}.", param=name)


def _limits_of(body: Mapping[str, Any], before: Limits) -> dict[str, Any]:
    """Return the patch of limits for what a body names. `before`: the limits until now."""
    patch: dict[str, Any] = {ours: body[theirs] for theirs, ours in LIMITS.items() if theirs in body}
    if any(name in body for name in BUDGET):
        patch["budgets"] = _budgets(body, before)
    return patch


def _budgets(body: Mapping[str, Any], before: Limits) -> list[dict[str, Any]] | None:
    """Return the budgets with the first one as the body wants it; the others, which LiteLLM does not know, stay.

    `max_budget` is the amount of a budget that refuses calls, and `soft_budget` where it warns; without `max_budget`
    the amount of one that only warns."""
    first = before.budgets[0] if before.budgets else None
    others: list[dict[str, Any]] = msgspec.to_builtins(before.budgets[1:]) if first else []
    amount = _amount(body, MAX_BUDGET, first.amount if first and first.refuses else None)
    soft = _amount(body, SOFT_BUDGET, _soft(first))
    if amount is None and soft is None:
        return others or None
    duration = body.get(BUDGET_DURATION)
    period = first.period if first and duration is None else _period(duration)
    same: dict[str, Any] = {"time_zone": first.time_zone} if first else {}
    if amount is None:
        return [{**same, "amount": soft, "period": period, "warn_at": [1.0], "refuses": False}, *others]
    if soft is not None and soft > amount:
        raise Invalid(f"`{SOFT_BUDGET}` is more than `{MAX_BUDGET}`.", param=SOFT_BUDGET)
    if soft is not None:
        same["warn_at"] = [soft / amount]
    elif first and SOFT_BUDGET not in body:
        same["warn_at"] = list(first.warn_at)
    return [{**same, "amount": amount, "period": period}, *others]


def _soft(before: Budget | None) -> float | None:
    """Return the amount at which a caller wants a warning; None: it is shares, which stay when the amount changes."""
    if before is None or not before.refuses:
        return None if before is None else before.amount
    is_chosen = len(before.warn_at) == 1 and before.warn_at != DEFAULT_WARN_AT
    return before.amount * before.warn_at[0] if is_chosen else None


def _amount(body: Mapping[str, Any], field: str, before: float | None) -> float | None:
    value = body.get(field, before)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise Invalid(f"`{field}` is an amount above 0.", param=field)
    return float(value)


def _period(duration: object) -> Period:
    period = _PERIODS.get(duration) if isinstance(duration, str) else None
    if period is None:
        raise Invalid(
            f"`{BUDGET_DURATION}` is `1d`, `7d` or `30d`: budgets are those of calendar days, weeks and months.",
            param=BUDGET_DURATION,
        )
    return period
