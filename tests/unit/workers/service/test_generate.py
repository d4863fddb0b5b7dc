from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from prometheus_client import CollectorRegistry

from tests.support.calls import generate_calls
from tests.support.scrape import page_of
from tests.support.waiting import until
from workers.chat.answers import Answers
from workers.chat.prompts import SHORT_CHARS, Prompts, Seen
from workers.chat.template import ChatTemplate
from workers.engine.counters import EngineCounters
from workers.engine.request import EngineLoad, EngineRequest
from workers.metrics.worker import WorkerMetrics
from workers.protocol.events import (
    CallEvent,
    CallFailed,
    Failed,
    Failure,
    FailureCode,
    Finished,
    FinishReason,
    Logprobs,
    Started,
    Text,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    Usage,
    decode_step,
)
from workers.protocol.framing import FrameReader
from workers.protocol.requests import Cancel, GenerateRequest, Medium, Message, Sampling, Submit, Tool
from workers.service.calls.call_record import CallRecords
from workers.service.calls.generate import Constraints
from workers.service.calls.live_calls import Begun
from workers.service.lifecycle import Lifecycle

USAGE = Usage(prompt_tokens=4, completion_tokens=3, cached_tokens=1)
TIMINGS = Timings(cache_n=1, prompt_n=3, prompt_ms=2.0, predicted_n=3, predicted_ms=5.0)


class RecordingEngine:
    """Takes everything, says nothing by itself."""

    n_ctx = 512

    def __init__(self) -> None:
        self.taken: list[EngineRequest] = []
        self.cancelled: list[int] = []
        self.ended: list[tuple[int, int]] = []
        self.refusal: Failure | None = None
        self.before: Callable[[], None] = lambda: None

    def submit(self, request: EngineRequest) -> None:
        self.before()
        if self.refusal is not None:
            raise CallFailed(self.refusal)
        self.taken.append(request)

    def cancel(self, key: int) -> None:
        self.cancelled.append(key)

    def end(self, key: int, num_tokens: int) -> None:
        self.ended.append((key, num_tokens))


class WordTokenizer:
    """One token per word. `before` runs on the thread that tokenises."""

    def __init__(self) -> None:
        self.before: Callable[[], None] = lambda: None

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool, most: int | None = None) -> Sequence[int]:
        self.before()
        return [len(word) for word in text.split()]


class Bench:
    def __init__(self, defaults: Sampling | None = None) -> None:
        self.engine = RecordingEngine()
        self.tokenizer = WordTokenizer()
        self.metrics = WorkerMetrics(CollectorRegistry(), "m", lambda: EngineLoad(4, 1, 2, 100, 25), EngineCounters)
        self.prompts = Prompts(ChatTemplate("{{ messages[0].content }} {{ tools }}"), self.tokenizer, num_tokens=9)
        self.life = Lifecycle()
        self.wire(defaults)

    def wire(
        self,
        defaults: Sampling | None = None,
        constraints: Constraints | None = None,
        answers: Answers | None = None,
        *,
        grace_s: float = 60.0,
        records: CallRecords | None = None,
    ) -> None:
        """Make calls anew, with their hub, to which both gateways are connected."""
        self.calls, self.delivery, self.hub = generate_calls(
            self.engine,
            self.prompts,
            self.metrics,
            defaults,
            constraints,
            answers,
            life=self.life,
            grace_s=grace_s,
            records=records,
        )
        self.feeds = {name: self.hub.attach(name, None) for name in ("g", "h")}

    def sent(self, gateway: str = "g") -> list[CallEvent]:
        frames = FrameReader().feed(self.feeds[gateway].take(1 << 20))
        return [event for frame in frames for event in decode_step(frame.data)]


def submit(call: int = 1, gateway: str = "g", content: str = "one two three", **fields: object) -> Submit:
    request = GenerateRequest(messages=(Message("user", content),), **fields)  # type: ignore[arg-type]
    return Submit(gateway=gateway, call=call, request=request, tenant="t", request_id=f"req-{call}")


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.hub.check_integrity()


async def refused(bench: Bench, message: Submit) -> Failure:
    with pytest.raises(CallFailed) as caught:
        await bench.calls.submit(message)
    return caught.value.failure


