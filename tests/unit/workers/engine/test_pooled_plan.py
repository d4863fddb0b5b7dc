from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from workers.engine.pooled.jobs import Account, Part, Room, plan_batch
from workers.engine.pooled.media import Rows


@dataclass
class Seen:
    """An input with pictures: runs of cells, each with its end."""

    runs: Sequence[tuple[int, Rows]]
    is_ready: bool = True

    def run(self, cell: int) -> tuple[int, Rows]:
        return next((end, kind) for end, kind in self.runs if cell < end)


@dataclass(eq=False)
class Job:
    lengths: Sequence[int]
    index: int = 0
    offset: int = 0
    served: int = 0
    account: Account = field(default_factory=lambda: Account("red"))
    media: dict[int, Seen] = field(default_factory=dict)


def cut(parts: Sequence[Part[Job]]) -> list[tuple[int, int, int]]:
    return [(part.index, part.start, part.end) for part in parts]


def advance(parts: Sequence[Part[Job]]) -> None:
    for part in parts:
        job = part.job
        assert (part.index, part.start) == (job.index, job.offset)
        job.served += part.end - part.start
        job.account.served += part.end - part.start
        job.offset = part.end
        if part.is_last:
            job.index, job.offset = job.index + 1, 0


def test_many_inputs_go_together_and_the_rest_waits() -> None:
    job = Job([30, 40, 50])
    assert cut(plan_batch([job], Room(100, 10))) == [(0, 0, 30), (1, 0, 40)]


def test_an_input_that_may_not_be_cut_waits_for_an_empty_batch() -> None:
    short, long = Job([10]), Job([100])
    assert [part.job for part in plan_batch([short, long], Room(100, 10))] == [short]
    assert [part.job for part in plan_batch([long], Room(100, 10))] == [long]


def test_what_may_be_cut_fills_the_batch_to_the_brim_and_goes_on() -> None:
    job = Job([70, 70, 70])
    room = Room(100, 10, 1000, can_split=True)
    first = plan_batch([job], room)
    assert cut(first) == [(0, 0, 70), (1, 0, 30)]
    advance(first)
    assert cut(plan_batch([job], room)) == [(1, 30, 70), (2, 0, 60)]


def test_a_short_job_beside_a_huge_one_is_in_the_next_batch() -> None:
    huge, short = Job([50] * 1000, index=500, served=25_000), Job([20, 20], served=25_000)
    parts = plan_batch([huge, short], Room(100, 10))
    assert [(part.job, part.index) for part in parts] == [(huge, 500), (short, 0), (short, 1)]


@pytest.mark.parametrize("can_split", [False, True])
def test_teams_take_turns_however_many_jobs_they_have(can_split: bool) -> None:
    """One team's eight requests of 2,048 inputs leave half of the work to one request of another."""
    red, blue = Account("red"), Account("blue")
    jobs = [Job([40] * 2048, account=red) for _ in range(8)] + [Job([50] * 100, account=blue)]
    had = {"red": 0, "blue": 0}
    for _ in range(60):
        parts = plan_batch(jobs, Room(100, 8 - sum(job.offset > 0 for job in jobs), 10_000, can_split))
        for part in parts:
            had[part.job.account.team] += part.end - part.start
        advance(parts)
        assert abs(had["red"] - had["blue"]) <= 100, had
    assert had["blue"] > 2000
    assert len({job.index for job in jobs if job.account is red}) <= 2, "a team's own jobs are level as before"


def test_sequences_are_bounded() -> None:
    assert len(plan_batch([Job([1] * 50)], Room(100, 8))) == 8


def test_nobody_begins_past_one_that_waits_for_cells() -> None:
    long, short = Job([90]), Job([5] * 10, index=4, served=1)
    running = Job([80], offset=40, served=2)
    room = Room(64, 10, 20, can_split=True)
    assert [part.job for part in plan_batch([long, short, running], room)] == [running]
    assert [part.job for part in plan_batch([short, running], room)] == [short, running, short, short, short]


