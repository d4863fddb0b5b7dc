"""Thought before an answer in a form, in every family's own marks: the mask lets through what the parser reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.unit.workers.chat.reading import read_every_way
from tests.unit.workers.constraint.conftest import Trusting
from tests.unit.workers.constraint.test_thought import Speaker
from workers.chat.answers import FAMILIES, Answers
from workers.chat.conversation import THINK, THOUGHTS
from workers.chat.tools.family import Ask, Family
from workers.chat.tools.json_calls import PLAIN
from workers.constraint.compiler import Compiler
from workers.constraint.thought import thought_before
from workers.constraint.tool_calls import CallForms
from workers.llama.sampling.grammar import GbnfGrammars
from workers.llama.tokens.vocab import Vocab
from workers.protocol.requests import Constraint, GenerateRequest, Message, Thinking

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
FORM = Constraint("json_schema", json.dumps(SCHEMA))
ANSWER = '{"a": 5}'
THINKING = "one two three four five six seven"

RECIPIENTS = ("functionary-v3.2",)
"""Families whose every text begins with whom it is for, so that no thought can."""

MODELS: dict[str, Family] = {
    **{one.name: one if one.thought else replace(one, thought=THINK) for one in FAMILIES if one.name not in RECIPIENTS},
    **{f"plain {marks.open.strip()}": replace(PLAIN, thought=marks) for marks in THOUGHTS},
}

SHORT = [name for name, family in MODELS.items() if family.thought and len(family.thought.open) <= 16]
"""Other marks take more tokens of this vocabulary than are looked at; in their models' they are one each."""


def asked(*, budget: int, form: Constraint | None) -> GenerateRequest:
    return GenerateRequest(messages=(Message("user", "hi"),), constraint=form, thinking=Thinking(budget=budget))


def speaker(vocab: Vocab, family: Family, request: GenerateRequest, prompt: Sequence[int] = ()) -> Speaker:
    thought = thought_before(request, prompt, Answers(family, vocab))
    assert thought is not None
    compiler = Compiler(vocab, GbnfGrammars(vocab), Trusting(), CallForms(family.syntax))
    mask = compiler.answer_mask(request, thought)
    assert mask is not None
    return Speaker(vocab, mask)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("budget", [4, 50])
def test_a_thought_and_an_answer_in_a_form(vocab: Vocab, name: str, budget: int) -> None:
    family = MODELS[name]
    assert family.thought is not None
    model = speaker(vocab, family, asked(budget=budget, form=FORM))
    said = model.say(f"{family.thought.open}{THINKING}")
    said += model.say(family.thought.close if budget == 50 else "") + model.go_on().decode()
    said += model.say(f"{family.syntax.answer}{ANSWER}"[len(_overlap(said, family.syntax.answer)) :])
    outcome = read_every_way(family, Ask(), said)
    assert json.loads(outcome.content) == {"a": 5}
    assert outcome.reasoning
    assert THINKING.startswith(outcome.reasoning) if budget == 4 else outcome.reasoning == THINKING


@pytest.mark.parametrize("name", MODELS)
def test_a_thought_that_is_closed_leaves_room_for_an_answer(vocab: Vocab, name: str) -> None:
    family = MODELS[name]
    assert family.thought is not None
    model = speaker(vocab, family, asked(budget=4, form=None))
    said = model.say(f"{family.thought.open}{THINKING}")
    outcome = read_every_way(family, Ask(), said + "Yes.")
    assert outcome.content == "Yes."
    assert THINKING.startswith(outcome.reasoning)


@pytest.mark.parametrize("name", MODELS)
def test_an_answer_in_a_form_without_a_thought(vocab: Vocab, name: str) -> None:
    family = MODELS[name]
    model = speaker(vocab, family, asked(budget=4, form=FORM))
    said = model.say(f"{family.syntax.answer}{ANSWER}")
    outcome = read_every_way(family, Ask(), said)
    assert (json.loads(outcome.content), outcome.reasoning) == ({"a": 5}, "")


@pytest.mark.parametrize("name", SHORT)
def test_a_prompt_that_opens_the_thought(vocab: Vocab, name: str) -> None:
    family = MODELS[name]
    assert family.thought is not None
    prompt = vocab.tokenize(f"hi\n{family.thought.open}\n", add_special=False, parse_special=True)
    model = speaker(vocab, family, asked(budget=4, form=FORM), prompt)
    said = model.say(THINKING)
    said += model.say(f"{family.syntax.answer}{ANSWER}"[len(_overlap(said, family.syntax.answer)) :])
    outcome = read_every_way(family, Ask(opened=True), said)
    assert json.loads(outcome.content) == {"a": 5}
    assert THINKING.startswith(outcome.reasoning)
    assert outcome.reasoning


def _overlap(said: str, following: str) -> str:
    """What of `following` was said already, since nothing else could be."""
    return next((following[:n] for n in range(len(following), 0, -1) if said.endswith(following[:n])), "")
