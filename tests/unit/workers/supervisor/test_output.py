"""What of a child's lines reaches the terminal, and what its death repeats."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path

from workers.supervisor.output import Console, Output

INFO = json.dumps({"level": "INFO", "message": "loaded", "time": "t"})
WARNING = json.dumps({"level": "WARNING", "message": "slow disk", "logger": "x", "time": "t", "bytes": 7})


def lines_of(console: Console, folder: Path, *lines: str) -> Output:
    output = Output("worker-0", folder, console)
    for line in lines:
        output.line(line.encode() + b"\n")
    output.close()
    return output


def test_quiet_terminal_whole_file(tmp_path: Path) -> None:
    terminal = io.StringIO()
    output = lines_of(Console("warning", partial(print, file=terminal)), tmp_path, INFO, "llama.cpp says", WARNING)
    assert terminal.getvalue() == "worker-0 | WARNING slow disk (bytes=7)\n"
    assert output.path.read_text().splitlines() == [INFO, "llama.cpp says", WARNING]


def test_everything_at_info_and_json_as_it_is(tmp_path: Path) -> None:
    terminal = io.StringIO()
    lines_of(Console("info", partial(print, file=terminal)), tmp_path, INFO, "plain")
    assert terminal.getvalue() == "worker-0 | INFO loaded\nworker-0 | plain\n"
    terminal = io.StringIO()
    lines_of(Console("info", partial(print, file=terminal), raw=True), tmp_path, INFO, "plain")
    assert terminal.getvalue() == f"{INFO}\nworker-0 | plain\n"


def test_complaint_is_the_line_that_says_why(tmp_path: Path) -> None:
    console = Console("error", partial(print, file=io.StringIO()))
    error = json.dumps({"level": "ERROR", "message": "no memory"})
    assert (
        lines_of(console, tmp_path, "paddock: the file is cut off", "later noise").complaint() == "the file is cut off"
    )
    assert lines_of(console, tmp_path, error, "later noise").complaint() == "no memory"
    assert lines_of(console, tmp_path, "only this").complaint() == "only this"
    assert lines_of(console, tmp_path).complaint() == "it said nothing"
