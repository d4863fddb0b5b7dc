"""Trying what a caller sent in a process of its own: llama.cpp's grammar code may throw or abort or never return,
llguidance may take minutes over an intersection of patterns, and in the worker's process that would end every call.

The process is started when it is first needed, lives on, is killed when it takes too long and started anew after its
end. It holds the model's vocabulary only.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Literal

from workers.constraint.failures import Unusable
from workers.protocol.failures import CallFailed, Failure, FailureCode

Kind = Literal["gbnf", "lark"]

START_S = 60.0
TRIAL_S = 3.0
"""From the question to the answer."""

MAX_CALLERS = 3
"""The one whose grammar is tried, and those that wait for it."""

END_S = 2.0
"""A process that closed its pipe is gone soon."""

MAX_ANSWER_BYTES = 64 << 10

ROOT = Path(__file__).parents[2]
"""Where the package `workers` lies."""

KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR")
"""The worker's environment has secrets that a trial needs none of."""


class Trial:
    """May be used from several threads; one grammar at a time."""

    def __init__(self, model: Path, *, trial_s: float = TRIAL_S, start_s: float = START_S) -> None:
        """`model`: the GGUF file whose vocabulary the grammars are for."""
        self._model = model
        self._trial_s = trial_s
        self._start_s = start_s
        self._lock = threading.Lock()
        self._room = threading.Semaphore(MAX_CALLERS)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def check(self, kind: Kind, text: str) -> None:
        """Blocks until the grammar has been tried: GBNF by walks through it, Lark by compiling it.

        Raises Unusable with the reason; CallFailed (BUSY) while others wait for theirs, or where it can't be tried.
        """
        if not self._room.acquire(blocking=False):
            raise CallFailed(Failure(FailureCode.BUSY, "other grammars are being tried on this worker; ask again"))
        try:
            with self._lock:
                answer = self._ask(self._running(), kind, text)
        finally:
            self._room.release()
        if answer:
            raise Unusable(answer)

    def close(self) -> None:
        """Ends the process; a later `check` starts another."""
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = self._start()
        return self._process

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        # No GPU and no pool of threads for reading a vocabulary.
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        process = subprocess.Popen(
            [sys.executable, "-m", "workers.llama.grammar_trial", str(self._model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
        )
        if not self._line(process, self._start_s):
            _kill(process)
            message = "grammars can't be tried on this worker: the process for it did not start"
            raise CallFailed(Failure(FailureCode.INTERNAL, message))
        return process

    def _ask(self, process: subprocess.Popen[bytes], kind: Kind, text: str) -> str:
        """Why the grammar is refused; empty if it is not."""
        assert process.stdin is not None  # noqa: S101 - for the type checker: it is a pipe
        try:
            process.stdin.write(json.dumps([kind, text]).encode() + b"\n")
            line = self._line(process, self._trial_s)
        except BrokenPipeError:
            line = b""
        if line:
            return str(json.loads(line))
        self._end(END_S if line is not None else 0.0)
        if line is None:
            return f"trying it took longer than {self._trial_s:g} s; make it simpler"
        code = process.returncode
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"trying it crashed ({cause}); make it simpler"

    def _line(self, process: subprocess.Popen[bytes], timeout_s: float) -> bytes | None:
        """One line; empty if the process ended, None if it took too long."""
        assert process.stdout is not None  # noqa: S101 - for the type checker: it is a pipe
        deadline = time.monotonic() + timeout_s
        line = b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                return None
            part = os.read(process.stdout.fileno(), MAX_ANSWER_BYTES)
            if not part:
                return b""
            line += part
        return line

    def _end(self, grace_s: float = 0.0) -> None:
        """`grace_s`: for a process that ends by itself, so that its own exit code is seen."""
        if self._process is not None:
            _kill(self._process, grace_s)
            self._process = None


def _kill(process: subprocess.Popen[bytes], grace_s: float = 0.0) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
