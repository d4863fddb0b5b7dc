"""Calls that ask for more than text, and of models that think."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import msgspec
import pytest

from tests.support.scrape import page_of
from tests.unit.workers.service.test_generate import TIMINGS, USAGE, Bench, RecordingEngine, refused, submit
from workers.chat.answers import Answers
from workers.chat.conversation import THINK
from workers.chat.prompts import Prompts
from workers.chat.template import ChatTemplate
from workers.chat.tools.json_calls import HERMES
from workers.constraint.thought import Thought
from workers.engine.request import TokenMask
from workers.llama.sampling.stages import settled
from workers.protocol.events import (
    CallEvent,
    FailureCode,
    Finished,
    FinishReason,
    Logprobs,
    Progress,
    Reasoning,
    Started,
    Text,
    TimingsSoFar,
    TokenLogprob,
    Tokens,
)
from workers.protocol.requests import Constraint, GenerateRequest, Sampling, Thinking, Tool


class Words:
    """Tokens are the lengths of words; seven letters are `<think>`."""

    eog = frozenset({0})

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool, most: int | None = None) -> Sequence[int]:
        return [len(text), 0]

    def piece(self, token: int) -> bytes:
        return b""

    def special_piece(self, token: int) -> bytes:
        return b"<think>" if token == 7 else b"w" * token + b" "


class RecordingConstraints:
    counts: dict[str, int] = {}  # noqa: RUF012 - never written to

    def __init__(self) -> None:
        self.asked: list[Thought | None] = []

    def answer_mask(self, request: GenerateRequest, thought: Thought | None = None) -> TokenMask | None:
        self.asked.append(thought)
        return None


class ThinkingBench(Bench):
    """A model that thinks."""

    def __init__(self, defaults: Sampling | None = None) -> None:
        super().__init__(defaults)
        self.constraints = RecordingConstraints()
        self.prompts = Prompts(ChatTemplate("{{ messages[0].content }}"), self.tokenizer, num_tokens=9)
        self.wire(defaults, self.constraints, Answers(replace(HERMES, thought=THINK), Words()))


@pytest.fixture
async def bench() -> AsyncIterator[ThinkingBench]:
    bench = ThinkingBench(Sampling(top_k=5))
    yield bench
    bench.hub.check_integrity()


async def test_what_a_call_is_to_be_told_reaches_the_engine(bench: ThinkingBench) -> None:
    await bench.calls.submit(submit(1, tell=("tokens", "progress"), max_predict_ms=250, slot=3, max_tokens=0))
    [request] = bench.engine.taken
    assert (request.asked.tell, request.asked.max_predict_ms) == (("tokens", "progress"), 250)
    assert (request.asked.slot, request.asked.max_tokens) == (3, 0)


async def test_settings_answer_the_submit_and_are_those_of_the_engine(bench: ThinkingBench) -> None:
    told = ("settings",)
    settings = await bench.calls.submit(submit(3, content="one two", tell=told, sampling=Sampling(temperature=0.2)))
    other = await bench.calls.submit(submit(4, tell=told, sampling=Sampling(seed=0xFFFFFFFF, repeat_last_n=-1)))
    first, second = bench.engine.taken
    bench.delivery.deliver(1, [Started(first.key, 0, 3, 0), Text(first.key, "Hi"), Started(second.key, 1, 4, 0)])
    assert [type(event) for event in bench.sent()] == [Started, Text, Started]
    assert (settings.num_prompt_tokens, settings.prompt) == (2, "www www ")
    assert other.sampling is not None
    assert first.sampling.seed is not None
    assert settings.sampling == settled(
        Sampling(temperature=0.2, top_k=5, seed=first.sampling.seed), RecordingEngine.n_ctx
    )
    assert (other.sampling.seed, other.sampling.repeat_last_n, other.sampling.min_p) == (
        0xFFFFFFFE,
        RecordingEngine.n_ctx,
        0.05,
    )


async def test_nobody_draws_a_seed_for_a_call_that_does_not_ask(bench: ThinkingBench) -> None:
    await bench.calls.submit(submit(1))
    assert bench.engine.taken[0].sampling.seed is None
    assert bench.constraints.asked == []


async def test_notices_carry_the_callers_number_and_keep_their_place(bench: ThinkingBench) -> None:
    """The parser holds text back; what is told of its tokens does not wait for it, and so comes before it."""
    await bench.calls.submit(submit(9, tools=(Tool("f"),), n_probs=1))
    key = bench.engine.taken[0].key
    chosen = TokenLogprob(3, b"a", -0.5)
    events: list[CallEvent] = [Started(key, 0, 4, 0), Progress(key, 4, 0, 4, 12)]
    pieces = ["Hm", "</think>", "a <tool", "_call>", '{"name": "f", "arguments": {', "}}", "</tool_call>"]
    for number, piece in enumerate(pieces):
        events += [
            Logprobs(key, chosen, ()),
            Tokens(key, (number,)),
            TimingsSoFar(key, TIMINGS),
            Text(key, piece),
        ]
    for step, event in enumerate(events, 1):
        bench.delivery.deliver(step, [event])
    bench.delivery.deliver(100, [Finished(key, FinishReason.STOP, USAGE, TIMINGS, truncated=True)])
    sent = bench.sent()
    assert {event.call for event in sent} == {9}
    assert sent[1] == Progress(9, 4, 0, 4, 12)
    assert [event.tokens for event in sent if isinstance(event, Tokens)] == [(n,) for n in range(len(pieces))]
    assert sum(isinstance(event, Logprobs) for event in sent) == len(pieces)
    assert TimingsSoFar(9, TIMINGS) in sent
    told = 0
    credited = 0
    for event in sent:
        told += isinstance(event, Logprobs)
        credited += getattr(event, "num_tokens", 0)
        assert credited <= told, "no text before what is told of its tokens"
    assert isinstance(sent[-1], Finished)
    assert (sent[-1].reason, sent[-1].truncated) == (FinishReason.TOOL_CALLS, True)


async def test_thought_counts_as_text_does(bench: ThinkingBench) -> None:
    """And the first token is the first of either."""
    await bench.calls.submit(submit(1, content="a <think>"))
    key = bench.engine.taken[0].key
    bench.delivery.deliver(1, [Started(key, 0, 4, 0), Text(key, "Let", 2)])
    rendered = page_of(bench.metrics.registry)
    assert 'vllm:time_to_first_token_seconds_count{model_name="m"} 1.0' in rendered
    bench.delivery.deliver(2, [Text(key, " me see</think>", 3), Text(key, "Yes", 1)])
    bench.delivery.deliver(3, [Finished(key, FinishReason.STOP, USAGE, TIMINGS)])
    sent = bench.sent()
    thought = [event for event in sent if isinstance(event, Reasoning)]
    said = [event for event in sent if isinstance(event, Text)]
    assert "".join(event.text for event in thought) == "Let me see"
    assert "".join(event.text for event in said) == "Yes"
    assert sum(event.num_tokens for event in thought) + sum(event.num_tokens for event in said) == 6
    rendered = page_of(bench.metrics.registry)
    assert 'vllm:time_to_first_token_seconds_count{model_name="m"} 1.0' in rendered
    assert 'llamacpp:tokens_predicted_total{model_name="m"} 6.0' in rendered


FORM = Constraint("regex", "[0-9]+")
OPEN = "a <think>"
CLOSED = "a question"


@pytest.mark.parametrize(
    ("content", "fields", "expected"),
    [
        (OPEN, {"constraint": FORM}, Thought("<think>", "</think>", "</think>", is_open=True)),
        (CLOSED, {"constraint": FORM}, Thought("<think>", "</think>", "</think>")),
        (CLOSED, {"tools": (Tool("f", strict=True),)}, Thought("<think>", "</think>", "</think>")),
        (OPEN, {"thinking": Thinking(budget=0)}, Thought("<think>", "</think>", "</think>", is_open=True, budget=0)),
        (CLOSED, {"thinking": Thinking(budget=9)}, Thought("<think>", "</think>", "</think>", budget=9)),
        (CLOSED, {"thinking": Thinking(enabled=False), "constraint": FORM}, None),
        (CLOSED, {"thinking": Thinking(effort="none"), "constraint": FORM}, None),
        (
            OPEN,
            {"thinking": Thinking(enabled=False), "constraint": FORM},
            Thought("<think>", "</think>", "</think>", is_open=True),
        ),
        ("", {"prompt": "a <think>", "constraint": FORM}, None),
        (
            "",
            {"prompt": "a <think>", "thinking": Thinking(budget=5)},
            Thought("<think>", "</think>", "</think>", is_open=True, budget=5),
        ),
    ],
)
async def test_what_may_be_thought_before_the_form_begins(
    bench: ThinkingBench, content: str, fields: dict[str, object], expected: Thought | None
) -> None:
    message = submit(1, content=content)
    await bench.calls.submit(
        msgspec.structs.replace(message, request=msgspec.structs.replace(message.request, **fields))
    )
    assert bench.constraints.asked == [expected]


async def test_without_form_and_budget_nothing_is_masked(bench: ThinkingBench) -> None:
    await bench.calls.submit(submit(1, content=OPEN))
    await bench.calls.submit(submit(2, thinking=Thinking(enabled=False, budget=5)))
    assert bench.constraints.asked == []


async def test_ends_that_are_ignored_are_shown_as_biases(bench: ThinkingBench) -> None:
    biased = Sampling(logit_bias=((5, 1.5),))
    settings = await bench.calls.submit(submit(3, tell=("settings",), ignore_eos=True, sampling=biased))
    [request] = bench.engine.taken
    assert settings.sampling is not None
    assert settings.sampling.logit_bias == ((5, 1.5), (0, None))
    assert request.sampling.logit_bias == ((5, 1.5),), "the engine has its own way"


async def test_no_more_of_a_prompt_is_told_than_is_asked_for(bench: ThinkingBench) -> None:
    cut = await bench.calls.submit(submit(1, content="one two", tell=("settings",), max_prompt_chars=5))
    assert cut.prompt == "www w"
    refusal = await refused(bench, submit(2, content="one two", tell=("settings", "prompt"), max_prompt_chars=5))
    assert (refusal.code, refusal.param) == (FailureCode.INVALID_REQUEST, "echo")
    whole = await bench.calls.submit(submit(3, content="one two", tell=("settings", "prompt"), max_prompt_chars=8))
    assert whole.prompt == "www www "
