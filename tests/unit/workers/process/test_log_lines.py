"""The log of a process: what becomes of it, and of the process, when nobody reads it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.support.process_limits import few_descriptors
from tests.support.waiting import wait_until
from workers.process import log_lines
from workers.process.log_lines import MAX_WAITING_BYTES, PIECE_BYTES, FieldsFormatter, UnblockedHandler

MOST_S = 10.0
"""Within which many lines are logged where nobody reads them, on a busy machine; a blocked one waits for ever."""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with suppress(OSError):
            os.close(end)


def log_to(descriptor: int) -> tuple[logging.Logger, UnblockedHandler]:
    handler = UnblockedHandler(descriptor)
    handler.setFormatter(FieldsFormatter())
    logger = logging.Logger("own")
    logger.addHandler(handler)
    return logger, handler


def num_unread(descriptor: int) -> int:
    """Return the number of bytes that wait in a pipe."""
    found = bytearray(4)
    fcntl.ioctl(descriptor, termios.FIONREAD, found)
    return int.from_bytes(found, sys.byteorder)


def read_all(descriptor: int) -> list[dict[str, str]]:
    """Read until the other end is closed; every line must be whole."""
    text = b""
    while part := os.read(descriptor, 1 << 16):
        text += part
    return [json.loads(line) for line in text.decode().splitlines()]


def test_lines_are_written_at_once_while_they_are_read(pipe: tuple[int, int]) -> None:
    logger, _ = log_to(pipe[1])
    logger.warning("one", extra={"fields": {"n": 1}})
    logger.warning("é\n")
    lines = os.read(pipe[0], 1 << 16).decode().splitlines()
    assert [json.loads(line)["message"] for line in lines] == ["one", "é\n"]
    assert json.loads(lines[0])["n"] == 1


def test_a_log_that_nobody_reads_holds_nothing_up_and_tells_what_is_missing(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_lines, "CLOSE_S", MOST_S)
    logger, handler = log_to(pipe[1])
    many = 2 * MAX_WAITING_BYTES // 500
    began = time.monotonic()
    for number in range(many):
        logger.warning("%d", number, extra={"fields": {"filler": "x" * 500}})
    assert time.monotonic() - began < MOST_S
    lines: list[dict[str, str]] = []
    reader = threading.Thread(target=lambda: lines.extend(read_all(pipe[0])))
    reader.start()
    wait_until(lambda: not num_unread(pipe[0]), MOST_S)
    logger.warning("it is read again")
    handler.close()
    os.close(pipe[1])
    reader.join(MOST_S)
    said = [line["message"] for line in lines]
    numbers = [int(text) for text in said if text.isdigit()]
    assert numbers == list(range(len(numbers))), "the first ones are there, in order"
    assert 700 * len(numbers) > MAX_WAITING_BYTES
    assert said[len(numbers) :] == [
        f"the log was not read: {many - len(numbers)} lines are left out here",
        "it is read again",
    ]


def test_a_terminal_that_nobody_reads_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one behind a connection that hangs. It says that it can be written to while it has room for a byte."""
    monkeypatch.setattr(log_lines, "CLOSE_S", 0.2)
    master, terminal = os.openpty()
    try:
        logger, handler = log_to(terminal)
        began = time.monotonic()
        for number in range(2000):
            logger.warning("%d", number, extra={"fields": {"filler": "x" * 500}})
        assert os.read(master, 1 << 16).startswith(b'{"time"')
        handler.close()
        assert time.monotonic() - began < MOST_S
        assert os.get_blocking(terminal), "others that have it open are not disturbed"
    finally:
        os.close(master)
        os.close(terminal)


def test_a_line_longer_than_a_pipe_takes_at_once_comes_whole(pipe: tuple[int, int]) -> None:
    logger, handler = log_to(pipe[1])
    text = "long " * PIECE_BYTES * 8
    logger.warning(text)
    logger.warning("short")
    lines: list[dict[str, str]] = []
    reader = threading.Thread(target=lambda: lines.extend(read_all(pipe[0])))
    reader.start()
    handler.close()
    os.close(pipe[1])
    reader.join(5.0)
    assert [line["message"] for line in lines] == [text, "short"]


def test_a_line_that_is_logged_while_another_is_written_is_written_once(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one of a finalizer, which runs wherever the collector does."""
    logger, handler = log_to(pipe[1])
    write, nested = os.write, ["nested"]

    def writing(descriptor: int, data: bytes) -> int:
        num_bytes = write(descriptor, data)
        if nested:
            logger.warning(nested.pop())
        return num_bytes

    monkeypatch.setattr(os, "write", writing)
    logger.warning("outer")
    monkeypatch.undo()
    handler.close()
    os.close(pipe[1])
    assert [line["message"] for line in read_all(pipe[0])] == ["outer", "nested"]


def test_a_shared_pipe_is_left_as_it_was(pipe: tuple[int, int]) -> None:
    logger, handler = log_to(pipe[1])
    logger.warning("one")
    assert os.get_blocking(pipe[1]), "others that write to it do not expect it to be non-blocking"
    handler.close()
    logger.warning("behind the end")
    os.close(pipe[1])
    assert [line["message"] for line in read_all(pipe[0])] == ["one"]


def test_a_reader_that_is_gone_is_no_error(pipe: tuple[int, int]) -> None:
    logger, handler = log_to(pipe[1])
    os.close(pipe[0])
    logger.warning("nobody is there")
    logger.warning("nor now")
    began = time.monotonic()
    handler.close()
    assert time.monotonic() - began < MOST_S


def test_where_no_file_may_be_open_the_lines_wait(pipe: tuple[int, int]) -> None:
    logger, _ = log_to(pipe[1])
    with few_descriptors(0):
        logger.warning("one")
    logger.warning("two")
    lines = os.read(pipe[0], 1 << 16).decode().splitlines()
    assert [json.loads(line)["message"] for line in lines] == ["one", "two"]


def test_the_end_of_a_process_waits_for_the_reader_only_so_long(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_lines, "CLOSE_S", 0.2)
    logger, handler = log_to(pipe[1])
    for _ in range(1000):
        logger.warning("x" * 500)
    began = time.monotonic()
    handler.close()
    assert 0.1 < time.monotonic() - began < MOST_S
