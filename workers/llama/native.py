"""llama.cpp's functions as the hot path calls them, its log, and the errors of this package.

The bindings' own functions (`ctypes.CDLL`) release the interpreter lock for the length of each call. That is right for
`llama_decode` and wrong for calls of a microsecond: beside a busy thread, each of them may wait one switch interval to
get the lock back. `gil_calls()` binds those short functions a second time so that they keep it.

The errors, with the exit code of a worker that can't start because of them:

    ModelError            the file is missing, damaged or of a kind that is not served     BAD_MODEL
    └─ ModelTooLarge      the weights or the KV cache do not fit this machine              NO_MEMORY
    DecodeFailed          llama.cpp refused or failed a batch                              CRASHED
    AdapterError          a LoRA file is missing, damaged, or not made for this model      (the load is refused)
    └─ AdapterUnreadable  it can't be opened or read now: descriptors or memory are short  (the load is tried again)
    StateUnusable         a sequence's state can't be saved or restored                    (the tokens are computed)
    MediaRefused          a picture or sound is not one that the model reads               (the call is refused)
    EncodeFailed          libmtmd failed to encode a picture or sound                      (the call fails)
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import re
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from llama_cpp import __version__
from llama_cpp import llama_cpp as c

log = logging.getLogger("paddock.llama")

_DEBUG, _WARN, _ERROR, _CONTINUED = 1, 3, 4, 5  # ggml_log_level in ggml.h; the bindings' own comment is out of date
_EXPECTED = (
    # With one cache for all slots llama.cpp compares the sum of their cells with the model's training context.
    "possible training context overflow",
    "model default pooling_type",  # the settings ask for another pooling
)


class NativeOwner(ABC):
    """The owner of something that llama.cpp allocated: a `with` block frees it at its end."""

    @abstractmethod
    def close(self) -> None:
        """Free it. Calling it again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def closed_on_error(owner: NativeOwner) -> Iterator[None]:
    """Return a context manager that closes `owner` if the block raises."""
    try:
        yield
    except BaseException:
        owner.close()
        raise


@dataclass(frozen=True, slots=True)
class GilCalls:
    """Functions that keep the interpreter lock. Call nothing long or blocking through them."""

    sampler_sample: Callable[[int, int, int], int]
    sampler_accept: Callable[[int, int], None]
    sampler_apply: Callable[[int, Any], None]
    sampler_free: Callable[[int], None]
    memory_seq_rm: Callable[[int, int, int, int], bool]
    memory_seq_cp: Callable[[int, int, int, int, int], None]
    memory_seq_pos_min: Callable[[int, int], int]
    memory_seq_pos_max: Callable[[int, int], int]
    is_eog: Callable[[int, int], bool]
    token_to_piece: Callable[[int, int, Any, int, int, bool], int]
    logits_ith: Callable[[int, int], int | None]
    """Address of a row's logits: n_vocab floats that are valid until the next decode."""


@functools.cache
def gil_calls() -> GilCalls:
    library = ctypes.PyDLL(c._lib._name)

    def bind(name: str) -> Any:
        released = getattr(c._lib, name)
        function = getattr(library, name)
        function.argtypes, function.restype = released.argtypes, released.restype
        return function

    logits_ith = bind("llama_get_logits_ith")
    logits_ith.restype = ctypes.c_void_p

    return GilCalls(
        sampler_sample=bind("llama_sampler_sample"),
        sampler_accept=bind("llama_sampler_accept"),
        sampler_apply=bind("llama_sampler_apply"),
        sampler_free=bind("llama_sampler_free"),
        memory_seq_rm=bind("llama_memory_seq_rm"),
        memory_seq_cp=bind("llama_memory_seq_cp"),
        memory_seq_pos_min=bind("llama_memory_seq_pos_min"),
        memory_seq_pos_max=bind("llama_memory_seq_pos_max"),
        is_eog=bind("llama_vocab_is_eog"),
        token_to_piece=bind("llama_token_to_piece"),
        logits_ith=logits_ith,
    )


