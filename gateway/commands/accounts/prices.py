"""Carries out `paddock prices`: what models cost, from which day on, and in which currency."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.commands.accounts import flags
from gateway.commands.accounts.api import path_of
from gateway.commands.accounts.flags import Flag, add_flags, document_of
from gateway.commands.accounts.parser import Call, Result, Unusable, add_command, add_group
from workers.commands import layout
from workers.commands.layout import Column, card, table

Price = Mapping[str, Any]

FLAGS = tuple(
    Flag(name, field, f"per {what}", "AMOUNT", flags.read_amount)
    for name, field, what in (
        ("--prompt", "per_million_prompt", "million prompt tokens that were computed"),
        ("--cached", "per_million_cached", "million prompt tokens that were cached"),
        ("--completion", "per_million_completion", "million tokens of answers"),
        ("--gpu-second", "per_gpu_second", "second of an answer"),
    )
)
EVERY_MODEL = "*"


def add_commands(parsers: Any, name: str, about: str) -> None:
    """Add `paddock prices`."""
    commands = add_group(parsers, name, about)
    add_command(commands, "list", _list, "list the prices")
    setting = add_command(commands, "set", _set, "set a model's price; what is not given stays as it is")
    setting.add_argument("model", metavar="MODEL", help=f"a model or adapter; `{EVERY_MODEL}`: all without a price")
    add_flags(setting, "the price", FLAGS)
    setting.add_argument(
        "--from", dest="valid_from", type=flags.read_moment, metavar="WHEN",
        help="when it begins to hold: a date, 7d; default: as the price that holds now",
    )  # fmt: skip
    deleting = add_command(commands, "delete", _delete, "delete a price")
    deleting.add_argument("model", metavar="MODEL", help="whose price")
    deleting.add_argument(
        "--from", dest="valid_from", type=flags.read_moment, metavar="WHEN",
        help="when it begins to hold; default: the price that holds now",
    )  # fmt: skip
    naming = add_command(commands, "currency", _set_currency, "name the currency of prices and budgets")
    naming.add_argument("currency", metavar="NAME", help="such as EUR; amounts stay the numbers that they are")


def _list(call: Call) -> Result:
    answer = call.api.get(path_of("prices"))
    currency, prices = answer.document["currency"], answer.document["data"]
    if not prices:
        return Result(
            answer,
            f"The price list is empty: calls cost what the catalog says, or nothing. The currency is {currency}.",
        )
    return Result(
        answer, f"{table(_columns(), prices, call.width)}\n\nin {currency}, per million tokens and per second"
    )


def _columns() -> list[Column[Price]]:
    return [
        Column("MODEL", lambda price: price["model"]),
        Column("FROM", lambda price: layout.write_time(price["valid_from"] or None) or "ever"),
        Column("NOW", lambda price: "yes" if price["holds_now"] else ""),
        _amount("PROMPT", "per_million_prompt"),
        _amount("CACHED", "per_million_cached"),
        _amount("COMPLETION", "per_million_completion"),
        _amount("GPU SECOND", "per_gpu_second"),
    ]


def _amount(title: str, field: str) -> Column[Price]:
    return Column(title, lambda price: layout.write_money(price[field]), is_number=True)


def _set(call: Call) -> Result:
    given = document_of(call.options, FLAGS)
    if not given:
        raise Unusable("prices set: no price is given; `paddock prices set --help` lists the flags")
    before, valid_from = _current(call)
    kept = {flag.field: before[flag.field] for flag in FLAGS} if before else {}
    answer = call.api.post(path_of("prices"), {**kept, **given, "model": call.options.model, "valid_from": valid_from})
    price = answer.document
    fields = {"model": price["model"], "from": layout.write_time(price["valid_from"] or None) or "ever"}
    fields |= {flag.name.removeprefix("--"): layout.write_money(price[flag.field]) for flag in FLAGS}
    return Result(answer, card(fields))


def _delete(call: Call) -> Result:
    before, valid_from = _current(call)
    if before is None and call.options.valid_from is None:
        raise Unusable(f"prices delete: {call.options.model} has no price now; `paddock prices list` shows all")
    answer = call.api.delete(path_of("prices"), model=call.options.model, valid_from=repr(valid_from))
    return Result(answer, f"The price of {call.options.model} is deleted.")


def _set_currency(call: Call) -> Result:
    answer = call.api.put(path_of("prices", "currency"), {"currency": call.options.currency})
    return Result(answer, f"The currency is {answer.document['currency']}.")


def _current(call: Call) -> tuple[Price | None, float]:
    """Return the price that the command changes, and from when it holds. Without --from that is the one of now."""
    wanted: float | None = call.options.valid_from
    prices = [
        price for price in call.api.get(path_of("prices")).document["data"] if price["model"] == call.options.model
    ]
    if wanted is None:
        found = next((price for price in prices if price["holds_now"]), None)
        return found, 0.0 if found is None else found["valid_from"]
    earlier = [price for price in prices if price["valid_from"] <= wanted]
    return (max(earlier, key=lambda price: price["valid_from"]) if earlier else None), wanted
