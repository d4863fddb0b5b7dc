"""Says who is to blame for a request that did not end well, by a table of all possible outcomes."""

from __future__ import annotations

from enum import StrEnum


class Who(StrEnum):
    CALLER = "caller"
    """The caller asked for something that is not available, or went away."""
    POLICY = "policy"
    """A limit set by an operator was reached: on the queue, on time, on a key's rights, on a team's storage, or on the
    number of workers (none, for a model scaled to zero)."""
    WORKER = "worker"
    """A worker failed, or there was no worker."""
    GATEWAY = "gateway"
    """The gateway failed, was stopped, or had no Redis."""


FAILED_BY = {
    "client_gone": Who.CALLER,
    "cancelled": Who.CALLER,
    "superseded": Who.CALLER,
    "client_too_slow": Who.CALLER,
    "invalid_request_error": Who.CALLER,
    "invalid_request": Who.CALLER,
    "context_length_exceeded": Who.CALLER,
    "context_overflow": Who.CALLER,
    "request_head_too_large": Who.CALLER,
    "http_version_not_supported": Who.CALLER,
    "request_head_timeout": Who.CALLER,
    "request_too_large": Who.CALLER,
    "request_body_timeout": Who.CALLER,
    "previous_response_not_found": Who.CALLER,
    "catalog_refused": Who.CALLER,
    "catalog_changed": Who.CALLER,
    "unsupported_parameter": Who.CALLER,
    "unsupported": Who.CALLER,
    "not_supported": Who.CALLER,
    "invalid_api_key": Who.CALLER,
    "token_not_accepted": Who.CALLER,
    "expired_api_key": Who.CALLER,
    "network_not_allowed": Who.CALLER,
    "not_local": Who.CALLER,
    "too_many_failed_authentications": Who.CALLER,
    "unknown_route": Who.CALLER,
    "model_not_found": Who.CALLER,
    "worker_not_found": Who.CALLER,
    "response_not_found": Who.CALLER,
    "stream_gone": Who.CALLER,
    "method_not_allowed": Who.CALLER,
    "websocket_connection_limit_reached": Who.POLICY,
    "websocket_stream_limit_reached": Who.POLICY,
    "cancelled_by_admin": Who.POLICY,
    "model_not_allowed": Who.POLICY,
    "role_not_allowed": Who.POLICY,
    "blocked": Who.POLICY,
    "queue_full": Who.POLICY,
    "too_many_streams": Who.POLICY,
    "queue_timeout": Who.POLICY,
    "request_timeout": Who.POLICY,
    "busy": Who.POLICY,
    "too_many_connections": Who.POLICY,
    "too_many_requests": Who.POLICY,
    "too_many_sockets": Who.POLICY,
    "memory_share_taken": Who.POLICY,
    "rate_limit_exceeded": Who.POLICY,
    "budget_exceeded": Who.POLICY,
    "memory_full": Who.POLICY,
    "no_worker": Who.POLICY,
    "unsuited": Who.POLICY,
    "storage_full": Who.POLICY,
    "model_not_loaded": Who.WORKER,
    "unavailable": Who.WORKER,
    "draining": Who.WORKER,
    "worker_lost": Who.WORKER,
    "out_of_memory": Who.WORKER,
    "internal": Who.WORKER,
    "store_unavailable": Who.GATEWAY,
    "accounts_unavailable": Who.GATEWAY,
    "provider_unavailable": Who.GATEWAY,
    "overrun": Who.GATEWAY,
    "stopping": Who.GATEWAY,
    "unauthorized": Who.GATEWAY,
    "internal_error": Who.GATEWAY,
}
"""Outcome -> who is to blame. An outcome is the code of an error (`gateway.errors`; its type if it has no code), the
code of a worker's failure (`workers.protocol.events`), or `client_gone` or `cancelled`, which are no errors."""

OTHER = "other"
"""The code of an outcome that is not in the table."""


def blamed(outcome: str) -> tuple[Who, str]:
    """Return who is to blame for an outcome, and the label for that outcome. If it is not in the table, the gateway is
    to blame and the label is `OTHER`."""
    who = FAILED_BY.get(outcome)
    return (Who.GATEWAY, OTHER) if who is None else (who, outcome)
