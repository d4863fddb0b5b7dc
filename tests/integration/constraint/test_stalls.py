"""Forms that take ever longer to follow, beside another caller's stream: they end, and it does not feel them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tests.integration.engine.listener import ONE_THREAD, Bench, changed, running
from tests.support.waiting import wait_until
from workers.chat.tools.json_calls import HERMES
from workers.constraint.compiler import Compiler
from workers.constraint.forks import Forks
from workers.constraint.gbnf import Trial
from workers.constraint.moving_mask import ForkedGrammars
from workers.constraint.tool_calls import CallForms
from workers.engine.engine import EngineRequest
from workers.llama.model import Model
from workers.protocol.events import CallEvent, CallFailed, Failed, FailureCode, FinishReason, Text
from workers.protocol.requests import Constraint, Sampling

DEMO = Path(__file__).parents[3] / "deploy" / "demo" / "paddock-demo.gguf"
PROMPT = "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n"

DOUBLES = 'root ::= ([^x] | p)*\np ::= "x" p "y" | "x" p "z" | "x"'
"""Each x in a row doubles the ways to read the text; what a random walk tries has hardly any."""

MAX_GAP_S = 1.5
"""Of the other stream, on a machine that others use: it was minutes."""


@pytest.fixture(scope="module")
def processes() -> Iterator[Forks]:
    with contextlib.closing(Forks(DEMO)) as one:
        one.start()
        yield one


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Model.load(DEMO, ONE_THREAD) as model, running(model, slots=6, n_ctx=4096, kv_tokens=8192) as one:
        yield one


@pytest.fixture(scope="module")
def compiler(bench: Bench, processes: Forks) -> Compiler:
    vocab = bench.model.vocab
    forked = ForkedGrammars(processes, vocab)
    return Compiler(vocab, forked, Trial(processes), CallForms(HERMES.syntax), forked)


class Gaps:
    """When the tokens of one call came."""

    def __init__(self, bench: Bench, key: int) -> None:
        self._key, self._bench = key, bench
        self.at: list[float] = []
        bench.heard.on_step = self._note

    def _note(self, _: int, events: list[CallEvent]) -> None:
        if any(event.call == self._key and isinstance(event, Text) for event in events):
            self.at.append(time.monotonic())

    def longest_s(self) -> float:
        """Up to now, and end the stream: one that still waits has its longest gap before it."""
        end = [] if self._bench.heard.has_ended(self._key) else [time.monotonic()]
        times = [*self.at, *end]
        self._bench.engine.cancel(self._key)
        return max(later - earlier for earlier, later in pairwise(times))


def streaming(bench: Bench) -> Gaps:
    """Another caller's stream, which has begun."""
    request = bench.request(PROMPT, 2000, sampling=Sampling(temperature=1, seed=3), ignore_eos=True)
    gaps = Gaps(bench, bench.submit(request))
    wait_until(lambda: len(gaps.at) > 3, 30)
    return gaps


def of_many_x(bench: Bench, compiler: Compiler, constraint: Constraint) -> EngineRequest:
    x = bench.model.tokenize("x", add_special=False, parse_special=False)[-1]
    sampling = Sampling(temperature=0, logit_bias=((x, 100.0),))
    return changed(bench.request(PROMPT, 300, sampling=sampling), mask=compiler.mask(constraint))


def test_an_ambiguous_grammar_ends_and_nobody_else_waits(bench: Bench, compiler: Compiler) -> None:
    gaps = streaming(bench)
    keys = [bench.submit(of_many_x(bench, compiler, Constraint("gbnf", DOUBLES + f"\na{n} ::= [a]"))) for n in range(1)]
    bench.heard.until(lambda: all(map(bench.heard.has_ended, keys)), 100)
    for key in keys:
        (failed,) = [event for event in bench.heard.calls[key] if isinstance(event, Failed)]
        assert "make it less ambiguous" in failed.failure.message
        assert failed.failure.code is FailureCode.INVALID_REQUEST
    assert gaps.longest_s() < MAX_GAP_S


AMBIGUOUS = 'start: e\ne: e e | "x" | "x" e | e "x"\n'
"""Ways to read so many x grow with their cube, and the work for the next one with their number's square."""


