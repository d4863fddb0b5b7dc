"""Long texts: what llama.cpp's tokenizer dies of ends a process that holds nothing, and ids are llama.cpp's own.

The model has a pre-tokenizer that llama.cpp runs by std::regex, which calls itself for each character of a run.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.llama_source import files_of, llama_cpp_source
from tests.support.process_limits import few_descriptors
from tests.support.small_models import write_small_model
from tests.support.texts import fuzzed_texts
from tests.support.waiting import wait_until
from workers.chat.prompts import Prompts, TooManyTokens, patience_s
from workers.llama.tokens.token_process import NO_MEMORY
from workers.llama.tokens.tokenizer import IN_PROCESS_CHARS, GuardedTokenizer, TokenProcesses
from workers.llama.tokens.vocab import Vocab, VocabFile, encoded
from workers.process.helper_process import NotStarted, ProcessEnded, TookTooLong
from workers.protocol.events import CallFailed, FailureCode
from workers.protocol.requests import GenerateRequest

PLAIN = """
import sys, threading
from pathlib import Path
from workers.llama.tokens.vocab import VocabFile
with VocabFile.load(Path(sys.argv[1])) as file:
    threading.stack_size(8 << 20)
    text = "=" * int(sys.argv[2])
    asked = {"add_special": False, "parse_special": True}
    thread = threading.Thread(target=file.vocab.tokenize, args=(text,), kwargs=asked)
    thread.start()
    thread.join()
"""
RUNS = ("=", " ", "a", "1", "\n", "'", "\u4f60", "\u0301", "aA", " \n", "A1 ")
VOCABULARIES = files_of("models", "ggml-vocab-*.gguf")
SHORTEST_CHARS, LONGEST_CHARS = 5_000, 50_000
"""Of fuzzed texts that go to the processes."""
QUICK = ("ggml-vocab-llama-spm", "ggml-vocab-bert-bge", "ggml-vocab-falcon", "ggml-vocab-deepseek-coder")


@dataclass(frozen=True, slots=True)
class Bench:
    path: Path
    vocab: Vocab
    processes: TokenProcesses

    @property
    def tokenizer(self) -> GuardedTokenizer:
        return GuardedTokenizer(self.vocab, self.processes)

    def guarded(self, text: str) -> list[int]:
        return list(self.tokenizer.tokenize(text, add_special=True, parse_special=True))

    def plain(self, text: str) -> list[int]:
        return plain(self.vocab, text, add_special=True, parse_special=True)


def is_running(pid: int) -> bool:
    """Return whether a process runs. One that has ended stays as a zombie until its parent, maybe process 1, waits."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def plain(vocab: Vocab, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
    """llama.cpp's own, on a thread with a stack that takes it."""
    found: list[list[int]] = []
    before = threading.stack_size(256 << 20)
    try:
        thread = threading.Thread(
            target=lambda: found.append(vocab.tokenize(text, add_special=add_special, parse_special=parse_special))
        )
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    return found[0]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    path = write_small_model(tmp_path_factory.mktemp("model"), "attention", pre="deepseek-v3")
    with VocabFile.load(path) as file:
        processes = TokenProcesses(path)
        yield Bench(path, file.vocab, processes)
        processes.close()


def test_llama_cpp_itself_dies_of_a_run(bench: Bench) -> None:
    """If this ever fails, llama.cpp has mended it, and the processes may go."""
    command = [sys.executable, "-c", PLAIN, str(bench.path)]
    environment = os.environ | {"GGML_NO_BACKTRACE": "1"}
    assert subprocess.run([*command, "1000"], env=environment, capture_output=True, check=False).returncode == 0
    died = subprocess.run([*command, "30000"], env=environment, capture_output=True, check=False)
    assert died.returncode == -signal.SIGSEGV


