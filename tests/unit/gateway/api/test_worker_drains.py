"""What draining a worker is said to mean, and which workers can't be drained."""

from __future__ import annotations

from typing import Any, cast

import pytest

from gateway.api.overview.calls import AuditNote
from gateway.api.overview.worker_drains import WorkerDrains, drain_sentences, worker_named
from gateway.call import Principal
from gateway.errors import InvalidRequest, NotSupported, WorkerNotFound
from gateway.registry.desired_models import DesiredModels
from gateway.registry.snapshot import FleetSnapshot
from gateway.relay.relay import WorkerQueries
from workers.protocol.heartbeat import Heartbeat, Load, ModelFacts

FACTS = ModelFacts(n_ctx_train=4096, n_params=1, size=1, n_vocab=1)


def beat(worker: str, model: str = "m", *, busy: int = 0, waiting: int = 0, **more: Any) -> Heartbeat:
    load = Load(slots_busy=busy, waiting=waiting)
    return Heartbeat(
        worker=worker,
        boot=f"boot-of-{worker}",
        model=model,
        address="http://127.0.0.1:1",
        slots=4,
        slots_busy=busy,
        n_ctx=512,
        kv_tokens=2048,
        kv_tokens_used=0,
        facts=FACTS,
        load=load,
        **more,
    )


def fleet(*beats: Heartbeat) -> FleetSnapshot:
    models = dict.fromkeys(one.model for one in beats)
    return FleetSnapshot({model: tuple(one for one in beats if one.model == model) for model in models})


def test_running_calls_and_those_that_come_meanwhile() -> None:
    one, two, three = beat("a", busy=2, waiting=1), beat("b", busy=3), beat("c", busy=4, waiting=2)
    assert drain_sentences(one, (one, two, three), is_kept=True) == [
        "a finishes 3 calls first, however long that takes: none is cut off.",
        "New calls go to the 2 other workers of m meanwhile: 1 of 8 slots free.",
        "Then its supervisor starts it again, and it loads the model.",
    ]


def test_others_that_take_no_calls_are_none() -> None:
    one, two = beat("a"), beat("b", draining=True)
    assert drain_sentences(one, (one, two), is_kept=False) == [
        "a has no calls, and ends at once.",
        "No other worker of m takes calls: new ones wait until this one has started anew.",
        "No supervisor keeps it: it is back only if something else starts it again, as Kubernetes does.",
    ]


def test_a_worker_that_leaves_for_another_one_does_not_come_back() -> None:
    one = beat("a", busy=1, draining=True, reserved=True)
    told = drain_sentences(one, (one,), is_kept=True)
    assert told[2] == "It takes no new calls already, as its supervisor wants its memory for another worker."


def test_ids_that_name_no_worker_or_several() -> None:
    snapshot = fleet(beat("a"), beat("b"), beat("b", "n"))
    assert worker_named(snapshot, "a").worker == "a"
    with pytest.raises(WorkerNotFound, match=r"^No worker 'c' is registered\. Those that are: a, b, b\.$"):
        worker_named(snapshot, "c")
    with pytest.raises(WorkerNotFound, match=r": a0, a1, a10, .*, a7 and 2 more\.$"):
        worker_named(fleet(*(beat(f"a{number}") for number in range(12))), "c")
    with pytest.raises(WorkerNotFound, match="None is"):
        worker_named(fleet(), "c")
    with pytest.raises(InvalidRequest, match="of the models m, n"):
        worker_named(snapshot, "b")


async def test_a_worker_of_an_older_version_is_told_to_be_stopped_otherwise() -> None:
    class Queries:
        async def ask_worker(self, *asked: object, **more: object) -> None:
            raise NotSupported("The worker a does other work.")

    class View:
        snapshot = fleet(beat("a"))

    class Desired:
        async def is_supervised(self, model: str) -> bool:
            return True

    drains = WorkerDrains(
        cast(Any, View()), cast(WorkerQueries, Queries()), cast(DesiredModels, Desired()), cast(AuditNote, None)
    )
    scope = {"path_params": {"worker": "a"}}
    with pytest.raises(NotSupported, match="version that can't be drained from here"):
        await drains.answer(cast(Principal, None), scope, cast(Any, None), cast(Any, None))
