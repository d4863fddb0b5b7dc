"""Every language's masks, on the demo model's vocabulary."""

from __future__ import annotations

import contextlib
import gc
import json
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.tools import tool_of
from tests.unit.workers.constraint.conftest import Trusting
from workers.chat.tools.json_calls import HERMES
from workers.constraint.compiler import MAX_GRAMMARS, Compiler
from workers.constraint.mask import Bits, Mask
from workers.constraint.tool_calls import CallForms
from workers.llama.sampling.grammar import GbnfGrammars
from workers.llama.tokens.vocab import Vocab
from workers.protocol.events import CallFailed, FailureCode
from workers.protocol.requests import Constraint, GenerateRequest

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
LOOK_UP = tool_of("look_up", None, CITY, strict=True)
NOOP = tool_of("noop")


def tokens_in(bits: Bits) -> frozenset[int]:
    return frozenset(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def follows(vocab: Vocab, mask: Mask, text: str) -> bool:
    """Whether the mask lets the whole text through, in the vocabulary's own tokens, and may end after it."""
    for token in vocab.tokenize(text, add_special=False, parse_special=True):
        bits = mask.allowed()
        permitted = mask.permits(token)
        assert bits is None or permitted == (token in tokens_in(bits))
        if not permitted:
            return False
        mask.accept(token)
    return all(mask.permits(token) for token in vocab.eog)


CASES = [
    (Constraint("json_schema", json.dumps(PERSON)), '{"name": "Zoë €", "age": 3}', '{"name": "Zoë", "age": "3"}'),
    (Constraint("json_schema", json.dumps(PERSON)), '{\n  "name": "a",\n  "age": 3\n}', '{"age": 3}'),
    (Constraint("json_schema", "true"), '[1, {"a": null}]', "[1"),
    (Constraint("regex", "[0-9]{3}(-[a-f]+)?"), "123-abc", "12"),
    (Constraint("lark", 'start: "yes" | "no" " "? "way"'), "no way", "noway!"),
    (Constraint("lark", "%llguidance {}\nstart: /a+/"), "aaa", "b"),
    (Constraint("gbnf", 'root ::= "yes" | "nö" [ ]? w*\nw ::= [a-z€]'), "nö wa€y", "nö 5"),
    (Constraint("gbnf", 'root ::= [^<]+ "<" .'), "any text €<é", "any text<"),
]


@pytest.mark.parametrize(("constraint", "good", "bad"), CASES)
def test_a_mask_lets_through_what_follows_it_and_nothing_else(
    vocab: Vocab, compiler: Compiler, constraint: Constraint, good: str, bad: str
) -> None:
    assert follows(vocab, compiler.mask(constraint), good)
    assert not follows(vocab, compiler.mask(constraint), bad)


@pytest.mark.parametrize(
    ("constraint", "text", "done"),
    [
        (Constraint("json_schema", json.dumps(PERSON)), '{"name": "a", "age": 3}', True),
        (Constraint("regex", "[0-9]+"), "12", False),
        (Constraint("gbnf", 'root ::= "ab"'), "ab", True),
        (Constraint("gbnf", 'root ::= "ab"+'), "ab", False),
    ],
)
def test_done_is_when_only_the_end_can_follow(
    vocab: Vocab, compiler: Compiler, constraint: Constraint, text: str, done: bool
) -> None:
    mask = compiler.mask(constraint)
    assert not mask.is_done
    assert follows(vocab, mask, text)
    assert mask.is_done is done
    bits = mask.allowed()
    assert bits is not None
    assert vocab.eog <= tokens_in(bits)
    assert (tokens_in(bits) == vocab.eog) is done


@pytest.mark.parametrize("kind", ["regex", "gbnf"])
def test_control_tokens_are_no_text(vocab: Vocab, compiler: Compiler, kind: str) -> None:
    constraint = Constraint("regex", "(.|\n)*") if kind == "regex" else Constraint("gbnf", "root ::= .*")
    bits = compiler.mask(constraint).allowed()
    assert bits is not None
    silent = {token for token in range(vocab.num_tokens) if not vocab.piece(token)}
    assert silent
    assert tokens_in(bits) & silent <= vocab.eog


@pytest.mark.parametrize("kind", ["regex", "gbnf"])
def test_a_token_that_is_not_allowed_ends_the_call_and_not_the_process(
    vocab: Vocab, compiler: Compiler, kind: str
) -> None:
    mask = compiler.mask(Constraint("regex", "ab") if kind == "regex" else Constraint("gbnf", 'root ::= "ab"'))
    (wrong,) = vocab.tokenize("b", add_special=False, parse_special=False)
    with pytest.raises(CallFailed) as caught:
        mask.accept(wrong)
    assert caught.value.failure.code == FailureCode.INVALID_REQUEST


def test_a_form_that_grows_too_large_ends_its_call(vocab: Vocab, compiler: Compiler) -> None:
    mask = compiler.mask(Constraint("regex", "((a{1,1000}){1,1000}){1,1000}"))
    (token,) = vocab.tokenize("a", add_special=False, parse_special=False)

    def go_on() -> None:
        for _ in range(50):
            mask.allowed()
            mask.accept(token)

    with pytest.raises(CallFailed, match="too many"):
        go_on()


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (Constraint("json_schema", '{"type": "strin"}'), "strin"),
        (Constraint("json_schema", '{"oneOf": [{"type": "integer"}, {"minimum": 3}]}'), "oneOf"),
        (Constraint("json_schema", '{"$ref": "http://example.org/x"}'), "example.org"),
        (Constraint("json_schema", '{"type": "integer", "minimum": 3, "maximum": 2}'), "minimum"),
        (Constraint("regex", "(a"), "unclosed"),
        (Constraint("regex", "a" * (17 << 10)), "16 KiB"),
        (Constraint("lark", "start: nothing"), "nothing"),
        (Constraint("lark", "%llguidance {\nstart: /a/"), "no JSON object"),
        (Constraint("lark", "start: " + "(" * 10_000), "nested"),
        (Constraint("gbnf", "root ::= nothing"), "parse"),
        (Constraint("gbnf", 'begin ::= "a"'), "root"),
    ],
)
def test_refusals_name_parameter_and_reason(compiler: Compiler, constraint: Constraint, words: str) -> None:
    with pytest.raises(CallFailed) as caught:
        compiler.mask(constraint)
    failure = caught.value.failure
    assert (failure.code, failure.param) == (FailureCode.INVALID_REQUEST, "response_format")
    assert words in failure.message
    assert len(failure.message) < 500


