"""What llama.cpp's memories do, kind by kind: the facts that sharing, moving and bringing back are built on.

Where a test says what goes wrong, it is there to tell us when llama.cpp changes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.lone_context import LoneContext, cells_by_position, lone_context, same
from tests.support.small_models import SMALL_MODELS, WORDS, write_small_model
from workers.llama.context import Batch, Context
from workers.llama.memory import MemoryKind
from workers.llama.model import Model
from workers.llama.native import DecodeFailed, StateUnusable
from workers.llama.sampling.candidates import Logits
from workers.models.spec import LlamaSettings

TEXT, OTHER = WORDS, WORDS[::-1]
BY_RANGE = [name for name, small in SMALL_MODELS.items() if small.kind.by_range]
WHOLE = [name for name, small in SMALL_MODELS.items() if not small.kind.by_range]
WITH_STATE = [name for name in WHOLE if name != "window"]
FEW = LlamaSettings(n_threads=1, n_batch=64, n_ubatch=64)
"""Small steps keep the cells of windows few, so that they are soon needed by others."""


@pytest.fixture(params=list(SMALL_MODELS))
def any_kind(request: pytest.FixtureRequest, small_models: dict[str, Path]) -> Iterator[LoneContext]:
    with lone_context(small_models[request.param]) as one:
        yield one


@pytest.fixture(params=BY_RANGE)
def by_range(request: pytest.FixtureRequest, small_models: dict[str, Path]) -> Iterator[LoneContext]:
    with lone_context(small_models[request.param]) as one:
        yield one


@pytest.fixture(params=WITH_STATE)
def with_state(request: pytest.FixtureRequest, small_models: dict[str, Path]) -> Iterator[LoneContext]:
    with lone_context(small_models[request.param]) as one:
        yield one


@pytest.fixture
def attention(small_models: dict[str, Path]) -> Iterator[LoneContext]:
    with lone_context(small_models["attention"], kv_tokens=256) as one:
        yield one


# The models themselves.


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_a_small_model_reads_what_it_says(name: str, small_models: dict[str, Path], tmp_path: Path) -> None:
    """Greedy text wanders, an early token still matters at the end, and the file is the same each time."""
    with lone_context(small_models[name]) as lone:
        assert lone.memory.kind is SMALL_MODELS[name].kind
        logits = lone.feed(0, TEXT[:20])
        said = []
        for position in range(20, 40):
            said.append(int(logits.argmax()))
            (logits,) = lone.step((0, said[-1], position))
        assert len(set(said)) > 10
        first = lone.feed(1, TEXT[:20])
        assert not same(lone.feed(2, [TEXT[0], *OTHER[1:5], *TEXT[5:20]]), first)
    assert small_models[name].stat().st_size < 2_000_000
    assert write_small_model(tmp_path, name).read_bytes() == small_models[name].read_bytes()


# A whole state.


def test_a_whole_state_comes_back_bit_by_bit(any_kind: LoneContext) -> None:
    """Into another sequence of an empty cache: the same cells, so the same logits.

    The sequence's number is part of the bytes, so they are compared under the old one.
    """
    memory = any_kind.memory
    any_kind.feed(0, TEXT[:40])
    state = memory.save(0)
    (expected,) = any_kind.step((0, 99, 40))
    memory.clear()
    memory.load(1, state)
    assert memory.can_continue(1, 40)
    assert not memory.can_continue(1, 39)
    assert not memory.can_continue(1, 41)
    memory.share(1, 0, 0, 40)
    assert memory.save(0) == state
    (logits,) = any_kind.step((1, 99, 40))
    assert same(logits, expected)


def test_a_whole_sequence_is_shared_and_goes_apart(any_kind: LoneContext) -> None:
    memory = any_kind.memory
    any_kind.feed(0, TEXT[:40])
    memory.share(0, 2, 0, 40)
    assert memory.can_continue(2, 40)
    sharer = any_kind.step((2, 5, 40))[0]
    source = any_kind.step((0, 7, 40))[0]
    memory.clear()
    any_kind.feed(0, TEXT[:40])
    assert same(any_kind.step((0, 5, 40))[0], sharer)
    memory.clear()
    any_kind.feed(0, TEXT[:40])
    assert np.allclose(any_kind.step((0, 7, 40))[0], source, atol=0.05), "its cell is not the same one"
    assert not np.allclose(sharer, source, atol=0.5)


def test_the_place_in_the_cache_changes_the_last_digits(attention: LoneContext) -> None:
    """Attention sums in the order of cells: equal states at other places give close logits, not equal ones."""
    attention.feed(0, TEXT[:40])
    state = attention.memory.save(0)
    (expected,) = attention.step((0, 99, 40))
    attention.memory.load(1, state)
    (logits,) = attention.step((1, 99, 40))
    assert np.allclose(logits, expected, atol=0.05)
    assert cells_by_position(attention.memory.save(1)).keys() == set(range(41))
    assert {at: cell for at, cell in cells_by_position(attention.memory.save(1)).items() if at < 40} == (
        cells_by_position(state)
    )


# Ranges, where each token has a cell.


def test_a_shared_prefix_continues_as_if_computed(by_range: LoneContext) -> None:
    memory = by_range.memory
    by_range.feed(0, TEXT[:25])
    memory.share(0, 2, 0, 25)
    shared = by_range.feed(2, TEXT[25:40], 25)
    memory.clear()
    by_range.feed(2, TEXT[:25])
    assert same(by_range.feed(2, TEXT[25:40], 25), shared), "the same cells and the same steps"
    memory.clear()
    assert np.allclose(by_range.feed(2, TEXT[:40]), shared, atol=0.05), "another layout of steps"


def test_a_shared_prefix_is_not_the_whole(by_range: LoneContext) -> None:
    memory = by_range.memory
    by_range.feed(0, TEXT[:40])
    memory.share(0, 2, 0, 25)
    assert by_range.positions(2) == (0, 24)
    assert memory.can_continue(2, 25)
    assert memory.state_size(2) < memory.state_size(0)


@pytest.mark.parametrize("name", ["attention", "attention-latent", "attention-alibi", "attention-learned"])
def test_ranges_travel_through_a_scratch_sequence(name: str, small_models: dict[str, Path]) -> None:
    """Saved in three parts and brought back with a live neighbour: the very bytes, and nobody's cells but its own."""
    scratch = 5
    parts = [(0, 20), (20, 33), (33, 60)]
    with lone_context(small_models[name], kv_tokens=256) as lone:
        memory = lone.memory
        lone.feed(0, TEXT[:60])
        lone.feed(1, OTHER[:50])
        state, neighbour = memory.save(0), memory.save(1)
        saved = []
        for start, end in parts:
            memory.share(0, scratch, start, end)
            saved.append(memory.save(scratch))
            memory.remove(scratch)
        memory.remove(0)
        # A shorter life in between leaves holes, so the parts come back in other cells.
        lone.feed(3, OTHER[100:110])
        for part, (start, end) in zip(saved, parts, strict=True):
            memory.load(scratch, part)
            memory.share(scratch, 0, start, end)
            memory.remove(scratch)
        assert memory.can_continue(0, 60)
        assert cells_by_position(memory.save(0)) == cells_by_position(state)
        assert memory.save(1) == neighbour
        memory.remove(0)
        memory.remove(3)
        for part, (start, end) in zip(saved, parts, strict=True):
            memory.load(scratch, part)
            memory.share(scratch, 0, start, end)
            memory.remove(scratch)
        assert memory.save(0) == state, "in the cells where it was"


