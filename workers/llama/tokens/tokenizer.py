"""Tokenises callers' texts safely: whatever the text is, the worker survives, and its other calls go on.

llama.cpp splits text by std::regex for many models, which calls itself for every character of a match: a run of 27,000
characters of one kind overflows a thread's stack and ends the process (ggml-org/llama.cpp#27783). For other models,
time grows with the square of a run. So only short texts are tokenised in the worker's process. Longer ones go to
processes that hold nothing but the vocabulary, have stacks of their own size, are killed at a deadline and replaced at
once.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

from workers.chat.prompts import TooManyTokens, patience_s, too_slow
from workers.llama.model_params import Overrides
from workers.llama.tokens.token_process import (
    ANY,
    END,
    EXTRA_BYTES,
    FORK,
    NO_MEMORY,
    NOT_BEGUN,
    ORDER,
    READY,
    REPLY,
    SOCKET_BYTES,
    TEXT,
    TOKENS,
    read_exactly,
)
from workers.llama.tokens.vocab import Vocab, encoded
from workers.process.helper_process import (
    Launch,
    NotStarted,
    Process,
    ProcessEnded,
    TookTooLong,
    ending,
    is_starved,
    launched,
    processor_s,
)
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.pieces import INT32

IN_PROCESS_CHARS = 4096
"""Maximum characters tokenised in the worker itself: that many alike take up to 1.3 MiB of stack and about 0.01 s."""

NUM_PROCESSES = 2
NUM_READY = 2
"""Number of processes forked at the start: one to work, and one to replace it if it ends. Others are forked later."""
PART_BYTES = 1 << 20
"""Maximum bytes of tokens that are read at once; a multiple of the size of a token."""
START_S = 60.0
WARM_AFTER_S = 1.0
"""Seconds until processes are started that no text has asked for: a worker that starts has more urgent work."""
ORDER_S = 5.0
"""Seconds to wait for forking or ending a process, which takes some milliseconds."""


class GuardedTokenizer:
    """Tokenises callers' texts with a model's vocabulary. May be used from several threads."""

    def __init__(self, vocab: Vocab, processes: TokenProcesses) -> None:
        """`processes`: the processes that tokenise long texts, with the vocabulary of the same model."""
        self._vocab = vocab
        self._processes = processes

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool, most: int | None = None) -> Sequence[int]:
        """Return the tokens as `Vocab.tokenize` does. Blocks, for seconds at most. Raises CallFailed for a text that is
        too slow or that llama.cpp can't take; TooManyTokens if it is long and has more than `most`."""
        if len(text) <= IN_PROCESS_CHARS:
            return self._vocab.tokenize(text, add_special=add_special, parse_special=parse_special)
        seconds = patience_s(len(text))
        data = encoded(text)
        try:
            asked = {"add_special": add_special, "parse_special": parse_special}
            return self._processes.tokens(data, seconds, most=most, **asked)
        except TookTooLong as late:
            if late.starved:
                message = f"the process that tokenises long texts had no processor for {seconds:g} s; send it again"
                raise CallFailed(Failure(FailureCode.UNAVAILABLE, message)) from None
            raise too_slow(len(text), seconds) from None
        except ProcessEnded as ended:
            if ended.killed:
                message = "the process that tokenises long texts was killed, for want of memory perhaps; send it again"
                raise CallFailed(Failure(FailureCode.OUT_OF_MEMORY, message)) from None
            if str(ended) == ending(NO_MEMORY):
                message = (
                    f"a text of {len(text)} characters, {len(data)} bytes, takes more memory to tokenise than the "
                    f"{EXTRA_BYTES >> 20} MiB that one text may take; send a shorter one"
                )
                raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message)) from None
            message = (
                f"llama.cpp's tokenizer broke down over a text of {len(text)} characters ({ended}); send a shorter "
                "one, or one with fewer like characters in a row"
            )
            raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message)) from None
        except NotStarted as error:
            message = f"long texts can't be tokenised on this worker: the process for it did not start ({error}); "
            message += "send it again"
            raise CallFailed(Failure(FailureCode.UNAVAILABLE, message)) from None


