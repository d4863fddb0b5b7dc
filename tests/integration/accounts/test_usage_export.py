"""Exports of usage and LiteLLM's spend logs: complete, streamed, harmless in a spreadsheet, bounded by the role."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from starlette.responses import StreamingResponse

from accounts.database.database import Database
from accounts.errors import Forbidden, Invalid
from accounts.litellm import spend_logs
from accounts.litellm.spend_logs import SpendLogsRoutes
from accounts.protocol.records import digest
from accounts.usage import export, parquet
from accounts.usage.export import ExportRoutes
from tests.support.usage_rows import BEGIN, asked, make_key, make_subject, record, some_records, write


async def body_of(response: Any) -> bytes:
    if not isinstance(response, StreamingResponse):
        return bytes(response.body)
    pieces: AsyncIterator[Any] = aiter(response.body_iterator)
    return b"".join([piece async for piece in pieces])


async def exported_csv(database: Database, **of: Any) -> list[dict[str, str]]:
    text = (await body_of(ExportRoutes(database).export(asked(**of)))).decode()
    return list(csv.DictReader(io.StringIO(text, newline="")))


@pytest.fixture(autouse=True)
def short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "PAGE_CALLS", 70)
    monkeypatch.setattr(parquet, "GROUP_ROWS", 150)
    monkeypatch.setattr(spend_logs, "PAGE_CALLS", 70)


async def test_csv_has_every_call_oldest_first(database: Database) -> None:
    records = some_records(400)
    write(database, records)
    rows = await exported_csv(database, format="csv")
    wanted = sorted(records, key=lambda one: (one.ended_at, one.number))
    assert [row["request_id"] for row in rows] == [one.request_id for one in wanted]
    for row, one in zip(rows, wanted, strict=True):
        assert int(row["prompt_tokens"]) == one.prompt_tokens
        assert Decimal(row["cost"]) == Decimal(one.cost_nano) / 10**9
        assert datetime.fromisoformat(row["ended_at"]).timestamp() == pytest.approx(one.ended_at, abs=1e-3)
        assert row["end_user"] == ("'=customer" if one.end_user == "=customer" else one.end_user)


async def test_parquet_has_every_call_with_types(database: Database, tmp_path: Path) -> None:
    records = some_records(400)
    write(database, records)
    response = ExportRoutes(database).export(asked(format="parquet"))
    assert response.media_type == "application/vnd.apache.parquet"
    assert ".parquet" in response.headers["content-disposition"]
    (tmp_path / "usage.parquet").write_bytes(await body_of(response))
    file = pyarrow.parquet.ParquetFile(tmp_path / "usage.parquet")
    assert file.num_row_groups > 1
    rows = file.read().to_pylist()
    wanted = sorted(records, key=lambda one: (one.ended_at, one.number))
    assert [row["request_id"] for row in rows] == [one.request_id for one in wanted]
    assert [row["end_user"] for row in rows] == [one.end_user for one in wanted], "nothing computes these"
    assert [row["cost"] for row in rows] == [Decimal(one.cost_nano).scaleb(-9) for one in wanted]
    assert rows[0]["ended_at"].tzinfo is not None
    assert abs(rows[0]["ended_at"] - datetime.fromtimestamp(wanted[0].ended_at, UTC)).total_seconds() < 1e-5


async def test_nothing_to_export_is_a_whole_file(database: Database) -> None:
    assert await exported_csv(database) == []
    file = io.BytesIO(await body_of(ExportRoutes(database).export(asked(format="parquet"))))
    assert pyarrow.parquet.read_table(file).num_rows == 0


async def test_exports_are_filtered_and_bounded_by_the_role(database: Database) -> None:
    records = some_records(300)
    write(database, records)
    rows = await exported_csv(database, role="manager", team="red", outcome="cut", from_=str(BEGIN + 86_400))
    wanted = {
        one.request_id
        for one in records
        if one.team == "red" and one.outcome == "cut" and one.ended_at >= BEGIN + 86_400
    }
    assert {row["request_id"] for row in rows} == wanted
    with pytest.raises(Forbidden):
        await exported_csv(database, role="manager", team="red", format="csv", team_="blue")
    with pytest.raises(Invalid, match="format"):
        await exported_csv(database, format="xlsx")


async def test_a_slow_reader_holds_no_transaction(database: Database) -> None:
    write(database, some_records(300))
    pieces = aiter(ExportRoutes(database).export(asked()).body_iterator)  # type: ignore[attr-defined]
    await anext(pieces)
    write(database, [record(1000, ended_at=BEGIN + 1e7)])
    if database.is_sqlite:
        with database.engine.connect() as connection:
            busy = connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()[0]
            assert busy == 0, "a reader keeps the log of changes from being tidied up"
    else:
        with database.reading() as connection:
            idle = "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction'"
            assert connection.exec_driver_sql(idle).scalar() == 0
    assert len([piece async for piece in pieces]) > 2


async def spend(database: Database, **of: Any) -> Any:
    return json.loads(await body_of(SpendLogsRoutes(database).show(asked(**of))))


async def test_spend_logs_have_litellms_fields(database: Database) -> None:
    make_subject(database, "team", "red")
    write(
        database,
        [
            record(1, user="ann", cost_nano=500_000_000, end_user="guest"),
            record(2, ended_at=BEGIN + 5, outcome="queue_timeout", status=503),
        ],
    )
    latest, first = await spend(database)
    assert (first["request_id"], first["spend"], first["total_tokens"], first["status"]) == (
        "req-1",
        0.5,
        110,
        "success",
    )
    assert (first["model"], first["model_group"], first["user"], first["end_user"]) == ("llama", "chat", "ann", "guest")
    assert (first["team_id"], first["api_key"], first["metadata"]["user_api_key_alias"]) == ("red", "ci", "ci")
    assert first["startTime"] < first["endTime"]
    assert first["startTime"].endswith("Z")
    assert (latest["status"], latest["metadata"]["error_information"]["error_class"]) == ("failure", "queue_timeout")


async def test_spend_logs_find_a_key_by_itself_its_hash_and_its_name(database: Database) -> None:
    make_subject(database, "team", "red")
    key = make_key(database, "ci", "red")
    write(database, [record(1), record(2, key="other")])
    for given in (key, digest(key), "ci"):
        (found,) = await spend(database, api_key=given)
        assert (found["request_id"], found["api_key"]) == ("req-1", "ci"), "whole hashes are shown nowhere"
    assert await spend(database, api_key="nobody") == []
    with pytest.raises(Invalid, match="api_key"):
        await spend(database, api_key="pk-" + "x" * 40)


async def test_spend_logs_by_dates_are_sums_per_day_or_calls(database: Database) -> None:
    write(
        database,
        [
            record(1, user="ann", cost_nano=500_000_000),
            record(2, ended_at=BEGIN + 3 * 86_400, model="qwen", cost_nano=250_000_000),
        ],
    )
    days = await spend(database, start_date="2026-09-29", end_date="2026-10-03")
    assert [day["startTime"] for day in days] == [
        f"2026-{day}" for day in ("09-29", "09-30", "10-01", "10-02", "10-03")
    ]
    first = {"startTime": "2026-09-29", "spend": 0.5, "users": {"ann": 0.5}, "models": {"llama": 0.5}, "ci": 0.5}
    assert days[0] == first
    assert days[3]["models"] == {"qwen": 0.25}
    assert days[1] == {"startTime": "2026-09-30", "spend": 0.0, "users": {}, "models": {}}
    calls = await spend(database, start_date="2026-10-01", end_date="2026-10-02", summarize="false")
    assert [call["request_id"] for call in calls] == ["req-2"]


async def test_spend_logs_stream_a_long_list(database: Database) -> None:
    records = some_records(400)
    write(database, records)
    logs = await spend(database)
    assert [log["request_id"] for log in logs] == [
        one.request_id for one in sorted(records, key=lambda one: (one.ended_at, one.number), reverse=True)
    ]
    own = await spend(database, role="user", user="ann@example.com", key="ann")
    assert {log["user"] for log in own} == {"ann@example.com"}
    assert await spend(database, request_id="none") == []


@pytest.mark.parametrize(("bound", "value"), [("MAX_CALLS", 140), ("MAX_S", 0.0)])
async def test_spend_logs_that_are_too_long_end_and_say_so(
    database: Database, monkeypatch: pytest.MonkeyPatch, bound: str, value: float
) -> None:
    """A list of all calls, or one for which millions are looked through, kept a thread of forty for minutes."""
    write(database, some_records(400))
    monkeypatch.setattr(spend_logs, bound, value)
    *logs, last = await spend(database)
    assert len(logs) in (70, 140)
    assert all("request_id" in log for log in logs)
    assert last["error"]["code"] == "list_too_long"
    assert f"after {len(logs)} calls" in last["error"]["message"]
    (only,) = await spend(database, request_id=logs[0]["request_id"])
    assert only["request_id"] == logs[0]["request_id"], "what is whole has no such end"


async def test_spend_logs_sum_up_a_year_at_most(database: Database) -> None:
    """From 1970 to 9000 it was a dictionary for each of 2.5 million days: more than a gigabyte."""
    days = await spend(database, start_date="2026-01-01", end_date="2026-12-31")
    assert len(days) == 365
    for dates in (
        {"start_date": "1970-01-02", "end_date": "8999-12-30"},
        {"start_date": "0", "end_date": "2026-01-01"},
    ):
        with pytest.raises(Invalid, match="more than 366 days apart"):
            await spend(database, **dates)
