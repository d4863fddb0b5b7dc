"""Calls over a real engine: what a model thinks before its answer, and what calls are told that ask."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jsonschema
import pytest
from prometheus_client import CollectorRegistry

from tests.integration.engine.listener import ONE_THREAD
from tests.support.calls import generate_calls
from tests.support.tools import tool_of
from workers.chat.answers import Answers
from workers.chat.conversation import THINK
from workers.chat.prompts import Prompt, Prompts, Seen
from workers.chat.tools.json_calls import HERMES
from workers.constraint.compiler import Compiler
from workers.constraint.forks import Forks
from workers.constraint.gbnf import Trial
from workers.constraint.moving_mask import ForkedGrammars
from workers.constraint.tool_calls import CallForms
from workers.engine.counters import EngineCounters
from workers.engine.engine import Engine
from workers.llama.context import Context
from workers.llama.model import Model
from workers.metrics.worker import WorkerMetrics
from workers.protocol.events import (
    CallEvent,
    CallFailed,
    Finished,
    FinishReason,
    Progress,
    Reasoning,
    Started,
    Text,
    TimingsSoFar,
    Tokens,
    ToolCallDelta,
    decode_step,
)
from workers.protocol.framing import FrameReader
from workers.protocol.requests import Constraint, GenerateRequest, Message, Sampling, Submit, Thinking
from workers.service.calls.live_calls import Begun
from workers.service.calls.stream import Mailbox
from workers.service.lifecycle import Lifecycle

DEMO = Path(__file__).parents[3] / "deploy" / "demo" / "paddock-demo.gguf"
N_CTX = 512

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORM = Constraint("json_schema", json.dumps(PERSON))


class OpenThought(Prompts):
    """Every prompt ends in an open thought, as many models' templates have it."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def fitting(self, request: GenerateRequest, seen: Sequence[Seen] = ()) -> Prompt:
        content = request.messages[-1].content
        text = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n<think>\n"
        return Prompt(self._model.tokenize(text, add_special=False, parse_special=True), text)

    def num_public(self, request: GenerateRequest, tokens: Sequence[int]) -> int:
        return 0


@dataclass
class Said:
    """What one call came to."""

    events: list[CallEvent]
    begun: Begun

    @property
    def thought(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Reasoning))

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Text))

    @property
    def finished(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished), last
        return last


class Bench:
    """A worker without HTTP."""

    def __init__(self, model: Model, context: Context, compiler: Compiler) -> None:
        self.model = model
        life = Lifecycle()
        mailbox = Mailbox(asyncio.get_running_loop(), life.crashed)
        self.engine = Engine(model, context, slots=2, n_ctx=N_CTX, emit=mailbox.put)
        self.calls, _, hub = generate_calls(
            self.engine,
            OpenThought(model),
            WorkerMetrics(CollectorRegistry(), "m", self.engine.load, EngineCounters),
            Sampling(),
            compiler,
            Answers(replace(HERMES, thought=THINK), model.vocab),
            mailbox=mailbox,
            life=life,
        )
        self._feed = hub.attach("g", None)
        self._calls = 0

    async def say(self, **fields: object) -> Said:
        self._calls += 1
        messages = (Message("user", "Give me an example as JSON."),)
        request = GenerateRequest(**{"messages": messages, **fields})  # type: ignore[arg-type]
        begun = await self.calls.submit(Submit(gateway="g", call=self._calls, request=request, tenant="t"))
        async with asyncio.timeout(20):
            await self.calls.idle.wait()
        frames = FrameReader().feed(self._feed.take(1 << 20))
        return Said([event for frame in frames for event in decode_step(frame.data)], begun)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model.load(DEMO, ONE_THREAD) as one:
        yield one


@pytest.fixture(scope="module")
def compiler(model: Model) -> Iterator[Compiler]:
    with contextlib.closing(Forks(DEMO)) as processes:
        forms = CallForms(HERMES.syntax)
        forked = ForkedGrammars(processes, model.vocab)
        yield Compiler(model.vocab, forked, Trial(processes), forms, forked)


@pytest.fixture
async def bench(model: Model, compiler: Compiler) -> AsyncIterator[Bench]:
    with Context(model, ONE_THREAD, slots=2, kv_tokens=1024) as context:
        bench = Bench(model, context, compiler)
        bench.engine.start()
        yield bench
        bench.engine.check_integrity()
        await asyncio.to_thread(bench.engine.stop)