class TokenProcesses:
    """The processes that tokenise long texts. Some are started ahead, a second after this object is made. May be used
    from several threads."""

    def __init__(
        self,
        model: Path,
        overrides: Overrides | None = None,
        *,
        number: int = NUM_PROCESSES,
        start_s: float = START_S,
        launch: Launch = launched,
    ) -> None:
        """`model`: the GGUF file, with `overrides` in place of its metadata. `number`: how many texts can be tokenised
        at the same time."""
        self._keeper = _Keeper(model, overrides or {}, start_s, launch)
        self._seats: queue.LifoQueue[_Seat] = queue.LifoQueue()
        for _ in range(number):
            self._seats.put(_Seat(self._keeper))
        self._is_closed = threading.Event()
        self._warming = threading.Thread(target=self._warm_up, name="paddock-token-processes", daemon=True)
        self._warming.start()

    def tokens(
        self, data: bytes, seconds: float, *, add_special: bool, parse_special: bool, most: int | None = None
    ) -> Sequence[int]:
        """Return the tokens of UTF-8 text. Blocks for at most `seconds`, plus the time that a process takes to start.

        Raises TookTooLong, ProcessEnded, NotStarted, TooManyTokens."""
        limit = ANY if most is None else most
        header = TEXT.pack(len(data), int(seconds) + 2, limit, add_special, parse_special)
        try:
            seat = self._seats.get(timeout=seconds)
        except queue.Empty:
            raise TookTooLong from None
        try:
            return seat.tokens(header, data, seconds)
        finally:
            self._seats.put(seat)

    @property
    def pid(self) -> int | None:
        """Return the process id of the process that forks the others."""
        return self._keeper.pid

    def close(self) -> None:
        """End all processes; texts in progress fail."""
        self._is_closed.set()
        self._keeper.close()
        self._warming.join(ORDER_S)
        with contextlib.suppress(queue.Empty):
            while True:
                self._seats.get_nowait().close()

    def _warm_up(self) -> None:
        if self._is_closed.wait(WARM_AFTER_S):
            return
        seats: list[_Seat] = []
        with contextlib.suppress(NotStarted, queue.Empty):  # the first text that needs one gets the error
            self._keeper.start()
            while len(seats) < NUM_READY:
                seats.append(self._seats.get_nowait())
                seats[-1].begin()
        for seat in seats:
            self._seats.put(seat)


class _Seat:
    """A place that holds one process; a new process replaces one that ended. Used by one thread at a time."""

    def __init__(self, keeper: _Keeper) -> None:
        self._keeper = keeper
        self._texts: socket.socket | None = None
        self._pid = 0

    def tokens(self, header: bytes, data: bytes, seconds: float) -> Sequence[int]:
        """Return the tokens of a text. Raises TookTooLong, ProcessEnded, NotStarted, TooManyTokens."""
        asked_of = self.begin()
        before_s = processor_s(self._pid)
        try:
            tokens, refused, grown = self._asked(asked_of, header, data, time.monotonic() + seconds)
        except TimeoutError:
            starved = is_starved(self._pid, before_s, seconds)
            self._replace()
            raise TookTooLong(starved=starved) from None
        except (EOFError, OSError):
            how = self._replace()
            if how == ending(NOT_BEGUN):
                raise NotStarted("it had no memory for its stack") from None
            raise ProcessEnded(how) from None
        except BaseException:
            self._replace()
            raise
        if grown:
            self._replace()
        if refused is not None:
            raise refused
        return tokens

    def begin(self) -> socket.socket:
        """Return the socket of this place's process; fork one if there is none. Raises NotStarted."""
        if self._texts is None:
            self._texts, self._pid = self._keeper.fork()
        return self._texts

    def close(self) -> None:
        """Close the socket, which ends the process."""
        texts, self._texts = self._texts, None
        if texts is not None:
            texts.close()

    def _asked(
        self, texts: socket.socket, header: bytes, data: bytes, end: float
    ) -> tuple[Sequence[int], TooManyTokens | None, bool]:
        """Return the tokens, why there are none, and whether the process must be replaced."""
        _send(texts, header, end)
        _send(texts, data, end)
        num_tokens, is_whole, grown = TOKENS.unpack(_read(texts, TOKENS.size, end))
        tokens = array(INT32)
        if num_tokens < 0:
            return tokens, TooManyTokens(-num_tokens, is_whole=bool(is_whole)), bool(grown)
        left = num_tokens * tokens.itemsize
        while left:  # a part at a time, since nothing else runs while it is copied
            part = _read(texts, min(left, PART_BYTES), end)
            tokens.frombytes(part)
            left -= len(part)
        return tokens, None, bool(grown)

    def _replace(self) -> str:
        """End the process and return how it ended. Fork the next one now, so that no text waits for that."""
        self.close()
        how = self._keeper.end(self._pid)
        with contextlib.suppress(NotStarted):  # the next text gets the error
            self.begin()
        return how


