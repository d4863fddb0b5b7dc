"""Routes, parameters, errors and metrics are declared in one place each, and told in the docs."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway import errors
from gateway.api.openai.chat_body import ChatBody
from gateway.api.openai.refused import IGNORED, REFUSED
from gateway.api.routes import ROUTES
from gateway.telemetry.metrics import Metrics
from workers.engine.request import EngineLoad
from workers.service.metrics import WorkerMetrics

DOCS = Path(__file__).resolve().parents[2] / "docs"


def families(exposition: bytes) -> list[str]:
    """Names as a dashboard writes them: counters with `_total`; without the times at which they began to count."""
    found = text_string_to_metric_families(exposition.decode())
    names = [f"{family.name}_total" if family.type == "counter" else family.name for family in found]
    return [name for name in names if not name.endswith("_created")]


def gateway_metrics() -> list[str]:
    return families(Metrics().exposition({"m": 1}, {"m": 1}))


def worker_metrics() -> list[str]:
    load = EngineLoad(slots=1, slots_busy=0, waiting=0, kv_tokens=1, kv_tokens_used=0)
    return families(WorkerMetrics("m", lambda: load).render())


@pytest.mark.parametrize("name", [*gateway_metrics(), *worker_metrics()])
def test_every_metric_is_told(name: str) -> None:
    assert f"`{name}`" in (DOCS / "metrics.md").read_text()


def test_there_are_metrics_to_tell() -> None:
    assert len(gateway_metrics()) >= 12
    assert len(worker_metrics()) >= 20


@pytest.mark.parametrize("row", ROUTES, ids=lambda row: row.name)
def test_every_route_is_told(row: object) -> None:
    method, path = getattr(row, "method", ""), getattr(row, "path", "").replace(":path", "")
    assert f"`{method} {path}`" in (DOCS / "api.md").read_text()


@pytest.mark.parametrize("name", sorted({*ChatBody.model_fields, *IGNORED, *REFUSED}))
def test_every_parameter_is_told(name: str) -> None:
    assert f"`{name}`" in (DOCS / "api.md").read_text()


def tree(kind: type[errors.PaddockError]) -> list[type[errors.PaddockError]]:
    return [kind, *(deeper for child in kind.__subclasses__() for deeper in tree(child))]


@pytest.mark.parametrize("kind", tree(errors.PaddockError)[1:], ids=lambda kind: kind.__name__)
def test_every_error_is_told(kind: type[errors.PaddockError]) -> None:
    told = (DOCS / "api.md").read_text()
    assert f"`{kind.type}`" in told
    assert kind.code is None or f"`{kind.code}`" in told
    assert f"── {kind.__name__} " in (errors.__doc__ or "")
