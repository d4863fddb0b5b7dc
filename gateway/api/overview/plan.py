"""Answers `GET /admin/plan`: what loading or unloading a model, or draining a worker, would do now. Nothing is done.

The decision to load or unload is made as the planning machine would make it (`workers.residency.decide`), from what
all machines tell, with the wish added. The machine that plans knows a little more, such as orders that are under way.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final, Literal, get_args

import msgspec
import redis.asyncio
from msgspec.structs import replace as replace_struct
from starlette.types import Receive, Scope, Send

from gateway.api.http.answers import send_json
from gateway.api.http.diagnostics import request_log_of
from gateway.api.intake.request_reader import RequestReader
from gateway.api.overview.worker_drains import drain_sentences, num_calls, worker_named
from gateway.api.parameters.base import quote
from gateway.api.request_headers import query_of
from gateway.call import Principal
from gateway.errors import InvalidRequest
from gateway.registry.desired_models import DesiredModels
from gateway.registry.machines import Machines
from gateway.registry.model_states import ModelStates
from gateway.registry.snapshot import FleetView
from gateway.store.outage import Unreadable, answered
from gateway.store.packed import read_hash
from gateway.telemetry.metrics import Unread
from workers.planner.merge import MachineView, all_demand, describe, merge
from workers.protocol import keys
from workers.protocol.residency import LIFE_S, LONGEST_TOLD, GatewayDemand, ModelDemand, decode_demand
from workers.redis.link import long_commands_of
from workers.residency.decide import decide
from workers.residency.explain import PlanData, as_data, sentences
from workers.residency.picture import Picture
from workers.residency.plan import HOPELESS, Action, Reserve, Stop, Wait

Wish = Literal["load", "unload"]
WISHES = get_args(Wish)
DRAIN: Final = "drain"
KeptBy = Literal["demand", "supervisor", "nobody"]


class WishedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan that would be made if an admin loaded or unloaded a model, or drained a worker, now."""

    action: Wish | Literal["drain"]
    model: str
    worker: str = ""
    """Its id, where one is drained."""
    kept_by: KeptBy
    """Who keeps the model's workers: machines that load it on demand (then there is a plan), supervisors that keep a
    fixed number, or nobody that this gateway could tell."""
    num_workers: int
    num_running: int
    """Calls in slots of the model's workers, or those that the drained worker has."""
    num_waiting: int
    """Calls in the model's queue."""
    is_possible: bool
    """Whether it is done, now or once what is in its way has ended."""
    sentences: list[str]
    """For people: the memory of the machines, then each action with its reason."""
    plan: PlanData | None


