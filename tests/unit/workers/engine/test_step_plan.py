from __future__ import annotations

import weakref
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.step.health import MemoryProbe
from workers.engine.step.step_plan import Beside, Chunk, Decode, Limits, Plan, in_parts, plan_step


@dataclass(frozen=True)
class View:
    name: int
    num_prompt_left: int
    is_back: bool = False

    @property
    def num_next(self) -> int:
        return self.num_prompt_left


LIMITS = Limits(n_batch=200, n_ubatch=100, min_prefill=10)
AGAIN = 12
ANY = LIMITS.n_ubatch


@pytest.mark.parametrize(
    ("left", "beside", "decode", "prefill"),
    [
        pytest.param([], 100, 0, [], id="nothing to do"),
        pytest.param([0, 0, 0], 100, 3, [], id="everyone decodes"),
        pytest.param([30], 100, 0, [(0, 30)], id="a short prompt goes whole"),
        pytest.param([150], 100, 0, [(0, 100)], id="a long prompt goes in micro-batches"),
        pytest.param([0, 0, 150], 100, 2, [(2, 62)], id="beside running streams as many tiles of 64 rows as fit"),
        pytest.param([0, 0, 150], 40, 2, [(2, 38)], id="a slow device takes less, in fours of rows"),
        pytest.param([0, 0, 150], 1, 2, [(2, 10)], id="but never nothing"),
        pytest.param([0, 50, 50, 50], 30, 1, [(1, 32), (2, 31)], id="where more wait than run, more is read at once"),
        pytest.param([150], 40, 0, [(0, 100)], id="with nobody waiting it takes all it can"),
        pytest.param(
            [30, 40, 50, 60], 100, 0, [(0, 30), (1, 40), (2, 30)], id="short prompts share a step, shortest first"
        ),
        pytest.param([100, 5], 100, 0, [(0, 95), (1, 5)], id="a short prompt does not wait for a long one"),
        pytest.param([200, 80, 90], 100, 0, [(0, 50), (1, 50)], id="half of a step is the oldest's"),
        pytest.param([0] * 95 + [50], 100, 95, [(95, 10)], id="many streams never stop a prompt"),
        pytest.param([0] * 195 + [50], 100, 195, [(195, 5)], id="the batch is the last bound"),
    ],
)
def test_plan(left: list[int], beside: int, decode: int, prefill: list[tuple[int, int]]) -> None:
    plan = plan_step([View(*pair) for pair in enumerate(left)], LIMITS, Beside(beside, AGAIN, ANY), 1000)
    assert len(plan.decode) == decode
    assert [(chunk.sequence.name, chunk.num_tokens) for chunk in plan.prefill] == prefill


@pytest.mark.parametrize(
    ("left", "beside", "prefill"),
    [
        pytest.param([0, 0, 80], 62, 80, id="a rest that would fill no tile joins the step"),
        pytest.param([0, 0, 124], 62, 62, id="one that fills a tile waits"),
        pytest.param([0, 0, 140], 126, 62, id="if it does not fit, the step leaves it a tile"),
        pytest.param([140], 100, 66, id="with no streams too"),
        pytest.param([0, 0, 90], 30, 90, id="a slow device is not left with a few rows either"),
    ],
)
def test_no_step_is_left_with_less_than_a_tile(left: list[int], beside: int, prefill: int) -> None:
    limits = Limits(n_batch=200, n_ubatch=130 if left[0] else 128, min_prefill=10)
    plan = plan_step([View(*pair) for pair in enumerate(left)], limits, Beside(beside, AGAIN, limits.n_ubatch), 1000)
    assert [chunk.num_tokens for chunk in plan.prefill] == [prefill]


def test_a_rest_joins_no_step_that_other_teams_streams_wait_for() -> None:
    views = [View(*pair) for pair in enumerate([0, 80])]
    assert plan_step(views, LIMITS, Beside(64, AGAIN, most=64), 1000).num_tokens == 64


def test_a_burst_of_others_is_read_in_steps_of_a_bound() -> None:
    views = [View(*pair) for pair in enumerate([0, 50, 50, 50])]
    assert plan_step(views, LIMITS, Beside(30, AGAIN, most=40), 1000).num_tokens == 40
    assert plan_step(views[1:], LIMITS, Beside(30, AGAIN, most=40), 1000).num_tokens == LIMITS.n_ubatch


def test_streams_that_miss_a_step_wait_for_it_all_the_same() -> None:
    views = [View(1, 150)]
    assert plan_step(views, LIMITS, Beside(40, AGAIN, ANY), 1000).num_tokens == LIMITS.n_ubatch
    assert plan_step(views, LIMITS, Beside(40, AGAIN, ANY, streams=1), 1000).num_tokens == 40
    back = [View(1, 150, is_back=True)]
    assert plan_step(back, LIMITS, Beside(40, AGAIN, ANY, streams=1), 1000).num_tokens == 64


