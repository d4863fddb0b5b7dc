"""Grammars that crash or hang llama.cpp, in the process that is there for it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from workers.chat.tools.hermes import HERMES
from workers.constraint.compiler import Compiler
from workers.constraint.failures import Unusable
from workers.constraint.tool_calls import CallForms
from workers.constraint.trial import Trial
from workers.llama.grammar import GbnfGrammars
from workers.llama.vocab_file import VocabFile
from workers.protocol.failures import CallFailed, FailureCode
from workers.protocol.requests import Constraint

DEMO = Path(__file__).parents[3] / "deploy" / "demo" / "paddock-demo.gguf"

GOOD = 'root ::= "a" [0-9]+ | "é"'
# `a` may be empty by way of `b`, which llama.cpp's search for left recursion misses: its stacks grow without end.
GROWS = 'root ::= a root "z" | "x"\na ::= b\nb ::= "" | "y"'
# Each `?` doubles the ways to read one more x.
HANGS = 'root ::= ("x"?){0,900} ("x"?){0,900} ("x"?){0,900}'


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    one = Trial(DEMO, trial_s=30.0)
    try:
        yield one
    finally:
        one.close()


def reason(trial: Trial, gbnf: str) -> str:
    with pytest.raises(Unusable) as caught:
        trial.check("gbnf", gbnf)
    return str(caught.value)


def test_a_crash_is_told_and_the_next_grammar_is_tried(trial: Trial) -> None:
    trial.check("gbnf", GOOD)
    first = trial.pid
    assert "crashed" in reason(trial, GROWS)
    trial.check("gbnf", GOOD)
    assert trial.pid not in (None, first)


def test_a_hang_is_ended_in_time() -> None:
    trial = Trial(DEMO, trial_s=0.7)
    try:
        trial.check("gbnf", GOOD)
        start = time.monotonic()
        assert "longer than 0.7 s" in reason(trial, HANGS)
        assert time.monotonic() - start < 5
        assert trial.pid is None
    finally:
        trial.close()


def test_a_process_that_somebody_killed_is_replaced(trial: Trial) -> None:
    trial.check("gbnf", GOOD)
    assert trial.pid is not None
    os.kill(trial.pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(trial.pid)], timeout=5)
    trial.check("gbnf", GOOD)


@pytest.mark.parametrize(
    ("gbnf", "words"),
    [
        ('root ::= "a', "unexpected end of input"),
        ("root ::= other", "Undefined rule identifier 'other'"),
        ('root ::= root "a" | "a"', "left recursion"),
        ('other ::= "a"', "root"),
        ('root ::= "a"{1,100000}', "above 1000"),
        ("root ::= <[4294967295]>", "no token"),
        ("  ", "empty"),
    ],
)
def test_what_llama_cpp_refuses_comes_with_its_reason(trial: Trial, gbnf: str, words: str) -> None:
    assert words in reason(trial, gbnf)


def test_the_process_knows_no_secrets(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDOCK_WORKER_SECRET", "hush")
    trial.close()
    trial.check("gbnf", GOOD)
    assert "PADDOCK_WORKER_SECRET" not in psutil.Process(trial.pid).environ()


def test_a_crowd_is_turned_away() -> None:
    trial = Trial(DEMO, trial_s=0.4)
    outcomes: list[str] = []

    def ask() -> None:
        try:
            trial.check("gbnf", HANGS)
        except CallFailed as failed:
            outcomes.append(failed.failure.code)
        except Unusable:
            outcomes.append("tried")

    try:
        trial.check("gbnf", GOOD)
        threads = [threading.Thread(target=ask) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        trial.close()
    assert outcomes.count(FailureCode.BUSY) == 2
    assert outcomes.count("tried") == 3


def test_patterns_without_a_known_end_are_ended_in_time() -> None:
    parts = [{"pattern": f"a.{{{n}}}b"} for n in range(40)]
    trial = Trial(DEMO, trial_s=1.0)
    with VocabFile.load(DEMO) as file:
        compiler = Compiler(file.vocab, GbnfGrammars(file.vocab), trial, CallForms(HERMES.syntax))
        try:
            with pytest.raises(CallFailed, match="make it simpler"):
                compiler.mask(Constraint("json_schema", json.dumps({"type": "string", "allOf": parts})))
            assert trial.pid is None
            compiler.mask(Constraint("json_schema", json.dumps({"type": "string", "allOf": parts[:2]})))
            assert trial.pid is None
        finally:
            trial.close()


def test_lark_is_compiled_only(trial: Trial) -> None:
    trial.check("lark", 'start: "a" | /b+/')
    with pytest.raises(Unusable, match="nothing"):
        trial.check("lark", "start: nothing")


def test_without_a_model_there_is_no_trial(tmp_path: Path) -> None:
    trial = Trial(tmp_path / "missing.gguf")
    with pytest.raises(CallFailed) as caught:
        trial.check("gbnf", GOOD)
    assert caught.value.failure.code == FailureCode.INTERNAL
    trial.close()
