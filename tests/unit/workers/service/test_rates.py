from __future__ import annotations

import time

import pytest

from workers.engine.counters import EngineCounters, Tally
from workers.engine.request import CallLeft, EngineLoad
from workers.metrics.types import GAP_S
from workers.service.registration.heartbeat import Rates

IDLE = EngineLoad(slots=2, slots_busy=0, waiting=0, kv_tokens=1000, kv_tokens_used=0)


def busy(*running: CallLeft, prefill_s: float = 0.001) -> EngineLoad:
    return EngineLoad(len(running), len(running), 1, 1000, 500, 77, running, prefill_s=prefill_s)


def gaps(*seconds: float) -> EngineCounters:
    tally = Tally(GAP_S)
    for one in seconds:
        tally.add(one)
    return EngineCounters(gap_s=tally.distribution, num_preempted=3)


def test_nothing_is_known_at_first() -> None:
    load = Rates().load(IDLE, EngineCounters())
    assert (load.free_in_ms, load.prefill_ms, load.decode_ms, load.hold_ms) == (0, 0, 0, 0)
    assert (load.answer_tokens, load.bytes_per_token) == (0, 0)


def test_bytes_per_token_weigh_long_prompts_more_and_follow_the_newest() -> None:
    rates = Rates()
    rates.accepted(4000, 1000)
    rates.accepted(10, 10)
    assert rates.load(IDLE, EngineCounters()).bytes_per_token == pytest.approx(3.97, abs=0.02)
    for _ in range(100):
        rates.accepted(200, 100)
    assert rates.load(IDLE, EngineCounters()).bytes_per_token == pytest.approx(2.0, abs=0.01)


def test_the_gaps_since_the_last_look_make_the_pace() -> None:
    rates = Rates()
    assert rates.load(IDLE, gaps(0.01, 0.03)).decode_ms == pytest.approx(20)
    assert rates.load(IDLE, gaps(0.01, 0.03)).decode_ms == pytest.approx(20)
    assert rates.load(IDLE, gaps(0.01, 0.03, 0.12)).decode_ms == pytest.approx(20 + 0.3 * 100)
    assert rates.load(IDLE, gaps()).preempted == 3


def test_how_long_calls_hold_a_slot_is_a_moving_mean() -> None:
    rates = Rates()
    rates.held(time.monotonic() - 2)
    assert rates.load(IDLE, EngineCounters()).hold_ms == pytest.approx(2000, rel=0.02)
    rates.held(time.monotonic() - 12)
    assert rates.load(IDLE, EngineCounters()).hold_ms == pytest.approx(3000, rel=0.02)


def test_a_slot_is_free_when_the_first_running_call_is_at_its_end() -> None:
    rates, counters = Rates(), gaps(0.05)
    soon, late = CallLeft(num_prompt=0, num_answer=40), CallLeft(num_prompt=3000, num_answer=100)
    assert rates.load(busy(soon, late), counters).free_in_ms == pytest.approx(40 * 50)
    # Prompts are computed one after the other.
    assert rates.load(busy(late, late), counters).free_in_ms == pytest.approx(3000 + 100 * 50)
    assert rates.load(IDLE, counters).free_in_ms == 0
    assert rates.load(busy(soon), counters).backlog_tokens == 77
