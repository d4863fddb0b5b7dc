"""Layouts of decode steps are learned: whatever the machine is like, its quickest way is found and kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from workers.engine.step.step_plan import TRY_AGAIN_STEPS, BatchLayouts, Layout, padding, tile_padding, ways_of


def cpu(num_rows: int, layout: Layout) -> float:
    """Seconds, as measured with a 0.5 B model on one core."""
    together = {1: 0.0195, 2: 0.080, 3: 0.101, 4: 0.116, 7: 0.181, 8: 0.139, 16: 0.177}
    match layout:
        case Layout.SINGLY:
            return num_rows * together[1]
        case Layout.PADDED:
            return together[num_rows + padding(num_rows)]
        case _:
            return together[num_rows]


def gpu(num_rows: int, layout: Layout) -> float:
    return num_rows * 0.004 if layout is Layout.SINGLY else 0.004


def played(
    layouts: BatchLayouts, num_rows: int, costs: Callable[[int, Layout], float], num_steps: int = 100
) -> Counter[Layout]:
    seen: Counter[Layout] = Counter()
    for _ in range(num_steps):
        layout = layouts.choose(num_rows)
        seen[layout] += 1
        layouts.note(num_rows, layout, costs(num_rows, layout))
    return seen


@pytest.mark.parametrize(
    ("num_rows", "best"),
    [
        (1, Layout.TOGETHER),
        (2, Layout.SINGLY),
        (3, Layout.SINGLY),
        (4, Layout.SINGLY),
        (7, Layout.PADDED),
        (8, Layout.TOGETHER),
        (16, Layout.TOGETHER),
    ],
)
def test_the_quickest_way_is_found(num_rows: int, best: Layout) -> None:
    seen = played(BatchLayouts(fixed=False), num_rows, cpu)
    assert seen.most_common(1)[0][0] is best
    assert seen[best] >= 100 - 2 * (len(ways_of(num_rows)) - 1)


def test_where_rows_cost_nothing_they_go_together() -> None:
    assert played(BatchLayouts(fixed=False), 7, gpu)[Layout.TOGETHER] >= 98
    assert played(BatchLayouts(fixed=True), 2, cpu) == {Layout.TOGETHER: 100}


def test_memory_without_a_spare_sequence_is_never_padded() -> None:
    assert Layout.PADDED not in played(BatchLayouts(fixed=False, can_pad=False), 7, cpu)


def test_it_notices_when_another_way_becomes_quicker() -> None:
    layouts = BatchLayouts(fixed=False)
    assert played(layouts, 2, cpu)[Layout.SINGLY] >= 96
    played(layouts, 2, gpu, 8 * TRY_AGAIN_STEPS)
    assert played(layouts, 2, gpu)[Layout.SINGLY] <= 2


@pytest.mark.parametrize(("num_rows", "num_empty"), [(1, 3), (4, 0), (5, 3), (7, 1)])
def test_padding(num_rows: int, num_empty: int) -> None:
    assert padding(num_rows) == num_empty


@pytest.mark.parametrize(
    ("parts", "num_empty"),
    [
        pytest.param([(35, 2048)], 29, id="a short prompt after many tokens fills a tile"),
        pytest.param([(35, 600)], 0, id="after fewer its rows are quicker alone"),
        pytest.param([(63, 200)], 0, id="and after few it is computed as by llama-server"),
        pytest.param([(63, 300)], 1, id="one row is filled in early"),
        pytest.param([(64, 2048)], 0, id="a whole tile is full"),
        pytest.param([(5, 2048)], 0, id="a few rows cost less than a tile"),
        pytest.param([(1, 2000), (1, 2000), (40, 2048)], 22, id="beside streams"),
        pytest.param([(1, 2000)] * 15 + [(20, 2048)], 0, id="but a tile would attend to all that many streams hold"),
    ],
)
def test_attention_gets_a_whole_tile_if_that_is_quicker(parts: list[tuple[int, int]], num_empty: int) -> None:
    assert tile_padding(parts) == num_empty
