"""Calls of several teams in one engine: one that has more than its share gives slots up while it runs, without loss."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest

from tests.integration.engine import listener
from tests.integration.engine.listener import ONE_THREAD, UNDRAFTED, Bench, changed
from tests.integration.engine.test_prefix_cache import ENDS, STORY
from workers.constraint.mask import MaskPending
from workers.engine.pace import GENTLE_TOKENS, PrefillPace
from workers.engine.request import EngineRequest
from workers.engine.step.sequence import Sequence
from workers.engine.step.shares import SLICE_TOKENS
from workers.engine.step.step_plan import ROWS_MULTIPLES, Plan
from workers.llama.model import Model
from workers.models.spec import LlamaSettings
from workers.protocol.events import PromptLogprobs, Text

running = partial(listener.running, speculation=UNDRAFTED)

LONG = 300


def of_team(team: str, request: EngineRequest, *, weight: float = 1.0, priority: int = 0) -> EngineRequest:
    return changed(request, tenant=team, weight=weight, priority=priority)


def endless(bench: Bench, team: str, number: int, num_tokens: int = LONG, **more: float) -> EngineRequest:
    prompt = [*bench.tokens(ENDS[number]), *bench.tokens(STORY)[1:40]]
    return of_team(team, bench.request(prompt, num_tokens, ignore_eos=True), **more)  # type: ignore[arg-type]


def step_of_end(bench: Bench, key: int) -> int:
    return next(step for step, events in bench.heard.steps if bench.heard.finished(key) in events)


def first_step(bench: Bench, key: int) -> int:
    return next(step for step, events in bench.heard.steps if any(event.call == key for event in events))


def all_begun(bench: Bench, keys: list[int]) -> None:
    bench.heard.until(lambda: all(any(isinstance(e, Text) for e in bench.heard.calls[key]) for key in keys))


@pytest.mark.parametrize("ram_bytes", [64 << 20, 0])
def test_others_are_served_while_one_team_holds_every_slot(demo: Model, ram_bytes: int) -> None:
    """`n: 4` with `ignore_eos`: eight calls of another team end long before, and nothing of the four is lost."""
    with running(demo, slots=4, n_ctx=512, kv_tokens=2048, ram_bytes=ram_bytes) as bench:
        alone = [bench.answer(changed(endless(bench, "red", n), cache_prompt=False)) for n in range(4)]
        red = [bench.submit(endless(bench, "red", n)) for n in range(4)]
        all_begun(bench, red)
        blue = [bench.submit(of_team("blue", bench.request(end, 8, ignore_eos=True))) for end in ENDS[:4]]
        bench.wait(*blue)
        assert not any(bench.heard.has_ended(key) for key in red)
        more = [bench.submit(of_team("blue", bench.request(end, 8, ignore_eos=True))) for end in ENDS[4:]]
        bench.wait(*red, *more)
        assert [bench.heard.text(key) for key in red] == alone
        assert [bench.heard.finished(key).usage.completion_tokens for key in red] == [LONG] * 4
        assert bench.engine.counters.num_sliced > 0
        assert sum(bench.heard.finished(key).num_preempted for key in red) == bench.engine.counters.num_sliced
        assert max(step_of_end(bench, key) for key in more) < min(step_of_end(bench, key) for key in red)


def test_who_comes_back_and_reads_again_makes_no_long_steps(demo: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two endless answers that nothing is kept of give way again and again, beside another team's streams."""
    monkeypatch.setattr("workers.engine.pace.AGAIN_S", 0.0)  # a slow machine, on any
    monkeypatch.setattr("workers.engine.cache.prefix_cache.PrefixCache._settle", lambda *_: False)
    with running(demo, slots=2, n_ctx=1024, ram_bytes=0) as bench:
        read: list[int] = []
        run = bench.engine._stepper._run

        def look(plan: Plan[Sequence], num_empty: int = 0) -> None:
            if any(chunk.sequence.num_predicted for chunk in plan.prefill) and (plan.decode or len(plan.prefill) > 1):
                read.append(plan.num_tokens)
            run(plan, num_empty)

        bench.engine._stepper._run = look  # type: ignore[method-assign]
        red = [bench.submit(endless(bench, "red", n, 600)) for n in range(2)]
        bench.heard.until(lambda: all(len(bench.heard.calls[key]) > 300 for key in red))
        for end in ENDS[:6]:
            bench.answer(of_team("blue", bench.request(end, 8, ignore_eos=True)))
        bench.wait(*red)
        assert sum(read) > 600
        assert max(read) <= 2 * ROWS_MULTIPLES[0]
        assert [bench.heard.finished(key).usage.completion_tokens for key in red] == [600] * 2