def test_grammars_are_compiled_once_and_refused_once(compiler: Compiler, trial: Trusting) -> None:
    for _ in range(2):
        compiler.mask(Constraint("gbnf", 'root ::= "a"'))
        with pytest.raises(CallFailed):
            compiler.mask(Constraint("gbnf", "root ::= nothing"))
    assert trial.asked == ['root ::= "a"', "root ::= nothing"]
    for number in range(MAX_GRAMMARS):
        compiler.mask(Constraint("gbnf", f'root ::= "{number}"'))
    compiler.mask(Constraint("gbnf", 'root ::= "a"'))
    assert trial.asked.count('root ::= "a"') == 2


def test_what_is_kept_of_long_texts_is_bounded(compiler: Compiler, trial: Trusting) -> None:
    """What is made of a text may take fifty times as much: 24 lists of values took a worker 180 MiB."""

    def asked_anew(text: str) -> bool:
        trial.asked.clear()
        compiler.mask(Constraint("gbnf", text))
        return bool(trial.asked)

    first, *others = [f'root ::= "{chr(97 + number) * (60 << 10)}"' for number in range(5)]
    assert [asked_anew(text) for text in (first, first)] == [True, False]
    assert all(asked_anew(text) for text in others)
    assert asked_anew(first), "there was no room for it any more"
    assert not asked_anew(others[-1])


