"""The ledger's writer with a true Redis, on both databases: each record once, whatever dies or is lost in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis.asyncio
from prometheus_client import CollectorRegistry
from sqlalchemy import Connection, func, select, text

from accounts.database.database import Database
from accounts.database.schema import usage, usage_days, usage_end_users, usage_hours, usage_months
from accounts.ledger import stream as stream_module
from accounts.ledger.lag import LedgerLag
from accounts.ledger.rows import hold_deleted_until, note_deletion
from accounts.ledger.stream import LedgerStream
from accounts.ledger.writer import LedgerWriter
from accounts.metrics import Metrics
from accounts.protocol.usage import UsageBatch, UsageRecord, batch_name, encode_batch
from accounts.usage.retention import Retention
from accounts.usage.summary import DAY_S
from gateway.store.usage import BatchOffer, BatchState, UsageStream
from tests.support.databases import Databases
from tests.support.redis_server import RedisServer
from tests.support.waiting import until
from workers.protocol import keys
from workers.redis.link import connect

AT = 1_800_000_000.0
"""Unix time of the calls' end: the 15th of January 2027, 08:00."""


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    """As the accounts service connects."""
    async with connect(server.url, timeout_s=5.0, retries=0) as connected:
        await connected.flushall()
    async with connect(server.url_of("gateway"), timeout_s=5.0, retries=0) as connected:
        yield connected


def record(number: int, **more: object) -> UsageRecord:
    made = UsageRecord(
        number=number,
        request_id=f"call-{number}",
        started_at=AT - 2,
        ended_at=AT,
        route="/v1/chat/completions",
        outcome="ok",
        status=200,
        organisation="default",
        team="red",
        key="ci",
        alias="chat",
        model="m",
        prompt_tokens=10,
        cached_tokens=4,
        completion_tokens=number,
        queue_ms=3,
        compute_ms=100,
        cost_nano=7,
    )
    return msgspec.structs.replace(made, **more)


def batch(*records: UsageRecord, process: str = "p") -> BatchOffer:
    content = encode_batch(UsageBatch(process=process, records=records))
    return BatchOffer(batch_name(process, records[0].number, records[-1].number), content)


