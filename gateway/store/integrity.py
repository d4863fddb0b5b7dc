"""Checks one model's admission data on a live Redis, by invariants that hold at every moment."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import redis.asyncio

from gateway.store.packed import unpacked_team
from workers.protocol import keys
from workers.protocol.heartbeat import BEAT, decode_heartbeat


class IntegrityError(AssertionError):
    """Raised if an invariant of the admission data does not hold; the message lists every breach."""


@dataclass(frozen=True, slots=True)
class Leased:
    """The leases and KV tokens that Redis counts for a worker."""

    boot: str
    leases: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Held:
    """The tickets and leases that Redis counts for a team."""

    tickets: int
    leases: int


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The record of a lease, or of a grant."""

    worker: str
    boot: str
    kv_tokens: int
    team: str


@dataclass(frozen=True, slots=True)
class TicketRecord:
    rank: float
    team: str


@dataclass(frozen=True, slots=True)
class Picture:
    """One model's admission data, read in a single transaction."""

    now_ms: int
    workers: dict[str, bytes]
    """Worker id -> its record; only live workers."""
    leased: dict[str, Leased]
    """Worker id -> the leases and KV tokens that Redis counts for it."""
    expiries: dict[str, dict[str, float]]
    """Worker id -> lease id -> expiry, unix ms."""
    leases: dict[str, LeaseRecord]
    queue: dict[str, float]
    tickets: dict[str, TicketRecord]
    """Tickets that wait and tickets that were granted a lease."""
    unreadable: frozenset[str]
    """Ids of records that are neither a lease nor a ticket."""
    ticket_expiries: dict[str, float]
    passed: frozenset[str]
    """Ids of the tickets of which it is counted how often they were overtaken."""
    teams: dict[str, Held]


async def check_integrity(redis: redis.asyncio.Redis, model: str) -> None:
    """Raise IntegrityError if any invariant does not hold. Reads all data of the model: fit for tests and idle moments,
    not for every call."""
    breaches = list(find_breaches(await take_picture(redis, model)))
    if breaches:
        raise IntegrityError(f"model {model!r}: " + "; ".join(breaches))


def find_breaches(picture: Picture) -> Iterable[str]:
    yield from _lease_breaches(picture)
    yield from _slot_breaches(picture)
    yield from _ticket_breaches(picture)
    yield from _kv_breaches(picture)
    yield from _team_breaches(picture)


def _lease_breaches(picture: Picture) -> Iterable[str]:
    places: dict[str, str] = {}
    for worker, expiries in picture.expiries.items():
        if expiries and worker not in picture.leased:
            yield f"worker {worker} has leases but is not among the leased"
        for lease in expiries:
            if lease in places:
                yield f"lease {lease} counts on worker {worker} and on worker {places[lease]}"
            places[lease] = worker
    for lease, record in picture.leases.items():
        worker = record.worker
        if places.get(lease) != worker:
            yield f"lease {lease} is for worker {worker} and counts on worker {places.get(lease)}"
        if worker in picture.leased and record.boot != (boot := picture.leased[worker].boot):
            yield f"lease {lease} is for process {record.boot}, not {boot}"
    for id in picture.unreadable:
        yield f"the record of {id} can't be read"
    for lease in places.keys() - picture.leases.keys():
        yield f"lease {lease} counts on worker {places[lease]} and has no record"


def _slot_breaches(picture: Picture) -> Iterable[str]:
    for worker, record in picture.workers.items():
        beat = decode_heartbeat(record)
        if worker in picture.leased and picture.leased[worker].boot != beat.boot:
            continue  # leases of an earlier process are void; the next script that reads the worker drops them
        unexpired = sum(expiry > picture.now_ms for expiry in picture.expiries.get(worker, {}).values())
        if unexpired > beat.slots + beat.overdraft:
            yield f"worker {worker} has {unexpired} leases for {beat.slots} slots, and {beat.overdraft} beyond"


def _ticket_breaches(picture: Picture) -> Iterable[str]:
    if picture.tickets.keys() != picture.ticket_expiries.keys():
        odd = sorted(picture.tickets.keys() ^ picture.ticket_expiries.keys())
        yield f"tickets with a record but no expiry, or the reverse: {odd}"
    for ticket in picture.queue.keys() & picture.leases.keys():
        yield f"ticket {ticket} is both in the line and granted"
    for ticket in picture.queue.keys() - picture.tickets.keys() - picture.leases.keys():
        yield f"ticket {ticket} is in the line and has no record"
    for ticket in picture.tickets.keys() - picture.queue.keys() - picture.leases.keys():
        yield f"ticket {ticket} is neither in the line nor granted"
    for ticket, rank in picture.queue.items():
        if (known := picture.tickets.get(ticket)) is not None and known.rank != rank:
            yield f"ticket {ticket} has rank {known.rank:g} and stands at {rank:g}"
    for ticket in picture.passed - picture.tickets.keys():
        yield f"ticket {ticket} was overtaken and has no record"


