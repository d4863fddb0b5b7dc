"""Bytes that follow a question's line, and an answer's."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from workers.process.helper_process import HelperProcess, ProcessEnded, TookTooLong


@pytest.fixture
def helper() -> Iterator[HelperProcess]:
    process = HelperProcess("tests.support.echoing_helper", start_s=30.0)
    yield process
    process.close()


def echoed(helper: HelperProcess, data: bytes, wanted: int, what: str = "echo", timeout_s: float = 30.0) -> bytes:
    memory = bytearray(wanted)
    question = f"{len(data)} {wanted} {what}".encode()
    answer = helper.ask(question, timeout_s, attached=data, room=lambda line: memoryview(memory)[: int(line)])
    assert answer == str(wanted).encode()
    return bytes(memory)


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 262_144, 5_000_001])
def test_bytes_go_and_come_as_they_are(helper: HelperProcess, size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert echoed(helper, data, size) == data
    assert echoed(helper, data, 7) == ((data or b"?") * 7)[:7], "the next answer begins where this one ended"


def test_line_ends_among_the_bytes_are_bytes(helper: HelperProcess) -> None:
    assert echoed(helper, b"\n" * 1000, 70_000) == b"\n" * 70_000


def test_a_process_that_ends_among_the_bytes_has_not_answered(helper: HelperProcess) -> None:
    with pytest.raises(ProcessEnded):
        echoed(helper, b"abc", 1_000_000, "end")
    assert echoed(helper, b"abc", 6) == b"abcabc"


def test_a_process_that_sends_fewer_bytes_than_it_said_is_late(helper: HelperProcess) -> None:
    helper.restart()
    with pytest.raises(TookTooLong):
        helper.ask(b"0 5 echo", 0.5, room=lambda line: memoryview(bytearray(6)))
    assert echoed(helper, b"x", 2) == b"xx"


def test_nobody_gets_the_bytes_of_one_who_had_no_room(helper: HelperProcess) -> None:
    class NoRoom(Exception):
        pass

    def refuse(line: bytes) -> memoryview:
        raise NoRoom

    helper.restart()
    first = helper.pid
    with pytest.raises(NoRoom):
        helper.ask(b"0 1000000 echo", 30.0, room=refuse)
    assert echoed(helper, b"ab", 4) == b"abab"
    assert helper.pid not in (None, first)
