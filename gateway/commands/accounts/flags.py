"""Reads values as people write them (30d, 100k, a date), and declares the flags that set fields of records.

A flag that is not given changes nothing; `none` removes a value. Fields are named as the API names them, with a dot
before a field of an object (`limits.tokens_per_day`). All times are UTC.
"""

from __future__ import annotations

import re
import time
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from workers.commands import layout

ALL = "all"
LIMITS = "limits"
ROLES = ("user", "manager", "admin", "metrics")
MEMBER_ROLES = ("user", "manager")
NONE = "none"
"""Stands for a value that is to be removed."""
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)", re.IGNORECASE)

Read = Callable[[str], Any]
"""Reads the text of a flag; raises ArgumentTypeError, which says how such a value is written."""


def read_duration(text: str) -> float:
    """Return the seconds of a duration such as 90s, 15m, 12h, 30d or 2w."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ArgumentTypeError(f"{text!r} is no duration; write it as 90s, 15m, 12h, 30d or 2w")
    return float(found[1]) * UNITS_S[found[2]]


def read_count(text: str) -> int:
    """Return a number that may end with k, M or G."""
    return _read_number(text, THOUSANDS, "number; write it as 600, 100k or 2M")


def read_size(text: str) -> int:
    """Return the bytes of a size that may end with K, M, G or T, each 1,024 times the one before."""
    return _read_number(text, BYTES, "size; write it as 500M or 2G")


def _read_number(text: str, units: dict[str, int], what: str) -> int:
    found = _NUMBER.fullmatch(text)
    if found is None or found[2].lower() not in units:
        raise ArgumentTypeError(f"{text!r} is no {what}")
    return round(float(found[1]) * units[found[2].lower()])


def read_amount(text: str) -> float:
    """Return an amount of money."""
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no amount; write it as 100 or 0.5") from None


def read_shares(text: str) -> list[float]:
    """Return the shares in a list such as 0.5,0.8; or none."""
    if text == NONE:
        return []
    try:
        return [float(share) for share in text.split(",")]
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no list of shares; write it as 0.5,0.8") from None


def read_names(text: str) -> list[str]:
    """Return the names in a list that commas separate."""
    return [name.strip() for name in text.split(",") if name.strip()]


def read_moment(text: str) -> float:
    """Return the unix time of a date or time, or of a duration from now on."""
    if _DURATION.fullmatch(text):
        return float(round(time.time() + read_duration(text)))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ArgumentTypeError(
            f"{text!r} is no time; write a date (2027-01-31), a time (2027-01-31T12:00:00Z) or a duration (30d)"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def read_past(text: str) -> str:
    """Return the text that the API takes for a time: of a duration, the time so long ago; anything else as it is."""
    return f"{time.time() - read_duration(text):.3f}" if _DURATION.fullmatch(text) else text


def removable(read: Read) -> Read:
    """Return a reader that takes `none` as well, for which it returns None."""

    def reader(text: str) -> Any:
        return None if text == NONE else read(text)

    return reader


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag that sets one field."""

    name: str
    field: str
    about: str
    metavar: str = "TEXT"
    read: Read = str
    choices: Sequence[str] | None = None
    join: Callable[[list[Any]], Any] | None = None
    """Makes the field's value of all values given: the flag may be repeated then."""
    is_switch: bool = False
    """Whether it is given as `--x` or `--no-x`."""

    def add_to(self, parser: Any) -> None:
        """Add the flag to a parser, or to a group of one."""
        told: dict[str, Any] = {"dest": self.field, "default": SUPPRESS, "help": self.about}
        if self.is_switch:
            parser.add_argument(self.name, action=BooleanOptionalAction, **told)
            return
        if self.join is not None:
            told["action"] = "append"
        metavar = None if self.choices else self.metavar
        parser.add_argument(self.name, type=self.read, choices=self.choices, metavar=metavar, **told)


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit: its flag, and how people read it."""

    flag: str
    field: str
    words: str
    title: str
    is_size: bool = False
    """Whether it is a number of bytes."""

    def as_flag(self) -> Flag:
        field = f"{LIMITS}.{self.field}"
        if self.is_size:
            return Flag(self.flag, field, f"bytes {self.words}", "SIZE", removable(read_size))
        return Flag(self.flag, field, self.words, "N", removable(read_count))

    def write(self, value: int | None) -> str:
        """Return the limit's value for people; empty for None."""
        return layout.write_size(value) if self.is_size else layout.write_number(value)