def test_shared_cells_are_counted_once_and_freed_with_their_last_holder(attention: LoneContext) -> None:
    """256 cells: 100 shared by three, 100 of another one, 56 free."""
    memory = attention.memory
    attention.feed(0, TEXT[:100])
    attention.feed(1, OTHER[:100])
    memory.share(0, 2, 0, 100)
    memory.share(2, 3, 0, 100)
    for position in range(100, 156):
        attention.step((1, 50, position))
    for holder in (0, 2):
        with pytest.raises(DecodeFailed, match="returned 1"):
            attention.step((1, 50, 156))
        assert attention.positions(1) == (0, 155), "a refused step leaves nothing behind"
        memory.remove(holder)
    with pytest.raises(DecodeFailed, match="returned 1"):
        attention.step((1, 50, 156))
    memory.remove(3)
    attention.step((1, 50, 156))


def test_a_range_moves_down_for_all_who_hold_it(attention: LoneContext) -> None:
    """Saved in the order of cells: what comes first in the bytes lies lowest."""
    memory, scratch = attention.memory, 5
    attention.feed(3, OTHER[:60])
    attention.feed(0, TEXT[:100])
    memory.share(0, 1, 0, 100)
    before = memory.save(0)
    (expected,) = attention.step((1, 9, 100))
    memory.cut(1, 100, -1)
    memory.remove(3)
    memory.relocate((0, 1), scratch, 50, 100)
    after = memory.save(0)
    assert list(cells_by_position(before)) == list(range(100))
    assert list(cells_by_position(after)) == [*range(50, 100), *range(50)]
    assert cells_by_position(after) == cells_by_position(before)
    assert np.allclose(attention.step((1, 9, 100))[0], expected, atol=0.05)
    for position in range(101, 256):
        attention.step((1, 50, position))
    with pytest.raises(DecodeFailed, match="returned 1"):
        attention.step((1, 50, 256))
    assert memory.can_continue(0, 100)


