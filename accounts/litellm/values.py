"""Translates between LiteLLM's field names and records: models, budgets, limits and durations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from accounts.errors import Invalid
from accounts.protocol.records import Limits, Period

LIMITS: Mapping[str, str] = {
    "rpm_limit": "requests_per_minute",
    "tpm_limit": "tokens_per_minute",
    "max_parallel_requests": "max_parallel",
}
"""LiteLLM's field -> the limit."""
BUDGET = ("max_budget", "soft_budget", "budget_duration")
EVERY_MODEL = ("all-team-models", "all-proxy-models")
"""Names in `models` that stand for all."""
TAGS = "tags"
UNUSED: frozenset[str] = frozenset(
    {
        *("aliases", "allowed_cache_controls", "allowed_routes", "allowed_vector_store_indexes", "auto_rotate"),
        *("budget_id", "config", "enforced_params", "guardrails", "key_type", "mcp_tool_permissions"),
        *("model_max_budget", "model_rpm_limit", "model_tpm_limit", "object_permission", "permissions", "policies"),
        *("prompts", "rotation_interval", "router_settings", "send_invite_email", "spend", "team_member_permissions"),
        *("temp_budget_expiry", "temp_budget_increase", "model_aliases", "sso_user_id", "user_alias"),
    }
)
"""Fields that Paddock has nothing for: they are taken while they ask for nothing."""

_DURATION = re.compile(r"(\d+)\s*(s|m|h|d|w|mo)")
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
_LENGTHS: Mapping[Period, str] = {"day": "1d", "week": "7d", "month": "30d"}


def seconds_of(text: object, field: str) -> float:
    """Return the seconds of a duration such as `30d`. Raises Invalid."""
    found = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise Invalid(f"`{field}` is a duration such as `30s`, `30m`, `30h`, `30d`, `1w` or `1mo`.", param=field)
    return float(int(found[1]) * _SECONDS[found[2]])


def refuse_unknown(body: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise Invalid for a field that is not known, or that asks for what there is not."""
    for name, value in body.items():
        if name in UNUSED and value in (None, "", 0, False, [], {}):
            continue
        if name not in known:
            told = "is not supported here; leave it out" if name in UNUSED else "is not known"
            raise Invalid(f"The field `{name}` {told}.", param=name)


def aliases_of(models: object) -> list[str] | None:
    """Return the model names of `models`; None: all, as an empty list says. Raises Invalid."""
    if models is None:
        return None
    if not isinstance(models, list) or not all(isinstance(name, str) for name in models):
        raise Invalid("`models` is a list of names.", param="models")
    return None if not models or any(name in EVERY_MODEL for name in models) else models


def limits_of(body: Mapping[str, Any], before: Limits) -> dict[str, Any]:
    """Return the patch of limits for what a body names. `before`: the limits that there are."""
    patch: dict[str, Any] = {ours: body[theirs] for theirs, ours in LIMITS.items() if theirs in body}
    if any(name in body for name in BUDGET):
        patch["budgets"] = _budgets(body, before)
    return patch


def _budgets(body: Mapping[str, Any], before: Limits) -> list[dict[str, Any]] | None:
    told = {**shown_budget(before), **{name: body[name] for name in BUDGET if name in body}}
    amount, soft, duration = (told[name] for name in BUDGET)
    if amount is None and soft is None:
        return None
    for name, value in (("max_budget", amount), ("soft_budget", soft)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise Invalid(f"`{name}` is an amount above 0.", param=name)
    period = _PERIODS.get(duration) if isinstance(duration, str) else None
    if period is None:
        raise Invalid(
            "`budget_duration` is `1d`, `7d` or `30d`: budgets are those of calendar days, weeks and months.",
            param="budget_duration",
        )
    if amount is None:
        return [{"amount": soft, "period": period, "warn_at": [1.0], "refuses": False}]
    if soft is not None and soft > amount:
        raise Invalid("`soft_budget` is more than `max_budget`.", param="soft_budget")
    warned = {} if soft is None else {"warn_at": [soft / amount]}
    return [{"amount": amount, "period": period, **warned}]


def shown_limits(limits: Limits) -> dict[str, Any]:
    """Return the limits by LiteLLM's names."""
    return {theirs: getattr(limits, ours) for theirs, ours in LIMITS.items()} | shown_budget(limits)


def shown_budget(limits: Limits) -> dict[str, Any]:
    budget = limits.budgets[0] if limits.budgets else None
    if budget is None:
        return {"max_budget": None, "soft_budget": None, "budget_duration": None}
    soft = budget.amount * budget.warn_at[0] if budget.warn_at and budget.warn_at[0] < 1 else None
    amount = budget.amount if budget.refuses else None
    return {
        "max_budget": amount,
        "soft_budget": soft if budget.refuses else budget.amount,
        "budget_duration": _LENGTHS[budget.period],
    }


def shown_time(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat()


def name_of(alias: object, field: str) -> str | None:
    """Return the name that an alias of LiteLLM's stands for: what no name may have becomes `-`. Raises Invalid."""
    if alias is None or alias == "":
        return None
    if not isinstance(alias, str):
        raise Invalid(f"`{field}` is a text.", param=field)
    return re.sub(r"[^A-Za-z0-9_.@+:=-]+", "-", alias).lstrip("-.:=")[:64] or None


def texts(body: Mapping[str, Any], field: str) -> list[str]:
    """Return a list of texts in a body; none if it is left out. Raises Invalid."""
    found = body.get(field)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise Invalid(f"`{field}` is a list of texts.", param=field)
    return found
