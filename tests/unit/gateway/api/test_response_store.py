"""What becomes of a response that is complete while Redis is away, and of references to what was kept."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, cast

import pytest
from starlette.types import Scope

from gateway.api.intake.decoding import INLINE_BYTES, DecodingThread, ResultT
from gateway.api.intake.intake import Intake
from gateway.api.intake.memory_budget import MemoryBudget
from gateway.api.media.loader import MediaLoader
from gateway.api.responses import items, records, request
from gateway.api.responses.create import Preparation
from gateway.api.responses.events import EventWriter
from gateway.api.responses.items import Item, new_response_id, output_id
from gateway.api.responses.records import Record, decode_record, encode_record
from gateway.api.responses.request import read_draft
from gateway.api.responses.response_store import ResponseStore
from gateway.api.responses.socket.stream_queues import draft_of_message, read_message
from gateway.call import Call, Principal
from gateway.dispatch.slot_search import INLINE_HELD_BYTES
from gateway.errors import StoreUnavailable
from gateway.telemetry.request_log import Ignored, RequestLog
from tests.support.sent_media import data_url, picture
from workers.protocol.events import Finished, FinishReason, Text, Timings, Usage

CALL = Call("req-1", Principal("key", "team", None, False), "m", "m", 0.0, 0.0, 0.0)
TIMINGS = Timings(cache_n=3, prompt_n=4, prompt_ms=8.0, predicted_n=2, predicted_ms=10.0)


class Failing:
    """A store that is away for its first questions."""

    def __init__(self, num_failures: int) -> None:
        self.num_asked = 0
        self.kept: list[bytes] = []
        self._num_failures = num_failures

    async def keep(self, team: str, id: str, record: bytes, before: Sequence[str] = (), *, again: bool = False) -> bool:
        self.num_asked += 1
        if self.num_asked <= self._num_failures:
            raise StoreUnavailable("Redis does not answer.")
        self.kept.append(record)
        return True

    async def find(self, team: str, ids: Sequence[str]) -> list[bytes | None]:
        return [None for _ in ids]

    async def sizes(self, team: str, ids: Sequence[str]) -> list[int]:
        return [0 for _ in ids]

    async def drop(self, team: str, id: str) -> bool:
        return False


@pytest.mark.parametrize(("background", "num_kept"), [(True, 1), (False, 0)])
async def test_one_of_the_background_is_kept_when_redis_is_back(background: bool, num_kept: int) -> None:
    body = {"model": "m", "input": "hi", "background": background}
    writer = EventWriter(read_draft(json.dumps(body).encode()).resolved({}).complete(), CALL)
    writer.chunks([Text(1, "hello", 1), Finished(1, FinishReason.STOP, Usage(1, 1, 0), TIMINGS)], 0)
    store = Failing(2)
    await ResponseStore(store, 1 << 20).conclude(writer, None)
    assert len(store.kept) == num_kept
    assert writer.snapshot.is_kept == bool(num_kept)
    for raw in store.kept:
        assert decode_record(raw).response["status"] == "completed"


async def test_pictures_in_a_message_of_a_websocket_count_beside_their_base64() -> None:
    data = picture(1 << 20)
    part = {"type": "input_image", "image_url": data_url(data)}
    raw = json.dumps({"type": "response.create", "input": [{"role": "user", "content": [part]}], "model": "m"}).encode()
    intake = Intake(8 << 20, MemoryBudget(1 << 30), DecodingThread(), lambda: 4096)
    with closing(intake.message(CALL.principal, raw)) as body:
        message = await body.decode(read_message)
        asked = await ResponseStore(Failing(0), 1 << 20).complete(
            draft_of_message(message, Ignored(), body.attachments), body
        )
        assert body.num_bytes >= len(raw) + len(asked.requests[0].media[0].data)


class Lane(DecodingThread):
    """Counts what is done on its thread."""

    num_runs = 0

    async def run(self, team: str, work: Callable[[], ResultT]) -> ResultT:
        self.num_runs += 1
        return await super().run(team, work)


class Kept(Failing):
    """One response."""

    def __init__(self, record: bytes) -> None:
        super().__init__(0)
        self._record = record

    async def find(self, team: str, ids: Sequence[str]) -> list[bytes | None]:
        return [self._record for _ in ids]

    async def sizes(self, team: str, ids: Sequence[str]) -> list[int]:
        return [len(self._record) for _ in ids]


class Resolver:
    """Makes the same call for all."""

    def resolve(self, *asked: object, adapters: object, held_bytes: int, autoload: bool | None) -> Call:
        return replace(CALL, held_bytes=held_bytes)


@pytest.mark.parametrize(("num_references", "is_much"), [(5, False), (1500, True)])
async def test_references_count_as_what_they_stand_for(num_references: int, is_much: bool) -> None:
    """75 KB of them may stand for 9 MiB, which were put together and hashed on the loop."""
    one = new_response_id()
    thought = {"id": output_id(one, "reasoning", 0), "type": "reasoning", "summary": [], "status": "completed"}
    output = [{**thought, "content": [{"type": "reasoning_text", "text": "x" * 6300}]}]
    record = Record(response={"id": one, "status": "completed", "output": output}, input=())
    body = {"model": "m", "input": [{"type": "item_reference", "id": thought["id"]}] * num_references}
    raw, principal, lane = json.dumps(body).encode(), CALL.principal, Lane()
    scope: Scope = {"type": "http", "method": "POST", "path": "/v1/responses", "headers": []}
    request_log = RequestLog("id", "POST", "/v1/responses")
    preparation = Preparation(cast(Any, Resolver()), cast(Any, None), MediaLoader(cast(Any, None)))
    responses = ResponseStore(Kept(encode_record(record)), 16 << 20)
    with closing(Intake(8 << 20, MemoryBudget(1 << 30), lane, lambda: 0).message(principal, raw)) as taken:
        asked, call = await preparation.prepare(read_draft(raw), responses, taken, principal, request_log, scope)
    assert len(asked.requests[0].messages[0].reasoning or "") == 6300 * num_references
    assert lane.num_runs == is_much
    assert (call.held_bytes > INLINE_HELD_BYTES) == is_much
    if is_much:
        assert call.held_bytes > 6300 * num_references


@pytest.mark.serial
@pytest.mark.parametrize("text", ["5e-324", "1e308", "2.2250738585072011e-308"])
def test_floats_at_the_limits_take_no_longer_in_a_record_than_python_reading_them(text: str) -> None:
    """Bodies of 16 KiB are not checked, so fourteen records had 32,000 of them: a quarter of a second of the loop."""
    examples = [float(text)] * 20_000
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object", "examples": examples}}
    response = {"id": new_response_id(), "output": [], "text": {"format": schema}}
    raw = encode_record(Record(response=response, input=()))
    texts = [text] * len(examples)
    began = time.process_time()
    floats = [float(one) for one in texts]
    read = time.process_time()
    record = decode_record(raw)
    assert time.process_time() - read < 8 * (read - began)
    assert record.response["text"]["format"]["schema"]["examples"] == floats


@pytest.mark.parametrize(("num_floats", "is_much"), [(4_000, False), (40_000, True)])
async def test_records_of_many_floats_are_decoded_on_a_thread(num_floats: int, is_much: bool) -> None:
    """Reading one by Python takes ten times as long as msgspec's reading of most."""
    one = new_response_id()
    record = encode_record(Record(response={"id": one, "output": [], "metadata": [0.5] * num_floats}, input=()))
    assert len(record) <= INLINE_BYTES
    raw = json.dumps({"model": "m", "input": "hi", "previous_response_id": one}).encode()
    lane, responses = Lane(), ResponseStore(Kept(record), 16 << 20)
    with closing(Intake(8 << 20, MemoryBudget(1 << 30), lane, lambda: 0).message(CALL.principal, raw)) as taken:
        assert await responses.get(one, taken) == decode_record(record)
    assert lane.num_runs == is_much