def _kv_breaches(picture: Picture) -> Iterable[str]:
    counted: Counter[str] = Counter()
    for lease in picture.leases.values():
        counted[lease.worker] += lease.kv_tokens
    for worker, leased in picture.leased.items():
        if counted[worker] != leased.kv_tokens:
            yield f"worker {worker} has {leased.kv_tokens} KV tokens leased, its leases {counted[worker]}"
        if len(picture.expiries.get(worker, {})) != leased.leases:
            yield f"worker {worker} is told to have {leased.leases} leases"


def _team_breaches(picture: Picture) -> Iterable[str]:
    tickets = Counter(ticket.team for ticket in picture.tickets.values())
    leases = Counter(lease.team for lease in picture.leases.values())
    for team in tickets.keys() | leases.keys() | picture.teams.keys():
        told = picture.teams.get(team, Held(0, 0))
        if tickets[team] != told.tickets:
            yield f"team {team} has {tickets[team]} tickets and is told to have {told.tickets}"
        if leases[team] != told.leases:
            yield f"team {team} has {leases[team]} leases and is told to have {told.leases}"


async def take_picture(redis: redis.asyncio.Redis, model: str) -> Picture:
    """Read the model's data in one script, so that nothing changes in between."""
    rows = await redis.eval(_READ, 1, keys.model_prefix(model))
    now_ms, names = int(rows[0]), {name.decode(): value for name, value in rows[1]}
    workers = {id: dict(_raw_pairs(value))[BEAT.encode()] for id, value in _by_id(names, keys.worker(model, ""))}
    ledger = _fields(names.get(keys.ledger(model), []))
    leases, tickets, unreadable = _read_calls(_fields(names.get(keys.calls(model), [])))
    return Picture(
        now_ms,
        workers,
        {field[2:]: _read_leased(text) for field, text in ledger.items() if field.startswith("w:")},
        {id: _scores(value) for id, value in _by_id(names, keys.worker_leases(model, ""))},
        leases,
        _scores(names.get(keys.queue(model), [])),
        tickets,
        unreadable,
        _scores(names.get(keys.tickets(model), [])),
        frozenset(_fields(names.get(keys.passed(model), [])).keys() - {""}),
        {unpacked_team(field[2:]): _read_held(text) for field, text in ledger.items() if field.startswith("t:")},
    )


def _by_id(names: Mapping[str, list[bytes]], prefix: str) -> Iterable[tuple[str, list[bytes]]]:
    """Yield the ids and values of the keys with this prefix; not those below the name of one of them."""
    for name, value in names.items():
        if name.startswith(prefix) and not name.endswith(":heads"):
            yield name.removeprefix(prefix), value


_LEASE = re.compile(r"([LG]) \d+ (\d+) \S+ \S+ (\S+) (\S+) \S+ \S*\n([^\n]*)(?:\n(.*))?", re.DOTALL)
_TICKET = re.compile(r"\d+\n.*\n[^\n]*\n\S+ (\S+) \S+ \S+ \S+\n([^\n]*)", re.DOTALL)
"""The records of lua/shared.lua: leases and grants, tickets."""


def _read_calls(records: Mapping[str, str]) -> tuple[dict[str, LeaseRecord], dict[str, TicketRecord], frozenset[str]]:
    """Return leases (granted ones, too), tickets (granted ones, too), and the ids of what is neither."""
    leases: dict[str, LeaseRecord] = {}
    tickets: dict[str, TicketRecord] = {}
    unreadable = set()
    for id, text in records.items():
        ticket: str | None = text
        if found := _LEASE.fullmatch(text):
            kind, kv_tokens, worker, boot, team, ticket = found.groups()
            leases[id] = LeaseRecord(worker, boot, int(kv_tokens), unpacked_team(team))
            if kind == "L":
                continue
        if found := _TICKET.fullmatch(ticket or ""):
            tickets[id] = TicketRecord(float(found[1]), unpacked_team(found[2]))
        else:
            unreadable.add(id)
    return leases, tickets, frozenset(unreadable)


_READ = """
local clock = redis.call("TIME")
local read = {
  string = function(name) return redis.call("GET", name) end,
  hash = function(name) return redis.call("HGETALL", name) end,
  zset = function(name) return redis.call("ZRANGE", name, 0, -1, "WITHSCORES") end,
}
local rows = {}
for _, name in ipairs(redis.call("KEYS", (KEYS[1]:gsub("[%[%]*?\\\\]", "\\\\%0")) .. "*")) do
  local kind = redis.call("TYPE", name).ok
  if read[kind] then rows[#rows + 1] = {name, read[kind](name)} end
end
return {tostring(clock[1] * 1000 + math.floor(clock[2] / 1000)), rows}
"""


def _read_leased(text: str) -> Leased:
    boot, leases, kv_tokens, _ = text.split(" ")
    return Leased(boot, int(leases), int(kv_tokens))


def _read_held(text: str) -> Held:
    _, tickets, leases = text.split(" ")
    return Held(int(tickets), int(leases))


def _raw_pairs(flat: list[bytes]) -> Iterable[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _pairs(flat: list[bytes]) -> Iterable[tuple[str, str]]:
    return ((name.decode(), value.decode()) for name, value in _raw_pairs(flat))


def _fields(flat: list[bytes]) -> dict[str, str]:
    return dict(_pairs(flat))


def _scores(flat: list[bytes]) -> dict[str, float]:
    return {member: float(score) for member, score in _pairs(flat)}