def test_an_ambiguous_lark_grammar_moves_to_a_process_of_its_own(
    bench: Bench, compiler: Compiler, processes: Forks
) -> None:
    gaps = streaming(bench)
    key = bench.submit(of_many_x(bench, compiler, Constraint("lark", AMBIGUOUS)))
    wait_until(lambda: bool(psutil.Process(processes.pid).children()) or bench.heard.has_ended(key), 60)
    at_the_move = len(bench.heard.text(key))
    assert set(bench.heard.text(key)) == {"x"}
    wait_until(lambda: len(bench.heard.text(key)) > at_the_move or bench.heard.has_ended(key), 60)
    bench.engine.cancel(key)
    wait_until(lambda: not psutil.Process(processes.pid).children(), 60)
    assert at_the_move > 10
    assert gaps.longest_s() < MAX_GAP_S


def test_a_schema_that_is_beyond_the_limits_of_a_step_is_kept_elsewhere(
    bench: Bench, compiler: Compiler, processes: Forks
) -> None:
    schema = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(300)}}
    closed = {**schema, "additionalProperties": False, "required": ["p299"]}
    mask = compiler.mask(Constraint("json_schema", json.dumps(closed)))
    key = bench.submit(changed(bench.request(PROMPT, 200, sampling=Sampling(temperature=1, seed=5)), mask=mask))
    wait_until(lambda: bool(psutil.Process(processes.pid).children()) or bench.heard.has_ended(key), 20)
    assert psutil.Process(processes.pid).children()
    bench.heard.until(lambda: bench.heard.has_ended(key), 60)
    assert not isinstance(bench.heard.calls[key][-1], Failed)
    assert bench.heard.text(key).startswith("{")


def test_a_caller_who_leaves_takes_the_grammars_process_along(
    bench: Bench, compiler: Compiler, processes: Forks
) -> None:
    gaps = streaming(bench)
    key = bench.submit(of_many_x(bench, compiler, Constraint("gbnf", DOUBLES)))
    wait_until(lambda: bool(psutil.Process(processes.pid).children()), 10)
    bench.engine.cancel(key)
    wait_until(lambda: not psutil.Process(processes.pid).children(), 30)
    assert gaps.longest_s() < MAX_GAP_S


def test_a_beginning_that_nobody_has_time_to_look_at_is_tried_again_elsewhere(
    processes: Forks, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.constraint.moving_mask.WAIT_S", 0.0)
    grammar = ForkedGrammars(processes, bench.model.vocab).compile('root ::= "ab" [a-z]*')
    with pytest.raises(CallFailed) as refused:
        grammar.refused_of([b"ab"])
    assert refused.value.failure.code is FailureCode.UNAVAILABLE


def test_masks_that_answer_late_give_the_same_text(
    bench: Bench, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = Constraint("gbnf", 'root ::= ([a-z]+ " ")+ "."')
    request = bench.request(PROMPT, 60, sampling=Sampling(temperature=1, seed=11))
    texts = []
    for grace_s in (10.0, 0.0):
        monkeypatch.setattr("workers.constraint.moving_mask.GRACE_S", grace_s)
        texts.append(bench.answer(bench.again(changed(request, mask=compiler.mask(lines)))))
    assert texts[0] == texts[1]
    assert texts[0]


def test_a_process_that_ends_in_the_middle_ends_its_call_only(
    bench: Bench, compiler: Compiler, processes: Forks
) -> None:
    gaps = streaming(bench)
    mask = compiler.mask(Constraint("gbnf", "root ::= [a-z ]*"))
    key = bench.submit(changed(bench.request(PROMPT, 300, ignore_eos=True), mask=mask))
    wait_until(lambda: bool(bench.heard.text(key)), 10)
    for child in psutil.Process(processes.pid).children():
        child.kill()
    bench.wait(key)
    failed = bench.heard.calls[key][-1]
    assert isinstance(failed, Failed)
    assert failed.failure.code is FailureCode.OUT_OF_MEMORY, "whoever killed it, the grammar did not"
    assert gaps.longest_s() < MAX_GAP_S
    again = bench.submit(changed(bench.request(PROMPT, 5), mask=compiler.mask(Constraint("gbnf", 'root ::= "ab"'))))
    bench.wait(again)
    assert bench.heard.text(again) == "ab"
    assert bench.heard.finished(again).reason is FinishReason.STOP
