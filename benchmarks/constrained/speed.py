"""What a constrained token costs beyond a free one, on the engine's thread: microseconds of processor time.

The logits are random, so that nearly every token drawn is refused and the whole way is gone; a model that keeps to the
form by itself goes the short one. The walk follows true answers to the schemas, token by token.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

import numpy as np

from benchmarks.constrained.cases import Case, tokens_of
from benchmarks.synthetic_model import synthetic_model
from benchmarks.table import Row
from workers.constraint.guidance import Grammar, schema_to_lark, tokenizer
from workers.constraint.languages.schema import enforceable
from workers.constraint.mask import Bits, Mask, Unusable
from workers.llama.sampling.candidates import Candidates
from workers.llama.sampling.grammar import GbnfGrammars
from workers.llama.sampling.samplers import SamplerChain
from workers.llama.tokens.vocab import Vocab, VocabFile
from workers.protocol.requests import Sampling

BAR_US = 200.0
MAX_GBNF_TOKENS = 150
SAMPLING = Sampling(temperature=0.8, seed=1)
JSON_GBNF = r"""root ::= object
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" s (string ":" s value ("," s string ":" s value)*)? "}"
array ::= "[" s (value ("," s value)*)? "]"
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
number ::= "-"? [0-9]+ ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
s ::= " "?
"""


@dataclass(slots=True)
class Costs:
    """Seconds of each act, token by token."""

    free: list[float] = field(default_factory=list)
    permits: list[float] = field(default_factory=list)
    allowed: list[float] = field(default_factory=list)
    redraw: list[float] = field(default_factory=list)
    accept: list[float] = field(default_factory=list)

    def parts(self) -> tuple[list[float], ...]:
        return self.free, self.permits, self.allowed, self.redraw, self.accept

    def add(self, other: Costs) -> None:
        for mine, theirs in zip(self.parts(), other.parts(), strict=True):
            mine.extend(theirs)


class Bench:
    def __init__(self, vocab: Vocab) -> None:
        self.vocab = vocab
        self._candidates = Candidates(vocab.num_tokens)
        self._chain = SamplerChain(vocab, SAMPLING, n_ctx=2048, masked=True)
        self._logits = np.random.default_rng(1).normal(0, 3, vocab.num_tokens).astype(np.float32)

    def walk(self, mask: Mask, tokens: list[int]) -> Costs:
        """One answer, as far as the mask lets it."""
        costs = Costs()
        clock = time.thread_time
        for token in tokens:
            start = clock()
            drawn = self._draw(None)
            free = clock()
            mask.permits(drawn)
            permits = clock()
            bits = mask.allowed()
            allowed = clock()
            self._draw(bits)
            redrawn = clock()
            if not mask.permits(token):
                break
            accept = clock()
            mask.accept(token)
            costs.accept.append(clock() - accept)
            costs.free.append(free - start)
            costs.permits.append(permits - free)
            costs.allowed.append(allowed - permits)
            costs.redraw.append(redrawn - allowed)
        return costs

    def _draw(self, bits: Bits | None) -> int:
        self._candidates.fill(self._logits, bits, self._chain.permitted)
        return self._candidates.choose(self._chain.pointer)


def measure(cases: list[Case]) -> list[Row]:
    with VocabFile.load(synthetic_model()) as file:
        bench = Bench(file.vocab)
        schemas = _rows(f"JSON Schema, {file.vocab.num_tokens:,} tokens", _schema_costs(bench, cases), BAR_US)
        return [*schemas, *_rows("GBNF of JSON, llama.cpp", _gbnf_costs(bench, cases), None)]


def _schema_costs(bench: Bench, cases: list[Case]) -> Costs:
    words = tokenizer(bench.vocab)
    total = Costs()
    for case in cases:
        try:
            grammar = Grammar(words, schema_to_lark(enforceable(case.schema)))
        except Unusable:
            continue
        for value in case.valid:
            total.add(bench.walk(grammar.mask(), tokens_of(value, bench.vocab)))
    return total


def _gbnf_costs(bench: Bench, cases: list[Case]) -> Costs:
    grammar = GbnfGrammars(bench.vocab).compile(JSON_GBNF)
    total = Costs()
    for case in cases:
        if isinstance(case.valid[0], dict) and len(total.free) < MAX_GBNF_TOKENS:
            total.add(bench.walk(grammar.mask(), tokens_of(case.valid[0], bench.vocab)))
    return total


def _rows(what: str, costs: Costs, bar: float | None) -> list[Row]:
    free, permits, allowed, redraw, accept = (statistics.fmean(part) * 1e6 for part in costs.parts())
    kept, refused = permits + accept, permits + allowed + redraw + accept
    worst = statistics.quantiles(costs.allowed, n=100)[98] * 1e6
    parts = f"check {permits:.1f}, mask {allowed:.1f} (p99 {worst:.0f}), draw again {redraw:.1f}, accept {accept:.1f}"
    bar_text = f"<= {bar:.0f} µs" if bar else ""
    return [
        Row(
            f"{what}: a token that is refused",
            f"+{refused:.0f} µs: {parts}",
            f"{1 + refused / free:.2f} x of a free draw",
            bar_text,
            bar is None or refused <= bar,
        ),
        Row(
            f"{what}: a token that keeps to the form",
            f"+{kept:.0f} µs",
            f"{1 + kept / free:.2f} x of a free draw",
            bar_text,
            bar is None or kept <= bar,
        ),
    ]
