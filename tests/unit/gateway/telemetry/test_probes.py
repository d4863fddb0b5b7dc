"""Who asks every few seconds is no caller, wherever callers are told of."""

from __future__ import annotations

import logging

import pytest

from gateway.api.operations.drain import UNCOUNTED, InFlightRequests
from gateway.telemetry.finish import PROBED, REQUEST_LOGGER, log_request
from gateway.telemetry.request_log import RequestLog


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/ready", "/metrics", "/metrics/targets"])
def test_a_probe_is_no_caller(path: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, REQUEST_LOGGER):
        log_request(RequestLog("r", "GET", path, status=503, outcome="unavailable"))
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]
    assert not InFlightRequests().enter({"path": path})


def test_a_drain_is_told_of_and_not_waited_for() -> None:
    assert {"/health/drain"} == UNCOUNTED - PROBED