def test_teams_take_turns_in_one_slot(demo: Model) -> None:
    """Three endless answers: each goes on while the others do."""
    with running(demo, slots=1, n_ctx=512) as bench:
        alone = [bench.answer(changed(endless(bench, "red", n), cache_prompt=False)) for n in range(3)]
        keys = [bench.submit(endless(bench, team, n)) for n, team in enumerate(("red", "blue", "green"))]
        bench.wait(*keys)
        assert [bench.heard.text(key) for key in keys] == alone
        assert max(first_step(bench, key) for key in keys) < min(step_of_end(bench, key) for key in keys)
        assert bench.engine.counters.num_preempted == 0


def test_calls_of_one_team_are_never_sliced(demo: Model) -> None:
    with running(demo, slots=2, n_ctx=512) as bench:
        keys = [bench.submit(endless(bench, "red", n, 200)) for n in range(6)]
        bench.wait(*keys)
        assert bench.engine.counters.num_sliced == 0
        assert [bench.heard.finished(key).num_preempted for key in keys] == [0] * 6


def most_at_once(bench: Bench, team: str, beside: str) -> list[int]:
    """Slots that a team holds, in each step from now on in which another one holds some."""
    held: list[int] = [0]

    def look(step: int, events: object) -> None:
        teams = [one.team for one in bench.engine._stepper._scheduler.running]
        if beside in teams:
            held.append(teams.count(team))

    bench.heard.on_step = look
    return held


def test_shares_follow_weights(demo: Model) -> None:
    """Of four slots a team of weight 3 comes to have three."""
    with running(demo, slots=4, n_ctx=512) as bench:
        red = [bench.submit(endless(bench, "red", n)) for n in range(4)]
        all_begun(bench, red)
        held = most_at_once(bench, "blue", beside="red")
        blue = [bench.submit(endless(bench, "blue", n, 200, weight=3.0)) for n in range(4)]
        bench.wait(*blue, *red)
        assert max(held) == 3


def test_a_less_urgent_team_gets_one_slot_of_a_more_urgent_one(demo: Model) -> None:
    """Urgency is worth more than shares, and not everything."""
    with running(demo, slots=3, n_ctx=512) as bench:
        urgent = [bench.submit(endless(bench, "red", n, priority=8)) for n in range(3)]
        all_begun(bench, urgent)
        held = most_at_once(bench, "blue", beside="red")
        patient = [bench.submit(endless(bench, "blue", n, 50, priority=-8)) for n in range(2)]
        bench.wait(*patient)
        assert not any(bench.heard.has_ended(key) for key in urgent)
        assert max(held) == 1
        bench.wait(*urgent)


