"""Questions for the slots of a model: shared by those who ask together, and asked anew soon after."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from gateway.api.native.slots import FRESH_S, SlotQueries
from gateway.errors import NoWorker
from gateway.relay.relay import WorkerQueries


class Asked:
    """Answers when it is let, and counts."""

    def __init__(self) -> None:
        self.models: list[str] = []
        self.let = asyncio.Event()
        self.error: Exception | None = None

    async def ask_each(self, model: str, *_: Any) -> list[Any]:
        self.models.append(model)
        await self.let.wait()
        if self.error is not None:
            raise self.error
        return [(model, len(self.models))]


def queries_of(asked: Asked) -> SlotQueries:
    return SlotQueries(cast(WorkerQueries, asked))


async def test_a_crowd_asks_the_engines_once() -> None:
    asked = Asked()
    queries = queries_of(asked)
    crowd = [asyncio.create_task(queries.ask(model)) for model in ("a", "b") for _ in range(50)]
    await asyncio.sleep(0)
    crowd[0].cancel()  # whoever asked first and left takes nobody's answer along
    asked.let.set()
    answers: list[Any] = await asyncio.gather(*crowd[1:])
    assert asked.models == ["a", "b"]
    assert [[model for model, _ in answer] for answer in answers] == [["a"]] * 49 + [["b"]] * 50
    for _ in range(20):
        await queries.ask("a")
    assert len(asked.models) == 2
    await asyncio.sleep(FRESH_S * 1.5)
    await queries.ask("a")
    assert len(asked.models) == 3


async def test_a_failure_is_told_to_all_and_not_remembered() -> None:
    asked = Asked()
    asked.error = NoWorker("none")
    asked.let.set()
    queries = queries_of(asked)
    for _ in range(2):
        told = await asyncio.gather(*(queries.ask("a") for _ in range(5)), return_exceptions=True)
        assert all(isinstance(one, NoWorker) for one in told)
    assert len(asked.models) == 2
    asked.error = None
    asked.let.clear()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queries.ask("a"), 0.01)
    asked.let.set()
    found: Any = await queries.ask("a")
    assert found == [("a", 3)]
