"""What the usage of calls costs: a gateway's CPU per call and per token, and how fast the ledger takes records.

    python -m benchmarks.usage_cost

Calls are metered as a gateway does, with a journal on a real disk, without anything else of a gateway. Per token: the
loop that writes an answer's chunks, with and without a meter, in turns. The longest single store and append beside a
process that writes the disk full of other things are shown too: whatever stalls there would stall every stream.

The ledger's writer reads from a real Redis into SQLite, which waits for the disk, and PostgreSQL, which does not.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
from prometheus_client import CollectorRegistry

from accounts.database.database import Database, open_database
from accounts.database.upgrade import upgrade
from accounts.ledger.writer import LedgerWriter
from accounts.protocol.records import Price, PriceListRecord
from accounts.protocol.usage import UsageBatch, UsageRecord, batch_name, encode_batch
from benchmarks.load import quantile
from benchmarks.table import Row, print_rows
from gateway.api.responder import PartialUsage
from gateway.call import Call, Principal
from gateway.limits.cost import Prices
from gateway.store.client import connect
from gateway.store.usage import BatchOffer, UsageStream
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_log import RequestLog
from gateway.usage.recorder import UsageRecorder
from gateway.usage.usage import open_usage
from tests.support.postgres import PostgresServer
from tests.support.redis_server import RedisServer
from workers.protocol.events import CallEvent, Started, Text, Usage
from workers.protocol.heartbeat import WorkerAddress

CALLS, TOKENS = 20_000, 200_000
CALL_BAR_US, TOKEN_BAR_US = 30.0, 1.0
RECORDS, BATCH = 40_000, 100
RECORDS_BAR = 500
"""Records per second: a fleet of a thousand slots whose answers take two seconds."""
WORKER = WorkerAddress("m", "w", "b", "http://w")
PRINCIPAL = Principal("ci", "red", None, admin=False, organisation="default", user="ann@example.com")
PRICES = PriceListRecord(prices=(Price(model="m", per_million_prompt=0.5, per_million_completion=1.5),))


class PriceList:
    """The source of prices, which gateways have from their directory."""

    prices = PRICES


COSTS = Prices(PriceList())
NOISE = """
import os, sys
with open(sys.argv[1], "wb") as file:
    while True:
        for _ in range(64):
            file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
