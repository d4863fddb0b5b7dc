"""How many schemas are taken to the letter: every allowed value passes, no forbidden one does.

A schema that is refused is neither right nor wrong. Both judge the same texts in the demo model's vocabulary:
Paddock through its compiler, llama.cpp through the GBNF that llama-server makes of the schema.
"""

from __future__ import annotations

from benchmarks.constrained.cases import Case, Verdict, judge
from benchmarks.constrained.converter import Converter, Refused, converter
from benchmarks.table import Row
from tests.support.stack import DEMO_MODEL
from workers.chat.tools.json_calls import HERMES
from workers.constraint.compiler import Compiler
from workers.constraint.forks import Forks
from workers.constraint.gbnf import Trial
from workers.constraint.mask import Unusable
from workers.constraint.tool_calls import CallForms
from workers.llama.sampling.grammar import GbnfGrammars
from workers.llama.tokens.vocab import Vocab, VocabFile
from workers.protocol.events import CallFailed


def measure(cases: list[Case]) -> list[Row]:
    with VocabFile.load(DEMO_MODEL) as file, converter(DEMO_MODEL) as theirs:
        ours = [judge_ours(case, file.vocab, compiler) for compiler in [compiler_for(file.vocab)] for case in cases]
        others = [_judge_theirs(case, file.vocab, theirs) for case in cases]
    num_ours, num_others = (sum(verdict.right for verdict in verdicts) for verdicts in (ours, others))
    return [
        _row("Paddock", ours, f"{num_ours / max(num_others, 1):.2f} x", "more than llama.cpp", num_ours > num_others),
        _row("llama.cpp's converter", others, "", "", True),
    ]


def compiler_for(vocab: Vocab) -> Compiler:
    """Schemas need no trial, so its process never starts. Cases are judged by the letter: open objects are open."""
    forms = CallForms(HERMES.syntax, open_objects=True)
    return Compiler(vocab, GbnfGrammars(vocab), Trial(Forks(DEMO_MODEL)), forms)


def judge_ours(case: Case, vocab: Vocab, compiler: Compiler) -> Verdict:
    try:
        return judge(case, vocab, lambda: compiler.mask(case.constraint))
    except CallFailed as failed:
        return Verdict(case, failed.failure.message)


def _judge_theirs(case: Case, vocab: Vocab, converter: Converter) -> Verdict:
    try:
        grammar = GbnfGrammars(vocab).compile(converter.gbnf(case.schema))
    except (Refused, Unusable) as refused:
        return Verdict(case, str(refused))
    return judge(case, vocab, grammar.mask)


def _row(who: str, verdicts: list[Verdict], ratio: str, bar: str, reached: bool) -> Row:
    right = sum(verdict.right for verdict in verdicts)
    refused = sum(bool(verdict.refused) for verdict in verdicts)
    loose = sum(bool(verdict.accepted) for verdict in verdicts)
    wrong = len(verdicts) - right - refused
    figure = f"{right} of {len(verdicts)} right, {wrong} wrong ({loose} let forbidden values pass), {refused} refused"
    return Row(f"JSON Schemas, {who}", figure, ratio, bar, reached)