@pytest.mark.parametrize("can_split", [False, True])
def test_every_input_is_computed_once_and_nobody_starves(can_split: bool) -> None:
    rng = random.Random(7)
    jobs: list[Job] = []
    waiting = [Job([rng.randint(1, 64) for _ in range(rng.choice([1, 3, 80]))]) for _ in range(30)]
    total = sum(sum(job.lengths) for job in waiting)
    finished: list[Job] = []
    for step in range(1, 2 * total):
        if waiting and step % 3 == 0:
            waiting[-1].served = min((job.served for job in jobs), default=0)
            jobs.append(waiting.pop())
        promised = sum(job.lengths[job.index] for job in jobs if job.offset)
        in_parts = sum(1 for job in jobs if job.offset)
        parts = plan_batch(jobs, Room(64, 8 - in_parts, 128 - promised if can_split else 1e9, can_split))
        assert sum(part.end - part.start for part in parts) <= 64
        assert len({(part.job, part.index) for part in parts}) == len(parts)
        assert bool(parts) == bool(jobs)
        advance(parts)
        finished += [job for job in jobs if job.index == len(job.lengths)]
        jobs = [job for job in jobs if job.index < len(job.lengths)]
        if not jobs and not waiting:
            break
    assert len(finished) == 30


TOKENS, CELLS, WHOLE = Rows.TOKENS, Rows.CELLS, Rows.WHOLE
PICTURE = [(10, TOKENS), (50, CELLS), (60, TOKENS)]
"""A text, a picture of 40 cells, and a text."""


def test_a_batch_has_tokens_or_cells_of_pictures() -> None:
    """Whose turn it is decides which; the others come in the next one."""
    room = Room(100, 10, 1000, can_split=True)
    seeing, other, reading = Job([60], media={0: Seen(PICTURE)}), Job([60], media={0: Seen(PICTURE)}), Job([30] * 9)
    jobs = [seeing, other, reading]
    kinds: list[Rows] = []
    for _ in range(4):
        parts = plan_batch(jobs, room)
        kinds.append(parts[0].kind)
        assert {part.kind for part in parts} == {kinds[-1]}
        if kinds[-1] is CELLS:
            assert [(part.job, part.start, part.end) for part in parts] == [(seeing, 10, 50), (other, 10, 50)]
        advance(parts)
        jobs = [job for job in jobs if job.index < len(job.lengths)]
    assert kinds == [TOKENS, CELLS, TOKENS, TOKENS]
    assert jobs == [reading]


def test_an_input_that_waits_for_its_pictures_holds_up_nobody() -> None:
    room = Room(100, 10, 1000, can_split=True)
    waiting, reading = Job([60, 5], media={0: Seen(PICTURE, is_ready=False)}), Job([30] * 2)
    assert [part.job for part in plan_batch([waiting, reading], room)] == [reading, reading]
    assert not plan_batch([waiting], room)
    ahead = Job([5, 60, 5], media={1: Seen(PICTURE, is_ready=False)})
    assert cut(plan_batch([ahead], room)) == [(0, 0, 5)], "its own inputs come in their order"
    waiting.media[0].is_ready = True
    assert [part.job for part in plan_batch([waiting, reading], room)] == [waiting, reading, reading]


def test_cells_that_see_each_other_are_not_cut() -> None:
    room = Room(64, 10, 1000, can_split=True)
    runs = [(40, WHOLE), (50, TOKENS)]
    jobs = [Job([50], media={0: Seen(runs)}), Job([50], media={0: Seen(runs)})]
    first = plan_batch(jobs, room)
    assert [(part.job, part.end, part.kind) for part in first] == [(jobs[0], 40, WHOLE)]
    advance(first)
    second = plan_batch(jobs, room)
    assert [(part.job, part.end, part.kind) for part in second] == [(jobs[1], 40, WHOLE)]
    causal = Job([90], media={0: Seen([(90, CELLS)])})
    assert cut(plan_batch([causal], room)) == [(0, 0, 64)]


def test_pictures_and_texts_of_two_teams_take_turns() -> None:
    red, blue = Account("red"), Account("blue")
    seeing = [Job([50] * 40, account=red, media={n: Seen([(50, WHOLE)]) for n in range(40)}) for _ in range(3)]
    jobs = [*seeing, Job([50] * 100, account=blue)]
    for _ in range(40):
        parts = plan_batch(jobs, Room(100, 8, 10_000, can_split=True))
        advance(parts)
        for part in parts:
            part.job.media.pop(part.index, None)
        assert abs(red.served - blue.served) <= 200
    assert min(red.served, blue.served) > 1500
