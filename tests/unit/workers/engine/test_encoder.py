"""The thread that encodes: what it keeps, whose turn it is, and what it leaves undone."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.support.fake_media import FakeCells
from workers.engine.encoder import Embeddings, Encoding, MediaEncoder
from workers.llama.native import EncodeFailed
from workers.protocol.events import FailureCode

CELLS, WIDTH = 4, 8
BYTES = CELLS * WIDTH * 4


class Steps:
    """A projector that encodes one chunk for each `let`."""

    def __init__(self) -> None:
        self.done: list[bytes] = []
        self.error: Exception | None = None
        self._may = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)

    def encode(self, chunk: FakeCells) -> Embeddings:
        self.begun.release()
        assert self._may.acquire(timeout=10)
        self.done.append(chunk.digest)
        if self.error is not None:
            raise self.error
        return np.full((CELLS, WIDTH), chunk.digest[0], np.float32)

    def let(self, number: int) -> None:
        self._may.release(number)


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def encoder(steps: Steps) -> Iterator[MediaEncoder]:
    one = MediaEncoder(steps, max_bytes=2 * BYTES)
    one.start()
    yield one
    steps.let(1000)
    one.stop()


def nothing() -> None: ...


def want(encoder: MediaEncoder, name: str, team: str = "a", salt: str = "") -> Encoding:
    return encoder.want(team, salt, FakeCells(CELLS, CELLS, name.encode()), nothing)


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < deadline, "not within 10 s"
        time.sleep(0.001)


def test_one_picture_is_encoded_once_for_all_calls_of_a_scope(encoder: MediaEncoder, steps: Steps) -> None:
    ended: list[int] = []
    cells = FakeCells(CELLS, CELLS, b"p")
    calls = [encoder.want("a", "", cells, lambda number=number: ended.append(number)) for number in range(3)]  # type: ignore[misc]
    steps.let(10)
    until(lambda: len(ended) == 3)
    assert all(one is calls[0] for one in calls)
    rows = calls[0].rows
    assert rows is not None
    assert (rows == ord("p")).all()
    assert want(encoder, "p").rows is rows, "later too"
    others = [want(encoder, "p", "b"), want(encoder, "p", "a", "salt")]
    until(lambda: all(one.is_over for one in others))
    assert steps.done == [b"p"] * 3
    assert encoder.num_found == 3
    assert encoder.cell_s > 0


def test_teams_take_turns(encoder: MediaEncoder, steps: Steps) -> None:
    first = want(encoder, "0", "a")
    assert steps.begun.acquire(timeout=5)
    held = [want(encoder, str(number), "a") for number in range(1, 5)] + [want(encoder, "x", "b")]
    steps.let(10)
    until(lambda: all(one.is_over for one in (first, *held)))
    assert steps.done.index(b"x") <= 2, "team b does not wait for all of team a's"


def test_what_no_call_wants_any_more_is_not_encoded(encoder: MediaEncoder, steps: Steps) -> None:
    held = [want(encoder, "0")]
    assert steps.begun.acquire(timeout=5)
    held += [want(encoder, "1"), want(encoder, "2")]
    del held[1]
    gc.collect()
    steps.let(10)
    until(lambda: held[-1].is_over)
    assert steps.done == [b"0", b"2"]


def test_so_many_bytes_are_kept_and_those_that_calls_hold(encoder: MediaEncoder, steps: Steps) -> None:
    steps.let(100)
    pinned = want(encoder, "0")
    until(lambda: pinned.is_over)
    for name in "123":
        one = want(encoder, name)
        until(lambda one=one: one.is_over)  # type: ignore[misc]
    del one
    gc.collect()
    assert encoder._num_bytes == 2 * BYTES
    assert want(encoder, "0") is pinned, "a call holds it"
    num = encoder.num_encoded
    again = want(encoder, "1")
    until(lambda: again.is_over)
    assert encoder.num_encoded == num + 1, "it was dropped as the oldest"
    assert want(encoder, "3").is_over


def test_a_failure_is_told_and_not_remembered(encoder: MediaEncoder, steps: Steps) -> None:
    for error, code in (
        (EncodeFailed("no"), FailureCode.INVALID_REQUEST),
        (MemoryError(), FailureCode.OUT_OF_MEMORY),
    ):
        steps.error = error
        one = want(encoder, "0")
        steps.let(1)
        until(lambda one=one: one.is_over)  # type: ignore[misc]
        assert one.rows is None
        assert one.failure is not None
        assert one.failure.code is code
    steps.error = None
    again = want(encoder, "0")
    steps.let(1)
    until(lambda: again.rows is not None)


def test_what_is_still_to_come_fails_when_it_stops(steps: Steps) -> None:
    encoder = MediaEncoder(steps)
    encoder.start()
    begun = want(encoder, "0")
    assert steps.begun.acquire(timeout=5)
    waiting = want(encoder, "1")
    stopping = threading.Thread(target=encoder.stop)
    stopping.start()
    until(lambda: waiting.is_over)
    assert waiting.failure is not None
    assert waiting.failure.code is FailureCode.DRAINING
    steps.let(1)
    stopping.join(5)
    assert not stopping.is_alive()
    assert begun.rows is not None
    late = want(encoder, "2")
    assert late.failure is not None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_no_call_waits_for_a_thread_that_an_unforeseen_error_has_ended(encoder: MediaEncoder, steps: Steps) -> None:
    ended: list[str] = []
    begun = encoder.want("a", "", FakeCells(CELLS, CELLS, b"0"), lambda: ended.append("begun"))
    assert steps.begun.acquire(timeout=5)
    waiting = want(encoder, "1")
    steps.error = RuntimeError("odd")
    steps.let(1)
    until(lambda: begun.is_over and waiting.is_over)
    until(lambda: ended == ["begun"])
    late = want(encoder, "2")
    for one in (begun, waiting, late):
        assert one.failure is not None
        assert one.failure.code is FailureCode.DRAINING, "gateways ask another worker"
