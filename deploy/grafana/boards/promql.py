"""Expressions that the boards share. Windows are Grafana's `$__rate_interval`, models those that are chosen."""

from __future__ import annotations

OF_MODEL = 'model=~"$model"'
"""Series of a gateway."""
OF_WORKER = 'model_name=~"$model"'
"""Series of a worker."""
WINDOW = "$__rate_interval"


def rate(series: str, labels: str = OF_MODEL, *, by: str = "", window: str = WINDOW) -> str:
    """Per second, added up over gateways and workers."""
    return f"{_sum(by)} (rate({series}{{{labels}}}[{window}]))"


def quantile(share: float, histogram: str, labels: str = OF_MODEL, *, by: str = "", window: str = WINDOW) -> str:
    """`histogram`: without `_bucket`."""
    groups = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({groups}) (rate({histogram}_bucket{{{labels}}}[{window}])))"


def mean(histogram: str, labels: str = OF_MODEL, *, by: str = "", window: str = WINDOW) -> str:
    return ratio(
        rate(f"{histogram}_sum", labels, by=by, window=window), rate(f"{histogram}_count", labels, by=by, window=window)
    )


def ratio(part: str, whole: str) -> str:
    """No value where the whole is nothing."""
    return f"{part} / ({whole} > 0)"


def all_see(gauge: str, labels: str = OF_MODEL) -> str:
    """A gauge that every gateway sees alike, by model."""
    return f"max by (model) ({gauge}{{{labels}}})"


def each_has(gauge: str, labels: str = OF_MODEL) -> str:
    """A gauge of which every gateway has its own part, by model."""
    return f"sum by (model) ({gauge}{{{labels}}})"


def or_zero(expr: str, label: str = "", value: str = "none") -> str:
    """Zero, with `label` set to `value`, where there is no such series yet: for what counts from its first event on."""
    zero = f'label_replace(vector(0), "{label}", "{value}", "", "")' if label else "vector(0)"
    return f"{expr} or on () {zero}"


def came_and_went() -> dict[str, str]:
    """Legend -> expression: worker processes of five minutes. All gateways see the same ones."""
    came = f"max by (model) (increase(paddock_worker_starts_total{{{OF_MODEL}}}[5m]))"
    went = f"max by (model, how) (increase(paddock_worker_losses_total{{{OF_MODEL}}}[5m]))"
    return {"{{model}}: came": or_zero(came, "model", "any"), "{{model}}: {{how}}": or_zero(went, "how", "lost")}


def where_any(expr: str, label: str) -> str:
    """Leaves out what is zero; one zero where all are."""
    return or_zero(f"{expr} > 0", label)


def _sum(by: str) -> str:
    return f"sum by ({by})" if by else "sum"
