"""Checks one model's admission data on a live Redis, by invariants that hold at every moment."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import redis.asyncio

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
class Picture:
    """One model's admission data, read in a single transaction."""

    now_ms: int
    workers: dict[str, bytes]
    """Worker id -> its record; only live workers."""
    leased: dict[str, Leased]
    """Worker id -> the leases and KV tokens that Redis counts for it."""
    expiries: dict[str, dict[str, float]]
    """Worker id -> lease id -> expiry, unix ms."""
    leases: dict[str, dict[str, str]]
    queue: dict[str, float]
    tickets: dict[str, dict[str, str]]
    ticket_expiries: dict[str, float]
    bids: frozenset[str]
    """Ids of the tickets that have bids."""
    fair: dict[str, str]


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
    for lease, fields in picture.leases.items():
        worker = fields.get("worker", "")
        if places.get(lease) != worker:
            yield f"lease {lease} is for worker {worker} and counts on worker {places.get(lease)}"
        if worker in picture.leased and fields.get("boot") != (boot := picture.leased[worker].boot):
            yield f"lease {lease} is for process {fields.get('boot')}, not {boot}"
        if not fields.get("fence", "").isdigit():
            yield f"lease {lease} has no fencing token"
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
    for ticket in picture.queue.keys() - picture.tickets.keys():
        yield f"ticket {ticket} is in the line and has no record"
    for ticket in picture.tickets.keys() - picture.queue.keys() - picture.leases.keys():
        yield f"ticket {ticket} is neither in the line nor granted"
    for ticket, rank in picture.queue.items():
        if (known := picture.tickets.get(ticket, {}).get("rank")) is not None and float(known) != rank:
            yield f"ticket {ticket} has rank {known} and stands at {rank}"
    for ticket in picture.tickets.keys() ^ picture.bids:
        yield f"ticket {ticket} has a record but no bids, or the reverse"


def _kv_breaches(picture: Picture) -> Iterable[str]:
    counted: Counter[str] = Counter()
    for fields in picture.leases.values():
        counted[fields.get("worker", "")] += int(fields.get("kv", 0))
    for worker, leased in picture.leased.items():
        if counted[worker] != leased.kv_tokens:
            yield f"worker {worker} has {leased.kv_tokens} KV tokens leased, its leases {counted[worker]}"
        if len(picture.expiries.get(worker, {})) != leased.leases:
            yield f"worker {worker} is told to have {leased.leases} leases"


def _team_breaches(picture: Picture) -> Iterable[str]:
    teams = Counter(fields.get("team", "") for fields in picture.tickets.values())
    told = {name[2:]: int(number) for name, number in picture.fair.items() if name.startswith("n:")}
    for team in teams.keys() | told.keys():
        if teams[team] != told.get(team, 0):
            yield f"team {team} has {teams[team]} tickets and is told to have {told.get(team, 0)}"
    held = Counter(fields.get("team", "") for fields in picture.leases.values())
    told = {name[2:]: int(number) for name, number in picture.fair.items() if name.startswith("h:")}
    for team in held.keys() | told.keys():
        if held[team] != told.get(team, 0):
            yield f"team {team} has {held[team]} leases and is told to have {told.get(team, 0)}"


async def take_picture(redis: redis.asyncio.Redis, model: str) -> Picture:
    """Read the model's data in one script, so that nothing changes in between."""
    rows = await redis.eval(_READ, 1, keys.model_prefix(model))
    now_ms, names = int(rows[0]), {name.decode(): value for name, value in rows[1]}
    prefix = keys.model_prefix(model)
    records: dict[str, bytes] = {}
    bids: set[str] = set()
    expiries: dict[str, dict[str, float]] = {}
    hashes: dict[str, dict[str, dict[str, str]]] = {"lease": {}, "ticket": {}}
    for name, value in names.items():
        match = re.fullmatch(r"(worker|leases|lease|ticket):(.+?)(:heads|:bids)?", name.removeprefix(prefix))
        if match is None:
            continue
        kind, id, suffix = match.groups()
        if suffix == ":bids":
            bids.add(id)
        elif suffix == ":heads":
            continue
        elif kind == "leases":
            expiries[id] = _scores(value)
        elif kind == "worker":
            records[id] = dict(_raw_pairs(value))[BEAT.encode()]
        else:
            hashes[kind][id] = _fields(value)
    queue = _scores(names.get(keys.queue(model), []))
    ticket_expiries = _scores(names.get(keys.tickets(model), []))
    leased = {worker: _read_leased(text) for worker, text in _fields(names.get(keys.leased(model), [])).items()}
    fair = _fields(names.get(keys.fair(model), []))
    return Picture(
        now_ms,
        records,
        leased,
        expiries,
        hashes["lease"],
        queue,
        hashes["ticket"],
        ticket_expiries,
        frozenset(bids),
        fair,
    )


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


def _raw_pairs(flat: list[bytes]) -> Iterable[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _pairs(flat: list[bytes]) -> Iterable[tuple[str, str]]:
    return ((name.decode(), value.decode()) for name, value in _raw_pairs(flat))


def _fields(flat: list[bytes]) -> dict[str, str]:
    return dict(_pairs(flat))


def _scores(flat: list[bytes]) -> dict[str, float]:
    return {member: float(score) for member, score in _pairs(flat)}
