"""Forced and strict calls in each family's own form: what the grammar allows is what the family's parser reads."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import numpy as np
import pytest

from tests.support.tools import tool_of
from tests.unit.workers.chat.reading import parser_of, read
from tests.unit.workers.constraint.conftest import Trusting
from tests.unit.workers.constraint.test_masks import follows, tokens_in
from workers.chat.answers import FAMILIES
from workers.chat.tools.family import Ask, Family
from workers.constraint.compiler import Compiler
from workers.constraint.mask import Mask
from workers.constraint.tool_calls import CallForms
from workers.llama.sampling.grammar import GbnfGrammars
from workers.llama.tokens.vocab import Vocab
from workers.protocol.events import CallFailed
from workers.protocol.requests import Constraint, GenerateRequest

FORECAST = tool_of(
    "get_forecast",
    None,
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Paris", "Rome, Italy"]},
            "days": {"type": "integer", "enum": [1, 14]},
            "units": {"enum": [True, None, [1]]},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    strict=True,
)
CLOCK = tool_of("get_time", None, {"type": "object", "properties": {}, "additionalProperties": False}, strict=True)
TEXT = tool_of("run", None, {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]})
TOOLS = (FORECAST, CLOCK)

BY_NAME = {family.name: family for family in FAMILIES}
NAMES = sorted(BY_NAME)


def compiler_of(vocab: Vocab, family: Family, controls: dict[int, bytes] | None = None) -> Compiler:
    return Compiler(vocab, GbnfGrammars(vocab), Trusting(), CallForms(family.syntax, controls))


def mask_of(compiler: Compiler, request: GenerateRequest) -> Mask:
    mask = compiler.answer_mask(request)
    assert mask is not None
    return mask


def drawn(vocab: Vocab, mask: Mask, seed: int, most: int = 3000) -> str:
    """An answer of tokens that the mask allows, with the end as soon as it may come half of the time."""
    draw = random.Random(seed)
    text = b""
    for _ in range(most):
        bits = mask.allowed()
        assert bits is not None
        allowed = sorted(tokens_in(bits))
        ends = [token for token in allowed if token in vocab.eog]
        if ends and (len(ends) == len(allowed) or draw.random() < 0.5):
            return text.decode()
        token = draw.choice([token for token in allowed if token not in vocab.eog])
        mask.accept(token)
        text += vocab.piece(token)
    raise AssertionError(f"no end after {text!r}")


@pytest.mark.parametrize("name", NAMES)
def test_a_forced_call_is_one_that_the_family_reads(vocab: Vocab, name: str) -> None:
    family = BY_NAME[name]
    compiler = compiler_of(vocab, family)
    found = set()
    for seed in range(12):
        text = drawn(
            vocab, mask_of(compiler, GenerateRequest(tools=TOOLS, forced_tools=("get_forecast", "get_time"))), seed
        )
        outcome = read(parser_of(family, Ask(TOOLS)), text)
        assert outcome.content.strip() == outcome.reasoning == ""
        assert outcome.calls
        for called, arguments in outcome.calls:
            found.add(called)
            given = json.loads(arguments)
            if called == "get_forecast":
                assert given["city"] in ("Paris", "Rome, Italy")
                assert given["days"] in (1, 14)
                assert given.get("units") in (True, None, [1])
            else:
                assert given == {}
    assert found == {"get_forecast", "get_time"}


@pytest.mark.parametrize("name", NAMES)
def test_where_one_call_is_wanted_the_answer_ends_after_it(vocab: Vocab, name: str) -> None:
    compiler = compiler_of(vocab, BY_NAME[name])
    for seed in range(6):
        request = GenerateRequest(tools=TOOLS, forced_tools=("get_time",), parallel_tool_calls=False)
        text = drawn(vocab, mask_of(compiler, request), seed)
        assert [call for call, _ in read(parser_of(BY_NAME[name], Ask(TOOLS)), text).calls] == ["get_time"]


@pytest.mark.parametrize("name", NAMES)
def test_strict_calls_are_kept_from_where_they_begin(vocab: Vocab, name: str) -> None:
    family = BY_NAME[name]
    compiler = compiler_of(vocab, family)
    request = GenerateRequest(tools=TOOLS)
    if not family.syntax.triggers:
        with pytest.raises(CallFailed, match="tool_choice"):
            compiler.answer_mask(request)
        return
    mask = mask_of(compiler, request)
    for token in vocab.tokenize(f"Well. {family.syntax.triggers[0]}", add_special=False, parse_special=False):
        assert mask.permits(token)
        mask.accept(token)
    bits = mask.allowed()
    assert bits is not None
    assert 0 < len(tokens_in(bits)) < vocab.num_tokens / 2


TEXTS = {
    "qwen3-coder": "<tool_call>\n<function=run>\n<parameter=code>\n{}\n</parameter>\n</function>\n</tool_call>",
    "seed-oss": "<seed:tool_call>\n<function=run>\n<parameter=code>{}</parameter>\n</function>\n</seed:tool_call>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="run">\n<parameter name="code">{}</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "deepseek-v3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="run">\n<｜DSML｜parameter name="code" '
    'string="true">{}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "glm": "<tool_call>run\n<arg_key>code</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
}


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_text_that_is_no_json_is_any_text(vocab: Vocab, name: str) -> None:
    compiler = compiler_of(vocab, BY_NAME[name])
    request = GenerateRequest(tools=(TEXT,), forced_tools=("run",))
    code = 'if a < b and "x" in c:\n    print("</parameter")'
    assert follows(vocab, mask_of(compiler, request), TEXTS[name].format(code))
    assert not follows(vocab, mask_of(compiler, request), TEXTS[name].format(code).replace("code", "text"))


def test_text_whose_keywords_can_not_be_kept_is_refused_where_it_is_strict(vocab: Vocab) -> None:
    compiler = compiler_of(vocab, BY_NAME["glm"])
    for strict in (False, True):
        tool = tool_of("run", None, {"properties": {"code": {"type": "string", "pattern": "a+"}}}, strict=strict)
        request = GenerateRequest(tools=(tool,), forced_tools=("run",))
        if strict:
            with pytest.raises(CallFailed, match="`pattern`"):
                compiler.answer_mask(request)
        else:
            assert compiler.answer_mask(request) is not None


@pytest.fixture
def silent(vocab: Vocab) -> int:
    """A control token that ends nothing, in the place of the family's own."""
    return next(token for token in range(vocab.num_tokens) if not vocab.piece(token) and token not in vocab.eog)


