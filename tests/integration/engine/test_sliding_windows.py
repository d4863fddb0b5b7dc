"""Layers that see a window: which cells go, what is wrong without them, and how that can be told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.lone_context import LoneContext, lone_context
from tests.support.small_models import WINDOW, WORDS
from workers.llama.native import DecodeFailed
from workers.models.spec import LlamaSettings

TEXT, OTHER = WORDS, WORDS[::-1]
FEW = LlamaSettings(n_threads=1, n_batch=64, n_ubatch=64)
"""Small steps keep the cells of windows few, so that they are soon needed by others."""


@pytest.fixture
def window(small_models: dict[str, Path]) -> Iterator[LoneContext]:
    with lone_context(small_models["window"], kv_tokens=2048, llama=FEW) as one:
        yield one


def test_cells_behind_the_window_go_when_others_need_room(window: LoneContext) -> None:
    memory = window.memory
    assert memory.window == WINDOW
    window.feed_long(0, TEXT[:300])
    alone = window.positions(0)
    for sequence in (1, 2):
        window.feed_long(sequence, OTHER[:300])
    first, last = window.positions(0)
    assert alone[0] < first
    assert (300 - WINDOW <= first <= 300 - WINDOW + 1, last) == (True, 299)
    assert memory.can_continue(0, 300)


def test_a_prefix_behind_the_window_is_wrong_and_can_be_told(window: LoneContext) -> None:
    memory = window.memory
    expected = window.feed_long(0, TEXT[:150])
    memory.clear()
    for sequence in (0, 1, 2):
        window.feed_long(sequence, TEXT[:300])
    memory.share(0, 3, 0, 100)
    assert window.positions(3) == (-1, -1)
    assert memory.state_size(3) > 100 * 32, "the layers without a window share all the same"
    assert not memory.can_continue(3, 100)
    assert not np.allclose(window.feed(3, TEXT[100:150], 100), expected, atol=0.2)
    memory.remove(3)
    assert memory.state_size(3) < 100, "what it held is given back"


def test_the_tail_of_a_window_is_cut_even_where_that_is_wrong(window: LoneContext) -> None:
    memory = window.memory
    expected = window.feed_long(0, TEXT[:300])
    memory.clear()
    for sequence in (0, 1, 2):
        window.feed_long(sequence, TEXT[:300])
    assert memory.cut(0, 290, -1)
    assert not memory.can_continue(0, 290)
    assert not np.allclose(window.feed(0, TEXT[290:300], 290), expected, atol=0.2)


def test_how_much_of_the_window_must_be_there(window: LoneContext) -> None:
    """A saved window ends with WINDOW cells: one may be cut from it, since the next token sees one less of the old."""
    logits = []
    for num_cut in (0, 1, 2):
        memory = window.memory
        memory.clear()
        window.feed(0, TEXT[: 50 + num_cut])
        part = memory.save_part(0)
        memory.share(0, 1, 0, 50 + num_cut)
        memory.load_part(1, part)
        memory.cut(1, 50, -1)
        assert window.positions(1) == (50 + num_cut - WINDOW, 49)
        assert memory.can_continue(1, 50) == (num_cut < 2)
        logits.append(window.step((1, 9, 50))[0])
    assert np.allclose(logits[0], logits[1], atol=0.05)
    assert not np.allclose(logits[0], logits[2], atol=0.05)


def test_a_whole_checkpoint_of_a_window_is_right(window: LoneContext) -> None:
    memory = window.memory
    window.feed_long(0, TEXT[:100])
    checkpoint = memory.save(0)
    expected = window.feed(0, TEXT[100:120], 100)
    memory.clear()
    for sequence in (1, 2):
        window.feed_long(sequence, OTHER[:300])
    memory.load(3, checkpoint)
    assert window.positions(3) == (100 - WINDOW, 99)
    assert memory.can_continue(3, 100)
    assert np.allclose(window.feed(3, TEXT[100:120], 100), expected, atol=0.05)


def test_shared_cells_of_a_window_are_never_used_again(window: LoneContext) -> None:
    """So sharing alone fills the small cache of the window's layers; with a part of its own each goes on for ever."""
    memory = window.memory
    for source in (0, 2):
        window.feed_long(source, TEXT[:120])
        memory.share(source, source + 1, 0, 120)

    def speak(start: int, end: int) -> None:
        for position in range(start, end):
            window.step(*((sequence, 9 + sequence, position) for sequence in range(4)))

    with pytest.raises(DecodeFailed, match="returned 1"):
        speak(120, 160)
    reached = memory.last_position(0) + 1
    for sequence in range(4):
        memory.load_part(sequence, memory.save_part(sequence))
    speak(reached, reached + 100)
    assert all(memory.can_continue(sequence, reached + 100) for sequence in range(4))
