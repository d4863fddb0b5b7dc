"""Gateways, the ledger's writer, Redis and the database are killed at random: the ledger says what callers received."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis
from sqlalchemy import Row, func, select
from sqlalchemy.exc import OperationalError

from accounts.database.database import Database, open_database
from accounts.database.schema import usage, usage_days, usage_hours, usage_months
from tests.support.databases import BACKENDS, Backend, Databases
from tests.support.raw_calls import Got, call_raw
from tests.support.stack import Process, Stack
from tests.support.waiting import until
from workers.protocol import keys

MODEL = "pool"
NUM_GATEWAYS, NUM_CALLERS = 3, 24
STEP_MS, FEWEST, MOST = 10, 1, 40
PAUSES_S = (0.05, 0.6)
"""Shortest and longest time between two blows."""
MOST_UNSENT = 1
"""Tokens that a gateway counts before it hands them to the kernel: killed in between, it counted what never left it."""
SETTLE_S = 60.0


@pytest.fixture(scope="module")
def databases() -> Iterator[Databases]:
    made = Databases()
    yield made
    made.close()


@dataclass(slots=True)
class Call:
    id: str
    leaves: bool
    got: Got
    """What its caller received."""


@dataclass(slots=True)
class Bank:
    """Gateways, an accounts service, Redis and a database that die and come back, and the calls through all that."""

    stack: Stack
    url: str
    kill_database: Callable[[], None] | None
    """Kill the database and start it again; None: it lies in the accounts service."""
    random: random.Random
    gateways: list[Process] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    blows: Counter[str] = field(default_factory=Counter)
    accounts: Process | None = None

    def start(self) -> None:
        for number in range(2):
            flags = ("--step-ms", str(STEP_MS), "--tokens", "5000")
            self.stack.fake_worker(MODEL, *flags, worker_id=f"w{number}", slots=NUM_CALLERS, wait=False)
        self.accounts = self.stack.accounts(database_url=self.url, wait=False)
        self.gateways = [self._gateway() for _ in range(NUM_GATEWAYS)]
        for gateway in self.gateways:
            self.stack.wait_until_ready(gateway)
            self.stack.wait_until_listed(gateway, MODEL)

    def _gateway(self) -> Process:
        return self.stack.gateway(wait=False, accounts_url=self.stack.accounts_url, queue_timeout_s=5)

    async def strike(self, over: asyncio.Event) -> None:
        """Kill one part after another until all calls have ended."""
        parts = ["gateway", "gateway", "gateway", "accounts", "redis"]
        parts += ["database"] if self.kill_database is not None else []
        while not over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), self.random.uniform(*PAUSES_S))
            part = self.random.choice(parts)
            self.blows[part] += 1
            match part:
                case "gateway":
                    number = self.random.randrange(NUM_GATEWAYS)
                    self.gateways[number].kill()
                    self.gateways[number] = self._gateway()
                case "accounts":
                    assert self.accounts is not None
                    self.accounts.kill()
                    self.accounts = self.stack.accounts(database_url=self.url, wait=False)
                case "redis":
                    await asyncio.to_thread(self.stack.redis.restart)  # it comes up empty
                case _:
                    assert self.kill_database is not None
                    await asyncio.to_thread(self.kill_database)

    async def ask(self, number: int) -> None:
        """One call at any gateway: streamed or whole, of one answer or two, whose caller may leave early."""
        chance, id = self.random, f"call-{number}"
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "max_tokens": chance.randint(FEWEST, MOST),
            "stream": chance.random() < 0.8,
            "n": chance.choice((1, 1, 1, 2)),
        }
        leave_after_s = chance.uniform(0.01, 0.3) if chance.random() < 0.1 else None
        headers = {"Authorization": f"Bearer {self.stack.key}", "x-request-id": id}
        gateway = chance.choice(self.gateways)
        try:
            got = await call_raw(gateway.url, "/v1/chat/completions", body, headers, leave_after_s)
        except OSError:
            await asyncio.sleep(0.02)
            return  # nobody took the call
        self.calls.append(Call(id, leave_after_s is not None, got))

    async def ask_all(self, num_calls: int) -> None:
        numbers = iter(range(num_calls))

        async def caller() -> None:
            for number in numbers:
                await self.ask(number)

        over = asyncio.Event()
        striking = asyncio.create_task(self.strike(over))
        await asyncio.gather(*(caller() for _ in range(NUM_CALLERS)))
        over.set()
        await striking

    async def settle(self) -> None:
        """Wait until nothing is on its way to the ledger."""
        for gateway in self.gateways:
            await asyncio.to_thread(self.stack.wait_until_ready, gateway)
        folder, living = self.stack.folder / "state" / "usage", len(self.gateways)

        def is_settled() -> bool:
            with redis.Redis(unix_socket_path=str(self.stack.redis.socket)) as client:
                on_way = client.xlen(keys.USAGE)
            return not on_way and len(list(folder.glob("*.calls"))) == living and not list(folder.glob("*.records"))

        await until(is_settled, SETTLE_S, "nothing is on its way")

    def check(self, database: Database) -> str:
        """Compare the ledger with what callers got, call by call, and its sums with its rows."""
        rows = rows_by_id(database)
        endings: Counter[str] = Counter()
        num_tokens = 0
        for call in self.calls:
            found = rows.pop(call.id, [])
            assert len(found) <= 1, f"{call.id} has {len(found)} records: {found}"
            told = f"{call.id}: {call.got.status}, {call.got.num_tokens} tokens, {call.got.body[-300:]!r}; {found}"
            # A gateway may die before it has placed a call, and refuse one without placing it.
            assert found or (not call.got.num_tokens and call.got.status != 200), told
            if not found:
                continue
            row = found[0]
            if call.leaves:  # what the gateway had written when it noticed
                assert row.completion_tokens >= call.got.num_tokens, told
            elif row.outcome == "cut":
                assert 0 <= row.completion_tokens - call.got.num_tokens <= MOST_UNSENT, told
            else:
                assert row.completion_tokens == call.got.num_tokens, told
            assert row.outcome != "ok" or row.prompt_tokens > 0, told
            endings[row.outcome] += 1
            num_tokens += row.completion_tokens
        assert not [id for id in rows if not id.startswith("call-")]
        check_sums(database)
        return f"{sum(endings.values())} calls, {num_tokens} tokens, {dict(endings)}, blows {dict(self.blows)}"


def rows_by_id(database: Database) -> dict[str, list[Row[tuple[object, ...]]]]:
    found: dict[str, list[Row[tuple[object, ...]]]] = {}
    with database.reading() as connection:
        for row in connection.execute(select(usage)):
            found.setdefault(row.request_id, []).append(row)
    return found


def check_sums(database: Database) -> None:
    with database.reading() as connection:
        asked = (func.count(), func.sum(usage.c.completion_tokens), func.sum(usage.c.prompt_tokens))
        of_rows = tuple(map(int, connection.execute(select(*asked)).one()))
        for table in (usage_hours, usage_days, usage_months):
            columns = (table.c.num_calls, table.c.completion_tokens, table.c.prompt_tokens)
            assert tuple(map(int, connection.execute(select(*map(func.sum, columns))).one())) == of_rows, table.name


async def struck(stack: Stack, databases: Databases, backend: Backend, folder: Path, num_calls: int) -> None:
    url, seed = databases.url(backend, folder), random.randrange(1 << 30)
    print(f"seed {seed}")

    def kill_postgres() -> None:
        databases.postgres.kill()
        databases.postgres.start()

    bank = Bank(stack, url, kill_postgres if backend == "postgresql" else None, random.Random(seed))
    bank.start()
    began_at = time.monotonic()
    await bank.ask_all(num_calls)
    asked_s = time.monotonic() - began_at
    await bank.settle()
    with closing(open_database(url, folder)) as database:
        try:
            told = bank.check(database)
        except OperationalError:
            time.sleep(1.0)
            told = bank.check(database)
    print(f"{backend}: {told}; {asked_s:.0f} s, settled {time.monotonic() - began_at - asked_s:.1f} s later")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_some_hundred_calls_count_once_to_the_token(
    stack: Stack, databases: Databases, backend: Backend, tmp_path: Path
) -> None:
    await struck(stack, databases, backend, tmp_path, 400)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_ten_thousand_calls_count_once_to_the_token(
    stack: Stack, databases: Databases, backend: Backend, tmp_path: Path
) -> None:
    await struck(stack, databases, backend, tmp_path, 10_000)