@pytest.mark.parametrize("run", RUNS, ids=ascii)
def test_runs_of_like_characters_become_the_right_tokens(bench: Bench, run: str) -> None:
    text = run * (50_000 // len(run))
    assert bench.guarded(text) == bench.plain(text)


def test_what_is_short_needs_no_process(bench: Bench) -> None:
    nothing = TokenProcesses(bench.path.with_name("missing.gguf"))
    tokenizer = GuardedTokenizer(bench.vocab, nothing)
    text = "=" * IN_PROCESS_CHARS
    assert tokenizer.tokenize(text, add_special=True, parse_special=True) == bench.plain(text)
    with pytest.raises(CallFailed, match="did not start") as failed:
        tokenizer.tokenize(text + "=", add_special=True, parse_special=True)
    assert failed.value.failure.code is FailureCode.UNAVAILABLE
    nothing.close()


def test_a_text_that_ends_the_process_is_told_and_the_next_one_is_served(bench: Bench) -> None:
    for _ in range(2):
        with pytest.raises(CallFailed) as failed:
            bench.guarded("=" * 1_000_000)
        assert failed.value.failure.code is FailureCode.INVALID_REQUEST
        assert "1000000 characters" in failed.value.failure.message
        assert "SIG" in failed.value.failure.message
        start = time.monotonic()
        text = "= a" * 2000
        assert bench.guarded(text) == bench.plain(text)
        assert time.monotonic() - start < 10.0, "the next one waited for a vocabulary to load"


def test_a_process_that_breaks_down_is_never_taken_for_one_that_was_killed(bench: Bench) -> None:
    """Who killed one is told to send the text again, elsewhere, and nobody pays for it."""
    data = b"a b " * (25 << 20)  # takes more memory than the process may have
    endings = set[str]()
    for _ in range(4):
        with pytest.raises(ProcessEnded) as ended:
            bench.processes.tokens(data, 30.0, add_special=False, parse_special=False)
        endings.add(str(ended.value))
    assert endings == {f"exit code {NO_MEMORY}"}


def test_a_text_that_takes_too_much_memory_is_told_so(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's C++ aborts then, as it does where it breaks down; both are the text's fault, not for one reason."""
    monkeypatch.setattr("workers.llama.tokens.tokenizer.patience_s", lambda num_chars: 60.0)  # on a busy machine
    text = "\U00012000 " * 1_600_000
    for _ in range(2):
        with pytest.raises(CallFailed) as failed:
            bench.guarded(text)
        assert failed.value.failure.code is FailureCode.INVALID_REQUEST
        assert failed.value.failure.message == (
            "a text of 3200000 characters, 8000000 bytes, takes more memory to tokenise than the 384 MiB that one text "
            "may take; send a shorter one"
        )
    assert bench.guarded(text[:5000]) == bench.plain(text[:5000])


def test_without_descriptors_long_texts_are_refused_as_unavailable(bench: Bench) -> None:
    text = "a = b " * 2000
    nothing = TokenProcesses(bench.path.with_name("missing.gguf"))
    with contextlib.closing(nothing), few_descriptors(), pytest.raises(CallFailed, match="did not start") as failed:
        GuardedTokenizer(bench.vocab, nothing).tokenize(text, add_special=True, parse_special=True)
    assert failed.value.failure.code is FailureCode.UNAVAILABLE


def test_what_takes_too_long_is_ended(bench: Bench) -> None:
    data = encoded("word " * 400_000)
    start = time.monotonic()
    with pytest.raises(TookTooLong):
        bench.processes.tokens(data, 0.01, add_special=False, parse_special=False)
    assert time.monotonic() - start < 5.0
    assert list(bench.processes.tokens(b"word", 5.0, add_special=False, parse_special=False)) == bench.vocab.tokenize(
        "word", add_special=False, parse_special=False
    )


def test_time_is_told_in_the_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.llama.tokens.tokenizer.patience_s", lambda num_chars: 0.01)
    with pytest.raises(CallFailed, match=r"took longer than 0\.0 s to tokenise; send a shorter one") as failed:
        bench.guarded("word " * 400_000)
    assert failed.value.failure.code is FailureCode.INVALID_REQUEST


def test_a_text_with_too_many_tokens_is_refused_before_it_is_tokenised(bench: Bench) -> None:
    text = "ordinary words of a very long conversation " * 9_000
    asked = {"add_special": False, "parse_special": True}
    with pytest.raises(TooManyTokens) as refused:
        bench.tokenizer.tokenize(text, most=4095, **asked)
    whole = bench.tokenizer.tokenize(text, **asked)
    assert 4095 < refused.value.at_least < len(whole), "it was tokenised to be counted"
    assert len(bench.tokenizer.tokenize(text[:8192], most=8191, **asked)) < 8192, "nothing is refused that may fit"


def test_a_longer_text_may_take_longer() -> None:
    assert patience_s(1000) < 5.1
    assert patience_s(8 << 20) > 30


def test_tokens_of_long_texts_take_four_bytes_each(bench: Bench) -> None:
    tokens = bench.tokenizer.tokenize("a b" * 50_000, add_special=False, parse_special=True)
    assert isinstance(tokens, array)
    assert (tokens.itemsize, len(tokens) > 100_000) == (4, True)


def test_long_texts_among_tokens_make_one_prompt(bench: Bench) -> None:
    text = "a = b " * 2000
    prompts = Prompts(None, bench.tokenizer, num_tokens=bench.vocab.num_tokens)
    own = bench.vocab.tokenize(text, add_special=False, parse_special=True)
    assert prompts.fitting(GenerateRequest(prompt=(7, text, 8))).tokens == [7, *own, 8]


def test_texts_side_by_side(bench: Bench) -> None:
    texts = [f"{number} " * 5000 for number in range(12)]
    found: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        found[number] = bench.guarded(texts[number])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(texts))] == [bench.plain(text) for text in texts]


def test_the_process_that_holds_the_vocabulary_is_replaced(bench: Bench) -> None:
    assert bench.guarded("a" * 5000)
    pid = bench.processes.pid
    assert pid is not None
    forked = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(is_running(int(child)) for child in forked), 10)
    text = "a = b " * 2000
    for _ in range(3):  # those that it had forked end with it, and say so once each
        try:
            assert bench.guarded(text) == bench.plain(text)
            break
        except CallFailed as failed:
            assert failed.failure.code is FailureCode.OUT_OF_MEMORY  # noqa: PT017 - it may be told so
    assert bench.processes.pid not in (None, pid)
    assert bench.guarded(text) == bench.plain(text)


def test_nothing_is_left_when_it_closes(bench: Bench) -> None:
    processes = TokenProcesses(bench.path)
    assert processes.tokens(b"word", 5.0, add_special=False, parse_special=False)
    pid = processes.pid
    assert pid is not None

    def forked() -> list[int]:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    wait_until(lambda: len(forked()) == 2, 10)  # one works, one is kept ready
    children = forked()
    processes.close()
    wait_until(lambda: not any(is_running(one) for one in [pid, *children]), 10)
    with pytest.raises((NotStarted, ProcessEnded, TookTooLong)):
        processes.tokens(b"word", 0.1, add_special=False, parse_special=False)


def test_the_ids_are_llama_cpps(bench: Bench) -> None:
    _compare(bench.processes, bench.vocab, 100, num_long=5)


@pytest.mark.parametrize("path", [path for path in VOCABULARIES if path.stem in QUICK], ids=lambda path: path.stem)
def test_the_ids_of_well_known_vocabularies_are_llama_cpps(path: Path) -> None:
    with VocabFile.load(path) as file, contextlib.closing(TokenProcesses(path, number=1)) as processes:
        _compare(processes, file.vocab, 10, num_long=3)


@pytest.mark.long
def test_the_vocabularies_are_there() -> None:
    """Without them the tests of well-known ones are skipped without a word."""
    where = "`python deploy/check.py --long --only sources` unpacks them; LLAMA_CPP_SOURCE names others"
    assert VOCABULARIES, f"no vocabularies in {llama_cpp_source()}: {where}"
    assert set(QUICK) <= {path.stem for path in VOCABULARIES}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", VOCABULARIES, ids=lambda path: path.stem)
def test_the_ids_of_twenty_thousand_texts_are_llama_cpps(path: Path) -> None:
    with VocabFile.load(path) as file, contextlib.closing(TokenProcesses(path, number=1)) as processes:
        _compare(processes, file.vocab, 20_000, num_long=100)


def _compare(processes: TokenProcesses, vocab: Vocab, num_short: int, *, num_long: int) -> None:
    """Short texts are asked of the processes, which no worker does; long ones as a worker asks."""
    for number, text in enumerate(fuzzed_texts(random.Random(7), num_short)):
        asked = {"add_special": number % 2 == 0, "parse_special": number % 3 > 0}
        assert list(processes.tokens(encoded(text), 60.0, **asked)) == vocab.tokenize(text, **asked), text
    tokenizer = GuardedTokenizer(vocab, processes)
    for number, text in enumerate(fuzzed_texts(random.Random(11), num_long, LONGEST_CHARS, shortest=SHORTEST_CHARS)):
        assert len(text) > IN_PROCESS_CHARS
        asked = {"add_special": number % 2 == 0, "parse_special": number % 3 > 0}
        assert list(tokenizer.tokenize(text, **asked)) == plain(vocab, text, **asked), text