def test_a_mark_may_be_a_control_token(vocab: Vocab, silent: int) -> None:
    compiler = compiler_of(vocab, BY_NAME["mistral"], {silent: b"[TOOL_CALLS]"})
    rest = vocab.tokenize("get_time[ARGS]{}", add_special=False, parse_special=False)
    for request in (GenerateRequest(tools=TOOLS, forced_tools=("get_time",)), GenerateRequest(tools=TOOLS)):
        mask = mask_of(compiler, request)
        for token in (silent, *rest):
            assert mask.permits(token)
            mask.accept(token)
        bits = mask.allowed()
        assert bits is not None
        assert vocab.eog <= tokens_in(bits)
        assert silent in tokens_in(bits), "another call may follow"
        assert np.count_nonzero(bits) < 5


def test_a_schema_beside_tools_is_bounded_before_it_is_read(vocab: Vocab) -> None:
    """A caller may give it as text, which no gateway looks into: 8 MiB of it kept the engine for half a second."""
    text = json.dumps({"const": 1, "examples": [{}] * 100_000})
    request = GenerateRequest(tools=TOOLS, constraint=Constraint("json_schema", text, param="guided_json"))
    with pytest.raises(CallFailed, match="more than 256 KiB"):
        compiler_of(vocab, BY_NAME["hermes"]).answer_mask(request)


def test_definitions_are_not_read_for_each_of_thousands_of_parameters() -> None:
    """They took five milliseconds for each: minutes of a thread that compiles forms, for 2 MB."""
    definitions: dict[str, Any] = {"x": {"anyOf": [{}] * 9_000 + [{"no-such-keyword": 1}]}}
    properties = {f"p{number}": {"$ref": "#/$defs/x"} for number in range(1_000)}
    parameters = {"type": "object", "$defs": definitions, "properties": properties}
    forms, began = CallForms(BY_NAME["glm"].syntax), time.process_time()
    loose, strict = (
        GenerateRequest(tools=(tool_of("run", None, parameters, strict=one),), forced_tools=("run",))
        for one in (False, True)
    )
    assert forms.constraint_of(loose) is not None
    with pytest.raises(CallFailed, match="the schema's definitions, times its parameters"):
        forms.constraint_of(strict)
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize("name", ["glm", "hermes"])
def test_parts_of_all_tools_and_parameters_are_compared_within_one_bound(name: str) -> None:
    """Each had a bound of its own, 70 ms: six minutes of a thread for 5,000 parameters, 300 KB."""
    names = [f"p{number}" for number in range(6)]
    one = {"type": "object", "properties": {name: {"$ref": "#/$defs/one"} for name in names}, "required": names}
    choice = {"oneOf": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/one"}]}
    properties = {f"q{number}": choice for number in range(100)}
    tools = tuple(
        tool_of(f"f{number}", None, {"type": "object", "$defs": {"one": one}, "properties": properties})
        for number in range(10)
    )
    began = time.process_time()
    CallForms(BY_NAME[name].syntax).constraint_of(GenerateRequest(tools=tools, forced_tools=("f0", "f1", "f2")))
    assert time.process_time() - began < 2.0


def test_an_answer_of_harmony_has_its_schema_in_the_final_channel(vocab: Vocab) -> None:
    compiler = compiler_of(vocab, BY_NAME["harmony"])
    request = GenerateRequest(constraint=Constraint("json_schema", '{"const": 1}'))
    final = "<|channel|>final<|message|>1"
    for text, passes in ((final, True), (f"<|start|>assistant{final}", True), ("1", False)):
        assert follows(vocab, mask_of(compiler, request), text) is passes