@pytest.mark.parametrize("kv_tokens", [2048, 512], ids=["idle", "in RAM"])
@pytest.mark.parametrize("tells_prompt", [False, True])
def test_a_prompt_that_is_not_cached_gives_way_while_it_is_read_and_loses_nothing(
    demo: Model, monkeypatch: pytest.MonkeyPatch, kv_tokens: int, tells_prompt: bool
) -> None:
    """`cache_prompt: false`, or `echo` with `logprobs`: in the only slot it kept others waiting until all was read."""
    monkeypatch.setattr("workers.engine.step.shares.SLICE_S", 0.0)
    llama = LlamaSettings(n_threads=1, n_batch=64, n_ubatch=64)
    with running(demo, slots=1, n_ctx=512, kv_tokens=kv_tokens, llama=llama) as bench:
        read: list[int] = []
        comes: list[int] = []
        blue = of_team("blue", bench.request([7] * 300, 8, ignore_eos=True))
        plain = bench.request([5, *range(300, 700)], 8)
        probed = changed(plain, n_probs=1, prompt_probs=1) if tells_prompt else plain
        asked = of_team("red", changed(probed, cache_prompt=False))
        alone = bench.submit(bench.again(asked))
        bench.wait(alone)
        run = bench.engine._stepper._run

        def look(plan: Plan[Sequence], num_empty: int = 0) -> None:
            mine = [chunk for chunk in plan.prefill if chunk.sequence.key == asked.key]
            read.extend(chunk.num_tokens for chunk in mine if not chunk.sequence.num_predicted)
            if len(read) == 2 and not comes:
                comes.append(bench.submit(blue))
            run(plan, num_empty)

        bench.engine._stepper._run = look  # type: ignore[method-assign]
        bench.submit(asked)
        bench.wait(asked.key, blue.key)
        assert first_step(bench, blue.key) < next(
            step
            for step, events in bench.heard.steps
            if any(e.call == asked.key and isinstance(e, Text) for e in events)
        )
        assert bench.heard.finished(asked.key).num_preempted > 0
        assert sum(read) == len(asked.prompt.tokens)
        assert bench.heard.text(asked.key) == bench.heard.text(alone)
        told = [[e for e in bench.heard.calls[key] if isinstance(e, PromptLogprobs)] for key in (alone, asked.key)]
        tokens = [[one[0].token for event in events for one in event.tokens] for events in told]
        assert tokens[0] == tokens[1] == (list(asked.prompt.tokens) if tells_prompt else [])
        index = bench.engine._stepper._cache.index
        assert not [node for node in index._all() if node.scope is not None and node.scope.own]
        again = of_team("red", changed(plain, key=1000))
        bench.answer(again)
        assert bench.heard.finished(again.key).usage.cached_tokens == 0, "nothing of it is kept once it is over"


@pytest.mark.parametrize("name", ["window", "recurrent", "hybrid"])
def test_memory_that_cant_be_cut_loses_nothing(small_models: dict[str, Path], name: str) -> None:
    with Model.load(small_models[name], ONE_THREAD) as model, running(model, slots=2, n_ctx=512) as bench:
        requests = [of_team("red", bench.request(list(range(5 + n, 45 + n)), 300, ignore_eos=True)) for n in range(2)]
        red = [bench.submit(request) for request in requests]
        all_begun(bench, red)
        blue = [bench.submit(of_team("blue", bench.request(list(range(9, 30)), 8, ignore_eos=True))) for _ in range(2)]
        bench.wait(*blue)
        assert not any(bench.heard.has_ended(key) for key in red)
        bench.wait(*red)
        assert [bench.heard.finished(key).usage.completion_tokens for key in red] == [300] * 2
        assert bench.engine.counters.num_sliced > 0


