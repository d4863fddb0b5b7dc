"""Counts requests in OpenTelemetry's metrics for generative AI, named as Prometheus exports them.

Source: OpenTelemetry's semantic conventions, generative AI metrics. Attributes have few values: operations of the table
below, names of models that exist, outcomes of `workers.protocol.metrics.who`.
"""

from __future__ import annotations

from gateway.telemetry.trail import Trail
from workers.protocol.metrics import of_gateway
from workers.protocol.metrics.book import Book
from workers.tracing.span import PROVIDER

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

    def __init__(self, book: Book) -> None:
        self._duration = book.histogram(of_gateway.GEN_AI_DURATION)
        self._ttft = book.histogram(of_gateway.GEN_AI_TTFT)
        self._token = book.histogram(of_gateway.GEN_AI_TOKEN)
        self._usage = book.histogram(of_gateway.GEN_AI_USAGE)

    def ended(self, trail: Trail, error: str, total_s: float, token_s: float | None) -> None:
        """Count a request that reached a model; `error` is empty for one that went well."""
        about = (operation_of(trail.path), PROVIDER, trail.alias, trail.model)
        self._duration.observe(total_s, *about, error)
        if not error and trail.ttft_s is not None:
            self._ttft.observe(trail.ttft_s, *about)
        if not error and token_s is not None:
            self._token.observe(token_s, *about)
        if (usage := trail.usage) is not None:
            self._usage.observe(usage.prompt_tokens, *about, "input")
            self._usage.observe(usage.completion_tokens, *about, "output")
