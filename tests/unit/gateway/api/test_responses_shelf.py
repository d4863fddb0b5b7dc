"""What becomes of a response that is complete while Redis is away."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from gateway.api.responses.events import EventWriter
from gateway.api.responses.records import decode_record
from gateway.api.responses.request import read_draft
from gateway.api.responses.shelf import Shelf
from gateway.call import Call, Principal
from gateway.errors import StoreUnavailable
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
    writer = EventWriter(read_draft(json.dumps(body).encode()).complete({}), CALL)
    writer.chunks([Text(1, "hello", 1), Finished(1, FinishReason.STOP, Usage(1, 1, 0), TIMINGS)], 0)
    store = Failing(2)
    await Shelf(store, 1 << 20).conclude(writer, None)
    assert len(store.kept) == num_kept
    assert writer.snapshot.is_kept == bool(num_kept)
    for raw in store.kept:
        assert decode_record(raw).response["status"] == "completed"
