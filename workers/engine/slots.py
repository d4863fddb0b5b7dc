"""The book of places: who holds a slot, and how many KV cells are promised to whom.

A sequence enters only when every cell that it can ever need is free, so a decode never fails for lack of cells and
nothing has to be thrown out half-way.
"""

from __future__ import annotations


class IntegrityError(RuntimeError):
    """The book and the KV cache disagree."""


class SlotBook:
    """`slots` places over `kv_tokens` shared cells. Belongs to the engine thread."""

    def __init__(self, slots: int, kv_tokens: int) -> None:
        self.slots = slots
        self.kv_tokens = kv_tokens
        self.num_reserved = 0
        # Taken from the end: low numbers first, and the last one freed is the next one used.
        self._free = list(range(slots - 1, -1, -1))
        self._promised: dict[int, int] = {}

    @property
    def num_busy(self) -> int:
        return len(self._promised)

    def enter(self, num_cells: int) -> int | None:
        """Promise `num_cells` -> the slot, or None while there is no place for that many."""
        if not self._free or self.num_reserved + num_cells > self.kv_tokens:
            return None
        slot = self._free.pop()
        self._promised[slot] = num_cells
        self.num_reserved += num_cells
        return slot

    def leave(self, slot: int) -> None:
        self.num_reserved -= self._promised.pop(slot)
        self._free.append(slot)

    def check(self) -> None:
        """Raises IntegrityError if the book contradicts itself."""
        if sorted([*self._free, *self._promised]) != list(range(self.slots)):
            raise IntegrityError(f"slots are lost or held twice: free {self._free}, held {sorted(self._promised)}")
        if sum(self._promised.values()) != self.num_reserved or self.num_reserved > self.kv_tokens:
            raise IntegrityError(
                f"{self.num_reserved} of {self.kv_tokens} cells are promised, in parts {self._promised}"
            )