"""


@contextmanager
def recording(folder: Path) -> Iterator[UsageRecorder]:
    """What records calls, with a journal in the folder that nothing is sent from."""
    usage = open_usage(folder, 1 << 30, cast(UsageStream, None), Metrics(CollectorRegistry()), COSTS.cost_of)
    recorder = usage._recorder
    assert recorder is not None
    yield recorder


def ended(request_log: RequestLog) -> RequestLog:
    """The log of a request whose answer came."""
    answer = request_log.answer
    answer.begin_wait("m").end()
    answer.begin_attempt(WORKER)
    answer.attempts[0].begin_answer()
    answer.attempts[0].end()
    answer.model, request_log.usage, request_log.status, request_log.outcome = "m", Usage(900, 200, 700), 200, "ok"
    return request_log


def call_of(request_log: RequestLog) -> Call:
    at = request_log.received_at
    return Call(request_log.request_id, PRINCIPAL, "chat", "m", at, at + 60, at + 60)


def call_us(folder: Path) -> tuple[float, float]:
    """Return microseconds of CPU per call, and the longest single call, in wall time."""
    with recording(folder) as recorder:
        logs = [ended(RequestLog(f"req-{number:024}", "POST", "/v1/chat/completions")) for number in range(CALLS)]
        calls = [call_of(request_log) for request_log in logs]
        longest_s = 0.0
        began = time.thread_time()
        for call, request_log in zip(calls, logs, strict=True):
            at = time.perf_counter()
            meter = recorder.begin(call, request_log)
            meter.note_begun(Usage(900, 0, 700), request_log.answer)
            meter.note_written(200)
            meter.finish(request_log)
            longest_s = max(longest_s, time.perf_counter() - at)
        return (time.thread_time() - began) / CALLS * 1e6, longest_s * 1e6


def written_us(recorder: UsageRecorder | None) -> float:
    """Return microseconds per token of the part of the loop that counts and notes what is written."""
    request_log = RequestLog("r", "POST", "/v1/chat/completions")
    if recorder is not None:
        request_log.meter = recorder.begin(call_of(request_log), request_log)
    partial_usage, note_written = PartialUsage(request_log), request_log.meter.note_written
    partial_usage.add(0, [Started(1, 0, 900, 700)])
    events: list[CallEvent] = [Text(1, "word ")]
    out: list[bytes] = []
    written = out.append
    began = time.thread_time()
    for number in range(TOKENS):
        partial_usage.add(0, events)
        body = b'data: {"choices":[{"delta":{"content":"word "}}]}\n\n'
        note_written(partial_usage.num_generated)
        written(body)
        if number % 1000 == 0:
            out.clear()
    took_s = time.thread_time() - began
    request_log.meter.finish(request_log)
    return took_s / TOKENS * 1e6


def token_us(folder: Path, rounds: int) -> tuple[float, float]:
    """Return microseconds per token that a meter adds, and of the loop without one."""
    with recording(folder) as recorder:
        pairs = [(written_us(None), written_us(recorder)) for _ in range(rounds + 1)][1:]
    return statistics.median(on - off for off, on in pairs), statistics.median(off for off, _ in pairs)


def stall_us(folder: Path) -> tuple[float, float]:
    """Return the 99.99th percentile and the longest of single stores and appends while the disk is written to."""
    noise = subprocess.Popen([sys.executable, "-c", NOISE, str(folder / "noise")])
    took: list[float] = []
    try:
        with recording(folder) as recorder:
            until = time.monotonic() + 20.0
            while time.monotonic() < until:
                request_log = ended(RequestLog("r", "POST", "/v1/chat/completions"))
                meter = recorder.begin(call_of(request_log), request_log)
                for number in range(100):
                    at = time.perf_counter()
                    meter.note_written(number)
                    took.append(time.perf_counter() - at)
                at = time.perf_counter()
                meter.finish(request_log)
                took.append(time.perf_counter() - at)
                time.sleep(0.002)
    finally:
        noise.kill()
        noise.wait()
    return quantile(took, 0.9999) * 1e6, max(took) * 1e6


def batches(first: int) -> list[BatchOffer]:
    """Batches of RECORDS records of many callers, with numbers from `first` on."""
    made: list[BatchOffer] = []
    for begin in range(first, first + RECORDS, BATCH):
        records = tuple(record_of(number) for number in range(begin, begin + BATCH))
        content = encode_batch(UsageBatch(process="p", records=records))
        made.append(BatchOffer(batch_name("p", begin, begin + BATCH - 1), content))
    return made


def record_of(number: int) -> UsageRecord:
    at = time.time()
    return UsageRecord(
        number=number,
        request_id=f"req-{number:024}",
        started_at=at - 2,
        ended_at=at,
        route="/v1/chat/completions",
        outcome="ok",
        status=200,
        organisation="default",
        team=f"team-{number * 7919 % 50}",
        key=f"key-{number * 7919 % 200}",
        user=f"user-{number * 7919 % 500}@example.com",
        alias="chat",
        model=f"model-{number % 5}",
        prompt_tokens=900,
        cached_tokens=700,
        completion_tokens=200,
        queue_ms=3,
        compute_ms=2000,
        cost_nano=123_456_789,
        trace_id="0" * 32,
    )


async def records_per_s(database: Database, server: RedisServer) -> float:
    """Return how many records a writer takes per second, from a stream that is full."""
    async with connect(server.url) as client:
        await client.flushall()
        gateway, writer = UsageStream(client, 1 << 20), LedgerWriter(client, database)
        for offer in batches(1):
            await gateway.exchange([offer])
        began = time.perf_counter()
        task = asyncio.create_task(writer.run())
        while writer.counts.num_written < RECORDS:  # noqa: ASYNC110 - looked at from outside
            await asyncio.sleep(0.005)
        took_s = time.perf_counter() - began
        task.cancel()
        await asyncio.wait([task])
        return RECORDS / took_s


def ledger_rows(folder: Path) -> Iterator[Row]:
    run = cast(Callable[[Coroutine[Any, Any, float]], float], asyncio.run)
    with RedisServer() as server, PostgresServer() as postgres:
        for url in (f"sqlite:///{folder / 'accounts.sqlite'}", postgres.make_database()):
            database = open_database(url, folder)
            upgrade(database)
            rate = run(records_per_s(database, server))
            name = "SQLite" if database.is_sqlite else "PostgreSQL"
            database.close()
            yield Row(f"records into {name}", f"{rate:,.0f}/s", "", f">= {RECORDS_BAR}/s", rate >= RECORDS_BAR)


def measure(rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        of_call, longest = call_us(folder / "calls")
        of_token, loop = token_us(folder / "tokens", rounds)
        p9999, worst = stall_us(folder)
        size = len(msgspec.msgpack.encode(record_of(1)))
        return [
            Row(
                "a call, metered and recorded",
                f"{of_call:.1f} us",
                "",
                f"<= {CALL_BAR_US:g} us",
                of_call <= CALL_BAR_US,
            ),
            Row("the longest of them", f"{longest:.0f} us", "", "", True),
            Row("a record on disk", f"{size} bytes", "", "", True),
            Row(
                "a token, more than without a meter",
                f"{of_token:+.3f} us",
                f"of {loop:.2f} us",
                f"<= {TOKEN_BAR_US:g} us",
                of_token <= TOKEN_BAR_US,
            ),
            Row(
                "one store or append beside a busy disk, p99.99", f"{p9999:.0f} us", f"longest {worst:.0f} us", "", True
            ),
            *ledger_rows(folder),
        ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    print_rows("what the usage of calls costs", measure(parser.parse_args().rounds))