async def test_a_call_from_submit_to_its_end(bench: Bench) -> None:
    assert await bench.calls.submit(submit(7, max_tokens=5, stop=("x",), ignore_eos=True)) == Begun(4)
    [request] = bench.engine.taken
    assert (list(request.prompt.tokens), request.asked.max_tokens, request.asked.stop) == ([3, 3, 5, 4], 5, ("x",))
    assert (request.asked.ignore_eos, request.label) == (True, "req-7")
    key = request.key
    bench.delivery.deliver(1, [Started(key, 2, 4, 1), Text(key, "Hel")])
    bench.delivery.deliver(2, [Text(key, "lo", 2), Finished(key, FinishReason.STOP, USAGE, TIMINGS, "x")])
    assert bench.sent() == [
        Started(7, 2, 4, 1),
        Text(7, "Hel"),
        Text(7, "lo", 2),
        Finished(7, FinishReason.STOP, USAGE, TIMINGS, "x"),
    ]
    assert bench.calls.num_calls == 0
    assert bench.calls.idle.is_set()


async def test_calls_of_two_gateways_with_the_same_number_do_not_meet(bench: Bench) -> None:
    await bench.calls.submit(submit(1, "g"))
    await bench.calls.submit(submit(1, "h"))
    first, second = (request.key for request in bench.engine.taken)
    bench.delivery.deliver(1, [Text(first, "for g"), Text(second, "for h")])
    assert (bench.sent("g"), bench.sent("h")) == ([Text(1, "for g")], [Text(1, "for h")])


async def test_repeating_a_submit_changes_nothing_while_the_call_lives(bench: Bench) -> None:
    counts = await asyncio.gather(*(bench.calls.submit(submit(1)) for _ in range(3)))
    assert (counts, len(bench.engine.taken)) == ([Begun(4)] * 3, 1)
    bench.life.draining = True
    assert await bench.calls.submit(submit(1)) == Begun(4)


async def test_repeating_a_submit_that_is_being_prepared_waits_for_it(bench: Bench) -> None:
    long = "word " * SHORT_CHARS
    counts = await asyncio.gather(*(bench.calls.submit(submit(1, content=long)) for _ in range(3)))
    assert counts == [Begun(SHORT_CHARS + 1)] * 3
    assert len(bench.engine.taken) == 1


async def test_a_refused_call_leaves_nothing_behind_and_may_come_again(bench: Bench) -> None:
    bench.engine.refusal = Failure(FailureCode.BUSY, "full")
    assert await refused(bench, submit(1)) == bench.engine.refusal
    assert bench.calls.idle.is_set()
    bench.engine.refusal = None
    assert await bench.calls.submit(submit(1)) == Begun(4)


async def test_an_unexpected_error_frees_the_call(bench: Bench) -> None:
    def fail() -> None:
        raise RuntimeError("bug")

    bench.tokenizer.before = fail
    with pytest.raises(RuntimeError):
        await bench.calls.submit(submit(1))
    assert bench.calls.idle.is_set()
    assert bench.hub.find("g", 1) is None


async def test_empty_messages_are_the_callers_error(bench: Bench) -> None:
    message = Submit(gateway="g", call=1, request=GenerateRequest(messages=()), tenant="t")
    failure = await refused(bench, message)
    assert (failure.code, failure.param) == (FailureCode.INVALID_REQUEST, "messages")


async def test_a_draining_worker_takes_nothing_new(bench: Bench) -> None:
    bench.life.draining = True
    assert (await refused(bench, submit(1))).code is FailureCode.DRAINING


async def test_a_cancelled_call_says_nothing_more(bench: Bench) -> None:
    await bench.calls.submit(submit(1))
    await bench.calls.submit(submit(2))
    one, two = (request.key for request in bench.engine.taken)
    bench.calls.cancel(Cancel("g", (1, 99)))
    assert bench.engine.cancelled == [one]
    bench.delivery.deliver(1, [Text(one, "late"), Text(two, "on")])
    bench.delivery.deliver(2, [Text(one, "later")])
    assert bench.sent() == [Text(2, "on")]
    bench.calls.cancel(Cancel("h", (2,)))
    assert bench.engine.cancelled == [one], "another gateway's numbers are its own"


async def test_a_cancel_that_overtakes_its_submit_still_counts(bench: Bench) -> None:
    bench.calls.cancel(Cancel("g", (1,)))
    assert "cancelled" in (await refused(bench, submit(1))).message
    assert bench.engine.taken == []


async def test_a_cancel_while_the_prompt_is_prepared(bench: Bench) -> None:
    loop = asyncio.get_running_loop()
    bench.tokenizer.before = lambda: asyncio.run_coroutine_threadsafe(cancel(), loop).result(5)

    async def cancel() -> None:
        bench.calls.cancel(Cancel("g", (1,)))

    failure = await refused(bench, submit(1, content="word " * SHORT_CHARS))
    assert "cancelled" in failure.message
    assert (bench.engine.taken, bench.calls.idle.is_set()) == ([], True)


