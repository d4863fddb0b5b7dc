"""Ten million calls in the ledger: how long its pages and sums take, on SQLite and on PostgreSQL.

    python -m benchmarks.ledger [--rows N] [--database sqlite|postgresql] [--folder FOLDER]

Calls of 1,000 teams, 5,000 keys, 8,000 users, 12 models and 90 days, most of them of a few, are made inside the
database. Then the handlers of `/admin/usage` answer queries with all kinds of filters, also ones that match little or
nothing, at random depths; JSON is included, HTTP is not. Of SQLite's file nothing is in memory at first. A database of
ten million calls takes 6 to 9 GB, which are freed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Index, text
from starlette.responses import Response

from accounts.api.api import AdminRequest, Handler
from accounts.database.database import Database, open_database
from accounts.database.schema import metadata, usage
from accounts.protocol.caller import Caller
from accounts.usage.routes import UsageRoutes
from accounts.usage.summary import DAY_S, HOUR_S, SUMS
from benchmarks.load import quantile
from benchmarks.table import Row, print_rows
from tests.support.postgres import PostgresServer

ROWS, QUICK_ROWS = 10_000_000, 200_000
BATCH = 200_000
BEGIN = int(datetime(2026, 8, 1, tzinfo=UTC).timestamp())
DAYS = 92
"""August to October 2026."""
TEAMS, KEYS_OF_TEAM, USERS_OF_TEAM, MODELS, END_USERS = 1000, 5, 8, 12, 20_000
PAGES = 300
PAGE_BAR_S, MONTH_BAR_S = 1.0, 0.05
DATABASES = ("sqlite", "postgresql")

PRIME = 1_000_003
TEAM = f"(x * x / {PRIME} * x / {PRIME} * {TEAMS} / {PRIME})"
"""A number below TEAMS from one below PRIME; small ones are frequent, as with few teams that call much."""
CALLS = f"""
INSERT INTO usage (process, number, request_id, started_at, ended_at, route, outcome, status, organisation, team,
    "key", "user", end_user, alias, model, adapter, prompt_tokens, cached_tokens, completion_tokens, media_tokens,
    queue_ms, compute_ms, cost_nano, trace_id)
WITH RECURSIVE numbers(i) AS (
    SELECT CAST(:first AS BIGINT) UNION ALL SELECT i + 1 FROM numbers WHERE i + 1 < :end
), chances AS (
    SELECT i, i * 48271 % {PRIME} AS x, i * 69621 % 999983 AS y, i * 40692 % 999979 AS z FROM numbers
), calls AS (
    SELECT i, x, y, z, {TEAM} AS team, y * y / 999983 * {MODELS} / 999983 AS model,
        CAST(:begin + i * :step + z % 30000 * 0.001 AS DOUBLE PRECISION) AS ended_at
    FROM chances
)
SELECT 'process-' || CAST(i % 4 AS VARCHAR(8)), i,
    'req-' || CAST(x AS VARCHAR(8)) || '-' || CAST(y AS VARCHAR(8)) || '-' || CAST(i AS VARCHAR(12)),
    ended_at - 3.5, ended_at, '/v1/chat/completions',
    CASE WHEN z % 100 < 97 THEN 'ok' WHEN z % 300 = 97 THEN 'cut' WHEN z % 200 = 98 THEN 'queue_timeout'
        WHEN z % 100000 = 99 THEN 'worker_lost' ELSE 'client_gone' END,
    200, 'default', 'team-' || CAST(team AS VARCHAR(8)),
    'key-' || CAST(team AS VARCHAR(8)) || '-' || CAST(y % {KEYS_OF_TEAM} AS VARCHAR(8)),
    CASE WHEN x % 10 < 3 THEN '' ELSE 'person-' || CAST(team * {USERS_OF_TEAM} + z % {USERS_OF_TEAM} AS VARCHAR(8))
        || '@example.com' END,
    CASE WHEN y % 10 < 8 THEN '' ELSE 'customer-' || CAST(x * y % {END_USERS} AS VARCHAR(8)) END,
    CASE WHEN i % 50000 = 7 THEN 'rare' ELSE 'alias-' || CAST(model + z % 3 AS VARCHAR(8)) END,
    'model-' || CAST(model AS VARCHAR(8)) || '-instruct', '', 200 + x % 4000, x % 200, 10 + y % 900, 0, z % 2000,
    500 + y % 20000, 1000 * (200 + x % 4000) + 4000 * (10 + y % 900), ''
