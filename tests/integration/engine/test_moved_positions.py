"""Positions that are moved (context shift): for whom, at whose cost, and where not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from llama_cpp import llama_cpp as c

from tests.support.lone_context import LoneContext, cells_by_position, lone_context, same
from tests.support.small_models import HEAD, N_HEAD_KV, SMALL_MODELS, WORDS

TEXT, OTHER = WORDS, WORDS[::-1]
TURNING = ["attention", "attention-latent"]
"""Whose positions can be moved."""


@pytest.fixture(params=TURNING)
def turning(request: pytest.FixtureRequest, small_models: dict[str, Path]) -> Iterator[LoneContext]:
    with lone_context(small_models[request.param]) as one:
        yield one


def test_moved_positions_move_for_every_holder(turning: LoneContext) -> None:
    memory = turning.memory
    turning.feed(0, TEXT[:40])
    memory.share(0, 2, 0, 40)
    assert memory.cut(0, 4, 12)
    memory.shift(0, 12, 40, -8)
    assert turning.positions(0) == (0, 31)
    assert turning.positions(2) == (0, 31), "the sharer now holds positions 4 to 11 twice"


def test_with_cells_of_its_own_a_sequence_moves_and_no_sharer_notices(turning: LoneContext) -> None:
    logits = []
    for moved in (False, True):
        memory = turning.memory
        memory.clear()
        turning.feed(0, TEXT[:40])
        memory.share(0, 2, 0, 40)
        memory.load(0, memory.save(0))
        if moved:
            memory.cut(0, 4, 12)
            memory.shift(0, 12, 40, -8)
            assert turning.positions(0) == (0, 31)
        logits.append(turning.step((2, 9, 40))[0])
        assert turning.positions(2) == (0, 40)
        turning.step((0, 9, 32 if moved else 40))
    assert same(logits[0], logits[1])


def test_keys_turn_with_the_next_step(turning: LoneContext) -> None:
    """A state saved before it has moved positions and keys that were not turned: it is not to be used."""
    memory = turning.memory
    turning.feed(0, TEXT[:40])
    memory.cut(0, 4, 12)
    memory.shift(0, 12, 40, -8)
    pending = memory.save(0)
    turning.feed(1, OTHER[:3])
    applied = memory.save(0)
    assert cells_by_position(pending).keys() == cells_by_position(applied).keys() == set(range(32))
    assert pending != applied
    turning.feed(1, OTHER[3:6], 3)
    assert memory.save(0) == applied


def test_turned_keys_are_those_of_the_shorter_text(small_models: dict[str, Path]) -> None:
    """In the first layer, whose keys depend on a token and its position alone."""
    with lone_context(small_models["attention"]) as lone:
        lone.feed(0, TEXT[:40])
        lone.memory.cut(0, 4, 12)
        lone.memory.shift(0, 12, 40, -8)
        lone.feed(1, [*TEXT[:4], *TEXT[12:40]])
        moved, computed = (first_layer_keys(lone.memory.save(sequence)) for sequence in (0, 1))
        assert np.allclose(moved, computed, atol=0.01)
        assert np.abs(computed).max() > 1


def first_layer_keys(state: bytes) -> np.ndarray[tuple[int, int], np.dtype[np.float16]]:
    cells = cells_by_position(state)
    rows = [np.frombuffer(cells[position], np.float16, N_HEAD_KV * HEAD) for position in sorted(cells)]
    return np.stack(rows)


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_positions_move_only_where_nobody_is_harmed(name: str, small_models: dict[str, Path]) -> None:
    with lone_context(small_models[name]) as lone:
        assert lone.memory.can_shift is (name in TURNING)
        if name not in TURNING:
            lone.feed(0, TEXT[:10])
            with pytest.raises(ValueError, match="can't be moved"):
                lone.memory.shift(0, 5, 10, -1)


def test_a_scaling_rope_would_change_everybodys_keys(small_models: dict[str, Path]) -> None:
    """Why `can_shift` is False for it: llama.cpp says it can."""
    with lone_context(small_models["attention-scaled"]) as lone:
        memory = c.llama_get_memory(lone.context.pointer)
        assert c.llama_memory_can_shift(memory)
        lone.feed(0, TEXT[:40])
        lone.feed(1, OTHER[:40])
        other = lone.memory.save(1)
        c.llama_memory_seq_add(memory, 0, 20, 40, -1)
        lone.feed(2, TEXT[:3])
        assert lone.memory.save(1) != other
