"""Grammars that crash or hang llama.cpp, in the process that is there for it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.small_models import write_wide_model
from tests.support.waiting import wait_until
from workers.chat.tools.json_calls import HERMES
from workers.constraint import forks, moving_mask
from workers.constraint.compiler import Compiler
from workers.constraint.forks import Forks
from workers.constraint.gbnf import Trial
from workers.constraint.mask import MaskPending, Unusable
from workers.constraint.moving_mask import ForkedGrammars
from workers.constraint.tool_calls import CallForms
from workers.llama.sampling import grammar_forks
from workers.llama.tokens.vocab import VocabFile
from workers.process.helper_process import NotStarted, ProcessEnded
from workers.protocol.events import CallFailed, FailureCode
from workers.protocol.requests import Constraint

DEMO = Path(__file__).parents[3] / "deploy" / "demo" / "paddock-demo.gguf"

GOOD = 'root ::= "a" [0-9]+ | "é"'
# `a` may be empty by way of `b`, which llama.cpp's search for left recursion misses: its stacks grow without end.
GROWS = 'root ::= a root "z" | "x"\na ::= b\nb ::= "" | "y"'
# Each `?` doubles the ways to read one more x.
HANGS = 'root ::= ("x"?){0,900} ("x"?){0,900} ("x"?){0,900}'


@pytest.fixture(scope="module")
def processes() -> Iterator[Forks]:
    with contextlib.closing(Forks(DEMO)) as one:
        yield one


@pytest.fixture
def trial(processes: Forks) -> Trial:
    return Trial(processes, trial_s=30.0)


def children(processes: Forks) -> list[psutil.Process]:
    """The processes that were forked and are still there."""
    return psutil.Process(processes.pid).children()


def reason(trial: Trial, gbnf: str) -> str:
    with pytest.raises(Unusable) as caught:
        trial.check("gbnf", gbnf)
    return str(caught.value)


def test_a_crash_is_told_and_the_next_grammar_is_tried(trial: Trial, processes: Forks) -> None:
    trial.check("gbnf", GOOD)
    first = processes.pid
    assert "crashed" in reason(trial, GROWS)
    trial.check("gbnf", GOOD)
    assert processes.pid == first


def test_a_hang_is_ended_in_time(trial: Trial, processes: Forks) -> None:
    start = time.monotonic()
    assert "took too long" in reason(trial, HANGS)
    assert time.monotonic() - start < 30  # two seconds of processor time, of a machine with other work
    wait_until(lambda: not children(processes), 10)


def test_a_grammar_is_not_waited_for_and_its_process_ends_at_once(processes: Forks) -> None:
    with pytest.raises(CallFailed) as caught:
        Trial(processes, trial_s=0.5).check("gbnf", HANGS)
    assert caught.value.failure.code == FailureCode.BUSY  # perhaps the machine was busy
    wait_until(lambda: not children(processes), 2)


def test_a_process_that_somebody_killed_is_replaced(trial: Trial, processes: Forks) -> None:
    trial.check("gbnf", GOOD)
    assert processes.pid is not None
    os.kill(processes.pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(processes.pid)], timeout=5)
    trial.check("gbnf", GOOD)


@pytest.fixture
def stopped(processes: Forks) -> Iterator[psutil.Process]:
    """The process that forks, stopped. It gets no answer out of a trial."""
    processes.start()
    assert processes.pid is not None
    one = psutil.Process(processes.pid)
    one.suspend()
    yield one
    with contextlib.suppress(psutil.NoSuchProcess):
        one.resume()


def test_a_process_that_stands_still_is_replaced(
    stopped: psutil.Process, processes: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "ANSWER_S", 0.5)
    with pytest.raises(CallFailed, match="stood still") as caught:
        Trial(processes, trial_s=0.5).check("gbnf", GOOD)
    assert caught.value.failure.code is FailureCode.UNAVAILABLE
    Trial(processes, trial_s=30.0).check("gbnf", GOOD)
    assert processes.pid != stopped.pid


def test_a_process_that_stands_still_is_replaced_by_answers_and_triggers_alone(
    processes: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "ANSWER_S", 0.5)
    monkeypatch.setattr(moving_mask, "WAIT_S", 0.3)
    with VocabFile.load(DEMO) as file:
        grammar = ForkedGrammars(processes, file.vocab).compile(GOOD)

        def follow() -> None:
            mask = grammar.mask()
            while True:
                try:
                    mask.allowed()
                except MaskPending:
                    time.sleep(0.01)

        def begin() -> None:
            grammar.refused_of([b"a"])

        for use in (begin, follow):
            processes.start()
            assert processes.pid is not None
            first = psutil.Process(processes.pid)
            first.suspend()
            with pytest.raises(CallFailed) as caught:
                use()
            assert caught.value.failure.code is FailureCode.UNAVAILABLE
            processes.start()
            assert processes.pid != first.pid


def test_a_slow_trial_is_not_blamed_on_the_process_that_forks(
    processes: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "ANSWER_S", 0.5)
    processes.start()
    first = processes.pid
    with pytest.raises(CallFailed) as caught:
        Trial(processes, trial_s=0.5).check("gbnf", HANGS)
    assert caught.value.failure.code is FailureCode.BUSY
    Trial(processes, trial_s=30.0).check("gbnf", GOOD)
    assert processes.pid == first


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


def test_the_process_knows_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDOCK_WORKER_SECRET", "hush")
    with contextlib.closing(Forks(DEMO)) as processes:
        Trial(processes).check("gbnf", GOOD)
        assert "PADDOCK_WORKER_SECRET" not in psutil.Process(processes.pid).environ()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the limits of another process")
def test_a_process_that_is_given_a_grammar_is_shut_off(processes: Forks) -> None:
    processes.start()
    fork = processes.fork()
    assert fork is not None
    fork.ask(forks.COMPILE, json.dumps(["gbnf", GOOD]).encode())
    assert fork.take(10.0) is not None
    (child,) = children(processes)
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
        assert resource.prlimit(child.pid, kind) == (0, 0)
    assert resource.prlimit(child.pid, resource.RLIMIT_AS)[0] < 4 << 30
    fork.close()
    wait_until(lambda: not children(processes), 10)


def test_patterns_without_a_known_end_are_ended_in_time(processes: Forks) -> None:
    parts = [{"pattern": f"a.{{{n}}}b"} for n in range(40)]
    trial = Trial(processes, trial_s=60.0)
    with VocabFile.load(DEMO) as file:
        compiler = Compiler(file.vocab, ForkedGrammars(processes, file.vocab), trial, CallForms(HERMES.syntax))
        with pytest.raises(CallFailed, match="make it simpler"):
            compiler.mask(Constraint("json_schema", json.dumps({"type": "string", "allOf": parts})))
        compiler.mask(Constraint("json_schema", json.dumps({"type": "string", "allOf": parts[:2]})))


def nested(levels: int, **keywords: object) -> str:
    """Return a schema of definitions, each of which refers to the next one with one of its `keywords`."""
    last = json.dumps({"type": "null"})
    definitions = [json.dumps(keywords).replace('"NEXT"', f'{{"$ref": "#/$defs/{one + 1}"}}') for one in range(levels)]
    listed = ", ".join(f'"{number}": {text}' for number, text in enumerate([*definitions, last]))
    return f'{{"$defs": {{{listed}}}, "$ref": "#/$defs/0"}}'


RULES = "start: r0\n" + "".join(f'r{n}: "a" r{n + 1}\n' for n in range(5000)) + 'r5000: "z"\n'
LEVELS = {
    "rules": Constraint("lark", RULES),
    "terminals": Constraint("lark", RULES.replace("r", "T").replace("staTt", "start")),
    "objects": Constraint("json_schema", nested(1500, type="object", properties={"a": "NEXT"}, required=["a"])),
    "arrays": Constraint("json_schema", nested(2500, items="NEXT")),
    "alternatives": Constraint("json_schema", nested(2500, anyOf=["NEXT", {"type": "null"}])),
}


@pytest.mark.parametrize("what", LEVELS)
def test_levels_without_number_end_a_trial_and_not_the_worker(trial: Trial, processes: Forks, what: str) -> None:
    with VocabFile.load(DEMO) as file:
        grammars = ForkedGrammars(processes, file.vocab)
        compiler = Compiler(file.vocab, grammars, trial, CallForms(HERMES.syntax), grammars)
        with pytest.raises(CallFailed, match="SIGSEGV") as caught:
            compiler.mask(LEVELS[what])
        assert caught.value.failure.code is FailureCode.INVALID_REQUEST
        assert compiler.mask(Constraint("regex", "[a-z]+")) is not None


def test_lark_is_compiled_only(trial: Trial) -> None:
    trial.check("lark", 'start: "a" | /b+/')
    with pytest.raises(Unusable, match="nothing"):
        trial.check("lark", "start: nothing")


def test_without_a_model_there_is_no_trial(tmp_path: Path) -> None:
    with contextlib.closing(Forks(tmp_path / "missing.gguf")) as processes:
        with pytest.raises(CallFailed) as caught:
            Trial(processes).check("gbnf", GOOD)
        assert caught.value.failure.code == FailureCode.UNAVAILABLE


def test_a_grammar_whose_trial_somebody_kills_is_not_to_blame(trial: Trial, processes: Forks) -> None:
    processes.start()
    failures: list[CallFailed] = []

    def check() -> None:
        try:
            trial.check("gbnf", HANGS)
        except CallFailed as failed:
            failures.append(failed)

    checking = threading.Thread(target=check)
    checking.start()
    wait_until(lambda: bool(children(processes)), 10)
    for child in children(processes):
        child.kill()
    checking.join(10)
    assert [one.failure.code for one in failures] == [FailureCode.OUT_OF_MEMORY]


def test_a_process_that_can_t_be_forked_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forking process has no more memory or processes to give."""

    def refuse() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    (end, their_end), (life, their_life) = socket.socketpair(), socket.socketpair()
    with end, life:
        asking = forks.Fork(end, life)
        asking.ask(forks.TRY)
        their_end.close()
        assert not grammar_forks.fork(grammar_forks.Children(), their_life.detach())
        signal.set_wakeup_fd(-1)
        with pytest.raises(NotStarted, match="could not be forked"):
            asking.take(5.0)