FROM calls
"""
FLOOR = {"sqlite": "CAST(ended_at AS BIGINT)", "postgresql": "CAST(floor(ended_at) AS BIGINT)"}
"""The whole seconds of a call's end. SQLite cuts a number off, PostgreSQL rounds it."""
OF_CALLS = "COUNT(*), SUM(CASE WHEN outcome <> 'ok' THEN 1 ELSE 0 END), " + ", ".join(f"SUM({n})" for n in SUMS[2:])
OF_SUMS = ", ".join(f"SUM({name})" for name in SUMS)
ROLL_UPS = (
    f"""INSERT INTO usage_hours
    SELECT FLOOR / {HOUR_S} * {HOUR_S}, organisation, team, "key", "user", alias, model, adapter, {OF_CALLS}
    FROM usage WHERE ended_at >= :begin AND ended_at < :end GROUP BY 1, 2, 3, 4, 5, 6, 7, 8""",
    f"""INSERT INTO usage_days SELECT hour / {DAY_S} * {DAY_S}, organisation, team, model, {OF_SUMS}
    FROM usage_hours WHERE hour >= :begin AND hour < :end GROUP BY 1, 2, 3, 4""",
    f"""INSERT INTO usage_end_users SELECT FLOOR / {DAY_S} * {DAY_S}, team, end_user, {OF_CALLS}
    FROM usage WHERE end_user <> '' AND ended_at >= :begin AND ended_at < :end GROUP BY 1, 2, 3""",
)
"""Sums of one day."""
MONTHS = tuple(int(datetime(2026, month, 1, tzinfo=UTC).timestamp()) for month in (8, 9, 10, 11))
OF_MONTH = f"""INSERT INTO usage_months (month, organisation, team, model, {", ".join(SUMS)})
    SELECT CAST(:begin AS BIGINT), organisation, team, model, {OF_SUMS}
    FROM usage_days WHERE day >= :begin AND day < :end GROUP BY 2, 3, 4"""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds that queries of one kind took."""

    what: str
    seconds: list[float]
    bar_s: float | None = None

    def row(self, database: str) -> Row:
        p50, p95, most = (quantile(self.seconds, share) * 1e3 for share in (0.5, 0.95, 1.0))
        bar = "" if self.bar_s is None else f"p95 <= {self.bar_s * 1e3:g} ms"
        reached = self.bar_s is None or p95 <= self.bar_s * 1e3
        return Row(f"{database}: {self.what}", f"{p50:.1f} ms p50, {p95:.1f} p95, {most:.1f} most", "", bar, reached)


def fill(database: Database, num_rows: int) -> None:
    """Make the tables, calls and sums. Indexes come last, which takes a quarter of the time."""
    engine = database.engine
    indexes = [index for index in usage.indexes if isinstance(index, Index)]
    for index in indexes:
        usage.indexes.discard(index)
    metadata.create_all(engine)
    usage.indexes.update(indexes)
    step = DAYS * DAY_S / num_rows
    with _quickly(database):
        for first in range(0, num_rows, BATCH):
            with database.transaction() as connection:
                end = min(first + BATCH, num_rows)
                connection.execute(text(CALLS), {"first": first, "end": end, "begin": BEGIN, "step": step})
        with database.transaction() as connection:
            next(index for index in indexes if len(index.columns) == 2).create(connection)
        for day in range(BEGIN, BEGIN + DAYS * DAY_S, DAY_S):
            for statement in ROLL_UPS:
                of_day = text(statement.replace("FLOOR", FLOOR[engine.dialect.name]))
                with database.transaction() as connection:
                    connection.execute(of_day, {"begin": day, "end": day + DAY_S})
        for begin, end in itertools.pairwise(MONTHS):
            with database.transaction() as connection:
                connection.execute(text(OF_MONTH), {"begin": begin, "end": end})
        for index in indexes:
            if len(index.columns) > 2:
                with database.transaction() as connection:
                    index.create(connection)
        with database.transaction() as connection:
            connection.execute(text("ANALYZE"))


@contextlib.contextmanager
def _quickly(database: Database) -> Iterator[None]:
    """Let a new database be filled without waiting for its disk, nor for a statement's time limit."""
    engine = database.engine
    if database.is_sqlite:
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=MEMORY")
        yield
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        return
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("ALTER ROLE postgres SET statement_timeout = 0")
        connection.exec_driver_sql("ALTER SYSTEM SET max_wal_size = '1GB'")
        connection.exec_driver_sql("ALTER SYSTEM SET synchronous_commit = off")
        connection.exec_driver_sql("SELECT pg_reload_conf()")
    yield


