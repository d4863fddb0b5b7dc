"""All metrics that gateways, workers and the accounts service declare."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway import errors
from gateway.commands.config import accounts_groups, gateway_groups, metrics_of, worker_groups
from gateway.telemetry.outcomes import FAILED_BY, OTHER, Who, blamed
from workers.metrics.types import Declaration, Kind, bound_text
from workers.protocol.events import FailureCode

SIDES = {
    "gateway": metrics_of(gateway_groups()),
    "worker": metrics_of(worker_groups()),
    "accounts": metrics_of(accounts_groups()),
}
ALL = tuple(metric for metrics in SIDES.values() for metric in metrics)
RECORDED = Path(__file__).with_name("metric_families.json")
OF_PEOPLE = {"team", "alias", "gen_ai_request_model"}


@pytest.mark.parametrize("side", SIDES)
def test_names_types_labels_and_buckets_are_the_recorded_ones(side: str) -> None:
    """Boards, alerts and scalers of others read them. A new metric is added to the record, an old one stays."""
    told = {}
    for metric in SIDES[side]:
        buckets = {"buckets": [bound_text(bound) for bound in metric.buckets]} if metric.buckets else {}
        told[metric.name] = {"type": str(metric.kind), "labels": list(metric.labels), **buckets}
    assert told == json.loads(RECORDED.read_text())[side]


@pytest.mark.parametrize("side", SIDES)
def test_a_name_is_declared_once(side: str) -> None:
    names = [metric.name for metric in SIDES[side]]
    assert sorted(set(names)) == sorted(names)


def test_the_list_needs_nothing_that_only_workers_have() -> None:
    """`paddock config metrics` runs where a gateway is installed alone."""
    code = (
        "import sys; sys.modules.update(numpy=None, llama_cpp=None); "
        "import gateway.commands.config as p; p.metrics_page()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_a_metric_is_what_its_name_says(metric: Declaration) -> None:
    assert re.fullmatch(r"[a-z0-9_]+(:[a-z0-9_]+)?", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert "\n" not in metric.help
    assert not metric.help.endswith(".")


def test_teams_are_told_apart_in_counters_only() -> None:
    """Histograms by team would be a hundred thousand lines at fifty models and twenty teams."""
    for metric in ALL:
        if metric.kind is not Kind.COUNTER and not metric.name.startswith("gen_ai_"):
            assert not OF_PEOPLE & set(metric.labels), metric.name
        if metric.kind is Kind.HISTOGRAM:
            assert "team" not in metric.labels, metric.name


def test_every_way_to_end_has_somebody_to_blame() -> None:
    tree = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.PaddockError)]
    told = {kind.code or kind.type for kind in tree}
    told |= {code.value for code in FailureCode} | {"client_gone", "cancelled"}
    assert told == set(FAILED_BY), "a closed table: none is missing, none is left over"


@pytest.mark.parametrize("kind", [errors.NoWorker, errors.Unsuited, errors.SlotsBusy, errors.StorageFull])
def test_what_an_operator_has_bounded_is_no_failure(kind: type[errors.Unavailable]) -> None:
    assert blamed(str(kind.code)) == (Who.POLICY, kind.code)
    plain = errors.Unavailable
    assert (kind.status, kind.type) == (plain.status, plain.type), "to callers nothing else changed"


def test_what_nobody_knows_is_the_gateways_fault() -> None:
    assert blamed("queue_full") == (Who.POLICY, "queue_full")
    assert blamed("a raw text") == (Who.GATEWAY, OTHER)
