"""Log lines of a request."""

from __future__ import annotations

import json
import logging

from gateway.telemetry.request_log import RequestLog
from tests.support.request_logs import finished_log
from workers.process.log_lines import FieldsFormatter, TextFormatter


def record(request_log: RequestLog) -> logging.LogRecord:
    logger = logging.getLogger("test")
    return logger.makeRecord("test", logging.INFO, "f", 1, "request", (), None, extra={"fields": request_log.line()})


def test_a_line_for_machines() -> None:
    line = json.loads(FieldsFormatter().format(record(finished_log())))
    assert line["level"] == "INFO"
    assert line["message"] == "request"
    assert (line["request_id"], line["team"], line["key"], line["alias"]) == ("req-1", "red", "ci", "chat")
    assert (line["attempts"], line["queue_ms"], line["overhead_ms"], line["ttft_ms"]) == (2, 100.0, 2.0, 250.0)
    assert (line["prompt_tokens"], line["completion_tokens"], line["cached_tokens"]) == (10, 6, 4)
    assert line["total_ms"] >= 1000


def test_a_line_for_people() -> None:
    line = TextFormatter().format(record(finished_log()))
    assert "\n" not in line
    assert "request_id=req-1" in line
    assert "ttft_ms=250.0" in line


def test_a_path_with_a_line_end_begins_no_line_of_its_own() -> None:
    request_log = RequestLog("req-1", "GET", "/x\n12:00:00 ERROR   the gateway is\x1b[2J gone")
    line = TextFormatter().format(record(request_log))
    assert "\n" not in line
    assert "\x1b" not in line
    assert r"path='/x\n12:00:00 ERROR   the gateway is\x1b[2J gone'" in line


def test_a_long_path_does_not_make_a_long_line() -> None:
    """Whoever has no key could write 64 KiB into the log with each request."""
    request_log = RequestLog("req-1", "GET", "/" + "x" * 60_000)
    assert request_log.line()["path"] == "/" + "x" * 511


def test_what_never_happened_is_left_out() -> None:
    line = RequestLog("r", "GET", "/nope").line()
    assert not {"team", "model", "attempts", "ttft_ms", "prompt_tokens"} & set(line)