@pytest.mark.parametrize("name", ["attention", "attention-latent", "window", "hybrid", "hybrid-convolution"])
def test_a_state_that_does_not_fit_is_refused(name: str, small_models: dict[str, Path]) -> None:
    with lone_context(small_models[name], kv_tokens=256) as lone:
        memory = lone.memory
        lone.feed(0, TEXT[:100])
        lone.feed(1, OTHER[:100])
        memory.share(0, 2, 0, 100)
        states = [memory.save(sequence) for sequence in range(3)]
        with pytest.raises(StateUnusable, match="available cells"):
            memory.load(3, states[0])
        assert lone.positions(3) == (-1, -1)
        assert [memory.save(sequence) for sequence in range(3)] == states


def test_any_range_can_be_cut(by_range: LoneContext) -> None:
    memory = by_range.memory
    expected = by_range.feed(0, TEXT[:30])
    by_range.feed(0, OTHER[:10], 30)
    assert memory.cut(0, 30, -1)
    assert by_range.positions(0) == (0, 29)
    assert memory.cut(0, 29, -1)
    assert np.allclose(by_range.feed(0, TEXT[29:30], 29), expected, atol=0.05)
    assert memory.cut(0, 0, 10)
    assert by_range.positions(0) == (10, 29)
    assert not memory.can_continue(0, 30)


# Recurrent states.


def test_a_recurrent_state_has_one_position_and_no_parts(with_state: LoneContext) -> None:
    memory = with_state.memory
    with_state.feed(0, TEXT[:40])
    state = memory.save(0)
    assert with_state.positions(0) == (39, 39)
    assert not memory.cut(0, 30, -1)
    assert not memory.cut(0, 39, -1)
    assert memory.save(0) == state
    assert memory.cut(0, 40, -1), "there is nothing behind the end"
    assert memory.save(0) == state
    assert memory.cut(0, 0, 10), "True, and the recurrent part is as before"
    assert with_state.positions(0) == (39, 39)


@pytest.mark.parametrize("name", [name for name in WITH_STATE if name != "recurrent"])
def test_a_shared_range_of_a_hybrid_is_wrong_and_can_be_told(name: str, small_models: dict[str, Path]) -> None:
    """Attention cells of the range, the recurrent state of everything; llama.cpp computes on with that."""
    with lone_context(small_models[name]) as lone:
        expected = lone.feed(1, TEXT[:40])
        lone.feed(0, TEXT[:40])
        lone.memory.share(0, 2, 0, 25)
        assert lone.positions(2) == (39, 24)
        assert not lone.memory.can_continue(2, 25)
        assert not np.allclose(lone.feed(2, TEXT[25:40], 25), expected, atol=0.05)


def test_a_shared_range_of_a_recurrent_state_is_all_of_it(small_models: dict[str, Path]) -> None:
    with lone_context(small_models["recurrent"]) as lone:
        lone.feed(0, TEXT[:40])
        lone.memory.share(0, 2, 0, 25)
        assert lone.positions(2) == (39, 39)
        with pytest.raises(DecodeFailed, match="consecutive"):
            lone.feed(2, TEXT[25:40], 25)


def test_a_recurrent_cache_never_fills_up(small_models: dict[str, Path]) -> None:
    with lone_context(small_models["recurrent"], kv_tokens=256) as lone:
        for sequence in range(4):
            lone.feed_long(sequence, TEXT[:250])
        assert lone.positions(3) == (249, 249)


