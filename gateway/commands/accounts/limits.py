"""Carries out `paddock limits` and `paddock budgets`, of organisations, teams, users, keys and aliases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.commands.accounts import flags
from gateway.commands.accounts.api import Answer, path_of
from gateway.commands.accounts.flags import ALL_LIMITS, LIMIT_FLAGS, add_flags, document_of
from gateway.commands.accounts.kinds import BY_NAME, NAME, Document, Kind, describe
from gateway.commands.accounts.parser import (
    Call,
    Parser,
    Result,
    Unusable,
    add_command,
    add_group,
    add_paging,
    more_text,
)
from gateway.commands.accounts.records import changed
from workers.commands import layout
from workers.commands.layout import Column, table

PERIODS = ("day", "week", "month")
KINDS = sorted(BY_NAME)


def add_limits(parsers: Any, name: str, about: str) -> None:
    """Add `paddock limits`."""
    commands = add_group(parsers, name, about)
    listing = add_command(commands, "list", _list, "list the limits of one kind")
    listing.add_argument("kind", choices=KINDS, metavar="KIND", help=f"one of: {', '.join(KINDS)}")
    add_paging(listing)
    _named(add_command(commands, "show", _show, "show the limits of one team, key and so on"))
    setting = _named(add_command(commands, "set", _set, "set limits; those that are not given stay as they are"))
    add_flags(setting, "limits; `none` removes one", LIMIT_FLAGS)
    _named(add_command(commands, "clear", _clear, "remove all limits, but not the budgets"))


def add_budgets(parsers: Any, name: str, about: str) -> None:
    """Add `paddock budgets`."""
    commands = add_group(parsers, name, about)
    listing = add_command(commands, "list", _list_budgets, "list budgets: spent, left, and when they renew")
    listing.add_argument("kind", choices=KINDS, nargs="?", metavar="KIND", help=f"one of: {', '.join(KINDS)}")
    listing.add_argument("name", nargs="?", metavar="NAME", help="whose budgets")
    add_paging(listing)
    setting = _named(add_command(commands, "set", _set_budget, "set the budget of a period"))
    setting.add_argument("amount", type=flags.read_amount, metavar="AMOUNT", help="in the currency of the price list")
    _add_period(setting, "how long it lasts; default: month")
    setting.add_argument("--time-zone", metavar="ZONE", help="in which the period begins, such as Europe/Berlin")
    setting.add_argument(
        "--warn-at", type=flags.read_shares, metavar="SHARES", help="shares at which to warn, such as 0.5,0.8; `none`"
    )
    which = setting.add_mutually_exclusive_group()
    which.add_argument("--warn-only", dest="refuses", action="store_false", default=None, help="refuse no calls")
    which.add_argument("--refuse", dest="refuses", action="store_true", default=None, help="refuse calls once spent")
    deleting = _named(add_command(commands, "delete", _delete_budget, "delete budgets"))
    _add_period(deleting, "the one of this period; default: all")


def _add_period(parser: Parser, about: str) -> None:
    parser.add_argument("--per", choices=PERIODS, help=about)


def _named(parser: Parser) -> Parser:
    parser.add_argument("kind", choices=KINDS, metavar="KIND", help=f"one of: {', '.join(KINDS)}")
    parser.add_argument("name", metavar="NAME", help="name of the team, key and so on")
    return parser


def _target(call: Call) -> tuple[Kind, str]:
    """Return the kind of the record that the command names, and the path of its route."""
    kind = BY_NAME[call.options.kind]
    return kind, path_of(kind.plural, call.options.name)


def _list(call: Call) -> Result:
    kind = BY_NAME[call.options.kind]
    answer = call.api.get(path_of(kind.plural), limit=call.options.limit, cursor=call.options.cursor)
    limited = [record for record in answer.document["data"] if _limits(record)]
    columns = (NAME, *map(_column, ALL_LIMITS))
    shown = table(columns, limited, call.width) if limited else f"None of the {kind.plural} has limits."
    return Result(answer, shown + more_text(answer))


def _limits(record: Document) -> dict[str, Any]:
    """Return the limits that are set; budgets are none of them."""
    fields = {limit.field for limit in ALL_LIMITS}
    return {name: value for name, value in record["limits"].items() if name in fields and value is not None}


def _column(limit: flags.Limit) -> Column[Document]:
    return Column(limit.title, lambda record: limit.write(record["limits"].get(limit.field)), is_number=True)


def _show(call: Call) -> Result:
    kind, path = _target(call)
    answer = call.api.get(path)
    return Result(answer, describe(kind, answer.document))


def _set(call: Call) -> Result:
    kind, path = _target(call)
    document = document_of(call.options, LIMIT_FLAGS)
    if not document:
        raise Unusable("limits set: no limit is given; `paddock limits set --help` lists the flags")
    return changed(kind, call.api.patch(path, document))


def _clear(call: Call) -> Result:
    kind, path = _target(call)
    return changed(kind, call.api.patch(path, {"limits": {limit.field: None for limit in kind.limits}}))


def _list_budgets(call: Call) -> Result:
    options = call.options
    answer = call.api.get(
        path_of("budgets"), kind=options.kind, name=options.name, limit=options.limit, cursor=options.cursor
    )
    currency, data = answer.document["currency"], answer.document["data"]
    shown = table(_budget_columns(currency), data, call.width) if data else "There are no budgets."
    return Result(answer, shown + more_text(answer))


def _budget_columns(currency: str) -> Sequence[Column[Document]]:
    return (
        Column("KIND", lambda budget: budget["kind"]),
        Column("NAME", lambda budget: budget["name"]),
        Column(f"BUDGET ({currency})", lambda budget: layout.write_money(budget["amount"]), is_number=True),
        Column("PER", lambda budget: budget["period"]),
        Column("SPENT", lambda budget: layout.write_money(budget["spent"]), is_number=True),
        Column("LEFT", lambda budget: layout.write_money(budget["left"]), is_number=True),
        Column("USED", lambda budget: f"{budget['share']:.0%}", is_number=True),
        Column("STATE", _budget_state),
        Column("RENEWS", lambda budget: layout.write_iso(budget["renews_at"])),
    )


def _budget_state(budget: Document) -> str:
    if budget["is_refusing"]:
        return "calls are refused"
    warned = any(budget["share"] >= share for share in budget["warn_at"])
    return "warned" if warned else "ok"


def _set_budget(call: Call) -> Result:
    """Set the budget of one period; what is not given stays as the budget of that period has it."""
    kind, path = _target(call)
    options = call.options
    given = {"amount": options.amount, "time_zone": options.time_zone, "warn_at": options.warn_at}
    given |= {"refuses": options.refuses}
    wanted = {name: value for name, value in given.items() if value is not None}
    period = options.per or "month"
    record = call.api.get(path).document
    budgets = record["limits"].get("budgets", [])
    before = next((budget for budget in budgets if _period(budget) == period), {"period": period})
    others = [budget for budget in budgets if _period(budget) != period]
    return changed(kind, _write_budgets(call, path, record, [*others, {**before, **wanted}]))


def _delete_budget(call: Call) -> Result:
    kind, path = _target(call)
    record = call.api.get(path).document
    budgets, period = record["limits"].get("budgets", []), call.options.per
    left = [budget for budget in budgets if period is not None and _period(budget) != period]
    if left == budgets:
        which = f"budget per {period}" if period else "budget"
        raise Unusable(
            f"budgets delete: {call.options.name} has no {which}; `paddock budgets list` shows those there are"
        )
    return changed(kind, _write_budgets(call, path, record, left))


def _write_budgets(call: Call, path: str, record: Document, budgets: list[Document]) -> Answer:
    """Replace the budgets, unless somebody else has changed the record since it was read."""
    return call.api.patch(path, {"limits": {"budgets": budgets}, "version": record["version"]})


def _period(budget: Document) -> str:
    period: str = budget.get("period", "month")
    return period