def test_prompts_take_the_room_that_decoding_leaves() -> None:
    views = [View(*pair) for pair in enumerate([0, 0, 50, 50])]
    assert [chunk.num_tokens for chunk in plan_step(views, LIMITS, Beside(100, AGAIN, ANY), 32).prefill] == [15, 15]
    assert plan_step(views, LIMITS, Beside(100, AGAIN, ANY), 2).prefill == []


@pytest.mark.parametrize(
    ("left", "back", "decode", "prefill"),
    [
        pytest.param([0, 0], [180], 2, [(2, 62)], id="running streams wait for one tile of rows"),
        pytest.param([0, 0], [80] * 4, 2, [(2, 31), (3, 31)], id="however many are back"),
        pytest.param([0, 3], [180], 1, [(1, 3), (2, 60)], id="and so does who waits for a first token"),
        pytest.param([3], [180], 0, [(0, 3), (1, 61)], id="with no stream running either"),
        pytest.param([0, 0], [80], 2, [(2, 80)], id="no step is left with few rows, which take longer than a tile"),
        pytest.param([200], [180], 0, [(0, 50), (1, 50)], id="where a step is full anyhow they have half of it"),
        pytest.param([0, 60], [80] * 3, 1, [(1, 20), (2, 22), (3, 21)], id="first prompts take no more beside them"),
        pytest.param([], [80], 0, [(0, 80)], id="alone it takes all it can"),
    ],
)
def test_what_is_read_again_holds_nobody_up(
    left: list[int], back: list[int], decode: int, prefill: list[tuple[int, int]]
) -> None:
    views = [View(*pair) for pair in enumerate(left)]
    views += [View(len(left) + number, num_left, is_back=True) for number, num_left in enumerate(back)]
    plan = plan_step(views, LIMITS, Beside(40, AGAIN, ANY), 1000)
    assert len(plan.decode) == decode
    assert [(chunk.sequence.name, chunk.num_tokens) for chunk in plan.prefill] == prefill


@given(
    st.lists(st.tuples(st.integers(0, 400), st.booleans()), max_size=150), st.integers(0, 200), st.integers(150, 500)
)
def test_bounds_hold_and_the_oldest_always_advances(left: list[tuple[int, bool]], beside: int, room: int) -> None:
    views = [View(number, num_left, is_back) for number, (num_left, is_back) in enumerate(left)]
    plan = plan_step(views, LIMITS, Beside(beside, AGAIN, ANY), room)
    assert plan.num_tokens <= min(LIMITS.n_batch, room)
    assert [one.sequence.name for one in plan.decode] == [view.name for view in views if not view.num_prompt_left]
    assert all(0 < chunk.num_tokens <= chunk.sequence.num_prompt_left for chunk in plan.prefill)
    waiting = [view for view in views if view.num_prompt_left]
    if waiting and room > len(plan.decode):
        assert plan.prefill[0].sequence == next((view for view in waiting if not view.is_back), waiting[0])
        oldest_back = [view for view in waiting if view.is_back][:1]
        assert room == len(plan.decode) + 1 or {chunk.sequence for chunk in plan.prefill}.issuperset(oldest_back)
        assert len({chunk.sequence for chunk in plan.prefill}) == len(plan.prefill)
    elif not waiting:
        assert not plan.prefill


@pytest.mark.parametrize(
    ("drafts", "chunks", "alike", "parts"),
    [
        pytest.param([0] * 3, [], False, [[1, 1, 1]], id="what fits is one part"),
        pytest.param([0] * 10, [], False, [[1] * 8, [1, 1]], id="decoding calls go on in the next part"),
        pytest.param([0] * 2, [3, 4, 2], False, [[1, 1], [3, 4], [2]], id="chunks share a part that has room"),
        pytest.param([0] * 2, [3, 3, 2], True, [[1, 1], [3, 3], [2]], id="or that has chunks of the same length"),
        pytest.param([2, 3, 1], [], False, [[3, 4], [2]], id="a draft stays with its token"),
        pytest.param([0, 2, 2], [], True, [[1], [3, 3]], id="drafts of one length may share a part"),
    ],
)
def test_a_step_is_cut_into_parts(drafts: list[int], chunks: list[int], alike: bool, parts: list[list[int]]) -> None:
    decode = [Decode(View(number, 0), (7,) * length) for number, length in enumerate(drafts)]
    plan = Plan(decode, [Chunk(View(100 + number, 50), length) for number, length in enumerate(chunks)])
    cut = list(in_parts(plan, 8, alike=alike))
    rows = [[one.num_tokens for one in part.decode] + [one.num_tokens for one in part.prefill] for part in cut]
    assert rows == parts
    assert [one for part in cut for one in part.decode] == plan.decode
    assert [chunk for part in cut for chunk in part.prefill] == plan.prefill


def test_a_plan_is_not_kept_once_its_step_is_over() -> None:
    """Its calls have megabytes of pictures."""
    probe, plan = MemoryProbe(lambda _: True), Plan[View]([], [])
    gone = weakref.ref(plan)
    assert probe.has_memory(plan)
    del plan
    assert gone() is None
