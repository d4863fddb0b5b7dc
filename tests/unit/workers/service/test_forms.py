"""Forms that take long to compile, before a call begins: teams take turns, and what a caller left behind is dropped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from tests.unit.workers.service.test_generate import Bench, submit
from workers.chat.answers import Answers
from workers.constraint.thought import Thought
from workers.engine.request import TokenMask
from workers.protocol.events import CallFailed, Finished, FinishReason, Started, Timings, Usage
from workers.protocol.requests import Cancel, Constraint, GenerateRequest, Sampling, Submit
from workers.service.calls import generate
from workers.service.calls.live_calls import Begun


class SlowForms:
    """Forms named `slow` wait until they may go on."""

    counts = {"compiled": 0, "reused": 0, "refused": 0}  # noqa: RUF012 - the protocol's own attribute

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.began, self.open = threading.Event(), threading.Event()

    def answer_mask(self, request: GenerateRequest, thought: Thought | None = None) -> TokenMask | None:
        assert request.constraint is not None
        self.seen.append(request.constraint.text)
        if request.constraint.text == "slow":
            self.began.set()
            assert self.open.wait(20)
        return None


class FormBench(Bench):
    def __init__(self) -> None:
        super().__init__()
        self.forms = SlowForms()
        self.wire(constraints=self.forms)


def asking(call: int, form: str, tenant: str) -> Submit:
    return replace(submit(call, constraint=Constraint("regex", form)), tenant=tenant)


async def test_callers_who_leave_with_slow_forms_do_not_hold_up_another_team() -> None:
    bench = FormBench()
    crowd = [asyncio.create_task(bench.calls.submit(asking(n, "slow", "crowd"))) for n in range(1, 9)]
    await asyncio.to_thread(bench.forms.began.wait, 20)
    bench.calls.cancel(Cancel(gateway="g", calls=tuple(range(1, 9))))
    async with asyncio.timeout(10):
        for outcome in await asyncio.gather(*crowd, return_exceptions=True):
            assert isinstance(outcome, CallFailed)
        assert await bench.calls.submit(asking(9, "quick", "other")) == Begun(4)
    # A team has all threads but one; what waited for them behind those that left was never compiled.
    assert bench.forms.seen[-1] == "quick"
    assert bench.forms.seen.count("slow") < 3
    bench.forms.open.set()
    assert [request.tenant for request in bench.engine.taken] == ["other"]
    bench.hub.check_integrity()


@pytest.mark.parametrize("sampling", [Sampling(dry_multiplier=1.0), Sampling(logit_bias=(("text", 1.0),))])
async def test_a_sampler_that_takes_long_is_made_off_the_event_loop(sampling: Sampling) -> None:
    bench = FormBench()
    threads: list[str] = []
    bench.engine.before = lambda: threads.append(threading.current_thread().name)
    await bench.calls.submit(submit(1, sampling=sampling))
    await bench.calls.submit(submit(2))
    assert threads[0] != threading.main_thread().name
    assert threads[1] == threading.main_thread().name


async def test_what_a_chat_says_of_its_answer_is_read_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Template values and schemas of tools can have megabytes, which each answer's parser and thought depend on."""
    threads: list[str] = []

    def noted(self: Answers, request: GenerateRequest, prompt: Sequence[int]) -> None:
        threads.append(threading.current_thread().name)

    monkeypatch.setattr(Answers, "parser", noted)
    monkeypatch.setattr(generate, "thought_before", lambda *asked: noted(asked[2], asked[0], asked[1]))
    bench = FormBench()
    await bench.calls.submit(submit(1))
    assert len(threads) == 2
    assert threading.main_thread().name not in threads


async def test_stop_strings_whose_tree_takes_long_are_prepared_off_the_event_loop() -> None:
    bench = FormBench()
    threads: list[str] = []
    bench.engine.before = lambda: threads.append(threading.current_thread().name)
    await bench.calls.submit(submit(1, stop=tuple(f"{number:064}" for number in range(128))))
    await bench.calls.submit(submit(2, stop=("\n\n", "User:")))
    assert threads[0] != threading.main_thread().name
    assert threads[1] == threading.main_thread().name


async def test_an_answer_that_ends_before_its_submit_comes_back_was_taken() -> None:
    """A thread submits it; the engine may be done with one token before the event loop hears of the submit's end."""
    bench = FormBench()
    loop, told = asyncio.get_running_loop(), threading.Event()

    def answer() -> None:
        [key] = bench.delivery._calls.keys
        usage, timings = Usage(4, 1, 0), Timings(cache_n=0, prompt_n=4, prompt_ms=1.0, predicted_n=1, predicted_ms=1.0)
        bench.delivery.deliver(1, [Started(key, 0, 4, 0), Finished(key, FinishReason.LENGTH, usage, timings)])
        told.set()

    def before() -> None:
        loop.call_soon_threadsafe(answer)
        assert told.wait(20)

    bench.engine.before = before
    assert await bench.calls.submit(submit(1, sampling=Sampling(dry_multiplier=1.0))) == Begun(4)
    assert [type(event) for event in bench.sent()] == [Started, Finished]
