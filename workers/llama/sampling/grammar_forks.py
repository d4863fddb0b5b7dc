"""Forks a process for each trial of a grammar and each answer that follows a grammar, for `workers.constraint.forks`.

    python -m workers.llama.sampling.grammar_forks MODEL.gguf OVERRIDES

OVERRIDES is a JSON object of metadata in place of the file's.

Standard input is a socket that brings two sockets for each process to fork. Over the first, the forked process gets
the questions of `workers.constraint.forks`. The process ends when the worker closes the second socket, or when a
question takes too much processor time. Over the second socket, the worker is told how the process ended.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import random
import re
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
from llguidance import LLTokenizer

from workers.constraint import forks
from workers.constraint.guidance import Grammar, GuidanceMask, tokenizer
from workers.constraint.mask import Unusable
from workers.llama.model_params import Overrides
from workers.llama.sampling.grammar import GbnfGrammar, GbnfGrammars, GbnfMask
from workers.llama.tokens.vocab import VocabFile
from workers.process.limits import bound_memory, bound_stack, shut_off
from workers.protocol.events import CallFailed

EXERCISE_S = 0.1
WALK_STEPS = 200
"""Maximum tokens of each random answer by which a new grammar is tried; EXERCISE_S: seconds for all these answers."""

STEP_S = 0.25
"""Maximum processor seconds to check or accept a token, or to make a mask: with 150,000 tokens that takes a fifth."""

TRIAL_CPU_S = 2.0
"""Maximum processor seconds to compile a grammar, to try it, or to begin an answer that follows it."""

TRIAL_STACK_BYTES = 2 << 20
"""Maximum size of the stack in a trial. It is smaller than the stacks of the worker's threads, so a grammar that would
overflow one of these ends its trial."""

BASE_CPU_S, TOKEN_CPU_S = 1.5, 0.06
"""Maximum processor seconds for a whole answer: BASE_CPU_S, and TOKEN_CPU_S more for each of its tokens."""

EXTRA_BYTES = 256 << 20
"""Maximum bytes of memory beyond what the vocabulary takes, so that a grammar that grows without end is stopped."""

NICENESS = 5
"""Niceness of a forked process, so that the worker's own threads go first."""

BROKEN = 1
"""Exit code of a forked process that ended by an error of its own, such as needing more memory than allowed."""

PARSE_ERROR = re.compile(r"error parsing grammar: (.{1,120})")
MAX_SAID = 64 << 10

WARM = 'root ::= "a" [0-9]* | "b"'


class Said:
    """Captures what llama.cpp prints on stdout and stderr, which says why it can't read a grammar."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        for end in (self._reader, writer):
            os.set_blocking(end, False)  # output that does not fit is lost, and nothing waits
        with suppress(OSError, AttributeError):
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 2 * MAX_SAID)
        os.dup2(writer, sys.stdout.fileno())
        os.dup2(writer, sys.stderr.fileno())
        os.close(writer)

    def reason(self) -> str:
        """Return the error that llama.cpp's parser printed, in brackets; empty: none."""
        with suppress(BlockingIOError):
            found = PARSE_ERROR.search(os.read(self._reader, MAX_SAID).decode("utf-8", "replace"))
            return f" ({found[1]})" if found else ""
        return ""


class Forked:
    """One forked process: its grammar, and the state of the answer in it."""

    def __init__(self, grammars: GbnfGrammars, words: LLTokenizer, end: int) -> None:
        self._grammars = grammars
        self._end = end
        self._said = Said()
        self._words = words
        self._grammar: GbnfGrammar | Grammar | None = None
        self._mask: GbnfMask | GuidanceMask | None = None
        self._num_tokens = 0

    def serve(self) -> None:
        """Answer the worker's questions about the grammar until the worker closes its socket."""
        while (asked := forks.receive(self._end)) is not None:
            what, body = asked
            limit = TRIAL_CPU_S if what in (forks.COMPILE, forks.TRY, forks.BEGIN) else STEP_S
            signal.setitimer(signal.ITIMER_PROF, limit)
            try:
                kind, answer = forks.OK, self._answer(what, body)
            except Unusable as error:
                kind, answer = forks.REFUSED, f"{error}{self._said.reason()}".encode()
            except CallFailed as failed:
                kind, answer = forks.REFUSED, failed.failure.message.encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            forks.answer(self._end, kind, answer)

    def _answer(self, what: int, body: bytes) -> bytes:
        """Return the answer to one question. Raises Unusable, CallFailed."""
        if what == forks.TRY:
            os.nice(NICENESS)  # on top of the first: no running answer waits for a trial
            bound_stack(TRIAL_STACK_BYTES)
            return self._try(*json.loads(body))
        if what == forks.COMPILE:
            kind, text = json.loads(body)
            self._grammar = self._grammars.compile(text) if kind == "gbnf" else Grammar(self._words, text)
            return self._begin([])
        if what == forks.BEGIN:
            return self._begin(np.frombuffer(body, dtype="<i4").tolist())
        if self._mask is None:
            raise Unusable("there is no grammar")
        if what == forks.ALLOWED:
            bits = self._mask.allowed()
            return b"" if bits is None else bits.astype("<u4").tobytes()
        token = int.from_bytes(body, "little")
        if what == forks.PERMITS:
            return bytes([self._mask.permits(token)])
        self._mask.accept(token)
        self._num_tokens += 1
        self._charge()
        return bytes([self._mask.is_done])

    def _try(self, kind: str, text: str) -> bytes:
        if kind == "lark":
            Grammar(self._words, text)
            return b""
        grammar = self._grammars.compile(text)
        # It does not matter which tokens are tried, only that they are the same ones each time.
        chance = random.Random(text)  # noqa: S311
        end = time.monotonic() + EXERCISE_S
        while time.monotonic() < end:
            walk(grammar.mask(), chance, end)
        return b""

    def _begin(self, tokens: list[int]) -> bytes:
        """Return two bytes: whether an answer may begin with these tokens, and whether it must end after them."""
        assert self._grammar is not None  # noqa: S101 - for the type checker
        mask = self._mask = self._grammar.mask()
        self._num_tokens = len(tokens)
        for token in tokens:
            if not mask.permits(token):
                return bytes([False, False])
            mask.accept(token)
        return bytes([True, mask.is_done])

    def _charge(self) -> None:
        """Raise Unusable if the whole answer has taken too much processor time, even if no single step has."""
        if time.process_time() > BASE_CPU_S + TOKEN_CPU_S * self._num_tokens:
            raise Unusable("the grammar has become too costly to follow; make it less ambiguous")


