"""What a context remembers of its sequences: the KV cache, and for some models a recurrent state.

Positions are tokens from the beginning of a sequence; ranges are [start, end). Everything belongs to the context's
thread. Source: llama.h, llama-kv-cache.cpp and llama-memory-recurrent.cpp of llama.cpp.
"""

from __future__ import annotations

import ctypes
from enum import Enum

from llama_cpp import llama_cpp as c

from workers.llama.errors import StateUnusable
from workers.llama.native import held, native_log


class MemoryKind(Enum):
    """What llama.cpp allows to be done with a sequence's memory."""

    ATTENTION = "attention"
    """One cell per token: any range can be shared, cut, saved and brought back."""
    WINDOW = "window"
    """Attention over a sliding window: cells behind it are gone, so only a whole state can be brought back."""
    RECURRENT = "recurrent"
    """One state for all that was read: it can be copied, saved and brought back whole, never cut."""
    HYBRID = "hybrid"
    """Layers of attention and recurrent ones: as `RECURRENT`."""

    @property
    def by_range(self) -> bool:
        """Whether ranges of tokens can be shared and moved."""
        return self is MemoryKind.ATTENTION


def kind_of(model: int, *, swa_full: bool) -> MemoryKind:
    """`model`: a `llama_model *`."""
    if c.llama_model_is_hybrid(model):
        return MemoryKind.HYBRID
    if c.llama_model_is_recurrent(model):
        return MemoryKind.RECURRENT
    if c.llama_model_n_swa(model) > 0 and not swa_full:
        return MemoryKind.WINDOW
    return MemoryKind.ATTENTION


class Memory:
    """The memory of the context at `context`; valid as long as that is."""

    def __init__(self, context: int, kind: MemoryKind) -> None:
        self.kind = kind
        self._context = context
        self._pointer = c.llama_get_memory(context)
        self._held = held()

    @property
    def can_shift(self) -> bool:
        return bool(c.llama_memory_can_shift(self._pointer))

    def remove(self, sequence: int) -> None:
        """Forget a sequence; cells that no other one holds are free."""
        self._held.memory_seq_rm(self._pointer, sequence, -1, -1)

    def cut(self, sequence: int, start: int, end: int) -> bool:
        """Forget a range -> whether this memory can (never inside a recurrent state)."""
        return bool(self._held.memory_seq_rm(self._pointer, sequence, start, end))

    def share(self, source: int, target: int, start: int, end: int) -> None:
        """`target` holds the cells of `source`'s range too. Nothing is copied where one cache serves all."""
        self._held.memory_seq_cp(self._pointer, source, target, start, end)

    def shift(self, sequence: int, start: int, end: int, by: int) -> None:
        """Move a range's positions, for every sequence that holds the cells: see that nobody shares them."""
        c.llama_memory_seq_add(self._pointer, sequence, start, end, by)

    def first_position(self, sequence: int) -> int:
        """Lowest position that the sequence holds (above 0 only with sliding windows); -1 if it holds none."""
        return self._held.memory_seq_pos_min(self._pointer, sequence)

    def last_position(self, sequence: int) -> int:
        """Highest position that the sequence holds; -1 if it holds none."""
        return self._held.memory_seq_pos_max(self._pointer, sequence)

    def state_size(self, sequence: int) -> int:
        """Bytes that `save` would return: grows with the number of cells that the sequence holds."""
        return int(c.llama_state_seq_get_size(self._context, sequence))

    def save(self, sequence: int) -> bytes:
        """Everything that the sequence holds. Raises StateUnusable."""
        size = self.state_size(sequence)
        state = ctypes.create_string_buffer(0) if not size else (ctypes.c_char * size)()
        target = ctypes.cast(state, ctypes.POINTER(ctypes.c_uint8))
        written = c.llama_state_seq_get_data(self._context, target, size, sequence)
        if not written:
            raise StateUnusable(f"llama.cpp saved nothing of sequence {sequence}: {native_log().reason()}")
        return state.raw[:written]

    def load(self, sequence: int, state: bytes) -> None:
        """Bring a saved state back into cells of the sequence's own; what it held before is forgotten.

        Raises StateUnusable, with the sequence empty: no free cells, or a state of another model or setting.
        """
        source = ctypes.cast(ctypes.c_char_p(state), ctypes.POINTER(ctypes.c_uint8))
        if not c.llama_state_seq_set_data(self._context, source, len(state), sequence):
            self.remove(sequence)
            raise StateUnusable(f"llama.cpp could not restore a saved state: {native_log().reason()}")

    def clear(self) -> None:
        c.llama_memory_clear(self._pointer, True)
