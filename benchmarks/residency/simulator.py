"""A fleet in simulated time: calls arrive, workers load slowly and leave slowly, and a planner says what is where.

The simulated machines check what a real one would punish: memory that is not there, a worker that is stopped while it
has calls. Loading takes memory bit by bit; what is being unloaded is held until the process is gone.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from workers.residency.picture import (
    CPU,
    NEVER,
    Bounds,
    Demand,
    Device,
    Machine,
    Model,
    Need,
    Picture,
    Share,
    Status,
    Worker,
)
from workers.residency.plan import Action, Drain, Plan, Release, Reserve, Start, Stop, Wait
from workers.residency.policy import Group

GIB = 2**30
BOUNDS = Bounds()

MAX_PLANS = 32
"""Plans at one moment, the last of which has nothing to do."""


class Broken(AssertionError):
    """A plan did what no machine allows."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call: when it comes, for which model, and how long it computes."""

    at: float
    model: str
    service_s: float
    leaves_after_s: float = float("inf")
    """How long its caller waits for it to begin."""


@dataclass(frozen=True, slots=True)
class Times:
    """How a model really behaves, which planners do not know."""

    load_s: float = 4.0
    unload_s: float = 0.5
    real_part: float = 1.0
    """The part of the predicted bytes that it takes in truth, at most 1."""
    slots: int = 4


@dataclass(slots=True)
class Process:
    """A simulated worker."""

    id: str
    model: str
    machine: str
    shares: tuple[Share, ...]
    status: Status
    since: float
    times: Times
    last_used: float = NEVER
    running: int = 0
    taken: int = 0
    stops: bool = False

    def part_held(self, now: float) -> float:
        """Return the part of its predicted bytes that it holds now."""
        if self.status != "loading":
            return self.times.real_part
        done = 1.0 if not self.times.load_s else min(1.0, (now - self.since) / self.times.load_s)
        return self.times.real_part * done

    def seen(self, now: float, tells: bool) -> Worker:
        """Return the worker as a picture has it. `tells`: whether the machine knows what a loading worker took."""
        part = self.part_held(now) if tells else 0.0
        shares = tuple(replace(share, seen_bytes=int(share.bytes * part)) for share in self.shares)
        status: Status = "draining" if self.stops else self.status
        return Worker(
            *(self.id, self.model, self.machine, shares, status, self.since, self.last_used),
            num_running=self.running,
            num_taken=self.taken,
        )


Planner = Callable[[Picture, float], Plan]


@dataclass(slots=True)
class Figures:
    """How a run went."""

    waits_s: dict[str, list[float]] = field(default_factory=dict)
    """Model -> how long each of its calls waited before it began."""
    num_loads: int = 0
    num_left: int = 0
    """Calls whose callers did not wait any longer."""
    actions: list[tuple[float, Action]] = field(default_factory=list)

    def all_waits_s(self) -> list[float]:
        return sorted(itertools.chain.from_iterable(self.waits_s.values()))

    def quantile_s(self, part: float) -> float:
        waits = self.all_waits_s()
        return waits[min(len(waits) - 1, int(part * len(waits)))] if waits else 0.0