class PlanRoute:
    def __init__(
        self,
        redis: redis.asyncio.Redis,
        reader: RequestReader,
        fleet: FleetView,
        states: ModelStates,
        desired: DesiredModels,
        machines: Machines,
        unreadable: Unreadable,
    ) -> None:
        """`unreadable` counts what can't be read."""
        self._commands = long_commands_of(redis)
        self._unreadable = unreadable
        self._reader = reader
        self._fleet = fleet
        self._states = states
        self._desired = desired
        self._machines = machines

    async def answer(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the plan of `?action=` and `?model=` or `?worker=`. Raises InvalidRequest, ModelNotFound,
        WorkerNotFound, StoreUnavailable."""
        query = query_of(scope)
        if query.get("action") == DRAIN:
            await send_json(send, await self._drain(query.get("worker", "")), request_log_of(scope))
            return
        action = next((wish for wish in WISHES if wish == query.get("action")), None)
        if action is None:
            told = quote(query.get("action", ""))
            raise InvalidRequest(
                f"`action` is {told}. Send `load` or `unload` and a `model`, or `drain` and a `worker`.", param="action"
            )
        model = self._reader.call(principal, {"model": query.get("model") or None}, scope, strict=True).model
        await send_json(send, await self._plan(action, model), request_log_of(scope))

    async def _plan(self, action: Wish, model: str) -> WishedPlan:
        demand, asked = await self._wanted()
        beats = self._fleet.snapshot.of(model)
        calls = demand.get(model, ModelDemand())
        told = WishedPlan(
            action=action,
            model=model,
            kept_by="demand",
            num_workers=len(beats),
            num_running=sum(beat.load.slots_busy for beat in beats),
            num_waiting=calls.num_waiting,
            is_possible=False,
            sentences=[],
            plan=None,
        )
        kept_by = await self._kept_by(model)
        if kept_by != "demand":
            return replace_struct(told, kept_by=kept_by, is_possible=kept_by == "supervisor")
        picture, now = await self._picture(action, model, demand, asked)
        plan = decide(picture, now)
        mine = replace(plan, actions=tuple(each for each in plan.actions if _is_of(each, model)))
        possible = not any(isinstance(each, Wait) and each.reason in HOPELESS for each in mine.actions)
        lines = sentences(picture, mine, now)
        return replace_struct(told, is_possible=possible, sentences=lines, plan=as_data(picture, mine))

    async def _drain(self, worker: str) -> WishedPlan:
        beat = worker_named(self._fleet.snapshot, worker)
        demand, _ = await self._wanted()
        kept_by, beats = await self._kept_by(beat.model), self._fleet.snapshot.of(beat.model)
        return WishedPlan(
            action=DRAIN,
            model=beat.model,
            worker=beat.worker,
            kept_by=kept_by,
            num_workers=len(beats),
            num_running=num_calls(beat),
            num_waiting=demand.get(beat.model, ModelDemand()).num_waiting,
            is_possible=True,
            sentences=drain_sentences(beat, beats, is_kept=kept_by != "nobody"),
            plan=None,
        )

    async def _kept_by(self, model: str) -> KeptBy:
        """Return who keeps a model's workers. Raises StoreUnavailable."""
        if self._states.is_on_demand(model):
            return "demand"
        return "supervisor" if await self._desired.is_supervised(model) else "nobody"

    async def _picture(
        self, action: Wish, model: str, demand: Mapping[str, ModelDemand], asked: Mapping[str, float]
    ) -> tuple[Picture, float]:
        """Return the picture with the wish in it, and its time."""
        views: Mapping[str, MachineView] = await self._machines.look()
        described = describe({name: view.catalog for name, view in views.items() if view.catalog is not None}, "")
        unloaded = await self._desired.unloaded(sorted(described.names))
        now = time.time()
        if action == "load":
            asked, unloaded = {**asked, model: now}, unloaded - {model}
        else:
            asked, unloaded = {name: at for name, at in asked.items() if name != model}, unloaded | {model}
        return merge(views, described, demand, asked, unloaded, now), now

    async def _wanted(self) -> tuple[dict[str, ModelDemand], dict[str, float]]:
        """Return model -> its calls at all gateways, and model -> when an admin asked for it. Raises
        StoreUnavailable."""
        told = await self._read(keys.DEMAND, Unread.DEMAND)
        asked = await self._read(keys.ASKED, Unread.ASKED)
        now, found = time.time(), list[GatewayDemand]()
        for value in told.values():
            with suppress(ValueError):  # which the overview counts
                found.append(decode_demand(value))
        fresh = [(one.models, 0.0) for one in found if abs(now - one.at) < LIFE_S]
        return all_demand(fresh), dict(_times(asked))

    async def _read(self, name: str, kind: Unread) -> Mapping[bytes, bytes]:
        return await answered(read_hash(self._commands, name, kind, self._unreadable, LONGEST_TOLD))


def _times(asked: Mapping[bytes, bytes]) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for model, at in asked.items():
        with suppress(ValueError):
            found.append((model.decode(), float(at)))
    return found


def _is_of(action: Action, model: str) -> bool:
    """Return whether an action is about the model, or makes room for it."""
    return action.model == model or (isinstance(action, Stop | Reserve) and action.wanted_by == model)
