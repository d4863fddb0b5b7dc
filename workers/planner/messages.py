"""Describes the messages, in Redis, between the machines of a fleet and the one of them that plans.

Each machine tells what it has (`MachineReport`) and what its models need (`MachineCatalog`, which changes seldom); the
planner tells each machine what is to load and leave there (`MachineOrders`). Times are unix seconds by the clock of the
machine that writes: who reads corrects them (`workers.planner.hearing`). A field that is unknown is left out, so that
machines of different versions understand each other.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta

from workers.protocol.residency import MAX_MODELS, Why
from workers.residency.picture import Device, Need, Share, Status
from workers.residency.plan import WaitReason
from workers.residency.policy import Group, Residency

MAX_WORKERS = 1024
"""Most workers that one machine tells of."""


class ToldWorker(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker of the machine, as in `picture.Worker`."""

    id: str
    """Unique in the fleet, and never used again."""
    name: str = ""
    """Its id in heartbeats, which a later worker can get; empty: it has no process yet."""
    model: str
    shares: tuple[Share, ...]
    status: Status
    since: float
    last_used: float = 0.0
    """0: never."""
    num_running: int = 0
    is_settling: bool = False
    """Whether a call may be on its way to it though it is reserved."""
    is_stale: bool = False
    replaces: str = ""
    load_s: float = 0.0
    """Seconds that loading it took; 0: it loads."""
    released_at: float = 0.0
    """0: never."""


class ToldFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is not loaded on the machine before a moment."""

    not_before: float
    why: Why


class MachineReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The message of one machine's supervisor: its memory and workers as they are now."""

    at: float
    boot: str
    """A random word that is new with each start of the supervisor."""
    fence: int = 0
    """The highest number of a planner that the machine has heard of."""
    done: int = 0
    """The highest number of an order to start, by that planner, that was carried out or refused."""
    catalog: str = ""
    """Digest of the machine's `MachineCatalog`."""
    devices: tuple[Device, ...] = ()
    is_leaving: bool = False
    """Whether the supervisor ends: its workers leave, and nothing loads."""
    workers: Annotated[tuple[ToldWorker, ...], Meta(max_length=MAX_WORKERS)] = ()
    failures: Annotated[dict[str, ToldFailure], Meta(max_length=MAX_MODELS)] = {}
    loaded: Annotated[tuple[str, ...], Meta(max_length=MAX_MODELS)] = ()
    """Models that have been loaded since the supervisor's start."""
    asleep: Annotated[tuple[str, ...], Meta(max_length=MAX_MODELS)] = ()
    """Models whose weights are kept in main memory, without a worker."""
    left: Annotated[dict[str, float], Meta(max_length=MAX_MODELS)] = {}
    """Model -> when a worker of it last stopped taking calls."""


class ToldMemory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The memory of a model's worker in bytes, for people: as it was predicted, and the most that was seen."""

    weights: int
    cells: int
    compute: int
    other: int
    """These four are parts of `host` and `gpus` together."""
    host: int
    gpus: tuple[int, ...] = ()
    growth: int = 0
    """Main memory that it may take later, for caches."""
    taken_host: int = 0
    """0: no worker was read yet."""
    taken_gpus: tuple[int, ...] = ()


class ToldModel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model of the machine's catalog whose files it has."""

    policy: Residency
    """Resolved."""
    need: Need | None = None
    """The memory that a worker takes there; None: not predicted yet, or it can't be."""
    is_outdated: bool = False
    """Whether `need` is that of earlier settings, with which workers run on. The model is not loaded there now."""
    memory: ToldMemory | None = None
    """None: not predicted yet, or it can't be."""


class MachineCatalog(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The models that a machine may load, and the rules of its catalog."""

    models: Annotated[dict[str, ToldModel], Meta(max_length=MAX_MODELS)]
    groups: Annotated[dict[str, Group], Meta(max_length=MAX_MODELS)] = {}
    models_max: int = 0


class StartOrder(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker that is to be started."""

    number: int
    """Grows with each order of one planner, so that none is carried out twice."""
    worker: str
    """The id that it gets."""
    model: str
    shares: tuple[Share, ...]
    why: Why
    replaces: str = ""
    """Id of the stale worker whose place it takes; empty: it takes nobody's."""


class ToldWait(msgspec.Struct, frozen=True, kw_only=True):
    """A model that does not load now though it is wanted, or would not if it were (`Plan.closed`)."""

    reason: WaitReason
    why: Why


class MachineOrders(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The workers that a machine should have: those to be started and those to leave. A worker that is not named stays
    as it is. An order is told again and again until the machine's report shows that it was heard."""

    at: float
    fence: int
    """The planner's number: a machine follows none with a lower one than it has heard of."""
    planner: str
    """The machine that plans."""
    boot: str
    """The start of the supervisor that this is for."""
    starts: tuple[StartOrder, ...] = ()
    leaving: dict[str, Why] = {}
    """Worker -> why it stops once its calls have ended."""
    sleeping: tuple[str, ...] = ()
    """Those of them whose models' weights are to stay in main memory."""
    forgotten: tuple[str, ...] = ()
    """Models whose weights are to stay there no more."""
    reserved: dict[str, Why] = {}
    """Worker -> why it takes no new calls for now."""
    released: dict[str, Why] = {}
    """Worker -> why it takes calls again."""
    waits: dict[str, ToldWait] = {}
    """What keeps models from being loaded anywhere, or would keep them."""


encode = msgspec.json.Encoder().encode
decode_report = msgspec.json.Decoder(MachineReport).decode
decode_catalog = msgspec.json.Decoder(MachineCatalog).decode
decode_orders = msgspec.json.Decoder(MachineOrders).decode


def digest_of(encoded: bytes) -> str:
    """Return a short digest of a message's bytes."""
    return hashlib.blake2b(encoded, digest_size=8).hexdigest()