def forget(folder: Path) -> None:
    """Have the system forget what it holds of a folder's files."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def time_pages(database: Database, num: int, about: str = "") -> list[Timing]:
    """Ask for pages by every filter alone, by two or three at once, and by none; each at a random depth."""
    handler, chance = UsageRoutes(database).list_calls, random.Random(16)
    kinds = {"newest calls": 0, "by one filter": 1, "by two filters": 2, "by three filters": 3}
    timings = []
    for what, num_filters in kinds.items():
        seconds = [ask(handler, _query(chance, num_filters)) for _ in range(num if num_filters else num // 10)]
        timings.append(Timing(f"a page of 100 calls, {what}{about}", seconds, PAGE_BAR_S))
    return timings


def _query(chance: random.Random, num_filters: int) -> dict[str, str]:
    """Return a random query. Values are frequent or rare, and may contradict each other."""
    team = chance.choice((0, 1, chance.randrange(TEAMS), TEAMS - 1))
    values = {
        "team": f"team-{team}",
        "key": f"key-{chance.choice((team, chance.randrange(TEAMS)))}-{chance.randrange(KEYS_OF_TEAM)}",
        "user": f"person-{team * USERS_OF_TEAM + chance.randrange(USERS_OF_TEAM)}@example.com",
        "end_user": f"customer-{chance.randrange(END_USERS)}",
        "alias": chance.choice(("alias-0", "alias-5", "alias-13", "rare", "none")),
        "model": f"model-{chance.choice((0, 5, 11, 99))}-instruct",
        "outcome": chance.choice(("ok", "cut", "queue_timeout", "worker_lost", "failed", "none")),
    }
    query = {name: values[name] for name in chance.sample(sorted(values), num_filters)}
    if chance.random() < 0.5:
        query["to"] = str(BEGIN + chance.randrange(DAYS * DAY_S))
    if chance.random() < 0.25:
        query["from"] = str(BEGIN - chance.randrange(DAYS * DAY_S))
    return query


def time_sums(database: Database) -> list[Timing]:
    handler = UsageRoutes(database).sum_up
    september, autumn = {"from": "2026-09-01", "to": "2026-10-01"}, {"from": "2026-08-17", "to": "2026-10-20T07:00"}
    asked = {
        "a month by team and model": ({**september, "group_by": "team,model"}, MONTH_BAR_S),
        "the same, 10,000 sums at once": ({**september, "group_by": "team,model", "limit": "10000"}, None),
        "a month by model": ({**september, "group_by": "model"}, MONTH_BAR_S),
        "a month of one team by day and model": ({**september, "team": "team-3", "group_by": "day,model"}, None),
        "nine weeks and some hours by team and model": ({**autumn, "group_by": "team,model"}, None),
        "a month of one team by key": ({**september, "team": "team-3", "group_by": "key"}, None),
        "a month of one end user by day": ({**september, "end_user": "customer-7", "group_by": "day"}, None),
    }
    return [Timing(what, [ask(handler, query) for _ in range(10)], bar_s) for what, (query, bar_s) in asked.items()]


def ask(handler: Handler, query: dict[str, str]) -> float:
    """Return the seconds that a request takes."""
    request = AdminRequest(Caller(key="first", role="admin"), {}, query, b"", {})
    began = time.perf_counter()
    answer = handler(request)
    took = time.perf_counter() - began
    if not isinstance(answer, Response) or answer.status_code != 200:
        raise RuntimeError(f"{query} was not answered")
    return took


@contextlib.contextmanager
def filled(name: str, num_rows: int, folder: Path | None = None) -> Iterator[Database]:
    """Yield a database with this many calls; it is removed at the end."""
    began = time.monotonic()
    with contextlib.ExitStack() as held:
        if name == "sqlite":
            place = Path(tempfile.mkdtemp(prefix="pd-ledger-", dir=folder))
            held.callback(shutil.rmtree, place, ignore_errors=True)
            url = f"sqlite:///{place / 'accounts.sqlite'}"
        else:
            server = held.enter_context(PostgresServer())
            place, url = server.folder, server.make_database()
        database = open_database(url, place)
        fill(database, num_rows)
        database.engine.dispose()
        if database.is_sqlite:
            forget(place)
        size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file()) / 1e9
        print(f"{name}: {num_rows:,} calls in {time.monotonic() - began:.0f} s, {size:.1f} GB", flush=True)
        yield database
        database.close()


def measure(num_rows: int, names: tuple[str, ...] = DATABASES, folder: Path | None = None) -> list[Row]:
    rows = []
    for name in names:
        with filled(name, num_rows, folder) as database:
            cold = time_pages(database, PAGES // 3, ", nothing in memory") if database.is_sqlite else []
            rows += [timing.row(name) for timing in (*cold, *time_pages(database, PAGES), *time_sums(database))]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger", description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--database", choices=DATABASES, action="append")
    parser.add_argument("--folder", type=Path, help="where the database of SQLite lies; default: the system's")
    asked = parser.parse_args()
    print_rows("pages and sums of the ledger", measure(asked.rows, tuple(asked.database or DATABASES), asked.folder))


if __name__ == "__main__":
    main()
