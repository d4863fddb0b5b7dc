"""The schemas of `benchmarks/schemas`, each with values that it allows and values that it forbids."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.constraint.mask import Mask
from workers.llama.tokens.vocab import Vocab
from workers.protocol.requests import Constraint

FOLDER = Path(__file__).parents[1] / "schemas"


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    schema: Any
    valid: list[Any]
    invalid: list[Any]

    @property
    def constraint(self) -> Constraint:
        return Constraint("json_schema", json.dumps(self.schema))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one schema."""

    case: Case
    refused: str = ""
    """Why it was not taken, if it was not."""
    rejected: tuple[Any, ...] = ()
    """Allowed values that did not pass."""
    accepted: tuple[Any, ...] = ()
    """Forbidden values that did."""

    @property
    def right(self) -> bool:
        return not (self.refused or self.rejected or self.accepted)


def load_cases() -> list[Case]:
    return [Case(**case) for path in sorted(FOLDER.glob("*.json")) for case in json.loads(path.read_text())]


def tokens_of(value: Any, vocab: Vocab) -> list[int]:
    """A value as Python writes it, in the vocabulary's own tokens."""
    return vocab.tokenize(json.dumps(value, ensure_ascii=False), add_special=False, parse_special=False)


def judge(case: Case, vocab: Vocab, mask: Callable[[], Mask]) -> Verdict:
    """`mask` makes a fresh one for each value."""

    def passes(value: Any) -> bool:
        one = mask()
        for token in tokens_of(value, vocab):
            if not one.permits(token):
                return False
            one.accept(token)
        return one.permits(vocab.eos)

    rejected = tuple(value for value in case.valid if not passes(value))
    return Verdict(case, "", rejected, tuple(value for value in case.invalid if passes(value)))
