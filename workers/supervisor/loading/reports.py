"""Reports what a supervisor knows of its machine: to the planner its memories, workers and models, to gateways the
states of the models."""

from __future__ import annotations

import time
from collections.abc import Mapping

from workers.models.spec import ModelSpec
from workers.planner.messages import MachineCatalog, MachineReport, ToldFailure, ToldModel, ToldWait
from workers.protocol.residency import LIFE_S, ModelState, Why
from workers.residency.picture import NEVER
from workers.supervisor.loading.inventory import Inventory
from workers.supervisor.loading.keepers import Keepers
from workers.supervisor.loading.model_state import Refused, state_of
from workers.supervisor.needs import memory_of

MOST_LOGS = 32
"""Number of models, those that failed last, whose last lines of log are told."""


class Reports:
    """Makes the messages of one machine."""

    def __init__(self, inventory: Inventory, keepers: Keepers) -> None:
        self._inventory = inventory
        self._keepers = keepers
        self._catalog = MachineCatalog(models={})
        self._waits: tuple[float, float, Mapping[str, ToldWait]] = (0.0, 0.0, {})
        """The date of the latest orders, when they were first read, and what they say of models that wait."""

    def note_waits(self, at: float, waits: Mapping[str, ToldWait]) -> None:
        """Note what a planner's orders of a date say of models that wait. It counts for LIFE_S."""
        self._waits = (at, time.monotonic() if at != self._waits[0] else self._waits[1], waits)

    def machine(self, now: float, boot: str, fence: int, done: int, *, is_leaving: bool) -> MachineReport:
        """Return what the planner is told of this machine; for the arguments see there."""
        past = self._inventory.past
        failures = {model: failure for model, each in past.items() if (failure := each.blocked(now))}
        return MachineReport(
            at=now,
            boot=boot,
            fence=fence,
            done=done,
            devices=self._inventory.devices,
            is_leaving=is_leaving,
            workers=tuple(map(self._inventory.told, self._inventory.residents.values())),
            failures={model: ToldFailure(not_before=each.not_before, why=each.why) for model, each in failures.items()},
            loaded=tuple(model for model, each in past.items() if each.was_loaded),
            asleep=self._keepers.models,
            left={model: each.left_at for model, each in past.items() if each.left_at != NEVER},
        )

    def catalog(self) -> MachineCatalog:
        """Return what the planner is told of this machine's models; the same object until that changes."""
        rules = self._inventory.rules
        told = MachineCatalog(
            models={name: self._model(name, spec) for name, spec in self._inventory.models.items()},
            groups=dict(rules.groups),
            models_max=rules.models_max,
        )
        if told != self._catalog:
            self._catalog = told
        return self._catalog

    def states(self, now: float) -> dict[str, ModelState]:
        """Return model -> its state, as gateways are told it."""
        _, read_at, waits = self._waits
        if time.monotonic() - read_at > LIFE_S:
            waits = {}
        logs = sorted((past for past in self._inventory.past.values() if past.last), key=lambda past: -past.failed_at)
        told = {past.model for past in logs[:MOST_LOGS]}
        models = self._inventory.models
        return {model: self._state(model, waits.get(model), now, with_log=model in told) for model in models}

    def _model(self, name: str, spec: ModelSpec) -> ToldModel:
        """Return a model as the planner is told of it. One whose new settings can't be loaded, or are not known to be
        loadable yet, has the need of its workers with the old ones."""
        needs = self._inventory.needs
        if name in needs.found:
            found = needs.found[name]
            return ToldModel(policy=spec.policy, need=found.need, memory=memory_of(found))
        old = needs.outdated.get(name)
        if old is not None and self._inventory.of_model(name):
            return ToldModel(policy=spec.policy, need=old.need, is_outdated=True)
        return ToldModel(policy=spec.policy)

    def _state(self, model: str, wait: ToldWait | None, now: float, *, with_log: bool) -> ModelState:
        residents, needs = self._inventory.of_model(model), self._inventory.needs
        shares = [each.watch.progress for each in residents if each.status == "loading" and each.watch is not None]
        return state_of(
            model,
            {each.status for each in residents},
            max((share for share in shares if share is not None), default=None),
            self._inventory.past_of(model),
            Refused(needs.refused.get(model, Why()), needs.retry_at.get(model, 0.0)),
            wait,
            now,
            kept_bytes=self._keepers.size_of(model),
            needs_admin=self._needs_admin(model),
            with_log=with_log,
        )

    def _needs_admin(self, model: str) -> bool:
        """Return whether no call loads the model, nor does anything else but an admin."""
        models, rules = self._inventory.models, self._inventory.rules
        policy = models[model].policy
        group = rules.groups.get(policy.group) if policy.group is not None else None
        companions = {model}
        if group is not None and group.together:
            companions = {name for name, spec in models.items() if spec.policy.group == policy.group}
        is_due = policy.preload and not self._inventory.past_of(model).was_loaded
        is_there = any(each.model in companions for each in self._inventory.residents.values())
        return not (policy.autoload or policy.min or is_due or is_there)