class NativeLog:
    """llama.cpp's log, one per process as the C side has one: the last lines are kept, warnings go to `logging`."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, str]] = deque(maxlen=200)
        self._lock = threading.Lock()
        self._partial = ""
        self._level = 0
        self.callback = c.llama_log_callback(self._take)
        """The log as a C function, for other libraries that log as llama.cpp does."""
        c.llama_log_set(self.callback, None)

    def clear(self) -> None:
        with self._lock:
            self._lines.clear()

    def reason(self) -> str:
        """Return the last error lines as one line, for the message of an error; empty if llama.cpp logged none."""
        with self._lock:
            errors = [line for level, line in self._lines if level == _ERROR and line.strip()]
        return "; ".join(dict.fromkeys(errors[-3:]))

    def found(self, pattern: re.Pattern[str]) -> list[str]:
        """Return what the first group of `pattern` has matched in the kept lines, the oldest first."""
        with self._lock:
            return [match[1] for _, line in self._lines if (match := pattern.search(line))]

    def _take(self, level: int, text: bytes, _user_data: object) -> None:
        with self._lock:
            if level != _CONTINUED:
                self._level = level
            self._partial += text.decode("utf-8", "replace")
            *lines, self._partial = self._partial.split("\n")
            if self._level != _DEBUG:  # there are thousands of them for a context
                self._lines.extend((self._level, line) for line in lines)
        for line in lines:
            if self._level in (_WARN, _ERROR) and line.strip() and not any(text in line for text in _EXPECTED):
                log.warning("llama.cpp: %s", line.strip())


@functools.cache
def native_log() -> NativeLog:
    """Return the process's one log; the first call starts llama.cpp's backend and makes it quiet."""
    one = NativeLog()
    c.llama_backend_init()
    return one


def version() -> str:
    """Return the version of llama.cpp's Python bindings, as it is told to callers."""
    return f"llama-cpp-python {__version__}"


@functools.cache
def library_digest() -> str:
    """Return a hash of the libraries that lay out states and tensor types. Reads a few megabytes."""
    library = Path(c._lib._name).resolve()
    beside = {path.resolve() for path in library.parent.glob("*ggml-base.*")}
    digest = hashlib.sha256()
    for path in (library, *sorted(beside)):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@functools.cache
def build_id() -> str:
    """Return an id of this build of llama.cpp: states saved under another id are not used.

    It is made of all that states depend on besides model and settings: the version of the bindings, a hash of the
    libraries that lay out states and tensor types, the abilities of the build and this processor, and the one
    environment variable that changes the contents of the KV cache (llama-kv-cache.cpp)."""
    rotated = os.environ.get("LLAMA_ATTN_ROT_DISABLE", "")
    system = (c.llama_print_system_info() or b"").decode("utf-8", "replace")
    return f"{__version__} {library_digest()[:32]} {rotated!r} {system}"


class ModelError(Exception):
    """A model can't be served. The message is one line: the file, what is wrong with it, the remedy."""


class ModelTooLarge(ModelError):
    """The model or its KV cache does not fit the memory; the message says how much is needed and how much there is."""


class DecodeFailed(RuntimeError):
    """`llama_decode` refused a batch. The engine reserves cells before it decodes, so this is never expected."""


class StateUnusable(RuntimeError):
    """A sequence's state could not be saved or restored. If it was to be restored, the sequence is empty afterwards."""


class AdapterError(Exception):
    """An adapter can't be used. The message is one line: the file, what is wrong with it, the remedy."""


class AdapterUnreadable(AdapterError):
    """An adapter's file can't be opened or read now, since the process or its machine is short of file descriptors or
    memory. Nothing is known to be wrong with the file."""


class MediaRefused(Exception):
    """A picture or sound can't be read. The message is one line for the caller: what is wrong with it, the remedy."""


class EncodeFailed(RuntimeError):
    """libmtmd failed to encode a picture or sound that it had read, or made of it what is not a number."""
