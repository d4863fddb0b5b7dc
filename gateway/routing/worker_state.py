"""The state of one worker as the ranking reads it (`WorkerState`): when the worker can begin a call, as predicted from
the load that the worker last reported. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import msgspec

from workers.protocol.heartbeat import Heartbeat, Load

NOT_KNOWN = Load(prefill_ms=0.5, decode_ms=20.0, hold_ms=5000.0, answer_tokens=512.0, bytes_per_token=4.0)
"""Figures used until a worker of the pool has measured its own: those of an average GPU and model. It hardly matters
how exact they are, as long as all workers get the same."""
ADAPTER_LOAD_MS = 500.0
"""Milliseconds assumed for loading an adapter until any worker has loaded one."""


@dataclass(frozen=True, slots=True)
class Typical:
    """The medians of the figures that a pool's workers have measured. They replace figures that a worker has not
    measured yet. All are above 0."""

    prefill_ms: float = NOT_KNOWN.prefill_ms
    decode_ms: float = NOT_KNOWN.decode_ms
    hold_ms: float = NOT_KNOWN.hold_ms
    answer_tokens: float = NOT_KNOWN.answer_tokens
    bytes_per_token: float = NOT_KNOWN.bytes_per_token
    """Bytes per prompt token, for every worker of the pool, whatever it has measured itself: all have one tokenizer,
    and no worker must look cheaper because of the requests that it happened to get."""
    adapter_load_ms: float = ADAPTER_LOAD_MS


def typical_of(workers: Iterable[Heartbeat]) -> Typical:
    beats = list(workers)
    loads = [beat.load for beat in beats]
    return Typical(
        prefill_ms=_middle((load.prefill_ms for load in loads), NOT_KNOWN.prefill_ms),
        decode_ms=_middle((load.decode_ms for load in loads), NOT_KNOWN.decode_ms),
        hold_ms=_middle((load.hold_ms for load in loads), NOT_KNOWN.hold_ms),
        answer_tokens=_middle((load.answer_tokens for load in loads), NOT_KNOWN.answer_tokens),
        bytes_per_token=_middle((load.bytes_per_token for load in loads), NOT_KNOWN.bytes_per_token),
        adapter_load_ms=_middle((beat.adapter_load_ms for beat in beats), ADAPTER_LOAD_MS),
    )


def _middle(values: Iterable[float], otherwise: float) -> float:
    known = [value for value in values if value > 0]
    return median(known) if known else otherwise


class WorkerState(msgspec.Struct, frozen=True):
    """The state of a worker at the time when it last reported its load (`heard_at`). Times are seconds, by the same
    clock as `heard_at`; durations are milliseconds."""

    worker: str
    number: int
    """Number of the worker in the pool's index of prefix hashes."""
    beat: Heartbeat
    """The worker's heartbeat. Its `load`, `draining`, `slots_busy`, `kv_tokens_used` and `version` come from its last
    load report (an entry of `pd:news`) if that is newer."""
    heard_at: float
    ready_at: float
    """When the worker can begin the prefill of one more prompt, if no other call comes first."""
    ahead: int
    """Number of calls that get a slot before a new call does; if negative, minus the number of free slots."""
    slot_at: float
    """When the worker's next slot comes free, if none is free now."""
    slot_ms: float
    """Predicted time from when one of the worker's slots comes free until the next one does."""
    backlog_at: float
    """When the worker will have finished the prefills that it already has to do."""
    prefill_ms: float
    adapter_load_ms: float
    kv_free: float
    """Number of free KV cells; infinite for an encoder, which has no KV cells and needs none."""
    known: bool
    """Whether the worker has measured all its figures; where it has not, the pool's typical figures are used."""


def worker_state(number: int, beat: Heartbeat, heard_at: float, typical: Typical) -> WorkerState:
    load = beat.load
    slots = max(1, beat.slots)
    slot_ms = (load.hold_ms or typical.hold_ms) / slots
    first_ms = load.free_in_ms or slot_ms
    prefill_ms = load.prefill_ms or typical.prefill_ms
    ahead = load.slots_busy + load.waiting - slots
    slot_at = heard_at + first_ms / 1000
    backlog_at = heard_at + load.backlog_tokens * prefill_ms / 1000
    taken_at = slot_at + ahead * slot_ms / 1000 if ahead >= 0 else heard_at
    return WorkerState(
        worker=beat.worker,
        number=number,
        beat=beat,
        heard_at=heard_at,
        ready_at=max(taken_at, backlog_at),
        ahead=ahead,
        slot_at=slot_at,
        slot_ms=slot_ms,
        backlog_at=backlog_at,
        prefill_ms=prefill_ms,
        adapter_load_ms=beat.adapter_load_ms or typical.adapter_load_ms,
        kv_free=beat.kv_tokens - load.kv_tokens_used if beat.kv_tokens else math.inf,
        known=load.hold_ms > 0 and load.prefill_ms > 0 and (beat.adapter_load_ms > 0 or not beat.adapters),
    )


def with_load(beat: Heartbeat, load: Load, draining: bool, version: int) -> Heartbeat:
    """Return the heartbeat as the worker would write it now, with the newer load that it has reported since."""
    return msgspec.structs.replace(
        beat,
        load=load,
        slots_busy=load.slots_busy,
        kv_tokens_used=load.kv_tokens_used,
        draining=draining,
        version=version,
    )