LIMITS_OF_CALLS = (
    Limit("--rpm", "requests_per_minute", "requests per minute", "RPM"),
    Limit("--tpm", "tokens_per_minute", "tokens per minute, of prompts and answers", "TPM"),
    Limit("--parallel", "max_parallel", "calls at once", "PARALLEL"),
    Limit("--tokens-per-day", "tokens_per_day", "tokens per day", "TOKENS/DAY"),
    Limit("--tokens-per-month", "tokens_per_month", "tokens per month", "TOKENS/MONTH"),
    Limit("--max-prompt-tokens", "max_prompt_tokens", "tokens of a prompt", "PROMPT"),
    Limit("--max-tokens", "max_tokens", "tokens of an answer", "ANSWER"),
)
LIMITS_OF_STORAGE = (
    Limit("--stored-responses", "stored_responses", "stored responses", "RESPONSES"),
    Limit("--stored-response-bytes", "stored_response_bytes", "of stored responses", "RESPONSE BYTES", is_size=True),
    Limit("--resumable-streams", "resumable_streams", "resumable streams at once", "STREAMS"),
    Limit("--resumable-stream-bytes", "resumable_stream_bytes", "of resumable streams", "STREAM BYTES", is_size=True),
    Limit("--saved-slots", "saved_slots", "saved slots in a folder", "SLOTS"),
    Limit("--saved-slot-bytes", "saved_slot_bytes", "of saved slots in a folder", "SLOT BYTES", is_size=True),
)
"""Limits of what each team stores; organisations have them, too."""
ALL_LIMITS = (*LIMITS_OF_CALLS, *LIMITS_OF_STORAGE)
LIMIT_FLAGS = tuple(limit.as_flag() for limit in ALL_LIMITS)


def _names(given: list[list[str]]) -> list[str] | None:
    names = [name for one in given for name in one]
    return None if names in ([ALL], [NONE]) else names


def _networks(given: list[list[str]]) -> list[str]:
    return _names(given) or []


def _read_membership(text: str) -> tuple[str, str | None]:
    team, _, role = text.partition(":")
    if not team or role not in ("", NONE, *MEMBER_ROLES):
        raise ArgumentTypeError(f"{text!r} is no membership; write TEAM, TEAM:manager or TEAM:none")
    return team, None if role == NONE else role or MEMBER_ROLES[0]


def _read_note(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ArgumentTypeError(f"{text!r} is no note; write NAME=TEXT, or NAME= to remove it")
    return name, value or None


def _read_user(text: str) -> str:
    return "" if text == NONE else text


NOTE = Flag("--note", "metadata", "a note beside the record; may be repeated", "NAME=TEXT", _read_note, join=dict)
_ALIASES = Flag(
    "--alias",
    "aliases",
    "a model name or adapter that may be used; may be repeated; `all`: no restriction",
    "NAME",
    read_names,
    join=_names,
)

ORGANISATION_FLAGS = (NOTE,)
TEAM_FLAGS = (Flag("--organisation", "organisation", "the organisation that it belongs to", "NAME"), _ALIASES, NOTE)
USER_FLAGS = (
    Flag(
        "--team",
        "teams",
        "a team that it is in, as user unless `:manager` is added; may be repeated; `TEAM:none` ends that",
        "TEAM[:ROLE]",
        _read_membership,
        join=dict,
    ),
    Flag("--admin", "admin", "may do everything", is_switch=True),
    Flag("--email", "email", "address of the person", "ADDRESS"),
    NOTE,
)
ALIAS_FLAGS = (NOTE,)
RECORD_OF_KEY = (
    Flag("--team", "team", "the team whose limits and caches it shares", "NAME"),
    _ALIASES,
    Flag("--role", "role", "its rights: default `user`", choices=ROLES),
    Flag("--user", "user", "the user whose key it is; `none`: a service's", "NAME", _read_user),
    Flag("--expires", "expires_at", "when it ends: 90d, a date, `none`", "WHEN", removable(read_moment)),
    Flag("--network", "networks", "a network that it may be used from; may be repeated; `all`", "CIDR",
         read_names, join=_networks),
    Flag("--weight", "weight", "share of its team while calls wait: 0.001 to 1000", "N", removable(read_amount)),
    Flag("--min-priority", "min_priority", "most urgent `priority` of its calls", "N", removable(int)),
    Flag("--max-tokens", "max_tokens", "tokens of an answer", "N", removable(read_count)),
    Flag("--answer-timeout-s", "answer_timeout_s", "seconds of an answer", "S", removable(read_amount)),
    Flag("--names-end-users", "names_end_users", "may name the end user of each call", is_switch=True),
)  # fmt: skip
KEY_FLAGS = (*RECORD_OF_KEY, NOTE)


def limit_flags_beside(flags: Iterable[Flag], limits: Iterable[Limit] = LIMITS_OF_CALLS) -> tuple[Flag, ...]:
    """Return the flags of limits whose names none of the given flags has: of an answer's tokens, a key has its own."""
    taken = {flag.name for flag in flags}
    return tuple(limit.as_flag() for limit in limits if limit.flag not in taken)


def add_flags(parser: ArgumentParser, title: str, flags: Iterable[Flag]) -> None:
    """Add flags to a parser, as a group of its help page."""
    group = parser.add_argument_group(title)
    for flag in flags:
        flag.add_to(group)


def document_of(options: Namespace, flags: Iterable[Flag]) -> dict[str, Any]:
    """Return the fields that were given, as the API takes them."""
    given, document = vars(options), dict[str, Any]()
    for flag in flags:
        if flag.field in given:
            value = given[flag.field]
            folder, _, field = flag.field.rpartition(".")
            place = document.setdefault(folder, {}) if folder else document
            place[field] = value if flag.join is None else flag.join(value)
    return document