@pytest.mark.parametrize("num_items", [500, 2000])
async def test_many_items_that_are_stored_are_put_together_on_a_thread(num_items: int) -> None:
    """A request of 100 bytes may go on from 250 KB of them, which took 12 ms of the loop."""
    one = new_response_id()
    item = {"id": "x", "type": "message", "role": "user", "content": []}
    record = Record(response={"id": one, "status": "completed", "output": []}, input=(item,) * num_items)
    raw = json.dumps({"model": "m", "input": "hi", "previous_response_id": one}).encode()
    lane, responses = Lane(), ResponseStore(Kept(encode_record(record)), 16 << 20)
    with closing(Intake(8 << 20, MemoryBudget(1 << 30), lane, lambda: 0).message(CALL.principal, raw)) as taken:
        await responses.complete(await taken.decode(read_draft), taken)
    assert lane.num_runs == (num_items == 2000)


async def test_what_references_stand_for_is_gone_through_in_short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 KB of them are half a million parts: read in one call they held every stream up for 0.5 s."""
    lasted, since = list[float](), time.thread_time()

    def let_loop_run() -> None:
        nonlocal since
        lasted.append(time.thread_time() - since)
        since = time.thread_time()

    for module in (records, request, items):
        monkeypatch.setattr(module, "let_loop_run", let_loop_run, raising=False)
    one = new_response_id()
    parts = [{"type": "reasoning_text", "text": ""}] * 4_000
    thought: Item = {"id": "a", "type": "reasoning", "summary": [], "content": parts, "status": "completed"}
    raw = encode_record(Record(response={"id": one, "status": "completed", "output": []}, input=(thought,) * 60))
    gc.disable()  # of a test's whole process it takes as long as all of this
    try:
        began = since = time.thread_time()
        record = decode_record(raw)
        body = json.dumps({"model": "m", "input": "hi", "previous_response_id": one}).encode()
        asked = read_draft(body).resolved({one: record}).complete()
        took_s = time.thread_time() - began
    finally:
        gc.enable()
    assert record.input == (thought,) * 60
    assert len(asked.requests[0].messages) == 1, "thoughts without a word are none"
    assert max(lasted) < took_s / 8