@asynccontextmanager
async def writing(writer: LedgerWriter) -> AsyncIterator[None]:
    task = asyncio.create_task(writer.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def told_of(offer: BatchOffer) -> BatchOffer:
    return BatchOffer(offer.name, b"")


async def committed(gateway: UsageStream, *offers: BatchOffer) -> None:
    """Wait until the gateway knows all of these to be in the database."""
    left = [told_of(offer) for offer in offers]
    deadline = time.monotonic() + 20
    while left:
        exchange = await gateway.exchange(left)
        left = [offer for offer, state in zip(left, exchange.states, strict=True) if state is not BatchState.COMMITTED]
        assert time.monotonic() < deadline, f"not committed: {left}"
        await asyncio.sleep(0.02)


def numbers_in(database: Database) -> list[tuple[str, int]]:
    with database.reading() as connection:
        rows = connection.execute(select(usage.c.process, usage.c.number).order_by(usage.c.process, usage.c.number))
        return [(process, number) for process, number in rows]


def sums_of(database: Database) -> list[tuple[int, int, int]]:
    """Calls, completion tokens and cost of the sums per hour, day and month."""
    found: list[tuple[int, int, int]] = []
    with database.reading() as connection:
        for table in (usage_hours, usage_days, usage_months):
            sums = (func.sum(table.c.num_calls), func.sum(table.c.completion_tokens), func.sum(table.c.cost_nano))
            row = connection.execute(select(*sums)).one()
            found.append((int(row[0] or 0), int(row[1] or 0), int(row[2] or 0)))
    return found


async def test_records_are_written_with_their_sums(client: redis.asyncio.Redis, database: Database) -> None:
    gateway = UsageStream(client, 100)
    offers = [
        batch(record(1), record(2, outcome="cut", end_user="ann"), record(3, ended_at=AT + 3600, end_user="ann")),
        batch(record(1, team="blue", ended_at=AT + 86_400), process="q"),
    ]
    await gateway.exchange(offers)
    async with writing(LedgerWriter(client, database)):
        await committed(gateway, *offers)
    assert numbers_in(database) == [("p", 1), ("p", 2), ("p", 3), ("q", 1)]
    with database.reading() as connection:
        hours = connection.execute(
            select(usage_hours.c.hour, usage_hours.c.team, usage_hours.c.num_calls, usage_hours.c.num_failed)
        ).all()
        day = connection.execute(select(usage_days).where(usage_days.c.team == "red")).one()
        month = connection.execute(select(usage_months.c.month, usage_months.c.num_calls)).all()
        ann = connection.execute(select(usage_end_users)).one()
        row = connection.execute(select(usage).where(usage.c.number == 2)).one()
    assert sorted(map(tuple, hours)) == [
        (AT, "red", 2, 1),
        (AT + 3600, "red", 1, 0),
        (AT + 86_400, "blue", 1, 0),
    ]
    assert (day.day, day.num_calls, day.prompt_tokens, day.cached_tokens) == (1_799_971_200, 3, 30, 12)
    assert (day.completion_tokens, day.queue_ms, day.compute_ms, day.cost_nano) == (6, 9, 300, 21)
    assert {begin for begin, _ in month} == {1_798_761_600}
    assert (ann.end_user, ann.team, ann.num_calls, ann.completion_tokens) == ("ann", "red", 2, 5)
    assert (row.request_id, row.outcome, row.end_user, row.ended_at) == ("call-2", "cut", "ann", AT)
    assert await client.xlen(keys.USAGE) == 0
    assert await client.hlen(keys.USAGE_BATCHES) == 0, "the gateway has been told"


async def test_what_is_sent_again_counts_once(client: redis.asyncio.Redis, database: Database) -> None:
    """The same batch in two entries at once, a batch that overlaps another, and one that was committed already."""
    gateway, one, two = UsageStream(client, 100), batch(record(1), record(2)), batch(record(2), record(3))
    await gateway.exchange([one, two])
    await client.xadd(keys.USAGE, {"name": one.name, "batch": one.batch})
    writer = LedgerWriter(client, database)
    async with writing(writer):
        await committed(gateway, one, two)
        await until(lambda: writer.counts.num_repeated == 3, 10, "all were read")
        await gateway.exchange([one])
        await committed(gateway, one)
    assert numbers_in(database) == [("p", 1), ("p", 2), ("p", 3)]
    assert sums_of(database) == [(3, 6, 21)] * 3
    assert (writer.counts.num_written, writer.counts.num_repeated, writer.counts.num_set_aside) == (3, 5, 0)


async def test_what_is_sent_again_after_it_was_deleted_counts_once(
    client: redis.asyncio.Redis, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    gateway, metrics = UsageStream(client, 100), Metrics(CollectorRegistry())
    writer = LedgerWriter(client, database)
    old, young = record(1), record(2, ended_at=AT + 2)
    first, again = batch(old, young), batch(old)
    late = batch(record(8), record(9, ended_at=AT + 2), process="q")
    async with writing(writer):
        await gateway.exchange([first])
        await committed(gateway, first)
        await Retention(database, metrics, keep_days=10, keep_sums_days=40).delete_old(AT + 10 * DAY_S + 1)
        assert numbers_in(database) == [("p", 2)]
        await gateway.exchange([again, late])
        await committed(gateway, again, late)
    assert numbers_in(database) == [("p", 2), ("q", 9)]
    assert sums_of(database) == [(3, 12, 21)] * 3
    assert (writer.counts.num_written, writer.counts.num_repeated, writer.counts.num_too_old) == (3, 0, 2)
    assert "were not written" in caplog.text
    LedgerLag(client, writer.counts, metrics).show_counts()
    assert metrics.registry.get_sample_value("paddock_ledger_too_old_records_total") == 2


def test_a_later_deletion_is_not_taken_back(database: Database) -> None:
    with database.transaction() as connection:
        assert hold_deleted_until(connection) == 0.0
        note_deletion(connection, AT)
        note_deletion(connection, AT - DAY_S)
    with database.transaction() as connection:
        assert hold_deleted_until(connection) == AT


async def test_several_writers_count_each_record_once(client: redis.asyncio.Redis, database: Database) -> None:
    gateway = UsageStream(client, 10_000)
    offers = [batch(record(2 * n + 1), record(2 * n + 2)) for n in range(150)]
    await gateway.exchange(offers[:100])
    for offer in offers[::3]:
        await client.xadd(keys.USAGE, {"name": offer.name, "batch": offer.batch})
    writers = [LedgerWriter(client, database) for _ in range(3)]
    async with writing(writers[0]), writing(writers[1]), writing(writers[2]):
        await gateway.exchange(offers[100:])
        await committed(gateway, *offers)
        await until(lambda: sum(one.counts.num_repeated for one in writers) == 100, 20, "all were read")
    assert [number for _, number in numbers_in(database)] == list(range(1, 301))
    assert sums_of(database) == [(300, 300 * 301 // 2, 2100)] * 3


async def test_what_a_dead_writer_had_taken_goes_to_another(
    client: redis.asyncio.Redis, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "CLAIM_AFTER_S", 0.3)
    monkeypatch.setattr(stream_module, "CLAIM_EVERY_S", 0.1)
    gateway, offer = UsageStream(client, 100), batch(record(1))
    await gateway.exchange([offer])
    dead = LedgerStream(client)
    assert await dead.take(10, 0.01) == [], "there was no group yet"
    assert len(await dead.take(10, 0.01)) == 1
    async with writing(LedgerWriter(client, database)):
        await committed(gateway, offer)
    assert numbers_in(database) == [("p", 1)]


async def test_a_redis_that_has_lost_everything_is_sent_it_again(
    client: redis.asyncio.Redis, server: RedisServer, database: Database
) -> None:
    """Between the sending and the commit, and between the commit and its note."""
    gateway, first, second = UsageStream(client, 100), batch(record(1)), batch(record(2))
    await gateway.exchange([first])
    async with connect(server.url, timeout_s=5.0, retries=0) as operator:
        await operator.flushall()
        assert (await gateway.exchange([told_of(first)])).states == (BatchState.ABSENT,)
        assert (await gateway.exchange([first, second])).states == (BatchState.SENT, BatchState.SENT)
        async with writing(LedgerWriter(client, database)):
            await until(lambda: len(numbers_in(database)) == 2, 10, "both are written")
            await operator.flushall()
            (state,) = (await gateway.exchange([first])).states
            assert state in (BatchState.SENT, BatchState.COMMITTED), "its note may have come after the loss"
            if state is BatchState.SENT:
                await committed(gateway, first)
    assert numbers_in(database) == [("p", 1), ("p", 2)]
    assert sums_of(database) == [(2, 3, 14)] * 3


async def test_what_can_not_be_written_is_set_aside(client: redis.asyncio.Redis, database: Database) -> None:
    """Garbage, a follower that fails over one record, and values that fit into no column."""
    gateway = UsageStream(client, 100)
    odd = record(3, alias="a" * 999, request_id="\0r", prompt_tokens=1 << 70 if False else 1 << 62, key="k\0" * 99)
    offers = [batch(record(1), record(2, request_id="bad"), odd), BatchOffer("p:9:9", b"garbage")]
    await gateway.exchange(offers)
    await client.xadd(keys.USAGE, {"name": b"\xff", "other": "thing"})
    writer = LedgerWriter(client, database, [Picky()])
    async with writing(writer):
        await committed(gateway, *offers)
        await until(lambda: writer.counts.num_set_aside == 3, 10, "three are set aside")
    assert numbers_in(database) == [("p", 1), ("p", 3)]
    with database.reading() as connection:
        row = connection.execute(select(usage).where(usage.c.number == 3)).one()
    assert (row.alias, row.request_id, row.key, row.prompt_tokens) == ("a" * 256, "r", "k" * 64, (1 << 31) - 1)
    exchange = await gateway.exchange([])
    assert (exchange.num_entries, exchange.num_set_aside) == (0, 3)


class Picky:
    """A follower that can't take one record, and remembers those of committed transactions in the database."""

    def on_written(self, connection: Connection, records: Sequence[UsageRecord]) -> None:
        if any(one.request_id == "bad" for one in records):
            raise ValueError("no such call")


class Noting:
    """A follower that writes in the same transaction, and fails the first time."""

    def __init__(self) -> None:
        self.fails = True

    def on_written(self, connection: Connection, records: Sequence[UsageRecord]) -> None:
        for one in records:
            connection.execute(text("INSERT INTO noted VALUES (:number)"), {"number": one.number})
        if self.fails:
            self.fails = False
            connection.execute(text("SELECT * FROM no_such_table"))


async def test_followers_write_with_the_records_or_not_at_all(client: redis.asyncio.Redis, database: Database) -> None:
    with database.transaction() as connection:
        connection.execute(text("CREATE TABLE noted (number INTEGER)"))
    gateway, offers = UsageStream(client, 100), [batch(record(1), record(2)), batch(record(2))]
    async with writing(LedgerWriter(client, database, [Noting()])):
        await gateway.exchange(offers)
        await committed(gateway, *offers)
    with database.reading() as connection:
        assert sorted(connection.scalars(text("SELECT number FROM noted"))) == [1, 2]
    assert sums_of(database) == [(2, 3, 14)] * 3


async def test_a_postgres_that_is_away_delays(
    client: redis.asyncio.Redis, databases: Databases, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = databases.make("postgresql", tmp_path)
    gateway, before, meanwhile = UsageStream(client, 100), batch(record(1)), batch(record(2))
    async with writing(LedgerWriter(client, database)):
        await gateway.exchange([before])
        await committed(gateway, before)
        databases.postgres.kill()
        await gateway.exchange([meanwhile])
        await until(lambda: "it waits in Redis" in caplog.text, 20, "the outage is told")
        assert (await gateway.exchange([told_of(meanwhile)])).states == (BatchState.SENT,)
        databases.postgres.start()
        await committed(gateway, meanwhile)
    assert numbers_in(database) == [("p", 1), ("p", 2)]
    assert caplog.text.count("it waits in Redis") == 1
    database.close()


async def test_a_full_stream_takes_no_more(client: redis.asyncio.Redis, database: Database) -> None:
    gateway, offers = UsageStream(client, 2), [batch(record(number)) for number in (1, 2, 3)]
    exchange = await gateway.exchange(offers)
    assert (exchange.states, exchange.num_entries) == ((BatchState.SENT, BatchState.SENT, BatchState.FULL), 2)
    async with writing(LedgerWriter(client, database)):
        await committed(gateway, *offers[:2])
        await gateway.exchange(offers[2:])
        await committed(gateway, offers[2])
    assert len(numbers_in(database)) == 3


async def test_a_stream_that_was_deleted_is_noticed(client: redis.asyncio.Redis) -> None:
    gateway, offer = UsageStream(client, 10), batch(record(1))
    await gateway.exchange([offer])
    await client.delete(keys.USAGE)
    assert (await gateway.exchange([told_of(offer)])).states == (BatchState.ABSENT,)
    assert (await gateway.exchange([offer])).states == (BatchState.SENT,)
    assert await client.xlen(keys.USAGE) == 1


async def test_old_notes_and_dead_readers_are_removed(
    client: redis.asyncio.Redis, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "IDLE_READER_S", 0.0)
    now = time.time()
    names: dict[Any, Any] = {"p:1:1": f"{now - 90_000:.0f}", "p:2:2": f"{now:.0f}", "p:3:3": "sent"}
    await client.hset(keys.USAGE_BATCHES, mapping=names)
    dead = LedgerStream(client)
    await dead.take(1, 0.01)
    await dead.take(1, 0.01)
    reader = LedgerStream(client)
    await reader.take(1, 0.01)
    await asyncio.sleep(0.01)
    await reader.tidy()
    assert set(await client.hkeys(keys.USAGE_BATCHES)) == {b"p:2:2", b"p:3:3"}
    assert await client.xinfo_consumers(keys.USAGE, keys.USAGE_GROUP) == []