class Simulator:
    """Runs calls over simulated machines until all are answered."""

    def __init__(
        self,
        planner: Planner,
        machines: Iterable[Machine],
        models: Iterable[Model],
        times: Mapping[str, Times],
        *,
        bounds: Bounds = BOUNDS,
        groups: Mapping[str, Group] | None = None,
        models_max: int = 0,
        tells: bool = True,
    ) -> None:
        self.planner = planner
        self.machines = {machine.id: machine for machine in machines}
        self.models = {model.name: model for model in models}
        self.times = times
        self.bounds, self.groups, self.models_max, self.tells = bounds, groups or {}, models_max, tells
        self.now = 0.0
        self.processes: dict[str, Process] = {}
        self.waiting: dict[str, deque[Call]] = {name: deque() for name in self.models}
        self.unloaded: frozenset[str] = frozenset()
        self.figures = Figures()
        self.plan = Plan(())
        self._asked: set[float] = set()
        self._numbers, self._order = itertools.count(), itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, moment: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._order), what))

    def run(self, calls: Iterable[Call], end_s: float = 1e6) -> Figures:
        """Run until nothing happens any more, or until `end_s`."""
        for call in calls:
            self.at(call.at, lambda call=call: self._arrive(call))  # type: ignore[misc]
        self._settle()
        while self._events and self._events[0][0] <= end_s:
            self.now, _, what = heapq.heappop(self._events)
            what()
            # What happens at one moment is seen together.
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self._settle()
        return self.figures

    def picture(self) -> Picture:
        demand = tuple(
            Demand(name, len(calls), calls[0].at, predicted_wait_s=self._predicted_wait_s(name))
            for name, calls in self.waiting.items()
            if calls
        )
        return Picture(
            machines=tuple(self._machine(machine) for machine in self.machines.values()),
            models=tuple(self.models.values()),
            workers=tuple(process.seen(self.now, self.tells) for process in self.processes.values()),
            demand=demand,
            unloaded=self.unloaded,
            groups=self.groups,
            models_max=self.models_max,
            bounds=self.bounds,
        )

    def _machine(self, machine: Machine) -> Machine:
        """Return a machine with what its devices report as free."""
        held = self._held(machine.id, lambda process: process.part_held(self.now))
        return replace(
            machine,
            devices=tuple(
                replace(device, free_bytes=device.total_bytes - device.other_bytes - held.get(device.id, 0))
                for device in machine.devices
            ),
        )

    def _held(self, machine: str, part: Callable[[Process], float]) -> dict[str, int]:
        held: dict[str, int] = {}
        for process in self.processes.values():
            if process.machine == machine:
                for share in process.shares:
                    held[share.device] = held.get(share.device, 0) + int(share.bytes * part(process))
        return held

    def _predicted_wait_s(self, model: str) -> float:
        ready = [process for process in self.processes.values() if process.model == model and process.status == "ready"]
        calls = self.waiting[model]
        slots = sum(process.times.slots for process in ready)
        return sum(call.service_s for call in calls) / slots if slots else 0.0

    def _settle(self) -> None:
        """Hand out slots and carry plans out, until a plan has nothing to do."""
        for _ in range(MAX_PLANS):
            self._dispatch()
            self.plan = self.planner(self.picture(), self.now)
            if self.plan.is_idle and self.plan.ask_again_at != self.now:
                break
            for action in self.plan.actions:
                self._take(action)
        else:
            raise Broken(f"plans go on for ever at {self.now}: {self.plan}")
        self.check()
        moment = self.plan.ask_again_at
        if moment is not None and moment not in self._asked:
            self._asked.add(moment)
            self.at(moment, lambda: None)

    def check(self) -> None:
        """Raise Broken if the machines are asked for more than they have."""
        for machine in self.machines.values():
            held = self._held(machine.id, lambda process: process.times.real_part)
            for device in machine.devices:
                if held.get(device.id, 0) > device.total_bytes - device.other_bytes:
                    raise Broken(f"{machine.id} {device.id} holds {held[device.id]} at {self.now}")

    def _take(self, action: Action) -> None:
        if not isinstance(action, Wait):
            self.figures.actions.append((self.now, action))
        match action:
            case Start():
                self._start(action)
            case Stop():
                process = self.processes[action.worker]
                if process.running:
                    raise Broken(f"{action} at {self.now}, and it has {process.running} calls")
                self._stop(process)
            case Drain():
                self.processes[action.worker].stops = True
                self._note_left(action.model)
            case Reserve():
                self.processes[action.worker].status = "reserved"
                self._note_left(action.model)
            case Release():
                self.processes[action.worker].status = "ready"
            case Wait():
                pass

    def _note_left(self, model: str) -> None:
        self.models[model] = replace(self.models[model], left_at=self.now)

    def _start(self, action: Start) -> None:
        times = self.times[action.model]
        process = Process(
            *(f"w{next(self._numbers)}", action.model, action.machine, action.shares, "loading", self.now), times=times
        )
        self.processes[process.id] = process
        self.models[action.model] = replace(self.models[action.model], was_loaded=True)
        self.figures.num_loads += 1
        self.at(self.now + times.load_s, lambda: self._loaded(process))
        # What others still hold is gone when the new worker has touched all that it needs, or it is not free now.
        held = self._held(action.machine, lambda other: other.times.real_part if other is not process else 1.0)
        for device in self.machines[action.machine].devices:
            if held.get(device.id, 0) > device.total_bytes - device.other_bytes:
                raise Broken(f"{action} at {self.now}: {device.id} would hold {held[device.id]}")

    def _loaded(self, process: Process) -> None:
        if process.id in self.processes and not process.stops:
            process.status, process.since = "ready", self.now

    def _stop(self, process: Process) -> None:
        if not process.stops or process.status != "draining":
            process.stops, process.status = True, "draining"
            self._note_left(process.model)
            self.at(self.now + process.times.unload_s, lambda: self._gone(process))

    def _gone(self, process: Process) -> None:
        self.processes.pop(process.id, None)

    def _arrive(self, call: Call) -> None:
        self.waiting[call.model].append(call)
        if call.leaves_after_s < float("inf"):
            self.at(self.now + call.leaves_after_s, lambda: self._leave(call))

    def _leave(self, call: Call) -> None:
        if call in self.waiting[call.model]:
            self.waiting[call.model].remove(call)
            self.figures.num_left += 1

    def _dispatch(self) -> None:
        for process in self.processes.values():
            calls = self.waiting[process.model]
            while process.status == "ready" and not process.stops and calls and process.running < process.times.slots:
                self._begin(process, calls.popleft())

    def _begin(self, process: Process, call: Call) -> None:
        process.running += 1
        process.taken += 1
        process.last_used = self.now
        self.figures.waits_s.setdefault(call.model, []).append(self.now - call.at)
        self.at(self.now + call.service_s, lambda: self._end(process))

    def _end(self, process: Process) -> None:
        process.running -= 1
        process.last_used = self.now
        if process.stops and not process.running:
            self._stop(process)


def gpu_machine(name: str, gib: Iterable[float], host_gib: float = 512.0) -> Machine:
    """Return a machine with GPUs of these sizes."""
    gpus = tuple(Device(f"gpu{number}", int(size * GIB)) for number, size in enumerate(gib))
    return Machine(name, (*gpus, Device(CPU, int(host_gib * GIB))))


def gpu_need(gib: float) -> Need:
    """Return the need of a model that takes so much of a GPU, and little of the host."""
    return Need(int(gib * GIB), host_bytes=GIB // 2)
