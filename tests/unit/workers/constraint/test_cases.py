"""The schemas of the benchmark, and what each allows and forbids."""

from __future__ import annotations

import jsonschema
import pytest

from benchmarks.constrained.cases import Case, Verdict, judge, load_cases
from workers.constraint.compiler import Compiler
from workers.llama.tokens.vocab import Vocab
from workers.protocol.events import CallFailed

CASES = load_cases()
ONE_ORDER = "fields in any order"
"""llguidance writes properties in the order of the schema."""
PADDED = "quarter steps"
"""llguidance wants as many decimals as the step has: 0.50."""

TAKEN = "unique items"
"""Of any integers: a grammar does not know which ones were there."""


def named(cases: list[Case]) -> list[str]:
    return [case.name for case in cases]


def test_there_are_enough_of_them_and_no_name_twice() -> None:
    assert len(CASES) >= 60
    assert len(set(named(CASES))) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=named(CASES))
def test_the_values_are_what_they_are_said_to_be(case: Case) -> None:
    validator = jsonschema.Draft202012Validator(case.schema, format_checker=jsonschema.FormatChecker())
    assert case.valid
    assert case.invalid
    assert all(validator.is_valid(value) for value in case.valid)
    assert not any(validator.is_valid(value) for value in case.invalid)


@pytest.mark.parametrize("case", CASES, ids=named(CASES))
def test_no_forbidden_value_passes(case: Case, vocab: Vocab, compiler: Compiler) -> None:
    try:
        verdict = judge(case, vocab, lambda: compiler.mask(case.constraint))
    except CallFailed as failed:
        verdict = Verdict(case, failed.failure.message)
    assert bool(verdict.accepted) is (case.name == TAKEN)
    if case.name in (ONE_ORDER, PADDED):
        assert verdict.rejected
    else:
        assert not verdict.rejected
