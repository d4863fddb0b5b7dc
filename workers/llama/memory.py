"""A context's memory of its sequences: the KV cache, and for some models a recurrent state.

Cells count from the beginning of a sequence; ranges are [start, end). Everything belongs to the context's
thread. Source: llama.h, llama-kv-cache.cpp and llama-memory-recurrent.cpp of llama.cpp; the surprising parts have tests
in tests/integration/engine/test_memory.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Protocol

from llama_cpp import llama_cpp as c

from workers.llama.native import StateUnusable, gil_calls, native_log

_WHOLE, _PART = 0, c.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
_COMPRESSED = ("deepseek4",)
"""Architectures whose attention also keeps a running summary of all past tokens: no range can be cut out of it."""
_PLAIN_ROPE = (c.LLAMA_ROPE_TYPE_NORM, c.LLAMA_ROPE_TYPE_NEOX)

_unfilled_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
"""A function of Python's C API: called with None and a size, it returns bytes that the caller must fill before use."""
_unfilled_bytes.argtypes, _unfilled_bytes.restype = (ctypes.c_char_p, ctypes.c_ssize_t), ctypes.py_object


class MemoryKind(Enum):
    """The kinds of memory, by the operations on a sequence that llama.cpp allows."""

    ATTENTION = "attention"
    """One cell per token: any range can be shared, cut, saved and restored."""
    WINDOW = "window"
    """Attention over a sliding window. Cells that left the window are dropped when room is needed. So a range can be
    shared or cut only if the cells of the window at its end are still there, or are restored with `load_part`."""
    RECURRENT = "recurrent"
    """One state for all tokens: it can be copied, saved and restored whole, never cut."""
    HYBRID = "hybrid"
    """Layers of attention and recurrent layers. `share` takes over the recurrent state whole, whatever the range, and
    llama.cpp reports no error: call `load_part` after it, with a state that was saved at the end of the range."""

    @property
    def by_range(self) -> bool:
        """Return whether ranges of tokens can be shared and moved."""
        return self is MemoryKind.ATTENTION


LEAST_WINDOW = 64
"""Fewest tokens of a window with which `swa_full` keeps ranges: llama.cpp saves no more of a range than the window."""


def kind_of(model: int, *, swa_full: bool) -> MemoryKind:
    """Return the kind of a model's memory. `model`: a `llama_model *`."""
    if c.llama_model_is_hybrid(model) or _metadata(model, "general.architecture") in _COMPRESSED:
        return MemoryKind.HYBRID
    if c.llama_model_is_recurrent(model):
        return MemoryKind.RECURRENT
    if (window := c.llama_model_n_swa(model)) > 0 and not (swa_full and window >= LEAST_WINDOW):
        return MemoryKind.WINDOW
    return MemoryKind.ATTENTION


ANY_NUMBER = 2**31 - 1


class CellPositions:
    """Tells the positions of a sequence's cells where these are not simply the cells' numbers.

    With M-RoPE, all cells of a picture have the position of its first one in time, and the text after it goes on
    fewer positions further than the picture has cells. llama.cpp finds cells by positions: of such a picture, all or
    none. They count as part of any range that has the first of them."""

    __slots__ = ("_pictures",)

    def __init__(self, pictures: Iterable[tuple[int, int, int]]) -> None:
        """`pictures`: in order, each one's first cell, its number of cells, and its number of positions."""
        self._pictures: list[tuple[int, int, int, int]] = []
        """First cell, cell after the last, position of all, position after it."""
        lag = 0
        for start, num_cells, num_positions in pictures:
            self._pictures.append((start, start + num_cells, start - lag, start - lag + num_positions))
            lag += num_cells - num_positions

    def position(self, cell: int) -> int:
        """Return the position of `cell`; for one inside a picture, not its first, the position after the picture."""
        before = [one for one in self._pictures if one[0] < cell]
        if not before:
            return cell
        _, end, _, position = before[-1]
        return position + max(0, cell - end)

    def last(self, num_cells: int) -> int:
        """Return the highest position of the first `num_cells` cells, which must be at least one."""
        for start, end, position, _ in self._pictures:
            if start < num_cells <= end:
                return position
        return self.position(num_cells) - 1

    def whole(self, cell: int) -> int:
        """Return `cell`, or the end of the picture that it lies inside."""
        return next((end for start, end, _, _ in self._pictures if start < cell < end), cell)