async def test_tool_calls_are_found_where_tools_were_offered(bench: Bench) -> None:
    text = 'Ok <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    await bench.calls.submit(submit(1, tools=(Tool("f"),)))
    await bench.calls.submit(submit(2))
    one, two = (request.key for request in bench.engine.taken)
    for step, character in enumerate(text, 1):
        bench.delivery.deliver(step, [Text(one, character)])
    bench.delivery.deliver(100, [Text(two, text)])
    bench.delivery.deliver(101, [Finished(key, FinishReason.STOP, USAGE, TIMINGS) for key in (one, two)])
    sent = bench.sent()
    mine = [event for event in sent if event.call == 1]
    deltas = [event for event in mine if isinstance(event, ToolCallDelta)]
    assert "".join(event.text for event in mine if isinstance(event, Text)) == "Ok "
    assert (deltas[0].name, deltas[0].id[:5]) == ("f", "call_")
    assert "".join(event.arguments for event in deltas) == '{"a": 1}'
    assert isinstance(mine[-1], Finished)
    assert mine[-1].reason is FinishReason.TOOL_CALLS
    counted = sum(event.num_tokens for event in mine if isinstance(event, Text | ToolCallDelta))
    assert counted == len(text) - len("}</tool_call>"), "held-back tokens are credited to the next piece"
    others = [event for event in sent if event.call == 2]
    assert others == [Text(2, text), Finished(2, FinishReason.STOP, USAGE, TIMINGS)], "no tools, no parser"


async def test_what_a_parser_held_back_comes_before_the_end(bench: Bench) -> None:
    await bench.calls.submit(submit(1, tools=(Tool("f"),)))
    key = bench.engine.taken[0].key
    bench.delivery.deliver(1, [Text(key, "a <to")])
    bench.delivery.deliver(2, [Finished(key, FinishReason.LENGTH, USAGE, TIMINGS)])
    end = Finished(1, FinishReason.LENGTH, USAGE, TIMINGS)
    assert bench.sent() == [Text(1, "a "), Text(1, "<to", 0), end]


async def test_defaults_fill_what_the_caller_leaves_open() -> None:
    bench = Bench(Sampling(temperature=0.3, top_k=5))
    await bench.calls.submit(submit(1, sampling=Sampling(temperature=0.0, seed=1)))
    assert bench.engine.taken[0].sampling == Sampling(temperature=0.0, top_k=5, seed=1)


async def test_failing_all_ends_every_call_in_stream(bench: Bench) -> None:
    await bench.calls.submit(submit(1, tools=(Tool("f"),)))
    await bench.calls.submit(submit(2))
    one, two = (request.key for request in bench.engine.taken)
    bench.delivery.deliver(5, [Text(one, "<to")])
    failure = Failure(FailureCode.INTERNAL, "the engine is gone")
    bench.calls.end_all(lambda: failure)
    assert bench.sent() == [Text(1, "<to", 1), Failed(1, failure), Failed(2, failure)]
    assert sorted(bench.engine.cancelled) == [one, two]
    assert bench.calls.idle.is_set()


async def test_a_lost_gateways_calls_are_cancelled() -> None:
    bench = Bench()
    bench.wire(grace_s=0.02)
    await bench.calls.submit(submit(1, "away"))
    await asyncio.wait_for(bench.calls.idle.wait(), 1)
    assert bench.engine.cancelled == [bench.engine.taken[0].key]


async def test_metrics_count_what_happened(bench: Bench) -> None:
    await bench.calls.submit(submit(1))
    key = bench.engine.taken[0].key
    bench.delivery.deliver(1, [Started(key, 0, 4, 1), Text(key, "a"), Text(key, "b", 2)])
    bench.delivery.deliver(2, [Finished(key, FinishReason.LENGTH, USAGE, TIMINGS)])
    lines = page_of(bench.metrics.registry).splitlines()
    labels = '{model_name="m"}'
    for line in (
        f"llamacpp:prompt_tokens_total{labels} 3.0",
        f"llamacpp:prompt_tokens_cached_total{labels} 1.0",
        f"llamacpp:tokens_predicted_total{labels} 3.0",
        f"llamacpp:requests_processing{labels} 1.0",
        f"llamacpp:requests_deferred{labels} 2.0",
        f"llamacpp:kv_cache_usage_ratio{labels} 0.25",
        f"vllm:prompt_tokens_total{labels} 4.0",
        f"vllm:generation_tokens_total{labels} 3.0",
        f"vllm:num_requests_waiting{labels} 2.0",
        f"vllm:kv_cache_usage_perc{labels} 0.25",
        f"vllm:time_to_first_token_seconds_count{labels} 1.0",
        f"vllm:e2e_request_latency_seconds_count{labels} 1.0",
        f"vllm:request_decode_time_seconds_sum{labels} 0.005",
        'vllm:request_success_total{finished_reason="length",model_name="m"} 1.0',
    ):
        assert line in lines


