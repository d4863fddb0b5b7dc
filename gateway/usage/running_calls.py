"""The table of running calls of one gateway process, in memory that outlives the process.

    <process>.calls    a head, then a slot for each running call: who it is, and how many tokens were written of it

The table is a file that is mapped into memory (`mapped_table`). What is written there is in the kernel's hands at once:
if the process is killed, the next one finds the calls that were cut, with their tokens. The process holds a lock on the
file while it lives. Numbers are 64 bits wide, so that none is ever half written.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gateway.usage.mapped_table import MappedTable

FILE_MODE = 0o600
SUFFIX = ".calls"
NEW_SUFFIX = ".new"

MAGIC = int.from_bytes(b"pdusage1", "little")
HEAD_WORDS = 8
_MAGIC, _ALIVE_MS, _LAST, _COMMITTED = range(4)
"""Words of the head: what the file is, unix milliseconds when its process was last alive, the number of its last
record, and that of the last one of which the ledger is known to have it and all before."""

SLOT_BYTES = 2048
SLOT_WORDS = SLOT_BYTES // 8
"""A slot begins with words, then comes a record in MessagePack with what is known of the call at its begin."""
_SERIAL, _PROMPT, _CACHED, _MEDIA, _COMPLETION, _QUEUE_MS, _SUBMITTED_MS, _LENGTH = range(8)
_NO_TOKENS = (0,) * _LENGTH
"""The words of a slot whose call has no tokens yet, up to the length of its record."""
_ABOUT = 64
MAX_ABOUT_BYTES = SLOT_BYTES - _ABOUT
SLOTS_AT_ONCE = 512
MAX_SLOTS = 16_384
"""Maximum number of running calls in the table; further ones are recorded at their end only."""


class RunningCall:
    """One running call in the table. Without a slot it drops what it is told."""

    __slots__ = ("_at", "_calls", "_completion", "serial")

    def __init__(self, calls: RunningCalls, at: int, serial: int) -> None:
        """`at`: the first word of the call's slot; 0: it has none."""
        self.serial = serial
        self._calls = calls
        self._at = at
        self._completion = calls.view(at + _COMPLETION) if at else ()

    def set_completion(self, num_tokens: int) -> None:
        """Set how many tokens of its answers were written to the caller. Runs once per token."""
        if self._completion:
            self._calls.set_at(self._completion, num_tokens)

    def set_prompt(self, prompt: int, cached: int, media: int) -> None:
        """Set the tokens of its prompts; those that were cached, and those of media, are among them."""
        if self._at:
            self._calls.set(self._at + _PROMPT, prompt, cached, media)

    def set_submitted(self, queue_ms: int, submitted_ms: int) -> None:
        """Set how long the call waited for its slot, and at what unix time it was submitted to a worker."""
        if self._at:
            self._calls.set(self._at + _QUEUE_MS, queue_ms, submitted_ms)

    def close(self) -> None:
        """Free the slot. What is set afterwards is dropped."""
        at, self._at, self._completion = self._at, 0, ()
        if at:
            self._calls.set(at, 0)
            self._calls.free(at)


@dataclass(frozen=True, slots=True)
class CutCall:
    """A call that ran when its process died."""

    serial: int
    about: bytes
    """The record that its slot began with."""
    prompt_tokens: int
    cached_tokens: int
    media_tokens: int
    completion_tokens: int
    queue_ms: int
    submitted_ms: int
    """Unix milliseconds; 0: it had not been submitted to a worker."""


@dataclass(frozen=True, slots=True)
class FoundCalls:
    """The entries that a dead process left in its table."""

    alive_at: float
    """Unix time when the process was last alive, to a fraction of a second."""
    last: int
    """Number of its last record."""
    committed: int
    """The ledger has the record with this number, and all before."""
    calls: tuple[CutCall, ...]


