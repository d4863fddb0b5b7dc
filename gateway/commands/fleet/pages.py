"""Lays the overview of a fleet out for a terminal. Pure: `paddock status`, `ps` and `top` print what it returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from gateway.api.overview.rows import ModelRow, Overview, SlotRow, WorkerRow
from workers.commands.layout import Column, clean, table, write_number, write_span

NO_MODELS = "There are no models. `paddock up --hf OWNER/NAME` fetches one and serves it."
NO_WORKERS = "No worker runs."

Slots = Mapping[str, Sequence[SlotRow]]
"""Worker -> its slots."""


class _Model(NamedTuple):
    name: str
    row: ModelRow


class _Worker(NamedTuple):
    id: str
    row: WorkerRow
    now: float


class _Slot(NamedTuple):
    worker: str
    number: int
    row: SlotRow
    speed: float | None


def read_overview(document: Any) -> tuple[Overview, Slots]:
    """Return an answer of `GET /admin/fleet`. Raises msgspec.ValidationError for one of another version."""
    slots = msgspec.convert(document.get("slots", {}), dict[str, list[SlotRow]])
    return msgspec.convert(document, Overview), slots


def status_page(overview: Overview, address: str, width: int | None) -> str:
    """Return one screen: the gateways, the models, the workers."""
    parts = [_head(overview, address)]
    parts += [f"The catalog's file is not used: {clean(overview.catalog_fault)}"] if overview.catalog_fault else []
    parts.append(models_table(overview, width) or NO_MODELS)
    parts += list(_remarks(overview))
    parts.append(workers_table(overview, width) or NO_WORKERS)
    return "\n\n".join(parts)


def models_table(overview: Overview, width: int | None, *, is_running_only: bool = False) -> str:
    """Return the table of the models; empty: there are none. `is_running_only`: those that load or have workers,
    and those that sleep, which take memory."""
    rows = [
        _Model(name, row)
        for name, row in overview.models.items()
        if not is_running_only or row.num_workers or row.status in ("loading", "sleeping")
    ]
    return table(_MODELS, rows, width) if rows else ""


def workers_table(overview: Overview, width: int | None) -> str:
    """Return the table of the workers, by model; empty: there are none."""
    rows = [_Worker(id, row, overview.at) for id, row in overview.workers.items()]
    rows.sort(key=lambda worker: (worker.row.model, worker.id))
    return table(_WORKERS, rows, width) if rows else ""


def slots_table(
    slots: Slots, before: Slots, seconds: float, width: int | None, *, most: int | None = None
) -> tuple[str, int]:
    """Return the table of the slots with running calls, and how many calls are left out.

    `before`: the slots `seconds` ago, from which speeds are computed. `most`: maximum number of rows."""
    rows = [
        _Slot(worker, number, row, _speed(row, before.get(worker, ()), number, seconds))
        for worker, found in sorted(slots.items())
        for number, row in enumerate(found)
        if row.is_busy
    ]
    shown = rows[:most]
    return (table(_SLOTS, shown, width) if shown else "No call runs."), len(rows) - len(shown)


def _head(overview: Overview, address: str) -> str:
    num = len(overview.gateways)
    gateways = f"{num} gateway{'' if num == 1 else 's'}" if num else "gateways not known"
    redis = "Redis answers" if overview.redis_up else "Redis does not answer"
    busy = sum(model.slots_busy for model in overview.models.values())
    slots = sum(model.slots for model in overview.models.values())
    return f"Paddock {overview.version} at {address}: {gateways}, {redis}, {busy} of {slots} slots in use"


def _remarks(overview: Overview) -> Iterator[str]:
    """Yield why models are not loaded."""
    for name, model in overview.models.items():
        if model.status == "failed" or (model.waiting and not model.num_workers):
            again = f"; it is tried again in {write_span(max(0.0, model.retry_at - overview.at))}"
            yield clean(f"{name}: {model.why or 'no worker has registered'}{again if model.retry_at else ''}")


def _state(model: _Model) -> str:
    row = model.row
    if row.status == "loading" and row.progress is not None:
        return f"loading {row.progress:.0%}"
    if row.status == "unloaded" and row.is_on_demand:
        return "on demand"
    return row.status


def _of(busy: int, total: int) -> str:
    return f"{busy} of {total}" if total else ""


def _waiting(model: _Model) -> str:
    row = model.row
    if not row.waiting:
        return "?" if row.waiting is None else ""
    expected = f", {write_span(row.predicted_wait_s)}" if row.predicted_wait_s else ""
    return f"{row.waiting}{expected}"


def _state_of(worker: _Worker) -> str:
    row = worker.row
    if row.is_draining:
        return "draining"
    return {"": "serving", "open": "fails", "half_open": "on trial"}[row.circuit]


def _kv(worker: _Worker) -> str:
    row = worker.row
    return f"{row.kv_tokens_used / row.kv_tokens:.0%} of {write_number(row.kv_tokens)}" if row.kv_tokens else ""


def _decoding(worker: _Worker) -> str:
    return f"{1000 / worker.row.decode_ms:.0f} t/s" if worker.row.decode_ms else ""


def _reading(worker: _Worker) -> str:
    return f"{1000 / worker.row.prefill_ms:,.0f} t/s" if worker.row.prefill_ms else ""


def _speed(row: SlotRow, before: Sequence[SlotRow], number: int, seconds: float) -> float | None:
    """Return the tokens per second of a slot's answer; None: the call was not there before."""
    earlier = before[number] if number < len(before) else None
    if earlier is None or earlier.request_id != row.request_id or not row.request_id or seconds <= 0:
        return None
    return max(0, row.answer_tokens - earlier.answer_tokens) / seconds