async def test_everything_that_a_call_asks_for_reaches_the_engine(bench: Bench) -> None:
    asked = GenerateRequest(
        messages=(Message("user", "hi"),),
        cache_salt="mine",
        cache_prompt=False,
        priority=7,
        context_shift=True,
        n_keep=-1,
        n_probs=5,
        post_sampling_probs=True,
        special=True,
    )
    await bench.calls.submit(Submit(gateway="g", call=1, request=asked, tenant="t", deadline=time.time() + 5))
    [request] = bench.engine.taken
    assert (request.tenant, request.asked) == ("t", asked)
    assert request.deadline == pytest.approx(time.monotonic() + 5, abs=1)


async def test_a_call_that_asks_for_nothing_special(bench: Bench) -> None:
    await bench.calls.submit(submit())
    [request] = bench.engine.taken
    assert request == EngineRequest(
        request.key, submit().request, request.prompt, Sampling(), label="req-1", tenant="t"
    )
    assert request.deadline == math.inf


async def test_log_probabilities_carry_the_callers_number(bench: Bench) -> None:
    await bench.calls.submit(submit(7))
    key = bench.engine.taken[0].key
    said = Logprobs(key, TokenLogprob(3, b"\xc3", -0.5), (TokenLogprob(3, b"\xc3", -0.5), TokenLogprob(4, b"x", -2.0)))
    bench.delivery.deliver(1, [Started(key, 2, 4, 1), said, Text(key, "Hel")])
    assert bench.sent()[1:] == [Logprobs(7, said.chosen, said.top), Text(7, "Hel")]


async def test_a_prompt_as_text_or_tokens_needs_no_messages(bench: Bench) -> None:
    for prompt, tokens in (("one three", [3, 5]), ((1, 0, 8), [1, 0, 8])):
        message = Submit(gateway="g", call=len(tokens), request=GenerateRequest(prompt=prompt), tenant="t")
        assert await bench.calls.submit(message) == Begun(len(tokens))
        assert list(bench.engine.taken[-1].prompt.tokens) == tokens


@pytest.mark.parametrize("token", [-1, 9])
async def test_tokens_that_the_model_lacks_are_refused(bench: Bench, token: int) -> None:
    message = Submit(gateway="g", call=1, request=GenerateRequest(prompt=(1, token)), tenant="t")
    failure = await refused(bench, message)
    assert (failure.code, failure.param) == (FailureCode.INVALID_REQUEST, "prompt")
    assert f"token {token} at position 1" in failure.message
    assert "0 to 8" in failure.message


async def test_a_dry_sampler_is_made_off_the_loop(bench: Bench) -> None:
    threads: list[threading.Thread] = []
    bench.engine.before = lambda: threads.append(threading.current_thread())
    await bench.calls.submit(submit(1))
    await bench.calls.submit(submit(2, sampling=Sampling(dry_multiplier=0.8)))
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


async def test_a_cancel_while_the_sampler_is_made_ends_the_call(bench: Bench) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go_on.wait(10)

    bench.engine.before = wait
    waiting = asyncio.create_task(bench.calls.submit(submit(1, sampling=Sampling(dry_multiplier=0.8))))
    await asyncio.to_thread(begun.wait, 10)
    bench.calls.cancel(Cancel("g", (1,)))
    go_on.set()
    with pytest.raises(CallFailed, match="cancelled"):
        await waiting
    await until(lambda: len(bench.engine.taken) == 1, 10, "the thread goes on without its caller")
    await until(lambda: bench.engine.cancelled[-1:] == [bench.engine.taken[0].key], 10, "what it handed over is ended")
    assert bench.calls.num_calls == 0


class ManyCells:
    """A reader to whom each picture is 300 tokens."""

    def __init__(self) -> None:
        self.num_read = 0

    def read(self, medium: Medium) -> Seen:
        self.num_read += 1
        return [[1] * 300]


async def test_pictures_that_are_too_long_alone_are_not_all_read() -> None:
    bench, reader = Bench(), ManyCells()
    bench.prompts = Prompts(ChatTemplate("{{ messages[0].content }}"), bench.tokenizer, num_tokens=9, media=reader)
    bench.wire()
    message = Message("user", "look", media=(0,) * 8)
    request = GenerateRequest(messages=(message,), media=(Medium("picture", b"A"),) * 8)
    with pytest.raises(CallFailed, match="600 tokens") as refused:
        await bench.calls.submit(Submit(gateway="g", call=1, request_id="r", tenant="t", request=request))
    assert refused.value.failure.code is FailureCode.CONTEXT_OVERFLOW
    assert reader.num_read == 2