# Parts that can't be cut, saved by themselves.


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_with_its_part_a_shared_prefix_continues_exactly(name: str, small_models: dict[str, Path]) -> None:
    """What makes prefixes shareable where ranges are not: a saved part at the length where they end."""
    with lone_context(small_models[name], kv_tokens=2048, llama=FEW) as lone:
        lone.feed(0, TEXT[:50])
        expected = lone.feed(0, OTHER[:30], 50)
    with lone_context(small_models[name], kv_tokens=2048, llama=FEW) as lone:
        memory = lone.memory
        lone.feed(0, TEXT[:50])
        part, whole = memory.save_part(0), memory.save(0)
        if SMALL_MODELS[name].kind in (MemoryKind.WINDOW, MemoryKind.HYBRID):
            assert len(part) < len(whole)
        for start in range(50, 250, 50):
            lone.feed(0, TEXT[start : start + 50], start)
        for sequence in (1, 2):
            lone.feed_long(sequence, OTHER[:250])
        memory.share(0, 3, 0, 50)
        memory.load_part(3, part)
        assert memory.can_continue(3, 50)
        assert np.allclose(lone.feed(3, OTHER[:30], 50), expected, atol=0.05)
        memory.load_part(0, part)
        assert memory.cut(0, 50, -1)
        assert memory.can_continue(0, 50)
        assert np.allclose(lone.feed(0, OTHER[:30], 50), expected, atol=0.05)


def test_a_window_loses_cells_to_later_micro_batches_of_the_same_decode(small_models: dict[str, Path]) -> None:
    """Cells for the second are found before the first is computed, and the first one's window is gone by then.

    The ring of window cells is filled so that the second micro-batch takes cells of the positions 60 to 63: all before
    those are forgotten, and 49 to 59, which position 64 sees, lie elsewhere.
    """
    llama = LlamaSettings(n_threads=1, n_batch=64, n_ubatch=32, flash_attn="off")
    told = []
    for cuts in ((36,), (32, 4)):
        with lone_context(small_models["window"], slots=2, kv_tokens=1024, llama=llama) as lone:
            lone.feed_long(0, TEXT[:60], 30)
            lone.feed_long(1, OTHER[:196], 28)
            lone.feed(0, TEXT[60:64], 60)
            for at in range(196, 388, 32):
                lone.feed(1, TEXT[:32], at)
            lone.feed(1, TEXT[:17], 388)
            assert lone.positions(0) == (49, 63)
            at = 64
            for length in cuts:
                logits = lone.feed(0, TEXT[at : at + length], at)
                at += length
            told.append(logits)
    assert np.abs(told[0] - told[1]).max() > 0.1


def test_a_recurrent_state_goes_back_by_tokens_of_its_own_step(small_models: dict[str, Path]) -> None:
    """Steps of one sequence with wrong tokens at their end, between steps of others and copies of states."""
    text, rng = WORDS[:120], np.random.default_rng(3)
    path = small_models["hybrid-convolution"]
    with Model.load(path, FEW) as model, Context(model, FEW, slots=4, kv_tokens=1024) as one:
        batch = one.new_batch()
        plain = [computed(one, batch, [(0, text[at : at + 1], at)])[0][0] for at in range(100)]
    with (
        Model.load(path, FEW) as model,
        Context(model, FEW, slots=4, kv_tokens=1024, rollback=6) as one,
    ):
        batch, memory, ends = one.new_batch(), one.memory, [0, 0, 0]
        while min(ends) < 90:
            order = [int(id_) for id_ in rng.permutation(3) if ends[id_] < 90]
            if rng.random() < 0.5 and ends[order[0]]:
                id_, num_right, num_wrong = order[0], int(rng.integers(1, 4)), int(rng.integers(1, 5))
                tokens = [*text[ends[id_] : ends[id_] + num_right], *[9] * num_wrong]
                parts, taken = [(id_, tokens, ends[id_])], [num_right]
            else:
                taken = [int(rng.integers(1, 4)) for _ in order]
                parts = [(id_, text[ends[id_] : ends[id_] + n], ends[id_]) for id_, n in zip(order, taken, strict=True)]
                num_wrong = 0
            for (id_, _, at), num_right, rows in zip(parts, taken, computed(one, batch, parts), strict=True):
                assert np.allclose(rows[:num_right], plain[at : at + num_right], atol=0.01)
                ends[id_] += num_right
                if num_wrong:
                    assert memory.cut(id_, ends[id_], -1)
                assert memory.can_continue(id_, ends[id_])
            if rng.random() < 0.2:
                state = memory.save(order[0])
                memory.remove(order[0])
                memory.load(order[0], state)


def computed(context: Context, batch: Batch, parts: list[tuple[int, list[int], int]]) -> list[list[Logits]]:
    """Compute one batch of these tokens of sequences; return the logits of each."""
    batch.clear()
    rows = [[batch.add_token(token, at + n, id_) for n, token in enumerate(tokens)] for id_, tokens, at in parts]
    context.decode(batch)
    return [[context._row(row).copy() for row in of_one] for of_one in rows]