_MODELS: tuple[Column[_Model], ...] = (
    Column("MODEL", lambda model: model.name, is_always=True),
    Column("STATE", _state, is_always=True),
    Column("WORKERS", lambda model: str(model.row.num_workers or ""), is_number=True, is_always=True),
    Column("SLOTS", lambda model: _of(model.row.slots_busy, model.row.slots), is_always=True),
    Column("WAITING", _waiting, is_always=True),
    Column("ALSO", lambda model: ", ".join(model.row.aliases)),
)
_WORKERS: tuple[Column[_Worker], ...] = (
    Column("WORKER", lambda worker: worker.id, is_always=True),
    Column("MODEL", lambda worker: worker.row.model, is_always=True),
    Column("STATE", _state_of, is_always=True),
    Column("SLOTS", lambda worker: _of(worker.row.slots_busy, worker.row.slots)),
    Column("QUEUED", lambda worker: str(worker.row.waiting or ""), is_number=True),
    Column("KV CACHE", _kv),
    Column("READS", _reading, is_number=True),
    Column("WRITES", _decoding, is_number=True),
    Column("ADAPTERS", lambda worker: ", ".join(worker.row.adapters_resident)),
    Column("UP", lambda worker: write_span(max(0.0, worker.now - worker.row.started_at)), is_number=True),
)
_SLOTS: tuple[Column[_Slot], ...] = (
    Column("WORKER", lambda slot: slot.worker, is_always=True),
    Column("SLOT", lambda slot: str(slot.number), is_number=True, is_always=True),
    Column("TEAM", lambda slot: slot.row.team, is_always=True),
    Column("REQUEST", lambda slot: slot.row.request_id, is_always=True),
    Column("PROMPT", lambda slot: write_number(slot.row.prompt_tokens), is_number=True),
    Column("ANSWER", lambda slot: write_number(slot.row.answer_tokens), is_number=True),
    Column("OF", lambda slot: write_number(slot.row.max_tokens) if slot.row.max_tokens >= 0 else "", is_number=True),
    Column("T/S", lambda slot: "" if slot.speed is None else f"{slot.speed:.1f}", is_number=True),
)
