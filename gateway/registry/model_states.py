"""Reads what supervisors tell of the models that they load on demand, and merges it over all machines.

Each machine's supervisor writes its models' states every half second (`workers.protocol.residency`). What has not been
written anew for `LIFE_S` counts no more: its supervisor is gone, or has no Redis. That is measured by this gateway's
clock, since those of machines differ.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import redis.asyncio

from gateway.store.outage import NO_ANSWER, Outage, Unreadable, raise_if_cancelled
from gateway.store.packed import OF_ANOTHER_TYPE, Pauses, read_hash, unpacked_keys, unpacked_texts
from gateway.store.scripts import load_members_script
from gateway.telemetry.metrics import Unread
from workers.process.ticks import wait_tick
from workers.protocol import keys
from workers.protocol.residency import (
    LIFE_S,
    LOOK_EVERY_S,
    TOLD_EVERY_S,
    MachineModels,
    ModelState,
    ModelStatus,
    Why,
    decode_models,
)
from workers.redis.link import long_commands_of

READ_EVERY_S = 1.0
AWAITED_S = 0.2
"""Seconds between two readings while calls of this gateway wait for a model to be loaded."""
EARLY_S = AWAITED_S / 4
"""Minimum seconds between two readings, where a call asks for one: for so long at most it waits to be refused."""
SETTLE_S = keys.SUPERVISED_INTERVAL_S + LOOK_EVERY_S + AWAITED_S + 0.1
"""Seconds from the beginning of a call's wait to a report that knows of the call: its supervisor has to read that the
call waits, and that the model is not unloaded any more; a report is read up to AWAITED_S after it was written."""
WORK_REST = 10
"""Minimum time between two readings, as a multiple of what one takes: at most 10 % of a core is used."""

LONGEST_BYTES = 1 << 20
"""Maximum bytes of what one machine tells; more is left out."""
LONGEST_ASKED = 1024
"""Maximum bytes of the name of a model that an admin wants to have loaded; longer ones are left out."""
MOST_TEXTS = 2 * 1024
MOST_BYTES = 8 << 20
"""Limits of one reading: a worker under an attacker's control can write anything there."""

LOADED, LOADING, UNLOADED = (ModelState(status=status) for status in ("loaded", "loading", "unloaded"))
ORDER: tuple[ModelStatus, ...] = ("loaded", "loading", "sleeping", "failed", "unloaded")
"""Which of several machines' states is the model's: the first of these that there is."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why calls for a model had better not wait for it."""

    state: ModelState
    """What all machines that know the model say, merged."""
    known_since: float
    """time.monotonic(): calls that began to wait before this are refused. The machines knew of them; or they had told
    before that no call changes anything."""

    def retry_in_s(self, now: float) -> float:
        """Return the seconds until the model is tried again, at least 1; 0: it is not tried by itself. `now`: Unix
        time."""
        return max(1.0, self.state.retry_at - now) if self.state.retry_at else 0.0


@dataclass(frozen=True, slots=True)
class _Report:
    """The latest report of one machine."""

    told: MachineModels
    read_at: float
    """time.monotonic() when this gateway first read it."""
    is_live: bool
    """Whether the machine is known to write: by its clock the report was new, or it has replaced an earlier one."""


def merged(states: Sequence[ModelState]) -> ModelState:
    """Return the state of a model from its states on all machines that know it (at least one). Logs stay with their
    machines."""
    status = min((state.status for state in states), key=ORDER.index)
    same = [state for state in states if state.status == status]
    return ModelState(
        status=status,
        progress=max((state.progress for state in same if state.progress is not None), default=None),
        why=next((state.why for state in same if state.why), Why()),
        is_hopeless=all(state.is_hopeless for state in states),
        is_closed=all(state.is_closed for state in states),
        retry_at=min((state.retry_at for state in states if state.retry_at), default=0.0),
        num_failures=max(state.num_failures for state in states),
        exit_code=next((state.exit_code for state in states if state.exit_code is not None), None),
    )


