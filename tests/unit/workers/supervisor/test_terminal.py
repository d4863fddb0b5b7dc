"""What a person sees who looks late, or never."""

from __future__ import annotations

import os
import re
import threading

from workers.supervisor.output import MAX_WAITING, Terminal

LINE = "x" * 999


def test_lines_come_in_order() -> None:
    read_end, write_end = os.pipe()
    with Terminal(write_end, write_end) as terminal:
        terminal.say("first")
        terminal.show("second")
        terminal.say("third")
    os.close(write_end)
    with os.fdopen(read_end) as seen:
        assert seen.read() == "first\nsecond\nthird\n"


def test_what_a_stopped_terminal_does_not_take_is_counted() -> None:
    read_end, write_end = os.pipe()
    seen: list[str] = []

    def look() -> None:
        with os.fdopen(read_end) as pipe:
            seen.extend(pipe)

    late = threading.Thread(target=look)
    with Terminal(write_end, write_end) as terminal:
        for number in range(2 * MAX_WAITING // 1000):
            terminal.say(f"{number:06} {LINE}")
        late.start()
        while len(seen) < MAX_WAITING // 1000 - 100:
            late.join(0.01)
        terminal.say("later")
    os.close(write_end)
    late.join(10)
    numbers = [int(line[:6]) for line in seen if line.endswith(f" {LINE}\n")]
    assert numbers == sorted(numbers)
    num_lost = 2 * MAX_WAITING // 1000 - len(numbers)
    assert num_lost > 100
    told = re.findall(
        r"^paddock: the terminal took no more; (\d+) lines are left out here$", "".join(seen), re.MULTILINE
    )
    assert sum(map(int, told)) == num_lost
    assert seen[-1] == "later\n"


def test_a_terminal_that_is_gone_ends_nobody() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with Terminal(write_end, write_end) as terminal:
        terminal.say("to nobody")
        terminal.show("to nobody")
    os.close(write_end)


def test_the_end_does_not_wait_for_a_stopped_terminal() -> None:
    read_end, write_end = os.pipe()
    with Terminal(write_end, write_end) as terminal:
        for _ in range(1000):
            terminal.say(LINE)
    os.close(read_end)  # the writer's thread is let go
