"""The usage of calls through real gateways, Redis and the ledger: one record each, with what the caller got."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis
from msgspec.json import encode
from openai import AsyncOpenAI

from accounts.database.database import Database, open_database
from accounts.database.schema import prices
from accounts.database.upgrade import upgrade
from accounts.protocol.records import Price, digest
from tests.support.caller import Caller, calling
from tests.support.ledger_rows import rows_when
from tests.support.socket_caller import connected
from tests.support.stack import Process, Stack
from tests.support.waiting import until
from workers.protocol import keys

USER_KEY = "pk-of-ann-0123456789"
USER = {"name": "ann-laptop", "team": "blue", "user": "ann@example.com", "sha256": digest(USER_KEY)}
APP_KEY = "pk-of-an-app-0123456789"
APP = {"name": "app", "sha256": digest(APP_KEY), "names_end_users": True}
PRICES = (
    Price(model="quick", per_million_prompt=2.0, per_million_cached=0.5, per_million_completion=10.0),
    Price(model="slow", per_million_completion=10.0),
)
"""In units: 10 for a million generated tokens are 10,000 billionths each."""
TOKENS = 8
QUIET_S = 1.0
"""Enough for a record to come that should not."""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        set_prices(running.folder / "state")
        running.accounts()
        pools = {
            "quick": ("--step-ms", "2", "--tokens", str(TOKENS)),
            "slow": ("--step-ms", "20", "--tokens", "500"),
            "failing": ("--step-ms", "2", "--tokens", "20", "--fail-after", "3"),
            "vectors": ("--kind", "embed"),
        }
        for alias, flags in pools.items():
            running.fake_worker(alias, *flags, worker_id=f"{alias}-a", slots=2 if alias == "slow" else 8, wait=False)
        gateway = running.gateway(
            accounts_url=running.accounts_url, api_keys=json.dumps([USER, APP]), queue_timeout_s=0.5
        )
        running.wait_until_listed(gateway, *pools)
        yield running


def set_prices(state_dir: Path) -> None:
    """Make the database of an accounts service with PRICES, before it starts."""
    state_dir.mkdir(mode=0o700)
    with closing(open_database("", state_dir)) as database:
        upgrade(database)
        with database.transaction() as connection:
            rows = [{"model": one.model, "valid_from": 0.0, "record": encode(one).decode()} for one in PRICES]
            connection.execute(prices.insert(), rows)


@pytest.fixture
def gateway(stack: Stack) -> Process:
    return stack.gateways[0]


@pytest.fixture
def database(stack: Stack) -> Iterator[Database]:
    opened = open_database("", stack.folder / "state")
    yield opened
    opened.close()


@pytest.fixture
async def caller(stack: Stack, gateway: Process) -> AsyncIterator[Caller]:
    async with calling(gateway.url, stack.key, "quick") as asking:
        yield asking


async def row_of(database: Database, request_id: str) -> Any:
    """The one row of a request."""
    (row,) = await rows_when(database, bool, request_id)
    assert row.request_id == request_id
    return row


def tokens_of(row: Any) -> tuple[int, int, int]:
    return row.prompt_tokens, row.cached_tokens, row.completion_tokens


def told(usage: Any) -> tuple[int, int, int]:
    """What the answer says of its own usage."""
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]


async def test_a_record_says_who_what_and_how_much(stack: Stack, gateway: Process, database: Database) -> None:
    async with calling(gateway.url, USER_KEY, "quick") as caller:
        headers = {"x-request-id": "who", "traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"}
        url, before = f"{gateway.url}/v1/chat/completions", time.time()
        async with caller.session.post(url, json=caller.body(), headers=headers) as response:
            usage = (await response.json())["usage"]
    row = await row_of(database, "who")
    assert tokens_of(row) == told(usage)
    assert row.completion_tokens == TOKENS
    assert (row.organisation, row.team, row.key, row.user) == ("default", "blue", "ann-laptop", "ann@example.com")
    assert (row.alias, row.model, row.route) == ("quick", "quick", "/v1/chat/completions")
    assert (row.outcome, row.status, row.trace_id) == ("ok", 200, "ab" * 16)
    assert before - 1 < row.started_at < row.ended_at < time.time() + 1
    assert 0 < row.compute_ms < 5000
    assert row.queue_ms < 1000


async def test_a_record_has_its_cost_and_the_end_user(gateway: Process, database: Database) -> None:
    async with calling(gateway.url, APP_KEY, "quick") as caller:
        url, headers = f"{gateway.url}/v1/chat/completions", {"x-request-id": "end-user"}
        async with caller.session.post(url, json=caller.body(user="bob"), headers=headers) as response:
            assert response.status == 200
    row = await row_of(database, "end-user")
    assert (row.key, row.end_user) == ("app", "bob")
    computed = row.prompt_tokens - row.cached_tokens
    assert row.cost_nano == 2000 * computed + 500 * row.cached_tokens + 10_000 * row.completion_tokens > 80_000


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("streams", [False, True])
async def test_the_ledger_says_what_the_answer_says(
    caller: Caller, database: Database, n: int, *, streams: bool
) -> None:
    """A prompt counts once, however many answers it has."""
    headers = {"x-request-id": f"same-{n}-{streams}"}
    body = caller.body(n=n, stream=streams, stream_options={"include_usage": True})
    if not streams:
        del body["stream_options"]
    async with caller.session.post(f"{caller.url}/v1/chat/completions", json=body, headers=headers) as response:
        if streams:
            lines = [line[6:] async for line in response.content if line.startswith(b"data: {")]
            usage = json.loads(lines[-1])["usage"]
        else:
            usage = (await response.json())["usage"]
    assert tokens_of(await row_of(database, f"same-{n}-{streams}")) == told(usage)
    assert usage["completion_tokens"] == n * TOKENS


async def test_several_prompts_count_each(caller: Caller, database: Database) -> None:
    body = {"model": "quick", "prompt": ["one two three", "four five"], "n": 2, "max_tokens": 3}
    headers = {"x-request-id": "prompts"}
    async with caller.session.post(f"{caller.url}/v1/completions", json=body, headers=headers) as response:
        usage = (await response.json())["usage"]
    row = await row_of(database, "prompts")
    assert (row.prompt_tokens, row.completion_tokens) == (usage["prompt_tokens"], 12)


async def test_pooled_work_counts(caller: Caller, database: Database) -> None:
    body, headers = {"model": "vectors", "input": ["some text", "more"]}, {"x-request-id": "pooled"}
    async with caller.session.post(f"{caller.url}/v1/embeddings", json=body, headers=headers) as response:
        usage = (await response.json())["usage"]
    row = await row_of(database, "pooled")
    assert tokens_of(row) == (usage["prompt_tokens"], 0, 0)
    assert (row.outcome, row.model) == ("ok", "vectors")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/completion"])
async def test_every_dialect_counts(caller: Caller, database: Database, path: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
        "/v1/responses": {"input": "hi", "max_output_tokens": 5},
        "/completion": {"prompt": "hi", "n_predict": 5},
    }
    body, headers = {"model": "quick", **bodies[path]}, {"x-request-id": f"dialect-{path}"}
    async with caller.session.post(f"{caller.url}{path}", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        await response.read()
    row = await row_of(database, f"dialect-{path}")
    assert (row.completion_tokens, row.route) == (5, path)


async def test_answers_over_websocket_count_each(stack: Stack, gateway: Process, database: Database) -> None:
    async with connected(gateway.url, stack.key, "quick", headers={"x-request-id": "sock"}) as asking:
        for _ in range(2):
            await asking.answer(input="hi")
        await asking.refusal(input="hi", model="nobody")
    rows = await rows_when(database, lambda rows: len(rows) == 2, "sock")
    assert [(row.completion_tokens, row.outcome) for row in rows] == [(TOKENS, "ok")] * 2


async def test_an_answer_in_the_background_counts_at_its_end(
    stack: Stack, gateway: Process, database: Database
) -> None:
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=stack.key) as client:
        headers = {"x-request-id": "background"}
        begun = await client.responses.create(
            model="quick", input="hi", background=True, max_output_tokens=6, extra_headers=headers
        )
        assert begun.status == "queued"
        row = await row_of(database, "background")
    assert (row.completion_tokens, row.outcome) == (6, "ok")


async def test_a_stream_that_goes_on_without_its_caller_counts_whole(caller: Caller, database: Database) -> None:
    headers = {"x-request-id": "resumed", "x-resume-grace": "30"}
    body = caller.body(stream=True, model="slow", max_tokens=40)
    response = await caller.session.post(f"{caller.url}/v1/chat/completions", json=body, headers=headers)
    await response.content.readline()
    response.close()
    row = await row_of(database, "resumed")
    assert (row.completion_tokens, row.outcome) == (40, "ok")


async def test_who_leaves_pays_for_what_came(caller: Caller, database: Database) -> None:
    body, headers = caller.body(stream=True, model="slow"), {"x-request-id": "left"}
    response = await caller.session.post(f"{caller.url}/v1/chat/completions", json=body, headers=headers)
    num_read = 0
    async for line in response.content:
        num_read += b'"content":"t' in line
        if num_read == 10:
            break
    response.close()
    row = await row_of(database, "left")
    assert row.outcome == "client_gone"
    assert 10 <= row.completion_tokens < 100
    assert row.compute_ms > 100


async def test_a_failed_answer_counts_what_came(caller: Caller, database: Database) -> None:
    body, headers = caller.body(stream=True, model="failing"), {"x-request-id": "failed"}
    async with caller.session.post(f"{caller.url}/v1/chat/completions", json=body, headers=headers) as response:
        text = await response.text()
    row = await row_of(database, "failed")
    assert "error" in text
    assert (row.completion_tokens, row.outcome) == (text.count('"content":"t'), "internal_error")


async def test_an_error_in_place_of_an_answer_counts_the_prompt_only(caller: Caller, database: Database) -> None:
    """Its caller got nothing of what was computed. Tokens that nobody had received were charged."""
    body, headers = caller.body(model="failing"), {"x-request-id": "failed-whole"}
    async with caller.session.post(f"{caller.url}/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status == 500
    row = await row_of(database, "failed-whole")
    assert (row.completion_tokens, row.outcome, row.prompt_tokens > 0) == (0, "internal_error", True)


async def test_a_call_that_waited_in_vain_is_recorded(caller: Caller, database: Database) -> None:
    async with caller.stream(model="slow") as one, caller.stream(model="slow") as two:
        await asyncio.gather(one.until_text(), two.until_text())
        body, headers = caller.body(model="slow"), {"x-request-id": "in-vain"}
        async with caller.session.post(f"{caller.url}/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 503
    row = await row_of(database, "in-vain")
    assert (row.outcome, row.status, row.completion_tokens) == ("queue_timeout", 503, 0)
    assert row.queue_ms > 450


async def test_questions_and_refusals_are_no_calls(caller: Caller, database: Database) -> None:
    url = caller.url
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"model": "nobody", "messages": []}),
        ("/v1/chat/completions", {"model": "quick", "messages": [], "n": "many"}),
        ("/v1/messages/count_tokens", {"model": "quick", "messages": [{"role": "user", "content": "hi"}]}),
        ("/tokenize", {"model": "quick", "content": "hi"}),
    ]
    for number, (path, body) in enumerate(asked):
        async with caller.session.post(f"{url}{path}", json=body, headers={"x-request-id": f"ask-{number}"}) as answer:
            await answer.read()
    async with aiohttp.ClientSession() as stranger:
        body = caller.body()
        async with stranger.post(f"{url}/v1/chat/completions", json=body, headers={"x-request-id": "ask-x"}) as answer:
            assert answer.status == 401
    await asyncio.sleep(QUIET_S)
    assert await rows_when(database, lambda rows: True, "ask-") == []


async def test_a_killed_gateway_leaves_its_calls_to_the_next(stack: Stack, database: Database) -> None:
    doomed = stack.gateway(accounts_url=stack.accounts_url)
    stack.wait_until_listed(doomed, "slow", "quick")
    async with calling(doomed.url, stack.key, "slow") as caller, caller.stream() as stream:
        url, headers = f"{doomed.url}/v1/chat/completions", {"x-request-id": "cut-whole"}
        await caller.whole(model="quick")
        whole = asyncio.create_task(
            caller.session.post(url, json=caller.body(max_tokens=400), headers=headers)  # not streamed
        )
        for _ in range(40):
            await stream.until_text()
        doomed.kill()
        with pytest.raises(aiohttp.ClientError):
            await stream.finish()
        with pytest.raises(aiohttp.ClientError):
            await whole
    row = await row_of(database, stream.response.headers["x-request-id"])
    num_received = len(stream.text.split())
    assert (row.outcome, row.completion_tokens, row.status) == ("cut", num_received, 0)
    assert row.prompt_tokens > 0
    assert row.cost_nano == 10_000 * num_received
    assert abs(row.ended_at - time.time()) < 15
    assert 0 < row.compute_ms < 5000
    row = await row_of(database, "cut-whole")
    assert (row.outcome, row.completion_tokens) == ("cut", 0), "the caller got nothing"
    folder = stack.folder / "state" / "usage"
    await until(lambda: len(list(folder.glob("*.calls"))) == 1, 15, "only the living gateway has a journal")
    assert 'paddock_usage_records_total{what="cut"} 2.0' in await metrics_of(stack.gateways[0])


async def metrics_of(gateway: Process) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{gateway.url}/metrics") as response:
        return await response.text()


async def test_nothing_waits_for_the_ledger(stack: Stack, caller: Caller, database: Database) -> None:
    """Without the accounts service, and with a Redis that has lost what was sent, calls go on, and count once."""
    accounts = next(one for one in stack.processes if one.name == "accounts-0")
    accounts.kill()
    for number in range(20):
        headers, url = {"x-request-id": f"wait-{number}"}, f"{caller.url}/v1/chat/completions"
        async with caller.session.post(url, json=caller.body(), headers=headers) as response:
            assert response.status == 200
    with redis.Redis(unix_socket_path=str(stack.redis.socket)) as operator:
        await until(lambda: operator.xlen(keys.USAGE) > 0, 10, "records wait in Redis")
        operator.delete(keys.USAGE, keys.USAGE_BATCHES)
        await until(lambda: operator.xlen(keys.USAGE) > 0, 10, "they are sent again")
    stack.accounts()
    await rows_when(database, lambda rows: len(rows) == 20, "wait-")
    await asyncio.sleep(QUIET_S)
    assert len(await rows_when(database, bool, "wait-")) == 20
    await until_settled(stack)


async def until_settled(stack: Stack) -> None:
    deadline = time.monotonic() + 10
    while "paddock_usage_waiting_records 0.0" not in await metrics_of(stack.gateways[0]):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


async def test_a_gateway_that_ends_leaves_no_journal(stack: Stack, database: Database) -> None:
    ending = stack.gateway(accounts_url=stack.accounts_url)
    stack.wait_until_listed(ending, "quick")
    folder = stack.folder / "state" / "usage"
    before = set(folder.iterdir())
    async with calling(ending.url, stack.key, "quick") as caller:
        assert (await caller.whole())[0] == 200
    await asyncio.sleep(QUIET_S)
    ending.signal(signal.SIGTERM)
    assert await asyncio.to_thread(ending.popen.wait, 20) == 0
    assert {path.name for path in folder.iterdir() if path.suffix == ".calls"} <= {path.name for path in before}


async def test_without_accounts_no_usage_is_kept(stack: Stack, tmp_path: Path) -> None:
    plain = stack.gateway(state_dir=tmp_path)
    stack.wait_until_listed(plain, "quick")
    async with calling(plain.url, stack.key, "quick") as caller:
        assert (await caller.whole())[0] == 200
    assert not (tmp_path / "usage").exists()


async def test_a_folder_that_can_not_be_written_holds_nothing_up(
    stack: Stack, database: Database, tmp_path: Path
) -> None:
    (tmp_path / "usage").write_text("no folder")
    crippled = stack.gateway(accounts_url=stack.accounts_url, state_dir=tmp_path)
    stack.wait_until_listed(crippled, "quick")
    async with calling(crippled.url, stack.key, "quick") as caller:
        headers = {"x-request-id": "crippled"}
        async with caller.session.post(
            f"{caller.url}/v1/chat/completions", json=caller.body(), headers=headers
        ) as response:
            assert response.status == 200
    assert (await row_of(database, "crippled")).completion_tokens == TOKENS
    assert "usage can't be written to" in crippled.text()
    assert 'paddock_usage_records_total{what="held"} 1.0' in await metrics_of(crippled)
    crippled.stop()
