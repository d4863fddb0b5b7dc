"""Request logs as they are when a worker answers."""

from __future__ import annotations

import time

from gateway.telemetry.answer_log import AnswerLog, WaitLog
from gateway.telemetry.request_log import RequestLog
from workers.protocol.events import Usage
from workers.protocol.heartbeat import WorkerAddress


def attempt(
    log: AnswerLog, worker: str = "w1", url: str = "http://w1", *, fingerprint: str = "", cached: int = 0
) -> None:
    log.begin_attempt(WorkerAddress(log.model, worker, f"boot-{worker}", url), fingerprint, cached)


def placed_log(worker: str = "w", model: str = "model", fingerprint: str = "") -> RequestLog:
    """Return the log of a request that was submitted to a worker."""
    request_log = RequestLog("r", "POST", "/")
    request_log.answer.model = model
    attempt(request_log.answer, worker, fingerprint=fingerprint)
    return request_log


def finished_log(outcome: str = "ok", *, attempts: int = 2, cached: int = 0) -> RequestLog:
    """Return the log of a request of one second: 100 ms in the queue, 2 ms in the gateway, a first token at 250 ms."""
    began = time.monotonic() - 1.0
    request_log, answer = (
        RequestLog("req-1", "POST", "/v1/chat/completions", received_at=began),
        AnswerLog(model="llama"),
    )
    request_log.answers, request_log.answer = [answer], answer
    request_log.team, request_log.key_id, request_log.alias = "red", "ci", "chat"
    answer.waits.append(WaitLog("llama", answer.queue_position, None, began_at=began, ended_at=began + 0.1))
    for _ in range(attempts):
        attempt(answer, cached=cached)
        answer.attempts[-1].submitted_at = began + 0.102
    request_log.status, request_log.outcome = 200, outcome
    request_log.first_token_at, request_log.usage = began + 0.25, Usage(10, 6, 4)
    return request_log