def test_no_thread_begins_while_a_worker_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine starts the process anew; short of memory, a worker could hang for good where it began a thread."""
    with contextlib.closing(Forks(DEMO)) as processes:
        monkeypatch.setattr(threading.Thread, "start", lambda _: pytest.fail("a thread was started"))
        for _ in range(2):
            assert processes.fork() is None
            assert processes.is_ready(30.0)
            fork = processes.fork()
            assert fork is not None
            fork.close()
            assert processes.pid is not None
            psutil.Process(processes.pid).kill()
            wait_until(lambda: psutil.Process(processes.pid).status() == psutil.STATUS_ZOMBIE, 10)


def test_how_a_process_ended_is_told_once_and_again(processes: Forks) -> None:
    processes.start()
    fork = processes.fork()
    assert fork is not None
    fork.ask(forks.COMPILE, json.dumps(["gbnf", GOOD]).encode())
    assert fork.take(10.0) is not None
    (child,) = children(processes)
    child.send_signal(signal.SIGSEGV)
    for _ in range(2):
        with pytest.raises(ProcessEnded, match="SIGSEGV") as ended:
            fork.take(5.0)
        assert not ended.value.killed


def test_a_process_that_ends_after_the_one_that_forks_was_killed_by_somebody() -> None:
    with contextlib.closing(Forks(DEMO)) as processes:
        processes.start()
        fork = processes.fork()
        assert fork is not None
        fork.ask(forks.COMPILE, json.dumps(["gbnf", GOOD]).encode())
        assert fork.take(10.0) is not None
        (child,) = children(processes)
        psutil.Process(processes.pid).kill()
        child.kill()
        with pytest.raises(ProcessEnded) as ended:
            fork.take(5.0)
        assert ended.value.killed


def test_a_grammars_process_holds_little_of_its_own_on_a_large_vocabulary(tmp_path: Path) -> None:
    """llama.cpp decodes all tokens that it is given at once: 100 MiB of 150,000, in the process of each answer."""
    write_wide_model(tmp_path / "wide.gguf", 150_000)
    with contextlib.closing(Forks(tmp_path / "wide.gguf")) as processes:
        processes.start()
        fork = processes.fork()
        assert fork is not None
        fork.ask(forks.COMPILE, json.dumps(("gbnf", 'root ::= [^x]* | "x"')).encode())
        fork.ask(forks.ALLOWED)
        answers = [fork.take(30.0) for _ in range(2)]
        assert [answer and answer[0] for answer in answers] == [forks.OK, forks.OK]
        (child,) = children(processes)
        assert child.memory_full_info().uss < 40 << 20
        fork.close()