class _Keeper:
    """The process that holds the vocabulary and forks the others. May be used from several threads."""

    def __init__(self, model: Path, overrides: Overrides, start_s: float, launch: Launch) -> None:
        self._model = model
        self._launch = launch
        self._overrides = json.dumps(dict(overrides))
        self._start_s = start_s
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._orders: socket.socket | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process, if none runs. Raises NotStarted."""
        with self._lock:
            self._running()

    def fork(self) -> tuple[socket.socket, int]:
        """Return the socket and the process id of a new process. Raises NotStarted."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:  # there are no descriptors left
            raise NotStarted(error.strerror) from None
        for one in (ours, theirs):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        with theirs, self._lock:
            try:
                orders = self._running()
                socket.send_fds(orders, [ORDER.pack(FORK, 0)], [theirs.fileno()])
                (pid,) = REPLY.unpack(read_exactly(orders, REPLY.size))
            except (EOFError, OSError) as error:
                ours.close()
                self._end()
                raise NotStarted(f"{type(error).__name__} while forking") from None
            except NotStarted:
                ours.close()
                raise
        return ours, pid

    def end(self, pid: int) -> str:
        """End a forked process; return how it ended, even if it had ended before."""
        with self._lock:
            if self._orders is None:
                return signal.SIGKILL.name
            try:
                self._orders.sendall(ORDER.pack(END, pid))
                (code,) = REPLY.unpack(read_exactly(self._orders, REPLY.size))
            except (EOFError, OSError):
                self._end()  # its children end with it
                return signal.SIGKILL.name
        return ending(code)

    def close(self) -> None:
        self._closed = True
        process = self._process
        if process is not None and self._orders is None:
            process.kill()  # it is still loading
        with self._lock:
            self._end()

    def _running(self) -> socket.socket:
        """Return the socket of the running process, started if need be. Raises NotStarted."""
        if self._closed:
            raise NotStarted("the worker is stopping")
        if self._orders is not None and self._process is not None and self._process.poll() is None:
            return self._orders
        self._end()
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:  # there are no descriptors left
            raise NotStarted(error.strerror) from None
        with theirs:
            module = "workers.llama.tokens.token_process"
            command = [sys.executable, "-m", module, str(self._model), str(theirs.fileno()), self._overrides]
            try:
                self._process = self._launch(
                    command,
                    variables={"MALLOC_ARENA_MAX": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            except BaseException:
                ours.close()
                raise
        ours.settimeout(self._start_s)
        try:
            if read_exactly(ours, len(READY)) != READY:
                raise EOFError
        except (EOFError, OSError) as error:
            ours.close()
            self._process.kill()
            self._end()
            late = isinstance(error, TimeoutError)
            raise NotStarted(f"not ready within {self._start_s:g} s" if late else "it ended at once") from None
        ours.settimeout(ORDER_S)
        self._orders = ours
        return ours

    def _end(self) -> None:
        orders, self._orders = self._orders, None
        process, self._process = self._process, None
        if orders is not None:
            orders.close()  # the process then ends its children and itself
        if process is not None:
            try:
                process.wait(ORDER_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _send(texts: socket.socket, data: bytes, end: float) -> None:
    texts.settimeout(_left(end))
    texts.sendall(data)


def _read(texts: socket.socket, num_bytes: int, end: float) -> bytearray:
    """Return `num_bytes` bytes read from the socket. Raises EOFError, TimeoutError after `end`."""
    data = bytearray(num_bytes)
    view, have = memoryview(data), 0
    while have < num_bytes:
        texts.settimeout(_left(end))
        count = texts.recv_into(view[have:])
        if not count:
            raise EOFError
        have += count
    return data


def _left(end: float) -> float:
    """Return the seconds left until `end`. Raises TimeoutError if there are none."""
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
