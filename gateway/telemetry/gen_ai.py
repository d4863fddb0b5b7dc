"""Counts requests in OpenTelemetry's metrics for generative AI, named as Prometheus exports them.

Source: OpenTelemetry's semantic conventions, generative AI metrics. Attributes have few values: operations of the table
below, names of models that exist, outcomes of `gateway.telemetry.outcomes`.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from gateway.telemetry.trail import Trail
from workers.metrics.declaration import GEN_AI_DURATION_S, GEN_AI_TOKEN_S, GEN_AI_TOKENS, GEN_AI_TTFT_S
from workers.metrics.groups import Group
from workers.tracing.span import PROVIDER

ABOUT = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model")
CHAT, TEXT, EMBEDDINGS, RERANK = "chat", "text_completion", "embeddings", "rerank"

OPERATIONS = {
    "/v1/completions": TEXT,
    "/completion": TEXT,
    "/completions": TEXT,
    "/infill": TEXT,
    "/v1/embeddings": EMBEDDINGS,
    "/embedding": EMBEDDINGS,
    "/embeddings": EMBEDDINGS,
    "/v1/rerank": RERANK,
    "/v1/reranking": RERANK,
    "/rerank": RERANK,
    "/reranking": RERANK,
}
"""Path -> operation; all other paths are chat. The convention has no name for ranking."""


def operation_of(path: str) -> str:
    return OPERATIONS.get(path, CHAT)


class GenAi:
    """The four histograms: duration, TTFT, time per token and token usage."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.group = Group("By OpenTelemetry's names", registry)
        self._duration = self.group.histogram(
            "gen_ai_server_request_duration_seconds",
            "arrival to end; `error_type` is empty where the request succeeded",
            (*ABOUT, "error_type"),
            GEN_AI_DURATION_S,
        )
        self._ttft = self.group.histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "arrival to first token, of requests that succeeded",
            ABOUT,
            GEN_AI_TTFT_S,
        )
        self._token = self.group.histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "first token to end, by the tokens after the first, of requests that succeeded",
            ABOUT,
            GEN_AI_TOKEN_S,
        )
        self._usage = self.group.histogram(
            "gen_ai_client_token_usage",
            "tokens of a request, by `gen_ai_token_type`: `input` or `output`",
            (*ABOUT, "gen_ai_token_type"),
            GEN_AI_TOKENS,
        )

    def ended(self, trail: Trail, error: str, total_s: float, token_s: float | None) -> None:
        """Count a request that reached a model; `error` is empty for one that went well."""
        about = (operation_of(trail.path), PROVIDER, trail.alias, trail.model)
        self._duration.labels(*about, error).observe(total_s)
        if not error and trail.ttft_s is not None:
            self._ttft.labels(*about).observe(trail.ttft_s)
        if not error and token_s is not None:
            self._token.labels(*about).observe(token_s)
        if (usage := trail.usage) is not None:
            self._usage.labels(*about, "input").observe(usage.prompt_tokens)
            self._usage.labels(*about, "output").observe(usage.completion_tokens)