class RunningCalls:
    """The table of this process. Used by the thread of the event loop only."""

    def __init__(self, descriptor: int | None, serial: int = 0) -> None:
        """`descriptor`: the table's file (`create_table`); None: there is none, and calls have no slots. `serial`: the
        serial number that was given last."""
        self.serial = serial
        """The serial number that was given last."""
        self.failure: OSError | None = None
        """Why the disk does not take the table any more; nothing is written to it since. None: it does."""
        self._table: MappedTable | None = None
        self._num_slots = 0
        self._free: list[int] = []
        """The first words of slots that no call has."""
        if descriptor is not None:
            try:
                self._table = MappedTable(descriptor, SLOT_BYTES)
            except OSError as error:
                self._fail(error)
        self._grow()

    def open(self, about: bytes) -> RunningCall:
        """Take a slot for a call. `about`: what is known of it, at most MAX_ABOUT_BYTES; longer: it gets no slot."""
        self.serial += 1
        if len(about) > MAX_ABOUT_BYTES or not (self._free or self._grow()) or self._table is None:
            return RunningCall(self, 0, self.serial)
        at = self._free.pop()
        try:
            self._table.set_bytes(at, (*_NO_TOKENS, len(about)), about)
            self._table.set(at, self.serial)  # last: from now on a slot is found
        except OSError as error:
            self._fail(error)
            return RunningCall(self, 0, self.serial)
        return RunningCall(self, at, self.serial)

    def free(self, at: int) -> None:
        """Give a slot back."""
        self._free.append(at)

    def beat(self) -> None:
        """Note that the process is alive. Called a few times a second."""
        self.set(_ALIVE_MS, int(time.time() * 1000))

    def set_last(self, number: int) -> None:
        """Note the number of the last record."""
        self.set(_LAST, number)

    def set_committed(self, number: int) -> None:
        """Note that the ledger has the record with this number, and all before."""
        self.set(_COMMITTED, number)

    def view(self, word: int) -> tuple[memoryview, ...]:
        """Return the place of a word, for `set_at`; empty: nothing is written to the table any more."""
        return () if self._table is None else self._table.view(word)

    def set_at(self, view: tuple[memoryview, ...], number: int) -> None:
        """Write a number to a place. Never raises."""
        if self._table is not None:
            try:
                self._table.set_at(view, number)
            except OSError as error:
                self._fail(error)

    def set(self, word: int, *numbers: int) -> None:
        """Write numbers one behind the other, from this word on. Never raises."""
        if self._table is not None:
            try:
                self._table.set(word, *numbers)
            except OSError as error:
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        """Write nothing to the table any more: calls go on, and do not outlive the process."""
        self.failure, self._table = error, None
        self._free.clear()

    def _grow(self) -> bool:
        """Make room for more calls. Return whether there is room."""
        if self._table is None or self._num_slots >= MAX_SLOTS:
            return False
        try:
            self._table.grow(size_of(self._num_slots + SLOTS_AT_ONCE))
        except (OSError, ValueError):
            return False
        self.set(_MAGIC, MAGIC)
        later = range(self._num_slots, self._num_slots + SLOTS_AT_ONCE)
        self._free += [HEAD_WORDS + number * SLOT_WORDS for number in reversed(later)]
        self._num_slots += SLOTS_AT_ONCE
        return True


def size_of(num_slots: int) -> int:
    """Return the bytes of a table with so many slots."""
    return 8 * HEAD_WORDS + num_slots * SLOT_BYTES


def create_table(folder: Path, process: str) -> int:
    """Make the table's file of a new process, and return its descriptor, whose lock lasts as long as the process.

    Raises OSError."""
    new = folder / f"{process}{NEW_SUFFIX}"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, FILE_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(descriptor, 0, size_of(SLOTS_AT_ONCE))
        # Only now under the name that others look for: they would take a file without a lock for a dead process's.
        new.rename(folder / f"{process}{SUFFIX}")
    except OSError:
        os.close(descriptor)
        with suppress(OSError):
            new.unlink()
        raise
    return descriptor


def claim_table(path: Path) -> int | None:
    """Take over the table of a dead process, and return its descriptor; None: its process lives, or others have it."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def read_table(descriptor: int) -> FoundCalls:
    """Return what a dead process left in its table. Raises OSError."""
    body = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    words = memoryview(body[: len(body) // 8 * 8]).cast("Q")
    if len(words) < HEAD_WORDS or words[_MAGIC] != MAGIC:
        return FoundCalls(0.0, 0, 0, ())
    calls = tuple(
        _call_at(body, words, at) for at in range(HEAD_WORDS, len(words) - SLOT_WORDS + 1, SLOT_WORDS) if words[at]
    )
    return FoundCalls(words[_ALIVE_MS] / 1000, words[_LAST], words[_COMMITTED], calls)


def _call_at(body: bytes, words: memoryview, at: int) -> CutCall:
    begin = at * 8 + _ABOUT
    return CutCall(
        serial=words[at],
        about=body[begin : begin + words[at + _LENGTH]],
        prompt_tokens=words[at + _PROMPT],
        cached_tokens=words[at + _CACHED],
        media_tokens=words[at + _MEDIA],
        completion_tokens=words[at + _COMPLETION],
        queue_ms=words[at + _QUEUE_MS],
        submitted_ms=words[at + _SUBMITTED_MS],
    )