def effective(state: ModelState | None, *, has_workers: bool, is_coming: bool) -> ModelState:
    """Return a model's state as people are told it. `state`: what supervisors say; None: none of them loads it on
    demand. `is_coming`: a supervisor should keep workers for it."""
    if has_workers:
        return LOADED
    if state is None:
        return LOADING if is_coming else UNLOADED
    return LOADING if state.status == "loaded" else state  # its worker is not known here yet


def _refuses(state: ModelState) -> bool:
    return state.status == "failed" or (state.is_hopeless and state.status == "unloaded")


def _is_closed(told: MachineModels, model: str) -> bool:
    """Return whether no call changes the model's state on a machine: an admin has to, or others that stay loaded would
    have to leave, or it is tried again later."""
    state = told.models[model]
    return state.is_closed or (state.status == "failed" and state.retry_at - told.at > SETTLE_S)


class ModelStates:
    """The states of the models that supervisors load on demand, as last read from Redis."""

    def __init__(
        self,
        redis: redis.asyncio.Redis,
        unreadable: Unreadable | None = None,
        meant: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        """`unreadable` counts what can't be read. `meant` returns the models that should have workers at all times."""
        self._meant = meant
        self._commands = long_commands_of(redis)
        self._unreadable = unreadable or Unreadable()
        self._script = load_members_script().source
        self._reports: dict[str, _Report] = {}
        self._listeners: list[Callable[[], None]] = []
        self._is_awaited: Callable[[], bool] = lambda: False
        self._num_watched = 0
        self._worked_s = 0.0
        """Seconds of work that the last reading took, as far as it was long enough to rest."""
        self._cursor = b"0"
        """HSCAN cursor from which the next reading goes on; "0": from the beginning."""
        self._began_at = float("-inf")
        """time.monotonic() when the last reading that was answered began."""
        self._asked: frozenset[str] = frozenset()
        """Models that an admin wants loaded, which machines may not have heard yet."""
        self._wake = asyncio.Event()

    def listen(self, on_read: Callable[[], None], is_awaited: Callable[[], bool]) -> None:
        """Have `on_read` called after each reading, and read often while `is_awaited` returns True."""
        self._listeners.append(on_read)
        self._is_awaited = is_awaited

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Read as often as supervisors write while the block lasts."""
        self._num_watched += 1
        try:
            yield
        finally:
            self._num_watched -= 1

    def machines(self, model: str) -> Mapping[str, ModelState]:
        """Return machine -> the model's state there, for the machines that load it on demand."""
        now = time.monotonic()
        return {
            machine: report.told.models[model]
            for machine, report in sorted(self._reports.items())
            if model in report.told.models and _counts(report, now)
        }

    def of(self, model: str) -> ModelState | None:
        """Return the model's state over all machines; None: no machine is known to load it on demand."""
        states = [*self.machines(model).values()]
        return merged(states) if states else None

    def wanted(self) -> dict[str, int]:
        """Return model -> the workers that supervisors want it to have, on all machines together."""
        now, found = time.monotonic(), dict[str, int]()
        for report in self._reports.values():
            if _counts(report, now):
                for model, number in report.told.wanted.items():
                    found[model] = found.get(model, 0) + number
        return found

    def is_on_demand(self, model: str) -> bool:
        """Return whether calls load the model: a machine may load it, and it need not have workers at all times."""
        return model not in self._meant() and bool(self.machines(model))

    def comes(self, model: str) -> bool:
        """Return whether the model gets a worker whether or not a call may load it: one loads, or has loaded a moment
        ago, or it sleeps, which any call ends, or calls don't load it."""
        state = self.of(model)
        return state is None or state.status in ("loading", "loaded", "sleeping")

    def sleeps(self, model: str) -> bool:
        """Return whether the model has no worker, and its weights are kept in memory."""
        state = self.of(model)
        return state is not None and state.status == "sleeping"

    def loading(self, model: str) -> str:
        """Return how far the model is loaded, as a waiting caller is told it: `loading=43%`, `loading` where that is
        not known, empty where it does not load."""
        state = self.of(model)
        if state is None or state.status != "loading":
            return ""
        return "loading" if state.progress is None else f"loading={100 * min(1.0, max(0.0, state.progress)):.0f}%"

    def refusal(self, model: str) -> Refusal | None:
        """Return why calls had better not wait for the model: each machine that knows it has failed to load it, or
        says that waiting changes nothing. None: they may wait."""
        states = self.machines(model)
        if not states or not all(map(_refuses, states.values())):
            return None
        reports = [self._reports[machine] for machine in states]
        is_closed = model not in self._asked and all(_is_closed(report.told, model) for report in reports)
        known_since = self._began_at if is_closed else min(report.read_at for report in reports) - SETTLE_S
        return Refusal(merged([*states.values()]), known_since)

    async def refresh(self) -> None:
        """Read all machines' reports once. Raises redis.RedisError, OSError."""
        call = ("EVAL", self._script, 1, keys.RESIDENCY, "hash", LONGEST_BYTES, MOST_TEXTS, MOST_BYTES, self._cursor)
        began_at = time.monotonic()
        # Read first: a model that is loaded by then is asked for no more, and its machine has told of it.
        asked = await read_hash(self._commands, keys.ASKED, Unread.ASKED, self._unreadable, LONGEST_ASKED)
        (answer,) = await self._commands.ask(call)
        if isinstance(answer, NO_ANSWER):
            raise answer
        now, pauses = time.monotonic(), Pauses()
        for what, packed in unpacked_keys(answer):
            if what == OF_ANOTHER_TYPE:
                self._unreadable.skip(Unread.RESIDENCY, keys.RESIDENCY, packed)
                continue
            texts = unpacked_texts(packed)
            began, self._cursor = self._cursor, next(texts)
            found = dict[str, _Report]()
            for machine, value in zip(texts, texts, strict=False):
                self._read(found, machine, value, now)
                await pauses.rest()
            if not began == self._cursor == b"0":
                self._unreadable.skip(Unread.RESIDENCY, keys.RESIDENCY, "its machines are too many to be read at once")
                found = {machine: one for machine, one in self._reports.items() if _counts(one, now)} | found
                began_at = float("-inf")  # of some machines nothing was read
            self._reports = found
        self._asked = frozenset(name.decode(errors="replace") for name in asked)
        self._began_at, self._worked_s = began_at, pauses.worked_s
        for on_read in self._listeners:
            on_read()

    async def run(self) -> None:
        """Read until cancelled. While Redis is away, what was read last counts for LIFE_S."""
        what = "what supervisors tell of models can"
        outage = Outage(f"{what}'t be read", "it is tried again and again", f"{what} be read again")
        while True:
            self._wake.clear()
            began_at = time.monotonic()
            with outage.survive():
                await self.refresh()
            raise_if_cancelled()
            rest_s = WORK_REST * self._worked_s
            await wait_tick(max(self._interval_s(), rest_s), self._wake)
            # Each call for a model without a worker asks for a reading.
            least_s = min(max(EARLY_S, rest_s), AWAITED_S / 2)
            await asyncio.sleep(max(0.0, least_s - (time.monotonic() - began_at)))

    def read_soon(self) -> None:
        """Read soon: a call begins to wait for a model that has no worker."""
        self._wake.set()

    def _interval_s(self) -> float:
        if self._is_awaited():
            return AWAITED_S
        return TOLD_EVERY_S if self._num_watched else READ_EVERY_S

    def _read(self, found: dict[str, _Report], name: bytes, value: bytes, now: float) -> None:
        """Add one machine's report to `found`, if it can be read."""
        try:
            if len(value) > LONGEST_BYTES:
                raise ValueError(f"it has more than {LONGEST_BYTES} bytes")
            machine, told = name.decode(), decode_models(value)
        except ValueError as error:  # msgspec's own, and UnicodeDecodeError
            self._unreadable.skip(Unread.RESIDENCY, name, error)
            return
        last = self._reports.get(machine)
        if last is not None and last.told.at == told.at:
            found[machine] = last
        else:
            found[machine] = _Report(told, now, last is not None or abs(time.time() - told.at) <= LIFE_S)


def _counts(report: _Report, now: float) -> bool:
    return report.is_live and now - report.read_at <= LIFE_S
