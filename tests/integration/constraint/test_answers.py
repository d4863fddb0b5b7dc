"""Constrained answers out of the engine, beside each other and beside llama-server's."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.integration.engine.listener import ONE_THREAD, UNDRAFTED, Bench, changed, running
from workers.chat.tools.json_calls import HERMES
from workers.constraint.compiler import Compiler
from workers.constraint.forks import Forks
from workers.constraint.gbnf import Trial
from workers.constraint.moving_mask import ForkedGrammars
from workers.constraint.thought import Thought
from workers.constraint.tool_calls import CallForms
from workers.engine.request import EngineRequest
from workers.llama.model import Model
from workers.protocol.events import Failed, FinishReason, Logprobs
from workers.protocol.requests import Constraint, GenerateRequest, Message, Sampling

DEMO = Path(__file__).parents[3] / "deploy" / "demo" / "paddock-demo.gguf"
PROMPT = "<|im_start|>user\nGive me an example as JSON.<|im_end|>\n<|im_start|>assistant\n"

PAIR = r"""root ::= "{\"" [a-z]+ "\": " ("\"" [^"\\]{0,40} "\"" | [0-9]{1,5}) "}"
"""
RECORDED = (
    '{"name": "Paddock demo model"}',
    '{"medi": "example"}',
    '{"name": "Paddock demo model"}',
    '{"name": "Paddock demo model"}',
    '{"meraple": "example"}',
    '{"name": "Paddock demo model"}',
    '{"mean": "example"}',
    '{"medi": "example"}',
)
"""What llama-server (llama-cpp-python 0.3.36) says to PROMPT with the grammar PAIR, temperature 1 and seeds 0 to 7."""

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Model.load(DEMO, ONE_THREAD) as model, running(model, slots=4, speculation=UNDRAFTED) as one:
        yield one


@pytest.fixture(scope="module")
def compiler(bench: Bench) -> Iterator[Compiler]:
    vocab = bench.model.vocab
    with contextlib.closing(Forks(DEMO)) as processes:
        forked = ForkedGrammars(processes, vocab)
        yield Compiler(vocab, forked, Trial(processes), CallForms(HERMES.syntax), forked)


def submit(bench: Bench, compiler: Compiler, constraint: Constraint | None, *, seed: int, max_tokens: int = 100) -> int:
    request = bench.request(PROMPT, max_tokens, sampling=Sampling(temperature=1, seed=seed))
    mask = None if constraint is None else compiler.mask(constraint)
    return bench.submit(changed(request, mask=mask))


@pytest.mark.parametrize("seed", range(8))
def test_a_grammar_gives_llama_servers_text(bench: Bench, compiler: Compiler, seed: int) -> None:
    key = submit(bench, compiler, Constraint("gbnf", PAIR), seed=seed, max_tokens=60)
    bench.wait(key)
    assert bench.heard.text(key) == RECORDED[seed]


def test_answers_of_every_kind_at_once(bench: Bench, compiler: Compiler) -> None:
    schema = Constraint("json_schema", json.dumps(PERSON))
    choice = Constraint("lark", 'start: "tea" | "coffee"')
    keys = [submit(bench, compiler, schema, seed=seed) for seed in range(2)]
    keys += [submit(bench, compiler, choice, seed=3), submit(bench, compiler, None, seed=4)]
    bench.wait(*keys)
    for key in keys[:2]:
        jsonschema.validate(json.loads(bench.heard.text(key)), PERSON)
        assert bench.heard.finished(key).reason is FinishReason.STOP
    assert bench.heard.text(keys[2]) in ("tea", "coffee")
    assert bench.heard.text(keys[3])


def test_a_constraint_with_a_trigger_leaves_the_text_before_it_alone(bench: Bench, compiler: Compiler) -> None:
    free = submit(bench, compiler, None, seed=5, max_tokens=30)
    triggered = submit(bench, compiler, Constraint("regex", "~~~[0-9]", ("~~~",)), seed=5, max_tokens=30)
    bench.wait(free, triggered)
    assert bench.heard.text(free) == bench.heard.text(triggered)


def test_a_cut_answer_is_a_beginning_of_a_right_one(bench: Bench, compiler: Compiler) -> None:
    key = submit(bench, compiler, Constraint("regex", "[ab]{50}"), seed=1, max_tokens=5)
    bench.wait(key)
    assert bench.heard.finished(key).reason is FinishReason.LENGTH
    assert set(bench.heard.text(key)) <= {"a", "b"}


TAGS = {"long": ("<think>", "</think>"), "short": ("<tool_call>", "</tool_call>")}
"""Of several tokens, and of one."""

FORMS = {
    "schema": Constraint("json_schema", json.dumps(PERSON)),
    "gbnf": Constraint("gbnf", PAIR),
    "none": None,
}


def thinking(
    bench: Bench, compiler: Compiler, form: str, thought: Thought, prompt: str = PROMPT, **fields: Any
) -> EngineRequest:
    asked = GenerateRequest(messages=(Message("user", "hi"),), constraint=FORMS[form])
    mask = compiler.answer_mask(asked, thought)
    sampling = fields.pop("sampling", Sampling(temperature=1, seed=3))
    return changed(bench.request(prompt, 120, sampling=sampling), mask=mask, **fields)


@pytest.mark.parametrize("tags", TAGS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("budget", [0, 7])
def test_a_thought_is_closed_and_then_the_form_is_kept(
    bench: Bench, compiler: Compiler, tags: str, form: str, budget: int
) -> None:
    start, end = TAGS[tags]
    thought = Thought(start, end, is_open=True, budget=budget)
    request = thinking(bench, compiler, form, thought, PROMPT + start + "\n", n_probs=1)
    key = bench.submit(request)
    bench.wait(key)
    said, answer = bench.heard.text(key).split(end, 1)
    chosen = [event.chosen for event in bench.heard.calls[key] if isinstance(event, Logprobs)]
    closing = bench.model.tokenize(end, add_special=False, parse_special=True)
    assert [one.token for one in chosen[budget : budget + len(closing)]] == closing
    assert "".join(one.piece.decode() for one in chosen[:budget]) == said
    assert bench.heard.finished(key).usage.completion_tokens == len(chosen)
    if form == "schema":
        jsonschema.validate(json.loads(answer), PERSON)
    elif form == "gbnf":
        assert len(json.loads(answer)) == 1


def test_a_model_that_does_not_think_answers_at_once(bench: Bench, compiler: Compiler) -> None:
    thought = Thought(*TAGS["long"], budget=5)
    key = bench.submit(thinking(bench, compiler, "schema", thought))
    bench.wait(key)
    jsonschema.validate(json.loads(bench.heard.text(key)), PERSON)


def test_a_thought_within_its_budget_changes_nothing(bench: Bench, compiler: Compiler) -> None:
    free = submit(bench, compiler, None, seed=3)
    bench.wait(free)
    key = bench.submit(changed(thinking(bench, compiler, "none", Thought(*TAGS["long"], budget=5)), max_tokens=100))
    bench.wait(key)
    assert bench.heard.text(key) == bench.heard.text(free)


def test_a_tag_that_may_not_be_said_ends_the_call_with_the_reason(bench: Bench, compiler: Compiler) -> None:
    start, end = TAGS["short"]
    sampling = Sampling(temperature=0, logit_bias=((end, None),))
    thought = Thought(start, end, is_open=True, budget=2)
    key = bench.submit(thinking(bench, compiler, "none", thought, PROMPT + start, sampling=sampling))
    bench.wait(key)
    last = bench.heard.calls[key][-1]
    assert isinstance(last, Failed)
    assert "thinking budget" in last.failure.message
    assert "`logit_bias`" in last.failure.message
