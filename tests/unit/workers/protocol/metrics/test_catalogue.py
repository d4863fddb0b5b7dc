"""The catalogue of all metrics."""

from __future__ import annotations

import re

import pytest

from gateway import errors
from workers.protocol.failures import FailureCode
from workers.protocol.metrics import catalogue
from workers.protocol.metrics.metric import Group, Kind, Metric
from workers.protocol.metrics.who import FAILED_BY, OTHER, Who, blamed

ALL = (*catalogue.metrics_of(catalogue.GATEWAY), *catalogue.metrics_of(catalogue.WORKER))
OF_PEOPLE = {"team", "alias", "gen_ai_request_model"}


@pytest.mark.parametrize("groups", [catalogue.GATEWAY, catalogue.WORKER])
def test_a_name_is_declared_once(groups: tuple[Group, ...]) -> None:
    names = [metric.name for metric in catalogue.metrics_of(groups)]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_a_metric_is_what_its_name_says(metric: Metric) -> None:
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