def test_a_refusal_is_remembered_without_what_was_refused(compiler: Compiler, trial: Trusting) -> None:
    """An error knows the frames that it was raised in, and they the text: 64 of 60 KB took a worker 20 MiB."""

    class Text(str):
        """One that can be looked for."""

    text = Text("root ::= nothing")
    kept = weakref.ref(text)
    with contextlib.suppress(CallFailed):
        compiler.mask(Constraint("gbnf", text))
    trial.asked.clear()
    del text
    gc.collect()
    assert kept() is None
    with pytest.raises(CallFailed):
        compiler.mask(Constraint("gbnf", "root ::= nothing"))
    assert trial.asked == []


def test_forms_are_counted_by_what_became_of_them(compiler: Compiler) -> None:
    good, bad = Constraint("regex", "[a-z]+"), Constraint("regex", "[a-z")
    for constraint in (good, good, bad, good, bad):
        with contextlib.suppress(CallFailed):
            compiler.mask(constraint)
    assert compiler.counts == {"compiled": 1, "reused": 2, "refused": 2}


def test_masks_of_one_grammar_are_independent(vocab: Vocab, compiler: Compiler) -> None:
    for constraint in (Constraint("regex", "ab|cd"), Constraint("gbnf", 'root ::= "ab" | "cd"')):
        one, other = compiler.mask(constraint), compiler.mask(constraint)
        assert follows(vocab, one, "ab")
        assert follows(vocab, other, "cd")


@pytest.mark.parametrize(
    ("format_", "text", "passes"),
    [
        ("date", "2024-02-29", True),
        ("date", "2023-02-29", False),
        ("date", "1900-02-29", False),
        ("date", "2000-02-29", True),
        ("date", "2026-04-31", False),
        ("date", "2026-12-31", True),
        ("date-time", "2026-12-31T23:59:59.5+02:00", True),
        ("date-time", "2026-12-31T24:00:00Z", False),
        ("date-time", "2026-12-31T23:59:59", False),
        ("date-time", "2023-02-29T00:00:00Z", False),
    ],
)
def test_dates_are_days_that_exist(vocab: Vocab, compiler: Compiler, format_: str, text: str, passes: bool) -> None:
    mask = compiler.mask(Constraint("json_schema", json.dumps({"type": "string", "format": format_})))
    assert follows(vocab, mask, json.dumps(text)) is passes


CALL = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("Just text with a < and a <tool.", True),
        (f"Let me see. {CALL}", True),
        (f"{CALL}\n{CALL}", True),
        ('<tool_call>{"name": "noop", "arguments": {}}</tool_call>', True),
        (CALL.replace("city", "town"), False),
        (CALL.replace("look_up", "look_down"), False),
        (f"{CALL} and more", False),
    ],
)
def test_strict_tools_are_kept_from_the_opening_tag_on(
    vocab: Vocab, compiler: Compiler, text: str, passes: bool
) -> None:
    mask = compiler.answer_mask(GenerateRequest(tools=(LOOK_UP, NOOP)))
    assert mask is not None
    assert follows(vocab, mask, text) is passes


def test_a_trigger_spelled_in_letters_is_a_trigger_too(vocab: Vocab, compiler: Compiler) -> None:
    mask = compiler.mask(Constraint("regex", "STOP[0-9]", ("STOP",)))
    pieces = {vocab.piece(token): token for token in range(vocab.num_tokens)}
    for letter in (b"O", b"h", b" ", b"S", b"T", b"O", b"P"):
        assert mask.permits(pieces[letter])
        mask.accept(pieces[letter])
    assert mask.permits(pieces[b"7"])
    assert not mask.permits(pieces[b"x"])


def test_no_token_reaches_past_a_trigger(vocab: Vocab, compiler: Compiler) -> None:
    longer = next(t for t in range(vocab.num_tokens) if len(vocab.piece(t)) >= 2 and vocab.piece(t)[:1] == b"a")
    (first,) = vocab.tokenize("a", add_special=False, parse_special=False)
    mask = compiler.mask(Constraint("regex", "a[0-9]", ("a",)))
    bits = mask.allowed()
    assert bits is not None
    assert longer not in tokens_in(bits)
    assert not mask.permits(longer)
    assert mask.permits(first)