@pytest.mark.parametrize("budget", [0, 12])
async def test_a_model_thinks_within_its_budget_and_answers_in_the_form(bench: Bench, budget: int) -> None:
    said = await bench.say(
        constraint=FORM, thinking=Thinking(budget=budget), sampling=Sampling(seed=4), max_tokens=120, tell=("tokens",)
    )
    jsonschema.validate(json.loads(said.text), PERSON)
    tokens = [token for event in said.events if isinstance(event, Tokens) for token in event.tokens]
    closing = bench.model.tokenize("</think>", add_special=False, parse_special=True)
    begun = b"".join(map(bench.model.vocab.special_piece, tokens[: budget + len(closing)])).decode()
    assert begun.split("</think>")[0].strip() == said.thought.strip()
    assert "</think>" in begun
    assert bool(said.thought) is bool(budget)
    assert "think>" not in said.thought + said.text
    assert said.finished.reason is FinishReason.STOP
    assert said.finished.usage.completion_tokens == len(tokens)


@pytest.mark.parametrize("budget", [0, 6])
@pytest.mark.parametrize("constraint", [None, FORM])
async def test_a_message_comes_before_the_thought_is_closed_at_its_budget(
    bench: Bench, budget: int, constraint: Constraint | None
) -> None:
    thinking = Thinking(budget=budget, message="\nThat is enough.\n")
    said = await bench.say(constraint=constraint, thinking=thinking, sampling=Sampling(seed=4), max_tokens=120)
    assert said.thought.strip().endswith("That is enough.")
    assert bool(said.thought.strip().removesuffix("That is enough.")) is bool(budget)
    assert "think>" not in said.thought + said.text
    if constraint is not None:
        jsonschema.validate(json.loads(said.text), PERSON)


async def test_a_message_that_would_end_the_thought_is_refused(bench: Bench) -> None:
    with pytest.raises(CallFailed) as caught:
        await bench.say(thinking=Thinking(budget=6, message="So </think> there"))
    assert caught.value.failure.param == "reasoning_budget_message"


async def test_a_forced_call_comes_after_the_thought(bench: Bench) -> None:
    tool = tool_of("f", None, {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}})
    said = await bench.say(
        tools=(tool,),
        forced_tools=("f",),
        parallel_tool_calls=False,
        thinking=Thinking(budget=6),
        sampling=Sampling(seed=4),
        max_tokens=120,
    )
    calls = [event for event in said.events if isinstance(event, ToolCallDelta)]
    assert said.thought
    assert calls[0].name == "f"
    json.loads("".join(call.arguments for call in calls))
    assert said.finished.reason is FinishReason.TOOL_CALLS


async def test_a_call_is_told_all_that_it_asks_for_in_order(bench: Bench) -> None:
    said = await bench.say(
        tell=("progress", "timings", "tokens", "settings"), thinking=Thinking(budget=8), max_tokens=30
    )
    kinds = [type(event) for event in said.events]
    assert kinds[:3] == [Started, Progress, Progress]
    assert kinds.count(Tokens) == said.finished.usage.completion_tokens
    assert TimingsSoFar in kinds
    settings = said.begun
    assert settings.sampling is not None
    assert settings.prompt.endswith("<|im_start|>assistant\n<think>\n")
    assert None not in [getattr(settings.sampling, name) for name in Sampling.__struct_fields__]


async def test_the_seed_that_is_told_says_the_same_again(bench: Bench) -> None:
    """The cache is left out, so that every time the same cells are computed."""
    hot = Sampling(temperature=4.0, top_k=0, top_p=1.0, min_p=0.0)
    first = await bench.say(tell=("settings",), sampling=hot, max_tokens=30, cache_prompt=False)
    settings = first.begun
    assert settings.sampling is not None
    again = await bench.say(sampling=settings.sampling, max_tokens=30, cache_prompt=False)
    other = await bench.say(sampling=hot, max_tokens=30, cache_prompt=False)
    assert (again.thought, again.text) == (first.thought, first.text)
    assert (other.thought, other.text) != (first.thought, first.text)


async def test_a_warm_up_says_nothing_and_warms(bench: Bench) -> None:
    warm = await bench.say(max_tokens=0)
    assert [type(event) for event in warm.events] == [Started, Finished]
    assert (warm.finished.reason, warm.finished.usage.completion_tokens) == (FinishReason.LENGTH, 0)
    said = await bench.say(max_tokens=3)
    assert said.finished.usage.cached_tokens == said.finished.usage.prompt_tokens - 1


async def test_stop_strings_are_looked_for_in_thoughts_too(bench: Bench) -> None:
    """As llama-server does: in the text as the model writes it."""
    greedy = Sampling(temperature=0)
    whole = await bench.say(sampling=greedy, max_tokens=20)
    stop = whole.thought.strip()[4:8]
    said = await bench.say(sampling=greedy, max_tokens=20, stop=(stop,))
    assert said.thought.strip() == whole.thought.strip()[: whole.thought.strip().index(stop)].strip()
    assert (said.finished.reason, said.finished.stop) == (FinishReason.STOP, stop)
