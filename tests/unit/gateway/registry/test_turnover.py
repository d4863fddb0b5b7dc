"""Workers that come and go."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.registry.snapshot import FleetSnapshot, Turnover
from workers.protocol.heartbeat import Heartbeat, ModelFacts

FACTS = ModelFacts(n_ctx_train=1, n_params=1, size=1, n_vocab=1)


def beat(worker: str, boot: str, *, draining: bool = False) -> Heartbeat:
    return Heartbeat(
        worker=worker,
        boot=boot,
        model="m",
        address="http://x:1",
        slots=1,
        slots_busy=0,
        n_ctx=1,
        kv_tokens=1,
        kv_tokens_used=0,
        facts=FACTS,
        draining=draining,
    )


def fleet(*beats: Heartbeat, **more: tuple[Heartbeat, ...]) -> FleetSnapshot:
    workers: Mapping[str, tuple[Heartbeat, ...]] = {"m": beats, **more}
    return FleetSnapshot(workers)


def test_who_comes_and_goes_is_told_once() -> None:
    told: list[tuple[str, ...]] = []
    turnover = Turnover(
        fleet(beat("a", "1")), lambda model: told.append((model,)), lambda model, how: told.append((model, how))
    )
    turnover.update(fleet(beat("a", "1"), beat("b", "1b")))
    assert told == [("m",)], "those that were there at the beginning have not come"
    turnover.update(fleet(beat("a", "1", draining=True), beat("b", "1b")))
    turnover.update(fleet(beat("b", "1b")))
    assert told[1:] == [("m", "drained")]
    turnover.update(fleet(beat("b", "2b")))
    assert sorted(told[2:]) == [("m",), ("m", "lost")], "a worker that restarts is another process"
    turnover.update(fleet(more=(beat("c", "3"),)))
    assert sorted(told[4:]) == [("m", "lost"), ("more",)]


def test_a_process_that_was_silent_for_a_while_has_not_come_anew() -> None:
    told: list[tuple[str, ...]] = []
    turnover = Turnover(fleet(), lambda model: told.append((model,)), lambda model, how: told.append((model, how)))
    turnover.update(fleet(beat("a", "1")))
    for _ in range(3):
        turnover.update(fleet())
        turnover.update(fleet(beat("a", "1")))
    assert told == [("m",), *[("m", "lost")] * 3]
    turnover.update(fleet(beat("a", "2")))
    assert sorted(told[4:]) == [("m",), ("m", "lost")]