@pytest.mark.parametrize("stream_of", ["blue", "red"])
def test_a_burst_of_one_team_is_read_in_short_steps_beside_anothers_stream(
    demo: Model, monkeypatch: pytest.MonkeyPatch, stream_of: str
) -> None:
    """Within a team one caller's wait for a first token weighs as much as another's for the next one."""
    monkeypatch.setattr(PrefillPace, "gentle", GENTLE_TOKENS)  # as on a slow machine, whatever a step costs here
    with running(demo, slots=4, n_ctx=512) as bench:
        read: list[int] = []
        beside: list[int] = []  # while the stream runs: on a busy machine it may end first
        run = bench.engine._stepper._run

        def look(plan: Plan[Sequence], num_empty: int = 0) -> None:
            if plan.decode and plan.prefill:
                read.append(sum(chunk.num_tokens for chunk in plan.prefill))
                beside.extend([] if bench.heard.has_ended(stream) else read[-1:])
            run(plan, num_empty)

        bench.answer(bench.request([5] * 400, 1))  # what a token takes is known
        stream = bench.submit(of_team(stream_of, bench.request("Once", LONG, ignore_eos=True)))
        all_begun(bench, [stream])
        bench.engine._stepper._run = look  # type: ignore[method-assign]
        burst = [bench.submit(of_team("red", bench.request([300 + n] * 400, 2))) for n in range(3)]
        bench.wait(stream, *burst)
        assert sum(read) >= 3 * 400 - 3
        assert (max(beside) <= GENTLE_TOKENS) == (stream_of == "blue"), (beside, read)


@pytest.mark.parametrize("stream_of", ["blue", "red"])
def test_a_burst_is_read_in_short_steps_right_after_anothers_stream(
    demo: Model, monkeypatch: pytest.MonkeyPatch, stream_of: str
) -> None:
    """Its caller may ask again at once, and would wait for a whole micro-batch."""
    monkeypatch.setattr(PrefillPace, "gentle", GENTLE_TOKENS)  # as on a slow machine, whatever a step costs here
    monkeypatch.setattr("workers.engine.step.scheduler.LATELY_S", 60.0)
    with running(demo, slots=4, n_ctx=512) as bench:
        read: list[int] = []
        run = bench.engine._stepper._run

        def look(plan: Plan[Sequence], num_empty: int = 0) -> None:
            if not plan.decode:
                read.append(sum(chunk.num_tokens for chunk in plan.prefill))
            run(plan, num_empty)

        bench.answer(of_team("red", bench.request([5] * 400, 1)))  # what a token takes is known
        bench.wait(bench.submit(of_team(stream_of, bench.request("Once", 4, ignore_eos=True))))
        bench.engine._stepper._run = look  # type: ignore[method-assign]
        bench.wait(*[bench.submit(of_team("red", bench.request([300 + n] * 400, 1))) for n in range(3)])
        assert sum(read) >= 3 * 400 - 3
        assert (max(read) <= GENTLE_TOKENS) == (stream_of == "blue"), read


class Silent:
    """A mask that permits a few tokens, and then has no answer until it is told to go on."""

    is_done = False

    def __init__(self, num_tokens: int) -> None:
        self._num_left = num_tokens
        self.goes_on = threading.Event()
        self.asked = threading.Event()

    def forced(self) -> tuple[int, ...]:
        return ()

    def permits(self, token: int) -> bool:
        if not self._num_left and not self.goes_on.is_set():
            self.asked.set()
            raise MaskPending(self.goes_on.wait)
        return True

    def allowed(self) -> None:
        return None

    def accept(self, token: int) -> None:
        self._num_left = max(0, self._num_left - 1)


def test_a_call_whose_mask_was_silent_when_it_gave_way_goes_on(demo: Model) -> None:
    """It was neither asked again nor read again, and the engine went round it without rest until its caller left."""
    with running(demo, slots=1, n_ctx=512) as bench:
        alone = bench.answer(changed(endless(bench, "red", 0, 100), cache_prompt=False))
        mask = Silent(SLICE_TOKENS)
        red = bench.submit(changed(endless(bench, "red", 0, 100), mask=mask))
        assert mask.asked.wait(20)
        bench.answer(of_team("blue", bench.request(ENDS[1], 8, ignore_eos=True)))
        assert bench.engine.counters.num_sliced > 0
        mask.goes_on.set()
        bench.wait(red)
        assert bench.heard.text(red) == alone