class Children:
    """The forked processes that have not ended yet, each with the socket over which its exit code is sent."""

    def __init__(self) -> None:
        self._lives: dict[int, int] = {}
        self._wakes, waker = os.pipe()
        for one in (self._wakes, waker):
            os.set_blocking(one, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # it wakes `wait`
        self._waker = waker

    def add(self, pid: int, life: int) -> None:
        self._lives[pid] = life

    def wait(self, control: socket.socket) -> None:
        """Wait until `control` has something to read; meanwhile tell the worker how processes ended."""
        events = select.poll()
        for one in (control.fileno(), self._wakes):
            events.register(one, select.POLLIN)
        is_asked = False
        while not is_asked:
            is_asked = control.fileno() in dict(events.poll())
            with suppress(BlockingIOError):
                os.read(self._wakes, MAX_SAID)
            self._tell()

    def leave(self) -> None:
        """Close, in a new process, its copies of its siblings' sockets, so that the worker sees when a sibling ends."""
        signal.set_wakeup_fd(-1)
        for one in (*self._lives.values(), self._wakes, self._waker):
            os.close(one)

    def _tell(self) -> None:
        while self._lives:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            tell_ending(self._lives.pop(pid), os.waitstatus_to_exitcode(status))


def tell_ending(life: int, code: int) -> None:
    """Send how a process ended, and close the socket."""
    with suppress(OSError):  # the other side may be gone
        os.write(life, forks.ENDING.pack(code))
    os.close(life)


def main(path: Path, overrides: Overrides) -> None:
    control = socket.socket(fileno=sys.stdin.fileno())
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    with VocabFile.load(path, overrides) as file:
        grammars = GbnfGrammars(file.vocab)
        words = tokenizer(file.vocab)
        walk(grammars.compile(WARM).mask(), random.Random(1), time.monotonic() + EXERCISE_S)  # noqa: S311
        gc.collect()
        gc.freeze()
        children = Children()
        control.sendall(b"r")
        while True:
            children.wait(control)
            told, ends, _, _ = socket.recv_fds(control, 1, 2)
            if not told:
                return
            end, life = [*ends, -1, -1][:2]
            if life >= 0 and fork(children, life):
                _serve(grammars, words, control, end, life)
            if end >= 0:
                os.close(end)
            with suppress(OSError):  # the worker may be gone
                control.send(b"f")  # the fork is confirmed, also one that failed: its socket `life` tells that


def fork(children: Children, life: int) -> bool:
    """Fork; return whether this is the new process. How the new process ended, or that forking failed, is sent over the
    socket `life`, which is then closed."""
    try:
        pid = os.fork()
    except OSError:
        tell_ending(life, forks.NOT_BEGUN)
        return False
    if pid:
        children.add(pid, life)
    else:
        children.leave()
    return not pid


def _serve(grammars: GbnfGrammars, words: LLTokenizer, control: socket.socket, end: int, life: int) -> None:
    """Serve one grammar in the forked process. Never returns."""
    code = forks.NOT_BEGUN
    try:
        control.close()
        os.nice(NICENESS)
        # Closing the other end of this socket sends a signal that ends the process, also within llama.cpp.
        fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
        forked = Forked(grammars, words, end)
        bound_memory(EXTRA_BYTES)
        shut_off()
        code = BROKEN
        forked.serve()
        code = 0
    finally:
        os._exit(code)


def walk(mask: GbnfMask, chance: random.Random, end: float) -> None:
    """Try a grammar with an answer of random permitted tokens; stop at the time `end`. Raises CallFailed, Unusable."""
    for _ in range(WALK_STEPS):
        start = time.process_time()
        bits = mask.allowed()
        tokens = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        token = int(tokens[chance.randrange(len(tokens))])
        if token in mask.eog:
            return
        mask.accept(token)
        took_s = time.process_time() - start
        if took_s > STEP_S:
            raise Unusable(f"one token took {took_s:.1f} s; make the grammar less ambiguous")
        if time.monotonic() > end:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
