"""`paddock config`: shows what the settings are and where they come from, and prints what is made from the classes.

show [--json] [flags of up]   each setting of `paddock up`, its value, where it came from; secrets are covered
schema                        JSON Schema of a catalog file (published as docs/catalog.schema.json)
docs                          docs/settings.md
compatibility                 docs/compatibility.md: what each endpoint does with each parameter
metrics                       docs/metrics.md: every metric of gateways and workers
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from gateway.metrics_page import metrics_page
from gateway.settings import UpSettings, known_settings
from gateway.settings_page import settings_page
from workers import command, sources
from workers.protocol import catalog


def main(args: Sequence[str]) -> int:
    name, *rest = args or ["--help"]
    if name == "show":
        return show(rest)
    if name == "schema" and not rest:
        print(schema_text(), end="")
        return 0
    if name == "docs" and not rest:
        print(settings_page(), end="")
        return 0
    if name == "metrics" and not rest:
        print(metrics_page(), end="")
        return 0
    if name == "compatibility" and not rest:
        # The page is made from the whole gateway, which is not installed with a worker alone.
        print(import_module("gateway.api.endpoints").compatibility_page(), end="")
        return 0
    if name in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0
    return command.complain(
        [
            f"config {' '.join(args)}: no such command; use `config show [--json]`, `config schema`, `config docs`, "
            "`config compatibility` or `config metrics`"
        ]
    )


def show(args: Sequence[str]) -> int:
    """Prints a line per setting, or one JSON object {setting: {value, source}}."""
    try:
        reading = sources.read(
            UpSettings, [arg for arg in args if arg != "--json"], prog="paddock config show", known=known_settings()
        )
    except sources.SettingsError as error:
        return command.complain(error.problems)
    for warning in reading.warnings:
        print(f"paddock: warning: {warning}", file=sys.stderr)
    values = {name: sources.masked(name, getattr(reading.settings, name)) for name in UpSettings.model_fields}
    if "--json" in args:
        print(
            json.dumps(
                {name: {"value": value, "source": reading.origins[name]} for name, value in values.items()}, indent=2
            )
        )
        return 0
    names, texts = max(map(len, values)), max(len(_shown(value)) for value in values.values())
    for name, value in values.items():
        print(f"{name.ljust(names)}  {_shown(value).ljust(texts)}  {reading.origins[name]}")
    return 0


def schema_text() -> str:
    return json.dumps(_clean(catalog.schema()), indent=2, ensure_ascii=False) + "\n"


def _clean(node: Any) -> Any:
    """Return the schema with docstrings at the margin: Python 3.13 removes their indentation, older ones keep it."""
    if isinstance(node, dict):
        return {name: _clean(value) for name, value in node.items()}
    if isinstance(node, list):
        return [_clean(value) for value in node]
    return inspect.cleandoc(node) if isinstance(node, str) else node


def _shown(value: object) -> str:
    return "-" if value in (None, "") else str(value)
