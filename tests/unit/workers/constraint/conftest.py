from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from workers.chat.tools.json_calls import HERMES
from workers.constraint.compiler import Compiler
from workers.constraint.tool_calls import CallForms
from workers.llama.sampling.grammar import GbnfGrammars
from workers.llama.tokens.vocab import Vocab, VocabFile

DEMO = Path(__file__).parents[4] / "deploy" / "demo" / "paddock-demo.gguf"


class Trusting:
    """In the place of a trial: these tests give it harmless grammars only."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def check(self, kind: Literal["gbnf", "lark"], text: str) -> None:
        self.asked.append(text)


@pytest.fixture(scope="package")
def vocab() -> Iterator[Vocab]:
    with VocabFile.load(DEMO) as file:
        yield file.vocab


@pytest.fixture
def trial() -> Trusting:
    return Trusting()


@pytest.fixture
def compiler(vocab: Vocab, trial: Trusting) -> Compiler:
    return Compiler(vocab, GbnfGrammars(vocab), trial, CallForms(HERMES.syntax, open_objects=True))
