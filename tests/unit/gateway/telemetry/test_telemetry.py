"""Log lines and metrics of a request."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.telemetry.logs import FieldsFormatter, TextFormatter
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.trail import Trail
from workers.protocol.events import Usage


def finished_trail() -> Trail:
    trail = Trail("req-1", "POST", "/v1/chat/completions", received_at=time.monotonic() - 1.0)
    trail.team, trail.key_id, trail.alias, trail.model, trail.worker = "red", "ci", "chat", "llama", "w1"
    trail.attempts, trail.queue_ms, trail.status, trail.outcome = 2, 100.0, 200, "ok"
    trail.submitted_at = trail.received_at + 0.102
    trail.first_token_at = trail.received_at + 0.25
    trail.usage = Usage(10, 5, 4)
    return trail


def record(trail: Trail) -> logging.LogRecord:
    logger = logging.getLogger("test")
    return logger.makeRecord("test", logging.INFO, "f", 1, "request", (), None, extra={"fields": trail.line()})


def test_a_line_for_machines() -> None:
    line = json.loads(FieldsFormatter().format(record(finished_trail())))
    assert line["level"] == "INFO"
    assert line["message"] == "request"
    assert (line["request_id"], line["team"], line["key"], line["alias"]) == ("req-1", "red", "ci", "chat")
    assert (line["attempts"], line["queue_ms"], line["overhead_ms"], line["ttft_ms"]) == (2, 100.0, 2.0, 250.0)
    assert (line["prompt_tokens"], line["completion_tokens"], line["cached_tokens"]) == (10, 5, 4)
    assert line["total_ms"] >= 1000


def test_a_line_for_people() -> None:
    line = TextFormatter().format(record(finished_trail()))
    assert "\n" not in line
    assert "request_id=req-1" in line
    assert "ttft_ms=250.0" in line


def test_what_never_happened_is_left_out() -> None:
    line = Trail("r", "GET", "/nope").line()
    assert not {"team", "model", "attempts", "ttft_ms", "prompt_tokens"} & set(line)


def told(metrics: Metrics) -> dict[tuple[Any, ...], float]:
    text = metrics.exposition({"llama": 2}, {"llama": 3}, {"llama": 1}).decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_of_a_finished_request() -> None:
    metrics = Metrics()
    metrics.ended(finished_trail(), 1.0)
    metrics.turned_away(Trail("r", "GET", "/nope", outcome="unknown_route"))
    samples = told(metrics)
    who = (("alias", "chat"), ("model", "llama"))
    assert samples["paddock_requests_total", *who, ("outcome", "ok"), ("team", "red")] == 1
    nobody = (("alias", ""), ("model", ""), ("outcome", "unknown_route"), ("team", ""))
    assert samples["paddock_requests_total", *nobody] == 1
    assert samples["paddock_prompt_tokens_total", *who, ("team", "red")] == 10
    assert samples["paddock_generated_tokens_total", *who, ("team", "red")] == 5
    assert samples["paddock_cached_tokens_total", *who, ("team", "red")] == 4
    assert samples["paddock_ttft_seconds_count", *who] == 1
    assert samples["paddock_ttft_seconds_bucket", who[0], ("le", "0.25"), who[1]] == 1
    assert samples["paddock_workers", ("model", "llama")] == 2
    assert samples["paddock_queue_length", ("model", "llama")] == 3


def test_metrics_of_placing() -> None:
    metrics = Metrics()
    for cached, predicted_s in ((0, 0.0), (512, 0.0), (512, 0.5)):
        trail = finished_trail()
        trail.attempts, trail.expected_cached = 1, cached
        if predicted_s:
            trail.overtaken = 3
            trail.standing.waits(2, predicted_s)
            trail.standing.waits(1, 9.0)
        metrics.ended(trail, 1.0)
    lost = finished_trail()  # by its first worker: two waits, of which one was predicted
    lost.standing.waits(2, 9.0)
    metrics.ended(lost, 1.0)
    samples = told(metrics)
    model = ("model", "llama")
    assert samples["paddock_placements_total", ("how", "cached"), model] == 2
    assert samples["paddock_placements_total", ("how", "uncached"), model] == 1
    assert samples["paddock_overtaken_total", model] == 3
    assert samples["paddock_wait_error_seconds_count", model] == 1
    assert samples["paddock_wait_error_seconds_sum", model] == pytest.approx(0.4), "0.1 s and not 0.5"


def test_gauges_forget_models_that_are_gone() -> None:
    metrics = Metrics()
    metrics.exposition({"a": 1}, {}, {})
    assert 'model="a"' not in metrics.exposition({"b": 1}, {}, {}).decode()