def test_a_trigger_that_its_grammar_refuses(compiler: Compiler) -> None:
    for constraint in (Constraint("regex", "b", ("a",)), Constraint("gbnf", 'root ::= "b"', ("a",))):
        with pytest.raises(CallFailed, match="own trigger 'a'"):
            compiler.mask(constraint)


def test_a_forced_call_is_one_of_the_named_tools(vocab: Vocab, compiler: Compiler) -> None:
    request = GenerateRequest(tools=(LOOK_UP, NOOP), forced_tools=("look_up",))

    def mask() -> Mask:
        one = compiler.answer_mask(request)
        assert one is not None
        return one

    assert follows(vocab, mask(), CALL)
    assert not follows(vocab, mask(), "Text")
    assert not follows(vocab, mask(), '<tool_call>{"name": "noop", "arguments": {}}</tool_call>')


def test_an_answer_with_a_schema_may_be_a_call_instead(vocab: Vocab, compiler: Compiler) -> None:
    request = GenerateRequest(tools=(LOOK_UP,), constraint=Constraint("json_schema", json.dumps(PERSON)))
    for text, passes in ((CALL, True), ('{"name": "a", "age": 1}', True), ("Text", False)):
        mask = compiler.answer_mask(request)
        assert mask is not None
        assert follows(vocab, mask, text) is passes


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (GenerateRequest(tools=(NOOP,), constraint=Constraint("regex", "a", param="guided_regex")), "guided_regex"),
        (
            GenerateRequest(tools=(NOOP,), forced_tools=("noop",), constraint=Constraint("json_schema", "{}")),
            "response_format",
        ),
        (
            GenerateRequest(tools=(NOOP, tool_of("t", None, {"not": {}}, strict=True))),
            "tools.1.function.parameters",
        ),
    ],
)
def test_what_can_not_be_combined(compiler: Compiler, request_: GenerateRequest, param: str) -> None:
    with pytest.raises(CallFailed) as caught:
        compiler.answer_mask(request_)
    assert caught.value.failure.param == param


def test_a_lax_tool_is_kept_as_far_as_its_schema_can_be(vocab: Vocab, compiler: Compiler) -> None:
    lax: dict[str, Any] = {"type": "object", "not": {"required": ["x"]}}
    mask = compiler.answer_mask(GenerateRequest(tools=(tool_of("t", None, lax),), forced_tools=("t",)))
    assert mask is not None
    assert follows(vocab, mask, '<tool_call>{"name": "t", "arguments": {"anything": [1]}}</tool_call>')


def test_nothing_is_constrained_that_was_not_asked_for(compiler: Compiler) -> None:
    assert compiler.answer_mask(GenerateRequest(tools=(NOOP,))) is None
    assert compiler.answer_mask(GenerateRequest()) is None


class Elsewhere:
    """In the place of processes that follow grammars: it only notes which come there."""

    def __init__(self) -> None:
        self.followed: list[str] = []

    def lark(self, text: str) -> Elsewhere:
        self.followed.append(text)
        return self

    def mask(self) -> Mask:
        raise NotImplementedError

    def mask_after(self, begun: bytes) -> Mask | None:
        raise NotImplementedError

    def mask_after_tokens(self, begun: list[int]) -> Mask:
        raise NotImplementedError

    def refused_of(self, beginnings: Sequence[bytes]) -> bytes | None:
        raise NotImplementedError


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("json_schema", '{"multipleOf": 999983}'),
        Constraint("json_schema", '{"multipleOf": 0.00000000000000000000000000999983}'),
        Constraint("json_schema", '{"allOf": [{"multipleOf": 641}, {"multipleOf": 643}, {"multipleOf": 647}]}'),
        Constraint("json_schema", json.dumps({"prefixItems": [{"multipleOf": 997, "minimum": n} for n in range(200)]})),
        Constraint("lark", 'start: %json {"multipl\\u0065Of": 999983}'),
    ],
)
def test_numbers_of_many_remainders_are_never_compiled_in_this_process(
    vocab: Vocab, trial: Trusting, constraint: Constraint
) -> None:
    """llguidance makes a state of each remainder, whatever its limits are: this took 12 s and 290 MiB."""
    elsewhere = Elsewhere()
    compiler = Compiler(vocab, GbnfGrammars(vocab), trial, CallForms(HERMES.syntax), elsewhere)
    with pytest.raises(NotImplementedError):
        compiler.mask(constraint)
    assert trial.asked == elsewhere.followed


