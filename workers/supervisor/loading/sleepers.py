"""Decides whose weights stay in main memory: those of models that sleep, as long as nobody else needs that memory."""

from __future__ import annotations

from collections.abc import Callable

from workers.footprint.learned import files_of
from workers.planner.messages import StartOrder
from workers.residency.picture import CPU
from workers.residency.scene import gib
from workers.supervisor.loading.inventory import Inventory
from workers.supervisor.loading.keepers import Keepers
from workers.supervisor.loading.load_watch import mapped_size
from workers.supervisor.loading.resident import Resident


class Sleepers:
    """The sleeping models of one machine, whose weights `keepers` hold."""

    def __init__(self, inventory: Inventory, keepers: Keepers, say: Callable[[str], None]) -> None:
        """`say` writes a line for operators."""
        self._inventory = inventory
        self._keepers = keepers
        self._say = say

    def add(self, resident: Resident) -> None:
        """Keep the weights of a model whose last worker has just left, if they are to stay and fit."""
        model, needs = resident.model, self._inventory.needs
        is_there = bool(self._inventory.of_model(model))
        if not resident.sleeps or is_there or model not in self._inventory.models or not needs.holds(model):
            return
        files = [*files_of(resident.worker.model)]
        size, room = mapped_size(files), self._room()
        if size > room:
            least = f"they take {gib(size)}, and {gib(max(0, room))} are free"
            self._say(f"paddock: the weights of {model} are not kept in memory: {least}")
        elif size:
            self._keepers.start(model, files, size, is_shared=resident.maps_files)
            self._say(f"paddock: {model} sleeps; its weights ({gib(size)}) are kept in memory")

    def tend(self) -> None:
        """Keep no weights that nobody could load any more, or whose memory others need."""
        needs = self._inventory.needs
        for model in self._keepers.models:
            if model not in self._inventory.models:
                self._keepers.end(model, "the catalog does not have it any more")
            elif model in needs.found and not needs.holds(model):
                self._keepers.end(model, "its file has changed")
        is_moving = self._keepers.is_ending or self._keepers.is_reading
        if self._keepers.models and not is_moving and self._room() < 0:
            self._keepers.end_first("others need the memory")

    def makes_room(self, start: StartOrder) -> bool:
        """End keepers of sleeping models in whose memory a worker is to be loaded. Return whether that takes a
        moment."""
        need = sum(share.bytes for share in start.shares if share.device == CPU)
        prediction = self._inventory.needs.found.get(start.model)
        if not need or prediction is None:
            return False
        is_shared = prediction.spec.llama.use_mmap and all(share.device == CPU for share in start.shares)
        while need > self._room(start.model if is_shared else "") and not self._keepers.is_ending:
            if not self._keepers.end_first(f"{start.model} is loaded", but=start.model):
                break
        return self._keepers.is_ending

    def _room(self, but: str = "") -> int:
        """Return the bytes of main memory that a worker may take as long as all sleeping models sleep on, but this one
        whose pages it uses."""
        free = self._inventory.free_of(CPU)
        if free is None:
            return 0
        residents = self._inventory.residents.values()
        used = {but, *(each.model for each in residents if each.status == "loading" and each.maps_files)}
        return free - self._keepers.taken_bytes(used)