def num_cells_of(positions: CellPositions | None, start: int, end: int) -> int:
    """Return how many of llama.cpp's cells a range has: those of a picture all lie where it begins."""
    return end - start if positions is None else positions.whole(end) - positions.whole(start)


class Follower(Protocol):
    """A memory of the same sequences in another context, which is told after each change (that of a draft model)."""

    def share(self, source: int, target: int, start: int, end: int) -> None:
        """Note that `target` holds the tokens [start, end) of `source` too."""

    def cut(self, sequence: int, start: int) -> None:
        """Note that the tokens from `start` on are forgotten, or are others now."""

    def clear(self) -> None:
        """Note that all sequences are forgotten."""


class Memory:
    """The memory of the context at `context`; valid as long as the context is.

    Ranges count cells. A sequence whose positions are others is laid out first (`lay_out`, `load`)."""

    def __init__(self, context: int, kind: MemoryKind, *, cache_type_k: str = "f16", rollback: int = 0) -> None:
        """`rollback`: number of tokens by which recurrent layers can go back, by the context's parameters."""
        self.kind = kind
        self.follower: Follower | None = None
        self._context = context
        self._pointer = c.llama_get_memory(context)
        self._calls = gil_calls()
        self._laid: dict[int, CellPositions] = {}
        model = c.llama_get_model(context)
        self.window: int = c.llama_model_n_swa(model)
        """Number of tokens that a layer with a sliding window sees; 0: there is no such layer.

        In `ATTENTION` memory (`swa_full`) there is room for the cells behind the window, but llama.cpp gives them to
        other tokens all the same where it finds them before a free one, if no second sequence holds them.

        With a window, each `decode` must fit one micro-batch. llama.cpp finds cells for all micro-batches before it
        computes the first one. For a later one it drops cells that an earlier one, not computed yet, still needs.
        `HYBRID` memory cuts a batch into micro-batches of sequences with equally many rows."""
        self.most_cut = ANY_NUMBER if kind is MemoryKind.ATTENTION else rollback
        """Maximum number of a sequence's newest tokens that `cut` can drop. With a recurrent state only once, and only
        right after a `decode` of this sequence alone that computed them all."""
        self.can_shift: bool = (
            kind is MemoryKind.ATTENTION
            and cache_type_k != "bf16"
            and _keys_turn_freely(model)
            and bool(c.llama_memory_can_shift(self._pointer))
        )
        """Whether positions can be moved without harm to other sequences (narrower than llama.cpp's own answer)."""

    def lay_out(self, sequence: int, positions: CellPositions | None) -> None:
        """Set the positions of a sequence's cells, which stay set for its id; None: they are the cells' numbers."""
        if positions is not None:
            self._laid[sequence] = positions
        elif self._laid:
            self._laid.pop(sequence, None)

    def num_cells(self, sequence: int, start: int, end: int) -> int:
        """Return how many of llama.cpp's cells a range has, as `num_cells_of` counts them."""
        return num_cells_of(self._laid.get(sequence), start, end)

    def can_continue(self, sequence: int, num_tokens: int) -> bool:
        """Return whether the sequence holds all that is needed to compute the token of cell `num_tokens`.

        Check this after `share`, `cut`, `load` and `load_part`: llama.cpp reports no error if something is missing."""
        if num_tokens == 0:
            return self.last_position(sequence) < 0
        first, last, next_ = self.first_position(sequence), num_tokens - 1, num_tokens
        if (laid := self._laid.get(sequence)) is not None:
            last, next_ = laid.last(num_tokens), laid.position(num_tokens)
        if self.last_position(sequence) != last or first < 0:
            return False
        if self.kind in (MemoryKind.WINDOW, MemoryKind.ATTENTION):
            return self._sees(first, next_)
        return first == last

    def reaches_back(self, sequence: int, num_tokens: int) -> bool:
        """Return whether the sequence, which has more tokens perhaps, holds all cells that the token of cell
        `num_tokens` sees. For `ATTENTION` memory."""
        laid = self._laid.get(sequence)
        return self._sees(self.first_position(sequence), num_tokens if laid is None else laid.position(num_tokens))

    def holds_from(self, sequence: int, cell: int) -> bool:
        """Return whether the sequence lacks no cell from `cell` on up to its last one. For `ATTENTION` memory."""
        laid = self._laid.get(sequence)
        return 0 <= self.first_position(sequence) <= (cell if laid is None else laid.position(cell))

    def _sees(self, first: int, position: int) -> bool:
        """Return whether a token at `position` sees no position before `first`, which is the lowest one held."""
        return 0 <= first <= (max(0, position - self.window + 1) if self.window else 0)

    def remove(self, sequence: int) -> None:
        """Forget a sequence; cells that no other sequence holds become free."""
        self._calls.memory_seq_rm(self._pointer, sequence, -1, -1)
        if self.follower is not None:
            self.follower.cut(sequence, 0)

    def cut(self, sequence: int, start: int, end: int) -> bool:
        """Forget a range, up to the end if `end` is -1; return whether this memory can do that.

        Cut only at the end. A recurrent state can be cut by `most_cut` tokens: by more, this returns False at its end,
        elsewhere True, and nothing changes. With a sliding window the end is cut off, but cells that the window then
        needs may be gone already."""
        if self.follower is not None:
            self.follower.cut(sequence, start)
        start, end = self._range(sequence, start, end)
        return bool(self._calls.memory_seq_rm(self._pointer, sequence, start, end))

    def share(self, source: int, target: int, start: int, end: int) -> None:
        """Make `target` hold the cells of `source`'s range too. Nothing is copied if one cache serves all sequences.

        A recurrent state is shared as a whole, whatever the range; each sequence has its own from the next token on."""
        if self.follower is not None:
            self.follower.share(source, target, start, end)
        start, end = self._range(source, start, end)
        self._calls.memory_seq_cp(self._pointer, source, target, start, end)

    def shift(self, sequence: int, start: int, end: int, by: int) -> None:
        """Move the positions of a range by `by`. No other sequence may hold its cells: they would move there, too.

        Keys are rotated in the next `decode` of any batch: do not `save` the sequence before that. Raises ValueError
        if `can_shift` is False: llama.cpp would end the process, or change other sequences' keys."""
        if not self.can_shift:
            raise ValueError("positions of this model can't be moved; see Memory.can_shift")
        c.llama_memory_seq_add(self._pointer, sequence, start, end, by)
        if self.follower is not None:
            self.follower.cut(sequence, start + by)

    def first_position(self, sequence: int) -> int:
        """Return the lowest position that the sequence holds; -1 if it holds none.

        With a sliding window it can be above 0. With a recurrent state it equals the last position."""
        return self._calls.memory_seq_pos_min(self._pointer, sequence)

    def last_position(self, sequence: int) -> int:
        """Return the highest position that the sequence holds; -1 if it holds none.

        With a sliding window, -1 can also mean that cells are held in some layers only: `remove` frees them."""
        return self._calls.memory_seq_pos_max(self._pointer, sequence)

    def state_size(self, sequence: int) -> int:
        """Return the bytes that `save` would take; they grow with the number of cells that the sequence holds."""
        return int(c.llama_state_seq_get_size(self._context, sequence))

    def save(self, sequence: int) -> bytes:
        """Return everything that the sequence holds; its id is part of the bytes. Raises StateUnusable."""
        return self._save(sequence, _WHOLE)

    def save_part(self, sequence: int) -> bytes:
        """Return what can't be cut to fewer tokens: a recurrent state, or the window's cells (`ATTENTION`: all cells).
        If the rest is still there, `load_part` can take the sequence back to this length. Raises StateUnusable."""
        return self._save(sequence, _PART)

    def load(self, sequence: int, state: bytes, positions: CellPositions | None = None) -> None:
        """Restore a saved state into cells of the sequence's own, laid out by `positions`; those before are forgotten.

        Raises StateUnusable and empties the sequence if cells are lacking or the state is of another model or setting.
        llama.cpp checks counts and sizes, not positions or values: pass only what `save` returned, ask `can_continue`.
        """
        self.lay_out(sequence, positions)
        self._load(sequence, state, _WHOLE)

    def load_part(self, sequence: int, state: bytes) -> None:
        """Restore a state that `save_part` returned, in place of the sequence's own. Its other cells stay as they are.

        To continue `target` after `num_tokens` of `source`: `share` these, then call this for `target`. To take a
        sequence back to `num_tokens`: call this, then `cut` from there. Raises StateUnusable, with the sequence empty.
        """
        self._load(sequence, state, _PART)

    def relocate(self, holders: Sequence[int], scratch: int, start: int, end: int) -> int:
        """Move a range's cells to the lowest free ones, for all sequences that hold them; return the bytes moved.

        `scratch` must be empty. Attention scans the cache up to its highest used cell, holes included, so this makes
        steps shorter after other sequences left. `ATTENTION` only, and every holder of the range must be among
        `holders`.

        Raises StateUnusable if another sequence held the range after all and there is no room for a copy: the range is
        gone from all `holders` then. Raises MemoryError, with everything as it was, if no copy can be made."""
        follower, self.follower = self.follower, None  # the tokens stay what they are
        try:
            return self._relocate(holders, scratch, start, end)
        finally:
            self.follower = follower

    def _relocate(self, holders: Sequence[int], scratch: int, start: int, end: int) -> int:
        self.share(holders[0], scratch, start, end)
        try:
            state = self.save(scratch)
        except StateUnusable as error:  # the cells are where they were; after `load` below they are not
            raise MemoryError(str(error)) from None
        finally:
            self.remove(scratch)
        for holder in holders:
            self.cut(holder, start, end)
        self.load(scratch, state, self._laid.get(holders[0]))
        for holder in holders:
            self.share(scratch, holder, start, end)
        self.remove(scratch)
        return len(state)

    def _range(self, sequence: int, start: int, end: int) -> tuple[int, int]:
        """Return the positions of a range of cells; `end` -1: up to the last."""
        laid = self._laid.get(sequence) if self._laid else None
        if laid is None:
            return start, end
        return laid.position(start), -1 if end < 0 else laid.position(end)

    def _save(self, sequence: int, part: int) -> bytes:
        native_log().clear()
        size = int(c.llama_state_seq_get_size_ext(self._context, sequence, part))
        # Filled by llama.cpp while others run; zeroing and copying it here would hold the interpreter 1 ms per MiB.
        state: bytes = _unfilled_bytes(None, size)
        target = ctypes.cast(ctypes.c_char_p(state), ctypes.POINTER(ctypes.c_uint8))
        written = c.llama_state_seq_get_data_ext(self._context, target, size, sequence, part)
        if not written:
            raise StateUnusable(f"llama.cpp saved nothing of sequence {sequence}: {native_log().reason()}")
        return state if written == size else state[:written]

    def _load(self, sequence: int, state: bytes, part: int) -> None:
        if self.follower is not None:
            self.follower.cut(sequence, 0)
        native_log().clear()
        source = ctypes.cast(ctypes.c_char_p(state), ctypes.POINTER(ctypes.c_uint8))
        num_read = c.llama_state_seq_set_data_ext(self._context, source, len(state), sequence, part)
        if not num_read or num_read != len(state):
            self.remove(sequence)
            reason = native_log().reason() or f"{num_read} of {len(state)} bytes were read"
            raise StateUnusable(f"llama.cpp could not restore a saved state: {reason}")

    def clear(self) -> None:
        c.llama_memory_clear(self._pointer, True)
        if self.follower is not None:
            self.follower.clear()


def _keys_turn_freely(model: int) -> bool:
    """Return whether shifting positions of one sequence leaves the keys of all other sequences as they are.

    llama.cpp rotates the whole cache, by zero where nothing moved. A rotary embedding that scales as well (YaRN, an
    attention factor) then scales every key once more. Without a rotary embedding nothing is rotated: positions stay as
    they were learned. With a rotary embedding of several parts llama.cpp ends the process."""
    if c.llama_model_rope_type(model) not in _PLAIN_ROPE:
        return False
    prefix = f"{_metadata(model, 'general.architecture')}.rope.scaling"
    factors = (_metadata(model, f"{prefix}.{name}") or "1" for name in ("attn_factor", "yarn_attn_factor"))
    return _metadata(model, f"{prefix}.type") != "yarn" and all(float(factor) == 1 for factor in factors)


def _metadata(model: int, key: str) -> str:
    """Return a value of the model's metadata; empty if the file has none."""
    value = ctypes.create_string_buffer(64)
    length = c.llama_model_meta_val_str(model, key.encode(), value, len(value))
    return value.value.decode("utf-8", "replace") if length >= 0 else ""