@pytest.mark.parametrize("number", [5, 0.01, 100, 1000, 3600, 1024, 2.5])
def test_numbers_of_few_remainders_are(vocab: Vocab, trial: Trusting, number: float) -> None:
    compiler = Compiler(vocab, GbnfGrammars(vocab), trial, CallForms(HERMES.syntax), Elsewhere())
    assert compiler.mask(Constraint("json_schema", json.dumps({"multipleOf": number})))
    assert not trial.asked


LEXEMES = "start: ({})*\n{}\n".format(
    " | ".join(f"T{n}" for n in range(400)),
    "\n".join(f"T{n}: /[a-z]{{{n},{n + 300}}}{chr(97 + n % 26)}{chr(97 + n // 26)}x/" for n in range(400)),
)
"""Four hundred texts that may be what has been said so far: each token is compared with all of them."""


def test_expressions_that_take_long_side_by_side_are_followed_in_a_process_of_their_own(
    vocab: Vocab, trial: Trusting
) -> None:
    compiler = Compiler(vocab, GbnfGrammars(vocab), trial, CallForms(HERMES.syntax), Elsewhere())
    with pytest.raises(NotImplementedError):
        compiler.mask(Constraint("lark", LEXEMES))
    assert trial.asked == [LEXEMES]


def test_one_answer_beyond_the_limits_of_a_step_has_the_others_moved_before_they_ask(
    vocab: Vocab, trial: Trusting
) -> None:
    """Each took 20 ms of a step to find out, as many as there are slots in the same one."""
    objects = [{"properties": {f"a{n}b{m}": {"const": m} for m in range(20)}} for n in range(60)]
    schema = {"anyOf": [{"type": "object", "additionalProperties": False, **one} for one in objects]}
    compiler = Compiler(vocab, GbnfGrammars(vocab), trial, CallForms(HERMES.syntax), Elsewhere())
    first, second = (compiler.mask(Constraint("json_schema", json.dumps(schema))) for _ in range(2))
    begun = next(token for token in range(vocab.num_tokens) if vocab.piece(token) == b'{"')
    assert second.permits(begun)
    with pytest.raises(NotImplementedError):
        first.accept(begun)
    with pytest.raises(NotImplementedError):
        second.permits(begun)
    with pytest.raises(NotImplementedError):
        compiler.mask(Constraint("json_schema", json.dumps(schema)))


def test_forms_of_many_parts_are_tried_before_they_are_compiled_here(compiler: Compiler, trial: Trusting) -> None:
    names = [f"a{number}" for number in range(300)]
    many = {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
    compiler.mask(Constraint("json_schema", json.dumps(PERSON)))
    assert not trial.asked
    compiler.mask(Constraint("json_schema", json.dumps(many)))
    compiler.mask(Constraint("lark", "start: " + " | ".join(f'"a{number}"' for number in range(3000))))
    compiler.mask(Constraint("lark", "start: " + " | ".join(f'("a" "{number}")' for number in range(300))))
    assert len(trial.asked) == 3


def test_a_form_tells_the_text_that_it_leaves(vocab: Vocab, compiler: Compiler) -> None:
    mask = compiler.mask(Constraint("json_schema", json.dumps(PERSON)))
    for text, forced in (('{"', b'name":'), ("n", b'ame":'), ('ame": "', b"")):
        for token in vocab.tokenize(text, add_special=False, parse_special=False):
            mask.accept(token)
        told = b"".join(map(vocab.piece, mask.forced()))
        assert told.startswith(forced[:4]), (text, told)
        assert forced.startswith(told) or told.startswith(forced)
        assert not told or mask.permits(next(iter(mask.forced())))
