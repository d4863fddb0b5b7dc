"""What a gateway counts of its requests."""

from __future__ import annotations

import time

import pytest
from prometheus_client import CollectorRegistry

from gateway import __version__
from gateway.commands.config import metrics_of
from gateway.telemetry.metrics import LEASE_ENDS, LOSSES, Metrics
from gateway.telemetry.request_log import RequestLog
from tests.support.request_logs import finished_log
from tests.support.scrape import Scrape, page_of


def told(metrics: Metrics) -> Scrape:
    return Scrape(page_of(metrics.registry))


def test_a_finished_log() -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.ended(finished_log(), 1.0)
    shown = told(metrics)
    who = {"model": "llama", "alias": "chat", "team": "red"}
    assert shown.value("paddock_requests_total", **who, outcome="ok") == 1
    assert shown.value("paddock_prompt_tokens_total", **who) == 10
    assert shown.value("paddock_generated_tokens_total", **who) == 6
    assert shown.value("paddock_cached_tokens_total", **who) == 4
    assert shown.value("paddock_ttft_seconds_bucket", model="llama", le="0.25") == 1
    assert shown.value("paddock_e2e_seconds_count", model="llama") == 1
    assert shown.value("paddock_time_per_output_token_seconds_sum", model="llama") == pytest.approx(0.15)
    assert shown.value("paddock_queue_wait_seconds_sum", model="llama") == pytest.approx(0.1)
    assert shown.value("paddock_team_queue_seconds_total", model="llama", team="red") == pytest.approx(0.1)
    assert shown.value("paddock_overhead_seconds_sum", model="llama") == pytest.approx(0.002)
    assert shown.sum("paddock_failures_total") == 0
    assert shown.value("paddock_build_info", version=__version__) == 1


def test_the_same_by_opentelemetrys_names() -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.ended(finished_log(), 1.0)
    metrics.ended(finished_log("worker_lost"), 3.0)
    embedded = finished_log()
    embedded.path = "/v1/embeddings"
    metrics.ended(embedded, 1.0)
    shown = told(metrics)
    about = {
        "gen_ai_operation_name": "chat",
        "gen_ai_provider_name": "paddock",
        "gen_ai_request_model": "chat",
        "gen_ai_response_model": "llama",
    }
    assert shown.value("gen_ai_server_request_duration_seconds_sum", **about, error_type="") == 1
    assert shown.value("gen_ai_server_request_duration_seconds_sum", **about, error_type="worker_lost") == 3
    assert shown.value("gen_ai_server_time_to_first_token_seconds_count", **about) == 1
    assert shown.value("gen_ai_server_time_per_output_token_seconds_sum", **about) == pytest.approx(0.15)
    assert shown.value("gen_ai_client_token_usage_sum", **about, gen_ai_token_type="input") == 20
    assert shown.value("gen_ai_client_token_usage_sum", **about, gen_ai_token_type="output") == 12
    about["gen_ai_operation_name"] = "embeddings"
    assert shown.value("gen_ai_server_request_duration_seconds_count", **about, error_type="") == 1


def test_a_question_is_counted_and_not_timed() -> None:
    metrics = Metrics(CollectorRegistry())
    for outcome in ("ok", "no_worker"):
        request_log = finished_log(outcome)
        request_log.path, request_log.asks_only = "/tokenize", True
        metrics.ended(request_log, 1.0)
    shown = told(metrics)
    assert shown.sum("paddock_requests_total", model="llama") == 2
    assert shown.value("paddock_failures_total", model="llama", who="policy", code="no_worker") == 1
    timed = ("paddock_e2e_seconds_count", "paddock_ttft_seconds_count", "gen_ai_server_request_duration_seconds_count")
    assert [shown.sum(name) for name in timed] == [0, 0, 0]


@pytest.mark.parametrize(
    ("outcome", "who"),
    [("client_gone", "caller"), ("queue_full", "policy"), ("worker_lost", "worker"), ("store_unavailable", "gateway")],
)
def test_somebody_is_to_blame(outcome: str, who: str) -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.ended(finished_log(outcome), 1.0)
    metrics.turned_away(RequestLog("r", "GET", "/nope", outcome="unknown_route"))
    shown = told(metrics)
    assert shown.value("paddock_failures_total", model="llama", who=who, code=outcome) == 1
    assert shown.value("paddock_failures_total", model="", who="caller", code="unknown_route") == 1
    assert shown.value("paddock_requests_total", model="", alias="", team="", outcome="unknown_route") == 1


def test_an_outcome_that_nobody_declared_is_no_label() -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.ended(finished_log("Traceback: 0x7f3a"), 1.0)
    shown = told(metrics)
    assert shown.value("paddock_failures_total", model="llama", who="gateway", code="other") == 1
    assert shown.sum("paddock_requests_total", outcome="other") == 1


def test_placing() -> None:
    metrics = Metrics(CollectorRegistry())
    for cached, predicted_s in ((0, 0.0), (512, 0.0), (512, 0.5)):
        request_log = finished_log(attempts=1, cached=cached)
        if predicted_s:
            request_log.answer.waits[0].overtaken = 3
            request_log.queue_position.waits(2, predicted_s)
            request_log.queue_position.waits(1, 9.0)
        metrics.ended(request_log, 1.0)
    held = finished_log(attempts=1)  # nobody could tell when its model's first worker would come
    held.queue_position.waits(1, 2.0, for_worker=True)
    metrics.ended(held, 1.0)
    lost = finished_log()  # by its first worker: two waits, of which one was predicted
    lost.queue_position.waits(2, 9.0)
    metrics.ended(lost, 1.0)
    shown = told(metrics)
    assert shown.value("paddock_placements_total", model="llama", how="cached") == 2
    assert shown.value("paddock_placements_total", model="llama", how="uncached") == 3
    assert shown.value("paddock_overtaken_total", model="llama") == 3
    assert shown.value("paddock_wait_error_seconds_count", model="llama") == 1
    assert shown.value("paddock_wait_error_seconds_sum", model="llama") == pytest.approx(0.4), "0.1 s and not 0.5"


def test_what_is_declared_is_counted() -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.ended(finished_log(), 1.0)
    told(metrics).has_exactly(metrics_of(metrics.groups))


def test_counting_a_request_is_cheap() -> None:
    """Tens of microseconds would be seen at a thousand requests a second; a slow machine gets some room here."""
    metrics, request_log = Metrics(CollectorRegistry()), finished_log()
    metrics.ended(request_log, 1.0)
    times = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(200):
            metrics.ended(request_log, 1.0)
        times.append((time.process_time() - began) / 200)
    assert min(times) < 60e-6


def test_what_may_go_wrong_begins_at_zero() -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.announce(["llama"])
    metrics.ended(finished_log("worker_lost"), 1.0)
    metrics.announce(["llama"])
    shown = told(metrics)
    assert shown.value("paddock_failures_total", model="llama", who="worker", code="worker_lost") == 1
    assert shown.value("paddock_failures_total", model="llama", who="worker", code="unavailable") == 0
    assert shown.value("paddock_failures_total", model="llama", who="gateway", code="other") == 0
    assert shown.value("paddock_worker_starts_total", model="llama") == 0
    for how in LOSSES:
        assert shown.value("paddock_worker_losses_total", model="llama", how=how) == 0
    for why in LEASE_ENDS:
        assert shown.value("paddock_leases_lost_total", model="llama", why=why) == 0
