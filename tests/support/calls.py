"""Calls of workers without a model: what a test leaves out does as little as it can."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from tests.support.fake_text import fake_prompts
from workers.chat.answers import Answers
from workers.chat.prompts import Prompts
from workers.chat.tools.json_calls import HERMES
from workers.constraint.thought import Thought
from workers.engine.cache.report import Found
from workers.engine.counters import EngineCounters
from workers.engine.request import EngineLoad, TokenMask
from workers.llama.pooling import Pooling
from workers.metrics.worker import WorkerMetrics
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.requests import GenerateRequest, Sampling
from workers.service.calls.call_record import CallRecords
from workers.service.calls.delivery import Delivery
from workers.service.calls.generate import Constraints, GenerateCalls
from workers.service.calls.lanes import media_lane, prompt_lane
from workers.service.calls.live_calls import Engine, LiveCalls
from workers.service.calls.pooled import Engine as PooledEngine
from workers.service.calls.pooled import Outcomes, PooledCalls
from workers.service.calls.pooled_inputs import Inputs, PooledReader
from workers.service.calls.stream import EventHub, Mailbox
from workers.service.lifecycle import Lifecycle
from workers.service.registration.prefix_adverts import PrefixAdverts


class NoForms:
    """Compiles none."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def answer_mask(self, request: GenerateRequest, thought: Thought | None = None) -> TokenMask | None:
        raise CallFailed(Failure(FailureCode.UNSUPPORTED, "this worker can't keep answers to a form"))


class NoReport:
    """Tells nothing, so that all stays in the book."""

    def take(self) -> list[Found]:
        return []

    def forget(self, keys: Iterable[int]) -> None:
        """There is nothing to forget."""


class Wired(NamedTuple):
    """The calls of a worker that generates text, with the parts around them."""

    calls: GenerateCalls
    delivery: Delivery
    hub: EventHub


def generate_calls(
    engine: Engine,
    prompts: Prompts,
    metrics: WorkerMetrics,
    defaults: Sampling | None = None,
    constraints: Constraints | None = None,
    answers: Answers | None = None,
    *,
    boot: str = "boot",
    grace_s: float = 60.0,
    mailbox: Mailbox | None = None,
    life: Lifecycle | None = None,
    records: CallRecords | None = None,
    adverts: PrefixAdverts | None = None,
) -> Wired:
    """Calls; without a mailbox a test delivers the engine's steps itself."""
    life = life or Lifecycle()
    live = LiveCalls(engine, records or CallRecords())
    hub = EventHub(boot, live.give_up, grace_s=grace_s)
    mailbox = mailbox or Mailbox(asyncio.get_running_loop(), life.crashed)
    delivery = Delivery(mailbox, engine, live, hub, metrics, life.shortage)
    calls = GenerateCalls(
        delivery,
        engine,
        live,
        hub,
        prompts,
        life,
        prompt_lane(),
        media_lane(),
        defaults=defaults or Sampling(),
        constraints=constraints or NoForms(),
        answers=answers or Answers(HERMES),
        adverts=adverts or PrefixAdverts(NoReport()),
        adapter_hashes=dict,
    )
    return Wired(calls, delivery, hub)


def pooled_calls(
    make_engine: Callable[[Outcomes], PooledEngine],
    inputs: Inputs,
    *,
    pooling: Pooling,
    width: int,
    longest: int,
    prompts: Prompts | None = None,
) -> PooledCalls:
    """Calls for pooled work, with the engine that `make_engine` returns."""
    outcomes = Outcomes()
    return PooledCalls(
        outcomes,
        make_engine(outcomes),
        PooledReader(inputs, prompts or fake_prompts(longest), prompt_lane(), media_lane(), longest),
        Lifecycle(),
        WorkerMetrics(CollectorRegistry(), "m", lambda: EngineLoad(1, 0, 0, 1, 0), EngineCounters),
        CallRecords(),
        pooling=pooling,
        width=width,
    )
