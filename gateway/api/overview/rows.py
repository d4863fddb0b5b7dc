"""The overview of the fleet as `GET /admin/fleet` and `GET /admin/events` tell it: gateways, models, workers, slots.

It has names, numbers and teams, never text of prompts or answers. Times that end in `_at` are unix seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from workers.protocol.residency import ModelStatus

Circuit = Literal["", "open", "half_open"]
RowT = TypeVar("RowT", bound=msgspec.Struct)


class GatewayRow(msgspec.Struct, frozen=True, kw_only=True):
    seen_s_ago: float
    """Seconds since its last beat in Redis, whole: they are for people."""


class DeviceRow(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU of a machine, or its main memory (`cpu`)."""

    id: str
    total_bytes: int
    free_bytes: int
    """What a new worker may take, rounded to MiB."""
    planned_bytes: int
    """What its workers take, or will."""


class PlacedWorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A worker in the account of its machine's memory."""

    worker: str
    """Its id among the workers; empty: it has no process yet."""
    model: str
    status: str
    """`loading`, `ready`, `reserved` (it takes no new calls), `draining`, or another word of a later version."""
    bytes: dict[str, int]
    """Device -> what it takes there, or will."""


class MachineRow(msgspec.Struct, frozen=True, kw_only=True):
    """A machine whose supervisor loads models on demand."""

    is_leaving: bool
    """Whether its supervisor ends: nothing loads there."""
    devices: tuple[DeviceRow, ...]
    workers: tuple[PlacedWorkerRow, ...]
    failures: dict[str, str]
    """Model -> why it is not loaded there for now."""


class MemoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a model's worker on one machine, in bytes."""

    predicted: int
    """Of main memory and GPUs together: the sum of the next four."""
    weights: int
    cells: int
    compute: int
    other: int
    growth: int
    """What it may take later beyond that, for caches."""
    taken: int | None
    """The most that was seen, caches left out; None: no worker was read yet."""


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the catalog, or one that workers serve."""

    kind: str
    """`generate`, `embed` or `rank`; empty: no worker has told."""
    status: ModelStatus
    is_on_demand: bool
    """Whether calls load it."""
    progress: float | None
    """Share of the loading that is done, 0 to 1; None: it does not load, or it is not known."""
    why: str
    """Why it is not loaded, for people; empty where it is."""
    retry_at: float
    """When a model that failed to load is tried again; 0: not by itself, or it has not failed."""
    num_workers: int
    slots: int
    """Slots of workers that do not drain."""
    slots_busy: int
    waiting: int | None
    """Calls in the queue, of all gateways; None: Redis does not answer."""
    predicted_wait_s: float
    """Seconds that a call which comes now is expected to wait for a slot."""
    aliases: tuple[str, ...]
    memory: dict[str, MemoryRow]
    """Machine -> what a worker takes there, of machines that have predicted it."""


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process."""

    model: str
    address: str
    started_at: float
    is_draining: bool
    slots: int
    slots_busy: int
    waiting: int
    """Calls that it has accepted and that have no slot."""
    n_ctx: int
    kv_tokens: int
    kv_tokens_used: int
    """KV cells of running calls."""
    backlog_tokens: int
    """Prompt tokens that are not computed yet."""
    prefill_ms: float
    """Milliseconds per token of a prompt; 0: not known."""
    decode_ms: float
    """Milliseconds per token of one answer; 0: not known."""
    preempted: int
    adapters: tuple[str, ...]
    adapters_resident: tuple[str, ...]
    cache_ram_bytes: int
    """Prefixes that it has saved in main memory."""
    cache_disk_bytes: int
    """Those on disk, with those of workers that share its folder."""
    circuit: Circuit
    """State of this gateway's circuit breaker; empty: closed."""


class SlotRow(msgspec.Struct, frozen=True, kw_only=True):
    """A slot of a worker: its running call or, if none runs, what it holds."""

    is_busy: bool
    team: str
    """Team that owns the call or conversation; empty: there is neither."""
    request_id: str
    prompt_tokens: int
    answer_tokens: int
    max_tokens: int
    """Tokens that the answer may have; -1: no bound, or unknown."""


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet at one moment."""

    at: float
    version: str
    """Of Paddock, in the gateway that answers."""
    gateway: str
    """Id of the gateway that answers."""
    redis_up: bool
    gateways: dict[str, GatewayRow]
    models: dict[str, ModelRow]
    workers: dict[str, WorkerRow]
    """Worker id -> the worker."""
    machines: dict[str, MachineRow]
    catalog_fault: str
    """What is wrong with the catalog's file, if an older one is in use; empty: nothing."""


PARTS = ("gateways", "models", "workers", "machines")
"""The tables of an overview, by name."""


Fields = dict[str, Any]
"""Field of a row -> its value."""


class Changes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tells how an overview differs from the one before: whole rows that are new, those fields of others that have
    changed, and None for rows that are gone."""

    at: float
    redis_up: bool | None = None
    catalog_fault: str | None = None
    gateways: dict[str, GatewayRow | Fields | None] = {}
    models: dict[str, ModelRow | Fields | None] = {}
    workers: dict[str, WorkerRow | Fields | None] = {}
    machines: dict[str, MachineRow | Fields | None] = {}


def changes_between(before: Overview, now: Overview) -> Changes:
    """Return what turns the overview `before` into `now`."""
    return Changes(
        at=now.at,
        redis_up=now.redis_up if now.redis_up != before.redis_up else None,
        catalog_fault=now.catalog_fault if now.catalog_fault != before.catalog_fault else None,
        gateways=_changed(before.gateways, now.gateways),
        models=_changed(before.models, now.models),
        workers=_changed(before.workers, now.workers),
        machines=_changed(before.machines, now.machines),
    )


def _changed(before: Mapping[str, RowT], now: Mapping[str, RowT]) -> dict[str, RowT | Fields | None]:
    changed: dict[str, RowT | Fields | None] = {}
    for name, row in now.items():
        known = before.get(name)
        if known is None:
            changed[name] = row
        elif known != row:
            changed[name] = _differing(known, row)
    return changed | dict.fromkeys(before.keys() - now.keys())


def _differing(before: msgspec.Struct, now: msgspec.Struct) -> Fields:
    return {name: value for name in now.__struct_fields__ if (value := getattr(now, name)) != getattr(before, name)}
