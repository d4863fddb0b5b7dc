"""Opens a process's tracer: one that sends to the configured endpoint, or none.

Without an endpoint OpenTelemetry's libraries are not loaded and need not be installed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from urllib.parse import unquote, urlsplit

from workers.tracing.tracer import EVERY_S, OFF, BackgroundTracer, Tracer

log = logging.getLogger(__name__)

EXPORTER = "workers.tracing.otlp"
TRACES_PATH = "/v1/traces"

STANDARD_TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
STANDARD_BASE = "OTEL_EXPORTER_OTLP_ENDPOINT"
STANDARD_HEADERS = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
STANDARD_NAME, STANDARD_RESOURCE = "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"
STANDARD_OFF = "OTEL_SDK_DISABLED"
STANDARD_EVERY_MS = "OTEL_BSP_SCHEDULE_DELAY"

NOT_INSTALLED = (
    "tracing needs {name}, which is not installed; install the extra 'tracing': pip install '.[tracing]' in Paddock's "
    "checkout, or unset {setting}"
)


class TracingUnusable(ValueError):
    """The tracing that the settings ask for can't be had."""


@contextmanager
def tracing(
    endpoint: str,
    headers: str,
    share: float,
    resource: Mapping[str, str],
    version: str,
    environment: Mapping[str, str],
) -> Iterator[Tracer]:
    """Yield the tracer. `resource`: attributes of this process; those in the environment take precedence.

    Raises TracingUnusable.
    """
    url, setting = _endpoint(endpoint, environment)
    exporter = _exporter(url, setting, headers, resource, version, environment) if url else None
    if exporter is None:
        yield OFF
        return
    tracer = BackgroundTracer(exporter, share, _every_s(environment))
    log.info("traces go to %s", url)
    with tracer.running():
        yield tracer


def _exporter(
    url: str, setting: str, headers: str, resource: Mapping[str, str], version: str, environment: Mapping[str, str]
) -> Any:
    """Return the exporter; None: its library is missing, and only a standard OTEL_ variable asked for it."""
    _check(url, setting)
    told = headers or next((environment[name] for name in STANDARD_HEADERS if environment.get(name)), "")
    given = _pairs("otlp_headers", told)
    try:
        exporter = import_module(EXPORTER).OtlpExporter
    except ModuleNotFoundError as error:
        why = NOT_INSTALLED.format(name=error.name, setting=setting)
        if setting.startswith("OTEL_"):
            # It may be set for all programs of a cluster.
            log.warning(why)
            return None
        raise TracingUnusable(why) from None
    return exporter(url, given, _resource(resource, environment), version)


def _endpoint(endpoint: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the whole URL, and the setting that names it; empty: there is to be no tracing."""
    if environment.get(STANDARD_OFF, "").lower() == "true":
        return "", ""
    if endpoint:
        return _with_path(endpoint), "otlp_endpoint"
    if whole := environment.get(STANDARD_TRACES):
        return whole, STANDARD_TRACES
    base = environment.get(STANDARD_BASE, "")
    return (_with_path(base), STANDARD_BASE) if base else ("", "")


def _with_path(url: str) -> str:
    url = url.rstrip("/")
    return url if url.endswith(TRACES_PATH) else url + TRACES_PATH


def _check(url: str, setting: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise TracingUnusable(
            f"{setting}: {url} is no URL of a collector; give one that speaks OTLP over HTTP, such as "
            "http://127.0.0.1:4318"
        )
    if parts.username is not None or parts.password is not None:
        raise TracingUnusable(f"{setting}: the URL must not have a password in it; say it with otlp_headers")


def _every_s(environment: Mapping[str, str]) -> float:
    told = environment.get(STANDARD_EVERY_MS, "")
    return max(0.01, int(told) / 1e3) if told.isdecimal() else EVERY_S


def _pairs(setting: str, text: str) -> dict[str, str]:
    """Parse `name=value,name=value`, values percent-encoded, as OpenTelemetry's own variables have it."""
    pairs = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise TracingUnusable(f"{setting}: must be name=value pairs with commas between them")
        pairs[unquote(name.strip())] = unquote(value.strip())
    return pairs


def _resource(own: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    named = {"service.name": environment[STANDARD_NAME]} if environment.get(STANDARD_NAME) else {}
    return {**own, **_pairs(STANDARD_RESOURCE, environment.get(STANDARD_RESOURCE, "")), **named}
